"""Checks the answers to clients and the actor of a soak against etcd's history. Pure."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distop.protocol.records import OperationRef
from soaking.actor import BROKEN
from soaking.operation_checks import failed_by_itself
from soaking.workflows import LIMITED, TIMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from soaking.actor import Returned
    from soaking.clients import WorkflowAnswers
    from soaking.workflows import Part, Workflow

CALLERS = "soak/"
"""Prefix of the keys that clients write themselves."""


def gate_key(name: str) -> str:
    """The key that must be absent for the success branch of a workflow's transaction."""
    return f"{CALLERS}{name}/gate"


def branch_key(name: str) -> str:
    """The key that records which branch was applied."""
    return f"{CALLERS}{name}/ran"


@dataclass(frozen=True, slots=True)
class History:
    """All specs, arguments, history records and outcomes (by job) of operations.

    ``written``: a client's own key → (value, number of writes).
    """

    specs: Mapping[OperationRef, Mapping[str, Any]]
    args: Mapping[OperationRef, Any]
    records: Mapping[OperationRef, Mapping[str, Any]]
    outcomes: Mapping[OperationRef, Mapping[int, Sequence[str]]]
    written: Mapping[str, tuple[str, int]]

    def started(self) -> dict[str, list[OperationRef]]:
        """Request id → the operations that it started."""
        found: dict[str, list[OperationRef]] = defaultdict(list)
        for ref, spec in self.specs.items():
            found[spec.get("request_id", "")].append(ref)
        return found

    def cancels(self) -> Iterator[Mapping[str, Any]]:
        """The causes of all cancels."""
        for record in self.records.values():
            if record["state"] == "cancelled" and record.get("cancel"):
                yield record["cancel"]


def has_next(workflow: Workflow, record: Mapping[str, Any]) -> bool:
    """Whether the series continues after an operation with this history record, unless it was the last one."""
    ends = ("success", "failed") if workflow.parts[0].options["every"]["on"] == "any" else ("success",)
    return record["state"] in ends


def check(all_answers: Sequence[WorkflowAnswers], history: History, returned: Iterable[Returned]) -> list[str]:
    """The problems: operations that have not ended, requests that started several, wrong answers, and violated rules of
    graphs, ids, limits, series and transactions.
    """
    problems = [f"{ref} does not end" for ref in history.specs if ref not in history.records]
    started = history.started()
    for answers in all_answers:
        found = [*_starts(answers, history, started), *_LANES[answers.workflow.lane](answers, history, started)]
        problems += [f"{answers.workflow.name} ({answers.workflow.kind}): {text}" for text in found]
    return problems + list(_returned(history, returned))


def missing(all_answers: Sequence[WorkflowAnswers], history: History, returned: Sequence[Returned]) -> list[str]:
    """The situations that a long soak has to meet, and did not."""
    committed = {answers.committed[-1] for answers in all_answers if answers.committed}
    shown = {
        "no operation was aborted": any(c["reason"] == "aborted" for c in history.cancels()),
        "no operation was replaced": any(c.get("replaced_by") for c in history.cancels()),
        "no start was refused": any(None in answers.starts.values() for answers in all_answers),
        "no start joined another operation": any(answers.joined for answers in all_answers),
        "the transactions of clients took only one branch": committed == {True, False},
        "the actor returned no job": bool(returned),
        "the actor returned no job of a type that executors run": any(_type(one) == LIMITED for one in returned),
        "no series reached its last operation": any(ref for ref, spec in history.specs.items() if _last(spec)),
    }
    return [text for text, met in shown.items() if not met]


def _type(one: Returned) -> str:
    return OperationRef.parse(one.op).type


def _last(spec: Mapping[str, Any]) -> bool:
    return (spec.get("series") or {}).get("left") == 0


def _starts(answers: WorkflowAnswers, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Check that each request started at most one operation, and that its client got this operation and its end."""
    for request, answered_ref in answers.starts.items():
        found = [str(ref) for ref in started.get(request, ())]
        if len(found) > 1:
            yield f"the request {request} started {' and '.join(found)}"
        elif found and found[0] != answered_ref:
            yield f"the request {request} started {found[0]}, but its client was told {answered_ref or 'a refusal'}"
        elif not found and answered_ref is not None:
            if request not in answers.joined:
                yield f"the request {request} started nothing, but its client was told {answered_ref}"
            elif OperationRef.parse(answered_ref) not in history.specs:
                yield f"the request {request} joined {answered_ref}, which never existed"
    for ref, state in answers.ends.items():
        if (record := history.records.get(OperationRef.parse(ref), {})).get("state") != state:
            yield f"the client was told that {ref} ended as {state}, but its record has {record.get('state')}"
    for one in _operations(answers):
        for job, outcomes in history.outcomes.get(one, {}).items():
            if len(outcomes) > 1:
                yield f"job {job} of {one} has {len(outcomes)} outcomes"


def _operations(answers: WorkflowAnswers) -> set[OperationRef]:
    return {OperationRef.parse(ref) for ref in answers.starts.values() if ref is not None}


# ---------------------------------------------------------------------- lanes


def _graph(answers: WorkflowAnswers, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Check that an operation was aborted if, and only if, a predecessor did not succeed."""
    workflow = answers.workflow
    refs = list(answers.starts.values())
    size = len(workflow.parts)
    for first in range(0, len(refs), size):
        copy = refs[first : first + size]
        for place, (part, ref) in enumerate(zip(workflow.parts, copy, strict=True)):
            if ref is None:
                if (state := _record(history, copy[0])["state"]) == "success":
                    yield f"the start after {copy[0]} was refused, although that ended as {state}"
                continue
            states = [_record(history, copy[n])["state"] for n in predecessors(workflow.kind, place, size)]
            broken = workflow.kind != "after end" and any(state != "success" for state in states)
            yield from _ends(part, ref, history, broken, ref in answers.cancelled)


def predecessors(kind: str, place: int, size: int) -> range:
    """The predecessors of a part of a graph."""
    if kind.startswith(("chain", "after")):
        return range(max(0, place - 1), place)
    return range(place) if place == size - 1 else range(0)


def _record(history: History, ref: str | None) -> Mapping[str, Any]:
    return history.records.get(OperationRef.parse(ref), {"state": "not ended"}) if ref else {"state": "refused"}


def _ends(part: Part, ref: str, history: History, broken: bool, cancelled: bool) -> Iterator[str]:
    """Check the end of one operation. ``broken``: a predecessor did not succeed."""
    record, outcomes = _record(history, ref), history.outcomes.get(OperationRef.parse(ref), {})
    state, reason = record["state"], (record.get("cancel") or {}).get("reason", "")
    if state == "cancelled" and reason == "user" and cancelled:
        return
    if broken:
        if state != "cancelled" or reason != "aborted":
            yield f"{ref} ended as {state} ({reason}), although a predecessor did not succeed"
    elif state == "cancelled":
        yield f"{ref} was cancelled ({reason}) without a cause"
    elif part.arg.get("fail"):
        if state != "failed":
            yield f"{ref} has a job that fails, but ended as {state}"
    else:
        yield from (f"{ref}: {text}" for text in failed_by_itself(record, outcomes))


def _id(answers: WorkflowAnswers, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Check that a replaced operation names its successor, and that a combined one has all requested files."""
    workflow = answers.workflow
    policies = {f"{workflow.request}{n}": part.options["on_duplicate"] for n, part in enumerate(workflow.parts)}
    for ref in _operations(answers):
        record, files = history.records.get(ref, {"state": "not ended"}), history.args.get(ref, {}).get("files", [])
        if record["state"] != "cancelled":
            yield from failed_by_itself(record, history.outcomes.get(ref, {}))
            continue
        cancel = record.get("cancel") or {}
        by = OperationRef.parse(cancel["replaced_by"]) if cancel.get("replaced_by") else None
        policy = policies.get(history.specs.get(by, {}).get("request_id", "")) if by is not None else None
        if by is None or policy not in ("replace", "combine"):
            yield f"{ref} was cancelled ({cancel}), although no start may replace it"
        elif policy == "combine" and not set(files) <= set(history.args[by]["files"]):
            yield f"{by} was combined with {ref}, but has the files {history.args[by]['files']} without {files}"
    for n, part in enumerate(workflow.parts):
        request = f"{workflow.request}{n}"
        answered_ref = answers.starts.get(request)
        if answered_ref is not None and part.options["on_duplicate"] == "combine":
            files = history.args.get(OperationRef.parse(answered_ref), {}).get("files", [])
            if not set(part.arg["files"]) <= set(files):
                yield f"{request} was told {answered_ref}, which has the files {files}"


def _limit(answers: WorkflowAnswers, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Check that nothing failed without a fault."""
    for ref in answers.starts.values():
        if ref is None:
            yield "the start was refused"
            continue
        record, outcomes = _record(history, ref), history.outcomes.get(OperationRef.parse(ref), {})
        if record["state"] == "cancelled":
            yield f"{ref} was cancelled ({record.get('cancel')})"
        yield from (text for text in failed_by_itself(record, outcomes) if BROKEN not in text)


def _transaction(
    answers: WorkflowAnswers, history: History, started: Mapping[str, Sequence[OperationRef]]
) -> Iterator[str]:
    """Check that one branch was applied once, and that each call got it. A branch that only reads settles nothing."""
    workflow, commits = answers.workflow, answers.committed
    if not commits:
        return
    found = [str(ref) for ref in started.get(f"{workflow.request}0", ())]
    if bool(found) is not commits[-1]:
        yield f"the calls were told {commits}, but the operations are {found}"
    value, version = history.written.get(branch_key(workflow.name), ("nothing", 0))
    if workflow.kind == "turns and reads":
        expected = ("success", 1) if commits[-1] else ("nothing", 0)
        settled = commits == sorted(commits)
    else:
        expected = ("success" if commits[-1] else "failure", 1)
        settled = len(set(commits)) == 1
    if (value, version) != expected:
        yield f"the calls were told {commits}, but the branches wrote {value}, {version} times"
    if not settled:
        yield f"the calls were told {commits}"
    if workflow.kind in ("holds", "fails") and commits[0] is (workflow.kind == "fails"):
        yield f"the calls were told {commits}, although the compare never changed"


def _series(answers: WorkflowAnswers, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Check that a series has the requested number of operations, or ends where its rule says."""
    workflow, ref = answers.workflow, next(iter(answers.starts.values()), None)
    if ref is None:
        yield "the start was refused"
        return
    for count in itertools.count(1):
        record, follows = _record(history, ref), started.get(f"{ref}#next", ())
        expected = count < TIMES and has_next(workflow, record)
        if len(follows) != expected:
            yield f"{ref}, number {count}, ended as {record['state']} and has the successors {list(map(str, follows))}"
        if record["state"] == "cancelled" and ref not in answers.cancelled and workflow.kind != "series ended":
            yield f"{ref} was cancelled ({record.get('cancel')})"
        elif workflow.parts[0].arg["fail"] and record["state"] == "success":
            yield f"{ref} has a job that fails, but ended as success"
        elif not workflow.parts[0].arg["fail"]:
            yield from failed_by_itself(record, history.outcomes.get(OperationRef.parse(ref), {}))
        if not follows:
            return
        ref = str(follows[0])


_LANES = {"graph": _graph, "id": _id, "limit": _limit, "transaction": _transaction, "series": _series}


def _returned(history: History, returned: Iterable[Returned]) -> Iterator[str]:
    """Check the answers to the actor's returns against the jobs' outcomes."""
    for one in returned:
        ref = OperationRef.parse(one.op)
        results = [json.loads(text).get("result") for text in history.outcomes.get(ref, {}).get(one.ordinal, ())]
        counts = any(isinstance(result, dict) and result.get("by") == one.id for result in results)
        if counts is one.void:
            answer = "invalid" if one.void else "returned"
            yield f"the actor was told that job {one.ordinal} of {ref} was {answer}, but its outcomes are {results}"
