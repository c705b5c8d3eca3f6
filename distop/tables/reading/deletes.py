"""Which data files of an Iceberg snapshot may have deleted rows. Pure.

The rules are those of Iceberg's specification, under "scan planning". Where one cannot be decided, rows may be deleted:
a file that is wrongly taken for whole would have counts that are not so, one that is wrongly suspected is scanned.
"""

from __future__ import annotations

import math
from typing import Any

from distop.core.frozen import frozen

Partition = tuple[int, tuple[Any, ...]]
"""A spec's id, and the values of its fields."""

DATA, POSITIONS, EQUALITY = range(3)
"""What a file of the snapshot holds."""
VECTORS = "PUFFIN"
"""The format of deletion vectors."""
_PATH = 2147483546
"""The field of position deletes that names the data file."""


@frozen
class Delete:
    """A delete file. ``target``: the only data file that it speaks of, if it says so; ``low`` and ``high``: bounds of
    those paths as UTF-8, if they are known; ``rows``: how many it deletes, of a deletion vector.
    """

    content: int
    partition: Partition
    sequence: int | None
    everywhere: bool = False
    """Its spec has no partitions: an equality delete is one for the whole table."""
    vector: bool = False
    target: str | None = None
    low: bytes | None = None
    high: bytes | None = None
    rows: int = 0


def delete_of(entry: Any, partition: Partition, *, everywhere: bool) -> Delete:
    """The delete file of a manifest's entry, as ``manifests`` reads it."""
    file = entry.file
    low, high = (file.lower_bounds or {}).get(_PATH), (file.upper_bounds or {}).get(_PATH)
    target = file.referenced_data_file
    if target is None and low is not None and low == high:
        target = bytes(low).decode("utf-8", "surrogateescape")
    vector = file.file_format.upper() == VECTORS
    return Delete(
        file.content,
        partition,
        entry.sequence,
        everywhere,
        vector,
        target,
        low,
        high,
        file.record_count if vector else 0,
    )


def partition_of(spec_id: int, values: Any) -> Partition:
    """A key that is equal where Iceberg takes the values of partitions for equal: NaN is, too."""
    return spec_id, tuple("NaN" if isinstance(v, float) and math.isnan(v) else v for v in values)


class Deletes:
    """The delete files of a snapshot."""

    def __init__(self) -> None:
        self.any = False
        self._targets: dict[str, list[Delete]] = {}
        self._ranges: dict[Partition, list[Delete]] = {}
        self._equal: dict[Partition | None, float] = {}
        """The latest sequence number of equality deletes, by partition; of None: those for the whole table."""

    def add(self, delete: Delete) -> None:
        """Note a delete file."""
        self.any = True
        if delete.content == EQUALITY:
            key = None if delete.everywhere else delete.partition
            self._equal[key] = max(self._equal.get(key, -math.inf), _or_latest(delete.sequence))
        elif delete.target is not None:
            self._targets.setdefault(delete.target, []).append(delete)
        else:
            self._ranges.setdefault(delete.partition, []).append(delete)

    def of(self, path: str, partition: Partition, sequence: int | None) -> int | None:
        """How many rows of a data file are deleted; None where that is not known."""
        if not self.any:
            return 0
        since = -math.inf if sequence is None else sequence
        # An equality delete speaks of the rows that were there before it, a position delete also of those beside it.
        if any(self._equal.get(key, -math.inf) > since for key in (None, partition)):
            return None
        named = self._targets.get(path, ())
        later = [d for d in named if _or_latest(d.sequence) >= since]
        later += [d for d in self._ranges.get(partition, ()) if _or_latest(d.sequence) >= since and _spans(d, path)]
        if not later:
            return 0
        vectors = [d for d in named if d.vector]
        return vectors[0].rows if len(vectors) == len(later) == 1 else None


def _or_latest(sequence: int | None) -> float:
    return math.inf if sequence is None else sequence


def _spans(delete: Delete, path: str) -> bool:
    name = path.encode("utf-8", "surrogateescape")
    return (delete.low is None or delete.low <= name) and (delete.high is None or name <= delete.high)
