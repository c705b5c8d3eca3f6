"""The invariants of a single job (1, 2, 3, 4 and 10), for one revision.

etcd's history shows whom a write is about (records contain incarnation and attempt), not who sent it. A write by a
former holder shows as a record of an attempt that was no longer the job's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from distop.decide import job_claims
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import UNREADABLE
from distop.protocol.records import State
from distop.protocol.texts import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from distop.invariants.replay_state import JobDelta, JobTrace, OperationTrace
    from distop.protocol.revisioned import Change

KeyFault: TypeAlias = tuple[int, str, str]
"""(number of the invariant, key, what is wrong)."""


def job_faults(
    op: OperationTrace, partition: int, job: JobTrace, delta: JobDelta, live: Collection[str], coordinated: bool
) -> Iterator[KeyFault]:
    """The violations of a job in one revision.

    ``op`` and ``job`` are in the state before it. ``live``: the incarnations with a node key before it.
    ``coordinated``: a coordinator of the operation's type was elected before it.
    """
    if delta.state is not None:
        if delta.state.deleted:
            if not _ended(op):
                yield (
                    1,
                    delta.state.kv.key,
                    f"the job's state was deleted while its operation was {op.state}, not ended",
                )
            elif not coordinated:
                yield 8, delta.state.kv.key, "the job's state was deleted while no coordinator was elected"
        else:
            yield from _ended_faults(op, partition, job, delta, delta.state, live)
    if delta.outcome is not None:
        if delta.outcome.deleted:
            if not _ended(op):
                yield (
                    1,
                    delta.outcome.kv.key,
                    f"the job's outcome was deleted while its operation was {op.state}, not ended",
                )
        elif delta.state is None:
            yield 1, delta.outcome.kv.key, "the job's outcome was written without its state"
    if delta.claim is not None:
        if delta.claim.deleted:
            if delta.state is None:
                yield from _dropped_faults(op, delta.claim, coordinated)
        else:
            yield from _claim_faults(op, job, delta, delta.claim, live)
    if delta.progress is not None and not delta.progress.deleted and (job.claim is None or job.claim.waiting):
        yield 3, delta.progress.kv.key, "a checkpoint was saved while the job had no holder"


def unreadable(delta: JobDelta) -> str:
    """The key of the first of a job's records that cannot be read; of the first, if each can be read on its own."""
    readers = (
        (delta.claim, Claim.decode),
        (delta.state, lambda value: JobState(value.decode())),
        (delta.outcome, Outcome.decode),
        (delta.progress, bytes),
    )
    written = [(change, reader) for change, reader in readers if change is not None]
    for change, reader in written:
        try:
            if not change.deleted:
                reader(change.kv.value)
        except UNREADABLE:
            return change.kv.key
    return written[0][0].kv.key


def _ended(op: OperationTrace) -> bool:
    return op.state is not None and op.state.terminal


def _ended_faults(
    op: OperationTrace, partition: int, job: JobTrace, delta: JobDelta, change: Change, live: Collection[str]
) -> Iterator[KeyFault]:
    key, word, claim = change.kv.key, change.kv.value.decode(errors="replace"), job.claim
    if job.state is not None:
        yield 1, key, f"the job's state was written twice: first {job.state}, then {word}"
    if op.plan is None or partition >= op.plan.count:
        yield 2, key, f"the plan has no job {partition}"
    outcome = None
    if delta.outcome is None or delta.outcome.deleted:
        yield 1, key, "the job's state was written without its outcome"
    else:
        outcome = Outcome.decode(delta.outcome.kv.value)
    if claim is None or claim.waiting:
        former = outcome is not None and (outcome.holder, outcome.attempt) in job.former
        yield 3 if former else 2, key, "the job's end was reported while it had no holder"
        return
    if delta.claim is None or not delta.claim.deleted:
        yield 2, key, "the job has ended, but its claim still exists"
    if word == JobState.SUCCESS and not claim.actor and job_claims.only_ends(claim, op.rules):
        yield 10, key, "the job had reached its limit of losses, but was run again"
    if outcome is None or (outcome.holder, outcome.attempt) == (claim.holder, claim.attempt):
        return
    lost = word == JobState.FAILED and (not outcome.grant if claim.actor else claim.incarnation not in live)
    limit = op.rules.can_fail and (op.rules.lost == "fail" or op.rules.at_limit(claim.failures + 1))
    if not (lost and limit):
        former = (outcome.holder, outcome.attempt) in job.former
        yield (
            3 if former else 2,
            key,
            f"{outcome.holder} (attempt {outcome.attempt}) reported the job's end while {claim.holder} "
            f"(attempt {claim.attempt}) held it",
        )


def _dropped_faults(op: OperationTrace, change: Change, coordinated: bool) -> Iterator[KeyFault]:
    if op.state is not State.CANCELLING:
        if not _ended(op):
            yield (
                2,
                change.kv.key,
                f"the claim was deleted without a report while its operation was {op.state}, not cancelling",
            )
    elif not coordinated:
        yield 8, change.kv.key, "the claim was deleted while no coordinator was elected"


def _claim_faults(
    op: OperationTrace, job: JobTrace, delta: JobDelta, change: Change, live: Collection[str]
) -> Iterator[KeyFault]:
    key, old, new = change.kv.key, job.claim, Claim.decode(change.kv.value)
    if job.state is not None or (delta.state is not None and not delta.state.deleted):
        yield 2, key, "the job was claimed after it had ended"
    if new.attempt < job.attempt:
        yield 10, key, f"the attempt decreased from {job.attempt} to {new.attempt}"
    if new.failures and op.rules.at_limit(new.failures) and not _only_ends(op, old, new):
        yield (
            10,
            key,
            f"the claim has {plural(new.failures, 'failure')}, but the job fails at {op.rules.retry.attempts}",
        )
    if new.waiting:
        yield from _waiting_faults(op, key, old, new, live)
        return
    if new.actor and old is not None and old.grant == new.grant:
        yield from _extension_faults(op, key, old, new)
        return
    if not op.gate:
        yield 4, key, f"{new.holder} claimed the job while its operation had no gate"
    if not new.actor and new.incarnation not in live:
        yield 4, key, f"{new.incarnation} claimed the job, but has no node key"
    if new.attempt == job.attempt:
        yield 10, key, f"the job was claimed twice with attempt {new.attempt}"
    if old is None:
        return
    if old.waiting:
        if new.failures != old.failures:
            yield 10, key, f"the claim changed the failures from {old.failures} to {new.failures}"
        return
    if old.incarnation in live:
        yield 2, key, f"{new.holder} took the job over from {old.incarnation}, whose node key exists"
    if new.failures != old.failures + 1:
        yield 10, key, f"the takeover has {plural(new.failures, 'failure')}, expected {old.failures + 1}"
    if op.rules.can_fail and op.rules.lost == "fail" and not _only_ends(op, old, new):
        yield 10, key, "the lost job was taken over, but its behavior requires that it fails"


def _only_ends(op: OperationTrace, old: Claim | None, new: Claim) -> bool:
    """Whether a claim only serves to clean up and fail a lost job.

    An executor has made such a claim, or it was released or lost, or the job waits to be claimed for that.
    """
    if old is None or new.actor:
        return False
    if new.waiting:
        if new.failures == old.failures:
            return job_claims.only_ends(old, op.rules)
        return new == job_claims.revoked_lost(old, op.rules) and job_claims.only_ends(new, op.rules)
    return job_claims.only_ends(new, op.rules)


def _extension_faults(op: OperationTrace, key: str, old: Claim, new: Claim) -> Iterator[KeyFault]:
    if op.state not in (State.RUNNING, State.PAUSED):
        yield 4, key, f"{new.actor} extended the claim while its operation was {op.state}"
    if (new.actor, new.attempt) != (old.actor, old.attempt):
        yield 3, key, f"{new.actor} (attempt {new.attempt}) extended the claim of {old.actor} (attempt {old.attempt})"
    if new.failures != old.failures:
        yield 10, key, f"the extension changed the failures from {old.failures} to {new.failures}"


def _waiting_faults(
    op: OperationTrace, key: str, old: Claim | None, new: Claim, live: Collection[str]
) -> Iterator[KeyFault]:
    if old is None or old.waiting:
        yield 3, key, "the claim was set to waiting while the job had no holder"
        return
    if (new.attempt, new.executor) != (old.attempt, old.executor):
        yield (
            3,
            key,
            f"{new.executor} (attempt {new.attempt}) set the claim to waiting while {old.executor} "
            f"(attempt {old.attempt}) held it",
        )
    if old.incarnation in live and new in (job_claims.revoked(old), job_claims.revoked_lost(old, op.rules)):
        yield 2, key, f"the claim of {old.incarnation} was revoked as lost, but its node key exists"
    if new.failures not in (old.failures, old.failures + 1):
        yield 10, key, f"the failures changed from {old.failures} to {new.failures}, expected at most one more"
