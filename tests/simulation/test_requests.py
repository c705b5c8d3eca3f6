"""What becomes of requests and of streams whose ways are cut, held and let go: in the client, and in the model."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from distop.errors import OutcomeUnknown, PermissionDenied
from distop.protocol.keys import Keys
from distop.protocol.txn import Get, GetResult, Put, Txn, absent
from distop.store._proto import rpc_pb2 as rpc
from distop.store.session import Session
from distop.store.transport import RANGE, RECONNECT, WATCH, RequestFailed
from distop.store.watch import Batch, Feed
from tests.simulator.network import Fate
from tests.simulator.server_links import EVERYTHING, PATIENCE

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from tests.simulation.worlds import World
    from tests.simulator.virtual_loop import Process


USER = {"username": "me", "password": "a secret"}


def write(name: str) -> Txn:
    return Txn((absent(name),), (Put(name, b"mine"),), (Get(name),))


@pytest.fixture
def denied(world: World) -> World:
    """The first transaction is applied and its answer lost; all after it are refused, until ``users.denied`` ends."""
    users = world.etcd.users
    users.enabled = True
    seen: list[str] = []

    def fate(process: Process, path: str) -> Fate | None:
        if not path.endswith("/Txn") or seen:
            return None
        seen.append(path)
        return Fate("lost", silent=True, error=("UNAVAILABLE", "Socket closed"))

    def applied(process: Process, path: str, asked: object) -> None:
        users.denied = users.denied or path.endswith("/Txn")

    world.network.fate, world.network.applied = fate, applied
    return world


@pytest.mark.parametrize("tokens_end", [False, True])
def test_an_unknown_outcome_outlives_a_role_that_is_taken_away(denied: World, tokens_end: bool) -> None:
    """The repetition was refused, and the session forgot a claim that it had won: who is drained was busy. A refusal
    answers only for the copy that was refused.
    """

    async def work(client: EtcdClient) -> None:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(client.commit(write("a"), until=lost))
        await asyncio.sleep(20.0)
        assert not task.done()
        assert denied.etcd.users.refused > 2
        if tokens_end:
            denied.etcd.users.end_tokens()
            await asyncio.sleep(20.0)
        denied.network.applied = lambda process, path, asked: None
        denied.etcd.users.denied = False
        result = await task
        assert (result.succeeded, result.repeated) == (False, True)
        (found,) = result.responses
        assert isinstance(found, GetResult)
        assert found.kv is not None, "it finds its own first copy"

    denied.run(work, **USER)


def test_what_is_refused_to_the_end_stays_unknown(denied: World) -> None:
    """It said that etcd did not answer, and not which rights are missing; and a plain refusal was its own cause."""

    async def work(client: EtcdClient) -> None:
        with pytest.raises(OutcomeUnknown, match=r"rejected its repetition: etcd denies the user 'me' .*distop access"):
            await client.commit(write("a"), deadline=5.0)
        with pytest.raises(PermissionDenied) as refused:
            await client.commit(write("b"), deadline=5.0)  # no copy of this one may have been applied
        assert refused.value.__cause__ is None

    denied.run(work, **USER)


def test_rights_that_are_missing_are_named_at_once_and_then_seldom(
    denied: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told from the fourth time on, as an etcd that does not answer, and without what is to be done."""

    async def work(client: EtcdClient) -> None:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(client.commit(write("a"), until=lost))
        users = denied.etcd.users
        while users.refused < 70:
            await asyncio.sleep(0.1)
            assert told() or users.refused < 2
        lost.set_result(None)
        with pytest.raises(OutcomeUnknown, match="denies the user 'me'"):
            await task

    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    with caplog.at_level(logging.WARNING, "distop"):
        denied.run(work, **USER)
    assert [record.levelname for record in told()] == ["ERROR"] * 3
    for record in told():
        said = record.getMessage()
        denied = "etcd denies the user 'me' permission for the transaction: "
        assert said.startswith(f"etcd rejected the transaction; retrying: {denied}")
        assert "distop access" in said


def test_a_late_copy_of_a_node_update_does_not_undo_later_ones(world: World) -> None:
    """A late copy of a node record must not restore an old offer."""
    sent: list[Any] = []
    key = Keys().node("e1")

    async def work(client: EtcdClient) -> None:
        session = Session(client, key, b"first", 10)
        await session.start()
        await session.update(b"second")
        late = sent[-1]
        await session.update(b"third")
        world.etcd.store.apply(late)
        node = await client.get(key)
        assert node is not None
        assert node.value == b"third"
        await session.close()

    def applied(process: Process, path: str, asked: object) -> None:
        if isinstance(asked, Txn):
            sent.append(asked)

    world.network.applied = applied
    world.run(work)


def test_holds_that_overlap_do_not_change_the_order_of_a_stream(world: World) -> None:
    """What TCP repeats comes before what was sent later. The model let later events overtake, and a watch that drops
    what it is past (W9) lost the earlier ones.
    """
    applied: list[str] = []

    def apply(batch: Batch) -> None:
        applied.extend(event.kv.key for event in batch.events)

    async def work(client: EtcdClient) -> None:
        network = world.network
        feed = Feed(client, "k", "l", apply)
        await feed.start()
        (link,) = network.links()
        names = [f"k{n}" for n in range(5)]
        holds = []
        for number, name in enumerate(names):
            if number == 1:
                holds.append(network.hold(link, muted=("Watch",)))
            if number == 2:
                holds.append(network.hold(link, held=("Lease",)))
            if number == 3:
                network.release(holds[1:])
            if number == 4:
                network.release(holds)
            await client.commit(Txn((), (Put(name, b""),)))
            if number == 0:
                await asyncio.sleep(1.0)  # until the watch has begun
        await feed.reached(world.etcd.revision)
        assert applied == names
        await feed.close()

    world.run(work)


def test_a_held_watch_delivers_before_its_stream_ends(world: World) -> None:
    """The end of a stream overtook what was held back of one of its watches, and that never came."""

    async def work(client: EtcdClient) -> None:
        network = world.network
        stream, _ = await client.transport.stream(WATCH)
        await stream.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=b"k")))
        assert (await stream.read()).created
        (link,) = network.links()
        hold = network.hold(link, muted=("k",))
        await client.commit(Txn((), (Put("k", b""),)))
        (sent,) = link.streams
        sent.fail(None)
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(10.0)
        assert not reading.done()
        network.release([hold])
        assert [event.kv.key for event in (await reading).events] == [b"k"]
        assert await stream.read() is grpc.aio.EOF

    world.run(work)


def test_windows_that_overlap_end_each_for_itself(world: World) -> None:
    """The first of two that ended let everything in, and made all of it fast."""

    async def work(client: EtcdClient) -> None:
        network = world.network
        await client.get("k")
        (link,) = network.links()
        refused = [network.hold(link, refuses=True) for _ in range(2)]
        late = [network.hold(link, slow={"Lease": seconds}) for seconds in (1.0, 2.0, 0.5)]
        network.release([refused[0], late[1]])
        with pytest.raises(RequestFailed, match="failed to connect"):
            await client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 5.0)
        assert link.slow == {"Lease": 1.0}
        network.release([refused[1], late[0], late[2]])
        await client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 5.0)
        assert link.slow == {}

    world.run(work)


def test_a_hole_that_lasts_refuses_what_comes_after_the_connection(world: World) -> None:
    """The second request in a hole hung for as long as its client let it: no attempt to connect ever failed. Now the
    first one fails when its attempt to connect has timed out, others at once, and the way is open again when the
    attempt ends that is under way at the hole's end.
    """

    async def work(client: EtcdClient) -> None:
        network = world.network

        async def ask() -> tuple[str, float]:
            """What a request ends by, and after how long."""
            began = world.loop.now
            try:
                await client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 60.0)
            except RequestFailed as error:
                return error.failure.fate.name, world.loop.now - began
            return "answered", world.loop.now - began

        await ask()
        (link,) = network.links()
        hold = network.hold(link, EVERYTHING, EVERYTHING)
        fate, after = await ask()
        assert (fate, round(after)) == ("UNKNOWN", round(PATIENCE)), "it was sent"
        both = await asyncio.gather(ask(), ask())
        assert [(fate, round(after, 1)) for fate, after in both] == [("NOT_DONE", RECONNECT.least)] * 2
        fate, after = await ask()
        assert (fate, round(after, 1)) == ("NOT_DONE", 0.0)
        stream, _ = await client.transport.stream(WATCH)
        with pytest.raises(grpc.aio.AioRpcError, match="failed to connect to all addresses"):
            await stream.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=b"k")))
        await asyncio.sleep(20.0)
        network.release([hold])
        ended = world.loop.now
        while (await ask())[0] != "answered":
            assert world.loop.now < ended + RECONNECT.longest
            await asyncio.sleep(0.05)

    world.run(work)


def test_what_waits_for_a_connection_is_sent_where_the_hole_ends_in_time(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        network = world.network
        await client.get("k")
        (link,) = network.links()
        hold = network.hold(link, EVERYTHING, EVERYTHING)
        network.cut(link)
        stream, _ = await client.transport.stream(WATCH)
        created = rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=b"k"))
        opening = asyncio.ensure_future(stream.write(created))
        asking = asyncio.ensure_future(client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 5.0))
        given_up = asyncio.ensure_future(client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 0.2))
        await asyncio.sleep(RECONNECT.least / 2)
        assert not opening.done()
        assert not asking.done()
        with pytest.raises(RequestFailed, match="Deadline"):
            await given_up
        network.release([hold])
        await asyncio.gather(opening, asking)
        assert (await stream.read()).created
        stream.cancel()

    world.run(work)
