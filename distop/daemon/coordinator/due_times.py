"""When operations that wait for a time are due. Very many may wait: a number stands for each."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from distop.decide.pending_phases import Instances

if TYPE_CHECKING:
    from collections.abc import Iterator

FEW = 64
"""Times of operations that wait no more, which are not worth to be looked for."""

_PER_SECOND = 1_000_000
_BITS = 64
"""Of an entry, those of the instance number; before them the time, in whole units."""


class Times:
    """Of operations of one type on one table, whose instances are numbered whatever their objects; an operation has one
    time for good.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._waiting = Instances()
        self._objects: dict[int, str] = {}
        """The object ids of those that have one."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, obj: str, number: int, due: float) -> None:
        """An operation is due then (seconds since the epoch). It may be told again."""
        if number not in self._waiting:
            self._waiting.add(number)
            if obj:
                self._objects[number] = obj
            heapq.heappush(self._heap, (math.ceil(due * _PER_SECOND) << _BITS) + number)

    def discard(self, number: int) -> None:
        """It waits no more."""
        if number in self._waiting:
            self._waiting.discard(number)
            self._objects.pop(number, None)
            if len(self._heap) > 2 * len(self._waiting) + FEW:
                self._heap = [one for one in self._heap if one & (1 << _BITS) - 1 in self._waiting]
                heapq.heapify(self._heap)

    def earliest(self) -> float | None:
        """The next time at which to ask what has come; None: there is none."""
        return (self._heap[0] >> _BITS) / _PER_SECOND if self._heap else None

    def come(self, now: float) -> Iterator[tuple[str, int]]:
        """Those whose time has come, object id and number: they are here no longer."""
        moment = math.floor(now * _PER_SECOND)
        while self._heap and self._heap[0] >> _BITS <= moment:
            number = heapq.heappop(self._heap) & (1 << _BITS) - 1
            if number in self._waiting:
                yield self._objects.pop(number, ""), number
                self._waiting.discard(number)
