"""A cluster without a majority: nothing happens, nothing expires, and what waited is done once there is one again."""

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
from tests.simulation.test_scenarios import argument, small
from tests.simulation.worlds import ADDRESSES, ELECTION, World
from tests.simulator import Simulation
from tests.simulator.run import quietly
from tests.simulator.scenario import Fault, Wish

if TYPE_CHECKING:
    pass

LEASE, TTL = 7, 5


def write(name: str) -> Txn:
    return Txn((absent(name),), (Put(name, b""),), (Get(name),))


def test_one_of_three_decides_nothing(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        world.stop(1, 2)
        before = world.etcd.revision
        with pytest.raises(OutcomeUnknown):
            await client.commit(write("a"), deadline=0.5)
        with pytest.raises(EtcdUnavailable):
            await asyncio.wait_for(client.get("a"), 60.0)
        with pytest.raises(EtcdUnavailable, match="no leader"):
            await client.commit(write("b"), deadline=0.5)  # a member that knows that says so: nothing is unknown
        assert world.etcd.revision == before

    world.run(work)


def test_what_waited_for_a_majority_is_done_late(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        world.stop(1, 2)
        with pytest.raises(OutcomeUnknown):
            await client.commit(write("a"), deadline=0.5)
        await asyncio.sleep(30.0)
        world.start(2)
        assert world.etcd.store.get("a") is None
        await asyncio.sleep(1.5 * ELECTION)
        assert world.etcd.store.get("a") is not None
        assert not (await client.commit(write("a"))).succeeded

    world.run(work)


def test_what_waited_at_a_member_that_ends_is_lost(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        world.stop(1, 2)
        with pytest.raises(OutcomeUnknown):
            await client.commit(write("a"), deadline=0.5)
        world.stop(0)
        world.start(0, 1, 2)
        assert (await client.commit(write("a"))).succeeded

    world.run(work)


@pytest.mark.parametrize("back", [(1,), (1, 2)])
def test_leases_are_extended_by_the_first_majority_that_is_back(world: World, back: tuple[int, ...]) -> None:
    async def work(client: EtcdClient) -> None:
        await client.grant(TTL, LEASE)
        await client.commit(Txn((), (Put("held", b"", LEASE),)))
        world.stop(0, 1, 2)
        await asyncio.sleep(10.0 * TTL)
        world.start(0)
        await asyncio.sleep(10.0 * TTL)
        assert world.etcd.store.get("held") is not None
        begun = world.loop.now
        world.start(*back)
        await asyncio.sleep(1.5 * ELECTION)
        assert world.etcd.leases[LEASE].expires == begun + ELECTION + TTL
        await asyncio.sleep(TTL + 1.0)
        assert world.etcd.store.get("held") is None

    world.run(work)


def test_the_death_of_the_leader_costs_an_election(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        await client.grant(TTL, LEASE)
        term = world.etcd.quorum.term
        async with EtcdClient(EtcdConfig(ADDRESSES[1:2])) as other:
            begun = world.loop.now
            world.stop(0)
            assert (await other.commit(write("a"))).succeeded
            assert world.loop.now >= begun + ELECTION
            assert (await other.status()).leader == world.members[1].id
        assert world.etcd.quorum.term == term + 1
        assert world.etcd.leases[LEASE].expires == begun + ELECTION + TTL

    world.run(work)


def test_a_follower_is_missed_by_nobody(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        term = world.etcd.quorum.term
        world.stop(2)
        begun = world.loop.now
        assert (await client.commit(write("a"))).succeeded
        assert world.loop.now < begun + ELECTION
        assert world.etcd.quorum.term == term
        world.start(2)
        assert world.members[2].applied == world.etcd.revision

    world.run(work)


def test_streams_go_on_in_silence_and_then_end(world: World) -> None:
    """W8: a member that was cut off keeps its streams for some election timeouts, and takes no new ones."""

    async def ends(client: EtcdClient, call: Any) -> float:
        with pytest.raises(grpc.aio.AioRpcError, match="no leader"):
            await call.read()
        return world.loop.now

    async def watch(client: EtcdClient) -> Any:
        call, _ = await client.transport.stream(wire.WATCH)
        await call.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=b"a")))
        return call

    async def work(client: EtcdClient) -> None:
        call = await watch(client)
        assert (await call.read()).created
        world.etcd.quorum.part(world.members[0])
        begun = world.loop.now
        async with EtcdClient(EtcdConfig(ADDRESSES[1:2])) as other:
            assert (await other.commit(write("a"))).succeeded
        assert await ends(client, call) >= begun + 4 * ELECTION
        refused = world.loop.now
        assert await ends(client, await watch(client)) < refused + ELECTION

    world.run(work)


@pytest.mark.parametrize("kind", ["member-killed", "quorum"])
@pytest.mark.parametrize("members", [1, 3])
def test_no_revision_is_of_a_cluster_that_is_down(kind: str, members: int) -> None:
    """Sessions ran out by the model's own doing while no server ran that could have ended them."""
    down = Fault(kind, 1.5, 16.0, (0.0, 0.0, 0.0, 0.0))
    wish = Wish(0, 0.5, "check", "a", argument(1, 30, 0.3), None, "collect_all", ())
    wanted = replace(small(1, 2, wish, down), members=members)
    with quietly():
        sim = Simulation(wanted)
        report = sim.run()
    during = [revision for at, revision, _, _ in sim.log if revision and 1.51 < at < 9.5]
    assert bool(during) == (kind == "member-killed" and members == 3), "only one of three was missing"
    assert report.breaches == []
    assert report.ended == 1
