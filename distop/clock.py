"""The clocks, random numbers and unique ids of distop's own code.

They come from a :class:`Source`; the default is the system's. The simulator sets another one in :data:`source`, a
context variable that asyncio's tasks inherit: so each simulated process has its own clocks and random numbers.

``time``, ``random``, ``secrets`` and ``uuid`` have the names and meanings of the standard modules' functions:
``from distop.clock import random, time`` is all that a module needs.
"""

from __future__ import annotations

import random as _random
import secrets as _secrets
import time as _time
from contextvars import ContextVar
from typing import Protocol
from uuid import UUID

__all__ = ["Source", "random", "secrets", "source", "time", "uuid"]


class Source(Protocol):
    """A source of time and random numbers. Times are in seconds."""

    def time(self) -> float:
        """Since the epoch; may be wrong, and may jump."""

    def monotonic(self) -> float:
        """Never goes back."""

    def boottime(self) -> float:
        """Never goes back, and counts while the machine is suspended (L1)."""

    def uniform(self, a: float, b: float) -> float:
        """A random number between the two."""

    def bits(self, count: int) -> int:
        """``count`` random bits, secure enough for unique ids."""


class System:
    """The clocks and random numbers of this machine."""

    time = staticmethod(_time.time)
    monotonic = staticmethod(_time.monotonic)
    uniform = staticmethod(_random.uniform)
    bits = staticmethod(_secrets.randbits)

    @staticmethod
    def boottime() -> float:
        return _time.clock_gettime(_time.CLOCK_BOOTTIME)


source: ContextVar[Source] = ContextVar("distop-clock", default=System())  # noqa: B039  # it has no state
"""The current context's source."""


class time:
    """The clocks, as in the module ``time``."""

    @staticmethod
    def time() -> float:
        """Seconds since the epoch."""
        return source.get().time()

    @staticmethod
    def monotonic() -> float:
        """Seconds on a clock that never goes back."""
        return source.get().monotonic()

    @staticmethod
    def boottime() -> float:
        """Seconds on a clock that never goes back, and counts while the machine is suspended (L1)."""
        return source.get().boottime()


class random:
    """Random numbers, as in the module ``random``."""

    @staticmethod
    def uniform(a: float, b: float) -> float:
        """A number between the two."""
        return source.get().uniform(a, b)


class secrets:
    """Ids, as in the module ``secrets``."""

    @staticmethod
    def randbits(count: int) -> int:
        """``count`` random bits."""
        return source.get().bits(count)


class uuid:
    """Ids, as in the module ``uuid``."""

    @staticmethod
    def uuid4() -> UUID:
        """A random UUID."""
        return UUID(int=source.get().bits(128), version=4)
