"""How soon a client hears of an operation's end, whatever becomes of its watch and of etcd meanwhile."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from distop.client.async_operation import Operation
from distop.errors import EtcdUnavailable, NotFound
from distop.protocol.keys import Keys
from distop.protocol.records import History, OperationRef, State
from distop.protocol.txn import Delete, Put, Txn
from distop.store.grpc_failures import Failure, Fate
from distop.store.transport import RequestFailed
from distop.store.watch import WatchStream
from tests.support.world import TIME

if TYPE_CHECKING:
    from distop.store.client import EtcdClient
    from tests.simulation.worlds import World
    from tests.simulator.virtual_loop import Process

KEYS, REF = Keys(), OperationRef("t", "noop", "", 1)


def now() -> float:
    return asyncio.get_running_loop().time()


async def begun(client: EtcdClient) -> asyncio.Task[Any]:
    """Wait for an operation that runs."""
    await client.commit(Txn((), (Put(KEYS.of(REF, "state"), b"running"),)))
    return asyncio.create_task(Operation(client, KEYS, REF).wait())


def ends(world: World) -> float:
    """Write the end of the operation; when."""
    before = world.etcd.revision
    record = History(str(REF), State.SUCCESS, TIME, TIME, 1, 1, 0).encode()
    world.etcd.store.apply(Txn((), (Put(KEYS.history(REF), record), Delete(KEYS.of(REF, "state")))))
    world.etcd._commit(before, "somebody")
    return world.loop.now


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch gets any event."""
    former = WatchStream.read

    async def read(self: WatchStream) -> Any:
        while (message := await former(self)) is not None and message.events:
            pass
        return message

    monkeypatch.setattr(WatchStream, "read", read)


def test_the_watch_tells_of_the_end_at_once(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(21.3)
        requests = world.network.requests
        assert requests < 20, "it polls every few seconds"
        written = ends(world)
        assert (await waiting).state == State.SUCCESS
        assert now() - written < 0.5

    world.run(work)


def test_a_poll_finds_an_end_that_no_watch_tells(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf(monkeypatch)

    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(21.3)
        written = ends(world)
        await waiting
        assert now() - written < 6.0

    world.run(work)


def test_an_end_just_after_the_watch_began_is_found_by_an_early_poll(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd serves a watch that was just created with those that are behind."""
    deaf(monkeypatch)
    opened: list[float] = []
    former = WatchStream.open

    async def opening(self: WatchStream, limit: float) -> None:
        await former(self, limit)
        opened.append(now())
        world.loop.world_at(now() + 0.03, lambda: ends(world))

    monkeypatch.setattr(WatchStream, "open", opening)

    async def work(client: EtcdClient) -> None:
        await (await begun(client))
        assert now() - opened[0] < 0.3

    world.run(work)


def test_an_outage_of_etcd_is_waited_out(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(1.0)
        requests = world.network.requests
        world.stop(0, 1, 2)
        await asyncio.sleep(30.0)
        assert world.network.requests - requests < 200, "it pauses between its tries"
        ends(world)
        world.start(0, 1, 2)
        back = now()
        await waiting
        assert now() - back < 15.0

    world.run(work)


def test_an_end_is_known_soon_after_a_short_outage_of_watches_though_an_earlier_one_was_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, out = WatchStream.open, [True]

    async def opening(self: WatchStream, limit: float) -> None:
        if out[0]:
            raise RequestFailed(Failure(Fate.NOT_DONE, "UNAVAILABLE", "no watches for now"))
        await former(self, limit)

    monkeypatch.setattr(WatchStream, "open", opening)

    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(30.0)
        out[0] = False
        await asyncio.sleep(10.0)
        out[0] = True
        world.end_watches("etcdserver: no leader")
        await asyncio.sleep(0.3)
        ends(world)
        out[0] = False
        async with asyncio.timeout(0.6):
            await waiting

    world.run(work)


def test_the_log_reports_that_etcd_answers_again_though_reads_are_slow(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    watched: list[float] = []

    def slow(process: Process, path: str, asked: object) -> float:
        if path.endswith("/Watch"):
            watched.append(now())
        return 4.0 if path.endswith("/Txn") else 0.0

    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(1.0)
        world.stop(0, 1, 2)
        await asyncio.sleep(30.0)
        assert "Waiting for etcd" in caplog.text
        world.network.sending = slow
        world.start(0, 1, 2)
        async with asyncio.timeout(30.0):
            while "Connected to etcd again" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert now() - watched[-1] < 1.0
        ends(world)
        await waiting

    with caplog.at_level(logging.WARNING, "distop"):
        world.run(work)


def test_who_waits_is_told_when_the_client_is_closed(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        waiting = await begun(client)
        await asyncio.sleep(1.0)
        await client.close()
        async with asyncio.timeout(30.0):
            with pytest.raises(EtcdUnavailable, match="closed"):
                await waiting

    world.run(work)


def test_who_watches_is_told_when_the_client_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = "distop.client.async_operation."

    async def work(client: EtcdClient) -> None:
        waits = asyncio.Event()

        async def unanswered(*_: Any) -> None:
            if waits.is_set():
                await asyncio.sleep(0.1)
            raise EtcdUnavailable("etcd does not answer")

        async def waited(self: Operation) -> None:
            waits.set()
            raise EtcdUnavailable("the etcd client is closed")

        monkeypatch.setattr(operation + "status", unanswered)
        monkeypatch.setattr(Operation, "wait", waited)
        async with asyncio.timeout(30.0):
            with pytest.raises(EtcdUnavailable, match="closed"):
                _ = [status async for status in Operation(client, KEYS, REF).watch()]

    world.run(work)


def test_what_never_was_is_not_waited_for(world: World) -> None:
    async def work(client: EtcdClient) -> None:
        with pytest.raises(NotFound):
            await Operation(client, KEYS, REF).wait()

    world.run(work)
