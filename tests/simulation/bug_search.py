"""Searches for planted bugs: the first schedule, and the breach, by which the simulator finds one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.simulation.planted_history import BUGS, Planted
from tests.simulator import Breach, Scenario, Simulation, draw_scenario
from tests.simulator.run import without_logs
from tests.simulator.scenes import drawn_scene

SEEDS = 2_000
"""Maximum schedules of a search."""
FEW = 20
"""Maximum schedules of a search in CI. After a longer one the found seed has to be recorded."""
_OURS = "/tests/simulation/"
"""The path of planted code in a traceback."""


@dataclass(frozen=True, slots=True)
class Find:
    """The first schedule with an expected breach. ``looked``: number of schedules that were run."""

    seed: int
    breach: Breach
    looked: int

    def __str__(self) -> str:
        return f"{self.breach.kind}, seed {self.seed}"


def look_for(planted: Planted, scenarios: Iterable[Scenario]) -> Find | None:
    """Run these scenarios until a breach of an expected kind is found. The caller has planted the bug.

    Raises AssertionError if the planted code itself fails: such a failure is not the bug.
    """
    for looked, one in enumerate(scenarios, 1):
        found = Simulation(one).run().breaches
        for breach in found:
            assert not outdated(breach.text), f"{planted.name} is outdated: it fails on seed {one.seed}: {breach}"
        for breach in found:
            if breach.kind in planted.expected:
                return Find(one.seed, breach, looked)
    return None


def outdated(text: str) -> bool:
    """Whether the text is an error raised by planted code, other than the bug itself (``Mistake``)."""
    return _OURS in text and "Mistake: " not in text


def seeds_from(first: int) -> Iterable[int]:
    """All seeds in the order of a search: the recorded one and the next ones first."""
    near = range(first, first + FEW)
    return (*near, *(seed for seed in range(1, SEEDS + 1) if seed not in near))


def seeds(planted: Planted) -> Iterable[int]:
    """All seeds in the order of the search for a planted bug."""
    return seeds_from(planted.first)


def require_recorded(name: str, seed: int, looked: int, where: str) -> None:
    """Fail after a long search: the recorded seed no longer shows the bug. ``where``: the place of the record."""
    assert looked <= FEW, (
        f"{name} is found only on seed {seed}, after {looked} schedules. Record {seed} as its first seed in {where}"
    )


def search_freely(name: str, first: int, count: int, own_scene: bool = False) -> tuple[Planted, Find | None]:
    """Search for a bug in freely drawn schedules. ``own_scene``: only in those that draw its scene."""
    (planted,) = (one for one in BUGS if one.name == name)
    drawn: Iterable[int] = range(first, first + count)
    if own_scene:
        drawn = (seed for seed in drawn if draws_its_scene(planted, seed))
    with without_logs(), pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        return planted, look_for(planted, map(draw_scenario, drawn))


def draws_its_scene(planted: Planted, seed: int) -> bool:
    """Whether a seed draws the scene that is chosen for a bug, with its kinds of faults or with any."""
    if not planted.chosen:
        return True
    scenes = [(planted.shape, planted.focus), *([(planted.shape, ())] if planted.shape else [])]
    return drawn_scene(seed) in scenes
