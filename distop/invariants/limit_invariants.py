"""The invariants of limits (16), selectors and served tables (17) that claims must keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.executor_nodes import ALL, Serves, refusal
from distop.protocol.operation_options import fits
from distop.protocol.records import State
from distop.protocol.texts import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distop.invariants.replay_state import InvariantFault, OperationTrace

NOBODY: Mapping[str, Serves] = {}


def limit_faults(
    op: OperationTrace, partition: int, labels: Mapping[str, Mapping[str, str]], serves: Mapping[str, Serves] = NOBODY
) -> Iterator[InvariantFault]:
    """The violations of a claim in this revision.

    ``op`` is in the state after the revision. ``labels`` and ``serves``: of the incarnations with a node key.
    """
    claim, options = op.jobs[partition].claim, op.opened.options
    if claim is None or claim.waiting:
        return
    if claim.permit >= 0 and op.permits.get(claim.permit) != partition:
        yield (
            16,
            f"the claim has permit {claim.permit}, but the permit names job {op.permits.get(claim.permit, 'none')}",
        )
    if options.max_jobs:
        # etcd's history does not show whether an actor's claim is overdue.
        live = sum(count for incarnation, count in op.holders.items() if incarnation in labels)
        if claim.permit < 0:
            yield 16, f"the claim has no permit, but at most {options.max_jobs} jobs may run at once"
        if live > options.max_jobs:
            yield 16, f"{live} jobs run at once, allowed are {options.max_jobs}"
    most, mine = options.max_jobs_per_executor, op.holders[claim.incarnation]
    if most and mine > most:
        yield 16, f"{claim.incarnation} holds {plural(mine, 'job')}, allowed are {most}"
    where = op.spec.where if op.spec is not None else {}
    if not fits(where, labels.get(claim.incarnation, {})):
        yield 17, f"{claim.incarnation} claimed the job, but lacks the labels {dict(where)}"
    if why := refusal(serves.get(claim.incarnation, ALL), op.ref.type, op.opened.tables(op.ref.table)):
        yield 17, f"{claim.incarnation} claimed the job, but {why}"


def orphaned_permit(op: OperationTrace, partition: int) -> int:
    """The permit of a job whose claim this revision ended or replaced.

    -1: none names such a job. No transaction would give such a permit back. While an operation is cancelling, its jobs
    are not claimed again.
    """
    job = op.jobs[partition]
    had = job.ended.permit if job.ended is not None else -1
    if op.state not in (State.RUNNING, State.PAUSED) or op.permits.get(had) != partition:
        return -1
    return had if job.claim is None or job.claim.permit != had else -1


def unclaimed_permit(op: OperationTrace, permit: int) -> bool:
    """Whether a permit written in this revision names a job without it.

    The claim of the job does not have the permit. ``op`` is in the state after the revision. The same transaction
    writes the claim. A waiting job has no permit: the transaction that sets its claim to waiting gives the permit back.
    """
    partition = op.permits.get(permit)
    if partition is None:
        return False
    claim = op.jobs[partition].claim if partition in op.jobs else None
    return claim is None or claim.waiting or claim.permit != permit


def freed_under_claim(op: OperationTrace, permit: int, partition: int) -> bool:
    """Whether a permit was taken from a job whose claim still has it.

    ``partition``: the job that had it before the revision. ``op`` is in the state after the revision. Another job could
    take the permit, and more jobs than allowed would run.
    """
    claim = op.jobs[partition].claim if partition in op.jobs else None
    taken = op.permits.get(permit) != partition
    return taken and claim is not None and not claim.waiting and claim.permit == permit
