"""What an executor decides about itself: whether it is at fault, and what becomes of jobs it ran before. Pure.

When an executor must take it that it is broken itself, and not the jobs that break on it: it leaves them to others
for a while (F38). Only where there are others: jobs that nobody else can run go on here, with the attempts that they
have. Pure; times are seconds of a monotonic clock.

What an executor does, when it starts or looks again, about a job that it ran before (I29): pure judgement.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from distop.protocol.records import State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from distop.protocol.jobs import Claim, Outcome
    from distop.protocol.records import OperationRef


IN_A_ROW = 20
"""Unexpected errors in a row, without a job that ended in between."""
FROM_ONE = 15
"""So many of them at most count for one operation where the node is judged: what one broken operation does, however
often, says nothing about the node."""

PAUSE = 30.0
"""Seconds for which a node leaves to others what breaks on it."""
REMEMBERED = 64
"""Operations of which it is remembered that their jobs broke here, after they have ended."""


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


class Suspicion:
    """What one node suspects of itself. ``others``: whether other executors work for an operation."""

    def __init__(self, others: Callable[[OperationRef], bool]) -> None:
        self._others = others
        self._broke: dict[OperationRef, int] = {}
        """Jobs that broke since any job ended here. It speaks of the node, also once an operation is gone."""
        self._of_one: dict[OperationRef, int] = {}
        """Those since a job of the same operation ended here."""
        self._node_until = 0.0
        self._until: dict[OperationRef, float] = {}

    def wait(self, ref: OperationRef, now: float) -> float:
        """Seconds for which jobs of this operation are left to others; nothing, or less, where they are not."""
        until = max(self._node_until, self._until.get(ref, 0.0)) - now
        return until if until > 0 and self._others(ref) else 0.0

    def ended(self, ref: OperationRef) -> None:
        """A job of it came to its end here, whatever that was."""
        self._broke.clear()
        self._of_one.pop(ref, None)

    def broke(self, ref: OperationRef, now: float) -> tuple[Suspected | None, int, int]:
        """A job of it broke here. What is held back for that, and how many jobs of how many operations have broken.

        What others cannot run either says nothing.
        """
        if not self._others(ref):
            return None, 0, 0
        self._broke[ref] = self._broke.pop(ref, 0) + 1
        while len(self._broke) > REMEMBERED:
            del self._broke[next(iter(self._broke))]
        count = self._of_one[ref] = self._of_one.get(ref, 0) + 1
        held = suspected(self._broke, count)
        if held is Suspected.NODE:
            told = held, sum(self._broke.values()), len(self._broke)
            self._broke.clear()
            self._of_one.clear()
            self._node_until = now + PAUSE
            return told
        if held is Suspected.OPERATION:
            del self._of_one[ref]
            self._until[ref] = now + PAUSE
        return held, count, 1

    def forget(self, ref: OperationRef) -> None:
        """It is not open any more; that its jobs broke speaks of the node all the same."""
        self._of_one.pop(ref, None)
        self._until.pop(ref, None)


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
