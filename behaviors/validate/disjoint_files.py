"""Which files of a table cannot have a key in common, by the ranges of their values. Pure.

Bounds need not be values of the column for that: all of a file's values lie between them, and that suffices. What they
do not tell of (NaN) lies anywhere. NULLs are in no range, and a key with one is none.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from distop_behaviors.validate.statistics import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.tables.reading.file_facts import FileFacts

_ORDERED = ("int", "uint", "bool", "decimal", "date", "timestamp", "float", "string", "binary")
"""Kinds of leaves whose values are equal where their physical values are."""
EVEN = 1.25
"""So many times its share may be in a bin: beyond that the shuffle keeps the cores busier."""

Range = tuple[Any, Any]


def spread(
    files: Sequence[FileFacts],
    columns: Sequence[Sequence[Range | None]],
    size_of: Callable[[FileFacts], int],
    bins: int,
    most: int,
) -> list[list[FileFacts]]:
    """The files in ``bins`` even bins of at most ``most`` bytes, such that no key is in two of them; ``columns``: the
    ranges of each of the key's columns. Empty where that cannot be: all of it is shuffled then, since a plan for some
    of the files beside one for the others costs more than it saves.
    """
    found = components(files, columns)
    sized = sorted(((sum(map(size_of, some)), n) for n, some in enumerate(found)), reverse=True)
    fair = sum(size for size, _ in sized) / bins
    if len(found) < bins or fair > most or sized[0][0] > EVEN * fair:
        return []
    # The largest first, each to where the least is.
    heap = [(0, n) for n in range(bins)]
    held: list[list[FileFacts]] = [[] for _ in range(bins)]
    for size, n in sized:
        least, chosen = heapq.heappop(heap)
        held[chosen].extend(found[n])
        heapq.heappush(heap, (least + size, chosen))
    return held


def ranges(files: Sequence[FileFacts], path: tuple[str, ...]) -> list[Range | None]:
    """Between which values each file has those of a column (None: anywhere), in one unit for all of them."""
    leaves = [f.leaves.get(path) for f in files]
    first = leaves[0] if leaves else None
    # In structs the bounds of a leaf say nothing of a NULL above it; values of another type may be equal by a cast.
    if first is None or first.kind not in _ORDERED or len(path) != 1:
        return [None] * len(files)
    unit = (first.kind, first.type, first.bits, first.scale)
    if any(leaf is None or (leaf.kind, leaf.type, leaf.bits, leaf.scale) != unit for leaf in leaves):
        return [None] * len(files)
    return [_range(f, path) for f in files]


def _range(facts: FileFacts, path: tuple[str, ...]) -> Range | None:
    leaf = facts.leaves[path]
    chunks = [chunk for chunk in facts.chunks.get(path, ()) if chunk.nulls != chunk.rows]
    if not chunks or not all(bounded(chunk, leaf) for chunk in chunks):
        return None
    if leaf.kind == "float" and any(chunk.nans != 0 for chunk in chunks):
        return None
    return min(chunk.low for chunk in chunks), max(chunk.high for chunk in chunks)


def components(files: Sequence[FileFacts], columns: Sequence[Sequence[Range | None]]) -> list[list[FileFacts]]:
    """The files in groups, such that no two of different groups can have a row with the same key.

    A group is split by one column after the other into what does not overlap in it, as long as that splits any.
    """
    found = [list(range(len(files)))]
    while True:
        before = len(found)
        for column in columns:
            found = [part for group in found for part in _split(group, column)]
        if len(found) == before:
            return [[files[n] for n in group] for group in found]


def _split(group: list[int], column: Sequence[Range | None]) -> list[list[int]]:
    if len(group) == 1:
        return [group]
    placed = [(r, n) for n in group if (r := column[n]) is not None]
    if len(placed) != len(group):
        return [group]  # one that may be anywhere goes with all of them
    placed.sort(key=lambda one: (one[0][0], one[1]))
    parts: list[list[int]] = []
    end: Any = None
    for (low, high), n in placed:
        if parts and low <= end:
            parts[-1].append(n)
            end = max(end, high)
        else:
            parts.append([n])
            end = high
    return parts
