"""Evaluations of policies: due triggers, missed intervals, verdicts, and what they consume."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from distop.decide import policy_evaluation as e
from distop.decide.policy_evaluation import Facts, due, evaluate, next_interval, wanted
from distop.decide.policy_view import PolicyView
from distop.protocol.keys import Keys
from distop.protocol.policy import EmittedEvent, Policy, PolicyState, PolicyVerdict, SeenPolicy, WaitingEvents
from distop.protocol.revisioned import Change
from distop.protocol.txn import KeyValue

HOUR = 3_600.0


FRESH = PolicyState()


def seen(state: PolicyState = FRESH, events: tuple[str, ...] = (), **fields: Any) -> SeenPolicy:
    policy = Policy("compact", "u", **{"on": ("version",), **fields})
    waiting = tuple(EmittedEvent(f"id-{name}", name, "now") for name in events)
    return SeenPolicy(policy, 5, state, 6, WaitingEvents(waiting), 7)


def facts(now: float = 0.0, version: str | None = "v2", **fields: Any) -> Facts:
    return Facts(now, version, **fields)


# ------------------------------------------------------------------- triggers


def test_a_version_is_due_until_it_was_evaluated() -> None:
    one = seen()
    assert due(one, 0.0, None) == ()
    assert due(one, 0.0, "v2") == ("version@v2",)
    after = evaluate(one, due(one, 0.0, "v2"), facts()).after
    assert due(replace(one, state=after), 0.0, "v2") == ()
    assert due(replace(one, state=after), 0.0, "v3") == ("version@v3",)


@pytest.mark.parametrize(
    ("now", "is_due", "counted"),
    [(HOUR - 1, False, 0.0), (HOUR, True, HOUR), (HOUR + 5, True, HOUR), (7.5 * HOUR, True, 7 * HOUR)],
)
def test_missed_intervals_count_once(now: float, is_due: bool, counted: float) -> None:
    start = 1_000_000.0
    one = seen(PolicyState(every_at=start), on=(), every=HOUR)
    triggers = due(one, start + now)
    assert bool(triggers) is is_due
    if is_due:
        after = evaluate(one, triggers, facts(start + now, None)).after
        assert after.every_at == start + counted
        assert due(replace(one, state=after), start + now) == ()
        assert next_interval(one.policy, after, start + now) == start + counted + HOUR  # type: ignore[arg-type]


def test_the_first_interval_is_due_at_once_and_so_is_one_that_a_wrong_clock_counted() -> None:
    assert due(seen(on=(), every=HOUR), 5.0 * HOUR)
    ahead = seen(PolicyState(every_at=9 * HOUR), on=(), every=HOUR)
    assert due(ahead, 5.0 * HOUR)
    assert evaluate(ahead, due(ahead, 5 * HOUR), facts(5 * HOUR)).after.every_at == 5 * HOUR
    assert not due(seen(PolicyState(every_at=5.5 * HOUR), on=(), every=HOUR), 5.0 * HOUR)


def test_events_of_the_policy_are_due_and_consumed_together() -> None:
    one = seen(events=("loaded", "loaded", "other"), on=("event:loaded",))
    triggers = due(one, 0.0)
    assert triggers == ("event:loaded@id-loaded", "event:loaded@id-loaded")
    assert set(evaluate(one, triggers, facts()).after.consumed) == {"id-loaded", "id-other"}


def test_a_paused_or_absent_policy_is_never_due() -> None:
    assert due(seen(every=1.0, events=("a",), on=("version", "event:a"), paused=True), 9e9, "v9") == ()
    assert due(SeenPolicy(None, 0), 9e9, "v9") == ()


# ------------------------------------------------------------------- verdicts


def test_a_condition_decides_and_its_inputs_are_kept() -> None:
    one = seen(when="small_files > 50 and oldest_snapshot > 1d and hours_since.compact > 6")
    assert wanted(one.policy) == e.Wanted(  # type: ignore[arg-type]
        frozenset({"small_files", "oldest_snapshot"}), frozenset({"compact"}), True, 402_653_184
    )
    known = facts(statistics={"small_files": 51.0, "oldest_snapshot": 2 * 86_400.0}, ended={"compact": math.inf})
    yes = evaluate(one, ("version@v2",), known)
    assert (yes.starts, yes.evaluation.verdict) == (True, PolicyVerdict.STARTED)
    assert yes.evaluation.inputs == {
        "version": "v2",
        "small_files": 51,
        "oldest_snapshot": "172800 s",
        "hours_since.compact": "never",
    }
    no = evaluate(one, ("version@v2",), replace(known, ended={"compact": 5 * HOUR}))
    assert (no.starts, no.evaluation.verdict, no.after.version) == (False, PolicyVerdict.NO, "v2")
    assert no.evaluation.inputs["hours_since.compact"] == 5.0


@pytest.mark.parametrize(
    ("changes", "verdict", "why"),
    [
        ({"problem": "no disk"}, PolicyVerdict.FAILED, "no disk"),
        ({"statistics": {"snapshots": None}}, PolicyVerdict.FAILED, "has no snapshots"),
        ({"active": "t/compact/1"}, PolicyVerdict.WAITS, "t/compact/1, which it started, has not ended"),
    ],
)
def test_a_trigger_stays_due_if_nothing_can_be_decided_or_started(
    changes: dict[str, Any], verdict: PolicyVerdict, why: str
) -> None:
    one = seen(
        PolicyState(version="v1"), events=("loaded",), when="snapshots > 1", every=HOUR, on=("version", "event:loaded")
    )
    known = {"statistics": {"snapshots": 5.0}, **changes}
    found = evaluate(one, due(one, 9 * HOUR, "v2"), facts(9 * HOUR, **known))
    assert (found.starts, found.evaluation.verdict) == (False, verdict)
    assert why in found.evaluation.why
    assert replace(found.after, kept=()) == one.state, "nothing is consumed"
    again = replace(one, state=found.after)
    assert not e.news(again, evaluate(again, due(again, 9 * HOUR, "v2"), facts(9 * HOUR, **known)))


def test_a_version_that_cannot_be_read_is_recorded_once() -> None:
    one, now = seen(PolicyState(version="v1")), 9 * HOUR
    failing = facts(now, None, problem="no such bucket")
    found = e.of_version(one, failing)
    assert found is not None
    assert (found.evaluation.verdict, found.evaluation.why) == (
        PolicyVerdict.FAILED,
        "cannot read version: no such bucket",
    )
    assert replace(found.after, kept=()) == one.state, "nothing is consumed"
    assert e.news(one, found)
    one = replace(one, state=found.after)

    def written(later: float, text: str) -> bool:
        again = e.of_version(one, facts(now + later, None, problem=text))
        return again is not None and e.news(one, again)

    assert not written(1.0, "no such bucket")
    assert not written(900.0, "no such bucket")
    assert not written(e.FAILURES_EVERY - 1, "no such bucket (request 7)")
    assert written(e.FAILURES_EVERY, "no such bucket (request 7)")
    readable = e.of_version(one, facts(now + 5.0, "v1"))
    assert readable is not None
    assert e.news(one, readable)
    assert (readable.evaluation.verdict, readable.evaluation.why) == (PolicyVerdict.NO, e.READABLE_AGAIN)
    one = replace(one, state=readable.after)
    assert e.of_version(one, facts(now + 6.0, "v1")) is None
    assert not written(10.0, "no such bucket")
    assert written(5.0 + e.FAILURES_EVERY, "no such bucket")


def test_the_version_of_a_policy_without_that_trigger_is_not_recorded() -> None:
    assert e.of_version(seen(on=(), every=HOUR), facts(version=None, problem="no disk")) is None
    assert e.of_version(seen(), facts(version=None)) is None
    assert e.of_version(seen(), facts()) is None


def test_a_failure_with_changing_texts_is_written_every_ten_minutes() -> None:
    one = seen(PolicyState(version="v1"), when="snapshots > 1")
    written = 0
    for second in range(0, 3_600, 5):
        found = evaluate(one, ("version@v2",), facts(9 * HOUR + second, problem=f"request {second} failed"))
        if e.news(one, found):
            one, written = replace(one, state=found.after), written + 1
    assert written == 6


def test_the_pause_after_failures_doubles_up_to_some_hours() -> None:
    one, now = seen(PolicyState(version="v1")), 1_000_000.0
    last = 0.0
    for failures in (1, 2, 3, 9, 10, 5_000):
        known = facts(now, failures=failures, failed_at=now)
        until = known.paused_until
        assert last <= until <= now + e.LONGEST_PAUSE
        assert not evaluate(one, ("version@v2",), known).starts
        assert evaluate(one, ("version@v2",), replace(known, now=until)).starts
        last = until
    assert facts(now, failures=3, failed_at=now).paused_until == now + 4 * e.FIRST_PAUSE
    assert last == now + e.LONGEST_PAUSE
    wrong_clock = facts(now, failures=1, failed_at=now + 2 * e.LONGEST_PAUSE)
    assert evaluate(one, ("version@v2",), wrong_clock).starts


def test_a_pause_after_failures_consumes_nothing_and_is_written_once() -> None:
    one = seen(PolicyState(version="v1"), events=("loaded",), every=HOUR, on=("version", "event:loaded"))
    now = 9 * HOUR
    found = evaluate(one, due(one, now, "v2"), facts(now, failures=2, failed_at=now - 5))
    assert (found.starts, found.evaluation.verdict) == (False, PolicyVerdict.WAITS)
    assert replace(found.after, kept=()) == one.state
    again = replace(one, state=found.after)
    assert not e.news(again, evaluate(again, due(again, now, "v2"), facts(now + 5, failures=2, failed_at=now - 5)))


def test_a_long_reason_is_the_same_reason_after_it_was_shortened() -> None:
    one = seen(when="snapshots > 1")
    found = evaluate(one, ("version@v2",), facts(problem="x" * 5_000))
    stored = replace(one, state=PolicyState.decode(found.after.encode()))
    assert not e.news(stored, evaluate(stored, ("version@v2",), facts(HOUR, problem="x" * 5_000)))


def test_a_condition_that_does_not_hold_needs_no_wait_for_the_last_operation() -> None:
    one = seen(when="files > 5")
    found = evaluate(one, ("version@v2",), facts(statistics={"files": 1.0}, active="t/compact/1"))
    assert found.evaluation.verdict is PolicyVerdict.NO


def test_new_partitions_count_since_the_last_start() -> None:
    one = seen(when="new_partitions >= 2")
    assert wanted(one.policy).statistics == {"partitions"}  # type: ignore[arg-type]
    known = facts(statistics={"partitions": 7.0})
    begun = evaluate(one, ("version@v2",), known)
    after = e.started(begun, "t/compact/1", known)
    assert (after.partitions, after.op, after.kept[-1].op) == (7, "t/compact/1", "t/compact/1")
    later = replace(one, state=after)
    assert not evaluate(later, ("version@v3",), facts(version="v3", statistics={"partitions": 8.0})).starts
    assert evaluate(later, ("version@v3",), facts(version="v3", statistics={"partitions": 9.0})).starts


def test_the_target_size_of_the_argument_decides_which_files_are_small() -> None:
    assert wanted(Policy("compact", "u", {"target_bytes": 1_000}, 1.0)).small_bytes == 750
    for wrong in (True, "big", -1):
        assert wanted(Policy("compact", "u", {"target_bytes": wrong}, 1.0)).small_bytes == 402_653_184


def test_a_refused_start_leaves_its_trigger_due() -> None:
    one = seen()
    begun = evaluate(one, ("version@v2",), facts())
    found = e.refused(one, begun, "t/compact/9 has the same id", facts())
    assert (found.evaluation.verdict, found.after.version) == (PolicyVerdict.WAITS, "")


# ----------------------------------------------------------------------- view


def test_the_view_folds_policies_events_and_evaluators() -> None:
    keys = Keys("prod")
    view = PolicyView(keys)

    def change(key: str, value: bytes = b"x", mod: int = 1, *, deleted: bool = False) -> Change:
        return Change(KeyValue(key, value, mod), deleted)

    policy, event = keys.policy("a.b", "one"), keys.policy_event("a.b", "one")
    assert view.apply([change(policy), change(event), change(keys.policy_evaluator("a.b"), b"inc", 7)]) == (
        {"a.b"},
        {"a.b"},
    )
    assert list(view.tables()) == ["a.b"]
    assert (view.policies("a.b").keys(), view.evaluators["a.b"].mod) == ({"one"}, 7)
    assert view.event("a.b", "one") is not None
    assert view.waits("a.b")
    assert view.apply([change(f"prod/{'distOpPolicy'}.%"), change("other")]) == (set(), set())
    listed = view.listing()
    listed.apply([change(policy), change(event, mod=2), change(keys.policy("c", "two"))])
    assert view.take(listed) == {"a.b", "c"}
    assert view.take(listed) == set()
    assert view.evaluators == {}
    view.apply([change(policy, deleted=True), change(event, deleted=True)])
    assert not view.has("a.b")
    assert view.event("a.b", "one") is None
