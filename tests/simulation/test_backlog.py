"""The invariants of executors' backlogs hold after each event, in schedules with faults."""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import TYPE_CHECKING, Any

from distop.decide.backlog import Backlog
from tests.simulator import Simulation, draw_scenario
from tests.simulator.run import without_logs

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SEEDS = range(9_100, 9_112)
EVENTS = ("changed", "next", "looked", "round_over", "settled", "failed", "hint", "nodes_changed", "ran")
"""The checked events. ``claimed`` is none: until the end of its round, slots are counted twice."""


def test_the_invariants_hold_after_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()

    def checked(name: str, former: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(former)
        def event(self: Backlog, *args: Any, **given: Any) -> Any:
            seen[name] += 1
            found = former(self, *args, **given)
            self.check_invariants()
            return found

        return event

    for name in EVENTS:
        monkeypatch.setattr(Backlog, name, checked(name, getattr(Backlog, name)))
    with without_logs():
        reports = [Simulation(draw_scenario(seed)).run() for seed in SEEDS]
    assert [report.breaches for report in reports] == [[]] * len(SEEDS)
    assert set(seen) >= set(EVENTS) - {"failed"}
