"""Bugs of limits to be planted: those by which more jobs run at once than may, or none for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distop.core import claiming, permits
from distop.executor.claimer import Claimer
from distop.node.openop import OpenOperation
from distop.testing.simulation import Scenario
from distop.testing.simulation.scenario import Act
from tests.simulation.planted import without
from tests.simulation.planted_waiting import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute, wrap


def few_at_once(wanted: Scenario) -> Scenario:
    """No more than a few jobs of each operation run at once, which somebody changes meanwhile."""
    acts = (Act(0.3, "alter max_jobs=4"), Act(0.3, "alter max_jobs=1"), Act(0.3, "alter max_jobs=3"))
    wishes = tuple(
        replace(wish, acts=acts, rerun="", options={"max_jobs": 2}, arg={**wish.arg, "pace": 0.1})
        for wish in wanted.wishes
    )
    return replace(wanted, wishes=wishes, drains=())


@bug("invariant 16", shape=few_at_once)
def claim_a_permit_without_comparing_it(patch: Patch) -> None:
    wrap(patch, claiming, "claim", lambda txn, _: without(txn, lambda compare: "Permit." in compare.key))


@bug("invariant 16", shape=few_at_once)
def a_lowered_limit_that_forgets_what_runs(patch: Patch) -> None:
    """All permits below the limit may be taken, whatever runs beyond."""
    substitute(patch, permits, "usable_permits", lambda most, held, without: most)


@bug("invariant 16", "liveness", shape=few_at_once)
def a_report_that_keeps_its_permit(patch: Patch) -> None:
    def kept(guarded: claiming.Guarded, _: Any) -> claiming.Guarded:
        return replace(guarded, ops=tuple(op for op in guarded.ops if "Permit." not in getattr(op, "key", "")))

    wrap(patch, claiming, "report", kept)


@bug("invariant 16", shape=few_at_once)
def claim_behind_a_gate_by_the_limit_of_another(patch: Patch) -> None:
    """What a former gate allowed is sent under the one that stands there now."""
    former = Claimer._claim_group

    async def group(self: Claimer, op: Any, gate_mod: int, wants: Any, dead: Any, uncounted: Any, won: Any) -> None:
        await former(self, op, op.gate_mod, wants, dead, uncounted, won)

    def forget(self: OpenOperation, gate_mod: int, gate: Any) -> None:
        self.gate_mod, self.gate = gate_mod, gate
        self.exhausted = self.told_to_stop = False

    substitute(patch, Claimer, "_claim_group", group)
    substitute(patch, OpenOperation, "reopened", forget)


__all__ = ["BUGS", "Planted"]
