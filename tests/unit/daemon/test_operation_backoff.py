"""Back-off of an executor after an operation that it could not serve."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.daemon.executor.claimer import Won
from distop.daemon.executor.executor_role import Executor
from distop.daemon.executor.operation_backoff import LONGEST_PAUSE, MISSING_PAUSE, UNREADABLE_PAUSE, Troubles
from distop.daemon.incarnation_context import Context
from distop.daemon.rejected_writes import RejectedWrites
from distop.decide.view import ClusterView
from distop.errors import NotFound, UnreadableRecord
from distop.protocol.behavior_declaration import Rules
from distop.protocol.keys import Keys
from distop.protocol.operation_options import Options
from distop.protocol.plan import Gate, PartitionPlan, Plan, chunked
from distop.protocol.records import OperationRef, Spec
from distop.protocol.revisioned import Seen
from distop.runtime import logs
from distop.services.open_operation import OpenOperation
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig

if TYPE_CHECKING:
    from tests.support.clock import StandingClock

REF = OperationRef("t", "noop", "", 1)


def none_yet() -> Troubles:
    log = logs.get("distop.test")
    return Troubles(log, RejectedWrites(log, lambda: None))


def pauses(troubles: Troubles, error: Exception, times: int) -> list[float]:
    waits = []
    for _ in range(times):
        troubles.failed(REF, error)
        waits.append(troubles.wait(REF))
    return waits


def test_records_that_cannot_be_read_are_told_of_once_and_looked_at_seldom(
    clock: StandingClock, caplog: pytest.LogCaptureFixture
) -> None:
    troubles, error = none_yet(), UnreadableRecord("the plan does not fit its digest")
    with caplog.at_level(logging.DEBUG, "distop"):
        assert pauses(troubles, error, 10) == [0.5, 1, 2, 4, 8, 16, 32, 64, UNREADABLE_PAUSE, UNREADABLE_PAUSE]
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("ERROR", None)
    assert "does not fit its digest" in record.getMessage()
    with caplog.at_level(logging.DEBUG, "distop"):
        troubles.failed(REF, UnreadableRecord("the record at distOp.t.noop.1.spec cannot be read"))
    assert len(caplog.records) == 2, "something else is wrong now"


def test_errors_of_our_own_are_told_each_time(clock: StandingClock, caplog: pytest.LogCaptureFixture) -> None:
    troubles = none_yet()
    assert pauses(troubles, RuntimeError("a bug"), 8) == [0.5, 1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE]
    assert len(caplog.records) == 8
    clock.now = LONGEST_PAUSE
    assert troubles.wait(REF) <= 0
    troubles.served(REF)
    assert REF not in troubles


def test_an_end_that_was_not_seen_yet_is_nothing_to_speak_of(
    clock: StandingClock, caplog: pytest.LogCaptureFixture
) -> None:
    troubles = none_yet()
    with caplog.at_level(logging.INFO, "distop"):
        troubles.failed(REF, NotFound("operation t/noop/1 has ended meanwhile"))
    assert caplog.records == []
    assert troubles.wait(REF) > 0, "the gate may be seen for a while"


def test_hole_9_a_gate_without_records_is_looked_at_less_and_less(clock: StandingClock) -> None:
    """Thousands of forged gates, each of a high priority, had no other operation get a slot."""
    troubles = none_yet()
    waits = []
    for _ in range(12):
        troubles.failed(REF, NotFound("there is no operation t/noop/1"))
        waits.append(troubles.wait(REF))
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[-1] == MISSING_PAUSE
    assert troubles.missing(REF)


async def test_hole_9_gates_without_records_have_no_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(Stub())
    gate = Gate(options=Options(priority=100))

    async def load(*_: Any) -> OpenOperation:
        raise NotFound("there is no such operation")

    monkeypatch.setattr(OpenOperation, "load", load)
    executor._ctx.cluster.gates[REF] = Seen(gate, 5)
    now = time.monotonic()
    urgent = executor._rank(REF, gate, now)
    await executor._serve(REF, 0)
    other = executor._rank(OperationRef("other", "noop", "", 1), Gate(), now)
    assert urgent > other >= executor._rank(REF, gate, time.monotonic())


def test_runs_that_go_wrong_are_tried_less_and_less_though_their_jobs_can_be_claimed(clock: StandingClock) -> None:
    troubles = none_yet()
    for wait in (0.5, 1.0, 2.0):
        troubles.failed(REF, RuntimeError("no such file"), run=True)
        assert troubles.wait(REF) == wait
        troubles.served(REF)
    troubles.ran(REF)
    assert troubles.wait(REF) == 0


class Stub(Context):
    """An executor's context, of which no request gets anywhere."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.cluster = ClusterView(self.keys)
        self.log = logs.get("distop.test")
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.executor_id = self.incarnation = "me"
        self.types = frozenset({"noop"})
        self.caught_up_at = 0
        self.client: Any = None
        self.config = ExecutorConfig(EtcdConfig(("nowhere:2379",)), Path("/nowhere"))


async def test_nothing_is_kept_of_operations_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, gone = Stub(), OperationRef("t", "noop", "", 51)
    executor = Executor(ctx)
    gates = ctx.cluster.gates

    async def load(*_: Any) -> OpenOperation:
        if gone in gates:
            del gates[gone]
        raise NotFound("it has ended meanwhile")

    monkeypatch.setattr(OpenOperation, "load", load)
    for number in range(1, 51):
        ref = OperationRef("t", "noop", "", number)
        gates[ref] = Seen(Gate(), 5)
        await executor._serve(ref, 0)
        assert ref in executor._troubles
        del gates[ref]
        executor.cluster_changed(hint=True)
    gates[gone] = Seen(Gate(), 5)  # it goes while it is read
    await executor._serve(gone, 0)
    assert len(executor._troubles) == 0


@pytest.mark.parametrize("meanwhile", [True, False])
async def test_a_job_that_goes_back_to_wait_during_a_look_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    """Its retry came with the next poll alone, on a busy machine: the look had read what was before."""
    executor, chunks = Executor(Stub()), chunked([PartitionPlan(0, "0")])
    op = OpenOperation(REF, 5, Spec("request", "", "", Rules()), {}, Plan(1, "", "", 1), chunks, [0])
    executor._operations[REF] = op

    async def look(*_: Any) -> None:
        if meanwhile:
            op.returned, op.exhausted = op.returned + 1, False
        op.exhausted = True

    async def claim(*_: Any, **__: Any) -> Won:
        return Won()

    monkeypatch.setattr(executor, "_served", lambda ref: None)
    monkeypatch.setattr(executor, "_stopping", lambda op: False)
    monkeypatch.setattr(executor, "_look", look)
    monkeypatch.setattr(executor._claimer, "claim", claim)
    await executor._serve(REF, 0)
    assert op.exhausted is not meanwhile


async def test_operations_of_which_nothing_is_to_claim_are_not_ranked_at_each_wake(
    clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wake asked for all open operations whether this executor serves them, and sorted them."""
    ctx, asked, served = Stub(), set[str](), list[OperationRef]()

    def serves(type_name: str, tables: Any) -> bool:
        asked.update(tables)
        return True

    monkeypatch.setattr(ctx, "serves", serves)
    executor, chunks = Executor(ctx), chunked([PartitionPlan(0, "0")])
    monkeypatch.setattr(executor, "_serve_soon", lambda ref, slots: served.append(ref))
    refs = [OperationRef(f"t{number}", "noop", "", 1) for number in range(20)]
    for ref in refs:
        ctx.cluster.gates[ref] = Seen(Gate(2), 5)
        executor._small.general[ref] = None
        op = OpenOperation(ref, 5, Spec("request", "", "", Rules()), {}, Plan(1, "", "", 1), chunks, [0])
        executor._operations[ref], op.exhausted = op, True
    executor._operations[refs[0]].exhausted = False
    executor._operations[refs[1]].next_due = clock.now
    executor._operations[refs[2]].next_due = clock.now + 7.0
    assert executor._assign_general() == 7.0
    assert served == refs[:2], "one that has more, and one that is due"
    assert asked == {"t0", "t1"}
