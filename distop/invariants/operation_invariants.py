"""The invariants of a whole operation that need no earlier state.

They are about its plan (13), its counts (5), its history record (5, 14), and its gate (12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.identity import plan_digest
from distop.protocol.json_codec import UNREADABLE, failed_text
from distop.protocol.plan import decode_chunk
from distop.protocol.records import State
from distop.protocol.state_tables import Stage
from distop.protocol.texts import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.invariants.replay_state import OperationTrace
    from distop.protocol.records import History

FOLLOWS: dict[State | None, frozenset[State]] = {
    None: frozenset({State.PENDING, State.RUNNING}),
    State.PENDING: frozenset({State.RUNNING, State.SUCCESS, State.CANCELLED}),
    State.RUNNING: frozenset({State.PAUSED, State.CANCELLING, State.SUCCESS, State.FAILED}),
    State.PAUSED: frozenset({State.RUNNING, State.CANCELLING, State.SUCCESS, State.FAILED}),
    State.CANCELLING: frozenset({State.FAILED, State.CANCELLED}),
    State.SUCCESS: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}
"""The states that may follow each state (None: the operation does not exist yet)."""


class UnreadableChunk(ValueError):
    """A chunk of a plan cannot be read."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(str(error))
        self.number = number


def all_succeeded(op: OperationTrace) -> bool:
    """Whether all jobs of the plan ended with success."""
    return op.plan is not None and op.success == op.plan.count and not op.failed


def miscounted(op: OperationTrace, total: int, success: int, failed: int, ranges: str) -> str:
    """How the counts of a decision or a history record differ from the jobs, or ""."""
    counts = (total, success, failed, ranges)
    is_so = (op.plan.count if op.plan is not None else 0, op.success, len(op.failed), failed_text(op.failed)[0])
    return f"the record has (total, success, failed, ranges) {counts}, expected {is_so}" if counts != is_so else ""


def unfit_plan(op: OperationTrace) -> str:
    """How the plan does not match its chunks, or "".

    The chunks' bytes are then freed. Raises UnreadableChunk.
    """
    plan = op.plan
    if plan is None:
        return ""
    if sorted(op.chunks) != list(range(plan.chunks)):
        return f"the plan has {plural(plan.chunks, 'chunk')}, but the written ones are {sorted(op.chunks)}"
    chunks = [op.chunks[n] for n in range(plan.chunks)]
    if plan_digest(chunks) != plan.digest:
        return "the plan's digest does not match its chunks"
    if [p for number, chunk in enumerate(chunks) for p in _ordinals(number, chunk)] != list(range(plan.count)):
        return f"the chunks do not contain the partitions 0 to {plan.count - 1} in order"
    op.chunks = dict.fromkeys(op.chunks, b"")
    return ""


def _ordinals(number: int, chunk: bytes) -> list[int]:
    try:
        return [p.partition for p in decode_chunk(chunk)]
    except UNREADABLE as error:
        raise UnreadableChunk(number, error) from error


def unfit_record(op: OperationTrace, record: History) -> Iterator[tuple[int, str]]:
    """What is wrong in a history record, each with the number of the invariant."""
    if (record.op, record.state) != (str(op.ref), op.state):
        yield 5, f"the record is of {record.op} with state {record.state}, expected {op.ref} with state {op.state}"
    if op.spec is not None and record.request_id != op.spec.request_id:
        yield 14, f"the record has the request id {record.request_id!r}, expected {op.spec.request_id!r}"
    if wrong := miscounted(op, record.total, record.success, record.failed, record.failed_ranges):
        yield 5, wrong
    if record.actions != op.actions:
        yield (
            5,
            f"the record has {plural(record.actions.count, 'action')}, expected the {op.actions.count} recorded ones",
        )


def unfit_gate(op: OperationTrace) -> str:
    """How gate and pending contradict each other or the stage of the operation, or ""."""
    stage, phase = op.stage, op.phase
    if op.state is None:
        return ""
    if op.gate and phase is not None:
        return f"both the gate and the pending key ({phase}) exist"
    if not op.gate and phase is None:
        return "neither the gate nor the pending key exists"
    if (stage is Stage.OPEN) is not op.gate or (phase is not None and not phase.of(stage)):
        return f"the operation is {stage}, but {'the gate exists' if op.gate else f'pending is {phase}'}"
    return ""
