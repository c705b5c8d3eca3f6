"""Claims of untouched jobs of one or several operations in one transaction.

It joins the transactions that would claim each operation alone, under the same guards. Records of an operation that are
not known yet are read together with the claims. ``protocol.operation_transitions`` explains one-way guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.keys import claim_ordinal
from distop.protocol.txn import (
    Compare,
    Get,
    GetResult,
    Put,
    Txn,
    TxnOperation,
    TxnResult,
    exists,
    none_within,
    unchanged,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """Jobs of an operation that were never claimed.

    ``runs``: runs of neighbours, (first, the one after the last). ``gate_mod``: the mod revision of its gate.
    ``records``: reads that accompany the claims.
    """

    ref: OperationRef
    gate_mod: int
    runs: tuple[tuple[int, int], ...]
    records: tuple[Get, ...] = ()

    @property
    def jobs(self) -> tuple[int, ...]:
        """The ordinals of the jobs."""
        return tuple(p for first, after in self.runs for p in range(first, after))


@frozen
class Granted:
    """Granted claims: the fence of each job, and the records read."""

    fences: Mapping[int, int]
    records: tuple[GetResult, ...]


def _guards(keys: Keys, one: Untouched) -> tuple[Compare, ...]:
    """Guards of one operation's claims.

    The gate is unchanged; the jobs have neither claim nor state. "No claim and no state" is one-way for each job while
    the gate is unchanged. So "none in the run" is one-way as well (T5: the ranges are empty).
    """
    guards = [unchanged(keys.gate(one.ref), one.gate_mod)]
    for first, after in one.runs:
        guards += (
            none_within(*keys.claims_between(one.ref, first, after)),
            none_within(*keys.jobs_between(one.ref, first, after)),
        )
    return tuple(guards)


def _puts(keys: Keys, one: Untouched, value: bytes) -> tuple[TxnOperation, ...]:
    return (*(Put(keys.claim(one.ref, p), value) for p in one.jobs), *one.records)


def claim_together(keys: Keys, incarnation: str, asked: Sequence[Untouched], first: Claim) -> Txn:
    """Claim these jobs and read the records, all or none.

    This is the usual case behind new gates. After a refusal :func:`claim_apart` follows; for a single operation whose
    plan is known ``job_transitions.claim``, which decides each job on its own.

    Guards: my node key exists. Of each operation: its gate is unchanged; its jobs have neither claim nor state.
    """
    value = first.encode()
    return Txn(
        (exists(keys.node(incarnation)), *(guard for one in asked for guard in _guards(keys, one))),
        tuple(op for one in asked for op in _puts(keys, one, value)),
        (),
        "claim_together" if len(asked) > 1 else "claim",
    )


def claim_apart(keys: Keys, incarnation: str, asked: Sequence[Untouched], first: Claim) -> Txn:
    """Claim the jobs of each operation on its own.

    The guards are those of :func:`claim_together`. Each failure branch reads the claims and records of its operation.
    Claims that are already mine mean that an earlier copy of either transaction won them (T9).
    """
    value = first.encode()
    parts = []
    for one in asked:
        claims = Get(*keys.claims_between(one.ref, one.runs[0][0], one.runs[-1][1]))
        parts.append(Txn(_guards(keys, one), _puts(keys, one, value), (claims, *one.records)))
    return Txn((exists(keys.node(incarnation)),), tuple(parts), (), "claim_apart")


def granted_together(answer: TxnResult, asked: Sequence[Untouched]) -> list[Granted]:
    """The claims that an applied :func:`claim_together` granted, for each operation."""
    found, position = [], 0
    for one in asked:
        begin = position + len(one.jobs)
        position = begin + len(one.records)
        found.append(Granted(dict.fromkeys(one.jobs, answer.revision), _reads(answer.responses[begin:position])))
    return found


def granted_apart(answer: TxnResult, asked: Sequence[Untouched], first: Claim) -> list[Granted | None]:
    """The claims that :func:`claim_apart` granted; None: not granted.

    One entry for each operation. All are None if the whole transaction was refused: the node key is gone, and so is the
    session.
    """
    found: list[Granted | None] = [None] * len(asked)
    value = first.encode()
    for n, (one, nested) in enumerate(zip(asked, answer.responses, strict=False)):
        if not isinstance(nested, TxnResult):
            continue
        if nested.succeeded:
            records = _reads(nested.responses[len(one.jobs) :])
            found[n] = Granted(dict.fromkeys(one.jobs, answer.revision), records)
            continue
        claims, *read = _reads(nested.responses)
        mine = {claim_ordinal(kv.key): kv.mod_revision for kv in claims.kvs if kv.value == value}
        fences = {p: mine[p] for p in one.jobs if p in mine}
        if fences:
            found[n] = Granted(fences, tuple(read))
    return found


def _reads(responses: Sequence[object]) -> tuple[GetResult, ...]:
    return tuple(one for one in responses if isinstance(one, GetResult))
