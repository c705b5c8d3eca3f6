"""Operations that wait for a time or for others, and series, on real daemons; etcd's history is audited."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from distop import After, Every, Start, chain, chord
from distop import group as parallel
from distop.errors import InvalidArgument, NotAllowed, NotFound, OperationStartError
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.keys import Keys
from distop.protocol.operation_options import Options
from distop.protocol.records import OperationRef, Spec
from tests.support.contract import dump

if TYPE_CHECKING:
    from distop.blocking import Operation
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.etcd

TABLE = "t"
LIMIT = 60


def noop(group: Daemons, sleep: float = 0, fail: bool = False, **options: object) -> Operation:
    return group.client.start_operation("noop", TABLE, {"sleep": sleep, "fail": ["0"] if fail else []}, **options)


def finished(op: Operation) -> datetime:
    return datetime.fromisoformat(op.wait(LIMIT).record["finished"])


def test_L16_a_chain_runs_in_order(group: Daemons) -> None:
    group.start("e1")
    group.start("e2")
    first = noop(group, sleep=0.3)
    second = noop(group, after=[first])
    third = group.client.start_operation("noop", "@cluster", {}, after=[second.ref, first.ref])
    assert third.status().state == "pending"
    assert finished(first) < finished(second) < finished(third)
    assert noop(group, after=[first]).wait(LIMIT).state == "success", "an ended predecessor is not waited for"


def test_L24_a_failure_cancels_all_successors_with_the_reason(group: Daemons) -> None:
    group.start("e1")
    group.client.drain("e1", wait=True, timeout=LIMIT)  # so that all operations are pending before the first ends
    bad = noop(group, fail=True)
    second = noop(group, after=[bad])
    third = noop(group, after=[second])
    after_end = noop(group, after=[After(bad.parts, "end")])
    group.client.undrain("e1")
    ended = third.wait(LIMIT)
    assert (second.wait(LIMIT).state, ended.state) == ("cancelled", "cancelled")
    assert ended.record["cancel"] == {"reason": "aborted", "text": f"{second.ref} ended as cancelled"}
    assert second.wait(LIMIT).record["cancel"]["text"] == f"{bad.ref} ended as failed"
    assert after_end.wait(LIMIT).state == "success"
    with pytest.raises(OperationStartError, match="ended as failed, so an operation that waits for its success"):
        noop(group, after=[bad])


def test_L36_a_join_ends_after_its_last_predecessor(group: Daemons) -> None:
    group.start("e1")
    parts = [noop(group, sleep=0.1) for _ in range(40)]
    join = group.client.start_operation("join", "@cluster", after=parts)
    assert finished(join) >= max(finished(part) for part in parts)
    assert join.wait().jobs["total"] == 0


def test_P2_an_operation_starts_at_its_time_or_at_once_if_that_has_passed(group: Daemons) -> None:
    group.start("e1")
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    later = noop(group, not_before=due)
    assert later.status().state == "pending"
    assert noop(group, not_before="2020-01-01T00:00:00Z").wait(LIMIT).state == "success"
    assert later.status().state == "pending"
    assert finished(later) >= due
    for invalid in ("2030-01-01T00:00:00", "tomorrow"):
        with pytest.raises(InvalidArgument, match="zone|start time"):
            noop(group, not_before=invalid)


def test_P3_an_operation_due_during_an_outage_runs_once(group: Daemons) -> None:
    (first,) = group.start("e1")
    later = noop(group, delay=1.0)
    first.kill()
    due = datetime.now(UTC) + timedelta(seconds=1.0)
    group.start("e2")
    assert finished(later) >= due - timedelta(seconds=1)
    assert [one.op for one in group.client.history(TABLE)] == [later.ref]


def test_a_pending_operation_is_cancelled_at_once_with_its_successors(group: Daemons) -> None:
    group.start("e1")
    waiting = noop(group, delay=3600)
    successor = noop(group, after=[waiting])
    with pytest.raises(NotAllowed, match="has not started: it cannot be paused"):
        waiting.pause()
    waiting.cancel("not needed")
    ended = waiting.wait(LIMIT)
    assert (ended.state, ended.record["cancel"]["text"]) == ("cancelled", "not needed")
    assert successor.wait(LIMIT).state == "cancelled"
    with pytest.raises(NotAllowed, match="ended as cancelled"):
        waiting.cancel()


def test_a_dependency_on_an_unknown_operation_is_refused(group: Daemons) -> None:
    group.start("e1")
    with pytest.raises(NotFound, match="no operation t/noop/999 to wait for"):
        noop(group, after=["t/noop/999"])
    assert noop(group).wait(LIMIT).op == "t/noop/1", "the refused start drew no instance number"


# --------------------------------------------------------------------- graphs


def start(sleep: float = 0, fail: bool = False, after: tuple[object, ...] = ()) -> Start:
    return Start("noop", TABLE, {"sleep": sleep, "fail": ["0"] if fail else []}, after=after)


def test_L19_L31_a_graph_runs_in_order(group: Daemons) -> None:
    group.start("e1")
    first, left, right, last = start(0.1), start(0.2), start(), start()
    ops = group.client.start_operations(chain(first, parallel(left, right), last))
    times = [finished(op) for op in ops]
    assert times[0] < min(times[1:3])
    assert max(times[1:3]) < times[3]


@pytest.mark.parametrize("size", [3, 200])
def test_L19_a_graph_with_a_refused_start_is_refused_whole(group: Daemons, size: int) -> None:
    group.start("e1")
    invalid = Start("noop", TABLE, {"colour": "red"})
    with pytest.raises(InvalidArgument, match="colour"):
        group.client.start_operations([*(start() for _ in range(size)), invalid])
    assert group.client.history() == []
    assert group.client.operations() == []
    assert noop(group).wait(LIMIT).op == "t/noop/1"


def test_L19_a_graph_of_several_transactions_is_started_once(group: Daemons) -> None:
    group.start("e1", "e2")
    parts = [start() for _ in range(150)]
    graph = chord(parts, Start("join", "@cluster"))
    ops = group.client.start_operations(graph, request_id="nightly")
    assert finished(ops[-1]) >= max(finished(op) for op in ops[:-1])
    assert {op.wait(LIMIT).state for op in ops} == {"success"}
    again = group.client.start_operations(graph, request_id="nightly")
    assert [op.ref for op in again] == [op.ref for op in ops]
    assert again[0].already_started
    assert len(group.client.history(TABLE, limit=1000)) == 150


def test_L26_dependencies_are_added_to_pending_operations(group: Daemons) -> None:
    group.start("e1")
    first, late = noop(group, sleep=2), noop(group, delay=1)
    other = noop(group, after=[late])
    group.client.add_dependencies([(first, late)])
    with pytest.raises(InvalidArgument, match="form a cycle"):
        group.client.add_dependencies([(other, late)])
    assert finished(first) < finished(late) < finished(other)
    with pytest.raises(NotFound):
        group.client.add_dependencies([(first, late), ("t/noop/99", late)])
    with pytest.raises(NotAllowed, match="only operations that have not started"):
        group.client.add_dependencies([(first, other)])


def test_P3_a_series_runs_to_its_count_despite_a_killed_executor(group: Daemons) -> None:
    first, _ = group.start("e1", "e2")
    noop(group, every=Every(0.3, times=4))
    group.eventually(lambda: len(group.client.history(TABLE)) >= 2, "the second of the series has ended", "e1", "e2")
    first.kill()
    group.eventually(
        lambda: len(group.client.history(TABLE)) == 4, "all operations of the series have ended", "e1", "e2"
    )
    assert group.client.operations() == []


def test_P3_a_cancel_ends_a_series(group: Daemons) -> None:
    group.start("e1")
    noop(group, every=0.2)
    group.eventually(
        lambda: any(one.state == "pending" for one in group.client.operations()), "an operation is pending", "e1"
    )

    def cancelled() -> bool:
        for one in group.client.operations():
            if one.state == "pending":
                try:
                    group.client.operation(one.op).cancel()
                except NotAllowed:  # it has started and ended in the meantime
                    return False
        return group.client.history(TABLE)[0].state == "cancelled"

    group.eventually(cancelled, "the pending operation is cancelled", "e1")
    assert all(one.state != "pending" for one in group.client.operations())


def test_P3_a_series_is_ended_through_any_of_its_operations(group: Daemons) -> None:
    """Otherwise a caller would have to find and cancel the current operation before the next one starts."""
    group.start("e1")
    first = noop(group, every=0.2)
    group.eventually(lambda: len(group.client.history(TABLE)) >= 3, "the third of the series has ended", "e1")
    ended = first.end_series("enough")
    assert group.client.operation(ended).wait(LIMIT).state == "cancelled"
    group.eventually(lambda: not group.client.operations(), "no operation is open", "e1")
    records = group.client.history(TABLE)
    assert records[0].op == ended
    with pytest.raises(NotAllowed, match=f"the series that started with {first.ref} has ended"):
        group.client.operation(records[1].op).end_series()
    with pytest.raises(NotAllowed, match="is not part of a series"):
        noop(group, delay=60).end_series()
    with pytest.raises(NotFound):
        group.client.operation(f"{TABLE}/noop/999").end_series()


DIFFERENT_IN_EACH = {"request_id", "time", "not_before", "series", "traceparent"}
"""The fields of a spec that differ between the operations of a series. Each has a trace of its own."""
NOT_START_OPTIONS = {
    Spec: {"table", "one_at_a_time", "version", "rerun_of", "hold", "follows", "not_before", "table_revision"},
    Rules: {
        "can_fail",
        "lost",
        "resumable",
        "batch",
        "completes",
        "cleans",
        "reports_only",
        "joins",
        "code",
        "staged_output",
    },
    Retry: {"initial", "maximum"},
    Options: set[str](),
}
"""Fields that a start of a series does not set: they come from the behavior, the table or other kinds of starts."""


def start_records(group: Daemons, op: str) -> list[Any]:
    """The records of an operation that hold the options of its start: spec, rules, retries, options."""
    records, ref, keys = dump(group.endpoint), OperationRef.parse(op), Keys()
    spec = Spec.decode(records[keys.of(ref, "spec")].encode())
    options = Options.decode(records[keys.of(ref, "options")].encode()) if keys.of(ref, "options") in records else None
    return [spec, spec.rules, spec.rules.retry, options or Options()]


def test_hole_9_all_options_of_a_start_apply_to_the_next_operation_of_its_series(group: Daemons) -> None:
    """The next operation once lacked the time limit of jobs."""
    group.start("e1", options=("--label", "zone=a"))
    group.client.drain("e1", wait=True, timeout=LIMIT)  # so that the first stays open and its records can be read
    first = group.client.start_operation(
        "noop", TABLE, {"jobs": 2, "sleep": 0.01}, partitions=["0"], failure_policy="fail_fast", retry_attempts=7,
        time_limit=50.0, submitter="ann", labels={"team": "a"}, every=Every(3600, times=2), where={"zone": "a"},
        id="nightly", priority=5, max_jobs=3, max_jobs_per_executor=2, max_failed="50%",
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )  # fmt: skip
    given = start_records(group, first.ref)
    for one, plain in zip(given, start_records(group, noop(group).ref), strict=True):
        for each in fields(one):
            if each.name not in NOT_START_OPTIONS[type(one)]:
                assert getattr(one, each.name) != getattr(plain, each.name), (
                    f"the start in this test does not set {each.name}"
                )
    group.client.undrain("e1")
    group.eventually(
        lambda: [one.state for one in group.client.operations()] == ["pending"], "the next operation is pending", "e1"
    )
    (next_operation,) = group.client.operations()
    assert next_operation.op != first.ref
    for before, after in zip(given, start_records(group, next_operation.op), strict=True):
        for each in fields(before):
            if each.name not in DIFFERENT_IN_EACH:
                assert getattr(after, each.name) == getattr(before, each.name), each.name


def test_L26_an_operation_waits_for_more_predecessors_than_one_transaction_compares(group: Daemons) -> None:
    group.start("e1")
    before = group.client.start_operations([start() for _ in range(100)])
    last = noop(group, after=before, request_id="last")
    assert noop(group, after=before, request_id="last").ref == last.ref
    assert finished(last) >= max(finished(op) for op in before)


@pytest.mark.parametrize("fails", [True, False])
def test_many_joins_with_ids_end_or_are_cancelled_together(group: Daemons, fails: bool) -> None:
    """A transaction ends as many of them as etcd accepts, and releases their ids."""
    group.start("e1")
    first = start(0.5, fail=fails)
    joins = [Start("join", "@cluster", after=(first,), options={"id": f"j{n}"}) for n in range(80)]
    ops = group.client.start_operations([first, *joins])
    assert {op.wait(LIMIT).state for op in ops[1:]} == {"cancelled" if fails else "success"}
    group.eventually(lambda: not group.client.operations(), "no operation is open", "e1")
    again = group.client.start_operations([Start("join", "@cluster", options={"id": "j0"})])
    assert not again[0].already_started
