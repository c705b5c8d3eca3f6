"""Claims of untouched jobs in one transaction, all or none.

They are runs of jobs of one operation, or several operations of one job each, whose records are read together with the
claims. ``protocol.operation_transitions`` explains one-way guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.txn import (
    Compare,
    Get,
    GetResult,
    Put,
    Txn,
    TxnOperation,
    TxnResult,
    absent,
    exists,
    none_within,
    unchanged,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.jobs import Claim
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef

OPERATIONS_PER_CLAIM = 42
"""Maximum number of one-job operations that one transaction claims: three compares, the claim and two reads each (T1).
"""
PLANNED_PER_CLAIM = 25
"""The same for operations with a plan of their own: the claim and four reads each."""


@frozen
class Untouched:
    """An operation of one job that was never claimed.

    ``gate_mod``: the mod revision of its gate. ``records``: reads that accompany the claim.
    """

    ref: OperationRef
    gate_mod: int
    records: tuple[Get, ...] = ()


@frozen
class Granted:
    """A granted claim: its fence, and the records read."""

    fence: int
    records: tuple[GetResult, ...]


def claim_runs(
    keys: Keys, ref: OperationRef, gate_mod: int, incarnation: str, runs: Sequence[tuple[int, int]], first: Claim
) -> Txn:
    """Claim runs of neighbouring jobs of one operation, all or none.

    ``runs``: (first, the one after the last). After a refusal ``job_transitions.claim`` follows, which decides each job
    on its own.

    Guards: the gate is unchanged; my node key exists; the jobs have neither claim nor state. "No claim and no state" is
    one-way for each job while the gate is unchanged. So "none in the run" is one-way as well (T5: the ranges are
    empty).
    """
    guards = [exists(keys.node(incarnation)), unchanged(keys.gate(ref), gate_mod)]
    for begin, after in runs:
        guards += (
            none_within(*keys.claims_between(ref, begin, after)),
            none_within(*keys.jobs_between(ref, begin, after)),
        )
    value = first.encode()
    puts = tuple(Put(keys.claim(ref, p), value) for begin, after in runs for p in range(begin, after))
    return Txn(tuple(guards), puts, (), "claim")


def claim_together(keys: Keys, incarnation: str, asked: Sequence[Untouched], first: Claim) -> Txn:
    """Claim the job of each of these operations and read the records, all or none.

    This is the usual case behind new gates. After a refusal :func:`claim_apart` follows.

    Guards: my node key exists. Of each operation: its gate is unchanged; its job has neither claim nor state.
    """
    value = first.encode()
    return Txn(
        (exists(keys.node(incarnation)), *(guard for one in asked for guard in _guards(keys, one))),
        tuple(op for one in asked for op in _operations(keys, one, value)),
        (),
        "claim_together" if len(asked) > 1 else "claim",
    )


def claim_apart(keys: Keys, incarnation: str, asked: Sequence[Untouched], first: Claim) -> Txn:
    """Claim the job of each operation on its own.

    The guards are those of :func:`claim_together`. Each failure branch reads the claim and the records of its
    operation. A claim that is already mine means that an earlier copy of either transaction won it (T9).
    """
    value = first.encode()
    parts = (
        Txn(_guards(keys, one), _operations(keys, one, value), (Get(keys.claim(one.ref, 0)), *one.records))
        for one in asked
    )
    return Txn((exists(keys.node(incarnation)),), tuple(parts), (), "claim_apart")


def _guards(keys: Keys, one: Untouched) -> tuple[Compare, ...]:
    return (
        unchanged(keys.gate(one.ref), one.gate_mod),
        absent(keys.claim(one.ref, 0)),
        absent(keys.job(one.ref, 0, "state")),
    )


def _operations(keys: Keys, one: Untouched, value: bytes) -> tuple[TxnOperation, ...]:
    return (Put(keys.claim(one.ref, 0), value), *one.records)


def granted_together(answer: TxnResult, asked: Sequence[Untouched]) -> list[Granted]:
    """The claim of each operation that an applied :func:`claim_together` granted."""
    found, position = [], 0
    for one in asked:
        begin = position + 1
        position = begin + len(one.records)
        found.append(Granted(answer.revision, _reads(answer.responses[begin:position])))
    return found


def granted_apart(answer: TxnResult, asked: Sequence[Untouched], first: Claim) -> list[Granted | None]:
    """The claims that :func:`claim_apart` granted; None: not granted.

    One entry for each operation. All are None if the whole transaction was refused: the node key is gone, and so is the
    session.
    """
    found: list[Granted | None] = [None] * len(asked)
    value = first.encode()
    for n, nested in enumerate(answer.responses):
        if not isinstance(nested, TxnResult):
            continue
        if nested.succeeded:
            found[n] = Granted(answer.revision, _reads(nested.responses[1:]))
            continue
        claim, *read = _reads(nested.responses)
        if claim.kv is not None and claim.kv.value == value:
            found[n] = Granted(claim.kv.mod_revision, tuple(read))
    return found


def _reads(responses: Sequence[object]) -> tuple[GetResult, ...]:
    return tuple(one for one in responses if isinstance(one, GetResult))
