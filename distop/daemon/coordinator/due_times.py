"""Start times of pending operations, in compact form, because there may be many."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from distop.decide.pending_phases import Instances

if TYPE_CHECKING:
    from collections.abc import Iterator

FEW = 64
"""Outdated entries that are kept before the list is rebuilt."""

_PER_SECOND = 1_000_000
_BITS = 64
"""Bits of the instance number in an entry; the time in whole units precedes them."""


class Times:
    """The start times of the operations of one type on one table.

    Instances are numbered regardless of their objects, and the time of an operation never changes.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._waiting = Instances()
        self._objects: dict[int, str] = {}
        """The object ids of operations that have one."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, obj: str, number: int, due: float) -> None:
        """Add an operation that is due at this time (seconds since the epoch). Idempotent."""
        if number not in self._waiting:
            self._waiting.add(number)
            if obj:
                self._objects[number] = obj
            heapq.heappush(self._heap, (math.ceil(due * _PER_SECOND) << _BITS) + number)

    def discard(self, number: int) -> None:
        """Remove an operation."""
        if number in self._waiting:
            self._waiting.discard(number)
            self._objects.pop(number, None)
            if len(self._heap) > 2 * len(self._waiting) + FEW:
                self._heap = [one for one in self._heap if one & (1 << _BITS) - 1 in self._waiting]
                heapq.heapify(self._heap)

    def earliest(self) -> float | None:
        """The earliest time at which an operation may be due; None if there is none."""
        return (self._heap[0] >> _BITS) / _PER_SECOND if self._heap else None

    def come(self, now: float) -> Iterator[tuple[str, int]]:
        """Remove and return the due operations, as object id and number."""
        moment = math.floor(now * _PER_SECOND)
        while self._heap and self._heap[0] >> _BITS <= moment:
            number = heapq.heappop(self._heap) & (1 << _BITS) - 1
            if number in self._waiting:
                yield self._objects.pop(number, ""), number
                self._waiting.discard(number)
