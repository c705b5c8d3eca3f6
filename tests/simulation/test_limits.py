"""Limits in schedules: bugs that the simulator found, each as a test, and that scenarios draw all limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distop.protocol.jobs import Claim
from distop.protocol.size_limits import Limits
from tests.simulator import Scenario, Simulation, draw_scenario
from tests.simulator.drawn_options import parse_alter
from tests.simulator.scenario import Action, Fault, Host, Submission, plain


def submission(
    trouble: float = 0.0, jobs: int = 6, kind: str = "check", actions: tuple[Action, ...] = (), **options: object
) -> Submission:
    arg = {"seed": 5, "partitions": jobs, "pace": 0.1, "calls": 0.05, "trouble": trouble, "chunk": 200}
    return Submission(0, 0.3, kind, "a", arg, None, "collect_all", actions, options=options)


def breaches(scenario: Scenario) -> list[str]:
    return list(map(str, Simulation(scenario).run().breaches))


@pytest.mark.parametrize("seed", range(1, 9))
def test_an_exclusive_job_with_the_last_permit_runs(seed: int) -> None:
    """Its executor is lost at the last but one attempt; its permit must not go to another job of the backlog."""
    crash = Fault("crash", 0.8 + 0.12 * seed, 0.8, (0.1, 0.9, 0.5, 0.8))
    scenario = plain(seed, 1, (submission(trouble=1.0, max_jobs=1),), crash, ttl=2)
    assert breaches(scenario) == []


@pytest.mark.parametrize("gone", [0, 1])
def test_L35_lost_claims_that_no_claim_compares_do_not_block_a_lowered_limit(gone: int) -> None:
    """Lost claims counted as running until a take-over, for which they left no permit: the operation hung.

    Six jobs run when the limit becomes one, and all executors die.
    """
    slow = replace(submission(jobs=8, actions=(Action(1.0, "alter max_jobs=1"),)), options={})
    slow = replace(slow, arg={**slow.arg, "pace": 2.0})
    crashes = (Fault("crash", 2.5, 1.0, (aim, 0.0, 0.0, 0.0)) for aim in (0.1, 0.5, 0.9))
    report = Simulation(replace(plain(1, 3, (slow,), *crashes, ttl=2), limits=Limits(gone=gone))).run()
    assert list(map(str, report.breaches)) == []
    assert report.paths["revocation within a limit"] > 0


@pytest.mark.parametrize("seed", [1190])
def test_a_command_on_an_operation_that_ends_meanwhile_causes_no_breach(seed: int) -> None:
    """It was read as paused, but its records had been deleted when they were read."""
    assert breaches(draw_scenario(seed)) == []


@pytest.mark.parametrize("seed", range(1, 5))
def test_operations_for_different_labels_are_coordinated_in_turn(seed: int) -> None:
    submissions = tuple(submission(where={"zone": zone}, priority=n) for n, zone in enumerate("abab"))
    scenario = plain(seed, 2, submissions)
    hosts = tuple(replace(host, labels={"zone": zone}) for host, zone in zip(scenario.hosts, "ab", strict=True))
    sim = Simulation(replace(scenario, hosts=hosts))
    assert list(map(str, sim.run().breaches)) == []
    assert set(sim.answers.ended.values()) == {"success"}


def test_seeds_draw_all_options_of_limits() -> None:
    drawn = [draw_scenario(seed) for seed in range(1, 301)]
    submissions = [one for scenario in drawn for one in scenario.submissions if one.options]
    assert {name for one in submissions for name in one.options} == {
        *("priority", "max_jobs", "max_jobs_per_executor", "max_failed", "where")
    }
    actions = [action.what for one in submissions for action in one.actions if action.what.startswith("alter ")]
    assert {name for what in actions for name in parse_alter(what)} == {
        *("priority", "max_jobs", "max_jobs_per_executor", "max_failed")
    }
    assert Host("exec-0", (), 1, 0.0).labels == {}
    assert Claim("e", "i", 1, 0).permit < 0
