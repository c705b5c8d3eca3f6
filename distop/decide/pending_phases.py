"""Phases of operations without a gate: most of them wait, and few are in another phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distop.protocol.records import OperationRef, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

_BITS = 10
"""Bits of an instance number that are its place within a block."""


class Instances:
    """A set of instance numbers, stored as bits.

    The numbers are consecutive, so this takes less than a hundredth of the memory of a set.
    """

    __slots__ = ("_blocks", "_count")

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._count = 0

    def __contains__(self, number: int) -> bool:
        return bool(self._blocks.get(number >> _BITS, 0) >> (number & (1 << _BITS) - 1) & 1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for block, bits in sorted(self._blocks.items()):
            while bits:
                lowest = bits & -bits
                yield (block << _BITS) + lowest.bit_length() - 1
                bits ^= lowest

    def add(self, number: int) -> None:
        if number not in self:
            block = number >> _BITS
            self._blocks[block] = self._blocks.get(block, 0) | 1 << (number & (1 << _BITS) - 1)
            self._count += 1

    def discard(self, number: int) -> None:
        if number in self:
            block = number >> _BITS
            self._blocks[block] ^= 1 << (number & (1 << _BITS) - 1)
            self._count -= 1
            if not self._blocks[block]:
                del self._blocks[block]


class Phases(Mapping[OperationRef, Phase]):
    """Operation → phase, as a mapping.

    Waiting operations are stored only by their numbers: 100,000 of them must cost nothing in daemons that do not serve
    them.
    """

    __slots__ = ("_others", "_waiting")

    def __init__(self) -> None:
        self._others: dict[OperationRef, Phase] = {}
        self._waiting: dict[tuple[str, str, str], Instances] = {}

    def __getitem__(self, ref: OperationRef) -> Phase:
        if (phase := self._others.get(ref)) is not None:
            return phase
        waiting = self._waiting.get((ref.table, ref.type, ref.object))
        if waiting is None or ref.instance not in waiting:
            raise KeyError(ref)
        return Phase.WAITING

    def __len__(self) -> int:
        return len(self._others) + sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[OperationRef]:
        yield from self._others
        for place, waiting in self._waiting.items():
            for number in waiting:
                yield OperationRef(*place, number)

    def counts(self) -> Iterator[tuple[tuple[str, str], Phase, int]]:
        """How many there are: (table, type), phase, number; one may come several times."""
        for ref, phase in self._others.items():
            yield (ref.table, ref.type), phase, 1
        for (table, type_name, _), waiting in self._waiting.items():
            yield (table, type_name), Phase.WAITING, len(waiting)

    def of(self, table: str, type_name: str) -> list[OperationRef]:
        """The operations of a type on a table, sorted."""
        found = [ref for ref in self._others if (ref.table, ref.type) == (table, type_name)]
        for place, waiting in self._waiting.items():
            if place[:2] == (table, type_name):
                found += (OperationRef(*place, number) for number in waiting)
        return sorted(found)

    def set(self, ref: OperationRef, phase: Phase | None) -> None:
        """``phase`` None: it has none any more."""
        self._others.pop(ref, None)
        place = (ref.table, ref.type, ref.object)
        if phase is Phase.WAITING:
            self._waiting.setdefault(place, Instances()).add(ref.instance)
            return
        if (waiting := self._waiting.get(place)) is not None:
            waiting.discard(ref.instance)
            if not waiting:
                del self._waiting[place]
        if phase is not None:
            self._others[ref] = phase
