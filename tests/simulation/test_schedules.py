"""Seeded schedules of the production code on the model etcd, with faults: none may have a breach."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import FIGURES
from tests.simulator import Simulation, draw_scenario, protocol_paths
from tests.simulator.many_seeds import Outcome, Tally, run_seeds
from tests.simulator.run import without_logs
from tests.simulator.shrinking import TRIES_AT_ONCE, smallest

ROOT = Path(__file__).resolve().parents[2]
CI_SCHEDULES = 100
"""Number of schedules that ``.ci/run`` runs besides the tests."""
SEEDS = [2_000 + n for n in (26, 27, 28, 38, 42, 44, 46, 47, 48, 49, 50, 54, 55, 61, 103)]
"""Schedules that the tests run: few of forty consecutive seeds, which together take all paths."""

# Prints a hash of the log and the history of each run.
RUN = """
import hashlib, sys
from tests.simulator import Simulation, draw_scenario
from tests.simulator.run import without_logs
with without_logs():
    for seed in map(int, sys.argv[1:]):
        sim = Simulation(draw_scenario(seed))
        sim.run()
        print(seed, hashlib.sha256(repr((sim.log, sim.etcd.store.history)).encode()).hexdigest())
"""


def test_no_schedule_breaches_anything(record_property: Callable[[str, object], None]) -> None:
    tally = Tally()
    tally.outcomes += run_seeds(SEEDS, jobs=1)
    record_property(FIGURES, "\n".join(tally.lines()))
    assert len(tally.outcomes) == len(SEEDS)
    assert not tally.broken, "\n".join(_described(tally.broken))
    covered = ("executors", "elected", "partitions")
    values = {what: sorted(getattr(one, what) for one in tally.outcomes) for what in covered}
    assert values["executors"][len(SEEDS) // 2] >= 3
    assert values["partitions"][len(SEEDS) // 2] >= 12
    assert set(values["executors"]) - {0} == {1, 2, 3, 4, 5}
    assert {1, 2, 3} <= set(values["elected"])
    assert [path for path in protocol_paths.ALL if not any(one.paths[path] for one in tally.outcomes)] == []


FOUND = {
    108_297: "an actor returned its job after the cleanup that ended it",
    111_878: "a cancelled operation was decided without its plan, whose event a watch had lost",
    111_936: "a completion was left to a node that had left, and was never checked again",
    410_115: "an executor woke up and released a job while another executor cleaned up after it",
    717_183: "a job at its attempt limit was reported without a cleanup while its executor's role was revoked",
    6_050: "a hold that changed twice in one batch of a watch ended an executor's session",
    985_743: "(in the simulator) a sender returned after the deletion of its receipt, which was reported as a breach",
    13_925: "an executor started jobs under claims that it was giving back",
    63: "a claim that a coordinator was about to revoke had disappeared from its view",
}
"""Seeds of schedules that once showed a bug, with the bug."""
SERVING_ALL = {108_297, 111_878, 111_936}
"""Seeds whose scenarios were drawn without limits of executors to types or tables at that time."""


@pytest.mark.parametrize("seed", FOUND)
def test_a_schedule_that_once_showed_a_bug_has_no_breach(seed: int) -> None:
    scenario = draw_scenario(seed)
    if seed in SERVING_ALL:
        scenario = replace(scenario, hosts=tuple(replace(h, only_types=None, only_tables=None) for h in scenario.hosts))
    with without_logs():
        report = Simulation(scenario).run()
    assert list(map(str, report.breaches)) == []


def _described(broken: Sequence[Outcome]) -> Iterator[str]:
    """All breaches, and the first scenario in its shrunk form."""
    for outcome in broken:
        yield from (f"seed {outcome.seed}:", *outcome.timelines)
    yield from smallest(draw_scenario(broken[0].seed), TRIES_AT_ONCE)


def test_the_schedules_of_ci_have_all_sizes() -> None:
    """CI runs as many schedules, other ones for each commit."""
    assert f"scripts/simulate --schedules {CI_SCHEDULES} --seed $((" in (ROOT / ".ci/run").read_text()
    drawn = [draw_scenario(seed) for seed in range(1, CI_SCHEDULES + 1)]
    middle = CI_SCHEDULES // 2
    executors = sorted(sum(not host.leaves for host in scenario.hosts) for scenario in drawn)
    partitions = sorted(scenario.partitions for scenario in drawn)
    assert executors[middle] >= 3
    assert partitions[middle] >= 12
    assert (executors[0], executors[-1]) == (1, 5)
    assert partitions[0] < 4
    assert partitions[-1] == 60


def test_a_seed_gives_the_same_run_whatever_the_string_hashes() -> None:
    """Compares two interpreters with different string hashes."""
    runs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", RUN, "7", "8", "35", "59", "61", "91"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].splitlines()) == 6


def test_a_run_can_be_repeated_in_one_process() -> None:
    with without_logs():
        first, second = Simulation(draw_scenario(3)), Simulation(draw_scenario(3))
        first.run()
        second.run()
    assert first.log == second.log


def test_runs_without_faults_end() -> None:
    with without_logs():
        for seed in range(10):
            report = Simulation(draw_scenario(seed, faults=False)).run()
            assert report.breaches == []
            assert report.ended >= 1
