"""How soon ``Operation.wait`` returns after the end, under faults of its watch and of etcd."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from distop.client.async_operation import Operation
from distop.client.direct_backend import DirectBackend
from distop.errors import EtcdUnavailable, NotFound
from distop.protocol.keys import Keys
from distop.protocol.records import History, OperationRef, State
from distop.protocol.txn import Delete, Put, Txn
from distop.store.grpc_failures import Failure, FailureKind
from distop.store.transport import RequestFailed
from distop.store.watch import WatchStream
from tests.support.world import TIME

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from tests.simulation.simulated_cluster import SimCluster
    from tests.simulator.virtual_loop import Process

KEYS, REF = Keys(), OperationRef("t", "noop", "", 1)


def now() -> float:
    return asyncio.get_running_loop().time()


async def begun(client: EtcdClient) -> asyncio.Task[Any]:
    """Start a task that waits for a running operation."""
    await client.commit(Txn((), (Put(KEYS.of(REF, "state"), b"running"),)))
    return asyncio.create_task(Operation(DirectBackend(client, KEYS), REF).wait())


def ends(cluster: SimCluster) -> float:
    """Write the end of the operation; returns the time."""
    before = cluster.etcd.revision
    record = History(str(REF), State.SUCCESS, TIME, TIME, 1, 1, 0).encode()
    cluster.etcd.store.apply(Txn((), (Put(KEYS.history(REF), record), Delete(KEYS.of(REF, "state")))))
    cluster.etcd._commit(before, "somebody")
    return cluster.loop.now


def drop_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop all events of all watches."""
    former = WatchStream.read

    async def read(self: WatchStream) -> Any:
        while (message := await former(self)) is not None and message.events:
            pass
        return message

    monkeypatch.setattr(WatchStream, "read", read)


def test_the_watch_delivers_the_end_at_once(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(21.3)
        requests = cluster.network.requests
        assert requests < 20, "too many polls"
        written = ends(cluster)
        assert (await waiting).state == State.SUCCESS
        assert now() - written < 0.5

    cluster.run(work)


def test_a_poll_finds_an_end_that_the_watch_misses(cluster: SimCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_events(monkeypatch)

    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(21.3)
        written = ends(cluster)
        await waiting
        assert now() - written < 6.0

    cluster.run(work)


def test_an_early_poll_finds_an_end_just_after_the_watch_was_created(
    cluster: SimCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd serves a new watch with those that are behind, so its first event may be late."""
    drop_events(monkeypatch)
    opened: list[float] = []
    former = WatchStream.open

    async def opening(self: WatchStream, limit: float) -> None:
        await former(self, limit)
        opened.append(now())
        cluster.loop.world_at(now() + 0.03, lambda: ends(cluster))

    monkeypatch.setattr(WatchStream, "open", opening)

    async def work(client: EtcdClient) -> None:
        await (await begun(client))
        assert now() - opened[0] < 0.3

    cluster.run(work)


def test_wait_survives_an_outage_of_etcd(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(1.0)
        requests = cluster.network.requests
        cluster.stop(0, 1, 2)
        await asyncio.sleep(30.0)
        assert cluster.network.requests - requests < 200, "too many retries"
        ends(cluster)
        cluster.start(0, 1, 2)
        back = now()
        await waiting
        assert now() - back < 15.0

    cluster.run(work)


def test_a_short_outage_of_watches_delays_the_end_little_even_after_a_long_one(
    cluster: SimCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, out = WatchStream.open, [True]

    async def opening(self: WatchStream, limit: float) -> None:
        if out[0]:
            raise RequestFailed(Failure(FailureKind.NOT_DONE, "UNAVAILABLE", "no watches for now"))
        await former(self, limit)

    monkeypatch.setattr(WatchStream, "open", opening)

    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(30.0)
        out[0] = False
        await asyncio.sleep(10.0)
        out[0] = True
        cluster.end_watches("etcdserver: no leader")
        await asyncio.sleep(0.3)
        ends(cluster)
        out[0] = False
        async with asyncio.timeout(0.6):
            await waiting

    cluster.run(work)


def test_the_log_reports_that_etcd_answers_again_though_reads_are_slow(
    cluster: SimCluster, caplog: pytest.LogCaptureFixture
) -> None:
    watched: list[float] = []

    def slow(process: Process, path: str, asked: object) -> float:
        if path.endswith("/Watch"):
            watched.append(now())
        return 4.0 if path.endswith("/Txn") else 0.0

    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(1.0)
        cluster.stop(0, 1, 2)
        await asyncio.sleep(30.0)
        assert "Waiting for etcd" in caplog.text
        cluster.network.sending = slow
        cluster.start(0, 1, 2)
        async with asyncio.timeout(30.0):
            while "Connected to etcd again" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert now() - watched[-1] < 1.0
        ends(cluster)
        await waiting

    with caplog.at_level(logging.WARNING, "distop"):
        cluster.run(work)


def test_wait_fails_when_the_client_is_closed(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(1.0)
        await client.close()
        async with asyncio.timeout(30.0):
            with pytest.raises(EtcdUnavailable, match="closed"):
                await waiting

    cluster.run(work)


def test_watch_fails_when_the_client_is_closed(cluster: SimCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = "distop.client.direct_backend."

    async def work(client: EtcdClient) -> None:
        waits = asyncio.Event()

        async def unanswered(*_: Any) -> None:
            if waits.is_set():
                await asyncio.sleep(0.1)
            raise EtcdUnavailable("etcd does not answer")

        async def waited(self: DirectBackend, ref: OperationRef) -> None:
            waits.set()
            raise EtcdUnavailable("the etcd client is closed")

        monkeypatch.setattr(backend + "status", unanswered)
        monkeypatch.setattr(DirectBackend, "end", waited)
        async with asyncio.timeout(30.0):
            with pytest.raises(EtcdUnavailable, match="closed"):
                _ = [status async for status in Operation(DirectBackend(client, KEYS), REF).watch()]

    cluster.run(work)


def test_wait_for_an_unknown_operation_fails(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        with pytest.raises(NotFound):
            await Operation(DirectBackend(client, KEYS), REF).wait()

    cluster.run(work)
