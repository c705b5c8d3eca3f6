"""The end of operations: deciding, finishing, cleaning up, and forgetting what is old; one function per event.

For the rule of one-way guards see ``core.transitions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.codec import dumps, word
from distop.core.model import Decision, History, OperationRef, Phase, State
from distop.core.txn import Compare, Delete, Get, Put, Txn, absent, exists, none_within, unchanged, value_is

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.core.keys import Keys

ORDINALS_PER_CLEAN = 300
"""Ordinals whose keys one cleanup page deletes: at most three keys each, so under 1,000."""


def decide(keys: Keys, ref: OperationRef, election: Compare, state_mod: int, decision: Decision) -> Txn:
    """Fix the verdict before the completion code runs; cancel and pause are refused from then on."""
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            *_undecided(keys, ref, decision.verdict),
            absent(keys.history(ref)),
        ),
        (
            Put(keys.of(ref, "decision"), decision.encode()),
            Delete(keys.gate(ref)),
            Put(keys.pending(ref), word(Phase.COMPLETING)),
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


def finish(
    keys: Keys,
    ref: OperationRef,
    election: Compare,
    state_mod: int,
    decision_mod: int,
    run_ops: Mapping[str, int],
    run_ops_mod: int,
    history: History,
    one_at_a_time: bool,
    kept: Sequence[Put] = (),
) -> Txn:
    """The terminal state and the history record, in one transaction (C30); with ``kept``, which a rerun needs.

    ``decision_mod`` 0: there is no decision, because the behavior has no completion code; deciding and finishing are
    then one step, under the guards of both (a join of two adjacent transactions, so no new interleaving).
    """
    counts = {t: n for t, n in run_ops.items() if n > 0}
    counts[ref.type] = counts.get(ref.type, 0) - 1
    if counts[ref.type] <= 0:
        del counts[ref.type]
    decision = keys.of(ref, "decision")
    guards: tuple[Compare, ...]
    if decision_mod:
        guards = (unchanged(decision, decision_mod),)
    else:
        guards = _undecided(keys, ref, history.state)
    return Txn(
        (
            election,
            unchanged(keys.of(ref, "state"), state_mod),
            *guards,
            absent(keys.history(ref)),
            unchanged(keys.run_ops(ref.table), run_ops_mod),
        ),
        (
            Put(keys.of(ref, "state"), word(history.state)),
            Put(keys.history(ref), history.encode()),
            *kept,
            Put(keys.run_ops(ref.table), dumps(counts)),
            *(() if decision_mod else (Delete(keys.gate(ref)),)),
            *((Delete(keys.current(ref.table, ref.type, ref.object)),) if one_at_a_time else ()),
            Put(keys.pending(ref), word(Phase.CLEANING)),
        ),
        (Get(keys.run_ops(ref.table)), Get(keys.of(ref, "state"))),
        "finish",
    )


def _undecided(keys: Keys, ref: OperationRef, verdict: State) -> tuple[Compare, ...]:
    """An operation may be decided: no job is claimed, and it has either been cancelled or got a plan."""
    reason = "cancel" if verdict is State.CANCELLED else "plan"
    return absent(keys.of(ref, "decision")), exists(keys.of(ref, reason)), none_within(*keys.claims_range(ref))


OWN_KEYS = ("arg", "spec", "cancel", "plan", "planning", "decision")
"""An operation's own keys that cleanup deletes before the last step."""


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


def end(
    keys: Keys, ref: OperationRef, election: Compare, state_mod: int, first: int, size: int = ORDINALS_PER_CLEAN
) -> Txn:
    """The last page: the ordinals from ``first`` on, the operation's own keys, ``.state`` and pending together."""
    return Txn(
        (election, unchanged(keys.of(ref, "state"), state_mod), _over(keys, ref)),
        (
            _job_page(keys, ref, first, size),
            Delete(*keys.claims_range(ref)),
            Delete(*keys.chunks_range(ref)),
            *(Delete(keys.of(ref, name)) for name in OWN_KEYS),
            Delete(keys.of(ref, "state")),
            Delete(keys.pending(ref)),
        ),
        (),
        "end",
    )


def _over(keys: Keys, ref: OperationRef) -> Compare:
    return value_is(keys.pending(ref), word(Phase.CLEANING))


def _job_page(keys: Keys, ref: OperationRef, first: int, size: int) -> Delete:
    root = keys.root(ref)
    after = first + size
    return Delete(f"{root}.{first:06d}", f"{root}.{after:06d}" if after < 1_000_000 else f"{root}.:")


def forget(keys: Keys, old: Sequence[tuple[OperationRef, int]]) -> Txn:
    """Delete old history records, each as it was read: (operation, its record's mod revision). Each alone, with what
    stands beside it.
    """
    return Txn(
        (),
        tuple(
            Txn(
                (unchanged(keys.history(ref), mod),),
                (Delete(keys.history(ref)), Delete(*_beside_history(keys, ref))),
            )
            for ref, mod in old
        ),
        (),
        "forget",
    )


def _beside_history(keys: Keys, ref: OperationRef) -> tuple[str, str]:
    key = keys.history(ref)
    return f"{key}.", f"{key}/"
