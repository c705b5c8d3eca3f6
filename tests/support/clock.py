"""A clock for unit tests."""

from __future__ import annotations

from distop.clock import System


class StandingClock(System):
    """A clock that stands still unless it is moved, and chance that always gives the most, or the ``least``."""

    now = 0.0
    least = False

    def monotonic(self) -> float:  # type: ignore[override]
        return self.now

    def time(self) -> float:  # type: ignore[override]
        return self.now

    def uniform(self, a: float, b: float) -> float:  # type: ignore[override]
        return a if self.least else b
