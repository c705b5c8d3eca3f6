"""Exponential back-off with jitter."""

from __future__ import annotations

from dataclasses import dataclass

from distop.clock import random


@dataclass(slots=True)
class Backoff:
    """Pauses that double from ``first`` to ``longest`` seconds.

    Each pause is random between half and all of that, so that processes that failed together do not retry together.
    """

    first: float
    longest: float
    _doubled: int = 0

    def pause(self) -> float:
        """Seconds to wait before the next attempt."""
        whole = self.first * 2.0**self._doubled
        if whole < self.longest:
            self._doubled += 1
        return min(whole, self.longest) * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._doubled = 0
