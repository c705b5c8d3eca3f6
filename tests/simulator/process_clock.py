"""The clocks and the random generator of one simulated process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from tests.simulator.virtual_loop import VirtualLoop

EPOCH = 1_750_000_000.0
"""Seconds since 1970 at which each simulation starts."""


class SimSource:
    """Clocks that follow the loop's virtual time.

    ``skew``: the error of the wall clock in seconds; a change is a jump of the clock. The monotonic clocks start at a
    random value, and never jump.
    """

    def __init__(self, loop: VirtualLoop, chance: random.Random, skew: float = 0.0) -> None:
        self.skew = skew
        self.chance = chance
        self.uniform = chance.uniform
        self.bits = chance.getrandbits
        self._loop = loop
        self._begun = chance.uniform(100.0, 1_000_000.0)

    def time(self) -> float:
        return EPOCH + self._loop.now + self.skew

    def monotonic(self) -> float:
        return self._begun + self._loop.now

    def boottime(self) -> float:
        return 2 * self._begun + self._loop.now
