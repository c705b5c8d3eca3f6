"""Requests and streams over links that are cut, blocked and unblocked: in the client, and in the model."""

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
from tests.simulator.network import RequestFault
from tests.simulator.server_links import EVERYTHING, PATIENCE

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from tests.simulation.simulated_cluster import SimCluster
    from tests.simulator.virtual_loop import Process


USER = {"username": "me", "password": "a secret"}


def write(name: str) -> Txn:
    return Txn((absent(name),), (Put(name, b"mine"),), (Get(name),))


@pytest.fixture
def denied(cluster: SimCluster) -> SimCluster:
    """A cluster that applies the first transaction but loses its answer, then refuses all while ``users.denied``."""
    users = cluster.etcd.users
    users.enabled = True
    seen: list[str] = []

    def request_fault(process: Process, path: str) -> RequestFault | None:
        if not path.endswith("/Txn") or seen:
            return None
        seen.append(path)
        return RequestFault("lost", silent=True, error=("UNAVAILABLE", "Socket closed"))

    def applied(process: Process, path: str, asked: object) -> None:
        users.denied = users.denied or path.endswith("/Txn")

    cluster.network.request_fault, cluster.network.applied = request_fault, applied
    return cluster


@pytest.mark.parametrize("tokens_end", [False, True])
def test_an_unknown_outcome_outlives_a_revoked_role(denied: SimCluster, tokens_end: bool) -> None:
    """A refusal says nothing about earlier copies of the transaction.

    After a refused repetition an executor dropped a claim that it had won, and reported that it was drained.
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
        assert found.kv is not None, "the first copy was not applied"

    denied.run(work, **USER)


def test_an_outcome_stays_unknown_if_all_repetitions_are_refused(denied: SimCluster) -> None:
    """The error names the missing rights, and a plain refusal has no cause."""

    async def work(client: EtcdClient) -> None:
        with pytest.raises(OutcomeUnknown, match=r"rejected its repetition: etcd denies the user 'me' .*distop access"):
            await client.commit(write("a"), deadline=5.0)
        with pytest.raises(PermissionDenied) as refused:
            await client.commit(write("b"), deadline=5.0)  # no copy was applied
        assert refused.value.__cause__ is None

    denied.run(work, **USER)


def test_missing_rights_are_logged_at_once_and_then_rarely(
    denied: SimCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the missing rights and the remedy from the first refusal on, but rarely."""

    async def work(client: EtcdClient) -> None:
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(client.commit(write("a"), until=lost))
        users = denied.etcd.users
        while users.refused < 70:
            await asyncio.sleep(0.1)
            assert logged() or users.refused < 2
        lost.set_result(None)
        with pytest.raises(OutcomeUnknown, match="denies the user 'me'"):
            await task

    def logged() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    with caplog.at_level(logging.WARNING, "distop"):
        denied.run(work, **USER)
    assert [record.levelname for record in logged()] == ["ERROR"] * 3
    for record in logged():
        message = record.getMessage()
        denied = "etcd denies the user 'me' permission for the transaction: "
        assert message.startswith(f"etcd rejected the transaction; retrying: {denied}")
        assert "distop access" in message


def test_a_late_copy_of_a_node_update_does_not_undo_later_ones(cluster: SimCluster) -> None:
    """A late copy of a node record must not restore an old offer."""
    sent: list[Any] = []
    key = Keys().node("e1")

    async def work(client: EtcdClient) -> None:
        session = Session(client, key, b"first", 10)
        await session.start()
        await session.update(b"second")
        late = sent[-1]
        await session.update(b"third")
        cluster.etcd.store.apply(late)
        node = await client.get(key)
        assert node is not None
        assert node.value == b"third"
        await session.close()

    def applied(process: Process, path: str, asked: object) -> None:
        if isinstance(asked, Txn):
            sent.append(asked)

    cluster.network.applied = applied
    cluster.run(work)


def test_overlapping_blocks_do_not_change_the_order_of_a_stream(cluster: SimCluster) -> None:
    """TCP delivers in order. The model let later events overtake, and a watch lost the older ones (W9)."""
    applied: list[str] = []

    def apply(batch: Batch) -> None:
        applied.extend(event.kv.key for event in batch.events)

    async def work(client: EtcdClient) -> None:
        network = cluster.network
        feed = Feed(client, "k", "l", apply)
        await feed.start()
        (link,) = network.links()
        names = [f"k{n}" for n in range(5)]
        blocks = []
        for number, name in enumerate(names):
            if number == 1:
                blocks.append(network.block(link, answers=("Watch",)))
            if number == 2:
                blocks.append(network.block(link, requests=("Lease",)))
            if number == 3:
                network.unblock(blocks[1:])
            if number == 4:
                network.unblock(blocks)
            await client.commit(Txn((), (Put(name, b""),)))
            if number == 0:
                await asyncio.sleep(1.0)  # until the watch is created
        await feed.reached(cluster.etcd.revision)
        assert applied == names
        await feed.close()

    cluster.run(work)


def test_a_blocked_watch_delivers_before_its_stream_ends(cluster: SimCluster) -> None:
    """In the model, the end of a stream overtook blocked events of its watch, which were lost."""

    async def work(client: EtcdClient) -> None:
        network = cluster.network
        stream, _ = await client.transport.stream(WATCH)
        await stream.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=b"k")))
        assert (await stream.read()).created
        (link,) = network.links()
        block = network.block(link, answers=("k",))
        await client.commit(Txn((), (Put("k", b""),)))
        (sent,) = link.streams
        sent.fail(None)
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(10.0)
        assert not reading.done()
        network.unblock([block])
        assert [event.kv.key for event in (await reading).events] == [b"k"]
        assert await stream.read() is grpc.aio.EOF

    cluster.run(work)


def test_overlapping_blocks_end_separately(cluster: SimCluster) -> None:
    """The end of the first block ended all of them."""

    async def work(client: EtcdClient) -> None:
        network = cluster.network
        await client.get("k")
        (link,) = network.links()
        refused = [network.block(link, refuses=True) for _ in range(2)]
        late = [network.block(link, slow={"Lease": seconds}) for seconds in (1.0, 2.0, 0.5)]
        network.unblock([refused[0], late[1]])
        with pytest.raises(RequestFailed, match="failed to connect"):
            await client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 5.0)
        assert link.slow == {"Lease": 1.0}
        network.unblock([refused[1], late[0], late[2]])
        await client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 5.0)
        assert link.slow == {}

    cluster.run(work)


def test_a_long_block_refuses_requests_after_the_loss_of_the_connection(cluster: SimCluster) -> None:
    """While nothing passes, attempts to connect fail, as with gRPC.

    The first request fails when its attempt to connect has timed out, later ones at once. After the block, requests
    pass when the current attempt ends. Before, the second request hung until its own time-out.
    """

    async def work(client: EtcdClient) -> None:
        network = cluster.network

        async def ask() -> tuple[str, float]:
            """The result of a request, and its duration in seconds."""
            began = cluster.loop.now
            try:
                await client.transport.unary(RANGE, rpc.RangeRequest(key=b"k"), 60.0)
            except RequestFailed as error:
                return error.failure.kind.name, cluster.loop.now - began
            return "answered", cluster.loop.now - began

        await ask()
        (link,) = network.links()
        block = network.block(link, EVERYTHING, EVERYTHING)
        fate, after = await ask()
        assert (fate, round(after)) == ("UNKNOWN", round(PATIENCE)), "the request was not sent"
        both = await asyncio.gather(ask(), ask())
        assert [(fate, round(after, 1)) for fate, after in both] == [("NOT_DONE", RECONNECT.least)] * 2
        fate, after = await ask()
        assert (fate, round(after, 1)) == ("NOT_DONE", 0.0)
        stream, _ = await client.transport.stream(WATCH)
        with pytest.raises(grpc.aio.AioRpcError, match="failed to connect to all addresses"):
            await stream.write(rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=b"k")))
        await asyncio.sleep(20.0)
        network.unblock([block])
        ended = cluster.loop.now
        while (await ask())[0] != "answered":
            assert cluster.loop.now < ended + RECONNECT.longest
            await asyncio.sleep(0.05)

    cluster.run(work)


def test_requests_that_wait_for_a_connection_are_sent_if_the_block_ends_in_time(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        network = cluster.network
        await client.get("k")
        (link,) = network.links()
        block = network.block(link, EVERYTHING, EVERYTHING)
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
        network.unblock([block])
        await asyncio.gather(opening, asking)
        assert (await stream.read()).created
        stream.cancel()

    cluster.run(work)
