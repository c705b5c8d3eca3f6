"""The invariants of limits (16), and of selectors and served tables (17): what a claim must not make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from distop.protocol.executor_nodes import ALL, Serves, refusal
from distop.protocol.operation_options import fits
from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distop.invariants.replay_state import OperationTrace

Fault: TypeAlias = tuple[int, str]
"""(number of the invariant, what is wrong)."""
NOBODY: Mapping[str, Serves] = {}


def limit_faults(
    op: OperationTrace,
    partition: int,
    labels: Mapping[str, Mapping[str, str]],
    serves: Mapping[str, Serves] = NOBODY,
) -> Iterator[Fault]:
    """What is wrong with a claim of this revision. ``op`` is as after the revision; ``labels`` and ``serves``: those of
    the incarnations with a node key.
    """
    claim, options = op.jobs[partition].claim, op.opened.options
    if claim is None or claim.waiting:
        return
    if claim.permit >= 0 and op.permits.get(claim.permit) != partition:
        yield 16, f"claimed with the permit {claim.permit}, which {op.permits.get(claim.permit, 'nobody')} has"
    if options.max_jobs:
        # Of a claim by an actor etcd does not tell whether it is overdue.
        live = sum(count for incarnation, count in op.holders.items() if incarnation in labels)
        if claim.permit < 0:
            yield 16, f"claimed without a permit, where at most {options.max_jobs} jobs run at once"
        if live > options.max_jobs:
            yield 16, f"claimed as one of {live} jobs that run at once, where at most {options.max_jobs} may"
    most, mine = options.max_jobs_per_executor, op.holders[claim.incarnation]
    if most and mine > most:
        yield 16, f"claimed as one of {mine} jobs of {claim.incarnation}, where at most {most} may be"
    where = op.spec.where if op.spec is not None else {}
    if not fits(where, labels.get(claim.incarnation, {})):
        yield 17, f"claimed by {claim.incarnation}, which has not the labels {dict(where)}"
    if why := refusal(serves.get(claim.incarnation, ALL), op.ref.type, op.opened.tables(op.ref.table)):
        yield 17, f"claimed by {claim.incarnation}: {why}"


def orphaned_permit(op: OperationTrace, partition: int) -> int:
    """The permit that names a job whose claim this revision ended or replaced.

    -1 where there is none. Nobody would give such a permit back. While an operation is being cancelled, no job of it
    is claimed again.
    """
    job = op.jobs[partition]
    had = job.ended.permit if job.ended is not None else -1
    if op.state not in (State.RUNNING, State.PAUSED) or op.permits.get(had) != partition:
        return -1
    return had if job.claim is None or job.claim.permit != had else -1


def unclaimed_permit(op: OperationTrace, permit: int) -> bool:
    """Whether a permit that this revision wrote names a job whose claim does not have it.

    ``op`` is as after the revision. The claim is put by the same transaction. A job that waits has no permit: whatever
    sets its claim to waiting gives the permit back.
    """
    partition = op.permits.get(permit)
    if partition is None:
        return False
    claim = op.jobs[partition].claim if partition in op.jobs else None
    return claim is None or claim.waiting or claim.permit != permit


def freed_under_claim(op: OperationTrace, permit: int, partition: int) -> bool:
    """Whether a permit was taken from a job whose claim goes on with it.

    ``partition``: the job that had it before the revision. ``op`` is as after the revision. Another job could take the
    permit, and more jobs than the limit allows would run.
    """
    claim = op.jobs[partition].claim if partition in op.jobs else None
    taken = op.permits.get(permit) != partition
    return taken and claim is not None and not claim.waiting and claim.permit == permit
