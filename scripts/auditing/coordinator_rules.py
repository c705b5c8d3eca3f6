"""Rules of a coordinator's writes: its election, the plan, and the next operation of a series."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from auditing.content import CANCEL, HISTORY, PLAN, STATE, Finding
from auditing.records import TERMINAL, id_key, quoted, record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from auditing.content import Operation, Step

DECISION, PLANNING = ("distOp", "decision"), ("distOp", "planning")
CONTINUES = {"any": ("success", "failed"), "success": ("success",), "failure": ("failed",)}
"""The field ``on`` of a series → the ends after which another operation follows."""


def elected(step: Step) -> Iterator[Finding]:
    """A coordinator's writes happen while there is an elected coordinator, and name it as their sender.

    Clients start operations, some of them with a plan, and end pending ones.
    """
    written = _coordinated(step)
    if not written or (STATE in step.changed and step.changed[STATE].before is None):
        return
    incarnation = step.content.coordinator(step.name)
    if incarnation is None:
        yield Finding("coordinators", str(step.name), f"{' and '.join(written)} without an elected coordinator")
        return
    if step.change(PLAN).after is not None:
        yield from _first_claims(step, incarnation)
    recorded = step.change(HISTORY).after
    sender = record(recorded).get("executor") if recorded is not None else None
    executor = step.content.executors.get(incarnation)
    if sender and executor is not None and sender != executor:
        yield Finding("coordinators", str(step.name), f"was ended by {sender}, but the coordinator is {executor}")


def _coordinated(step: Step) -> list[str]:
    """The writes of this revision that only a coordinator makes, as texts."""
    before, after = step.change(STATE)
    put = [rest for (family, rest), change in step.changed.items() if family == "distOp" and change.after is not None]
    cancel = step.operation.record(CANCEL)
    by_client = before == "pending" and (cancel.get("reason") == "user" or bool(cancel.get("replaced_by")))
    found = {
        "was planned": any(_of_a_plan("distOp", rest) for rest in put),
        "its planning failed": "planning" in put,
        "was decided": "decision" in put,
        "was cancelled for a failed job": "cancel" in put and cancel.get("reason") == "failed",
        "began": before == "pending" and after == "running",
        "ended": after in TERMINAL and before != after and not by_client,
        "was cleaned up": STATE in step.changed and after is None,
    }
    return [what for what, is_so in found.items() if is_so]


def _first_claims(step: Step, incarnation: str) -> Iterator[Finding]:
    """Claims that are written with a plan belong to the coordinator."""
    for (family, rest), change in step.changed.items():
        owner = record(change.after).get("incarnation") if family == "distOpClaim" and change.after else None
        if owner and owner != incarnation:
            text = f"{owner} claimed job {int(rest)} with the plan, but the coordinator is {incarnation}"
            yield Finding("coordinators", str(step.name), text)


def _of_a_plan(family: str, rest: str) -> bool:
    return family == "distOp" and (rest == "plan" or rest.startswith("plan."))


def plans(step: Step) -> Iterator[Finding]:
    """A plan has as many chunks as it says, they match its digest, and all exist until the operation has ended."""
    plan, name, former = step.operation.record(PLAN), str(step.name), step.change(PLAN).before
    gone = [rest for (family, rest), (_, after) in step.changed.items() if _of_a_plan(family, rest) and after is None]
    planned = former is not None or (plan and PLAN not in step.changed)
    if gone and planned and not step.operation.ended:
        yield Finding("plans", name, f"{gone[0]} was deleted before the operation ended")
    if step.change(PLAN).after is None:
        return
    chunks = {
        int(rest.removeprefix("plan.")): value
        for (family, rest), value in step.operation.keys.items()
        if family == "distOp" and rest.startswith("plan.")
    }
    if sorted(chunks) != list(range(plan.get("chunks", 0))):
        yield Finding("plans", name, f"has the chunks {sorted(chunks)}, but its plan has {plan.get('chunks')}")
    content = "".join(value for _, value in sorted(chunks.items()))
    if hashlib.sha256(content.encode()).hexdigest() != plan.get("digest"):
        yield Finding("plans", name, "its chunks do not match the digest of its plan")


def series_continues(step: Step) -> Iterator[Finding]:
    """The next operation of a series is started before the last keys of the previous one are deleted.

    Unless it cannot start: its table was removed (perhaps not for long), its type was removed or replaced, or another
    operation has its id.
    """
    operation, name, content = step.operation, step.name, step.content
    series, before = operation.spec.get("series"), step.change(STATE).before
    gone = before is not None and operation.state is None
    if not gone or not series or name in content.followed or not _continues(series, operation):
        return
    began = operation.started_at
    same_table = name.table == "@cluster" or content.registered.get(quoted(name.table), began) < began
    same_type = 0 < content.declared.get(name.type, 0) < began
    identity = operation.spec.get("id")
    holder = content.before(id_key(name, identity)) if identity else None
    if same_table and same_type and holder in (None, str(name)):
        yield Finding("series", str(name), "its keys were deleted before the next operation of its series started")


def _continues(series: dict[str, Any], operation: Operation) -> bool:
    """Whether another operation follows this one, by its end and the limits of the series."""
    if operation.ended not in CONTINUES[series.get("on", "any")] or series.get("left") == 0:
        return False
    until, finished = series.get("until"), operation.record(HISTORY).get("finished")
    if not until:
        return True
    if not finished:
        return False  # unknown: its history record was deleted
    since = series.get("due") or finished if series.get("since") == "start" else finished
    return _time(since) + timedelta(seconds=series["interval"]) <= _time(until)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
