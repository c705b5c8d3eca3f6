"""Deletes of Iceberg: finds the data files that may have deleted rows, and checks deletion vectors for Spark.

The rules are those of Iceberg's specification under "scan planning". In doubt, rows may be deleted: the file is then
scanned, whereas a missed delete would lead to wrong counts.

Deletion vectors are checked before Spark reads them: a manifest has the file, offset and size of a vector, Iceberg's
reader allocates as much memory as the vector says, and quotes unexpected bytes in its errors.
"""

from __future__ import annotations

import math
import os
import zlib
from bisect import bisect_left, bisect_right, insort
from typing import Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.storage.files import NotRegular, local_path, open_regular
from distop.tables.staged_files import FOLDER

PartitionKey = tuple[int, tuple[Any, ...]]
"""A spec's id, and the values of its fields."""

DATA, POSITIONS, EQUALITY = range(3)
"""The content of a file: data, position deletes or equality deletes."""
VECTORS = "PUFFIN"
"""The file format of deletion vectors."""
_PATH = 2147483546
"""The field id of the column of a position delete file that has the paths of data files."""


@frozen
class DeleteFile:
    """A delete file.

    ``target``: the only data file to which it applies, if known; ``low`` and ``high``: bounds of the data files' paths
    as UTF-8, if known; ``rows``: the number of rows of the file, which of a deletion vector are those that it deletes.
    """

    content: int
    partition: PartitionKey
    sequence: int | None
    everywhere: bool = False
    """Whether its spec has no partitions: an equality delete then applies to the whole table."""
    vector: bool = False
    target: str | None = None
    low: bytes | None = None
    high: bytes | None = None
    rows: int = 0


def delete_of(entry: Any, partition: PartitionKey, *, everywhere: bool) -> DeleteFile:
    """The delete file of a manifest's entry (``manifest_facts.ManifestEntry``)."""
    file = entry.file
    low, high = (file.lower_bounds or {}).get(_PATH), (file.upper_bounds or {}).get(_PATH)
    target = file.referenced_data_file
    if target is None and low is not None and low == high:
        target = bytes(low).decode("utf-8", "surrogateescape")
    vector = file.file_format.upper() == VECTORS
    return DeleteFile(
        file.content,
        partition,
        entry.sequence,
        everywhere,
        vector,
        target,
        low,
        high,
        file.record_count,
    )


def partition_of(spec_id: int, values: Any) -> PartitionKey:
    """A key for a partition's values, equal if they are equal for Iceberg, where NaN equals NaN."""
    return spec_id, tuple("NaN" if isinstance(v, float) and math.isnan(v) else v for v in values)


class Deletes:
    """The delete files of a snapshot."""

    def __init__(self) -> None:
        self.any = False
        self._targets: dict[str, list[DeleteFile]] = {}
        self._ranges: dict[PartitionKey, list[DeleteFile]] = {}
        """Position deletes of several data files, by partition, sorted by sequence number."""
        self._equal: dict[PartitionKey | None, list[DeleteFile]] = {}
        """Equality deletes, by partition, sorted by sequence number; None: for the whole table."""

    def add(self, delete: DeleteFile) -> None:
        """Add a delete file."""
        self.any = True
        if delete.content == EQUALITY:
            key = None if delete.everywhere else delete.partition
            insort(self._equal.setdefault(key, []), delete, key=_sequence)
        elif delete.target is not None:
            self._targets.setdefault(delete.target, []).append(delete)
        else:
            insort(self._ranges.setdefault(delete.partition, []), delete, key=_sequence)

    def of(self, path: str, partition: PartitionKey, sequence: int | None) -> int | None:
        """The number of deleted rows of a data file; None if unknown."""
        if not self.any:
            return 0
        since = _since(sequence)
        if any((known := self._equal.get(key)) and _sequence(known[-1]) > since for key in (None, partition)):
            return None
        later = self._positions(path, partition, since)
        if not later:
            return 0
        vectors = [d for d in later if d.vector]
        return vectors[0].rows if len(vectors) == len(later) == 1 else None

    def count(self, path: str, partition: PartitionKey, sequence: int | None) -> int:
        """The number of delete files that apply to a data file, or could: position deletes without bounds of paths."""
        since, found = _since(sequence), 0
        for key in (None, partition):
            known = self._equal.get(key, ())
            # An equality delete applies to rows of earlier commits, a position delete also to those of its own commit.
            found += len(known) - bisect_right(known, since, key=_sequence)
        return found + len(self._positions(path, partition, _since_positions(path, since)))

    def take(self, path: str, partition: PartitionKey, sequence: int | None) -> list[DeleteFile]:
        """Remove and return the delete files that apply to a data file."""
        since, found = _since(sequence), list[DeleteFile]()
        for key in (None, partition):
            known = self._equal.get(key, [])
            at = bisect_right(known, since, key=_sequence)
            found += known[at:]
            del known[at:]
        since = _since_positions(path, since)
        found += self._positions(path, partition, since)
        self._targets.pop(path, None)
        ranges = self._ranges.get(partition, [])
        at = bisect_left(ranges, since, key=_sequence)
        ranges[at:] = [d for d in ranges[at:] if not _spans(d, path)]
        return found

    def _positions(self, path: str, partition: PartitionKey, since: float) -> list[DeleteFile]:
        """The position deletes and vectors that apply to a data file of this sequence number."""
        ranges = self._ranges.get(partition, [])
        later = [d for d in self._targets.get(path, ()) if _sequence(d) >= since]
        return later + [d for d in ranges[bisect_left(ranges, since, key=_sequence) :] if _spans(d, path)]


def _since(sequence: int | None) -> float:
    """The sequence number of a data file; the first one if it is unknown."""
    return -math.inf if sequence is None else sequence


def _since_positions(path: str, since: float) -> float:
    """The lowest sequence number of position deletes that apply to a data file.

    A file of compact has the number of the snapshot that was read, so position deletes with that number are older.
    """
    return since + 1 if f"/{FOLDER}/" in path else since


def _sequence(delete: DeleteFile) -> float:
    """The sequence number of a delete file; the last one if it is unknown."""
    return math.inf if delete.sequence is None else delete.sequence


def _spans(delete: DeleteFile, path: str) -> bool:
    name = path.encode("utf-8", "surrogateescape")
    return (delete.low is None or delete.low <= name) and (delete.high is None or name <= delete.high)


VECTOR_FIELDS = ("content_offset", "content_size_in_bytes")
VECTOR_BYTES = 64 << 20
"""Maximum bytes of a vector: enough for half a billion rows in any distribution."""

_FILE = b"PFA1"
_VECTOR = b"\xd1\xd3\x39\x64"
_FRAME = 12
"""Bytes of a vector without its bitmaps: a length, a magic number and a checksum."""
_LEAST = _FRAME + 8
"""Minimum bytes of a vector, with the number of bitmaps."""
_KEY = slice(16, 20)
_FIRST_ONLY = 1
"""Maximum bitmaps of a vector, each for four billion rows of a file: Iceberg allocates all up to the last one."""


def check_vector(path: str, offset: int | None, size: int | None) -> None:
    """Raises InvalidArgument unless a file has a valid deletion vector of this size at this offset.

    The error quotes nothing of the file. For remote files only the numbers are checked. The path was checked before
    (confinement). Raises TableUnavailable if the file cannot be read.
    """
    if offset is None or size is None or offset < len(_FILE) or not _LEAST <= size <= VECTOR_BYTES:
        raise _invalid(path, f"its offset is missing, or its size is not {_LEAST} to {VECTOR_BYTES} bytes")
    local = local_path(path)
    if local is None:
        return
    try:
        with open_regular(str(local)) as file:
            if file.read(len(_FILE)) != _FILE:
                raise _invalid(path, "the file is not a Puffin file")
            if offset + size > os.fstat(file.fileno()).st_size:
                raise _invalid(path, "it exceeds the end of the file")
            file.seek(offset)
            blob = file.read(size)
    except FileNotFoundError:
        return  # its reader reports that it is gone
    except NotRegular as error:
        raise InvalidArgument(str(error)) from None
    except OSError as error:
        raise TableUnavailable(f"cannot read the file {shown(path)}: {type(error).__name__}") from error
    length, checksum = (int.from_bytes(part, "big") for part in (blob[:4], blob[-4:]))
    if length != size - 8 or blob[4:8] != _VECTOR or zlib.crc32(blob[4:-4]) != checksum:
        raise _invalid(path, "its length, its magic number or its checksum is wrong")
    bitmaps = int.from_bytes(blob[8:16], "little")
    if bitmaps > _FIRST_ONLY or (bitmaps and any(blob[_KEY])):
        raise _invalid(path, "it deletes rows after the first four billion of a file")


def _invalid(path: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"invalid deletion vector in the file {shown(path)}: {what}")
