"""Runs a coroutine in virtual time, without real waiting; distop's clocks show the time of the loop."""

from __future__ import annotations

import asyncio
import contextvars
import random
from typing import TYPE_CHECKING, Any, TypeVar

from distop.clock import source
from tests.simulator.process_clock import SimSource
from tests.simulator.virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


def now() -> float:
    """Seconds on the clock of the running loop."""
    return asyncio.get_running_loop().time()


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, T]], limit: float = 600.0) -> T:
    """Run the coroutine and return its result. ``limit``: virtual seconds."""
    chance = random.Random(1)
    loop = VirtualLoop(chance)  # type: ignore[abstract]
    context = contextvars.Context()
    context.run(source.set, SimSource(loop, chance))
    task = loop.spawn(Process("test"), work(), context)
    try:
        assert loop.run(task.done, limit), f"the coroutine has not ended after {limit:g} virtual seconds"
        assert loop.errors == []
        return task.result()
    finally:
        loop.end()
