"""Claims of several small operations in one transaction: a join of those that each would be claimed with alone, under
the guards that each has alone (``protocol.job_transitions.claim_unread``), so that many operations of one job each do
not take a round trip each. For the rule of one-way guards see ``protocol.operation_transitions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.frozen import frozen
from distop.protocol.txn import Compare, Get, GetResult, Operation, Put, Txn, TxnResult, exists, none_within, unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.jobs import Claim
    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef

OPERATIONS_PER_CLAIM = 42
"""Operations of one job that one transaction claims at most: three compares of each, the claim and two reads (T1)."""
PLANNED_PER_CLAIM = 25
"""Of those that have a plan of their own: the claim and four reads of each."""


@frozen
class Opened:
    """An operation of one job behind the gate of this mod revision, with what is read of it (``records``)."""

    ref: OperationRef
    gate_mod: int
    records: tuple[Get, ...]


@frozen
class Granted:
    """A claim that was won: its fence, and what was read."""

    fence: int
    records: tuple[GetResult, ...]


def _guards(keys: Keys, one: Opened) -> tuple[Compare, ...]:
    return (
        unchanged(keys.gate(one.ref), one.gate_mod),
        none_within(*keys.claims_between(one.ref, 0, 1)),
        none_within(*keys.jobs_between(one.ref, 0, 1)),
    )


def claim_together(keys: Keys, incarnation: str, opened: Sequence[Opened], first: Claim) -> Txn:
    """Claim the one job of each, and read their records, all or none. A refused one is followed by
    :func:`claim_apart`.
    """
    value = first.encode()
    claims: list[Operation] = []
    for one in opened:
        claims += (Put(keys.claim(one.ref, 0), value), *one.records)
    guards = (guard for one in opened for guard in _guards(keys, one))
    return Txn((exists(keys.node(incarnation)), *guards), tuple(claims), (), "claim_together")


def claim_apart(keys: Keys, incarnation: str, opened: Sequence[Opened], first: Claim) -> Txn:
    """The same, each decided alone. In each failure branch claim and records are read: a claim that is mine already
    means that an earlier copy of either transaction won it (T9).
    """
    value = first.encode()
    return Txn(
        (exists(keys.node(incarnation)),),
        tuple(
            Txn(
                _guards(keys, one),
                (Put(keys.claim(one.ref, 0), value), *one.records),
                (Get(keys.claim(one.ref, 0)), *one.records),
            )
            for one in opened
        ),
        (),
        "claim_apart",
    )


def granted_together(answer: TxnResult, opened: Sequence[Opened]) -> list[Granted]:
    """What :func:`claim_together` brought for each, where it applied."""
    found, position = [], 0
    for one in opened:
        after = position + 1 + len(one.records)
        found.append(Granted(answer.revision, _reads(answer.responses[position + 1 : after])))
        position = after
    return found


def granted_apart(answer: TxnResult, first: Claim) -> list[Granted | None]:
    """What :func:`claim_apart` brought for each; None where it was not won. All of it is None where it was refused as a
    whole: the node key is gone, and with it the session.
    """
    value = first.encode()
    found: list[Granted | None] = []
    for nested in answer.responses:
        if not isinstance(nested, TxnResult):
            found.append(None)
            continue
        head, *records = nested.responses
        if nested.succeeded:
            found.append(Granted(answer.revision, _reads(records)))
            continue
        kv = head.kv if isinstance(head, GetResult) else None
        mine = kv is not None and kv.value == value
        found.append(Granted(kv.mod_revision, _reads(records)) if kv is not None and mine else None)
    return found


def _reads(responses: Sequence[object]) -> tuple[GetResult, ...]:
    return tuple(one for one in responses if isinstance(one, GetResult))
