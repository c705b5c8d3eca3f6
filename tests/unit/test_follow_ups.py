"""For how long a coordinator retries a refused follow-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distop.clock import source
from distop.coordinator.ending import FOLLOW_UP_TIME, Ending
from distop.core import transitions as t
from distop.core.keys import Keys
from distop.core.limits import DEFAULT
from distop.core.model import OperationRef
from tests.support.clock import StandingClock

REF = OperationRef("t", "noop", "", 1)


class HoursAhead(StandingClock):
    """Its wall clock is wrong by hours."""

    def time(self) -> float:  # type: ignore[override]
        return self.now + 7200.0


async def test_a_wrong_wall_clock_gives_up_no_follow_up_at_once() -> None:
    clock, keys = HoursAhead(), Keys()
    ctx: Any = SimpleNamespace(client=None, keys=keys, log=None, limits=DEFAULT, lost=None, rejected_writes=None)
    reset = source.set(clock)
    try:
        ending = Ending(ctx, t.election_guard(keys, "t", "noop", 1), None, None, None)  # type: ignore[arg-type]
        pauses = [ending._try_again(REF)]
        while pauses[-1]:
            clock.now += pauses[-1]
            pauses.append(ending._try_again(REF))
        assert FOLLOW_UP_TIME <= clock.now < FOLLOW_UP_TIME + 61.0
        assert pauses[:-1] == sorted(pauses[:-1]), "the longer the later"
        ending.keep(())
        assert not ending._refused, "what is gone takes no memory"
    finally:
        source.reset(reset)
