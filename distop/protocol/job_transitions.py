"""Transactions of jobs: one function per event.

Each returns a transaction or a guarded write.

A claim's mod revision is its *fence* (fencing token). Every write of the job compares it, so after a takeover the
former holder writes nothing. ``protocol.operation_transitions`` explains one-way guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.json_codec import word
from distop.protocol.permits import permit_puts, take_permit
from distop.protocol.state_tables import Event, JobEvent, comes_in, job_ends
from distop.protocol.transaction_groups import merged
from distop.protocol.txn import (
    Compare,
    Delete,
    Get,
    GetResult,
    Put,
    Txn,
    TxnOperation,
    TxnResult,
    absent,
    exists,
    unchanged,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.protocol.jobs import Claim, JobState, Outcome
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef

LIMITED_CLAIMS_PER_TXN = 80
"""Maximum number of claims with permits: three compares and puts each, and one common guard per dead holder."""
CLAIMS_PER_TXN = 124
"""Maximum number of claims in one transaction, each nested and decided on its own.

T1: a nested transaction shares the limit of 128 with its parent. The parent has two common guards and one for each dead
holder; each nested one has two compares or reads.
"""
OPERATIONS_PER_REPORT = 3
REPORTS_PER_TXN = 42
"""Maximum number of reports in one transaction (T1)."""


@frozen
class Want:
    """A job to claim: the claim as read (``seen_mod`` 0: none), and the claim to write."""

    partition: int
    claim: Claim
    seen_mod: int = 0
    permit_mod: int = -1
    """Mod revision of the permit that the claim takes (0: never taken); -1: it takes none, or keeps its own."""
    former: Claim | None = None
    """The claim as read, if its permit is given back."""


def claim(
    keys: Keys,
    ref: OperationRef,
    gate_mod: int,
    incarnation: str,
    wants: Sequence[Want],
    dead: Iterable[str] = (),
    uncounted: Iterable[str] = (),
    overdue: Iterable[tuple[int, int]] = (),
) -> Txn:
    """Claim a block of jobs, each decided on its own.

    A granted claim's mod revision is its fence. The jobs are free, waiting and due, or claimed by dead executors
    (``dead``: their incarnations). The claims are nested, not all or nothing: if the blocks of two executors overlap,
    each gets a part.

    Common guards: the gate is unchanged; my node key exists; the node keys of dead incarnations are absent. Guards of
    each job: its claim is unchanged, or claim and state are absent; its permit is unchanged and free, if it takes one.

    Each nested failure branch reads the claim: if it is already mine, an earlier copy won. ``uncounted``: dead
    incarnations whose claims do not count against the limit. ``overdue``: claims of actors, (partition, mod revision),
    that do not count either; they are compared, because an extension would make them count again.
    """
    dead = set(dead)
    success: list[TxnOperation] = []
    for want in wants:
        key, state = keys.claim(ref, want.partition), keys.job(ref, want.partition, "state")
        guards = (unchanged(key, want.seen_mod),) if want.seen_mod else (absent(key), absent(state))
        puts: tuple[Put, ...] = (Put(key, want.claim.encode()),)
        if want.permit_mod >= 0:
            free, taken = take_permit(keys, ref, want.claim.permit, want.permit_mod, want.partition)
            guards, puts = (*guards, free), (*puts, taken)
        success.append(Txn(guards, (*puts, *permit_puts(keys, ref, want.former)), (Get(key), Get(state))))
    return Txn(
        (
            unchanged(keys.gate(ref), gate_mod),
            exists(keys.node(incarnation)),
            *(absent(keys.node(gone)) for gone in sorted(dead | set(uncounted))),
            *(unchanged(keys.claim(ref, p), mod) for p, mod in overdue),
        ),
        tuple(success),
        (Get(keys.gate(ref)), Get(keys.node(incarnation))),
        "take_over" if dead else "claim",
    )


RUNS_PER_CLAIM = 16
"""Maximum number of runs in one all-or-nothing claim (``protocol.batch_claims``): two range compares each."""


def runs(wants: Sequence[Want]) -> list[tuple[int, int]] | None:
    """The ordinals as a few runs of neighbours: (first, the one after the last).

    None if there are too many runs, or if not all of the jobs are claimed for the first time.
    """
    found: list[tuple[int, int]] = []
    for want in wants:
        p = want.partition
        if want.seen_mod or want.permit_mod >= 0 or want.claim != wants[0].claim:
            return None
        if found and found[-1][1] == p:
            found[-1] = (found[-1][0], p + 1)
        elif len(found) == RUNS_PER_CLAIM:
            return None
        else:
            found.append((p, p + 1))
    return found or None


@frozen
class Guarded:
    """Writes under one claim's fence, committed alone or in a group (group commit)."""

    guard: Compare
    ops: tuple[TxnOperation, ...]
    label: str
    also: tuple[Compare, ...] = ()
    """Compares beside the fence."""
    proof: Put | None = None
    """The write by which an earlier copy with an unknown outcome is recognized (T9)."""


def report(
    keys: Keys,
    ref: OperationRef,
    partition: int,
    fence: int,
    state: JobState,
    outcome: Outcome,
    former: Claim | None = None,
) -> Guarded:
    """Report the end of a job (I36).

    Guard: the fence. It implies that the job is running and has not ended; a refused report is ignored. ``former``: the
    claim, whose permit is given back.
    """
    key = keys.claim(ref, partition)
    report = Put(keys.job(ref, partition, "outcome"), outcome.encode())
    return Guarded(
        unchanged(key, fence),
        (Put(keys.job(ref, partition, "state"), word(state)), report, Delete(key), *permit_puts(keys, ref, former)),
        "report",
        proof=report,
    )


def wait_again(
    keys: Keys, ref: OperationRef, partition: int, fence: int, waiting: Claim, former: Claim | None = None
) -> Guarded:
    """Set a claim to waiting, for a retry or a release; the job was stopped before.

    Guard: the fence. ``former`` as in :func:`report`.
    """
    key = keys.claim(ref, partition)
    put = Put(key, waiting.encode())
    return Guarded(unchanged(key, fence), (put, *permit_puts(keys, ref, former)), "retry", proof=put)


def checkpoint(keys: Keys, ref: OperationRef, partition: int, fence: int, value: bytes, seen_mod: int) -> Guarded:
    """Save a resumable job's checkpoint.

    Guards: the fence, so a zombie's checkpoint is refused; the former checkpoint is unchanged (``seen_mod``: its mod
    revision as read, 0: none), so a late copy does not undo later checkpoints under the same fence.
    """
    put = Put(keys.job(ref, partition, "progress"), value)
    guard = unchanged(keys.claim(ref, partition), fence)
    return Guarded(guard, (put,), "progress", (unchanged(put.key, seen_mod),), put)


def guarded(txn: Txn) -> Guarded:
    """A whole transaction of writes as a guarded write, to be grouped with others."""
    guard, *also = txn.compares
    return Guarded(guard, txn.success, txn.label, tuple(also))


def alone(write: Guarded) -> Txn:
    """A guarded write as a transaction of its own."""
    return Txn((write.guard, *write.also), write.ops, (), write.label)


def group(writes: Sequence[Guarded]) -> Txn:
    """Guarded writes in one transaction, all or none: the usual case, in which every fence still holds."""
    return merged([alone(write) for write in writes])


def one_by_one(writes: Sequence[Guarded]) -> Txn:
    """Guarded writes in one transaction, each decided on its own: after the group was refused."""
    apart = (Txn((w.guard, *w.also), w.ops, (Get(w.proof.key),) if w.proof is not None else ()) for w in writes)
    return Txn((), tuple(apart), (), writes[0].label if writes else "")


def applied_at(write: Guarded, answer: TxnResult, revision: int) -> int:
    """The revision at which a write of :func:`one_by_one` was applied; 0: it was not.

    ``revision``: that of the answer. An earlier copy may have applied it before (T9).
    """
    if answer.succeeded:
        return revision
    found = answer.responses[0] if write.proof is not None else None
    kv = found.kv if isinstance(found, GetResult) else None
    return kv.mod_revision if kv is not None and write.proof is not None and kv.value == write.proof.value else 0


def fail_lost(
    keys: Keys,
    ref: OperationRef,
    gate_mod: int,
    incarnation: str,
    dead: str,
    lost: Sequence[tuple[int, int, Outcome]],
    former: Mapping[int, Claim] | None = None,
) -> Txn:
    """Fail jobs whose holder is gone and that have reached the limit of attempts.

    The outcome records the loss. ``lost``: (partition, mod revision of the claim, outcome), all of incarnation
    ``dead``, or ("") of actors. ``former``: the claims, whose permits are given back.

    Guards: the gate is unchanged; my node key exists; the node key of ``dead`` is absent; each claim is unchanged (each
    job is decided on its own).
    """
    claims = former or {}
    return Txn(
        (
            unchanged(keys.gate(ref), gate_mod),
            exists(keys.node(incarnation)),
            *((absent(keys.node(dead)),) if dead else ()),
        ),
        tuple(
            Txn(
                (unchanged(keys.claim(ref, p), mod),),
                (
                    Put(keys.job(ref, p, "state"), word(job_ends(JobEvent.FAIL_LOST))),
                    Put(keys.job(ref, p, "outcome"), outcome.encode()),
                    Delete(keys.claim(ref, p)),
                    *permit_puts(keys, ref, claims.get(p)),
                ),
            )
            for p, mod, outcome in lost
        ),
        (Get(keys.gate(ref)),),
        "fail_lost",
    )


CLAIMS_PER_REAP = 125
"""Maximum number of claims that one transaction revokes or reaps: nested, two compares and two writes each (T1)."""


def revoke(
    keys: Keys,
    ref: OperationRef,
    election: Compare,
    state_mod: int,
    claims: Sequence[tuple[int, int, Claim]],
    released: Callable[[Claim], Claim],
) -> Txn:
    """While an operation is cancelling: set claims whose holder is gone to waiting.

    Each is decided on its own. ``claims``: (partition, mod revision, claim); ``released``: makes the waiting claim. A
    claim that already waits is only compared.

    This comes before the cleanup, which no transaction guards: a report of a holder that seems gone may still arrive.

    Guards: my election; the state is unchanged and cancelling. Of each claim: it is unchanged; the node key of its
    incarnation is absent.
    """
    return Txn(
        _cancelling_guards(keys, ref, election, state_mod), _set_waiting(keys, ref, claims, released), (), "revoke"
    )


def _set_waiting(
    keys: Keys, ref: OperationRef, claims: Sequence[tuple[int, int, Claim]], released: Callable[[Claim], Claim]
) -> tuple[Txn, ...]:
    parts = []
    for p, mod, claim in claims:
        key = keys.claim(ref, p)
        guards, puts = [unchanged(key, mod)], list[Put]()
        if claim.incarnation:
            guards.append(absent(keys.node(claim.incarnation)))
        if not claim.waiting:
            puts = [Put(key, released(claim).encode()), *permit_puts(keys, ref, claim)]
        parts.append(Txn(tuple(guards), tuple(puts), ()))
    return tuple(parts)


def revoke_lost(
    keys: Keys,
    ref: OperationRef,
    gate_mod: int,
    incarnation: str,
    claims: Sequence[tuple[int, int, Claim]],
    released: Callable[[Claim], Claim],
) -> Txn:
    """Behind a gate with a job limit: set claims whose holder is gone to waiting.

    Each is decided on its own. A takeover needs a permit, and lost claims that no claim compares may leave none. This
    transaction needs no permit. ``claims`` and ``released`` as in :func:`revoke`; ``incarnation``: mine.

    Guards: the gate is unchanged; my node key exists. Of each claim: it is unchanged; the node key of its incarnation
    is absent.
    """
    mine = unchanged(keys.gate(ref), gate_mod), exists(keys.node(incarnation))
    return Txn(mine, _set_waiting(keys, ref, claims, released), (), "revoke_lost")


def reap(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, claims: Sequence[tuple[int, int]]) -> Txn:
    """While an operation is cancelling: delete waiting claims.

    Each is decided on its own. ``claims``: (partition, mod revision). Guards: my election; the state is unchanged and
    cancelling; each claim is unchanged.
    """
    parts = (Txn((unchanged(keys.claim(ref, p), mod),), (Delete(keys.claim(ref, p)),), ()) for p, mod in claims)
    return Txn(_cancelling_guards(keys, ref, election, state_mod), tuple(parts), (), "reap")


def _cancelling_guards(keys: Keys, ref: OperationRef, election: Compare, state_mod: int) -> tuple[Compare, ...]:
    """Guards: my election; the state is unchanged and cancelling."""
    return election, unchanged(keys.of(ref, "state"), state_mod), comes_in(keys, ref, Event.REAP)
