"""Operations that wait for a time and for others, with real daemons on a real etcd, whose history is audited."""

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


def test_L16_a_chain_runs_in_its_order(group: Daemons) -> None:
    group.start("e1")
    group.start("e2")
    first = noop(group, sleep=0.3)
    second = noop(group, after=[first])
    third = group.client.start_operation("noop", "@cluster", {}, after=[second.ref, first.ref])
    assert third.status().state == "pending"
    assert finished(first) < finished(second) < finished(third)
    assert noop(group, after=[first]).wait(LIMIT).state == "success", "what is complete is waited for no more"


def test_L24_an_abort_cascades_to_all_successors_with_the_reason(group: Daemons) -> None:
    group.start("e1")
    group.client.drain("e1", wait=True, timeout=LIMIT)  # so that nothing has ended before all of them wait
    bad = noop(group, fail=True)
    second = noop(group, after=[bad])
    third = noop(group, after=[second])
    whatever = noop(group, after=[After(bad.parts, "end")])
    group.client.undrain("e1")
    ended = third.wait(LIMIT)
    assert (second.wait(LIMIT).state, ended.state) == ("cancelled", "cancelled")
    assert ended.record["cancel"] == {"reason": "aborted", "text": f"{second.ref} ended as cancelled"}
    assert second.wait(LIMIT).record["cancel"]["text"] == f"{bad.ref} ended as failed"
    assert whatever.wait(LIMIT).state == "success"
    with pytest.raises(OperationStartError, match="ended as failed, so an operation that waits for its success"):
        noop(group, after=[bad])


def test_L36_a_join_ends_with_the_last_of_those_it_waits_for(group: Daemons) -> None:
    group.start("e1")
    parts = [noop(group, sleep=0.1) for _ in range(40)]
    join = group.client.start_operation("join", "@cluster", after=parts)
    assert finished(join) >= max(finished(part) for part in parts)
    assert join.wait().jobs["total"] == 0


def test_P2_it_begins_at_its_time_and_one_that_has_passed_is_now(group: Daemons) -> None:
    group.start("e1")
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    later = noop(group, not_before=due)
    assert later.status().state == "pending"
    assert noop(group, not_before="2020-01-01T00:00:00Z").wait(LIMIT).state == "success"
    assert later.status().state == "pending"
    assert finished(later) >= due
    for wrong in ("2030-01-01T00:00:00", "tomorrow"):
        with pytest.raises(InvalidArgument, match="zone|start time"):
            noop(group, not_before=wrong)


def test_P3_what_came_due_while_nobody_ran_is_done_once(group: Daemons) -> None:
    (first,) = group.start("e1")
    later = noop(group, delay=1.0)
    first.kill()
    due = datetime.now(UTC) + timedelta(seconds=1.0)
    group.start("e2")
    assert finished(later) >= due - timedelta(seconds=1)
    assert [one.op for one in group.client.history(TABLE)] == [later.ref]


def test_one_that_waits_is_cancelled_at_once_and_with_it_what_waits_for_it(group: Daemons) -> None:
    group.start("e1")
    waiting = noop(group, delay=3600)
    behind = noop(group, after=[waiting])
    with pytest.raises(NotAllowed, match="has not started: it cannot be paused"):
        waiting.pause()
    waiting.cancel("not needed")
    ended = waiting.wait(LIMIT)
    assert (ended.state, ended.record["cancel"]["text"]) == ("cancelled", "not needed")
    assert behind.wait(LIMIT).state == "cancelled"
    with pytest.raises(NotAllowed, match="ended as cancelled"):
        waiting.cancel()


def test_a_dependency_on_nothing_is_refused(group: Daemons) -> None:
    group.start("e1")
    with pytest.raises(NotFound, match="no operation t/noop/999 to wait for"):
        noop(group, after=["t/noop/999"])
    assert noop(group).wait(LIMIT).op == "t/noop/1", "nothing was drawn for what was refused"


# --------------------------------------------------------------------- graphs


def start(sleep: float = 0, fail: bool = False, after: tuple[object, ...] = ()) -> Start:
    return Start("noop", TABLE, {"sleep": sleep, "fail": ["0"] if fail else []}, after=after)


def test_L19_L31_a_graph_is_started_as_a_whole_and_runs_in_its_order(group: Daemons) -> None:
    group.start("e1")
    first, left, right, last = start(0.1), start(0.2), start(), start()
    ops = group.client.start_operations(chain(first, parallel(left, right), last))
    times = [finished(op) for op in ops]
    assert times[0] < min(times[1:3])
    assert max(times[1:3]) < times[3]


@pytest.mark.parametrize("size", [3, 200])
def test_L19_one_that_is_refused_refuses_the_whole_graph(group: Daemons, size: int) -> None:
    group.start("e1")
    wrong = Start("noop", TABLE, {"colour": "red"})
    with pytest.raises(InvalidArgument, match="colour"):
        group.client.start_operations([*(start() for _ in range(size)), wrong])
    assert group.client.history() == []
    assert group.client.operations() == []
    assert noop(group).wait(LIMIT).op == "t/noop/1"


def test_L19_a_graph_of_many_transactions_is_started_once(group: Daemons) -> None:
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


def test_L26_dependencies_are_added_to_what_has_not_begun(group: Daemons) -> None:
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


def test_P3_a_series_comes_again_until_its_count_whoever_dies(group: Daemons) -> None:
    first, _ = group.start("e1", "e2")
    noop(group, every=Every(0.3, times=4))
    group.eventually(lambda: len(group.client.history(TABLE)) >= 2, "the second of the series has ended", "e1", "e2")
    first.kill()
    group.eventually(lambda: len(group.client.history(TABLE)) == 4, "all of the series have ended", "e1", "e2")
    assert group.client.operations() == []


def test_P3_a_cancel_ends_a_series(group: Daemons) -> None:
    group.start("e1")
    noop(group, every=0.2)
    group.eventually(lambda: any(one.state == "pending" for one in group.client.operations()), "one waits", "e1")

    def cancelled() -> bool:
        for one in group.client.operations():
            if one.state == "pending":
                try:
                    group.client.operation(one.op).cancel()
                except NotAllowed:  # it has begun meanwhile, and ended
                    return False
        return group.client.history(TABLE)[0].state == "cancelled"

    group.eventually(cancelled, "the one that waits is cancelled", "e1")
    assert all(one.state != "pending" for one in group.client.operations())


def test_P3_a_series_is_ended_by_any_operation_of_it(group: Daemons) -> None:
    """Whoever wanted to end one had to find out which operation of it goes on, and to be faster than the next."""
    group.start("e1")
    first = noop(group, every=0.2)
    group.eventually(lambda: len(group.client.history(TABLE)) >= 3, "the third of the series has ended", "e1")
    ended = first.end_series("enough")
    assert group.client.operation(ended).wait(LIMIT).state == "cancelled"
    group.eventually(lambda: not group.client.operations(), "nothing goes on", "e1")
    records = group.client.history(TABLE)
    assert records[0].op == ended
    with pytest.raises(NotAllowed, match=f"the series that started with {first.ref} has ended"):
        group.client.operation(records[1].op).end_series()
    with pytest.raises(NotAllowed, match="is not part of a series"):
        noop(group, delay=60).end_series()
    with pytest.raises(NotFound):
        group.client.operation(f"{TABLE}/noop/999").end_series()


OF_EACH = {"request_id", "time", "not_before", "series"}
"""The fields of a spec in which the operations of a series differ."""
NOT_CHOSEN = {
    Spec: {"table", "one_at_a_time", "version", "rerun_of", "hold", "follows", "not_before"},
    Rules: {"can_fail", "lost", "resumable", "batch", "completes", "cleans", "reports_only", "joins", "code"},
    Retry: {"initial", "maximum"},
    Options: set[str](),
}
"""Fields that no start gives, or none of a series: those of the behavior, the table and other kinds of operations."""


def terms(group: Daemons, op: str) -> list[Any]:
    """What stands in the records of an operation that a start gives, or might: spec, rules, retries, options."""
    records, ref, keys = dump(group.endpoint), OperationRef.parse(op), Keys()
    spec = Spec.decode(records[keys.of(ref, "spec")].encode())
    options = Options.decode(records[keys.of(ref, "options")].encode()) if keys.of(ref, "options") in records else None
    return [spec, spec.rules, spec.rules.retry, options or Options()]


def test_hole_9_all_terms_of_a_start_hold_for_the_next_of_its_series(group: Daemons) -> None:
    """The time limit of its jobs was lost."""
    group.start("e1", options=("--label", "zone=a"))
    group.client.drain("e1", wait=True, timeout=LIMIT)  # so that the records of the first can be read
    first = group.client.start_operation(
        "noop", TABLE, {"jobs": 2, "sleep": 0.01}, partitions=["0"], failure_policy="fail_fast", retry_attempts=7,
        time_limit=50.0, submitter="ann", labels={"team": "a"}, every=Every(3600, times=2), where={"zone": "a"},
        id="nightly", priority=5, max_jobs=3, max_jobs_per_executor=2, max_failed="50%",
    )  # fmt: skip
    given = terms(group, first.ref)
    for one, plain in zip(given, terms(group, noop(group).ref), strict=True):
        for each in fields(one):
            if each.name not in NOT_CHOSEN[type(one)]:
                assert getattr(one, each.name) != getattr(plain, each.name), f"no start of this test gives {each.name}"
    group.client.undrain("e1")
    group.eventually(lambda: [one.state for one in group.client.operations()] == ["pending"], "the next waits", "e1")
    (following,) = group.client.operations()
    assert following.op != first.ref
    for before, after in zip(given, terms(group, following.op), strict=True):
        for each in fields(before):
            if each.name not in OF_EACH:
                assert getattr(after, each.name) == getattr(before, each.name), each.name


def test_L26_one_waits_for_more_than_one_transaction_compares(group: Daemons) -> None:
    group.start("e1")
    before = group.client.start_operations([start() for _ in range(100)])
    last = noop(group, after=before, request_id="last")
    assert noop(group, after=before, request_id="last").ref == last.ref
    assert finished(last) >= max(finished(op) for op in before)


@pytest.mark.parametrize("fails", [True, False])
def test_joins_and_aborts_of_many_ids_end_together(group: Daemons, fails: bool) -> None:
    """As many as etcd takes, with what gives back their ids."""
    group.start("e1")
    first = start(0.5, fail=fails)
    joins = [Start("join", "@cluster", after=(first,), options={"id": f"j{n}"}) for n in range(80)]
    ops = group.client.start_operations([first, *joins])
    assert {op.wait(LIMIT).state for op in ops[1:]} == {"cancelled" if fails else "success"}
    group.eventually(lambda: not group.client.operations(), "nothing goes on", "e1")
    again = group.client.start_operations([Start("join", "@cluster", options={"id": "j0"})])
    assert not again[0].already_started
