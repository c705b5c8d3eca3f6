"""Sessions whose etcd is silent, slow or another one: they end in time, and are closed in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from distop.clock import source
from distop.errors import ClusterChanged
from distop.protocol.keys import Keys
from distop.store._proto import rpc_pb2 as rpc
from distop.store.session import Session
from tests.simulator.server_links import EVERYTHING

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from tests.simulation.worlds import World

KEY = Keys().node("e1")


async def started(client: EtcdClient, ttl: int) -> Session:
    session = Session(client, KEY, b"me", ttl)
    await session.start()
    return session


def cut_off(world: World) -> None:
    (link,) = world.network.links()
    world.network.hold(link, EVERYTHING, EVERYTHING)


def test_a_session_is_lost_at_its_deadline_though_nobody_answers(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        session = await started(client, 10)
        cut_off(world)
        reason = await asyncio.wait_for(session.lost, 10.0)
        assert reason == "no renewal was acknowledged before the deadline"
        await session.close()

    world.run(work)


def test_a_session_is_lost_soon_after_the_machine_was_suspended(world: World) -> None:
    """The loop's timers do not count meanwhile, and what runs under the session goes on until it is lost."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 60)
        cut_off(world)
        clock = source.get()
        awake = clock.boottime
        await asyncio.sleep(1.0)
        clock.boottime = lambda: awake() + 120.0  # type: ignore[method-assign]
        assert not session.alive
        await asyncio.wait_for(session.lost, 2.0)
        await session.close()

    world.run(work)


def test_a_session_is_closed_within_seconds_though_nobody_answers(world: World) -> None:
    """Whoever stops a daemon waits for it; the lease expires."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 60)
        cut_off(world)
        async with asyncio.timeout(15.0):
            await session.close()

    world.run(work)


def test_a_session_that_is_closed_leaves_no_node_key_behind_though_etcd_is_slow(world: World) -> None:
    """Others wait for its expiry otherwise."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 60)
        world.network.sending = lambda process, path, asked: 0.5 if path.endswith("/LeaseRevoke") else 0.0
        await session.close()
        assert await client.get(KEY) is None

    world.run(work)


def test_a_session_ends_once_another_cluster_was_seen(world: World) -> None:
    """Its renewals may still be answered by the former one."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 10)
        with pytest.raises(ClusterChanged):
            client.transport.see(rpc.ResponseHeader(cluster_id=7, revision=1))
        reason = await asyncio.wait_for(session.lost, 30.0)
        assert "another cluster" in reason
        await session.close()

    world.run(work)
