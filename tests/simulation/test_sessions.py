"""Sessions with an etcd that is silent, slow or another cluster: they end in time, and are closed in time."""

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
    from tests.simulation.simulated_cluster import SimCluster

KEY = Keys().node("e1")


async def started(client: EtcdClient, ttl: int) -> Session:
    session = Session(client, KEY, b"me", ttl)
    await session.start()
    return session


def cut_off(cluster: SimCluster) -> None:
    (link,) = cluster.network.links()
    cluster.network.block(link, EVERYTHING, EVERYTHING)


def test_a_session_is_lost_at_its_deadline_without_answers(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        session = await started(client, 10)
        cut_off(cluster)
        reason = await asyncio.wait_for(session.lost, 10.0)
        assert reason == "no renewal was acknowledged before the deadline"
        await session.close()

    cluster.run(work)


def test_a_session_is_lost_soon_after_the_machine_was_suspended(cluster: SimCluster) -> None:
    """The loop's timers do not run while the machine is suspended, but the session must be lost soon afterwards."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 60)
        cut_off(cluster)
        clock = source.get()
        awake = clock.boottime
        await asyncio.sleep(1.0)
        clock.boottime = lambda: awake() + 120.0  # type: ignore[method-assign]
        assert not session.alive
        await asyncio.wait_for(session.lost, 2.0)
        await session.close()

    cluster.run(work)


def test_a_session_is_closed_within_seconds_without_answers(cluster: SimCluster) -> None:
    """Stopping a daemon waits for the session; the lease expires later."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 60)
        cut_off(cluster)
        async with asyncio.timeout(15.0):
            await session.close()

    cluster.run(work)


def test_a_closed_session_leaves_no_node_key_although_etcd_is_slow(cluster: SimCluster) -> None:
    """Otherwise other executors would wait for its expiry."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 60)
        cluster.network.sending = lambda process, path, asked: 0.5 if path.endswith("/LeaseRevoke") else 0.0
        await session.close()
        assert await client.get(KEY) is None

    cluster.run(work)


def test_a_session_ends_after_an_answer_of_another_cluster(cluster: SimCluster) -> None:
    """The former cluster may still answer its renewals."""

    async def work(client: EtcdClient) -> None:
        session = await started(client, 10)
        with pytest.raises(ClusterChanged):
            client.transport.see(rpc.ResponseHeader(cluster_id=7, revision=1))
        reason = await asyncio.wait_for(session.lost, 30.0)
        assert "another cluster" in reason
        await session.close()

    cluster.run(work)
