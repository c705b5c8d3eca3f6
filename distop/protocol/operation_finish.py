"""The end of operations: deciding, finishing, cleaning up, and forgetting what is old; one function per event.

For the rule of one-way guards see ``protocol.operation_transitions``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.identity import forgotten, freed, released
from distop.protocol.json_codec import dumps, word
from distop.protocol.records import Decision, History, OperationRef, State
from distop.protocol.state_tables import PHASES, Event, Stage, enters
from distop.protocol.transaction_groups import merged
from distop.protocol.txn import (
    Compare,
    Delete,
    Get,
    GetResult,
    Operation,
    Put,
    Txn,
    absent,
    exists,
    none_within,
    unchanged,
    value_is,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.protocol.age_watermarks import Watermark
    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue, TxnResult

FINISHES_PER_TXN = 42
"""Operations that one transaction finishes at most: three compares of each, election and runOps (T1); 25 of those that
are not decided before, and whose keys are not deleted with it.
"""
ORDINALS_PER_CLEAN = 300
"""Ordinals whose keys one cleanup page deletes: at most three keys each, so under 1,000."""


def decide(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, decision: Decision, *, planned: bool = True
) -> Txn:
    """Fix the verdict; cancel and pause are refused from then on. Not ``planned``: it was cancelled before it had a
    plan, and none is there, also where a watch has lost the plan's event (etcd#20573).
    """
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            *_undecided(keys, ref, decision.verdict, planned),
            absent(keys.history(ref)),
        ),
        (
            Put(keys.of(ref, "decision"), decision.encode()),
            *enters(keys, ref, Event.DECIDE),
        ),
        (Get(keys.of(ref, "state")), Get(keys.of(ref, "decision"))),
        "decide",
    )


def complete_attempt(keys: Keys, ref: OperationRef, election: Compare, seen_mod: int, decision: Decision) -> Txn:
    """Count a completion attempt that ended in an unexpected error."""
    return Txn(
        (election, unchanged(keys.of(ref, "decision"), seen_mod), absent(keys.history(ref))),
        (Put(keys.of(ref, "decision"), decision.encode()),),
        (),
        "complete_attempt",
    )


@frozen
class Final:
    """How an operation ends: what its finish compares, and what it writes beside the state: the history record, and
    ``kept``, which a rerun needs.

    ``decision_mod`` 0: there is no decision, because the behavior has no completion code, or only a report that was
    made before. Deciding and finishing are then one step, under the guards of both (a join of two adjacent
    transactions, so no new interleaving).
    """

    ref: OperationRef
    state_mod: int
    decision_mod: int
    history: History
    one_at_a_time: bool
    kept: tuple[Put, ...] = ()
    value: bytes = b""
    """Of the history's key, where it is known already."""
    gate_mod: int = 0
    """Of its gate, where nothing is left to do for it: its keys are deleted in the same transaction, so that ``.state``
    and pending never show its end (a join with what :func:`end` does; for those with an open gate that are not decided
    before). 0: something is left.
    """
    planned: bool = True
    """It has a plan (:func:`decide`)."""

    @property
    def gone(self) -> bool:
        """Nothing is left of it after its finish, but its history."""
        return self.gate_mod > 0


def finish(
    keys: Keys,
    election: Compare,
    run_ops: Mapping[str, int],
    run_ops_mod: int,
    finals: Sequence[Final],
    parts: Sequence[Txn] | None = None,
) -> Txn:
    """The terminal state and the history record, in one transaction (C30); of several operations of one type on one
    table, all or none, each under the guards that it has alone (a join of adjacent transactions as well).

    The failure branch reads runOps, then the state of each. ``parts``: of each its :func:`part`, where that was made
    before. Raises ValueError for those of several types or tables.
    """
    first = finals[0].ref
    if any((one.ref.table, one.ref.type) != (first.table, first.type) for one in finals):
        raise ValueError("operations of several types or tables cannot be finished together")
    counts = {t: n for t, n in run_ops.items() if n > 0}
    counts[first.type] = counts.get(first.type, 0) - len(finals)
    if counts[first.type] <= 0:
        del counts[first.type]
    whole = common(keys, first.table, election, run_ops_mod, counts)
    return merged([part(keys, one) for one in finals] if parts is None else parts, whole)


def common(
    keys: Keys, table: str, election: Compare, run_ops_mod: int = 0, counts: Mapping[str, int] = MappingProxyType({})
) -> Txn:
    """What a finish compares, writes and reads once, however many operations it ends."""
    run_ops = keys.run_ops(table)
    value = dumps(dict(counts))
    return Txn((election, unchanged(run_ops, run_ops_mod)), (Put(run_ops, value),), (Get(run_ops),), "finish")


def part(keys: Keys, one: Final) -> Txn:
    """What one operation adds to the transaction that finishes several."""
    return Txn(_last_seen(keys, one), _over_with(keys, one), (Get(keys.of(one.ref, "state")),))


def _last_seen(keys: Keys, one: Final) -> tuple[Compare, ...]:
    ref, decision = one.ref, keys.of(one.ref, "decision")
    if one.gone:
        # The gate is there from the plan on. Whatever writes the state writes or deletes the gate, too: where it is the
        # one that was seen, so is the state. A decision and an end delete it.
        return (
            unchanged(keys.gate(ref), one.gate_mod),
            none_within(*keys.claims_range(ref)),
            none_within(*keys.edges_range(ref, "next")),
        )
    undecided = _undecided(keys, ref, one.history.state, one.planned)
    decided = (unchanged(decision, one.decision_mod),) if one.decision_mod else undecided
    return (unchanged(keys.of(ref, "state"), one.state_mod), *decided, absent(keys.history(ref)))


def _over_with(keys: Keys, one: Final) -> tuple[Operation, ...]:
    ref = one.ref
    event = Event.FINISH if one.decision_mod else Event.FINISH_AT_ONCE
    ended = enters(keys, ref, event, ends=one.history.state)
    return (
        Put(keys.history(ref), one.value or one.history.encode()),
        *one.kept,
        *((Delete(keys.gate(ref)), Delete(*keys.own_range(ref))) if one.gone else ended),
        *((Delete(keys.current(ref.table, ref.type, ref.object)),) if one.one_at_a_time else ()),
        *freed(keys, ref, one.history),
    )


@frozen
class FinishRefused:
    """Why a finish was refused, as far as its failure branch tells."""

    run_ops: KeyValue | None
    moved: bool
    """runOps is not what was compared."""
    gone: tuple[bool, ...]
    """Of each operation: its state is not what was compared, so it cannot be finished as it was seen."""


def finish_refused(refused: TxnResult, run_ops_mod: int, finals: Sequence[Final]) -> FinishRefused:
    """What the failure branch of :func:`finish` read. Where neither runOps nor a state is another one, it was the
    election, a decision, or a claim.
    """
    run_ops, *states = [answer.kv if isinstance(answer, GetResult) else None for answer in refused.responses]
    gone = (kv is None or kv.mod_revision != one.state_mod for kv, one in zip(states, finals, strict=True))
    return FinishRefused(run_ops, run_ops is not None and run_ops.mod_revision != run_ops_mod, tuple(gone))


def _undecided(keys: Keys, ref: OperationRef, verdict: State, planned: bool) -> tuple[Compare, ...]:
    """An operation may be decided: no job is claimed, and it has either been cancelled or got a plan."""
    reason = "cancel" if verdict is State.CANCELLED else "plan"
    none = () if planned else (absent(keys.of(ref, "plan")),)
    return absent(keys.of(ref, "decision")), exists(keys.of(ref, reason)), none_within(*keys.claims_range(ref)), *none


def clean(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, first: int, size: int = ORDINALS_PER_CLEAN
) -> Txn:
    """One page of an ended operation's job keys: ``size`` ordinals from ``first`` on."""
    return Txn(
        (election, unchanged(keys.of(ref, "state"), state_mod), _over(keys, ref)),
        (_job_page(keys, ref, first, size),),
        (),
        "clean",
    )


def end(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, id_: str = "") -> Txn:
    """The last page: all that is left of it, ``.state`` and pending with the rest; of one of a series also its id
    (``id_``), where the next one has not taken it. No claim is left: none was when it was decided. Refused while a
    successor has not been told (``protocol.pending_operations.signal``). Those of several operations go together
    (``protocol.job_transitions.group``).
    """
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            election,
            _over(keys, ref),
            none_within(*keys.edges_range(ref, "next")),
        ),
        (
            Delete(*keys.own_range(ref)),
            Delete(*keys.permits_range(ref)),
            Delete(keys.pending(ref)),
            *released(keys, ref, id_),
        ),
        (),
        "end",
    )


def _over(keys: Keys, ref: OperationRef) -> Compare:
    return value_is(keys.pending(ref), word(PHASES[Stage.CLEANING]))


def _job_page(keys: Keys, ref: OperationRef, first: int, size: int) -> Delete:
    root = keys.root(ref)
    after = first + size
    return Delete(f"{root}.{first:06d}", f"{root}.{after:06d}" if after < 1_000_000 else f"{root}.:")


def forget(keys: Keys, old: Sequence[tuple[OperationRef, int, str]], mark: Watermark) -> Txn:
    """Delete old history records: (operation, its record's mod revision, request id).

    Each record is deleted on its own, with the keys beside it. The watermark must be old and name the revision of each
    or a later one, so that a request id is kept for its hour whatever a wall clock says. Raises ValueError for others.
    """
    if not mark.old or any(mod > mark.upto for _, mod, _ in old):
        raise ValueError("a history record is not known to be an hour old")
    return Txn(
        (),
        tuple(
            Txn(
                (unchanged(keys.history(ref), mod),),
                (
                    Delete(keys.history(ref)),
                    Delete(*_beside_history(keys, ref)),
                    *forgotten(keys, ref, request_id),
                ),
            )
            for ref, mod, request_id in old
        ),
        (),
        "forget",
    )


def _beside_history(keys: Keys, ref: OperationRef) -> tuple[str, str]:
    key = keys.history(ref)
    return f"{key}.", f"{key}/"
