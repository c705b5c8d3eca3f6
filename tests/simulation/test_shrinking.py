"""What fails is made smaller: until nothing can be left out without the breach going away, and within bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.simulation.planted import BUGS
from tests.simulation.searching import seeds
from tests.simulator import Scenario, scenario
from tests.simulator.run import Breach, quietly
from tests.simulator.shrinking import TRIES, breaches, candidates, fewer, shrink, tell

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = next(
    wanted
    for wanted in map(scenario, range(1, 500))
    if min(len(wanted.faults), len(wanted.hosts), len(wanted.wishes), wanted.clients) >= 3 and wanted.partitions > 5
)
"""Of several hosts, operations, clients and faults."""
SOON = 40
"""Of a size that is soon made smaller."""


def when(condition: Callable[[Scenario], bool]) -> Callable[[Scenario], list[Breach]]:
    """A breach in each scenario of which this holds."""
    breach = Breach("invariant 2", 0.0, 0, "", "")
    return lambda wanted: [breach] if condition(wanted) else []


def test_what_is_left_out() -> None:
    assert list(fewer("abcd")) == [tuple("cd"), tuple("ab"), tuple("bcd"), tuple("acd"), tuple("abd"), tuple("abc")]
    assert list(fewer("a")) == [()]
    assert list(fewer("")) == []


def test_only_what_matters_is_left() -> None:
    assert len(LARGE.faults) > 3
    first, last = LARGE.faults[0], LARGE.faults[-1]

    def matters(wanted: Scenario) -> bool:
        kinds = [fault.kind for fault in wanted.faults]
        return first.kind in kinds and last.kind in kinds and wanted.partitions >= 5

    shrunk = shrink(LARGE, breached=when(matters))
    assert shrunk is not None
    assert shrunk.complete
    assert sorted({fault.kind for fault in shrunk.scenario.faults}) == sorted({first.kind, last.kind})
    assert len(shrunk.scenario.faults) == len({first.kind, last.kind})
    assert (shrunk.scenario.partitions, len(shrunk.scenario.wishes)) == (5, 1)
    assert (len(shrunk.scenario.hosts), shrunk.scenario.members, shrunk.scenario.clients) == (1, 1, 1)
    assert shrunk.scenario.calm == max(fault.at + fault.lasts for fault in shrunk.scenario.faults)


def test_the_number_of_tries_is_bounded() -> None:
    shrunk = shrink(LARGE, tries=3, breached=when(lambda wanted: len(wanted.faults) >= len(LARGE.faults)))
    assert shrunk is not None
    assert (shrunk.tries, shrunk.complete) == (3, False)


def test_another_breach_does_not_count() -> None:
    def breached(wanted: Scenario) -> list[Breach]:
        return [Breach("invariant 2" if wanted == LARGE else "liveness", 0.0, 0, "", "")]

    shrunk = shrink(LARGE, breached=breached)
    assert shrunk is not None
    assert (shrunk.scenario, shrunk.kind) == (LARGE, "invariant 2")


def test_what_breaches_nothing_is_not_made_smaller() -> None:
    assert shrink(LARGE, breached=lambda wanted: []) is None


@pytest.mark.slow  # at each change: without a simulator, above
@pytest.mark.timeout(180)
def test_the_story_of_a_planted_bug_is_of_the_smallest_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    (planted,) = [planted for planted in BUGS if planted.name == "report_without_its_fence"]
    with quietly(), monkeypatch.context() as patch:
        planted.plant(patch)
        some = map(planted.scenario, seeds(planted))
        found = next(wanted for wanted in some if len(wanted.faults) > 1 and _size(wanted) <= SOON and breaches(wanted))
        shrunk = shrink(found)
        assert shrunk is not None
        assert shrunk.tries <= TRIES
        small = shrunk.scenario
        assert _size(small) < _size(found)
        story = list(tell(shrunk, found))
        assert any(line.startswith(shrunk.kind) for line in story)
        if shrunk.complete:
            fewer_faults = [one for one in candidates(small) if len(one.faults) < len(small.faults)]
            kinds = [{breach.kind for breach in breaches(one)} for one in fewer_faults]
            assert not any(shrunk.kind in some_kinds for some_kinds in kinds), "a fault could be left out"
        assert replace(small, seed=found.seed) == small, "it is the same seed, so chance is the same"


def _size(wanted: Scenario) -> int:
    jobs = sum(int(wish.arg["partitions"]) for wish in wanted.wishes)
    return len(wanted.faults) + len(wanted.hosts) + jobs + sum(len(wish.acts) for wish in wanted.wishes)
