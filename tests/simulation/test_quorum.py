"""An etcd cluster without a majority: it writes and expires nothing, and applies waiting requests later."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from distop.errors import EtcdUnavailable, OutcomeUnknown
from distop.protocol.txn import Get, Put, Txn, absent
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from tests.simulation.simulated_cluster import ADDRESSES, ELECTION, SimCluster
from tests.simulation.test_found_bugs import argument, small
from tests.simulator import Simulation
from tests.simulator.run import without_logs
from tests.simulator.scenario import Fault, Submission

if TYPE_CHECKING:
    pass

LEASE, TTL = 7, 5


def write(name: str) -> Txn:
    return Txn((absent(name),), (Put(name, b""),), (Get(name),))


def test_one_of_three_members_commits_nothing(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        cluster.stop(1, 2)
        before = cluster.etcd.revision
        with pytest.raises(OutcomeUnknown):
            await client.commit(write("a"), deadline=0.5)
        with pytest.raises(EtcdUnavailable):
            await asyncio.wait_for(client.get("a"), 60.0)
        with pytest.raises(EtcdUnavailable, match="no leader"):
            await client.commit(write("b"), deadline=0.5)  # refused by the member, so the outcome is known
        assert cluster.etcd.revision == before

    cluster.run(work)


def test_a_request_that_waited_for_a_majority_is_applied_late(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        cluster.stop(1, 2)
        with pytest.raises(OutcomeUnknown):
            await client.commit(write("a"), deadline=0.5)
        await asyncio.sleep(30.0)
        cluster.start(2)
        assert cluster.etcd.store.get("a") is None
        await asyncio.sleep(1.5 * ELECTION)
        assert cluster.etcd.store.get("a") is not None
        assert not (await client.commit(write("a"))).succeeded

    cluster.run(work)


def test_a_request_that_waited_at_a_stopped_member_is_lost(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        cluster.stop(1, 2)
        with pytest.raises(OutcomeUnknown):
            await client.commit(write("a"), deadline=0.5)
        cluster.stop(0)
        cluster.start(0, 1, 2)
        assert (await client.commit(write("a"))).succeeded

    cluster.run(work)


@pytest.mark.parametrize("back", [(1,), (1, 2)])
def test_leases_are_extended_by_the_first_new_majority(cluster: SimCluster, back: tuple[int, ...]) -> None:
    async def work(client: EtcdClient) -> None:
        await client.grant(TTL, LEASE)
        await client.commit(Txn((), (Put("held", b"", LEASE),)))
        cluster.stop(0, 1, 2)
        await asyncio.sleep(10.0 * TTL)
        cluster.start(0)
        await asyncio.sleep(10.0 * TTL)
        assert cluster.etcd.store.get("held") is not None
        begun = cluster.loop.now
        cluster.start(*back)
        await asyncio.sleep(1.5 * ELECTION)
        assert cluster.etcd.leases[LEASE].expires == begun + ELECTION + TTL
        await asyncio.sleep(TTL + 1.0)
        assert cluster.etcd.store.get("held") is None

    cluster.run(work)


def test_the_death_of_the_leader_takes_one_election(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await client.grant(TTL, LEASE)
        term = cluster.etcd.quorum.term
        async with EtcdClient(EtcdConfig(ADDRESSES[1:2])) as other:
            begun = cluster.loop.now
            cluster.stop(0)
            assert (await other.commit(write("a"))).succeeded
            assert cluster.loop.now >= begun + ELECTION
            assert (await other.status()).leader == cluster.members[1].id
        assert cluster.etcd.quorum.term == term + 1
        assert cluster.etcd.leases[LEASE].expires == begun + ELECTION + TTL

    cluster.run(work)


def test_the_stop_of_a_follower_causes_no_election(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        term = cluster.etcd.quorum.term
        cluster.stop(2)
        begun = cluster.loop.now
        assert (await client.commit(write("a"))).succeeded
        assert cluster.loop.now < begun + ELECTION
        assert cluster.etcd.quorum.term == term
        cluster.start(2)
        assert cluster.members[2].applied == cluster.etcd.revision

    cluster.run(work)


def test_streams_of_an_isolated_member_are_silent_and_then_end(cluster: SimCluster) -> None:
    """W8: an isolated member keeps its streams open for some election timeouts, and refuses new ones."""

    async def ends(client: EtcdClient, call: Any) -> float:
        with pytest.raises(grpc.aio.AioRpcError, match="no leader"):
            await call.read()
        return cluster.loop.now

    async def watch(client: EtcdClient) -> Any:
        call, _ = await client.transport.stream(wire.WATCH)
        await call.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=b"a")))
        return call

    async def work(client: EtcdClient) -> None:
        call = await watch(client)
        assert (await call.read()).created
        cluster.etcd.quorum.isolate(cluster.members[0])
        begun = cluster.loop.now
        async with EtcdClient(EtcdConfig(ADDRESSES[1:2])) as other:
            assert (await other.commit(write("a"))).succeeded
        assert await ends(client, call) >= begun + 4 * ELECTION
        refused = cluster.loop.now
        assert await ends(client, await watch(client)) < refused + ELECTION

    cluster.run(work)


@pytest.mark.parametrize("kind", ["member-killed", "quorum"])
@pytest.mark.parametrize("members", [1, 3])
def test_a_cluster_without_majority_writes_no_revision(kind: str, members: int) -> None:
    """The model expired sessions while no server ran that could have expired them."""
    down = Fault(kind, 1.5, 16.0, (0.0, 0.0, 0.0, 0.0))
    submission = Submission(0, 0.5, "check", "a", argument(1, 30, 0.3), None, "collect_all", ())
    scenario = replace(small(1, 2, submission, down), members=members)
    with without_logs():
        sim = Simulation(scenario)
        report = sim.run()
    during = [revision for at, revision, _, _ in sim.log if revision and 1.51 < at < 9.5]
    assert bool(during) == (kind == "member-killed" and members == 3), "revisions do not match the majority"
    assert report.breaches == []
    assert report.ended == 1
