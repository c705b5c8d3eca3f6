"""Bugs that the simulator found, each as the scenario that shows it, whatever the seed makes of the rest."""

from __future__ import annotations

import pytest

from distop.testing.simulation import Scenario, simulate
from distop.testing.simulation.scenario import Fault, Host, Wish


def small(seed: int, hosts: int, wish: Wish, *faults: Fault, slots: int = 2) -> Scenario:
    """Some executors, one operation, no more than these faults."""
    return Scenario(
        seed=seed,
        hosts=tuple(Host(f"exec-{n}", (wish.type,), slots, 0.0) for n in range(hosts)),
        members=1,
        version="3.5.33",
        ttl=4,
        poll=30.0,
        batch=1000,
        fragments=0,
        tables=("a",),
        clients=1,
        wishes=(wish,),
        faults=faults,
        calm=max((fault.at + fault.lasts for fault in faults), default=0.0),
    )


def argument(seed: int, partitions: int, pace: float) -> dict[str, object]:
    return {"seed": seed, "partitions": partitions, "pace": pace, "trouble": 0.0, "chunk": 100_000, "calls": 0.05}


@pytest.mark.parametrize("seed", range(30))
def test_a_cancelled_operation_is_decided_by_all_jobs_that_ended(seed: int) -> None:
    """One job failed, so the others were told to stop. The claims were seen to be gone, and the state of the last job,
    of which another watch tells, was not yet seen: decision and history counted one job too few.
    """
    wish = Wish(0, 0.5, "check", "a", {**argument(seed, 40, 0.1), "trouble": 1.0}, None, "fail_fast", ())
    assert simulate(seed, wanted=small(seed, 3, wish, slots=20)).breaches == []


@pytest.mark.parametrize("seed", range(12))
def test_nobody_cleans_up_after_a_holder_that_only_is_not_seen_yet(seed: int) -> None:
    """An executor began while another one's watch was silent. To that one the new holder of a job seemed to be gone,
    and where a lost job fails it was cleaned up after, before the transaction that would have told.
    """
    silent = Fault("one-way", 0.6, 9.0, (0.8, 0.9, 0.9, 0.6))  # exec-1 hears nothing from its watches
    restart = Fault("crash", 0.7, 0.2, (0.0, 0.0, 0.0, 0.0))  # exec-0, as a new incarnation
    wish = Wish(0, 0.3, "lone", "a", argument(seed, 40, 0.3), None, "collect_all", ())
    assert simulate(seed, wanted=small(seed, 2, wish, silent, restart)).breaches == []
