"""The coordinator of a type on a table, on the model store and in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distop.daemon.coordinator import coordinator_role, follow_ups
from distop.daemon.coordinator.coordinator_role import LONG_STEP, RELIST
from distop.decide.due_operations import ERRORS_KEPT, MAX_HISTORY_BYTES
from distop.errors import ClusterChanged, EtcdUnavailable, MalformedRequest, OperationStartError
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.behavior_declaration import Rules
from distop.protocol.dependencies import Hold
from distop.protocol.jobs import Claim, JobState
from distop.protocol.plan import PartitionPlan, chunked
from distop.protocol.records import Node, State, TableRecord
from distop.protocol.revisioned import Change
from distop.protocol.schedule import Series
from distop.protocol.state_tables import Stage
from distop.protocol.txn import Delete, Put, Txn, TxnResult, absent
from distop.worker.daemon_side.requests import CompleteRequest, CompleteResult, PlanResult, WorkerError
from tests.support.world import TABLE, TYPE
from tests.unit.daemon.coordinating import Coordinating
from tests.unit.support.modelfeed import ModelFeed, SilentFeed
from tests.unit.support.virtualtime import in_virtual_time

PLAIN = Rules(completes=False, cleans=False, failure_policy="collect_all")
A_WHILE = 20.0
"""Seconds that a failure lasts."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test beside a coordinator of operations with these rules, with this class of feeds."""

    def running(
        work: Callable[[Coordinating], Awaitable[Any]], rules: Rules = PLAIN, feed: type[ModelFeed] = ModelFeed
    ) -> None:
        async def main() -> None:
            one = Coordinating(monkeypatch, rules, feed)
            await work(one)
            await one.role.stop()
            assert not one.client.busy, "it asks etcd without a pause"

        in_virtual_time(main)

    return running


def completing(report: Any) -> Any:
    """A child whose completion code makes this report."""

    async def complete(*args: Any) -> CompleteResult:
        return CompleteResult(report)

    return SimpleNamespace(complete=complete)


# -------------------------------------------------------------------- the end


@pytest.mark.parametrize("jobs", [1, 2, ERRORS_KEPT, ERRORS_KEPT + 2])
def test_a_history_record_holds_the_errors_of_the_first_failed_jobs(run: Any, jobs: int) -> None:
    async def work(one: Coordinating) -> None:
        ref = one.open(jobs)
        one.world.do(one.world.claim(ref, "a", range(jobs)))
        await one.role.start()
        for p in range(jobs):
            one.world.do(one.world.report(ref, p, JobState.FAILED))
        record = await one.ended(ref)
        assert record.failed == jobs
        assert [error["partition"] for error in record.errors] == [f"p={n}" for n in range(min(jobs, ERRORS_KEPT))]

    run(work)


def test_a_history_record_holds_the_error_of_a_report_that_was_too_large(run: Any) -> None:
    async def work(one: Coordinating) -> None:
        one.ctx.worker = completing("x" * MAX_HISTORY_BYTES)
        ref = one.open(1)
        await one.role.start()
        one.all_succeed(ref, 1)
        record = await one.ended(ref)
        assert (record.state, record.report) == (State.FAILED, None)
        (error,) = record.errors
        assert "more than a history record keeps" in error["text"]

    run(work, replace(PLAIN, completes=True))


def test_a_refused_start_of_the_next_operation_of_a_series_is_retried(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, started = [True], list[str]()

    async def submit(client: Any, *_: Any) -> Any:
        await client.request("submit")
        if refused[0]:
            raise OperationStartError("excluded by what runs")
        started.append("next")
        return SimpleNamespace(ref="the next")

    monkeypatch.setattr(follow_ups, "submit", submit)

    async def work(one: Coordinating) -> None:
        ref = one.world.next_ref()
        spec = replace(one.world.spec(ref), series=Series(60.0).to_json())
        one.world.do(t.starts(one.world.keys, one.world.counters(), [t.NewOperation(ref, spec, b"{}")]))
        one.world.do(one.world.plan(ref, 1))
        await one.role.start()
        one.all_succeed(ref, 1)
        await asyncio.sleep(A_WHILE)
        refused[0] = False
        await one.until(lambda: started == ["next"])
        await one.until(lambda: one.world.stage(ref) is Stage.ABSENT)

    run(work)


def test_run_ops_is_read_while_the_only_job_runs(run: Any) -> None:
    """The end of a short operation then takes one request."""

    async def plan(*_: Any) -> PlanResult:
        return PlanResult(chunked([PartitionPlan(0, "p=0")]), 1, "")

    async def work(one: Coordinating) -> None:
        one.ctx.worker = SimpleNamespace(plan=plan)  # type: ignore[assignment]
        await one.role.start()
        ref = one.world.next_ref()
        spec = replace(one.world.spec(ref), table=TableRecord(TABLE, "parquet", "/data"))
        one.world.do(t.starts(one.world.keys, one.world.counters(), [t.NewOperation(ref, spec, b"{}")]))
        await one.until(lambda: one.world.stage(ref) is Stage.OPEN)
        before = len(one.client.requests)
        one.all_succeed(ref, 1)
        await one.ended(ref)
        assert one.client.requests[before] == "finish"

    run(work)


# --------------------------------------------------------- obstacles


def test_a_refused_step_is_retried_soon_though_an_earlier_step_was_refused_for_long(run: Any) -> None:
    async def work(one: Coordinating) -> None:
        one.ctx.worker = completing("done")
        world, client, ref = one.world, one.client, one.open(1)
        one.all_succeed(ref, 1)
        refused = "decide"

        def picky(txn: Txn) -> TxnResult:
            if txn.label == refused:
                return client.store.apply(replace(txn, compares=(absent(world.keys.of(ref, "state")),), label=""))
            return client.store.apply(txn)

        client.usual = picky
        await one.role.start()
        await asyncio.sleep(A_WHILE)
        refused = "finish"
        await one.until(lambda: refused in client.requests)
        await asyncio.sleep(0.2)
        refused = ""
        await one.until(lambda: world.stage(ref) is Stage.ABSENT, within=coordinator_role.REFUSED_PAUSE[1] / 4)

    run(work, replace(PLAIN, completes=True))


def test_a_cancel_that_the_watch_lost_is_noticed(run: Any) -> None:
    """etcd has lost events of watches (etcd#20573)."""

    class Losing(ModelFeed):
        def loses(self, change: Change) -> bool:
            return change.kv.value == b"cancelling" or change.kv.key.endswith(".cancel")

    async def work(one: Coordinating) -> None:
        ref = one.open(1)
        one.world.do(one.world.claim(ref, "a", [0]))
        await one.role.start()
        one.world.do(one.world.cancel(ref))
        one.world.do(one.world.report(ref, 0, JobState.SUCCESS))
        record = await one.ended(ref)
        assert record.state is State.CANCELLED

    run(work, feed=Losing)


def test_an_operation_that_the_watch_lost_is_planned_within_minutes(run: Any) -> None:
    """Each listing reads all operations of the type, so listings are rare."""

    async def work(one: Coordinating) -> None:
        planned = asyncio.Event()

        async def plan(*_: Any) -> PlanResult:
            planned.set()
            return PlanResult(chunked([PartitionPlan(0, "p=0")]), 1, "")

        one.ctx.worker = SimpleNamespace(plan=plan)  # type: ignore[assignment]
        await one.role.start()
        ref = one.world.next_ref()
        spec = replace(one.world.spec(ref), table=TableRecord(TABLE, "parquet", "/data"))
        one.world.do(t.starts(one.world.keys, one.world.counters(), [t.NewOperation(ref, spec, b"{}")]))
        await asyncio.sleep(RELIST * 0.9)
        assert not planned.is_set()
        async with asyncio.timeout(RELIST * 0.2):
            await planned.wait()

    run(work, feed=SilentFeed)


def test_a_claim_that_prevents_the_end_of_its_operation_is_logged_once(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(one: Coordinating) -> None:
        world, ref = one.world, one.open(1)
        one.all_succeed(ref, 1)
        key = world.keys.claim(ref, 0)
        world.tamper(Put(key, Claim("ex-a", "a", 2, 0).encode()))
        await one.role.start()
        await asyncio.sleep(A_WHILE)
        (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert f"etcdctl del {key}" in record.getMessage()
        world.tamper(Delete(key))
        await one.ended(ref)

    run(work)


def test_a_rejected_write_is_not_reported_any_more_once_etcd_accepts_it(run: Any) -> None:
    """The operation has not ended then: it waits for a job to stop."""

    async def work(one: Coordinating) -> None:
        world, ref = one.world, one.open(2)
        rejected = one.ctx.rejected_writes
        world.do(world.claim(ref, "a", [0, 1]))

        def picky(txn: Txn) -> TxnResult:
            if txn.label == "fail_fast":
                raise MalformedRequest("etcdserver: request is too large")
            return one.client.store.apply(txn)

        one.client.usual = picky
        await one.role.start()
        world.do(world.report(ref, 0, JobState.FAILED))
        await one.until(lambda: str(ref) in rejected.published)
        one.client.usual = one.client.store.apply
        await one.until(lambda: world.stage(ref) is Stage.CANCELLING)
        await one.until(lambda: not rejected.published)
        assert world.stage(ref) is Stage.CANCELLING

    run(work, replace(PLAIN, failure_policy="fail_fast"))


def test_a_coordinator_reports_a_failed_watch(run: Any) -> None:
    """Otherwise it would decide nothing any more, and no node would take over."""

    async def work(one: Coordinating) -> None:
        await one.role.start()
        assert one.failures == []
        restored = ClusterChanged("etcd went back")
        one.feeds["jobs"].fail(restored)
        await one.until(lambda: one.failures == [restored])

    run(work)


def test_an_election_is_resigned_for_another_node_once_the_work_here_has_ended(run: Any) -> None:
    async def work(one: Coordinating) -> None:
        one.ctx.worker = completing("done")
        world, first = one.world, one.open(1)
        await one.role.start()
        one.all_succeed(first, 1)
        await one.ended(first)
        node = Node("ex-b", "host", 2, (TYPE,), labels={"zone": "b"})
        world.tamper(Put(world.keys.node("b"), node.encode()))
        one.nodes_changed()
        ref = world.next_ref()
        spec = replace(world.spec(ref), where={"zone": "b"})
        world.do(t.starts(world.keys, world.counters(), [t.NewOperation(ref, spec, b"{}")]))
        await one.until(lambda: one.elsewhere > 0)

    run(work, replace(PLAIN, completes=True))


@pytest.mark.parametrize(("seconds", "hands_over"), [(LONG_STEP / 2, True), (2 * LONG_STEP, False)])
def test_a_failed_call_hands_the_election_over_unless_a_long_step_is_running(
    run: Any, seconds: float, hands_over: bool
) -> None:
    """``seconds``: the age of the step of another operation."""
    failed = list[str]()

    async def work(one: Coordinating) -> None:
        slow, failing = one.open(1), one.open(1)

        async def complete(request: CompleteRequest) -> CompleteResult:
            if request.op == str(slow):
                await asyncio.Event().wait()
            elif not failed:
                failed.append(request.op)
                raise WorkerError("transient", "no memory")
            return CompleteResult("done")

        one.ctx.worker = SimpleNamespace(complete=complete)  # type: ignore[assignment]
        await one.role.start()
        one.all_succeed(slow, 1)
        await asyncio.sleep(seconds)
        one.all_succeed(failing, 1)
        await one.ended(failing)
        assert failed == [str(failing)]
        assert one.handed_over == int(hands_over)

    run(work, replace(PLAIN, completes=True))


# ------------------------------------------------------------------- pending operations


def test_an_operation_whose_hold_is_gone_begins_even_without_an_event(run: Any) -> None:
    async def work(one: Coordinating) -> None:
        world, ref = one.world, one.world.next_ref()
        world.do(w.hold(world.keys, "graph", Hold("graph"), 0))
        world.do(world.submit(ref, hold="graph"))
        await one.role.start()
        await asyncio.sleep(A_WHILE)
        assert one.client.requests.count("begin") > 1
        assert world.stage(ref) is Stage.WAITING
        world.tamper(Delete(world.keys.hold("graph")))
        await one.until(lambda: world.stage(ref) is not Stage.WAITING)

    run(work)


def test_an_operation_begins_soon_after_etcd_is_reachable_again(run: Any) -> None:
    async def work(one: Coordinating) -> None:
        world, ref = one.world, one.world.next_ref()
        world.do(world.submit(ref))

        def away(txn: Txn) -> TxnResult:
            raise EtcdUnavailable("etcd is away")

        one.client.usual = away
        await one.role.start()
        await asyncio.sleep(A_WHILE)
        assert one.client.requests.count("begin") > 1
        one.client.usual = one.client.store.apply
        await one.until(lambda: world.stage(ref) is not Stage.WAITING)

    run(work)
