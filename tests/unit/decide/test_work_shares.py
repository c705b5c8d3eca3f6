"""How executors divide work: the order in which they may run a suspect."""

from __future__ import annotations

from distop.decide.work_shares import place_for_suspect
from distop.protocol.jobs import Claim

NAMES = ["ann", "ben", "cat"]


def test_the_executor_on_which_a_job_failed_comes_last_for_it() -> None:
    failed = Claim("ann", "", 2, 2)
    places = {name: place_for_suspect(failed, name, [one for one in NAMES if one != name], "job") for name in NAMES}
    assert sorted(places.values()) == [0, 1, 2]
    assert places["ann"] == 2


def test_an_executor_without_others_comes_first_for_a_job_that_failed_on_it() -> None:
    assert place_for_suspect(Claim("ann", "", 2, 2), "ann", [], "job") == 0
