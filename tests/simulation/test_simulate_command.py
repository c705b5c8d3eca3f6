"""``scripts/simulate``: its output for failing seeds, and its exit codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulate

from tests.simulation.bug_search import BUGS, draws_its_scene
from tests.simulator import draw_scenario
from tests.simulator.breach_timeline import replay
from tests.simulator.shrinking import smallest

Printed = pytest.CaptureFixture[str]


(EARLY,) = (planted for planted in BUGS if planted.name == "run_completion_before_the_decision_is_written")
"""A bug that the first schedule shows."""


def test_schedules_without_a_breach(capsys: Printed) -> None:
    assert simulate.main(["--schedules", "2", "--jobs", "1", "--within", "1e9"]) == 0
    assert capsys.readouterr().out.startswith("2 schedules in ")


def test_schedules_that_take_too_long_fail(capsys: Printed) -> None:
    assert simulate.main(["--schedules", "2", "--jobs", "1", "--within", "0"]) == 1
    out = capsys.readouterr().out
    assert "seeds with a breach: 0" in out
    assert out.endswith("s, more than the limit of 0 s\n")


def test_the_first_failing_seed_is_shrunk_at_once(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    EARLY.plant(monkeypatch)
    assert simulate.main(["--schedules", "3", "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (small,) = (n for n, line in enumerate(lines) if line.startswith("the smallest scenario with "))
    seeds = [n for n, line in enumerate(lines) if line.startswith("seed ")]
    assert lines[seeds[0]] == "seed 1:"
    assert seeds[0] < small < seeds[1], "it is not printed between the first and the second failing seed"
    after = lines[small : seeds[1]]
    assert any(line.startswith("completion before decision at ") for line in after)
    assert after[-1] == "  replay: scripts/simulate --replay 1"


def test_only_the_scenario_of_a_seed_has_a_replay_command() -> None:
    drawn = draw_scenario(5)
    assert replay(drawn) == "scripts/simulate --replay 5"
    assert replay(replace(drawn, ttl=drawn.ttl + 1)) == ""
    assert replay(draw_scenario(5, focus=("cut",))) == ""


def test_the_timeline_of_another_scenario_has_no_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    EARLY.plant(monkeypatch)
    lines = smallest(replace(draw_scenario(1), ttl=5), tries=3)
    assert lines
    assert not any("--replay" in line for line in lines)


def test_planted_bugs_are_searched_in_freely_drawn_schedules(capsys: Printed) -> None:
    search = ["--schedules", "1", "--jobs", "1", "--planted", EARLY.name]
    assert simulate.main(search) == 0
    found = f"{EARLY.name}: completion before decision, seed 1"
    assert capsys.readouterr().out.splitlines() == [found, "found 1 of 1 bugs in schedules 1 to 1"]


@pytest.mark.parametrize("name", ["report_without_its_fence", "drop_the_election_compare"])
def test_a_planted_bug_that_is_not_found_fails_the_search(capsys: Printed, name: str) -> None:
    """The second one is usually searched for with faults that are chosen for it."""
    (planted,) = (one for one in BUGS if one.name == name)
    assert simulate.main(["--schedules", "1", "--jobs", "1", "--planted", EARLY.name, name]) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        (
            f"{EARLY.name}: completion before decision, seed 1",
            f"{name}: not found (recorded seed: {planted.drawn_seed})",
            "found 1 of 2 bugs in schedules 1 to 1",
        )
    )


def test_a_search_in_the_scene_of_a_planted_bug_runs_only_its_schedules(capsys: Printed) -> None:
    (planted,) = (one for one in BUGS if one.name == "a_second_pause_that_loses_progress")
    seed = planted.drawn_seed
    search = ["--jobs", "1", "--own-scene", "--planted", planted.name, "--seed"]
    assert simulate.main([*search, str(seed), "--schedules", "1"]) == 0
    assert f"{planted.name}: checkpoint lost, seed {seed}\n" in capsys.readouterr().out
    others = next(n for n in range(1, 99) if not any(draws_its_scene(planted, n + more) for more in range(9)))
    assert simulate.main([*search, str(others), "--schedules", "9"]) == 1
