"""What sessions survive: members of etcd stand still, one of three or all, for half a time to live and a whole one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from benchmarks.common import Row, say
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.session import Session, new_lease_id
from tests.support.etcd import EtcdCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.store.embedded import EmbeddedEtcd

SESSIONS = 6
"""At a time, with their renewals spread over the time between two of one."""
TRIALS = 2
"""Of each kind."""
STRUCK = ("a follower", "the leader", "all members")
SHARES = {"half of it": 0.5, "all of it": 1.0}
"""Of the time to live."""


def measure(ttl: int) -> Row:
    """One row: how many sessions went on, and of each kind of freeze how many."""
    logging.getLogger("distop.store").setLevel(logging.ERROR)  # that renewals are not answered is what is asked for
    parts, kept, of = [], 0, SESSIONS * TRIALS
    with EtcdCluster() as etcd:
        for who in STRUCK:
            for told, share in SHARES.items():
                found = sum(asyncio.run(_trial(etcd, who, ttl, share * ttl)) for _ in range(TRIALS))
                parts.append(f"{who}, {told}: {found} of {of} kept")
                kept += found
    say(f"surviving, TTL {ttl} s: " + "; ".join(parts))
    name = f"TTL {ttl} s: sessions that go on while etcd stands still, of {of * len(parts)}"
    return Row(name, float(kept), note="; ".join(parts))


async def _choose(etcd: EtcdCluster, who: str) -> Sequence[EmbeddedEtcd]:
    if who == "all members":
        return etcd.members
    leading = []
    for member in etcd.members:
        async with EtcdClient(EtcdConfig((member.endpoint,))) as client:
            status = await client.status()
            leading.append(status.leader == status.member_id)
    return [etcd.members[leading.index(who == "the leader")]]


async def _trial(etcd: EtcdCluster, who: str, ttl: int, seconds: float) -> int:
    """How many of the sessions are the same a time to live after these members stood still for so long: what comes of a
    member that goes on counts as well.
    """
    members = await _choose(etcd, who)
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
