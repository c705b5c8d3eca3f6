"""The table of reasons for which an operation waits, and the one judgement that chooses among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distop.protocol.behavior_declaration import Rules
from distop.protocol.dependencies import Hold
from distop.protocol.executor_nodes import WAITS_FOR_STORE, NodeState, Serves
from distop.protocol.jobs import Claim
from distop.protocol.json_codec import rfc3339
from distop.protocol.operation_options import Options
from distop.protocol.plan import Plan
from distop.protocol.records import Attempts, Decision, Node, OperationRef, Phase, Spec, State
from distop.services.inspection.reasons import ADVICE, Code, reasons
from distop.services.inspection.status import Snapshot, judge, view_of

REF = OperationRef("t", "noop", "", 1)
NOW = 1_000_000.0
NODE = Node("e1", "h", 2, ("noop",))
CAPABLE = {"i1": NODE}
DRAINED = {"i1": replace(NODE, state=NodeState.DRAINED)}
PARTLY = {**CAPABLE, "i2": Node("e2", "h", 2, ("noop",), state=NodeState.DRAINING)}
STARVED = {
    "i1": Node("e1", "h", 2, ("noop",), spark="no cores from Spark: x"),
    "i2": Node("e2", "h", 2, ("noop",)),
}
UNABLE = {"i1": Node("e1", "h", 2, (), unable={"noop": "Java 17 or newer is needed"})}
UNABLE_A = {"i3": Node("e3", "h", 2, (), labels={"zone": "a"}, unable={"noop": "no Java"})}
FAILING = {"i1": replace(NODE, failing={"noop": "no JVM"})}
ELSEWHERE = {"i1": replace(NODE, serves=Serves(tables=("sales.*",)))}
ONLY_T = {"i1": replace(NODE, serves=Serves(tables=("t",)))}
ONLY_VALIDATE = {"i1": replace(NODE, behaviors=("validate",), serves=Serves(types=("validate",)))}
BUSY = {"i1": replace(NODE, doing={str(REF): f"{WAITS_FOR_STORE}: cannot read s3://a/b: status 503"})}
UNREAD = "it cannot read the operation: no plan; it tries again within 120 s"
SPEC = Spec("r", rfc3339(NOW), "me", Rules())
PLANNING = Snapshot(REF, State.RUNNING, Phase.PLANNING, SPEC)
OPEN = replace(PLANNING, phase=None, plan=Plan(4, "", "", 1))
PAUSED = replace(OPEN, state=State.PAUSED, phase=Phase.PAUSED)
PENDING = replace(PLANNING, state=State.PENDING, phase=Phase.WAITING)
CANCELLING = replace(OPEN, state=State.CANCELLING, phase=Phase.CANCELLING)
COMPLETING = replace(OPEN, decision=Decision(State.SUCCESS, 4, 4, 0))
BROKEN = Decision(State.SUCCESS, 4, 4, 0, attempts=1, error="no")
STOPPED = Decision(State.CANCELLED, 4, 1, 0)
HELD = Claim("e1", "i1", 1, 0)
HELD_TOO = Claim("e2", "i2", 1, 0)
LOST = Claim("e9", "i9", 1, 0)
RELEASED = Claim("e1", "", 2, 0)
OWNED = Claim("w", "", 1, 0, actor="w", duration=10.0, grant="0" * 16, since=rfc3339(NOW - 60))
AGAIN = Claim("e1", "", 2, 1, rfc3339(NOW + 50), "disk full")


def judged(snapshot: Snapshot, nodes: Any = CAPABLE, alarms: Any = (), unreadable: str = "", **view: Any) -> list[Any]:
    seen = replace(view_of(snapshot, nodes, NOW, alarms, unreadable), **view)
    return [(str(reason.code), reason.text) for reason in reasons(seen)]


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("space-alarm", {"snapshot": OPEN, "alarms": ("NOSPACE",)}, "etcd to have space again"),
    ("newer-release", {"snapshot": replace(OPEN, spec=replace(SPEC, version=2))}, "its records are of version 2"),
    ("unreadable-records", {"snapshot": OPEN, "unreadable": "the record at x"}, "executors can read: the record at x"),
    ("refused-by-etcd", {"snapshot": OPEN, "nodes": {"i1": replace(NODE, refused={"t/noop/1": "reports: too large"})}},
     "etcd to accept a write of executor e1, which retries with back-off: reports: too large"),
    ("refused-by-etcd", {"snapshot": replace(PENDING, predecessors=1, behind=("t/noop/9",)),
                         "nodes": {"i1": replace(NODE, refused={"t/noop/9": "ends of operations: too large"})}},
     "a write of executor e1 about t/noop/9, which retries with back-off: ends of operations: too large"),
    ("refused-by-etcd", {"snapshot": replace(PENDING, spec=replace(SPEC, hold="g"), hold=Hold("graph")),
                         "nodes": {"i1": replace(NODE, refused={"hold g": "deny or delete: too large"})}},
     "a write of executor e1 about hold g, which retries with back-off: deny or delete: too large"),
    ("refused-by-etcd", {"snapshot": OPEN, "nodes": {"i1": replace(NODE, refused={"t/noop/9": "no"}, refused_more=3)}},
     "writes of executor e1 about 3 more operations, if this is one of them"),
    ("paused", {"snapshot": PAUSED}, "resume"),
    ("pausing", {"snapshot": replace(PAUSED, claims={0: HELD})}, "1 job to finish"),
    ("no-executor", {"snapshot": OPEN, "nodes": {}}, "an executor that offers `noop`"),
    ("no-executor", {"snapshot": OPEN, "nodes": UNABLE}, "(e1 cannot: Java 17 or newer is needed)"),
    ("no-executor", {"snapshot": OPEN, "nodes": FAILING}, "that can run `noop` (e1 cannot: no JVM)"),
    ("labels", {"snapshot": replace(OPEN, spec=replace(SPEC, where={"zone": "a"})), "nodes": {**CAPABLE, **UNABLE_A}},
     "and has the labels zone=a (e3 cannot: no Java)"),
    ("drained", {"snapshot": OPEN, "nodes": {**DRAINED, **UNABLE_A}},
     "(`distop drain e1 --undo`) (e3 cannot: no Java)"),
    ("drained", {"snapshot": OPEN, "nodes": DRAINED}, "is not drained (`distop drain e1 --undo`)"),
    ("labels", {"snapshot": replace(OPEN, spec=replace(SPEC, where={"zone": "a"}))},
     "an executor that offers `noop` and has the labels zone=a"),
    ("without-code", {"snapshot": CANCELLING, "nodes": {"i1": Node("e1", "h", 2, ("other",))}, "coordinated": False},
     "an executor that offers `noop`; if none starts within a minute, it ends without running its completion code"),
    ("without-code", {"snapshot": replace(CANCELLING, spec=replace(SPEC, where={"zone": "a"}), decision=STOPPED)},
     "an executor that offers `noop` and has the labels zone=a; if none starts"),
    ("without-code", {"snapshot": replace(CANCELLING, spec=replace(SPEC, where={"zone": "a"}), decision=STOPPED),
      "nodes": {**CAPABLE, "i4": replace(NODE, labels={"zone": "a"}, state=NodeState.DRAINED)}},
     "an executor that offers `noop`, has the labels zone=a and is not drained; if none starts"),
    ("no-executor", {"snapshot": CANCELLING, "nodes": {}}, "an executor that offers `noop`"),
    ("not-served", {"snapshot": OPEN, "nodes": ELSEWHERE}, "an executor: no live executor serves table t"),
    ("not-served", {"snapshot": OPEN, "nodes": {**ELSEWHERE, "i5": Node("e5", "h", 2, ())}},
     "an executor: no live executor serves table t"),
    ("not-served", {"snapshot": replace(OPEN, plan=Plan(4, "", "", 1, beside=("u",))), "nodes": ONLY_T},
     "no live executor serves table u"),
    ("not-served", {"snapshot": replace(OPEN, spec=replace(SPEC, rules=Rules(code=False))), "nodes": ELSEWHERE},
     "no live executor serves table t"),
    ("not-served", {"snapshot": replace(OPEN, spec=replace(SPEC, rules=Rules(code=False))), "nodes": ONLY_VALIDATE},
     "no live executor serves the type noop on table t"),
    ("without-code", {"snapshot": CANCELLING, "nodes": ELSEWHERE},
     "an executor that serves table t; if none starts within a minute"),
    ("drained", {"snapshot": OPEN, "nodes": {**ELSEWHERE, "i6": replace(NODE, state=NodeState.DRAINED)}},
     "an executor that offers `noop` and is not drained"),
    ("partly-drained", {"snapshot": OPEN, "nodes": PARTLY}, "the drained executor e2 to work again"),
    ("time", {"snapshot": replace(PENDING, spec=replace(SPEC, not_before=rfc3339(NOW + 60)))},
     f"its start time, {rfc3339(NOW + 60)}"),
    ("predecessors", {"snapshot": replace(PENDING, predecessors=3, behind=("t/x/1", "t/x/2"))},
     "3 operations to end (t/x/1, t/x/2 and others)"),
    ("predecessors", {"snapshot": replace(PENDING, predecessors=1, behind=("t/x/1",))},
     "1 operation to end (t/x/1)"),
    ("held", {"snapshot": replace(PENDING, hold=Hold("graph"))}, "the rest of its graph to be inserted"),
    ("held", {"snapshot": replace(PENDING, hold=Hold("prepared"))}, "its submission to be confirmed"),
    ("begin", {"snapshot": replace(PENDING, spec=replace(SPEC, not_before=rfc3339(NOW - 60)))},
     "its coordinator to start it, and operations on t that exclude it to end"),
    ("no-coordinator", {"snapshot": PLANNING, "coordinated": False}, "to be elected to coordinate `noop` on t"),
    ("planning", {"snapshot": PLANNING}, "planning"),
    ("planning-fails", {"snapshot": replace(PLANNING, planning=Attempts(2, "gone"))},
     "planning, attempt 3 (the last one failed: gone)"),
    ("completion", {"snapshot": COMPLETING}, "completion"),
    ("completion", {"snapshot": replace(OPEN, success=4)}, "completion"),
    ("completion-fails", {"snapshot": replace(COMPLETING, decision=BROKEN)},
     "completion, attempt 2 (the last one failed: no)"),
    ("holders", {"snapshot": replace(CANCELLING, claims={0: HELD})}, "its running jobs to stop"),
    ("lease-lost", {"snapshot": replace(OPEN, claims={0: LOST, 1: LOST})},
     "2 jobs to be taken over from e9, whose session has ended"),
    ("slots", {"snapshot": OPEN}, "free slots"),
    ("slots", {"snapshot": OPEN, "elsewhere": {"t/noop/2": 1, "t/noop/3": 5}},
     "free slots: executors run 5 jobs of t/noop/3, 1 job of t/noop/2"),
    ("skipped", {"snapshot": OPEN, "nodes": {"i1": replace(NODE, skipped={"t/noop/1": UNREAD})}},
     f"executor e1 to claim its jobs again: {UNREAD}"),
    ("skipped", {"snapshot": OPEN, "nodes": {"i1": replace(NODE, skipped={"*": "its circuit breaker is open"})}},
     "executor e1 to claim its jobs again: its circuit breaker is open"),
    ("skipped", {"snapshot": OPEN, "nodes": {"i1": replace(NODE, skipped={"t/noop/9": UNREAD}, skipped_more=3)}},
     "executor e1, which skips 3 more operations for a while, if this is one of them"),
    ("unclaimed", {"snapshot": OPEN, "elsewhere": {}}, "an executor to claim its jobs"),
    ("unclaimed", {"snapshot": replace(OPEN, success=3, claims={3: RELEASED}), "elsewhere": {}},
     "an executor to claim its jobs"),
    ("no-worker", {"snapshot": replace(OPEN, spec=replace(SPEC, rules=Rules(code=False)))}, "owns jobs of `noop`"),
    ("claim-overdue", {"snapshot": replace(OPEN, claims={0: OWNED, 1: replace(OWNED, since=rfc3339(NOW - 5))})},
     f"1 job of w, whose claims are overdue unless they were extended (granted {rfc3339(NOW - 60)} for 10 s)"),
    ("no-coordinator", {"snapshot": replace(OPEN, spec=replace(SPEC, rules=Rules(code=False))), "nodes": {}},
     "any executor to be elected"),
    ("retry", {"snapshot": replace(OPEN, success=3, claims={3: AGAIN})},
     f"retry of 1 job, the next at {rfc3339(NOW + 50)}"),
    ("job-limit", {"snapshot": replace(OPEN, claims={0: HELD}), "job_limit": 1}, "its own limit of 1 job at once"),
    ("job-limit", {"snapshot": replace(OPEN, claims={0: HELD}, options=Options(max_jobs=1))}, "limit of 1 job"),
    ("no-cores", {"snapshot": replace(OPEN, claims={0: HELD}), "nodes": STARVED}, "Spark cores on e1 (no cores from"),
    ("busy-store", {"snapshot": replace(OPEN, claims={0: HELD}), "nodes": BUSY},
     "the store of its table, on e1 (cannot read s3://a/b: status 503)"),
    ("busy-store", {"snapshot": PLANNING, "nodes": BUSY}, "the store of its table, on e1 (cannot read s3://a/b"),
    ("busy-store", {"snapshot": COMPLETING, "nodes": BUSY}, "the store of its table, on e1 (cannot read s3://a/b"),
    ("busy-store", {"snapshot": replace(OPEN, success=4), "nodes": BUSY}, "the store of its table, on e1"),
    ("partly-no-cores", {"snapshot": replace(OPEN, claims={0: HELD, 1: HELD_TOO}), "nodes": STARVED},
     "Spark cores on e1 ("),
]  # fmt: skip


@pytest.mark.parametrize(("code", "given", "words"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_L27_each_reason_has_a_code_and_a_sentence(code: str, given: dict[str, Any], words: str) -> None:
    reasons = dict(judged(**given))
    assert words in reasons[code]


def test_L27_every_reason_has_a_case_advice_and_a_line_in_the_documents() -> None:
    assert {case[0] for case in CASES} == {str(code) for code in Code} == {str(code) for code in ADVICE}
    documents = (Path(__file__).parents[3] / "docs/operations/runbook.md").read_text()
    assert [str(code) for code in Code if f"| `{code}` |" not in documents] == []


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"options": Options(max_jobs=1)}, "`distop alter t/noop/1 --max-jobs 0 --max-jobs-per-executor 0`, and start"),
        ({"spec": replace(SPEC, rules=Rules(code=False), where={"zone": "a"})}, "`distop cancel t/noop/1`: workers"),
        ({}, "start a worker that owns jobs of `noop`"),
    ],
)
def test_an_operation_that_no_worker_may_own_gets_advice(given: dict[str, Any], advice: str) -> None:
    """Releases before took limits and labels for types without code."""
    snapshot = replace(OPEN, **{"spec": replace(SPEC, rules=Rules(code=False)), **given})
    (reason,) = reasons(view_of(snapshot, CAPABLE, NOW))
    assert reason.code is Code.NO_WORKER
    assert reason.advice.startswith(advice)


def test_the_most_important_reason_comes_first() -> None:
    everything = judged(PAUSED, DRAINED, ("NOSPACE",), "the record at x")
    assert [code for code, _ in everything] == ["space-alarm", "unreadable-records", "paused", "drained"]
    assert [code for code, _ in judged(replace(OPEN, claims={0: LOST}), PARTLY)] == [
        "partly-drained",
        "lease-lost",
        "slots",
    ]


def test_L27_a_pending_operation_waits_for_predecessors_and_its_start_time_before_executors() -> None:
    both = replace(PENDING, predecessors=1, spec=replace(SPEC, not_before=rfc3339(NOW + 60)))
    assert [code for code, _ in judged(both, {})] == ["predecessors", "time", "no-executor"]
    assert [code for code, _ in judged(PENDING, {}, coordinated=False)] == ["no-executor", "no-coordinator", "begin"]


def test_each_executor_that_skips_an_operation_is_named_with_its_reason() -> None:
    skips = replace(NODE, skipped={"t/noop/1": UNREAD})
    both = {"i2": replace(skips, executor="e2"), "i1": skips}
    reasons = [("skipped", f"executor {name} to claim its jobs again: {UNREAD}") for name in ("e1", "e2")]
    assert judged(OPEN, both, elsewhere={}) == reasons, "no other reason, since no executor would claim them"
    assert [code for code, _ in judged(OPEN, {**both, "i3": replace(NODE, executor="e3")}, elsewhere={})] == [
        *("skipped", "skipped", "unclaimed"),
    ]
    counts = replace(NODE, executor="e3", skipped_more=1)
    assert [code for code, _ in judged(OPEN, {"i1": skips, "i3": counts})] == ["skipped", "slots", "skipped"]
    assert judged(OPEN, {"i1": replace(NODE, skipped={"t/noop/9": UNREAD})}) == [("slots", "free slots")]
    assert judged(replace(OPEN, claims={0: HELD}), both) == [], "its jobs run"


@pytest.mark.parametrize(
    "changed",
    [{"state": NodeState.DRAINING}, {"behaviors": ("other",)}, {"labels": {}}, {"serves": Serves(tables=("u",))}],
)
def test_only_executors_that_may_claim_its_jobs_are_named(changed: dict[str, Any]) -> None:
    labelled = replace(NODE, labels={"zone": "a"})
    skips = replace(labelled, executor="e2", skipped={"t/noop/1": UNREAD}, skipped_more=2, **changed)
    snapshot = replace(OPEN, spec=replace(SPEC, where={"zone": "a"}))
    assert "skipped" not in [code for code, _ in judged(snapshot, {"i1": labelled, "i2": skips})]


def test_a_reason_that_only_slows_an_operation_is_not_in_its_status() -> None:
    limited = replace(view_of(replace(OPEN, claims={0: HELD}), PARTLY, NOW), job_limit=1)
    assert [(str(reason.code), reason.stops) for reason in reasons(limited)] == [
        ("partly-drained", False),
        ("job-limit", False),
    ]
    assert judge(replace(OPEN, claims={0: HELD}), PARTLY, NOW).waiting_for is None


@pytest.mark.parametrize(("code", "given", "words"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_L27_the_status_has_the_first_reason_that_stops_the_operation(
    code: str, given: dict[str, Any], words: str
) -> None:
    known = {name: given[name] for name in ("nodes", "alarms", "unreadable") if name in given}
    nodes, snapshot = known.pop("nodes", CAPABLE), given["snapshot"]
    view = view_of(snapshot, nodes, NOW, **known)
    first = next((reason.text for reason in reasons(view) if reason.stops), None)
    assert judge(snapshot, nodes, NOW, **known).waiting_for == first


def test_advice_quotes_the_operation_for_a_shell() -> None:
    odd = replace(PAUSED, ref=OperationRef("a b", "noop", "", 1))
    (paused,) = reasons(view_of(odd, CAPABLE, NOW))
    assert paused.advice == "`distop resume 'a b/noop/1'`"
    assert paused.to_json() == {"code": "paused", "text": "resume", "advice": paused.advice, "stops": True}
    for case in CASES:
        view = {k: v for k, v in case[1].items() if k not in ("snapshot", "nodes", "alarms", "unreadable")}
        base = view_of(case[1]["snapshot"], case[1].get("nodes", CAPABLE), NOW)
        assert not [r for r in reasons(replace(base, **view)) if "{" in r.advice or not r.advice]


def test_a_cancel_is_advised_only_where_it_ends_the_operation() -> None:
    labelled = replace(SPEC, where={"zone": "a"})

    def advice(snapshot: Snapshot, nodes: Any = CAPABLE) -> str:
        return " ".join(reason.advice for reason in reasons(view_of(snapshot, nodes, NOW)))

    for snapshot in (PENDING, PLANNING, OPEN, PAUSED):
        assert "distop cancel t/noop/1" in advice(replace(snapshot, spec=labelled))
        assert "distop cancel t/noop/1" in advice(snapshot, UNABLE)
    for snapshot in (CANCELLING, COMPLETING):
        assert "distop cancel" not in advice(replace(snapshot, spec=labelled))
        assert "distop cancel" not in advice(snapshot, UNABLE)
    newer = replace(OPEN, spec=replace(SPEC, version=2))
    assert "distop cancel" not in advice(newer), "executors of this release leave it alone, cancelled or not"


def test_an_operation_that_ends_without_its_code_waits_for_no_coordinator() -> None:
    gone = {"i1": Node("e1", "h", 2, ("other",))}
    assert [code for code, _ in judged(CANCELLING, gone, coordinated=False)] == ["without-code", "completion"]


def test_running_operations_and_cleanups_have_no_reason_to_wait() -> None:
    assert judged(replace(OPEN, claims={0: HELD})) == []
    assert judged(replace(OPEN, state=State.SUCCESS), {}) == []
