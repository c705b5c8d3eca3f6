"""Pauses between tries of the same thing by the same process, which grow while it fails."""

from __future__ import annotations

from dataclasses import dataclass

from distop.clock import random


@dataclass(slots=True)
class Backoff:
    """Doubles from ``first`` to ``longest`` seconds; each pause is between the half and the whole of that, so that who
    were refused together do not come back together.
    """

    first: float
    longest: float
    _doubled: int = 0

    def pause(self) -> float:
        """Seconds to wait before the next try."""
        whole = self.first * 2.0**self._doubled
        if whole < self.longest:
            self._doubled += 1
        return min(whole, self.longest) * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It works: the next pause is a first one."""
        self._doubled = 0
