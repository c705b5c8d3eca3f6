"""Shrinking: a failing scenario is reduced until no part can be removed without losing the breach, within bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.simulation.bug_search import seeds
from tests.simulation.planted import BUGS
from tests.simulator import Scenario, draw_scenario
from tests.simulator.run import Breach, without_logs
from tests.simulator.shrinking import TRIES, breaches, candidates, fewer, report_lines, shrink

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = next(
    scenario
    for scenario in map(draw_scenario, range(1, 500))
    if min(len(scenario.faults), len(scenario.hosts), len(scenario.submissions), scenario.clients) >= 3
    and scenario.partitions > 5
)
"""A scenario with several hosts, operations, clients and faults."""
SOON = 40
"""Maximum size of a scenario that is shrunk quickly."""


def when(condition: Callable[[Scenario], bool]) -> Callable[[Scenario], list[Breach]]:
    """Reports a breach for each scenario that meets the condition."""
    breach = Breach("invariant 2", 0.0, 0, "", "")
    return lambda scenario: [breach] if condition(scenario) else []


def test_subsets_without_a_part() -> None:
    assert list(fewer("abcd")) == [tuple("cd"), tuple("ab"), tuple("bcd"), tuple("acd"), tuple("abd"), tuple("abc")]
    assert list(fewer("a")) == [()]
    assert list(fewer("")) == []


def test_only_relevant_parts_remain() -> None:
    assert len(LARGE.faults) > 3
    first, last = LARGE.faults[0], LARGE.faults[-1]

    def matters(scenario: Scenario) -> bool:
        kinds = [fault.kind for fault in scenario.faults]
        return first.kind in kinds and last.kind in kinds and scenario.partitions >= 5

    shrunk = shrink(LARGE, breached=when(matters))
    assert shrunk is not None
    assert shrunk.complete
    assert sorted({fault.kind for fault in shrunk.scenario.faults}) == sorted({first.kind, last.kind})
    assert len(shrunk.scenario.faults) == len({first.kind, last.kind})
    assert (shrunk.scenario.partitions, len(shrunk.scenario.submissions)) == (5, 1)
    assert (len(shrunk.scenario.hosts), shrunk.scenario.members, shrunk.scenario.clients) == (1, 1, 1)
    assert shrunk.scenario.calm == max(fault.at + fault.lasts for fault in shrunk.scenario.faults)


def test_the_number_of_tries_is_bounded() -> None:
    shrunk = shrink(LARGE, tries=3, breached=when(lambda scenario: len(scenario.faults) >= len(LARGE.faults)))
    assert shrunk is not None
    assert (shrunk.tries, shrunk.complete) == (3, False)


def test_another_breach_does_not_count() -> None:
    def breached(scenario: Scenario) -> list[Breach]:
        return [Breach("invariant 2" if scenario == LARGE else "liveness", 0.0, 0, "", "")]

    shrunk = shrink(LARGE, breached=breached)
    assert shrunk is not None
    assert (shrunk.scenario, shrunk.kind) == (LARGE, "invariant 2")


def test_a_scenario_without_a_breach_is_not_shrunk() -> None:
    assert shrink(LARGE, breached=lambda scenario: []) is None


@pytest.mark.slow  # CI runs the tests above, without a simulator
@pytest.mark.timeout(180)
def test_the_timeline_of_a_planted_bug_is_of_the_smallest_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    (planted,) = [planted for planted in BUGS if planted.name == "report_without_its_fence"]
    with without_logs(), monkeypatch.context() as patch:
        planted.plant(patch)
        some = map(planted.scenario, seeds(planted))
        found = next(
            scenario for scenario in some if len(scenario.faults) > 1 and _size(scenario) <= SOON and breaches(scenario)
        )
        shrunk = shrink(found)
        assert shrunk is not None
        assert shrunk.tries <= TRIES
        small = shrunk.scenario
        assert _size(small) < _size(found)
        lines = list(report_lines(shrunk, found))
        assert any(line.startswith(shrunk.kind) for line in lines)
        if shrunk.complete:
            fewer_faults = [one for one in candidates(small) if len(one.faults) < len(small.faults)]
            kinds = [{breach.kind for breach in breaches(one)} for one in fewer_faults]
            assert not any(shrunk.kind in some_kinds for some_kinds in kinds), "a fault could be removed"
        assert replace(small, seed=found.seed) == small, "the seed, and so the random draws, differ"


def _size(scenario: Scenario) -> int:
    jobs = sum(int(submission.arg["partitions"]) for submission in scenario.submissions)
    return (
        len(scenario.faults)
        + len(scenario.hosts)
        + jobs
        + sum(len(submission.actions) for submission in scenario.submissions)
    )
