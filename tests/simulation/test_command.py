"""``scripts/simulate``: what it prints of a failing seed, and when it fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulate

from tests.simulation.planted import BUGS
from tests.simulator import scenario
from tests.simulator.breach_story import replay
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
    assert out.endswith("s, and was to take 0 s at most\n")


def test_the_first_seed_that_fails_is_made_smaller_there_and_then(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    EARLY.plant(monkeypatch)
    assert simulate.main(["--schedules", "3", "--jobs", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (small,) = (n for n, line in enumerate(lines) if line.startswith("the smallest scenario after "))
    seeds = [n for n, line in enumerate(lines) if line.startswith("seed ")]
    assert lines[seeds[0]] == "seed 1:"
    assert seeds[0] < small < seeds[1], "it is told after the first and before the next one"
    after = lines[small : seeds[1]]
    assert any(line.startswith("completion before decision at ") for line in after)
    assert after[-1] == "  replay: scripts/simulate --replay 1"


def test_a_replay_is_told_only_of_what_a_seed_stands_for() -> None:
    drawn = scenario(5)
    assert replay(drawn) == "scripts/simulate --replay 5"
    assert replay(replace(drawn, ttl=drawn.ttl + 1)) == ""
    assert replay(scenario(5, focus=("cut",))) == ""


def test_the_story_of_a_scenario_made_by_hand_tells_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    EARLY.plant(monkeypatch)
    told = smallest(replace(scenario(1), ttl=5), tries=3)
    assert told
    assert not any("--replay" in line for line in told)


def test_planted_bugs_are_looked_for_where_nothing_is_chosen(capsys: Printed) -> None:
    names = [EARLY.name, "drop_the_election_compare"]
    assert simulate.main(["--schedules", "1", "--jobs", "1", "--planted", *names]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "1 of 2 are found in the schedules 1 to 1",
        "drop_the_election_compare: needs chosen faults or scenarios",
        f"{EARLY.name}: completion before decision, seed 1",
    ]
    assert simulate.main(["--schedules", "1", "--jobs", "1", "--planted", "report_without_its_fence"]) == 1
