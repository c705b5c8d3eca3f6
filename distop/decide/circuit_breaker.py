"""An executor's circuit breaker.

If jobs keep failing with unexpected errors on a node, its executor leaves them to other executors for a while (F38).
Jobs that no other executor can run continue there, with their remaining attempts. Pure; times are seconds of a
monotonic clock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.protocol.records import OperationRef


IN_A_ROW = 20
"""Number of unexpected errors in a row, without an ended job in between, that opens the circuit breaker."""
FROM_ONE = 15
"""Maximum errors of one operation that count against the node.

A single broken operation says nothing about the node, however often it fails.
"""

PAUSE = 30.0
"""Seconds for which the circuit breaker stays open."""
OPEN = f"its circuit breaker is open after unexpected errors of {{}}; it tries again within {PAUSE:g} s"
"""Why an executor leaves operations to others, as a sentence about it."""
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
    """The circuit breaker of one node. ``others``: returns whether other executors serve an operation."""

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

    def open(self, now: float) -> dict[OperationRef | None, str]:
        """Operations that are left to others, and why; None: all that others serve."""
        found: dict[OperationRef | None, str] = {}
        if now < self._node_until:
            found[None] = OPEN.format("jobs of several operations")
        for ref, until in self._until.items():
            if now < until and self._others(ref):
                found[ref] = OPEN.format("its jobs")
        return found

    def job_ended(self, ref: OperationRef) -> None:
        """Record a job of the operation that ended here, as success or failed."""
        self._failures.clear()
        self._failures_of.pop(ref, None)

    def job_failed(self, ref: OperationRef, now: float) -> tuple[BreakerScope | None, int, int]:
        """Record an unexpected error of a job of the operation.

        Returns the scope that is stopped now, if any, and how many jobs of how many operations have failed. Errors of
        jobs that no other executor can run do not count.
        """
        if not self._others(ref):
            return None, 0, 0
        self._failures[ref] = self._failures.pop(ref, 0) + 1
        while len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]
        count = self._failures_of[ref] = self._failures_of.get(ref, 0) + 1
        held = breaker_scope(self._failures, count)
        if held is BreakerScope.NODE:
            counts = held, sum(self._failures.values()), len(self._failures)
            self._failures.clear()
            self._failures_of.clear()
            self._node_until = now + PAUSE
            return counts
        if held is BreakerScope.OPERATION:
            del self._failures_of[ref]
            self._until[ref] = now + PAUSE
        return held, count, 1

    def forget(self, ref: OperationRef) -> None:
        """Forget a closed operation. Its errors still count against the node."""
        self._failures_of.pop(ref, None)
        self._until.pop(ref, None)
