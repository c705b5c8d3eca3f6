"""A semaphore whose places are shared fairly among keys, such as tables."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class FairSemaphore:
    """``places`` in all, at most ``per_key`` of them for one key. A free place goes to the waiting key that holds the
    fewest places, and within a key to the longest waiter."""

    def __init__(self, places: int, per_key: int) -> None:
        self._free = places
        self._per_key = per_key
        self._held: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}
        """Waiters and their keys, in the order in which they came."""

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
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
                self._held += Counter()  # forgets the keys that hold none
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
            if not turn.done():  # else it was cancelled, and its waiter gives the place back
                turn.set_result(None)
