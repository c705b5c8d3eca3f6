"""The watches of a service's callers, in virtual time: cursors, lost events, compaction, and what callers share."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import EtcdUnavailable, NotFound, ServiceUnavailable
from distop.protocol.keys import Keys
from distop.protocol.records import History, OperationRef, State
from distop.protocol.txn import Delete, Put, Txn
from distop.server import operation_watches
from distop.server.operation_watches import LINGER, REFRESH, OperationWatches
from tests.simulation.test_operation_wait import drop_events
from tests.support.etcd import compacted
from tests.support.world import TIME

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from distop.store.client import EtcdClient
    from distop.v1 import operations_pb2
    from tests.simulation.simulated_cluster import SimCluster

KEYS, REF = Keys(), OperationRef("t", "noop", "", 1)
OTHER = OperationRef("t", "noop", "", 2)
RECORD = History(str(REF), State.SUCCESS, TIME, TIME, 1, 1, 0).encode()


async def write(client: EtcdClient, state: str, ref: OperationRef = REF) -> int:
    """Write the state of an operation; returns the revision."""
    return (await client.commit(Txn((), (Put(KEYS.of(ref, "state"), state.encode()),)))).revision


async def end(client: EtcdClient) -> int:
    """Write the end of the operation; returns the revision."""
    done = Txn((), (Put(KEYS.history(REF), RECORD), Delete(KEYS.of(REF, "state"))))
    return (await client.commit(done)).revision


class Caller:
    """A caller that watches the operation. ``states``: what it has received."""

    def __init__(self, watches: OperationWatches, revision: int = 0) -> None:
        self.states: list[str] = []
        self.revision = revision
        self._watches = watches
        self._received = asyncio.Event()
        self.task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        async with aclosing(self._watches.watch(REF, self.revision)) as responses:
            async for one in responses:
                self.states.append(one.operation.state)
                self.revision = one.revision
                self._received.set()

    async def until(self, *states: str) -> None:
        async with asyncio.timeout(60.0):
            while self.states != [*states]:
                self._received.clear()
                await self._received.wait()

    async def leave(self) -> int:
        """Disconnect; returns the cursor."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        return self.revision


async def settled() -> None:
    """Give a response time to arrive that must not come."""
    await asyncio.sleep(3 * REFRESH)


def test_a_watch_yields_the_status_now_each_change_and_the_end(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        caller = Caller(watches)
        await caller.until("running")
        await settled()
        began = asyncio.get_running_loop().time()
        await write(client, "paused")
        await caller.until("running", "paused")
        await write(client, "running", OTHER)
        ended = await end(client)
        await caller.task
        assert caller.states == ["running", "paused", "success"]
        assert asyncio.get_running_loop().time() - began < 0.5, "at once, not at the next refresh"
        assert caller.revision == ended
        await watches.close()

    cluster.run(work)


def test_callers_share_the_readings_of_an_operation(cluster: SimCluster) -> None:
    async def requests_of(client: EtcdClient, callers: int) -> int:
        watches = OperationWatches(client, KEYS)
        await write(client, "running")
        before = cluster.network.requests
        found = [Caller(watches) for _ in range(callers)]
        for one in found:
            await one.until("running")
        await write(client, "paused")
        for one in found:
            await one.until("running", "paused")
        for one in found:
            await one.leave()
        await watches.close()
        return cluster.network.requests - before

    async def work(client: EtcdClient) -> None:
        alone, many = await requests_of(client, 1), await requests_of(client, 200)
        assert many <= 2 * alone

    cluster.run(work)


def test_a_cursor_goes_on_at_another_service_with_nothing_missed_or_doubled(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        first, second = OperationWatches(client, KEYS), OperationWatches(client, KEYS)
        caller = Caller(first)
        await caller.until("running")
        cursor = await caller.leave()
        again = Caller(second, cursor)
        await settled()
        assert again.states == [], "the caller has this status"
        await write(client, "paused")
        await again.until("paused")
        cursor = await again.leave()
        await write(client, "running")  # while it is away
        third = Caller(first, cursor)
        await third.until("running")
        cursor = await third.leave()
        await end(client)
        fourth = Caller(second, cursor)
        await fourth.task
        assert fourth.states == ["success"]
        fifth = Caller(first, fourth.revision)
        await fifth.task
        assert fifth.states == [], "it has the end, too"
        for one in (first, second):
            await one.close()

    cluster.run(work)


@pytest.mark.parametrize("kind", ["compacted", "of the future"])
def test_a_cursor_that_etcd_does_not_have_gets_the_status_now(cluster: SimCluster, kind: str) -> None:
    async def work(client: EtcdClient) -> None:
        cursor = await write(client, "running")
        current = await write(client, "paused")
        if kind == "compacted":
            await compacted(client, current)
        else:
            cursor = current + 1_000  # of another etcd, or of one that was restored
        watches = OperationWatches(client, KEYS)
        caller = Caller(watches, cursor)
        await caller.until("paused")
        await write(client, "running")
        await caller.until("paused", "running")
        await caller.leave()
        await watches.close()

    cluster.run(work)


def test_changes_are_found_without_events(cluster: SimCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_events(monkeypatch)

    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        caller = Caller(watches)
        await caller.until("running")
        await write(client, "paused")
        await caller.until("running", "paused")
        await end(client)
        await caller.task
        await watches.close()

    cluster.run(work)


def test_a_slow_caller_gets_the_newest_status_and_nothing_is_queued(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        slow: AsyncGenerator[operations_pb2.WatchResponse, None] = watches.watch(REF, 0)
        quick = Caller(watches)
        assert (await anext(slow)).operation.state == "running"
        await quick.until("running")
        seen = ["running"]
        for state in ("paused", "running") * 5:
            await write(client, state)
            seen.append(state)
            await quick.until(*seen)
        await write(client, "cancelling")
        await quick.until(*seen, "cancelling")
        assert (await anext(slow)).operation.state == "cancelling"
        await slow.aclose()
        await quick.leave()
        await watches.close()

    cluster.run(work)


def test_waits_end_with_the_operation(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        with pytest.raises(NotFound):
            await watches.ends.wait(OTHER)
        before = cluster.network.requests
        waits = [asyncio.create_task(watches.ends.wait(REF)) for _ in range(200)]
        await settled()
        assert cluster.network.requests - before < 20, "one reading for all of them"
        began = asyncio.get_running_loop().time()
        await end(client)
        found = await asyncio.gather(*waits)
        assert asyncio.get_running_loop().time() - began < 0.5
        assert {one.state for one in found} == {"success"}
        assert (await watches.ends.wait(REF)).state == "success", "it had ended before"
        await watches.close()

    cluster.run(work)


def test_an_end_that_the_watch_has_missed_is_found_by_the_next_listing(
    cluster: SimCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a compaction: the watch cannot resume."""
    drop_events(monkeypatch)

    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        waiting = asyncio.create_task(watches.ends.wait(REF))
        await settled()
        await end(client)
        await settled()
        assert not waiting.done(), "the event was delivered"
        feed = watches.ends._feed._feed
        assert feed is not None
        await feed.relist()
        assert (await waiting).state == "success"
        await watches.close()

    cluster.run(work)


def test_callers_that_leave_stop_their_work(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        caller = Caller(watches)
        await caller.until("running")
        waiting = asyncio.create_task(watches.ends.wait(REF))
        await settled()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await caller.leave()
        assert (watches._watched, watches.ends._ends) == ({}, {})
        await asyncio.sleep(LINGER + 1.0)
        assert (watches._feed._feed, watches.ends._feed._feed) == (None, None), "the watches of etcd are open"
        before = cluster.network.requests
        await asyncio.sleep(60.0)
        assert cluster.network.requests - before < 10
        again = Caller(watches)
        await again.until("running")
        await again.leave()
        await watches.close()

    cluster.run(work)


def test_watches_end_when_the_service_stops_and_waits_go_on(cluster: SimCluster) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        caller, waiting = Caller(watches), asyncio.create_task(watches.ends.wait(REF))
        await caller.until("running")
        watches.stop()
        with pytest.raises(ServiceUnavailable, match="the service stops"):
            await caller.task
        await end(client)
        assert (await waiting).state == "success"
        await watches.close()

    cluster.run(work)


def test_watches_and_waits_fail_while_etcd_is_away(cluster: SimCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)

        async def away(*_: Any) -> Any:
            raise EtcdUnavailable("etcd does not answer")

        caller = Caller(watches)
        await caller.until("running")
        monkeypatch.setattr(client, "read_at", away)
        with pytest.raises(EtcdUnavailable):
            await caller.task
        for call in (watches.ends.wait(REF), anext(watches.watch(REF, caller.revision))):
            with pytest.raises(EtcdUnavailable):
                await call
        monkeypatch.undo()
        again = Caller(watches, caller.revision)
        await settled()
        assert again.states == []
        await end(client)
        await again.task
        assert again.states == ["success"]
        await watches.close()

    cluster.run(work)


def test_an_idle_operation_is_read_seldom(cluster: SimCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_watches, "REFRESHES", 0.1)

    async def work(client: EtcdClient) -> None:
        await write(client, "running")
        watches = OperationWatches(client, KEYS)
        caller = Caller(watches)
        await caller.until("running")
        before = cluster.network.requests
        await asyncio.sleep(100.0)
        assert cluster.network.requests - before < 100
        await caller.leave()
        await watches.close()

    cluster.run(work)
