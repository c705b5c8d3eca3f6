"""How executors divide work: the order in which they may run a suspect."""

from __future__ import annotations

from distop.decide.work_shares import LONGEST_RUN, block_size, place_for_suspect, shares
from distop.protocol.jobs import Claim

NAMES = ["ann", "ben", "cat"]


def test_the_executor_on_which_a_job_failed_comes_last_for_it() -> None:
    failed = Claim("ann", "", 2, 2)
    places = {name: place_for_suspect(failed, name, [one for one in NAMES if one != name], "job") for name in NAMES}
    assert sorted(places.values()) == [0, 1, 2]
    assert places["ann"] == 2


def test_an_executor_without_others_comes_first_for_a_job_that_failed_on_it() -> None:
    assert place_for_suspect(Claim("ann", "", 2, 2), "ann", [], "job") == 0


def test_F21_a_thousand_executors_divide_a_hundred_thousand_partitions() -> None:
    """Three of them: computing the shares of all would take minutes."""
    names, jobs = [f"e{n:03}" for n in range(1_000)], 100_000
    dealt = [shares(jobs, name, [one for one in names if one != name], "op") for name in (names[0], "e500", names[-1])]
    own = [set(ordered[:mine]) for ordered, mine in dealt]
    assert len(set.union(*own)) == sum(map(len, own)), "nobody shares a partition"
    assert all(abs(len(one) - jobs // len(names)) <= LONGEST_RUN for one in own)
    assert all(len(set(ordered)) == jobs for ordered, _ in dealt), "each takes over what others leave"
    assert block_size(jobs, len(own[0]), len(names), batch=True, free_slots=2, limit=jobs) == len(own[0])
