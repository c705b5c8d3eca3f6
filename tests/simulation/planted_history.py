"""A bug in how the history is bounded: records are deleted by the age that a wrong clock gives them."""

from __future__ import annotations

from distop.daemon.clock_check import ClockCheck
from tests.simulation.planted_progress import BUGS, Planted
from tests.simulation.planting import Patch, bug, substitute


@bug("forgotten", first=2)
def history_is_deleted_by_a_clock_that_is_wrong(patch: Patch) -> None:
    async def agrees(self: ClockCheck) -> bool:
        return True

    substitute(patch, ClockCheck, "agrees", agrees)


__all__ = ["BUGS", "Planted"]
