"""The executor's shell around the backlog: its calls of the child and of etcd."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.executor.executor_role import Executor
from distop.daemon.incarnation_context import Context
from distop.daemon.job_progress import LEAST_PAUSE, LONGEST, MOST_OPERATIONS
from distop.daemon.rejected_writes import RejectedWrites
from distop.decide import work_shares
from distop.decide.view import ClusterView
from distop.errors import DistopError, NotFound, UnreadableRecord
from distop.protocol.behavior_declaration import Rules
from distop.protocol.identity import plan_digest
from distop.protocol.keys import Keys
from distop.protocol.plan import Gate, PartitionPlan, Plan, chunked
from distop.protocol.records import Node, OperationRef, Spec
from distop.protocol.revisioned import Seen
from distop.protocol.size_limits import DEFAULT
from distop.protocol.txn import Put, Txn
from distop.runtime import logs, secret_settings
from distop.services.open_operation import OpenOperation
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from tests.support.world import open_operation
from tests.unit.support.virtualtime import in_virtual_time

if TYPE_CHECKING:
    from distop.decide.backlog_entries import Instruction
    from tests.unit.support.clock import StandingClock


REF = OperationRef("t", "noop", "", 1)
PLAN = Txn((), (Put("plan", b""),), (), "plan")


def now() -> float:
    """Seconds on the loop's clock."""
    return asyncio.get_running_loop().time()


class Alone(Context):
    """The only executor."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.cluster = ClusterView(self.keys)
        self.cluster.nodes["me"] = Node("me", "host", 2, ("noop",))
        self.incarnation = self.executor_id = "me"
        self.types = frozenset({"noop"})
        self.capability: Any = type("Able", (), {"serves": staticmethod(lambda *_: True), "unable": {}})
        self.worker: Any = SimpleNamespace(stuck=())
        self.log = logs.get("distop.test")
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.limits = DEFAULT
        self.config = ExecutorConfig(EtcdConfig(("nowhere:2379",)), Path("/nowhere"), slots=2)


def planned() -> OpenOperation:
    chunks = chunked([PartitionPlan(n, f"p={n}") for n in range(4)])
    plan = Plan(4, "", plan_digest(chunks), len(chunks))
    return open_operation(REF, Spec("request", "", "", Rules()), plan, chunks)


async def test_jobs_beyond_the_batch_size_are_released() -> None:
    ctx = Alone()
    claimer = Executor(ctx)._claimer
    size = work_shares.BATCH_BYTES_PER_SLOT
    chunks = chunked([PartitionPlan(n, f"p={n}", bytes=size) for n in range(5)])
    plan = Plan(5, "", plan_digest(chunks), len(chunks))
    op = open_operation(REF, Spec("request", "", "", Rules(batch=True)), plan, chunks)
    assert claimer._one_batch(op, [0, 1, 2, 3, 4]) == [0, 1]
    assert list(op.free) == [2, 3, 4]


def test_an_executor_continues_soon_after_its_stuck_child_was_replaced() -> None:
    """No event announces the replacement."""

    async def main() -> None:
        ctx = Alone()
        executor, served = Executor(ctx), list[float]()
        ctx.worker.stuck = ("t/noop/9",)
        looked: list[float] = []
        nothing_yet = executor._backlog.next

        def chooses(at: float) -> list[Instruction]:
            served.append(at)
            return nothing_yet(at)

        executor._backlog.next = chooses  # type: ignore[method-assign]
        disk_pause = executor._jobs.disk_pause

        def look() -> float:
            looked.append(now())
            assert len(looked) < 100, "it is looked at without a pause"
            return disk_pause()

        executor._jobs.disk_pause = look  # type: ignore[method-assign]
        running = asyncio.ensure_future(executor.run())
        await asyncio.sleep(20.0)
        assert served == []
        ctx.worker.stuck = ()
        await asyncio.sleep(5.0)
        assert served
        running.cancel()

    in_virtual_time(main)


async def test_the_child_forgets_a_closed_operation() -> None:
    """Its private directories stay otherwise until the executor starts again."""
    ctx = Alone()
    forgotten: list[str] = []

    async def forget(*refs: str) -> None:
        forgotten.extend(refs)

    ctx.worker.forget = forget
    executor = Executor(ctx)
    for number in (1, 2):
        ref = OperationRef("t", "noop", "", number)
        executor._operations[ref] = op = planned()
        op.ref = ref
        ctx.cluster.gates[ref] = Seen(Gate(), 5)
    executor.cluster_changed(hint=False)
    ctx.cluster.gates.clear()
    executor.cluster_changed(hint=False)
    for _ in range(5):
        await asyncio.sleep(0)
    assert forgotten == ["t/noop/1", "t/noop/2"]


async def test_other_executors_are_notified_of_released_claims() -> None:
    """They would look at them at the next poll alone."""
    ctx = Alone()
    messages: list[str] = []

    async def drain() -> None:
        messages.append("written")

    async def announce() -> None:
        messages.append("announced")

    ctx.reporter = SimpleNamespace(drain=drain)  # type: ignore[assignment]
    ctx.announce_released = announce  # type: ignore[method-assign]
    executor = Executor(ctx)
    for _ in range(2):
        executor.hint_released()
    for _ in range(5):
        await asyncio.sleep(0)
    assert messages == ["written", "announced"]


async def test_a_lasting_error_is_logged_once_and_a_missing_record_not_at_all(
    caplog: pytest.LogCaptureFixture, clock: StandingClock
) -> None:
    ctx = Alone()
    executor = Executor(ctx)
    ctx.cluster.gates[REF] = Seen(Gate(), 5)
    executor.cluster_changed(hint=False)
    unreadable = UnreadableRecord("the plan does not match its digest")
    with caplog.at_level(logging.INFO, "distop"):
        for error in (unreadable, unreadable, NotFound("it has ended"), RuntimeError("a"), RuntimeError("b")):
            executor._failed(REF, error)
    assert [(record.levelname, bool(record.exc_info)) for record in caplog.records] == [
        ("ERROR", False),
        ("WARNING", True),
        ("WARNING", True),
    ]
    assert "does not match its digest" in caplog.records[0].getMessage()
    executor._failed(REF, UnreadableRecord("the record at distOp.t.noop.1.spec cannot be read"))
    assert len(caplog.records) == 4, "something else is wrong now"


class Skipping:
    """An executor that cannot serve operations."""

    def __init__(self, operations: int) -> None:
        self.ctx = Alone()
        self.executor = Executor(self.ctx)
        self.refs = [OperationRef("t", "noop", "", n) for n in range(operations)]
        for ref in self.refs:
            self.ctx.cluster.gates[ref] = Seen(Gate(), 5)
        self.executor.cluster_changed(hint=False)

    def fails(self, ref: OperationRef, error: Exception, times: int = 9) -> None:
        for _ in range(times):
            self.executor._failed(ref, error)

    def reported(self) -> tuple[dict[str, str], int]:
        self.executor._report_skipped()
        named, more = self.ctx.skipped
        return dict(named), more


async def test_the_report_of_skipped_operations_is_bounded(clock: StandingClock) -> None:
    one = Skipping(MOST_OPERATIONS + 3)
    for ref in one.refs:
        one.fails(ref, DistopError("x" * 10_000 + "\nand a traceback"))
    named, more = one.reported()
    assert (list(named), more) == ([str(ref) for ref in one.refs[:MOST_OPERATIONS]], 3)
    assert max(len(text) for text in named.values()) < LONGEST + 100
    node = replace(one.ctx.cluster.nodes["me"], skipped=named, skipped_more=more)
    assert Node.decode(node.encode()) == node


async def test_the_report_names_the_error_without_secrets(clock: StandingClock) -> None:
    secret_settings.hide_settings({"spark.a.password": "hornet-in-a-jar"})
    one = Skipping(1)
    one.fails(one.refs[0], UnreadableRecord("no plan at hornet-in-a-jar\nand more"))
    ((_, text),) = one.reported()[0].items()
    assert text.startswith("it cannot read the operation: no plan at ")
    assert "hornet" not in text
    assert "and more" not in text


async def test_short_pauses_and_frequent_changes_do_not_change_the_report(clock: StandingClock) -> None:
    one = Skipping(2)
    first, second = one.refs
    one.fails(first, RuntimeError("no space"), 4)
    assert one.reported() == ({}, 0)
    one.fails(first, RuntimeError("no space"))
    reported = one.reported()
    assert list(reported[0]) == [str(first)]
    one.fails(second, RuntimeError("no space"))
    assert one.reported() == reported, "it has changed just now"
    clock.now += LEAST_PAUSE
    assert list(one.reported()[0]) == [str(first), str(second)]
    clock.now += LEAST_PAUSE
    one.ctx.cluster.gates.clear()
    one.executor.cluster_changed(hint=False)
    assert one.reported() == ({}, 0)


def test_a_running_executor_reports_the_operations_that_it_skips() -> None:
    async def main() -> None:
        one = Skipping(1)
        one.fails(one.refs[0], RuntimeError("no space"))
        running = asyncio.ensure_future(one.executor.run())
        await asyncio.sleep(0.1)
        running.cancel()
        assert list(one.ctx.skipped[0]) == [str(one.refs[0])]

    in_virtual_time(main)


def test_old_node_records_skip_nothing() -> None:
    node = Node("e", "host", 1, ("noop",))
    assert b"skipped" not in node.encode()
    old = Node.decode(b'{"v":1,"executor":"e","host":"host","slots":1,"behaviors":["noop"],"of a later release":1}')
    assert (old.skipped, old.skipped_more) == ({}, 0)
    with pytest.raises(TypeError, match="'skipped'"):
        Node.decode(b'{"v":1,"skipped":["t/noop/1"]}')
