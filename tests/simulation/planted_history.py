"""A planted bug in the history limit: records are deleted by their age according to a wrong clock."""

from __future__ import annotations

from distop.daemon.clock_check import ClockCheck
from tests.simulation.bug_planting import Patch, bug, substitute
from tests.simulation.planted_removals import BUGS, Planted


@bug("record deleted too early", first=2)
def history_deleted_by_a_wrong_clock(patch: Patch) -> None:
    async def agrees(self: ClockCheck) -> bool:
        return True

    substitute(patch, ClockCheck, "agrees", agrees)


__all__ = ["BUGS", "Planted"]
