"""Decides whether a pending operation may begin, and builds history records.

Both are pure functions: of the operation's view, the holds and the time; of its spec and its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from distop.decide.next_steps import newer
from distop.protocol.dependencies import GRAPH, HoldState
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import parse_time, shorten
from distop.protocol.prepared_operations import PreparedTerms
from distop.protocol.records import Cancel, History, State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.decide.operation_view import OperationView
    from distop.protocol.dependencies import Hold
    from distop.protocol.jobs import Outcome
    from distop.protocol.records import Decision, OperationRef, Spec
    from distop.protocol.revisioned import Seen


SUBMITTER_KEPT = 1_000
"""Maximum characters in a history record: an operation that submits others may have a long name."""


@frozen
class Begin:
    """It waits for nothing any more, except conflicting types on its table."""


@frozen
class EndJoin:
    """Its last predecessor has ended, and it has no jobs: it ends."""


@frozen
class EndWaiting:
    """It will never begin."""

    why: Cancel
    alarm: str = ""
    """An alarm for people."""
    void: bool = False
    """Its graph was never inserted as a whole."""
    hold: str = ""
    """The hold that its transaction compares as absent; the view has not seen it."""


@frozen
class At:
    """It may not begin before this time (seconds since the epoch)."""

    time: float


@frozen
class Blocked:
    """It waits for predecessors, or (``hold``) for this hold."""

    hold: str = ""


StartDecision: TypeAlias = Begin | EndJoin | EndWaiting | At | Blocked | None


def start_decision(op: OperationView, holds: Mapping[str, Seen[Hold]], now: float) -> StartDecision:
    """What happens to a pending operation; None: this release cannot decide it.

    Wall clocks only decide whether a time has come (P2, P19).
    """
    spec = op.spec
    if spec is None or newer(op):
        return None
    hold = holds.get(spec.hold) if spec.hold else None
    if hold is not None and hold.value.state is HoldState.DENIED:
        terms, text = PreparedTerms.of(hold.value), hold.value.text
        alarm = text if terms is not None and terms.alarm else ""
        return EndWaiting(Cancel("aborted", text), alarm, void=hold.value.kind == GRAPH)
    if hold is not None:
        return Blocked(spec.hold)
    if op.broken:
        return EndWaiting(Cancel("aborted", next(iter(op.broken.values()))), hold=spec.hold)
    if op.after:
        return Blocked()
    due = parse_time(spec.not_before)
    if due > now:
        return At(due)
    return EndJoin() if spec.rules.joins else Begin()


def ended_waiting(
    ref: OperationRef, spec: Spec, state: State, finished: str, why: Cancel | None, alarm: str = "", **fields: Any
) -> History:
    """The history record of an operation that ended while pending.

    ``fields``: further fields of the record (``void``, ``actions``, ``executor``).
    """
    return record_of(ref, spec, state, finished, total=0, success=0, failed=0, cancel=why, alarm=alarm, **fields)


def series_of(spec: Spec, ref: OperationRef) -> str:
    """The first operation of the series; "": it is of no series."""
    return str(spec.series.get("first") or ref) if spec.series is not None else ""


ERRORS_KEPT = 10
"""Errors in a history record; until cleanup the jobs' outcomes have all of them."""
ERROR_TEXT = 2_000
"""Maximum characters of each."""
MAX_HISTORY_BYTES = 1024 * 1024


def error_of(partition: int, outcome: Outcome | None) -> dict[str, Any]:
    """The entry of a failed job in a history record."""
    if outcome is None:
        return {"partition": str(partition), "text": "failed"}
    error: dict[str, Any] = {"partition": outcome.name, "text": shorten(outcome.error or "failed", ERROR_TEXT)}
    if outcome.result is not None:
        error["verdict"] = True
    if outcome.tried:
        error["attempts"] = [one.to_json() for one in outcome.tried]
    return error


def final_record(
    ref: OperationRef,
    spec: Spec,
    decision: Decision,
    job_errors: Sequence[Mapping[str, Any]],
    finished: str,
    *,
    report: Any,
    failure: str | None,
    **fields: Any,
) -> tuple[History, bytes]:
    """The history record of a decided operation, and its value.

    ``report`` and ``failure``: the result of its completion code, and the reason for which it made the operation fail.
    ``job_errors``: :func:`error_of` the first failed jobs. ``fields``: further fields of the record (``cancel``,
    ``actions``, ``executor``). A report that is too large for the record fails the operation.
    """
    errors = list(job_errors)
    state = State.FAILED if failure is not None and decision.verdict is State.SUCCESS else decision.verdict
    if failure:
        answered = {"verdict": True} if report is not None else {}
        errors.insert(0, {"partition": None, "text": shorten(failure, ERROR_TEXT), **answered})
    if decision.error:
        errors.insert(0, {"partition": None, "text": shorten(decision.error, ERROR_TEXT)})
    history = record_of(
        *(ref, spec, state, finished),
        total=decision.total,
        success=decision.success,
        failed=decision.failed,
        report=report,
        errors=tuple(errors[:ERRORS_KEPT]),
        failed_ranges=decision.failed_ranges,
        failed_truncated=decision.failed_truncated,
        **fields,
    )
    value = history.encode()
    if (size := len(value)) > MAX_HISTORY_BYTES:
        note = f"the report has {size} bytes, more than a history record keeps ({MAX_HISTORY_BYTES})"
        errors.insert(0, {"partition": None, "text": note})
        history = replace(history, state=State.FAILED, report=None, errors=tuple(errors[:ERRORS_KEPT]))
        value = history.encode()
    return history, value


def record_of(ref: OperationRef, spec: Spec, state: State, finished: str, **fields: Any) -> History:
    """The history record of an operation, from its spec and further fields."""
    return History(
        op=str(ref),
        state=state,
        started=spec.time,
        finished=finished,
        request_id=spec.request_id,
        request_digest=spec.request_digest,
        submitter=shorten(spec.submitter, SUBMITTER_KEPT),
        by=spec.by,
        id=spec.id,
        follows=spec.follows,
        rerun_of=spec.rerun_of,
        labels=spec.labels,
        series=series_of(spec, ref),
        **fields,
    )
