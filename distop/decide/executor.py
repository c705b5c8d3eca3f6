"""An executor's circuit breaker, and its judgement of jobs from an earlier run.

The circuit breaker: if jobs keep failing with unexpected errors here, the executor leaves them to others for a while
(F38). It does so only if others live: jobs that no other executor can run continue here, with their remaining attempts.

:func:`judge` decides, at a start and later, what happens to a job of an earlier run (I29). Pure; times are seconds of a
monotonic clock.
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
"""Maximum errors of one operation that count against the node.

A single broken operation says nothing about the node, however often it fails.
"""

PAUSE = 30.0
"""Seconds for which the circuit breaker stays open."""
REMEMBERED = 64
"""Maximum number of operations whose errors are remembered, also after they have ended."""


class BreakerScope(StrEnum):
    """What the circuit breaker stops."""

    NODE = "node"
    OPERATION = "operation"


def breaker_scope(broke: Mapping[OperationRef, int], of_it: int) -> BreakerScope | None:
    """What to stop on this node after an unexpected error.

    ``broke``: errors since any job ended here, by operation. ``of_it``: those of the last operation since one of its
    jobs ended here.
    """
    if sum(min(count, FROM_ONE) for count in broke.values()) >= IN_A_ROW:
        return BreakerScope.NODE
    return BreakerScope.OPERATION if of_it >= IN_A_ROW else None


class CircuitBreaker:
    """The circuit breaker of one node.

    ``others``: whether other executors serve an operation.
    """

    def __init__(self, others: Callable[[OperationRef], bool]) -> None:
        self._others = others
        self._failures: dict[OperationRef, int] = {}
        """Errors since any job ended here. They count against the node, also once an operation is gone."""
        self._failures_of: dict[OperationRef, int] = {}
        """Errors since a job of the same operation ended here."""
        self._node_until = 0.0
        self._until: dict[OperationRef, float] = {}

    def wait(self, ref: OperationRef, now: float) -> float:
        """Seconds for which jobs of this operation are left to others; 0: not at all."""
        until = max(self._node_until, self._until.get(ref, 0.0)) - now
        return until if until > 0 and self._others(ref) else 0.0

    def job_ended(self, ref: OperationRef) -> None:
        """A job of the operation ended here, with any result."""
        self._failures.clear()
        self._failures_of.pop(ref, None)

    def job_failed(self, ref: OperationRef, now: float) -> tuple[BreakerScope | None, int, int]:
        """An unexpected error of one of its jobs here.

        Returns what is stopped, and how many jobs of how many operations have failed. Errors of jobs that no other
        executor can run do not count.
        """
        if not self._others(ref):
            return None, 0, 0
        self._failures[ref] = self._failures.pop(ref, 0) + 1
        while len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]
        count = self._failures_of[ref] = self._failures_of.get(ref, 0) + 1
        held = breaker_scope(self._failures, count)
        if held is BreakerScope.NODE:
            told = held, sum(self._failures.values()), len(self._failures)
            self._failures.clear()
            self._failures_of.clear()
            self._node_until = now + PAUSE
            return told
        if held is BreakerScope.OPERATION:
            del self._failures_of[ref]
            self._until[ref] = now + PAUSE
        return held, count, 1

    def forget(self, ref: OperationRef) -> None:
        """The operation is closed. Its errors still count against the node."""
        self._failures_of.pop(ref, None)
        self._until.pop(ref, None)


class Fate(Enum):
    """What happens to the remains of a former attempt on this node."""

    STAYS = "stays"
    """The job has not ended and has no holder: it may continue here."""
    SETTLED = "settled"
    """Nothing is left of it, or a run of this incarnation handles it."""
    CLEANED = "cleaned"
    """The job is gone, ended or runs elsewhere: its remains here are cleaned up."""


def judge(
    attempt: tuple[str, int],
    operation: State | None,
    claim: Claim | None,
    outcome: Outcome | None,
    live: Collection[str],
    executor: str,
    incarnation: str,
) -> Fate:
    """What happens to the remains of ``attempt``, (incarnation, attempt).

    ``operation``: its state, None if it is gone. ``claim`` and ``outcome``: the job's current ones. ``live``:
    incarnations with a node key. ``executor`` and ``incarnation``: this one. (A claim of a former incarnation of this
    executor only waits until that session expires.)
    """
    if outcome is not None:
        # An attempt cleans up before it reports an end without a result.
        return Fate.SETTLED if (outcome.incarnation, outcome.attempt) == attempt else Fate.CLEANED
    if operation is None or operation.terminal or operation is State.CANCELLING:
        return Fate.CLEANED
    if claim is not None and claim.incarnation == incarnation:
        return Fate.SETTLED
    if claim is not None and claim.actor:
        return Fate.CLEANED  # an actor has it, or had it last
    gone = claim is None or claim.waiting or claim.incarnation not in live or claim.executor == executor
    return Fate.STAYS if gone else Fate.CLEANED
