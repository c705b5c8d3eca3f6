"""Groups of files that cannot share a key, by the value ranges in their statistics. Pure.

A file's bounds need not be values of the column: all values lie between them, and that suffices. A value that bounds
leave out (NaN) may be anywhere. A key with a NULL does not count as a key, so NULLs do not matter.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from distop_behaviors.validate.statistics import has_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.tables.reading.file_facts import FileFacts

_ORDERED = ("int", "uint", "bool", "decimal", "date", "timestamp", "float", "string", "binary")
"""Kinds of leaves whose values are equal if and only if their physical values are equal."""
MAX_IMBALANCE = 1.25
"""The largest bin may hold this many times the average. Beyond that, a shuffle uses the cores better."""

ValueRange = tuple[Any, Any]


def disjoint_bins(
    files: Sequence[FileFacts],
    columns: Sequence[Sequence[ValueRange | None]],
    size_of: Callable[[FileFacts], int],
    bins: int,
    most: int,
) -> list[list[FileFacts]]:
    """Distribute the files over ``bins`` even bins of at most ``most`` bytes, so that no key is in two bins.

    ``columns``: for each column of the key, the ranges of the files. Empty if there is no such distribution: then all
    files are shuffled, because a second plan for some of the files costs more than it saves.
    """
    found = disjoint_groups(files, columns)
    sized = sorted(((sum(map(size_of, some)), n) for n, some in enumerate(found)), reverse=True)
    fair = sum(size for size, _ in sized) / bins
    if len(found) < bins or fair > most or sized[0][0] > MAX_IMBALANCE * fair:
        return []
    # The largest group first, each into the bin that holds the least.
    heap = [(0, n) for n in range(bins)]
    held: list[list[FileFacts]] = [[] for _ in range(bins)]
    for size, n in sized:
        least, chosen = heapq.heappop(heap)
        held[chosen].extend(found[n])
        heapq.heappush(heap, (least + size, chosen))
    return held


def value_ranges(files: Sequence[FileFacts], path: tuple[str, ...]) -> list[ValueRange | None]:
    """The range of a column's values in each file (None: unknown), in one unit for all files."""
    leaves = [f.leaves.get(path) for f in files]
    first = leaves[0] if leaves else None
    # Bounds inside a struct do not cover a NULL of the struct; a cast may make values of different types equal.
    if first is None or first.kind not in _ORDERED or len(path) != 1:
        return [None] * len(files)
    unit = (first.kind, first.type, first.bits, first.scale)
    if any(leaf is None or (leaf.kind, leaf.type, leaf.bits, leaf.scale) != unit for leaf in leaves):
        return [None] * len(files)
    return [_range(f, path) for f in files]


def _range(facts: FileFacts, path: tuple[str, ...]) -> ValueRange | None:
    leaf = facts.leaves[path]
    chunks = [chunk for chunk in facts.chunks.get(path, ()) if chunk.nulls != chunk.rows]
    if not chunks or not all(has_bounds(chunk, leaf) for chunk in chunks):
        return None
    if leaf.kind == "float" and any(chunk.nans != 0 for chunk in chunks):
        return None
    return min(chunk.low for chunk in chunks), max(chunk.high for chunk in chunks)


def disjoint_groups(
    files: Sequence[FileFacts], columns: Sequence[Sequence[ValueRange | None]]
) -> list[list[FileFacts]]:
    """The files in groups: rows with the same key are always in the same group.

    Each column in turn splits a group where its ranges do not overlap, until no column splits any group.
    """
    found = [list(range(len(files)))]
    while True:
        before = len(found)
        for column in columns:
            found = [part for group in found for part in _split(group, column)]
        if len(found) == before:
            return [[files[n] for n in group] for group in found]


def _split(group: list[int], column: Sequence[ValueRange | None]) -> list[list[int]]:
    if len(group) == 1:
        return [group]
    placed = [(r, n) for n in group if (r := column[n]) is not None]
    if len(placed) != len(group):
        return [group]  # a file without a range may share a key with any other
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
