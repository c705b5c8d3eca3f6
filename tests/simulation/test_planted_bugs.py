"""Each planted bug is found by the simulator, on schedules on which the code as it is breaches nothing."""

from __future__ import annotations

import pytest

from distop.testing.simulation import Simulation, scenario
from distop.testing.simulation.run import quietly
from tests.simulation.planted_acts import BUGS, Planted

SEEDS = range(1, 301)
"""So many schedules at most until a bug is found."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    with quietly():
        with monkeypatch.context() as patch:
            planted.plant(patch)
            found = next((seed for seed in SEEDS if _breaches(seed, planted)), None)
        assert found is not None, f"{planted.name} was not found in {len(SEEDS)} schedules"
        assert _breaches(found, planted) == [], "and these are breached without it"


def _breaches(seed: int, planted: Planted) -> list[str]:
    return list(map(str, Simulation(planted.shape(scenario(seed, focus=planted.focus))).run().breaches))
