"""Time and chance: the one place from which distop's own code gets the clocks, random numbers and unique ids.

They come from a :class:`Source`; the default is the system's. A simulation puts another one into :data:`source`, a
context variable, which asyncio's tasks inherit: so each simulated process has clocks and a random stream of its own.

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
    """Where time and chance come from. Times are seconds."""

    def time(self) -> float:
        """Since the epoch; may be wrong, and may jump."""

    def monotonic(self) -> float:
        """Never goes back."""

    def boottime(self) -> float:
        """Never goes back, and counts while the machine is suspended (L1)."""

    def uniform(self, a: float, b: float) -> float:
        """A random number between the two."""

    def bits(self, count: int) -> int:
        """So many random bits, good enough for an id that nobody else has."""


class System:
    """The clocks and the chance of this machine."""

    time = staticmethod(_time.time)
    monotonic = staticmethod(_time.monotonic)
    uniform = staticmethod(_random.uniform)
    bits = staticmethod(_secrets.randbits)

    @staticmethod
    def boottime() -> float:
        return _time.clock_gettime(_time.CLOCK_BOOTTIME)


source: ContextVar[Source] = ContextVar("distop-clock", default=System())  # noqa: B039  # it has no state
"""What the current context gets its time and chance from."""


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
        """The same on one that counts while the machine is suspended (L1)."""
        return source.get().boottime()


class random:
    """Chance, as in the module ``random``."""

    @staticmethod
    def uniform(a: float, b: float) -> float:
        """A number between the two."""
        return source.get().uniform(a, b)


class secrets:
    """Ids, as in the module ``secrets``."""

    @staticmethod
    def randbits(count: int) -> int:
        """So many random bits."""
        return source.get().bits(count)


class uuid:
    """Ids, as in the module ``uuid``."""

    @staticmethod
    def uuid4() -> UUID:
        """A random one."""
        return UUID(int=source.get().bits(128), version=4)
