"""Limits in whole schedules: courses that the simulator found, each as a test of its own, and that it draws them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distop.protocol.jobs import Claim
from distop.protocol.size_limits import Limits
from tests.simulator import Scenario, Simulation, scenario
from tests.simulator.drawn_options import altered
from tests.simulator.scenario import Act, Fault, Host, Wish, plain


def wish(
    trouble: float = 0.0, jobs: int = 6, kind: str = "check", acts: tuple[Act, ...] = (), **options: object
) -> Wish:
    arg = {"seed": 5, "partitions": jobs, "pace": 0.1, "calls": 0.05, "trouble": trouble, "chunk": 200}
    return Wish(0, 0.3, kind, "a", arg, None, "collect_all", acts, options=options)


def breaches(wanted: Scenario) -> list[str]:
    return list(map(str, Simulation(wanted).run().breaches))


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_job_that_is_to_run_alone_and_has_the_last_permit_does_run(seed: int) -> None:
    """Its executor is lost at its last but one attempt: nobody else may have its permit, and a backlog is there."""
    crash = Fault("crash", 0.8 + 0.12 * seed, 0.8, (0.1, 0.9, 0.5, 0.8))
    wanted = plain(seed, 1, (wish(trouble=1.0, max_jobs=1),), crash, ttl=2)
    assert breaches(wanted) == []


@pytest.mark.parametrize("gone", [0, 1])
def test_L35_lost_claims_that_no_claim_compares_do_not_block_a_lowered_limit(gone: int) -> None:
    """They counted as live until somebody took them over, and left no permit for that: nothing moved any more.

    Six jobs run when the limit becomes one, and all executors die.
    """
    slow = replace(wish(jobs=8, acts=(Act(1.0, "alter max_jobs=1"),)), options={})
    slow = replace(slow, arg={**slow.arg, "pace": 2.0})
    crashes = (Fault("crash", 2.5, 1.0, (aim, 0.0, 0.0, 0.0)) for aim in (0.1, 0.5, 0.9))
    report = Simulation(replace(plain(1, 3, (slow,), *crashes, ttl=2), limits=Limits(gone=gone))).run()
    assert list(map(str, report.breaches)) == []
    assert report.courses["revoked within a limit"] > 0


@pytest.mark.parametrize("seed", [1190])
def test_a_command_whose_operation_ends_meanwhile_is_told_so(seed: int) -> None:
    """It had been read as paused, and its records were gone when they were read."""
    assert breaches(scenario(seed)) == []


@pytest.mark.parametrize("seed", range(1, 5))
def test_operations_for_different_labels_are_coordinated_in_turn(seed: int) -> None:
    wishes = tuple(wish(where={"zone": zone}, priority=n) for n, zone in enumerate("abab"))
    wanted = plain(seed, 2, wishes)
    hosts = tuple(replace(host, labels={"zone": zone}) for host, zone in zip(wanted.hosts, "ab", strict=True))
    sim = Simulation(replace(wanted, hosts=hosts))
    assert list(map(str, sim.run().breaches)) == []
    assert set(sim.told.ended.values()) == {"success"}


def test_limits_are_drawn_with_all_that_belongs_to_them() -> None:
    drawn = [scenario(seed) for seed in range(1, 301)]
    wishes = [one for wanted in drawn for one in wanted.wishes if one.options]
    assert {name for one in wishes for name in one.options} == {
        *("priority", "max_jobs", "max_jobs_per_executor", "max_failed", "where")
    }
    acts = [act.what for one in wishes for act in one.acts if act.what.startswith("alter ")]
    assert {name for what in acts for name in altered(what)} == {
        *("priority", "max_jobs", "max_jobs_per_executor", "max_failed")
    }
    assert Host("exec-0", (), 1, 0.0).labels == {}
    assert Claim("e", "i", 1, 0).permit < 0
