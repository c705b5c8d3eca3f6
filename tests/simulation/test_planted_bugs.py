"""The simulator finds each planted bug by its own effect, on schedules without a breach in the unchanged code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distop.daemon.executor.executor_role import Executor
from distop.decide import job_claims
from distop.protocol import operation_transitions as t
from tests.conftest import FIGURES
from tests.simulation.bug_planting import give, substitute, wrap
from tests.simulation.bug_search import FEW, SEEDS, look_for, require_recorded, seeds
from tests.simulation.planted_history import BUGS, Planted
from tests.simulator import Simulation, draw_scenario
from tests.simulator.run import without_logs
from tests.simulator.scenes import FOCUSED, POLICY_SCENES, REMOVAL_SCENES, SCENES

pytestmark = pytest.mark.rotating

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
@pytest.mark.malformed
@pytest.mark.parametrize(
    "planted",
    [pytest.param(planted, id=planted.name, marks=[pytest.mark.slow] * planted.slow) for planted in BUGS],
)
def test_a_planted_bug_is_found(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    with without_logs():
        with monkeypatch.context() as patch:
            planted.plant(patch)
            found = look_for(planted, map(planted.scenario, seeds(planted)))
        assert found is not None, f"{planted.name} was not found in {SEEDS} schedules"
        of = "scenarios chosen for it" if planted.chosen else "schedules"
        record_property(FIGURES, f"{found}, after {found.looked} {of}")
        without = Simulation(planted.scenario(found.seed)).run().breaches
        assert list(map(str, without)) == [], "breaches without the bug"
    require_recorded(planted.name, found.seed, found.looked, f"@bug(..., first={found.seed})")


@pytest.mark.timeout(600)
@pytest.mark.malformed
@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(planted, id=planted.name, marks=[pytest.mark.slow] * planted.slow)
        for planted in BUGS
        if planted.chosen
    ],
)
def test_a_drawn_schedule_finds_a_bug_that_has_a_scene_or_a_focus(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is chosen for it. All other bugs are only searched for in drawn schedules."""
    scenario = draw_scenario(planted.drawn)
    with without_logs():
        with monkeypatch.context() as patch:
            planted.plant(patch)
            found = look_for(planted, [scenario])
        assert found is not None, (
            f"{planted.name} is not found by seed {planted.drawn}. Record the seed that"
            f" scripts/simulate --planted {planted.name} --own-scene --schedules 100000 prints: @bug(..., drawn=SEED)"
        )
        assert list(map(str, Simulation(scenario).run().breaches)) == [], "breaches without the bug"


def test_each_planted_bug_has_a_drawn_schedule() -> None:
    assert [planted.name for planted in BUGS if not planted.drawn_seed] == []
    assert [planted.name for planted in BUGS if planted.drawn and not planted.chosen] == [], "first= is enough"


def test_each_chosen_scenario_is_drawn() -> None:
    """Each scene and each choice of faults of the search is drawn by some seeds."""
    chosen = {(planted.shape, planted.focus) for planted in BUGS if planted.chosen}
    assert chosen <= {*((scene, ()) for scene in SCENES), *FOCUSED, *POLICY_SCENES, *REMOVAL_SCENES}


def test_an_error_in_planted_code_is_no_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug passes an argument of a wrong type: neither that error nor its consequences count as a find."""
    outdated = Planted(
        "outdated", lambda patch: give(patch, job_claims, "claimable", by=1.5), ("liveness", "unexpected error")
    )
    with without_logs(), monkeypatch.context() as patch:
        outdated.plant(patch)
        with pytest.raises(AssertionError, match="outdated is outdated: it fails on seed 1: unexpected error"):
            look_for(outdated, [draw_scenario(1)])


def test_another_breach_is_no_find(monkeypatch: pytest.MonkeyPatch) -> None:
    (planted,) = (one for one in BUGS if one.name == "run_completion_before_the_decision_is_written")
    with without_logs(), monkeypatch.context() as patch:
        planted.plant(patch)
        assert look_for(planted, [draw_scenario(1)]) is not None
        assert look_for(replace(planted, expected=("liveness",)), [draw_scenario(1)]) is None


def test_the_search_starts_at_the_recorded_seed_and_omits_none() -> None:
    planted = replace(BUGS[0], first=SEEDS - 1)
    searched = list(seeds(planted))
    assert searched[:FEW] == list(range(SEEDS - 1, SEEDS - 1 + FEW))
    assert sorted(searched) == list(range(1, SEEDS - 1 + FEW)), "each once"


def test_a_long_search_asks_to_record_the_seed_that_it_found() -> None:
    require_recorded("reap", 7, FEW, "@bug(..., first=7)")
    with pytest.raises(AssertionError, match=r"on seed 7, after 21 schedules\. Record 7 as its first seed in @bug"):
        require_recorded("reap", 7, FEW + 1, "@bug(..., first=7)")


def test_planting_requires_the_same_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="claimable takes no patients"):
        give(monkeypatch, job_claims, "claimable", patients=1.0)
    with pytest.raises(TypeError, match="elect takes"):
        substitute(monkeypatch, t, "elect", lambda keys, table, type_name: None)
    with pytest.raises(TypeError, match="is awaited"):
        substitute(monkeypatch, Executor, "_announce_released", lambda self: None)
    with pytest.raises(TypeError, match="coroutine function"):
        wrap(monkeypatch, Executor, "_announce_released", lambda result, given: result)


def test_the_documentation_states_how_many_bugs_are_found() -> None:
    pages = (ROOT / f"docs/internals/{name}.md" for name in ("testing", "architecture"))
    text, other = (" ".join(page.read_text().split()) for page in pages)
    chosen = sum(planted.chosen for planted in BUGS)
    assert f"plants {len(BUGS)} bugs, one at a time." in text
    assert f"{len(BUGS) - chosen} of them in schedules as they are drawn, and {chosen} where faults or jobs are" in text
    assert f"of the simulator's {len(BUGS)} bugs" in other
