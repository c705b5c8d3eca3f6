"""Claims of jobs that nobody has touched, of one or of several operations, in one transaction: a join of those that
each operation would be claimed with alone, under the guards that each has alone. What is not known yet of an operation
is read with its claims. For the rule of one-way guards see ``protocol.operation_transitions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.keys import claim_ordinal
from distop.protocol.txn import Compare, Get, GetResult, Operation, Put, Txn, TxnResult, exists, none_within, unchanged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.protocol.jobs import Claim
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef

OPERATIONS_PER_CLAIM = 42
"""Operations of one job that one transaction claims at most: three compares of each, the claim and two reads (T1)."""
PLANNED_PER_CLAIM = 25
"""Of those that have a plan of their own: the claim and four reads of each."""


@frozen
class Untouched:
    """Jobs of an operation behind the gate of this mod revision, as runs of neighbours: (first, the one after the
    last). ``records``: what is read of it with the claims.
    """

    ref: OperationRef
    gate_mod: int
    runs: tuple[tuple[int, int], ...]
    records: tuple[Get, ...] = ()

    @property
    def jobs(self) -> tuple[int, ...]:
        """Their ordinals."""
        return tuple(p for first, after in self.runs for p in range(first, after))


@frozen
class Granted:
    """Claims that were won: the fence of each job, and what was read."""

    fences: Mapping[int, int]
    records: tuple[GetResult, ...]


def _guards(keys: Keys, one: Untouched) -> tuple[Compare, ...]:
    """ "No claim and no state" is one-way for each job while the gate stands, so "none in the run" is (T5: the ranges
    are empty).
    """
    guards = [unchanged(keys.gate(one.ref), one.gate_mod)]
    for first, after in one.runs:
        guards += (
            none_within(*keys.claims_between(one.ref, first, after)),
            none_within(*keys.jobs_between(one.ref, first, after)),
        )
    return tuple(guards)


def _puts(keys: Keys, one: Untouched, value: bytes) -> tuple[Operation, ...]:
    return (*(Put(keys.claim(one.ref, p), value) for p in one.jobs), *one.records)


def claim_together(keys: Keys, incarnation: str, asked: Sequence[Untouched], first: Claim) -> Txn:
    """Claim these jobs, and read the records, all or none: the usual case behind fresh gates. A refused one is followed
    by :func:`claim_apart`; of one operation that is known, by ``job_transitions.claim``, which decides each job alone.
    """
    value = first.encode()
    return Txn(
        (exists(keys.node(incarnation)), *(guard for one in asked for guard in _guards(keys, one))),
        tuple(op for one in asked for op in _puts(keys, one, value)),
        (),
        "claim_together" if len(asked) > 1 else "claim",
    )


def claim_apart(keys: Keys, incarnation: str, asked: Sequence[Untouched], first: Claim) -> Txn:
    """The same, each operation decided alone. In each failure branch its claims and records are read: claims that are
    mine already mean that an earlier copy of either transaction won them (T9).
    """
    value = first.encode()
    parts = []
    for one in asked:
        claims = Get(*keys.claims_between(one.ref, one.runs[0][0], one.runs[-1][1]))
        parts.append(Txn(_guards(keys, one), _puts(keys, one, value), (claims, *one.records)))
    return Txn((exists(keys.node(incarnation)),), tuple(parts), (), "claim_apart")


def granted_together(answer: TxnResult, asked: Sequence[Untouched]) -> list[Granted]:
    """What :func:`claim_together` brought for each operation, where it applied."""
    found, position = [], 0
    for one in asked:
        begin = position + len(one.jobs)
        position = begin + len(one.records)
        found.append(Granted(dict.fromkeys(one.jobs, answer.revision), _reads(answer.responses[begin:position])))
    return found


def granted_apart(answer: TxnResult, asked: Sequence[Untouched], first: Claim) -> list[Granted | None]:
    """What :func:`claim_apart` brought for each operation; None where it was not won. All of it is None where it was
    refused as a whole: the node key is gone, and with it the session.
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
