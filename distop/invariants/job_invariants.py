"""The invariants of a single job (1, 2, 3, 4 and 10): what one revision did to it, against what was before.

etcd's history tells who a write speaks of (incarnation and attempt stand in the records), not who sent it; a write
by a former holder shows as a record of an attempt that was no longer the job's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from distop.decide import next_steps
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import UNREADABLE
from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from distop.invariants.replay_state import JobDelta, JobTrace, OperationTrace
    from distop.protocol.revisioned import Change

Fault: TypeAlias = tuple[int, str, str]
"""(number of the invariant, key, what is wrong)."""


def job_faults(
    op: OperationTrace, partition: int, job: JobTrace, delta: JobDelta, live: Collection[str], coordinated: bool
) -> Iterator[Fault]:
    """What a revision did wrong to a job. ``op`` and ``job`` are as before it; ``live``: the incarnations with a node
    key before it; ``coordinated``: an election for the operation's type existed before it.
    """
    if delta.state is not None:
        if delta.state.deleted:
            if not _ended(op):
                yield 1, delta.state.kv.key, "the job's state was deleted while its operation was not over"
            elif not coordinated:
                yield 8, delta.state.kv.key, "the job was cleaned up while nobody was elected"
        else:
            yield from _ended_faults(op, partition, job, delta, delta.state, live)
    if delta.outcome is not None:
        if delta.outcome.deleted:
            if not _ended(op):
                yield 1, delta.outcome.kv.key, "the job's outcome was deleted while its operation was not over"
        elif delta.state is None:
            yield 1, delta.outcome.kv.key, "the outcome was written without the state"
    if delta.claim is not None:
        if delta.claim.deleted:
            if delta.state is None:
                yield from _dropped_faults(op, delta.claim, coordinated)
        else:
            yield from _claim_faults(op, job, delta, delta.claim, live)
    if delta.progress is not None and not delta.progress.deleted and (job.claim is None or job.claim.waiting):
        yield 3, delta.progress.kv.key, "progress was saved for a job that nobody held"


def unreadable(delta: JobDelta) -> str:
    """The key of the first of a job's records that cannot be read; of the first, where each can be read alone."""
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
) -> Iterator[Fault]:
    key, word, claim = change.kv.key, change.kv.value.decode(errors="replace"), job.claim
    if job.state is not None:
        yield 1, key, f"the job's state was {job.state} and was written again as {word}"
    if op.plan is None or partition >= op.plan.count:
        yield 2, key, "the plan has no such job"
    outcome = None
    if delta.outcome is None or delta.outcome.deleted:
        yield 1, key, "the state was written without an outcome"
    else:
        outcome = Outcome.decode(delta.outcome.kv.value)
    if claim is None or claim.waiting:
        former = outcome is not None and (outcome.holder, outcome.attempt) in job.former
        yield 3 if former else 2, key, "the job was reported while nobody held it"
        return
    if delta.claim is None or not delta.claim.deleted:
        yield 2, key, "the job has ended and its claim remains"
    if word == JobState.SUCCESS and not claim.actor and next_steps.only_ends(claim, op.rules):
        yield 10, key, "the job was lost once too often, and was run again"
    if outcome is None or (outcome.holder, outcome.attempt) == (claim.holder, claim.attempt):
        return
    lost = word == JobState.FAILED and (not outcome.grant if claim.actor else claim.incarnation not in live)
    limit = op.rules.can_fail and (op.rules.lost == "fail" or op.rules.at_limit(claim.failures + 1))
    if not (lost and limit):
        former = (outcome.holder, outcome.attempt) in job.former
        yield (
            3 if former else 2,
            key,
            f"reported by {outcome.holder} (attempt {outcome.attempt}) while {claim.holder} "
            f"(attempt {claim.attempt}) held it",
        )


def _dropped_faults(op: OperationTrace, change: Change, coordinated: bool) -> Iterator[Fault]:
    if op.state is not State.CANCELLING:
        if not _ended(op):
            yield 2, change.kv.key, "a claim was deleted without a report while its operation was not being cancelled"
    elif not coordinated:
        yield 8, change.kv.key, "a claim was reaped while nobody was elected"


def _claim_faults(
    op: OperationTrace, job: JobTrace, delta: JobDelta, change: Change, live: Collection[str]
) -> Iterator[Fault]:
    key, old, new = change.kv.key, job.claim, Claim.decode(change.kv.value)
    if job.state is not None or (delta.state is not None and not delta.state.deleted):
        yield 2, key, "a job that has ended was claimed"
    if new.attempt < job.attempt:
        yield 10, key, f"the attempt went back from {job.attempt} to {new.attempt}"
    if new.failures and op.rules.at_limit(new.failures) and not _only_ends(op, old, new):
        yield 10, key, f"{new.failures} failures, where the job fails at {op.rules.retry.attempts}"
    if new.waiting:
        yield from _waiting_faults(op, key, old, new, live)
        return
    if new.actor and old is not None and old.grant == new.grant:
        yield from _extension_faults(op, key, old, new)
        return
    if not op.gate:
        yield 4, key, f"claimed by {new.holder} while there was no gate"
    if not new.actor and new.incarnation not in live:
        yield 4, key, f"claimed by {new.incarnation}, which had no node key"
    if new.attempt == job.attempt:
        yield 10, key, f"claimed with attempt {new.attempt} a second time"
    if old is None:
        return
    if old.waiting:
        if new.failures != old.failures:
            yield 10, key, f"claiming changed the failures from {old.failures} to {new.failures}"
        return
    if old.incarnation in live:
        yield 2, key, f"taken from {old.incarnation}, which was alive, by {new.holder}"
    if new.failures != old.failures + 1:
        yield 10, key, f"a takeover counted {new.failures} failures after {old.failures}"
    if op.rules.can_fail and op.rules.lost == "fail" and not _only_ends(op, old, new):
        yield 10, key, "taken over, where a lost job fails"


def _only_ends(op: OperationTrace, old: Claim | None, new: Claim) -> bool:
    """An executor has claimed a lost job to clean up and fail it; or such a claim is released, or lost.

    Or the job waits to be claimed for that.
    """
    if old is None or new.actor:
        return False
    if new.waiting:
        if new.failures == old.failures:
            return next_steps.only_ends(old, op.rules)
        return new == next_steps.revoked_lost(old, op.rules) and next_steps.only_ends(new, op.rules)
    return next_steps.only_ends(new, op.rules)


def _extension_faults(op: OperationTrace, key: str, old: Claim, new: Claim) -> Iterator[Fault]:
    if op.state not in (State.RUNNING, State.PAUSED):
        yield 4, key, f"extended by {new.actor} while its operation was {op.state}"
    if (new.actor, new.attempt) != (old.actor, old.attempt):
        yield 3, key, f"extended by {new.actor} (attempt {new.attempt}): {old.actor} (attempt {old.attempt}) held it"
    if new.failures != old.failures:
        yield 10, key, f"extending changed the failures from {old.failures} to {new.failures}"


def _waiting_faults(
    op: OperationTrace, key: str, old: Claim | None, new: Claim, live: Collection[str]
) -> Iterator[Fault]:
    if old is None or old.waiting:
        yield 3, key, "a claim was set to waiting by somebody who did not hold it"
        return
    if (new.attempt, new.executor) != (old.attempt, old.executor):
        yield (
            3,
            key,
            f"set to waiting by {new.executor} (attempt {new.attempt}) while {old.executor} "
            f"(attempt {old.attempt}) held it",
        )
    if old.incarnation in live and new in (next_steps.revoked(old), next_steps.revoked_lost(old, op.rules)):
        yield 2, key, f"revoked as lost from {old.incarnation}, which was alive"
    if new.failures not in (old.failures, old.failures + 1):
        yield 10, key, f"the failures went from {old.failures} to {new.failures}"
