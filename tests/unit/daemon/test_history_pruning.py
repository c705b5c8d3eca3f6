"""Retention of history records and of their files, on the model store and in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distop.daemon.meter import NO_METER
from distop.daemon.upkeep.history_pruning import HistoryPruner
from distop.daemon.upkeep.result_sweeping import ResultSweeper
from distop.protocol import keys as K
from distop.protocol.age_watermarks import next_slot, put_watermark, watermarks
from distop.protocol.executor_nodes import ALL
from distop.protocol.records import OperationRef
from distop.protocol.size_limits import DEFAULT
from distop.worker.daemon_side.requests import RemovedStages
from tests.support.world import TABLE, World
from tests.unit.daemon.coordinating import BusyClient
from tests.unit.support.virtualtime import in_virtual_time

MINUTE, HOUR, DAY = 60.0, 3_600.0, 86_400.0


RIGHT = SimpleNamespace(clock=0, clock_unknown="")
WRONG = (SimpleNamespace(clock=7_200, clock_unknown=""), SimpleNamespace(clock=0, clock_unknown="no answer"))


class LeasingClient(BusyClient):
    """A client whose leases end in virtual time; ``counted``: number of count requests."""

    counted = 0

    def __init__(self) -> None:
        super().__init__()
        self._granted: dict[int, tuple[int, float]] = {}

    async def count(self, start: str, end: str) -> int:
        self.counted += 1
        return await super().count(start, end)

    async def grant(self, ttl: int, lease_id: int, *, deadline: float | None = None) -> int:
        assert deadline is not None
        assert 1.0 <= deadline <= 60.0, "bounded, and long enough for etcd to answer"
        loop = asyncio.get_running_loop()
        self._granted[self.store.grant(lease_id)] = ttl, loop.time() + ttl
        loop.call_later(ttl, self.store.expire, lease_id)
        return ttl

    async def time_to_live(self, lease_id: int) -> tuple[int, int]:
        ttl, end = self._granted[lease_id]
        return ttl, int(end - asyncio.get_running_loop().time())


class Node:
    """The only node of a cluster, with operations that ended long ago by every clock."""

    def __init__(self, operations: int, history_limit: int = 1000) -> None:
        self.client = LeasingClient()
        self.keys, self.commit = K.Keys(), self.client.commit
        self.log, self.limits = logging.getLogger("distop.test"), DEFAULT
        self.config = SimpleNamespace(history_limit=history_limit, serves=ALL)
        self.incarnation, self.cluster = "a", SimpleNamespace(nodes={"a": RIGHT})
        self.clock = SimpleNamespace(agrees=self._agrees)
        self.forgotten: list[OperationRef] = []
        self.pruner = HistoryPruner(self, self.forgotten.extend)  # type: ignore[arg-type]
        world = World(store=self.client.store)
        self.refs = [world.run_operation() for _ in range(operations)]

    async def _agrees(self) -> bool:
        return True

    def records(self) -> int:
        return len(self.client.store.range(*self.keys.family(K.HISTORY)))


def run(work: Callable[[], Awaitable[Node]]) -> None:
    async def main() -> None:
        node = await work()
        assert not node.client.busy, "it asks etcd without a pause"

    in_virtual_time(main, limit=30 * DAY)


def test_records_that_are_too_old_are_deleted_within_hours_but_not_within_an_hour() -> None:
    """The age is measured by leases of etcd, because the clock that wrote them may be wrong."""

    async def work() -> Node:
        node = Node(3)
        keeping = asyncio.ensure_future(node.pruner.keep_young(10 * DAY))
        await asyncio.sleep(HOUR - 1.0)
        assert node.records() == 3
        await asyncio.sleep(2 * HOUR)
        assert node.records() == 0
        assert set(node.forgotten) == set(node.refs)
        assert not keeping.done()
        keeping.cancel()
        return node

    run(work)


@pytest.mark.parametrize("first", [RIGHT, *WRONG])
def test_the_first_node_whose_clock_is_right_deletes_by_age(first: Any) -> None:
    """The first node by name may have a wrong clock, and deletes nothing then."""

    async def work() -> Node:
        node = Node(1)
        node.incarnation, node.cluster = "b", SimpleNamespace(nodes={"a": first, "b": RIGHT, "c": RIGHT})
        keeping = asyncio.ensure_future(node.pruner.keep_young(10 * DAY))
        await asyncio.sleep(3 * HOUR)
        assert node.records() == (1 if first is RIGHT else 0)
        keeping.cancel()
        return node

    run(work)


def test_a_late_watermark_does_not_replace_a_newer_one() -> None:
    """Records between the two revisions would be kept for longer."""
    world = World()
    place = next_slot([])
    assert place is not None
    late = put_watermark(world.keys, place, 10, world.store.grant(1))
    world.do(put_watermark(world.keys, place, 20, world.store.grant(2)))
    assert not world.store.apply(late).succeeded
    (mark,) = watermarks(world.keys, world.store.range(*world.keys.family(K.WATERMARK)))
    assert (mark.upto, mark.lease) == (20, 2)


def test_records_are_counted_about_once_a_minute_if_many_operations_end() -> None:
    async def work() -> Node:
        node = Node(3, history_limit=1)
        for _ in range(int(2 * HOUR / 10.0)):
            await node.pruner.prune(TABLE)
            await asyncio.sleep(10.0)
        assert node.records() == 1
        assert set(node.forgotten) == set(node.refs[:2]), "the oldest"
        assert 100 <= node.client.counted <= 130
        return node

    run(work)


def test_the_files_of_each_forgotten_operation_are_removed() -> None:
    async def work() -> Node:
        node, removed = Node(0), list[str]()

        async def find_files(ops: list[str], table: Any) -> list[str]:
            return ops

        async def remove_files(ops: list[str], table: Any, staging: Any) -> RemovedStages:
            removed.extend(ops)
            return RemovedStages()

        node.worker = SimpleNamespace(find_files=find_files, remove_files=remove_files)  # type: ignore[attr-defined]
        node.meter = NO_METER  # type: ignore[attr-defined]
        sweeper = ResultSweeper(node)  # type: ignore[arg-type]
        sweeper.types = frozenset({"find"})
        sweeping = asyncio.ensure_future(sweeper.run())
        found = [OperationRef(table, "find", "", n) for n, table in enumerate(("t", "u", "t"), 1)]
        for ref in found:
            sweeper.add([ref])
            await asyncio.sleep(1.0)
        sweeper.add(found)
        await asyncio.sleep(1.0)
        sweeping.cancel()
        assert removed == [str(found[n]) for n in (0, 1, 2, 0, 2, 1)]
        return node

    run(work)
