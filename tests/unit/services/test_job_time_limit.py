"""The time limit of a job: accepted values, and the record that contains it."""

from __future__ import annotations

from typing import Any

import pytest

from distop.errors import InvalidArgument
from distop.protocol.behavior_declaration import Declaration, Rules, shortest
from distop.services.submission.insertion import make_spec, object_of
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import request


def wanted(**options: Any) -> Any:
    return request("copy", "t", b"{}", StartOptions(partitions=["a"], **options), "me")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "60", True, 10**400])
def test_an_invalid_time_limit_is_refused_in_one_sentence(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="the time limit of a job must be a number of seconds above 0"):
        wanted(time_limit=value)


def test_the_smaller_time_limit_of_a_start_and_of_its_behavior_is_recorded() -> None:
    declared = Declaration("copy", time_limit=60.0)
    assert Declaration.decode(declared.encode()) == declared
    assert make_spec(wanted(), declared, None).rules.time_limit == 60.0
    assert make_spec(wanted(time_limit=61), declared, None).rules.time_limit == 60.0
    assert make_spec(wanted(time_limit=61), Declaration("copy"), None).rules.time_limit == 61.0
    rules = make_spec(wanted(time_limit=5), declared, None).rules
    assert Rules.from_json(rules.to_json()).time_limit == 5.0
    assert "time_limit" not in Rules().to_json()


def test_of_several_time_limits_the_shortest_holds_and_none_below_0() -> None:
    assert shortest(60.0, 5.0) == 5.0
    assert shortest(0.0, 60.0) == shortest(-5.0, 60.0) == 60.0
    assert shortest(0.0) == 0.0


@pytest.mark.parametrize("given", [{"max_jobs": 1}, {"max_jobs_per_executor": 2}, {"where": {"zone": "a"}}])
def test_a_type_without_code_takes_no_limits_and_no_labels(given: dict[str, Any]) -> None:
    """Nobody would own its jobs."""
    plain = Declaration("copy", code=False)
    with pytest.raises(InvalidArgument, match=f"copy has no code .*: leave out {next(iter(given))}$"):
        object_of(plain, wanted(**given))
    object_of(plain, wanted(max_jobs=0, max_jobs_per_executor=0, where={}, priority=3, max_failed="5%"))
    object_of(Declaration("copy"), wanted(**given))


def test_a_type_without_code_takes_no_time_limit() -> None:
    with pytest.raises(InvalidArgument, match="no time limit"):
        object_of(Declaration("copy", code=False), wanted(time_limit=5))
