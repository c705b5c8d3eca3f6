"""What happens to jobs: one function per event that returns the transaction, or the guarded write, that does it.

A claim's mod revision is its *fence*: every write of the job compares it, so that after a takeover the former holder
writes nothing. For the rule of one-way guards see ``protocol.operation_transitions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.json_codec import word
from distop.protocol.permits import gives_back, takes
from distop.protocol.state_tables import Event, JobEvent, comes_in, job_ends
from distop.protocol.transaction_groups import merged
from distop.protocol.txn import (
    Compare,
    Delete,
    Get,
    GetResult,
    Operation,
    Put,
    Txn,
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
"""Claims that take permits: three compares and puts in each, and one common guard for each holder that is gone."""
CLAIMS_PER_TXN = 124
"""Claims in one transaction, each a nested one that is decided alone. T1: 128, which a nested transaction shares with
what encloses it: two common guards, one more for each dead holder, and two compares or reads in each nested one."""
OPERATIONS_PER_REPORT = 3
REPORTS_PER_TXN = 42
"""Reports in one transaction (T1)."""


@frozen
class Want:
    """A job to claim: the claim as seen (``seen_mod`` 0: none) and the claim to write."""

    partition: int
    claim: Claim
    seen_mod: int = 0
    permit_mod: int = -1
    """Of the permit that the claim takes, as seen (0: never taken); -1: it takes none, or keeps the one that it had."""
    former: Claim | None = None
    """The claim as seen, where its permit is given back."""


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
    """Claim a block of jobs, each decided alone: free ones, waiting ones that are due, and (``dead``: their
    incarnations) those of executors that are gone. A granted claim's mod revision is its fence.

    Nested, not all or nothing: of two executors whose blocks overlap each gets a part. In each nested failure branch
    the claim is read: one that is mine already means that an earlier copy won. ``uncounted``: incarnations that are
    gone, whose claims do not count among those that a limit allows; ``overdue``: claims by actors, (partition, mod
    revision), that do not either, as long as they are not extended.
    """
    dead = set(dead)
    success: list[Operation] = []
    for want in wants:
        key, state = keys.claim(ref, want.partition), keys.job(ref, want.partition, "state")
        guards = (unchanged(key, want.seen_mod),) if want.seen_mod else (absent(key), absent(state))
        puts: tuple[Put, ...] = (Put(key, want.claim.encode()),)
        if want.permit_mod >= 0:
            free, taken = takes(keys, ref, want.claim.permit, want.permit_mod, want.partition)
            guards, puts = (*guards, free), (*puts, taken)
        success.append(Txn(guards, (*puts, *gives_back(keys, ref, want.former)), (Get(key), Get(state))))
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
"""Runs in one all-or-nothing claim (``protocol.batch_claims``): two range compares each."""


def runs(wants: Sequence[Want]) -> list[tuple[int, int]] | None:
    """The ordinals as a few runs of neighbours, (first, the one after the last); None where they are no such thing, or
    not all of them are wanted for the first time.
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
    """Writes under one claim's fence, to be committed alone or in a group (group commit)."""

    guard: Compare
    ops: tuple[Operation, ...]
    label: str
    also: tuple[Compare, ...] = ()
    """What is compared beside the fence."""
    proof: Put | None = None
    """The write by which an earlier copy of this one, of which no answer came, recognizes itself (T9)."""


def report(
    keys: Keys,
    ref: OperationRef,
    partition: int,
    fence: int,
    state: JobState,
    outcome: Outcome,
    former: Claim | None = None,
) -> Guarded:
    """A job's end (I36): under its fence, which stands for "running and not ended"; losing is ignored. ``former``: the
    claim, whose permit is given back.
    """
    key = keys.claim(ref, partition)
    told = Put(keys.job(ref, partition, "outcome"), outcome.encode())
    return Guarded(
        unchanged(key, fence),
        (Put(keys.job(ref, partition, "state"), word(state)), told, Delete(key), *gives_back(keys, ref, former)),
        "report",
        proof=told,
    )


def wait_again(
    keys: Keys, ref: OperationRef, partition: int, fence: int, waiting: Claim, former: Claim | None = None
) -> Guarded:
    """Retry and release: the claim is set to waiting; the job is stopped first. ``former`` as in :func:`report`."""
    key = keys.claim(ref, partition)
    put = Put(key, waiting.encode())
    return Guarded(unchanged(key, fence), (put, *gives_back(keys, ref, former)), "retry", proof=put)


def checkpoint(keys: Keys, ref: OperationRef, partition: int, fence: int, value: bytes, seen_mod: int) -> Guarded:
    """A resumable job's progress, under its fence: a zombie's checkpoint is refused. It follows the checkpoint of
    ``seen_mod`` (0: none): a copy that comes late must not undo those after it, under the same fence.
    """
    put = Put(keys.job(ref, partition, "progress"), value)
    guard = unchanged(keys.claim(ref, partition), fence)
    return Guarded(guard, (put,), "progress", (unchanged(put.key, seen_mod),), put)


def guarded(txn: Txn) -> Guarded:
    """A whole transaction of writes, to go with others."""
    guard, *also = txn.compares
    return Guarded(guard, txn.success, txn.label, tuple(also))


def alone(write: Guarded) -> Txn:
    """A guarded write as a transaction of its own."""
    return Txn((write.guard, *write.also), write.ops, (), write.label)


def group(writes: Sequence[Guarded]) -> Txn:
    """All or nothing: the usual case, in which every fence still holds."""
    return merged([alone(write) for write in writes])


def one_by_one(writes: Sequence[Guarded]) -> Txn:
    """Each decided alone, after the group was refused."""
    apart = (Txn((w.guard, *w.also), w.ops, (Get(w.proof.key),) if w.proof is not None else ()) for w in writes)
    return Txn((), tuple(apart), (), writes[0].label if writes else "")


def applied_at(write: Guarded, answer: TxnResult, revision: int) -> int:
    """The revision at which a write was applied that was decided alone at ``revision``, or by an earlier copy of it
    (T9); 0 where it was not.
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
    """Jobs whose holder is gone and whose limit is reached: failed, with an outcome that tells of the crash.
    ``lost``: (partition, the claim's mod revision, outcome), all of incarnation ``dead``, or ("") of actors.
    ``former``: the claims, whose permits are given back.
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
                    *gives_back(keys, ref, claims.get(p)),
                ),
            )
            for p, mod, outcome in lost
        ),
        (Get(keys.gate(ref)),),
        "fail_lost",
    )


CLAIMS_PER_REAP = 125
"""Claims that one transaction revokes or reaps, each nested with two compares, and two writes (T1)."""


def revoke(
    keys: Keys,
    ref: OperationRef,
    election: Compare,
    state_mod: int,
    claims: Sequence[tuple[int, int, Claim]],
    released: Callable[[Claim], Claim],
) -> Txn:
    """While cancelling: set claims whose holder is gone to waiting, each decided alone; one that waits is compared.
    ``claims``: (partition, mod revision, the claim); ``released``: the waiting claim after one.

    It comes before the cleanup, which no transaction guards: of a holder that seems gone a report may still arrive.
    """
    return Txn(_cancelling(keys, ref, election, state_mod), _set_waiting(keys, ref, claims, released), (), "revoke")


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
            puts = [Put(key, released(claim).encode()), *gives_back(keys, ref, claim)]
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
    """Behind a gate with a limit: set claims whose holder is gone to waiting, each decided alone.

    A takeover needs a permit, and lost claims that no claim compares leave none. This needs none. ``claims`` and
    ``released`` as in :func:`revoke`; incarnation: mine.
    """
    mine = unchanged(keys.gate(ref), gate_mod), exists(keys.node(incarnation))
    return Txn(mine, _set_waiting(keys, ref, claims, released), (), "revoke_lost")


def reap(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, claims: Sequence[tuple[int, int]]) -> Txn:
    """While cancelling: delete claims that wait, each decided alone. ``claims``: (partition, mod revision)."""
    parts = (Txn((unchanged(keys.claim(ref, p), mod),), (Delete(keys.claim(ref, p)),), ()) for p, mod in claims)
    return Txn(_cancelling(keys, ref, election, state_mod), tuple(parts), (), "reap")


def _cancelling(keys: Keys, ref: OperationRef, election: Compare, state_mod: int) -> tuple[Compare, ...]:
    return election, unchanged(keys.of(ref, "state"), state_mod), comes_in(keys, ref, Event.REAP)
