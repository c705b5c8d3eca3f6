"""Virtual time for code that waits: a wait of any length takes no time."""

from __future__ import annotations

import contextvars
import random
from typing import TYPE_CHECKING, TypeVar

from distop.clock import source
from distop.testing.simulation.loop import Process, VirtualLoop
from distop.testing.simulation.source import SimSource

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

T = TypeVar("T")


class VirtualTime:
    """An event loop in virtual time, which the clocks of distop follow."""

    def __init__(self) -> None:
        chance = random.Random(1)
        self.loop: Any = VirtualLoop(chance)  # type: ignore[abstract]
        self._context = contextvars.copy_context()
        self._context.run(source.set, SimSource(self.loop, chance))

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        seconds: float = self.loop.now
        return seconds

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], *, limit: float = 3600.0) -> T:
        """Run this to its end, in at most ``limit`` virtual seconds."""
        task = self.loop.spawn(Process("test"), work(), self._context)
        try:
            assert self.loop.run(task.done, limit), f"it has not ended within {limit:g} s"
            result: T = task.result()
            return result
        finally:
            self.loop.end()
