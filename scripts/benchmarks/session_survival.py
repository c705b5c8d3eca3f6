"""Session survival: how many sessions survive while one or all members of etcd are frozen.

Members of a cluster of three are frozen for half a time to live and for a whole one.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from benchmarks.common import Row, report_progress
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from distop.store.session import Session, new_lease_id
from tests.support.etcd import EtcdCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.store.embedded import EmbeddedEtcd

SESSIONS = 6
"""Concurrent sessions; their renewals are spread evenly over the renewal interval."""
TRIALS = 2
"""Trials of each kind."""
FROZEN = ("a follower", "the leader", "all members")
DURATIONS = {"half the TTL": 0.5, "the TTL": 1.0}
"""How long members are frozen, as a fraction of the time to live."""


def measure(ttl: int) -> Row:
    """One row: the number of sessions that survived, and in its note the number for each kind of freeze."""
    logging.getLogger("distop.store").setLevel(logging.ERROR)  # failed renewals are expected here
    parts, survived, sessions = [], 0, SESSIONS * TRIALS
    with EtcdCluster() as etcd:
        for who in FROZEN:
            for duration, share in DURATIONS.items():
                count = sum(asyncio.run(_trial(etcd, who, ttl, share * ttl)) for _ in range(TRIALS))
                parts.append(f"{who} for {duration}: {count} of {sessions}")
                survived += count
    report_progress(f"session survival, TTL {ttl} s: " + "; ".join(parts))
    name = f"TTL {ttl} s: sessions that survive frozen etcd members, of {sessions * len(parts)}"
    return Row(name, float(survived), note="; ".join(parts))


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
    """The number of sessions alive one time to live after the freeze: losses after the members resume count, too."""
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
