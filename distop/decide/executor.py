"""What an executor decides about itself: whether it is at fault, and what becomes of jobs it ran before. Pure.

When an executor must take it that it is broken itself, and not the jobs that break on it (F38). Pure.

What an executor does, when it starts or looks again, about a job that it ran before (I29): pure judgement.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distop.protocol.jobs import Claim, Outcome
    from distop.protocol.records import OperationRef


IN_A_ROW = 20
"""Unexpected errors in a row, without a job that ended in between."""
FROM_ONE = 15
"""So many of them at most count for one operation where the node is judged: what one broken operation does, however
often, says nothing about the node."""


class Suspected(StrEnum):
    """What is held back."""

    NODE = "node"
    OPERATION = "operation"


def suspected(broke: Mapping[OperationRef, int], of_it: int) -> Suspected | None:
    """What is to be held back on this node after a job broke. ``broke``: jobs that broke here since any job ended here,
    by operation; ``of_it``: those of the operation of the last one, since a job of this operation ended here.
    """
    if sum(min(count, FROM_ONE) for count in broke.values()) >= IN_A_ROW:
        return Suspected.NODE
    return Suspected.OPERATION if of_it >= IN_A_ROW else None


class Fate(Enum):
    """What becomes of what a former attempt left on this node."""

    STAYS = "stays"
    """The job has no end and nobody runs it: it may go on here."""
    SETTLED = "settled"
    """Nothing is left of it, or it is taken care of by a run of this incarnation."""
    CLEANED = "cleaned"
    """The job is gone, done by somebody, or runs elsewhere: what is left here is cleaned up."""


def judge(
    attempt: tuple[str, int],
    operation: State | None,
    claim: Claim | None,
    outcome: Outcome | None,
    live: Collection[str],
    executor: str,
    incarnation: str,
) -> Fate:
    """``attempt``: incarnation and attempt that left it; ``operation``: its state, None where it is gone; ``claim`` and
    ``outcome``: the job's, as they are now; ``live``: incarnations with a node key; ``executor`` and ``incarnation``:
    this one. (A claim of a former incarnation of this executor only waits for that one's session to expire.)
    """
    if outcome is not None:
        # What was reported from here had been cleaned up before, unless it is the result.
        return Fate.SETTLED if (outcome.incarnation, outcome.attempt) == attempt else Fate.CLEANED
    if operation is None or operation.terminal or operation is State.CANCELLING:
        return Fate.CLEANED
    if claim is not None and claim.incarnation == incarnation:
        return Fate.SETTLED
    if claim is not None and claim.actor:
        return Fate.CLEANED  # somebody's own worker loop has it, or had it last
    gone = claim is None or claim.waiting or claim.incarnation not in live or claim.executor == executor
    return Fate.STAYS if gone else Fate.CLEANED
