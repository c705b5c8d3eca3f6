"""Bugs that the simulator found, each with the schedules that showed it."""

from __future__ import annotations

import pytest

from distop.testing.simulation import simulate


@pytest.mark.parametrize("seed", [32, 40, 56, 130, 166, 189, 235])
def test_a_cancelled_operation_is_decided_by_all_jobs_that_ended(seed: int) -> None:
    """The claims were seen to be gone, and the state of the last job, of which another watch tells, was not yet seen:
    decision and history counted one job too few.
    """
    assert simulate(seed).breaches == []
