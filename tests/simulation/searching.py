"""Looking for planted bugs: on which schedule, and by which breach, the simulator finds one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.simulation.planted_history import BUGS, Planted
from tests.simulator import Breach, Scenario, Simulation, scenario
from tests.simulator.run import quietly

SEEDS = 2_000
"""Schedules in which a bug is looked for at most."""
FEW = 20
"""Schedules after which a search is too long for a test of every change: the seed that it found is to be recorded."""
_OURS = "/tests/simulation/"
"""In a traceback: where bugs are planted."""


@dataclass(frozen=True, slots=True)
class Find:
    """The first schedule with a breach that is the bug's own effect; ``looked``: how many were looked at."""

    seed: int
    breach: Breach
    looked: int

    def __str__(self) -> str:
        return f"{self.breach.kind}, seed {self.seed}"


def look_for(planted: Planted, wanted: Iterable[Scenario]) -> Find | None:
    """Run these, with the bug planted by the caller, until a breach of an expected kind is found. Raises
    AssertionError where the planted code itself fails on the way: then it is not the bug that was found.
    """
    for looked, one in enumerate(wanted, 1):
        found = Simulation(one).run().breaches
        for breach in found:
            assert not rotten(breach.text), f"{planted.name} fails by itself, on seed {one.seed}: {breach}"
        for breach in found:
            if breach.kind in planted.expected:
                return Find(one.seed, breach, looked)
    return None


def rotten(text: str) -> bool:
    """It tells of an error that came through planted code, and was not the bug itself."""
    return _OURS in text and "Mistake: " not in text


def seeds_from(first: int) -> Iterable[int]:
    """All seeds, in the order in which they are looked at: the recorded one first."""
    return (*range(first, SEEDS + 1), *range(1, first))


def seeds(planted: Planted) -> Iterable[int]:
    """All seeds, in the order in which a planted bug is looked for in them."""
    return seeds_from(planted.first)


def require_recorded(name: str, seed: int, looked: int, where: str) -> None:
    """Fail if a search was long: the recorded seed no longer shows the bug. ``where``: what records it."""
    assert looked <= FEW, (
        f"{name} is found only on seed {seed}, after {looked} schedules. Record {seed} as its first seed in {where}"
    )


def generally(name: str, first: int, count: int) -> tuple[Planted, Find | None]:
    """Look for a bug in schedules of which nothing is chosen."""
    (planted,) = (one for one in BUGS if one.name == name)
    with quietly(), pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        return planted, look_for(planted, map(scenario, range(first, first + count)))
