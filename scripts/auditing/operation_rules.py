"""Rules of operations: states, keys written once, gate, history, request ids, ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from auditing.content import ACTIONS, ARG, GATE, HISTORY, OPTIONS, PENDING, PLAN, SPEC, STATE, Finding
from auditing.records import ACTIVE, TERMINAL, BadRecord, id_key, operation_name, record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from auditing.content import Operation, Step

HOUR = 3600.0
"""Seconds for which a history record is kept at least."""

TRANSITIONS: dict[str | None, frozenset[str | None]] = {
    None: frozenset({"pending", "running"}),
    "pending": frozenset({"pending", "running", "success", "cancelled"}),
    "running": frozenset({"paused", "cancelling", "success", "failed", None}),
    "paused": frozenset({"paused", "running", "cancelling", "success", "failed"}),
    "cancelling": frozenset({"cancelling", "cancelled", "failed", "success"}),
    **dict.fromkeys(TERMINAL, frozenset[str | None]({None})),
}
"""A state → the states that may follow it. An operation of one job may go from ``running`` to its end at once."""

PENDING_VALUES = {
    "pending": {"waiting"},
    "running": {"planning", "completing"},
    "paused": {"paused", "halted", "completing"},
    "cancelling": {"cancelling", "completing"},
    **{state: {"cleaning"} for state in TERMINAL},
}
"""A state → the values that the key ``distOpPending…`` may have in it."""


def states(step: Step) -> Iterator[Finding]:
    """The state follows the table of states; some types run one operation at a time."""
    if STATE not in step.changed:
        return
    content, name, operation = step.content, step.name, step.operation
    before, after = step.changed[STATE]
    altered = before == after == "running" and step.change(OPTIONS).after is not None
    if after not in TRANSITIONS.get(before, frozenset()) and not altered:
        yield Finding("states", str(name), f"the state went from {before or 'absent'} to {after or 'absent'}")
    if after in ACTIVE and operation.spec.get("one_at_a_time"):
        for other, twin in content.operations.items():
            if other[:3] == name[:3] and other != name and twin.state in ACTIVE:
                yield Finding("one at a time", str(name), f"runs at the same time as {other}")


def actions(step: Step) -> Iterator[Finding]:
    """The history record has all recorded actions: changes of options, pauses and resumes."""
    written = step.change(HISTORY)
    if written.after is None or written.before is not None:
        return
    change = step.change(ACTIONS)
    last = step.operation.keys.get(ACTIONS) or change.after or change.before
    known, kept = record(last) if last else {}, record(written.after)
    if any(known.get(name) != kept.get(name) for name in ("actions", "actions_dropped")):
        text = f"its history record has the actions {kept.get('actions')} instead of {known.get('actions')}"
        yield Finding("actions", str(step.name), text)


def written_once(step: Step) -> Iterator[Finding]:
    """Argument, spec, plan and history record never change.

    Chunks of a plan are written only before the plan.
    """
    planned_before = PLAN in step.operation.keys and PLAN not in step.changed
    for (family, rest), (before, after) in step.changed.items():
        if after is None:
            continue
        chunk = family == "distOp" and rest.startswith("plan.")
        if chunk and planned_before:
            yield Finding("written once", str(step.name), f"{rest} was written after the plan")
        fixed = (family, rest) in (ARG, SPEC, PLAN) or family == "distOpHistory"
        if fixed and before is not None:
            yield Finding("written once", str(step.name), f"{family} {rest or 'record'} was written again")


def gate_or_pending(step: Step) -> Iterator[Finding]:
    """An operation has either a gate or a pending key, and it fits the state.

    After the operation's end no key is left.
    """
    operation, name = step.operation, str(step.name)
    state, gate, pending = operation.state, GATE in operation.keys, operation.keys.get(PENDING)
    if state is None:
        stray = sorted({f"{family} {rest}" for family, rest in operation.keys if family != "distOpHistory"})
        if stray:
            yield Finding("nothing is left", name, f"has no state, but still has the keys {', '.join(stray[:5])}")
    elif gate == (pending is not None):
        yield Finding("gate or pending", name, "has both" if gate else "has neither")
    elif gate and (state != "running" or PLAN not in operation.keys):
        yield Finding("gate or pending", name, f"has a gate in the state {state}")
    elif pending is not None and pending not in PENDING_VALUES.get(state, set()):
        yield Finding("gate or pending", name, f"is {pending} in the state {state}")


def history(step: Step) -> Iterator[Finding]:
    """An operation's end and its history record are written in one revision.

    The record agrees with the jobs, and is kept for an hour, by the auditor's clock and by etcd's watermarks.
    """
    name = str(step.name)
    before, after = step.change(STATE)
    written = step.change(HISTORY)
    ends = STATE in step.changed and before not in TERMINAL and (after in TERMINAL or after is None)
    created = written.before is None and written.after is not None
    if ends and not created:
        yield Finding("history", name, "ended without a history record of the same revision")
    if created and not ends:
        yield Finding("history", name, "has a history record, but did not end in its revision")
    if ends and written.after is not None:
        yield from _record(step, record(written.after), after or step.operation.ended)
    if written.before is not None and written.after is None:
        yield from _removal(step, record(written.before))


def _record(step: Step, kept: dict[str, Any], state: str) -> Iterator[Finding]:
    recorded, name, jobs = kept.get("jobs", {}), str(step.name), step.operation.jobs
    counts = (recorded.get("success"), recorded.get("failed"))
    if kept.get("state") != state:
        yield Finding("history", name, f"says {kept.get('state')}, and the state is {state}")
    if counts != (jobs["success"], jobs["failed"]):
        yield Finding("history", name, f"counts {counts}, and the jobs ended as {dict(jobs)}")
    if state == "success":
        if recorded.get("failed") and not step.operation.options.get("max_failed"):
            yield Finding("history", name, f"succeeded with {recorded['failed']} failed jobs")
        if jobs.total() != recorded.get("total"):
            text = f"succeeded with {recorded.get('total')} jobs, of which {jobs.total()} ended"
            yield Finding("history", name, text)


def _removal(step: Step, kept: dict[str, Any]) -> Iterator[Finding]:
    content, name, operation = step.content, step.name, step.operation
    content.requests[name.table, name.type, str(kept.get("request_id", ""))].discard(name)
    if content.clock is not None and operation.recorded is not None:
        age = content.clock() - operation.recorded
        if age < HOUR:
            yield Finding("history for an hour", str(name), f"its record was removed after {age:.0f} s")
    if not content.hour_old(operation.recorded_at):
        text = (
            f"its record of revision {operation.recorded_at} was removed, but no watermark shows that its hour is over"
        )
        yield Finding("history for an hour", str(name), text)


def request_ids(step: Step) -> Iterator[Finding]:
    """A request id starts one operation, unless the graph of the earlier one was abandoned."""
    content, name = step.content, step.name
    before, after = step.change(STATE)
    if before is not None or after is None:
        return
    wanted = str(step.operation.spec.get("request_id", ""))
    same = content.requests[name.table, name.type, wanted]
    for other in sorted(same):
        former = content.operations[other]
        hold = former.hold
        given_up = hold is not None and content.hold(hold, before=True).get("state") == "denied"
        if not given_up and not former.record(HISTORY).get("void"):
            yield Finding("one request, one operation", str(name), f"{other} has the same request id {wanted!r}")
    same.add(name)


def keeps_id(operation: Operation) -> bool:
    """An ended operation of a series keeps its id until the next one takes it, or its last key is deleted."""
    known = operation.state is not None
    return known and bool(operation.spec.get("series")) and operation.ended != "cancelled"


def ids(step: Step) -> Iterator[Finding]:
    """Of one id at most one operation is active, and at most one is pending.

    The id names the pending one, or else the active one.
    """
    content, name, operation = step.content, step.name, step.operation
    identity = operation.spec.get("id")
    if STATE not in step.changed or not identity:
        return
    same = content.ids[name.table, name.type, identity]
    active = sorted(other for other in same if content.operations[other].state in ACTIVE)
    pending = sorted(other for other in same if content.operations[other].state == "pending")
    for found, what in ((active, "active"), (pending, "pending")):
        if len(found) > 1:
            listed = ", ".join(map(str, found))
            yield Finding("one of an id", str(name), f"of id {identity!r}, {len(found)} are {what}: {listed}")
    named = content.others.get(id_key(name, identity))
    wanted = next(iter(pending or active), None)
    ended = bool(operation.ended) and not keeps_id(operation)
    if wanted is not None and named != str(wanted):
        yield Finding("one of an id", str(name), f"the id {identity!r} names {named or 'nothing'} instead of {wanted}")
    elif wanted is None and ended and named == str(name):
        yield Finding("one of an id", str(name), f"has ended, and the id {identity!r} still names it")
    same -= {other for other in same if content.operations[other].ended}


def series(step: Step) -> Iterator[Finding]:
    """The next operation of a series is started while the one before it is cleaned up; none follows a cancel.

    The next one's request id, ``<operation>#next``, is distop's own.
    """
    before, after = step.change(STATE)
    former, _, suffix = str(step.operation.spec.get("request_id", "")).rpartition("#")
    if before is not None or after is None or suffix != "next":
        return
    try:
        known = step.content.operations.get(operation_name(former))
    except BadRecord:
        return  # a request id of a caller that happens to end with "#next"
    if known is None:
        return
    wrong = ""
    if not known.ended:
        wrong = "which has not ended"
    elif not known.spec.get("series"):
        wrong = "which belongs to no series"
    elif known.ended == "cancelled":
        wrong = "which was cancelled"
    elif known.state is None:
        wrong = "whose keys are deleted"
    if wrong:
        yield Finding("series", str(step.name), f"follows {former}, {wrong}")
