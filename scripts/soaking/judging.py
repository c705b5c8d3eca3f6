"""Whether what clients and the actor of a soak were told is what stands in etcd's history. Pure."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distop.protocol.records import OperationRef
from soaking.actor import BROKEN
from soaking.comparing import failed_by_itself
from soaking.workflows import LIMITED, TIMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from soaking.actor import Returned
    from soaking.clients import Told
    from soaking.workflows import Part, Workflow

CALLERS = "soak/"
"""How the keys begin that clients write themselves."""


def gate(name: str) -> str:
    """The key that the transaction of a workflow compares to be absent."""
    return f"{CALLERS}{name}/gate"


def ran(name: str) -> str:
    """The key that tells which of its branches was applied."""
    return f"{CALLERS}{name}/ran"


@dataclass(frozen=True, slots=True)
class History:
    """What was ever written: of each operation its spec, its argument, its record, its outcomes by job. ``written``:
    key of a client's own → its value, and how often it was written.
    """

    specs: Mapping[OperationRef, Mapping[str, Any]]
    args: Mapping[OperationRef, Any]
    records: Mapping[OperationRef, Mapping[str, Any]]
    outcomes: Mapping[OperationRef, Mapping[int, Sequence[str]]]
    written: Mapping[str, tuple[str, int]]

    def started(self) -> dict[str, list[OperationRef]]:
        """Request id → the operations that it has started."""
        found: dict[str, list[OperationRef]] = defaultdict(list)
        for ref, spec in self.specs.items():
            found[spec.get("request_id", "")].append(ref)
        return found

    def cancels(self) -> Iterator[Mapping[str, Any]]:
        """Why operations were cancelled."""
        for record in self.records.values():
            if record["state"] == "cancelled" and record.get("cancel"):
                yield record["cancel"]


def next_of(workflow: Workflow, record: Mapping[str, Any]) -> bool:
    """Whether an operation of a series that ended so is followed by another one, unless it is the last."""
    ends = ("success", "failed") if workflow.parts[0].options["every"]["on"] == "any" else ("success",)
    return record["state"] in ends


def judge(all_told: Sequence[Told], history: History, returned: Iterable[Returned]) -> list[str]:
    """What is wrong: operations that have not ended; a request that started two; an answer that is not so; a graph, an
    id, a series or a transaction whose operations are not those that its rules ask for.
    """
    problems = [f"{ref} does not end" for ref in history.specs if ref not in history.records]
    started = history.started()
    for told in all_told:
        found = [*_starts(told, history, started), *_LANES[told.workflow.lane](told, history, started)]
        problems += [f"{told.workflow.name} ({told.workflow.kind}): {text}" for text in found]
    return problems + list(_returned(history, returned))


def missing(all_told: Sequence[Told], history: History, returned: Sequence[Returned]) -> list[str]:
    """What was never met, though a long soak has to."""
    committed = {told.committed[-1] for told in all_told if told.committed}
    shown = {
        "no operation was aborted": any(c["reason"] == "aborted" for c in history.cancels()),
        "no operation was replaced": any(c.get("replaced_by") for c in history.cancels()),
        "no start was refused": any(None in told.starts.values() for told in all_told),
        "no start joined another operation": any(told.joined for told in all_told),
        "the transactions of clients took one branch alone": committed == {True, False},
        "the actor returned no job": bool(returned),
        "the actor returned no job of a type that executors run": any(_type(one) == LIMITED for one in returned),
        "no series came to its end": any(ref for ref, spec in history.specs.items() if _last(spec)),
    }
    return [text for text, met in shown.items() if not met]


def _type(one: Returned) -> str:
    return OperationRef.parse(one.op).type


def _last(spec: Mapping[str, Any]) -> bool:
    return (spec.get("series") or {}).get("left") == 0


def _starts(told: Told, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Each request started at most one operation, and its client was told which; and how that ended."""
    for request, told_ref in told.starts.items():
        found = [str(ref) for ref in started.get(request, ())]
        if len(found) > 1:
            yield f"the request {request} started {' and '.join(found)}"
        elif found and found[0] != told_ref:
            yield f"the request {request} started {found[0]}, and its client was told {told_ref or 'a refusal'}"
        elif not found and told_ref is not None:
            if request not in told.joined:
                yield f"the request {request} started nothing, and its client was told {told_ref}"
            elif OperationRef.parse(told_ref) not in history.specs:
                yield f"the request {request} joined {told_ref}, which never was"
    for ref, state in told.ends.items():
        if (record := history.records.get(OperationRef.parse(ref), {})).get("state") != state:
            yield f"the client was told that {ref} ended as {state}, and its record says {record.get('state')}"
    for one in _operations(told):
        for job, outcomes in history.outcomes.get(one, {}).items():
            if len(outcomes) > 1:
                yield f"job {job} of {one} has {len(outcomes)} outcomes"


def _operations(told: Told) -> set[OperationRef]:
    return {OperationRef.parse(ref) for ref in told.starts.values() if ref is not None}


# ---------------------------------------------------------------------- lanes


def _graph(told: Told, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """An operation is aborted if, and only if, one that it waits for ended otherwise; else it ends by itself."""
    workflow = told.workflow
    refs = list(told.starts.values())
    size = len(workflow.parts)
    for first in range(0, len(refs), size):
        copy = refs[first : first + size]
        for place, (part, ref) in enumerate(zip(workflow.parts, copy, strict=True)):
            if ref is None:
                if (state := _record(history, copy[0])["state"]) == "success":
                    yield f"the start after {copy[0]} was refused, which ended as {state}"
                continue
            states = [_record(history, copy[n])["state"] for n in predecessors(workflow.kind, place, size)]
            broken = workflow.kind != "after end" and any(state != "success" for state in states)
            yield from _ends(part, ref, history, broken, ref in told.cancelled)


def predecessors(kind: str, place: int, size: int) -> range:
    """Whom a part of a graph waits for."""
    if kind.startswith(("chain", "after")):
        return range(max(0, place - 1), place)
    return range(place) if place == size - 1 else range(0)


def _record(history: History, ref: str | None) -> Mapping[str, Any]:
    return history.records.get(OperationRef.parse(ref), {"state": "not ended"}) if ref else {"state": "refused"}


def _ends(part: Part, ref: str, history: History, broken: bool, cancelled: bool) -> Iterator[str]:
    """Whether one operation ended as it should. ``broken``: one that it waited for ended otherwise than it had to."""
    record, outcomes = _record(history, ref), history.outcomes.get(OperationRef.parse(ref), {})
    state, reason = record["state"], (record.get("cancel") or {}).get("reason", "")
    if state == "cancelled" and reason == "user" and cancelled:
        return
    if broken:
        if state != "cancelled" or reason != "aborted":
            yield f"{ref} ended as {state} ({reason}), though what it waited for did not succeed"
    elif state == "cancelled":
        yield f"{ref} was cancelled ({reason}) for nothing"
    elif part.arg.get("fail"):
        if state != "failed":
            yield f"{ref} has a job that fails, and ended as {state}"
    else:
        yield from (f"{ref}: {text}" for text in failed_by_itself(record, outcomes))


def _id(told: Told, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Who was replaced names who did it; and what was combined has all that was asked for."""
    workflow = told.workflow
    policies = {f"{workflow.request}{n}": part.options["on_duplicate"] for n, part in enumerate(workflow.parts)}
    for ref in _operations(told):
        record, files = history.records.get(ref, {"state": "not ended"}), history.args.get(ref, {}).get("files", [])
        if record["state"] != "cancelled":
            yield from failed_by_itself(record, history.outcomes.get(ref, {}))
            continue
        cancel = record.get("cancel") or {}
        by = OperationRef.parse(cancel["replaced_by"]) if cancel.get("replaced_by") else None
        policy = policies.get(history.specs.get(by, {}).get("request_id", "")) if by is not None else None
        if by is None or policy not in ("replace", "combine"):
            yield f"{ref} was cancelled ({cancel}), though nothing may take its place"
        elif policy == "combine" and not set(files) <= set(history.args[by]["files"]):
            yield f"{by} was combined with {ref}, and has the files {history.args[by]['files']} without {files}"
    for n, part in enumerate(workflow.parts):
        request = f"{workflow.request}{n}"
        ref_told = told.starts.get(request)
        if ref_told is not None and part.options["on_duplicate"] == "combine":
            files = history.args.get(OperationRef.parse(ref_told), {}).get("files", [])
            if not set(part.arg["files"]) <= set(files):
                yield f"{request} is told {ref_told}, which has the files {files}"


def _limit(told: Told, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """Nothing fails by itself."""
    for ref in told.starts.values():
        if ref is None:
            yield "it was refused"
            continue
        record, outcomes = _record(history, ref), history.outcomes.get(OperationRef.parse(ref), {})
        if record["state"] == "cancelled":
            yield f"{ref} was cancelled ({record.get('cancel')})"
        yield from (text for text in failed_by_itself(record, outcomes) if BROKEN not in text)


def _transaction(told: Told, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """One branch was applied, once, and each call was told which. A branch that only reads decides nothing."""
    workflow, answers = told.workflow, told.committed
    if not answers:
        return
    found = [str(ref) for ref in started.get(f"{workflow.request}0", ())]
    if bool(found) is not answers[-1]:
        yield f"its calls were told {answers}, and the operations are {found}"
    value, version = history.written.get(ran(workflow.name), ("nothing", 0))
    if workflow.kind == "turns and reads":
        expected = ("success", 1) if answers[-1] else ("nothing", 0)
        settled = answers == sorted(answers)
    else:
        expected = ("success" if answers[-1] else "failure", 1)
        settled = len(set(answers)) == 1
    if (value, version) != expected:
        yield f"its calls were told {answers}, and its branches wrote {value}, {version} times"
    if not settled:
        yield f"its calls were told {answers}"
    if workflow.kind in ("holds", "fails") and answers[0] is (workflow.kind == "fails"):
        yield f"its calls were told {answers}, and its compare never changed"


def _series(told: Told, history: History, started: Mapping[str, Sequence[OperationRef]]) -> Iterator[str]:
    """One operation follows the other, as many as are asked for, unless one ended otherwise."""
    workflow, ref = told.workflow, next(iter(told.starts.values()), None)
    if ref is None:
        yield "it was refused"
        return
    for count in itertools.count(1):
        record, follows = _record(history, ref), started.get(f"{ref}#next", ())
        wanted = count < TIMES and next_of(workflow, record)
        if len(follows) != wanted:
            yield f"{ref}, number {count}, ended as {record['state']} and is followed by {list(map(str, follows))}"
        if record["state"] == "cancelled" and ref not in told.cancelled and workflow.kind != "series ended":
            yield f"{ref} was cancelled ({record.get('cancel')})"
        elif workflow.parts[0].arg["fail"] and record["state"] == "success":
            yield f"{ref} has a job that fails, and ended as success"
        elif not workflow.parts[0].arg["fail"]:
            yield from failed_by_itself(record, history.outcomes.get(OperationRef.parse(ref), {}))
        if not follows:
            return
        ref = str(follows[0])


_LANES = {"graph": _graph, "id": _id, "limit": _limit, "transaction": _transaction, "series": _series}


def _returned(history: History, returned: Iterable[Returned]) -> Iterator[str]:
    """What the actor was told of a job that it returned is what the job's outcome says."""
    for one in returned:
        ref = OperationRef.parse(one.op)
        results = [json.loads(text).get("result") for text in history.outcomes.get(ref, {}).get(one.ordinal, ())]
        counts = any(isinstance(result, dict) and result.get("by") == one.id for result in results)
        if counts is one.void:
            told = "void" if one.void else "returned"
            yield f"the actor was told that job {one.ordinal} of {ref} was {told}, and its outcome is {results}"
