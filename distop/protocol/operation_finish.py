"""Transactions that decide, finish, clean up and forget operations.

There is one function per event. ``protocol.operation_transitions`` explains one-way guards.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.identity import id_releases, request_key_deletes, series_id_releases
from distop.protocol.json_codec import dumps, word
from distop.protocol.records import Decision, History, OperationRef, State
from distop.protocol.state_tables import PHASES, Event, Stage, enters
from distop.protocol.transaction_groups import merged
from distop.protocol.txn import (
    Compare,
    Delete,
    Get,
    GetResult,
    Put,
    Txn,
    TxnOperation,
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
"""Maximum number of operations that one transaction finishes: three compares each, election and runOps (T1).

25 of those that were not decided before and whose keys are not deleted in the same transaction.
"""
ORDINALS_PER_CLEAN = 300
"""Ordinals whose keys one cleanup page deletes: at most three keys each, so under 1,000."""


def decide(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, decision: Decision, *, planned: bool = True
) -> Txn:
    """Fix the verdict of an operation. From then on cancel and pause are refused.

    Not ``planned``: the operation was cancelled before it had a plan. The plan is then compared as absent, because a
    watch may have lost its event (etcd#20573).

    Guards: my election; the state is unchanged; no decision and no history record exist; the cancel or the plan exists,
    as the verdict requires; no claim exists.
    """
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            *_undecided_guards(keys, ref, decision.verdict, planned),
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
    """Count a completion attempt that ended with an unexpected error.

    Guards: my election; the decision is unchanged; no history record exists.
    """
    return Txn(
        (election, unchanged(keys.of(ref, "decision"), seen_mod), absent(keys.history(ref))),
        (Put(keys.of(ref, "decision"), decision.encode()),),
        (),
        "complete_attempt",
    )


@frozen
class Final:
    """How an operation ends: the compares and writes of its finish.

    Beside the state it writes the history record, and ``kept``, which a rerun needs.

    ``decision_mod`` 0: there is no decision, because the behavior has no completion code, or only a report that was
    made before. One transaction then decides and finishes, under the guards of both. It joins two adjacent
    transactions, so it adds no new interleaving.
    """

    ref: OperationRef
    state_mod: int
    decision_mod: int
    history: History
    one_at_a_time: bool
    kept: tuple[Put, ...] = ()
    value: bytes = b""
    """The encoded history record, if already known."""
    gate_mod: int = 0
    """The mod revision of its gate, if no cleanup is left to do; 0: some is left.

    The same transaction then deletes its keys, so that ``.state`` and pending never show its end. It joins the finish
    with :func:`end`, for operations with an open gate that were not decided before.
    """
    planned: bool = True
    """It has a plan (:func:`decide`)."""

    @property
    def gone(self) -> bool:
        """After its finish only the history of the operation is left."""
        return self.gate_mod > 0


def finish(
    keys: Keys,
    election: Compare,
    run_ops: Mapping[str, int],
    run_ops_mod: int,
    finals: Sequence[Final],
    parts: Sequence[Txn] | None = None,
) -> Txn:
    """Write the terminal states and history records of operations, all or none (C30).

    They are of one type on one table. Each has the guards that it has alone, so this also joins adjacent transactions.

    Guards: my election; runOps is unchanged. Of each operation: the state is unchanged, the decision is unchanged (or
    the guards of :func:`decide`), no history record exists. If the keys are deleted as well (:attr:`Final.gone`): the
    gate is unchanged; no claim and no successor's edge exists.

    The failure branch reads runOps, then the state of each operation. ``parts``: :func:`part` of each, if already
    computed. Raises ValueError for operations of several types or tables.
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
    """The shared part of a finish: what it compares, writes and reads once for all operations."""
    run_ops = keys.run_ops(table)
    value = dumps(dict(counts))
    return Txn((election, unchanged(run_ops, run_ops_mod)), (Put(run_ops, value),), (Get(run_ops),), "finish")


def part(keys: Keys, one: Final) -> Txn:
    """The part of one operation in a finish of several."""
    return Txn(_finish_guards(keys, one), _finish_writes(keys, one), (Get(keys.of(one.ref, "state")),))


def _finish_guards(keys: Keys, one: Final) -> tuple[Compare, ...]:
    """Guards of one operation that finishes."""
    ref, decision = one.ref, keys.of(one.ref, "decision")
    if one.gone:
        # The gate exists from the plan on. Every transaction that writes the state writes or deletes the gate as well:
        # if the gate is unchanged, so is the state. A decision and an end delete the gate.
        return (
            unchanged(keys.gate(ref), one.gate_mod),
            none_within(*keys.claims_range(ref)),
            none_within(*keys.edges_range(ref, "next")),
        )
    undecided = _undecided_guards(keys, ref, one.history.state, one.planned)
    decided = (unchanged(decision, one.decision_mod),) if one.decision_mod else undecided
    return (unchanged(keys.of(ref, "state"), one.state_mod), *decided, absent(keys.history(ref)))


def _finish_writes(keys: Keys, one: Final) -> tuple[TxnOperation, ...]:
    """The writes of one operation that finishes."""
    ref = one.ref
    event = Event.FINISH if one.decision_mod else Event.FINISH_AT_ONCE
    ended = enters(keys, ref, event, ends=one.history.state)
    return (
        Put(keys.history(ref), one.value or one.history.encode()),
        *one.kept,
        *((Delete(keys.gate(ref)), Delete(*keys.own_range(ref))) if one.gone else ended),
        *((Delete(keys.current(ref.table, ref.type, ref.object)),) if one.one_at_a_time else ()),
        *id_releases(keys, ref, one.history),
    )


@frozen
class FinishRefused:
    """Why a finish was refused, as far as its failure branch shows."""

    run_ops: KeyValue | None
    moved: bool
    """runOps has changed."""
    gone: tuple[bool, ...]
    """For each operation: its state has changed, so it cannot be finished as read."""


def finish_refused(refused: TxnResult, run_ops_mod: int, finals: Sequence[Final]) -> FinishRefused:
    """What the failure branch of :func:`finish` read.

    If neither runOps nor a state has changed, the cause was the election, a decision, or a claim.
    """
    run_ops, *states = [answer.kv if isinstance(answer, GetResult) else None for answer in refused.responses]
    gone = (kv is None or kv.mod_revision != one.state_mod for kv, one in zip(states, finals, strict=True))
    return FinishRefused(run_ops, run_ops is not None and run_ops.mod_revision != run_ops_mod, tuple(gone))


def _undecided_guards(keys: Keys, ref: OperationRef, verdict: State, planned: bool) -> tuple[Compare, ...]:
    """Guards of a decision: none exists, no job is claimed, and the verdict's cancel or plan exists."""
    reason = "cancel" if verdict is State.CANCELLED else "plan"
    none = () if planned else (absent(keys.of(ref, "plan")),)
    return absent(keys.of(ref, "decision")), exists(keys.of(ref, reason)), none_within(*keys.claims_range(ref)), *none


def clean(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, first: int, size: int = ORDINALS_PER_CLEAN
) -> Txn:
    """Delete one page of an ended operation's job keys.

    The page has ``size`` ordinals from ``first`` on. Guards: my election; the state is unchanged; the phase is
    cleaning.
    """
    return Txn(
        (election, unchanged(keys.of(ref, "state"), state_mod), _cleaning_guard(keys, ref)),
        (_job_page(keys, ref, first, size),),
        (),
        "clean",
    )


def end(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, id_: str = "", *, removed_table: bool = False
) -> Txn:
    """Delete the last keys of an ended operation: ``.state``, pending and the rest.

    For an operation of a series this also releases its id (``id_``), if the next operation has not taken it.
    ``removed_table``: its plan has removed the table's record, whose copy goes as well. No claim
    exists: the decision compared that. Ends of several operations are grouped (``protocol.job_transitions.group``).

    Guards: the state is unchanged; my election; the phase is cleaning; no edge to a successor is left, so all
    successors were signalled (``protocol.pending_operations.signal``).
    """
    return Txn(
        (
            unchanged(keys.of(ref, "state"), state_mod),
            election,
            _cleaning_guard(keys, ref),
            none_within(*keys.edges_range(ref, "next")),
        ),
        (
            Delete(*keys.own_range(ref)),
            Delete(*keys.permits_range(ref)),
            Delete(keys.pending(ref)),
            *series_id_releases(keys, ref, id_),
            *((Delete(keys.removed_table(ref)),) if removed_table else ()),
        ),
        (),
        "end",
    )


def _cleaning_guard(keys: Keys, ref: OperationRef) -> Compare:
    """Guard: the operation has ended and is being cleaned up."""
    return value_is(keys.pending(ref), word(PHASES[Stage.CLEANING]))


def _job_page(keys: Keys, ref: OperationRef, first: int, size: int) -> Delete:
    root = keys.root(ref)
    after = first + size
    return Delete(f"{root}.{first:06d}", f"{root}.{after:06d}" if after < 1_000_000 else f"{root}.:")


def forget(keys: Keys, old: Sequence[tuple[OperationRef, int, str]], mark: Watermark) -> Txn:
    """Delete old history records: (operation, mod revision of its record, request id).

    Each record is deleted on its own, with the keys beside it. Guards of each: the record is unchanged, and its
    operation has no keys any more. The watermark must be old and name the revision of each record or a later one. So a
    request id is kept for its hour, whatever a wall clock shows.

    Raises ValueError for a record that is not known to be an hour old.
    """
    if not mark.old or any(mod > mark.upto for _, mod, _ in old):
        raise ValueError("a history record is not known to be an hour old")
    return Txn(
        (),
        tuple(
            Txn(
                (unchanged(keys.history(ref), mod), absent(keys.of(ref, "state"))),
                (
                    Delete(keys.history(ref)),
                    Delete(*_beside_history(keys, ref)),
                    *request_key_deletes(keys, ref, request_id),
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
