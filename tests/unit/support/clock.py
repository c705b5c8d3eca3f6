"""A clock for unit tests that only the test changes."""

from __future__ import annotations

from distop.clock import System


class StandingClock(System):
    """A clock at ``now``; its random numbers are always the maximum, or the minimum if ``least``."""

    now = 0.0
    least = False

    def monotonic(self) -> float:  # type: ignore[override]
        return self.now

    def time(self) -> float:  # type: ignore[override]
        return self.now

    def uniform(self, a: float, b: float) -> float:  # type: ignore[override]
        return a if self.least else b
