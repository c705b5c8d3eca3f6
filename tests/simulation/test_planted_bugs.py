"""Each planted bug is found by the simulator, by its own effect, on schedules on which the code as it is breaches
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from distop.daemon.executor.executor_role import Executor
from distop.decide import next_steps
from distop.protocol import operation_transitions as t
from tests.conftest import FIGURES
from tests.simulation.planted_history import BUGS, Planted
from tests.simulation.planting import give, substitute, wrap
from tests.simulation.searching import FEW, SEEDS, look_for, require_recorded, seeds
from tests.simulator import Simulation, scenario
from tests.simulator.run import quietly

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
    with quietly():
        with monkeypatch.context() as patch:
            planted.plant(patch)
            found = look_for(planted, map(planted.scenario, seeds(planted)))
        assert found is not None, f"{planted.name} was not found in {SEEDS} schedules"
        of = "scenarios chosen for it" if planted.chosen else "schedules"
        record_property(FIGURES, f"{found}, after {found.looked} {of}")
        without = Simulation(planted.scenario(found.seed)).run().breaches
        assert list(map(str, without)) == [], "and these are breached without it"
    require_recorded(planted.name, found.seed, found.looked, f"@bug(..., first={found.seed})")


def test_what_fails_by_itself_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that gives for one argument what another one was: that error is no find, nor is what comes of it."""
    rotten = Planted(
        "rotten", lambda patch: give(patch, next_steps, "claimable", homes=1.5), ("liveness", "unexpected error")
    )
    with quietly(), monkeypatch.context() as patch:
        rotten.plant(patch)
        with pytest.raises(AssertionError, match="rotten fails by itself, on seed 1: unexpected error"):
            look_for(rotten, [scenario(1)])


def test_another_breach_is_no_find(monkeypatch: pytest.MonkeyPatch) -> None:
    (planted,) = (one for one in BUGS if one.name == "run_completion_before_the_decision_is_written")
    with quietly(), monkeypatch.context() as patch:
        planted.plant(patch)
        assert look_for(planted, [scenario(1)]) is not None
        assert look_for(replace(planted, expected=("liveness",)), [scenario(1)]) is None


def test_the_search_begins_where_it_is_told_and_leaves_none_out() -> None:
    planted = replace(BUGS[0], first=1_999)
    assert list(islice(seeds(planted), 3)) == [1_999, 2_000, 1]
    assert sorted(seeds(planted)) == list(range(1, SEEDS + 1))


def test_a_long_search_asks_to_record_the_seed_that_it_found() -> None:
    require_recorded("reap", 7, FEW, "@bug(..., first=7)")
    with pytest.raises(AssertionError, match=r"on seed 7, after 21 schedules\. Record 7 as its first seed in @bug"):
        require_recorded("reap", 7, FEW + 1, "@bug(..., first=7)")


def test_what_has_another_signature_is_not_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="claimable takes no patients"):
        give(monkeypatch, next_steps, "claimable", patients=1.0)
    with pytest.raises(TypeError, match="elect takes"):
        substitute(monkeypatch, t, "elect", lambda keys, table, type_name: None)
    with pytest.raises(TypeError, match="is awaited"):
        substitute(monkeypatch, Executor, "_tell", lambda self: None)
    with pytest.raises(TypeError, match="coroutine function"):
        wrap(monkeypatch, Executor, "_tell", lambda result, given: result)


def test_the_documentation_tells_how_many_are_found() -> None:
    pages = (ROOT / f"docs/internals/{name}.md" for name in ("testing", "architecture"))
    text, other = (" ".join(page.read_text().split()) for page in pages)
    chosen = sum(planted.chosen for planted in BUGS)
    assert f"plants {len(BUGS)} bugs, one at a time." in text
    assert f"{len(BUGS) - chosen} of them in schedules as they are drawn, and {chosen} where faults or jobs are" in text
    assert f"of the simulator's {len(BUGS)} bugs" in other
