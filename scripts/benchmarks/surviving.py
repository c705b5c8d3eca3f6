"""What sessions survive: members of etcd stand still, one of three or all, for half a time to live and a whole one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from benchmarks.common import Row, say
from distop.store.client import EtcdClient
from distop.store.config import EtcdConfig
from distop.store.session import Session, new_lease_id
from tests.support.etcd import EtcdCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.store.embedded import EmbeddedEtcd

SESSIONS = 6
"""At a time, with their renewals spread over the time between two of one."""
SHARES = {"half of it": 0.5, "all of it": 1.0}
"""Of the time to live."""


def measure(ttl: int) -> Row:
    """One row: how many sessions went on, and of each kind of freeze how many."""
    logging.getLogger("distop.store").setLevel(logging.ERROR)  # that renewals are not answered is what is asked for
    with EtcdCluster() as etcd:
        found = {
            f"{what}, {told}": [
                asyncio.run(_trial(etcd, members, ttl, share * ttl)) for members in _struck(etcd, all_of_it)
            ]
            for what, all_of_it in (("one member", False), ("all members", True))
            for told, share in SHARES.items()
        }
    parts = [f"{what}: {sum(kept)} of {SESSIONS * len(kept)} kept" for what, kept in found.items()]
    total = SESSIONS * sum(len(kept) for kept in found.values())
    say(f"surviving, TTL {ttl} s: " + "; ".join(parts))
    name = f"TTL {ttl} s: sessions that go on while etcd stands still, of {total}"
    return Row(name, float(sum(sum(kept) for kept in found.values())), note="; ".join(parts))


def _struck(etcd: EtcdCluster, all_of_it: bool) -> list[Sequence[EmbeddedEtcd]]:
    """Each member alone, so that the leader is among them; or all at once."""
    return [etcd.members] if all_of_it else [[member] for member in etcd.members]


async def _trial(etcd: EtcdCluster, members: Sequence[EmbeddedEtcd], ttl: int, seconds: float) -> int:
    """How many of the sessions are the same a time to live after these members stood still for so long."""
    async with AsyncExitStack() as stack:
        sessions = []
        for number in range(SESSIONS):
            first = number % len(etcd.endpoints)
            endpoints = (*etcd.endpoints[first:], *etcd.endpoints[:first])
            client = await stack.enter_async_context(EtcdClient(EtcdConfig(endpoints)))
            session = Session(client, f"bench.session.{new_lease_id()}", b"{}", ttl)
            await session.start()
            stack.push_async_callback(session.close)
            sessions.append(session)
            await asyncio.sleep(ttl / 3 / SESSIONS)
        try:
            for member in members:
                member.pause()
            await asyncio.sleep(seconds)
        finally:
            for member in members:
                member.resume()
        await asyncio.sleep(ttl)
        return sum(session.alive for session in sessions)
