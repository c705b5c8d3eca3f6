"""A token bucket: how often something may begin, by a monotonic clock, in this process."""

from __future__ import annotations

import math

from distop.clock import time
from distop.core.texts import shown
from distop.errors import InvalidArgument


class Bucket:
    """``rate`` tokens come in a second, and up to ``burst`` are kept (default: those of one second, and one at least);
    it begins full. Raises InvalidArgument.
    """

    def __init__(self, rate: float, burst: float | None = None) -> None:
        for value, what in ((rate, "a rate"), (burst, "a burst")):
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not (number and value > 0):
                raise InvalidArgument(f"{what} is a positive number, not {shown(value)}")
        self.rate = float(rate)
        self.burst = max(1.0, float(burst if burst is not None else rate))
        self._tokens = self.burst
        self._at = time.monotonic()

    def available(self) -> int:
        """Whole tokens that are there now."""
        now = time.monotonic()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now
        return int(self._tokens + 1e-9)

    def spend(self, count: int = 1) -> None:
        """Take so many, as :meth:`available` has told them."""
        self._tokens -= count

    def wait(self) -> float:
        """Seconds until a token is there; 0: now."""
        return 0.0 if self.available() else (1.0 - self._tokens) / self.rate
