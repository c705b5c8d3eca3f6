"""The second auditor: it accepts a valid history, and for each rule it reports a history that violates it."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from auditing import cluster_rules, coordinator_rules, job_rules, operation_rules, policy_rules, waiting_rules
from auditing.auditor import OF_AN_OPERATION, OF_THE_CLUSTER, SecondAuditor
from auditing.content import Finding
from auditing.history import HistoryLost, Revision, WatchEnded, revisions, watch_command
from auditing.records import OperationName, operation_key, operation_name

from distop.decide import job_claims
from distop.protocol.behavior_declaration import Rules
from distop.protocol.jobs import Claim, Tried

RULES = (cluster_rules, coordinator_rules, job_rules, operation_rules, policy_rules, waiting_rules)

Life = list[dict[str, Any]]
"""The writes of each revision: key → value (None: deleted). Values that are no texts become JSON."""

Break = Callable[[Life], None]

ROOT, JOB = "distOp.t.noop.1", "distOp.t.noop.1.000000"
CLAIM, GATE, PENDING = "distOpClaim.t.noop.1.000000", "distOpOpen.t.noop.1", "distOpPending.t.noop.1"
NEXT, HISTORY, UNIQUE = "distOp.t.noop.nextInstanceId", "distOpHistory.t.noop.1", "distOpUnique.t.noop.nightly"
ELECTED, WATERMARK, YOUNG = "distOpCoordinator.t.noop", "distOpWatermark.0", "distOpWatermark.0.young"
NODE, OTHER = {"executor": "x", "labels": {"zone": "a"}}, {"executor": "y", "labels": {}}
SPEC = {"request_id": "r", "id": "nightly", "where": {"zone": "a"}, "one_at_a_time": True}


def claimed(incarnation: str = "n1", attempt: int = 1, failures: int = 0, **more: object) -> dict[str, Any]:
    return {"executor": "x", "incarnation": incarnation, "attempt": attempt, "failures": failures, **more}


def record(state: str, success: int, failed: int = 0, total: int = 1, **more: object) -> dict[str, Any]:
    return {"state": state, "jobs": {"total": total, "success": success, "failed": failed}, "request_id": "r", **more}


def planned(count: int, *chunks: str) -> dict[str, Any]:
    """A plan of these chunks, or of one empty chunk."""
    digest = hashlib.sha256("".join(chunks or ("[]",)).encode()).hexdigest()
    return {"count": count, "digest": digest, "chunks": len(chunks) or 1}


NODES, START, PLAN, TAKE, REPORT, FINISH, CLEAN = range(7)


def life() -> Life:
    """An operation with one job and one limit, from start to cleanup."""
    keys = [f"{ROOT}.{name}" for name in ("arg", "spec", "options", "plan", "plan.000000", "state")]
    return [
        {
            "distOpTable.t": {},
            "distOpBehavior.noop": {},
            "distOpNode.n1": NODE,
            "distOpNode.n2": NODE,
            "distOpNode.n3": OTHER,
            ELECTED: "n1",
        },
        {
            "distOp.t.runOps": {"noop": 1},
            NEXT: 2,
            UNIQUE: "t/noop/1",
            f"{ROOT}.arg": {},
            f"{ROOT}.spec": SPEC,
            f"{ROOT}.options": {"max_jobs": 1},
            f"{ROOT}.state": "running",
            PENDING: "planning",
        },
        {f"{ROOT}.plan.000000": "[]", f"{ROOT}.plan": planned(1), GATE: {}, PENDING: None},
        {CLAIM: claimed(permit=0), "distOpPermit.t.noop.1.000000": 0},
        {
            f"{JOB}.state": "success",
            f"{JOB}.outcome": {"incarnation": "n1", "attempt": 1},
            CLAIM: None,
            "distOpPermit.t.noop.1.000000": "free",
        },
        {
            f"{ROOT}.state": "success",
            HISTORY: record("success", 1, executor="x"),
            GATE: None,
            PENDING: "cleaning",
            UNIQUE: None,
            "distOp.t.runOps": {},
        },
        dict.fromkeys([*keys, f"{JOB}.state", f"{JOB}.outcome", "distOpPermit.t.noop.1.000000", PENDING]),
    ]


def second(of: str = "other", **spec: object) -> dict[str, Any]:
    """The start of another operation, of the type ``of``."""
    root = f"distOp.t.{of}.1"
    return {
        f"distOp.t.{of}.nextInstanceId": 2,
        f"{root}.arg": {},
        f"{root}.spec": {"request_id": "another"} | spec,
        f"{root}.state": "pending",
        f"distOpPending.t.{of}.1": "waiting",
    }


def waiting(on: str = "success") -> dict[str, Any]:
    """The start of an operation that waits for the first one."""
    edge = {"on": on}
    return second() | {
        "distOp.t.other.1.after.e": edge | {"op": "t/noop/1"},
        f"{ROOT}.next.e": edge | {"op": "t/other/1"},
    }


def again() -> dict[str, Any]:
    """The start of the next operation of a series."""
    root = "distOp.t.noop.2"
    return {
        NEXT: 3,
        UNIQUE: "t/noop/2",
        f"{root}.arg": {},
        f"{root}.spec": {"request_id": "t/noop/1#next", "id": "nightly", "series": {"interval": 60.0}},
        f"{root}.state": "pending",
        "distOpPending.t.noop.2": "waiting",
    }


def twin(state: str, pending: str, instance: int = 2) -> dict[str, Any]:
    """The start of another operation with the same id, without a check whether it is taken."""
    root = f"distOp.t.noop.{instance}"
    return {
        NEXT: instance + 1,
        f"{root}.arg": {},
        f"{root}.spec": {"request_id": f"r{instance}", "id": "nightly"},
        f"{root}.state": state,
        f"distOpPending.t.noop.{instance}": pending,
    }


def recurring(history: Life) -> None:
    """Make the operation one of a series: it keeps its id until the next one takes it, and is cleaned up then."""
    history[START][f"{ROOT}.spec"] = SPEC | {"series": {"interval": 60.0}}
    del history[FINISH][UNIQUE]
    history.insert(CLEAN, again())


POLICY, POLICY_STATE, POLICY_EVENT, EVALUATOR = (
    "distOpPolicy.t.nightly", "distOpPolicyState.t.nightly", "distOpPolicyEvent.t.nightly", "distOpPolicyEvaluator.t"
)  # fmt: skip
MARK = "distOpNotice.policies"
EVENT = {"waiting": [{"id": "e1", "name": "loaded"}]}
MOMENT, MOMENT_TEXT = 1_356_998_400.0, "2013-01-01T00:00:00.000Z"


def rule(**more: object) -> dict[str, Any]:
    """A policy that starts operations of the type ``other``."""
    return {"start": "other", "uid": "u1", "every": 60.0, "on": ["version", "event:loaded"], **more}


def judged(verdict: str, *triggers: str, version: str = "", by: str = "n1", **state: Any) -> dict[str, Any]:
    """The write of an evaluation."""
    one = {"time": MOMENT_TEXT, "verdict": verdict, "triggers": list(triggers), "evaluator": by}
    if version:
        state["version"] = version
        one["inputs"] = {"version": version}
    if "op" in state:
        one["op"] = state["op"]
    return {POLICY_STATE: {"evaluations": [one], **state}}


def started(*triggers: str, of: str = "other", **spec: object) -> dict[str, Any]:
    """The start of an operation by the policy, without its evaluation."""
    return second(of, request_id="policy:d", submitter="policy:nightly", **spec)


def policed(*steps: dict[str, Any]) -> Break:
    """A policy and its evaluator, and what happens then."""
    made = {MARK: "", POLICY: rule(), POLICY_STATE: {}, EVALUATOR: "n1"}

    def apply(history: Life) -> None:
        history[START:START] = [made, *steps]

    return apply


BEGUN = {
    "distOp.t.other.1.state": "running",
    "distOpPending.t.other.1": "planning",
    "distOp.t.runOps": {"noop": 1, "other": 1},
}
INFORMED = {"distOp.t.other.1.after.e": None, f"{ROOT}.next.e": None}


def audited(history: Life, clock: Callable[[], float] | None = None) -> SecondAuditor:
    auditor = SecondAuditor(clock=clock)
    for number, changes in enumerate(history, 2):
        auditor.feed(Revision(number, {key: _spelled(value) for key, value in changes.items()}))
    return auditor


def _spelled(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def test_an_operation_from_start_to_end_violates_no_rule() -> None:
    auditor = audited(life())
    assert auditor.violations == []
    assert auditor.operations == 1


def test_an_operation_that_waits_for_another_violates_no_rule() -> None:
    history = life()
    history.insert(START + 1, waiting())
    history.insert(FINISH + 2, INFORMED)
    assert audited(history).violations == []


def test_a_policy_with_all_its_commands_violates_no_rule() -> None:
    history = life()
    paused = rule(paused=True, actions=[{"action": "pause_policy"}])
    resumed = rule(actions=[{"action": "pause_policy"}, {"action": "resume_policy"}])
    policed(
        {POLICY_EVENT: EVENT},
        judged("waits", "event:loaded@e1"),
        {POLICY_EVENT: {"waiting": []}, **judged("no", "event:loaded@e1", "every@t", every_at=MOMENT, consumed=["e1"])},
        {POLICY: paused},
        {POLICY: resumed},
        {
            **started(),
            **judged("started", "version@v1", version="v1", op="t/other/1", every_at=MOMENT, consumed=["e1"]),
        },
        {EVALUATOR: None},
        {EVALUATOR: "n2"},
        {POLICY: None, POLICY_STATE: None, POLICY_EVENT: None},
        {MARK: "", POLICY: rule(uid="u2"), POLICY_STATE: {}},
    )(history)
    assert audited(history).violations == []


def test_a_request_id_of_a_caller_may_end_like_one_of_a_series() -> None:
    history = life()
    history.insert(TAKE, second(request_id="mine#next"))
    assert audited(history).violations == []


def test_a_series_with_an_id_violates_no_rule() -> None:
    history = life()
    recurring(history)
    assert audited(history).violations == []


def test_a_series_may_end_after_its_table_was_removed_and_registered_again() -> None:
    history = life()
    recurring(history)
    history[CLEAN] = {"distOpTable.t": None}
    history.insert(CLEAN + 1, {"distOpTable.t": {"name": "t"}})
    history[CLEAN + 2][UNIQUE] = None
    assert audited(history).violations == []


def at(moment: int) -> Callable[[dict[str, Any]], Break]:
    """A change of one revision: further writes, or (Ellipsis) omitted ones."""

    def written(changes: dict[str, Any]) -> Break:
        def apply(history: Life) -> None:
            for key, value in changes.items():
                if value is ...:
                    del history[moment][key]
                else:
                    history[moment][key] = value

        return apply

    return written


def beside(moment: int, *more: dict[str, Any]) -> Break:
    """Further revisions, before the one at this place."""

    def apply(history: Life) -> None:
        history[moment:moment] = list(more)

    return apply


LOST = {"distOpNode.n1": None}
TAKEN = {CLAIM: claimed("n2", 2, 1, permit=0)}
RELEASED = {CLAIM: {"attempt": 1, "failures": 0}, "distOpPermit.t.noop.1.000000": "free"}
CANCELLED = {f"{ROOT}.state": "cancelling", GATE: None, PENDING: "cancelling"}

BROKEN: list[tuple[str, str, Break]] = [
    ("states", "from success to running", beside(CLEAN, {f"{ROOT}.state": "running"})),
    ("one at a time", "runs at the same time as", beside(TAKE, {
        "distOp.t.noop.2.arg": {}, "distOp.t.noop.2.spec": {"request_id": "b", "one_at_a_time": True},
        "distOp.t.noop.2.state": "running", "distOpPending.t.noop.2": "planning", NEXT: 3,
        "distOp.t.runOps": {"noop": 2},
    })),
    ("written once", "spec was written again", beside(TAKE, {f"{ROOT}.spec": SPEC})),
    ("written once", "written after the plan", beside(TAKE, {f"{ROOT}.plan.000001": "[]"})),
    ("written once", "record was written again", beside(CLEAN, {HISTORY: record("success", 1)})),
    ("nothing is left", "000000.outcome", at(CLEAN)({f"{JOB}.outcome": ...})),
    ("gate or pending", "has both", at(PLAN)({PENDING: ...})),
    ("gate or pending", "has neither", at(PLAN)({GATE: ...})),
    ("gate or pending", "cleaning in the state running", at(START)({PENDING: "cleaning"})),
    ("gate or pending", "gate in the state paused", beside(TAKE, {f"{ROOT}.state": "paused"})),
    ("states", "from running to running", beside(TAKE, {f"{ROOT}.state": "running"})),
    ("actions", "its history record has the actions None", beside(TAKE, {
        f"{ROOT}.actions": {"actions": [{"action": "alter"}]}})),
    ("history", "without a history record", at(FINISH)({HISTORY: ...})),
    ("history", "did not end in its revision", beside(FINISH, {HISTORY: record("success", 1)})),
    ("history", "says failed", at(FINISH)({HISTORY: record("failed", 1)})),
    ("history", "counts (0, 1)", at(FINISH)({HISTORY: record("success", 0, 1)})),
    ("history", "2 jobs, of which 1 ended", at(FINISH)({HISTORY: record("success", 1, total=2)})),
    ("history", "succeeded with 1 failed jobs", lambda history: (
        history[REPORT].update({f"{JOB}.state": "failed"}), history[FINISH].update({HISTORY: record("success", 0, 1)}),
        None)[-1]),
    ("one request, one operation", "same request id 'r'", beside(TAKE, {
        "distOp.t.noop.2.arg": {}, "distOp.t.noop.2.spec": {"request_id": "r"}, "distOp.t.noop.2.state": "pending",
        "distOpPending.t.noop.2": "waiting", NEXT: 3,
    })),
    ("one of an id", "of id 'nightly', 2 are active: t/noop/1, t/noop/2", beside(TAKE, twin("running", "planning"))),
    ("one of an id", "of id 'nightly', 2 are pending: t/noop/2, t/noop/3", beside(
        TAKE, twin("pending", "waiting"), twin("pending", "waiting", 3))),
    ("one of an id", "still names it", at(FINISH)({UNIQUE: ...})),
    ("one of an id", "names nothing instead of", at(START)({UNIQUE: ...})),
    ("one of an id", "names t/noop/1, which has ended", beside(CLEAN, {UNIQUE: "t/noop/1"})),
    ("one of an id", "names t/noop/7, which was never started", beside(TAKE, {UNIQUE: "t/noop/7"})),
    ("one of an id", "names t/noop/1, which has not this id", beside(TAKE, {f"{UNIQUE}-2": "t/noop/1"})),
    ("one of an id", "no longer names t/noop/1, which has not ended", beside(TAKE, {UNIQUE: None}, {
        UNIQUE: "t/noop/1"})),
    ("one of an id", "has ended, and the id 'nightly' still names it", lambda history: (
        recurring(history), history.pop(CLEAN), None)[-1]),
    ("series", "follows t/noop/1, which has not ended", beside(TAKE, again())),
    ("series", "follows t/noop/1, which belongs to no series", beside(CLEAN, again())),
    ("series", "follows t/noop/1, which was cancelled", lambda history: (
        recurring(history), history[FINISH].update({f"{ROOT}.state": "cancelled"}), None)[-1]),
    ("series", "follows t/noop/1, whose keys are deleted", lambda history: (
        recurring(history), history.append(history.pop(CLEAN)), None)[-1]),
    ("edges", "still waited for 1 others", beside(TAKE, waiting(), BEGUN)),
    ("edges", "no other end", at(START)({f"{ROOT}.next.e": {"op": "t/other/1", "on": "end"}})),
    ("edges", "which had ended", beside(CLEAN, waiting())),
    ("edges", "no longer waits", beside(TAKE, waiting(), INFORMED)),
    ("edges", "its edge says that", beside(TAKE, waiting(), {
        "distOp.t.other.1.after.e": {"op": "t/noop/1", "on": "success", "broken": "failed"}})),
    ("edges", "before t/other/1 was informed", lambda history: (
        history.insert(TAKE, waiting()), history[-1].update({f"{ROOT}.next.e": None}), None)[-1]),
    ("holds", "began under the hold h", beside(TAKE, second(hold="h") | {"distOpHold.h": {"state": "held"}}, BEGUN)),
    ("holds", "while its graph is being inserted", beside(TAKE, second(hold="h") | {
        "distOpHold.h": {"kind": "graph", "state": "held"}}, {
        "distOp.t.other.1.state": "cancelled", "distOp.t.other.1.cancel": {"reason": "user"},
        "distOpPending.t.other.1": "cleaning",
        "distOpHistory.t.other.1": record("cancelled", 0, total=0) | {"request_id": "another"}})),
    ("waiting", "nothing that it waits for has failed", beside(TAKE, second(), {
        "distOp.t.other.1.state": "cancelled", "distOp.t.other.1.cancel": {"reason": "aborted"},
        "distOpPending.t.other.1": "cleaning",
        "distOpHistory.t.other.1": record("cancelled", 0, total=0) | {"request_id": "another"}})),
    ("claims", "follows attempt 0", at(TAKE)({CLAIM: claimed(attempt=2, permit=0)})),
    ("claims", "attempt 2 of a claim", beside(REPORT, {CLAIM: claimed(attempt=2, permit=0)})),
    ("claims", "with 0 failures instead of 1", beside(REPORT, LOST, {CLAIM: claimed("n2", 2, 0, permit=0)})),
    ("claims", "n1, which is alive", beside(REPORT, TAKEN)),
    ("claims", "n1, which is alive", beside(REPORT, {CLAIM: {"attempt": 1, "failures": 1, "losses": 1}})),
    ("claims", "n1, which is alive", beside(REPORT, CANCELLED, {CLAIM: {"attempt": 1, "failures": 0, "errors": [
        {"attempt": 1, "executor": "x", "text": job_rules.LOST}]}})),
    ("claims", "without a gate", beside(TAKE, {GATE: None, f"{ROOT}.state": "paused", PENDING: "paused"})),
    ("claims", "after it had ended", beside(FINISH, {CLAIM: claimed("n2", 2, 0)})),
    ("claims", "the plan has 1 partitions", beside(REPORT, {"distOpClaim.t.noop.1.000001": claimed()})),
    ("claims", "n4, which is not alive", at(TAKE)({CLAIM: claimed("n4", permit=0)})),
    ("claims", "nobody held it", beside(REPORT, RELEASED, RELEASED)),
    ("claims", "of another claim", beside(REPORT, {CLAIM: {"attempt": 3, "failures": 0}})),
    ("claims", "the job has not ended", beside(REPORT, {CLAIM: None, "distOpPermit.t.noop.1.000000": "free"})),
    ("claims", "in a cancel", beside(REPORT, CANCELLED, {CLAIM: None, "distOpPermit.t.noop.1.000000": "free"})),
    ("claims", "a checkpoint was written", beside(TAKE, {f"{JOB}.progress": 1})),
    ("labels", "n3, which lacks", at(TAKE)({CLAIM: claimed("n3", permit=0)})),
    *(("serves", "n1, which does not serve", lambda history, limit=limit: history[0].update(
        {"distOpNode.n1": {**NODE, **limit}})) for limit in ({"types": ["other"]}, {"tables": ["other.*", "tt"]})),
    ("jobs end once", "state was written again", beside(FINISH, {f"{JOB}.state": "success"})),
    ("jobs end once", "outcome was deleted before", beside(FINISH, {f"{JOB}.outcome": None})),
    ("jobs end once", "its state is 'fine'", at(REPORT)({f"{JOB}.state": "fine"})),
    ("reports", "without its claim", at(REPORT)({CLAIM: ...})),
    ("reports", "n2 reported under another's", at(REPORT)({f"{JOB}.outcome": {"incarnation": "n2", "attempt": 1}})),
    ("reports", "attempt 2 reported for 1", at(REPORT)({f"{JOB}.outcome": {"incarnation": "n1", "attempt": 2}})),
    ("reports", "which had it, was alive", at(REPORT)({
        f"{JOB}.state": "failed", f"{JOB}.outcome": {"incarnation": "n2", "attempt": 1}})),
    ("reports", "the grant of another", at(REPORT)({f"{JOB}.outcome": {"grant": "g", "attempt": 1}})),
    ("permits", "held for job 0, which has no claim", at(REPORT)({"distOpPermit.t.noop.1.000000": ...})),
    ("permits", "left job 0, whose claim goes on", beside(REPORT, {"distOpPermit.t.noop.1.000000": "free"})),
    ("permits", "left job 0, whose claim goes on", beside(REPORT, {"distOpPermit.t.noop.1.000000": None})),
    *(("one request, one operation", f"and names {named}", beside(
        when, {"distOpRequest.t.noop.r": "t/noop/1"}, {"distOpRequest.t.noop.r": now}))
        for when in (TAKE, CLEAN) for now, named in ((None, "nothing"), ("t/noop/2", "t/noop/2"))),
    ("limits", "2 jobs run where max_jobs is 1", lambda history: (
        history[PLAN].update({f"{ROOT}.plan": planned(2)}),
        history.insert(REPORT, {"distOpClaim.t.noop.1.000001": claimed()}), None)[-1]),
    ("limits", "2 jobs run on n1", lambda history: (
        history[PLAN].update({f"{ROOT}.plan": planned(2)}),
        history[START].update({f"{ROOT}.options": {"max_jobs_per_executor": 1}}),
        history.insert(REPORT, {"distOpClaim.t.noop.1.000001": claimed()}), None)[-1]),
    ("instance numbers", "counted [1, 2]", at(START)({NEXT: 3})),
    ("instance numbers", "the counter did not move", at(START)({NEXT: ...})),
    ("runOps", "counts {'noop': 2}", at(START)({"distOp.t.runOps": {"noop": 2}})),
    ("elections", "n1, which is alive", beside(TAKE, {ELECTED: "n2"})),
    ("elections", "n9, which is not alive", beside(TAKE, LOST, {ELECTED: "n9"})),
    *(("coordinators", f"{what} without an elected coordinator", beside(when, {ELECTED: None}, written))
        for what, when, written in (
            ("was planned", PLAN, {f"{ROOT}.plan.000000": "[]"}),
            ("its planning failed", PLAN, {f"{ROOT}.planning": {"attempts": 1}}),
            ("was decided", FINISH, {f"{ROOT}.decision": {"verdict": "success"}}),
            ("was cancelled for a failed job", REPORT, CANCELLED | {f"{ROOT}.cancel": {"reason": "failed"}}))),
    ("coordinators", "was planned without an elected", beside(PLAN, {ELECTED: None})),
    ("coordinators", "ended without an elected", beside(FINISH, {ELECTED: None})),
    ("coordinators", "was cleaned up without an elected", beside(CLEAN, {ELECTED: None})),
    ("coordinators", "began without an elected", beside(TAKE, second(), BEGUN)),
    ("coordinators", "was ended by x, but the coordinator is y", beside(FINISH, LOST, {ELECTED: "n3"})),
    ("coordinators", "n2 claimed job 0 with the plan", at(PLAN)({CLAIM: claimed("n2", permit=0)})),
    ("plans", "has the chunks [], but its plan has 1", at(PLAN)({f"{ROOT}.plan.000000": ...})),
    ("plans", "has the chunks [0, 1], but its plan has 1", at(PLAN)({f"{ROOT}.plan.000001": "[]"})),
    ("plans", "do not match the digest", at(PLAN)({f"{ROOT}.plan.000000": "[1]"})),
    ("plans", "plan.000000 was deleted before", beside(TAKE, {f"{ROOT}.plan.000000": None})),
    ("plans", "plan was deleted before", beside(TAKE, {f"{ROOT}.plan": None})),
    ("series", "were deleted before the next operation", lambda history: (
        recurring(history), history.pop(CLEAN), None)[-1]),
    ("watermarks", "names revision 5, which was not there", beside(TAKE, {WATERMARK: "5", YOUNG: ""})),
    ("watermarks", "without its young key", beside(TAKE, {WATERMARK: "4"})),
    ("history for an hour", "no watermark shows", lambda history: history.append({HISTORY: None})),
    ("policies", "was removed, and distOpPolicyState.t.nightly is left", policed({POLICY: None})),
    ("policies", "was removed, and is there again", policed(
        {POLICY: None, POLICY_STATE: None}, {MARK: "", POLICY: rule(), POLICY_STATE: {}})),
    ("policies", "was made without the mark", policed(
        {POLICY: None, POLICY_STATE: None}, {POLICY: rule(uid="u2"), POLICY_STATE: {}})),
    ("policies", "nobody resumed it", policed({POLICY: rule(paused=True)}, {POLICY: rule()})),
    ("policies", "nobody resumed it", policed({POLICY: rule(paused=True)}, {POLICY: rule(actions=[{"action": "x"}])})),
    ("policies", "has another uid", policed({POLICY: rule(uid="u2")})),
    ("policies", "51 events wait", policed({POLICY_EVENT: {"waiting": [{"id": str(n)} for n in range(51)]}})),
    ("policies", "exists without its policy", beside(START, {POLICY_EVENT: EVENT})),
    ("evaluations", "was made without its policy", beside(START, {POLICY_STATE: {}})),
    ("evaluations", "its policy is absent or was changed", policed(
        {POLICY: rule(when="files > 1"), **judged("no", "version@v1", version="v1")})),
    ("evaluations", "was written during a pause", policed(
        {POLICY: rule(paused=True)}, judged("no", "version@v1", version="v1"))),
    ("evaluations", "by n2, but the elected evaluator is n1", policed(judged("waits", by="n2"))),
    ("evaluations", "the elected evaluator is None", policed({EVALUATOR: None}, judged("waits"))),
    ("evaluations", "keeps 51 consumed", policed(judged("no", consumed=[str(n) for n in range(51)]))),
    ("evaluations", "changed version with the verdict waits", policed(judged("waits", "version@v1", version="v1"))),
    ("evaluations", "evaluated the version v1 again", policed(
        *(judged("no", "version@v1", version="v1") for _ in range(2)))),
    ("evaluations", "an interval that it did not count", policed(judged("no", "every@t"))),
    ("evaluations", "the event e1, which did not wait before", policed(judged("no", "event:loaded@e1"))),
    ("evaluations", "the event e1, which did not wait before, or waits after", policed(
        {POLICY_EVENT: EVENT}, judged("no", "event:loaded@e1", consumed=["e1"]))),
    ("evaluations", "noted the version v2, but looked at v1", policed(
        {POLICY_STATE: {**judged("no", "version@v1", version="v1")[POLICY_STATE], "version": "v2"}})),
    ("evaluations", "30 s after the former", policed(
        judged("no", "every@t", every_at=MOMENT - 30.0), judged("no", "every@t", every_at=MOMENT))),
    ("evaluations", "90 s before its evaluation", policed(judged("no", "every@t", every_at=MOMENT - 90.0))),
    ("elections", "n1, which is alive", policed({EVALUATOR: "n2"})),
    ("starts of policies", "which is paused or absent", beside(TAKE, started())),
    ("starts of policies", "which recorded no start", policed(started())),
    ("starts of policies", "not of the type of its start", policed(
        {POLICY: rule(start="noop")}, {**started(), **judged("started", "version@v1", version="v1", op="t/other/1")})),
    ("starts of policies", "names t/other/1, which was not started", policed(
        judged("started", "version@v1", version="v1", op="t/other/1"))),
    ("readable records", "is not JSON", at(START)({f"{ROOT}.spec": "{"})),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "text", "broken"), BROKEN, ids=[f"{rule}-{text}" for rule, text, _ in BROKEN])
def test_a_history_against_a_rule_is_a_violation(rule: str, text: str, broken: Break) -> None:
    history = life()
    broken(history)
    found = audited(history).violations
    assert any(one.rule == rule and text in str(one) for one in found), found


def test_every_rule_is_broken_by_some_history() -> None:
    """A rule that no history of this file violates would not be tested."""
    rules = Path(OF_AN_OPERATION[0].__code__.co_filename).parent.glob("*_rules.py")
    named = {
        node.args[0].value
        for path in rules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
        if isinstance(node.args[0], ast.Constant)
    }
    assert len(OF_AN_OPERATION) + len(OF_THE_CLUSTER) > 10
    assert named == {rule for rule, _, _ in BROKEN} - {"readable records"}


def test_every_finding_is_made_by_some_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each place in the rules that makes a finding, a history has only that one of its rule and text."""
    made: dict[tuple[str, str], set[tuple[str, int]]] = {}

    def finding(rule: str, subject: str, text: str) -> Finding:
        caller = sys._getframe(1)
        one = Finding(rule, subject, text)
        made.setdefault((rule, str(one)), set()).add((caller.f_code.co_filename, caller.f_lineno))
        return one

    places: set[tuple[str, int]] = set()
    for module in RULES:
        monkeypatch.setattr(module, "Finding", finding)
        places |= {
            (str(module.__file__), node.lineno)
            for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
        }
    reported: set[tuple[str, int]] = set()
    for wanted, text, broken in BROKEN:
        changes = life()
        broken(changes)
        made.clear()
        audited(changes)
        matching = [at for (rule, spelled), at in made.items() if rule == wanted and text in spelled]
        if len(found := set().union(*matching)) == 1:
            reported |= found
    now = iter([0.0, 3599.0])
    made.clear()
    audited([*life(), {HISTORY: None}], lambda: next(now))
    reported |= set().union(*made.values())
    assert len(places) > 60
    assert sorted(places - reported) == []


@pytest.mark.parametrize("tried", [(), (Tried(1, "ex-b", job_claims.LOST),)])
def test_a_claim_revoked_by_another_is_distinguished_from_one_given_up_by_its_holder(tried: tuple[Tried, ...]) -> None:
    """With the records of distop: in a cancel only the text of the last error shows it."""
    claim = Claim("ex-a", "a", 2, len(tried), losses=len(tried), tried=tried)
    by_others = job_claims.revoked(claim), job_claims.revoked_lost(claim, Rules())
    by_holder = job_claims.retried(claim, "ex-a", "broke", ""), job_claims.released(claim, "ex-a", "no room")
    for waiting, revoked in [(one, True) for one in by_others] + [(one, False) for one in by_holder]:
        assert job_rules._revoked(json.loads(claim.encode()), json.loads(waiting.encode())) is revoked


def test_a_history_record_is_kept_for_an_hour() -> None:
    now = iter([0.0, 3599.0])
    history = [*life(), *over("7")]
    early = audited(history, lambda: next(now))
    assert [one.rule for one in early.violations] == ["history for an hour"]
    now = iter([0.0, 3601.0])
    assert audited(history, lambda: next(now)).violations == []


def over(upto: str) -> Life:
    """A watermark, the end of its hour, and the removal of the history record."""
    return [{WATERMARK: upto, YOUNG: ""}, {YOUNG: None}, {HISTORY: None}]


def test_without_a_clock_a_watermark_shows_that_a_record_is_an_hour_old() -> None:
    """The record is of revision 7; the watermark is written at revision 9."""
    assert audited([*life(), *over("7")]).violations == []
    assert audited([*life(), *over("8")]).violations == []
    put, _, remove = over("7")
    for early in (over("6"), [put, remove], [remove]):
        found = audited([*life(), *early]).violations
        assert [one.rule for one in found] == ["history for an hour"]


Change = dict[str, Any]


@pytest.mark.parametrize(
    ("series", "changed"),
    [
        ({"left": 0}, {}),
        ({"on": "failure"}, {}),
        ({"until": "2026-01-01T00:00:59Z"}, {}),
        ({"since": "start", "due": "2026-01-01T00:00:00Z", "until": "2026-01-01T00:00:59Z"}, {}),
        ({}, {"distOpTable.t": None}),
        ({}, {"distOpBehavior.noop": None}),
        ({}, {"distOpBehavior.noop": {"another": True}}),
    ],
)
def test_a_series_may_end(series: Change, changed: Change) -> None:
    history = life()
    recurring(history)
    history.pop(CLEAN)
    history[START][f"{ROOT}.spec"] = SPEC | {"series": {"interval": 60.0} | series}
    history[FINISH][HISTORY] = record("success", 1, finished="2026-01-01T00:00:00Z")
    history.insert(CLEAN, changed)
    history[-1][UNIQUE] = None
    assert audited(history).violations == []


@pytest.mark.parametrize("series", [{"left": 1}, {"on": "success"}, {"until": "2026-01-01T00:01:00Z"}])
def test_a_series_that_continues_has_a_next_operation(series: Change) -> None:
    history = life()
    recurring(history)
    history.pop(CLEAN)
    history[START][f"{ROOT}.spec"] = SPEC | {"series": {"interval": 60.0} | series}
    history[FINISH][HISTORY] = record("success", 1, finished="2026-01-01T00:00:00Z")
    history[-1][UNIQUE] = None
    assert [one.rule for one in audited(history).violations] == ["series"]


def test_the_audit_may_start_from_an_existing_store() -> None:
    history = life()
    auditor = SecondAuditor(clock=None)
    content: dict[str, str] = {}
    for changes in history[: TAKE + 1]:
        content |= {key: spelled for key, value in changes.items() if (spelled := _spelled(value)) is not None}
        for key in [key for key, value in changes.items() if value is None]:
            content.pop(key, None)
    auditor.begin(content)
    for number, changes in enumerate(history[TAKE + 1 :], 10):
        auditor.feed(Revision(number, {key: _spelled(value) for key, value in changes.items()}))
    assert auditor.violations == []


def test_the_second_auditor_shares_no_code_with_distop() -> None:
    folder = Path(OF_AN_OPERATION[0].__code__.co_filename).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0].startswith("distop")], path


def test_keys_and_names_are_read_as_documented() -> None:
    plain, with_object = OperationName("a.b", "noop", "", 7), OperationName("t", "index", "x/1", 12)
    assert operation_key("distOp.a%2Eb.noop.7.000003.state") == ("distOp", plain, "000003.state")
    assert operation_key("distOpClaim.t.index.x%2F1.12.000000") == ("distOpClaim", with_object, "000000")
    assert operation_key("distOp.t.runOps") is None
    assert operation_key("distOp.t.noop.nextInstanceId") is None
    assert operation_key("distOp.t.index.x%2F1.current") is None
    assert operation_name(str(with_object)) == with_object


def printed(*events: tuple[int, str, str | None]) -> str:
    """A line of ``etcdctl watch``: (revision, key, value) of each event."""

    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    listed = []
    for revision, key, value in events:
        kv = {"key": encoded(key), "mod_revision": revision}
        listed.append({"kv": kv | {"value": encoded(value)}} if value is not None else {"type": 1, "kv": kv})
    return json.dumps({"Header": {"revision": 9}, "Events": listed})


def test_revisions_are_read_completely_and_in_order() -> None:
    lines = [printed((2, "a", "1"), (2, "b", "2"), (3, "a", None)), printed(), printed((5, "b", ""))]
    assert list(revisions(lines)) == [
        Revision(2, {"a": "1", "b": "2"}), Revision(3, {"a": None}), Revision(5, {"b": ""})
    ]  # fmt: skip


def test_a_history_with_a_gap_is_rejected() -> None:
    with pytest.raises(HistoryLost, match="compacted its history up to revision 7"):
        list(revisions([json.dumps({"Canceled": True, "CompactRevision": 7})]))
    with pytest.raises(HistoryLost, match="revision 3 came after revision 3"):
        list(revisions([printed((3, "a", "1")), printed((3, "b", "1"))]))
    with pytest.raises(WatchEnded, match="cancelled the watch: no leader"):
        list(revisions([json.dumps({"Canceled": True, "CancelReason": "no leader"})]))


def test_the_watch_starts_at_the_given_revision() -> None:
    assert watch_command("etcdctl", ["--endpoints", "e:1"], "prod", 12) == [
        "etcdctl", "--endpoints", "e:1", "watch", "--rev=12", "--prefix", "--write-out=json", "prod/distOp"
    ]  # fmt: skip
