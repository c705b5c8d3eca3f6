"""The clocks and the chance of one simulated process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from tests.simulator.virtual_loop import VirtualLoop

EPOCH = 1_750_000_000.0
"""Seconds since the epoch at which every simulation begins."""


class SimSource:
    """Clocks that follow the loop's virtual time. ``skew``: how far the wall clock is wrong, in seconds; it may be
    changed (a clock that jumps). The monotonic clocks begin anywhere, and never jump.
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
