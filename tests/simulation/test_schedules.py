"""Seeded schedules of the production code on the model etcd, with faults: none may breach anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import FIGURES
from tests.simulator import Simulation, protocol_courses, scenario
from tests.simulator.many_seeds import Outcome, Tally, many
from tests.simulator.run import quietly
from tests.simulator.shrinking import TRIES_AT_ONCE, smallest

ROOT = Path(__file__).resolve().parents[2]
CI_SCHEDULES = 150
"""Schedules that ``.ci/run`` runs beside the tests, from seed 1 on."""
SEEDS = [2_000 + n for n in (26, 27, 28, 38, 42, 44, 46, 47, 48, 49, 50, 54, 55, 61, 103)]
"""Others, which all who run the tests run: of forty in a row, few that take every course there is."""

# The log of a run with all that happened, in one line.
STORY = """
import hashlib, sys
from tests.simulator import Simulation, scenario
from tests.simulator.run import quietly
with quietly():
    for seed in map(int, sys.argv[1:]):
        sim = Simulation(scenario(seed))
        sim.run()
        print(seed, hashlib.sha256(repr((sim.log, sim.etcd.store.history)).encode()).hexdigest())
"""


def test_no_schedule_breaches_anything(record_property: Callable[[str, object], None]) -> None:
    tally = Tally()
    tally.outcomes += many(SEEDS, jobs=1)
    record_property(FIGURES, "\n".join(tally.lines()))
    assert len(tally.outcomes) == len(SEEDS)
    assert not tally.broken, "\n".join(_told(tally.broken))
    covered = ("executors", "elected", "partitions")
    values = {what: sorted(getattr(one, what) for one in tally.outcomes) for what in covered}
    assert values["executors"][len(SEEDS) // 2] >= 3
    assert values["partitions"][len(SEEDS) // 2] >= 12
    assert set(values["executors"]) - {0} == {1, 2, 3, 4, 5}
    assert {1, 2, 3} <= set(values["elected"])
    assert [course for course in protocol_courses.ALL if not any(one.courses[course] for one in tally.outcomes)] == []


FOUND = {
    108_297: "an actor gave its job back after the cleanup that was to end it",
    111_878: "a cancelled operation was decided without its plan, whose event a watch had lost",
    111_936: "a completion was left to a node that was gone by then, and never looked at again",
    410_115: "who woke up gave a job back while another executor cleaned up after it",
    717_183: "a job at its limit was reported, and not cleaned up after, while its executor's role was revoked",
    6_050: "a hold that changed twice in one batch of a watch ended an executor's session",
    985_743: "(of the simulator) a sender came back when its receipt was forgotten, and that was taken for a fault",
    63: "a claim that a coordinator was to revoke had gone from its view meanwhile",
}
"""Schedules that showed a bug once, with what it was."""
SERVING_ALL = {108_297, 111_878, 111_936}
"""As they were drawn then, no executor was limited to types or tables."""


@pytest.mark.parametrize("seed", FOUND)
def test_a_schedule_that_showed_a_bug_shows_none_any_more(seed: int) -> None:
    wanted = scenario(seed)
    if seed in SERVING_ALL:
        wanted = replace(wanted, hosts=tuple(replace(h, only_types=None, only_tables=None) for h in wanted.hosts))
    with quietly():
        report = Simulation(wanted).run()
    assert list(map(str, report.breaches)) == []


def _told(broken: Sequence[Outcome]) -> Iterator[str]:
    """All of them, and the first as small as it can be made."""
    for outcome in broken:
        yield from (f"seed {outcome.seed}:", *outcome.stories)
    yield from smallest(scenario(broken[0].seed), TRIES_AT_ONCE)


def test_the_schedules_of_ci_are_of_all_sizes() -> None:
    """As many as .ci/run runs, which are others for each commit."""
    assert f"scripts/simulate --schedules {CI_SCHEDULES} --seed $((" in (ROOT / ".ci/run").read_text()
    drawn = [scenario(seed) for seed in range(1, CI_SCHEDULES + 1)]
    middle = CI_SCHEDULES // 2
    executors = sorted(sum(not host.leaves for host in wanted.hosts) for wanted in drawn)
    partitions = sorted(wanted.partitions for wanted in drawn)
    assert executors[middle] >= 3
    assert partitions[middle] >= 12
    assert (executors[0], executors[-1]) == (1, 5)
    assert partitions[0] < 4
    assert partitions[-1] == 60


def test_the_same_seed_gives_the_same_story_whatever_the_hashes() -> None:
    """Two interpreters, whose strings hash differently."""
    stories = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", STORY, "7", "8", "35", "59", "61", "91"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert len(stories[0].splitlines()) == 6


def test_a_run_can_be_repeated_in_one_process() -> None:
    with quietly():
        first, second = Simulation(scenario(3)), Simulation(scenario(3))
        first.run()
        second.run()
    assert first.log == second.log


def test_without_faults_all_ends_soon() -> None:
    with quietly():
        for seed in range(10):
            report = Simulation(scenario(seed, faults=False)).run()
            assert report.breaches == []
            assert report.ended >= 1
