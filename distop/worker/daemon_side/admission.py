"""Admission to the child: a shared/exclusive lock, and a semaphore with places that are shared fairly among tables.

With the lock, a suspect job runs alone in the child, to find out which job kills the child.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


T = TypeVar("T")


class SharedExclusiveLock:
    """A shared/exclusive lock; waiters for exclusive entry come before new shared entries."""

    def __init__(self) -> None:
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone and not self._waiting_alone)
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            await self._wake()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._changed:
            self._waiting_alone += 1
            try:
                await self._changed.wait_for(lambda: not self._alone and not self._inside)
                self._alone = True
            finally:
                self._waiting_alone -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            self._alone = False
            await self._wake()

    async def _wake(self) -> None:
        # Shielded: also a cancelled holder must wake the waiters.
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        await asyncio.shield(asyncio.ensure_future(notify()))


def halves(items: Sequence[T]) -> deque[Sequence[T]]:
    """The non-empty halves of a group."""
    middle = max(1, len(items) // 2)
    return deque(half for half in (items[:middle], items[middle:]) if half)


class FairSemaphore:
    """A semaphore of ``places``, at most ``per_key`` of them for one key.

    A free place goes to the waiting key that holds the fewest places, and for one key to the longest waiter.
    """

    def __init__(self, places: int, per_key: int) -> None:
        self._free = places
        self._per_key = per_key
        self._held: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}
        """Waiters and their keys, longest waiter first."""

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it during the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = key
        self._assign()
        try:
            await turn
            yield
        finally:
            if self._waiting.pop(turn, None) is None:
                self._free += 1
                self._held[key] -= 1
                self._held += Counter()  # removes keys that hold no place
                self._assign()

    def _assign(self) -> None:
        while self._free:
            ready = [turn for turn, key in self._waiting.items() if self._held[key] < self._per_key]
            if not ready:
                return
            turn = min(ready, key=lambda turn: self._held[self._waiting[turn]])
            key = self._waiting.pop(turn)
            self._free -= 1
            self._held[key] += 1
            if not turn.done():  # if it was cancelled, its waiter releases the place
                turn.set_result(None)
