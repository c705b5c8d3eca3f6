"""Postings, the locations of keys: collected in segments, merged into sorted runs, and searched.

A posting has three numbers: the key's number (:mod:`distop_behaviors.index.key_values`), the file's number in the
generation, and the block of rows in the file, which is the row's index divided by :data:`BLOCK`. Blocks suffice,
because a reader decodes rows by thousands, and compares keys anyway (several keys may share a number); and for a unique
text, the location takes most of a posting's space. Postings are sorted by key and delta-encoded, so each takes a few
bytes. Rows with a NULL in their key have no posting; the list of files has their number.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

from distop.protocol.frozen import frozen
from distop.runtime.lru_cache import LruCache
from distop_behaviors.index.index_folder import write_parquet
from distop_behaviors.index.key_values import key_numbers, numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from distop.storage.object_store import ObjectStore, OpenObject
    from distop_behaviors.index.index_folder import Folder
    from distop_behaviors.index.key_columns import Piece, SourceFile
    from distop_behaviors.index.key_values import Numbers, Whole

    Part = tuple[Numbers, Whole, Whole]
    Places = tuple[Whole, Whole]

GROUP_ROWS = 1 << 16
"""Postings in a row group. A lookup of one key reads one or two row groups."""
BLOCK = 64
"""Rows in a block, the unit of a posting's location in a file."""
RUN_ROWS = 1 << 21
"""Approximate number of postings in a run: one file, which is sorted in memory."""
LEVEL_ROWS = 1 << 26
"""Maximum postings in a level, whose runs do not overlap. Each level costs a lookup one more run."""

_bounds: LruCache[_Bounds] = LruCache(64)


class Postings:
    """Collects the postings of several files."""

    def __init__(self) -> None:
        self._parts: list[tuple[Numbers, int, Whole]] = []
        self.rows = 0

    def add(self, number: int, source: SourceFile, pieces: Iterable[Piece], flush: Callable[[], None]) -> int:
        """Add the postings of a file; returns the number of rows with a NULL in their key.

        ``flush`` is called when many postings are collected. If a piece cannot be read, the postings of the file that
        are not flushed are removed.
        """
        import numpy as np

        before, nulls = len(self._parts), 0
        try:
            for piece in pieces:
                if None in piece.arrays:
                    nulls += piece.rows
                    continue
                valid = np.ones(piece.rows, bool)
                for array in piece.arrays:
                    if array.null_count:
                        valid &= array.is_valid().to_numpy(zero_copy_only=False)
                rows = np.flatnonzero(valid)
                nulls += piece.rows - len(rows)
                arrays = piece.arrays
                if len(rows) < piece.rows:
                    arrays = tuple(array.filter(_mask(valid)) for array in arrays)
                parts = [numbers(a, f or "") for a, f in zip(arrays, source.families, strict=True)]
                keys = key_numbers(parts, source.families)
                self._parts.append((keys, number, ((rows + piece.first) // BLOCK).astype(np.int32)))
                self.rows += len(keys)
                if self.rows >= 2 * RUN_ROWS:
                    flush()
                    before = 0
        except BaseException:
            for keys, *_ in self._parts[before:]:
                self.rows -= len(keys)
            del self._parts[before:]
            raise
        return nulls

    def table(self) -> pa.Table:
        """The collected postings, sorted by key, file and block. They are then removed from memory."""
        import numpy as np

        if not self._parts:
            return _table(np.zeros(0, np.int64), *(np.zeros(0, np.int32),) * 2)
        keys = np.concatenate([p[0] for p in self._parts])
        files = np.concatenate([np.full(len(p[0]), p[1], np.int32) for p in self._parts])
        blocks = np.concatenate([p[2] for p in self._parts])
        self._parts, self.rows = [], 0
        return _sorted(keys, files, blocks)


def _mask(valid: Any) -> Any:
    import pyarrow as pa

    return pa.array(valid)


def _sorted(keys: Numbers, files: Whole, blocks: Whole) -> pa.Table:
    """The postings sorted by key. Stable: the order of files and rows is kept for each key."""
    import numpy as np

    order = np.argsort(keys, kind="stable")
    return _table(keys[order], files[order], blocks[order])


def _table(keys: Numbers, files: Whole, blocks: Whole) -> pa.Table:
    import pyarrow as pa

    kinds = {"key": pa.int64(), "file": pa.int32(), "block": pa.int32()}
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])
    return pa.table([pa.array(a) for a in (keys, files, blocks)], schema)


def write(table: pa.Table, file: BinaryIO, level: int) -> None:
    """Write postings as a Parquet file with small row groups. Raises OSError."""
    write_parquet(
        table,
        file,
        GROUP_ROWS,
        level,
        use_dictionary=["file"],
        column_encoding={"key": "DELTA_BINARY_PACKED", "block": "DELTA_BINARY_PACKED"},
        data_page_version="1.0",
    )


@frozen
class Input:
    """A sorted file of postings. ``mapping``: the new number of each of its files; -1: left out."""

    store: ObjectStore
    key: str
    digest: str
    rows: int
    sample: Sequence[int]
    mapping: Whole


@frozen
class PostingsRun:
    """A data file of merged postings."""

    name: str
    size: int
    digest: str
    rows: int
    low: int
    high: int


def sample_of(table: pa.Table) -> list[int]:
    """Some evenly spread keys of a sorted table, from which the boundaries of runs are chosen."""
    import numpy as np

    keys: Any = table.column("key").to_numpy()
    count = max(1, len(keys) // GROUP_ROWS)
    return [int(keys[i]) for i in np.linspace(0, len(keys) - 1, count + 1, dtype=np.int64)] if len(keys) else []


def levels_of(inputs: Sequence[Input]) -> Iterator[list[Input]]:
    """The inputs in groups that become one level each."""
    level: list[Input] = []
    for one in inputs:
        if level and sum(i.rows for i in level) + one.rows > LEVEL_ROWS:
            yield level
            level = []
        level.append(one)
    if level:
        yield level


def merge(inputs: Sequence[Input], folder: Folder, name: str, check: Callable[[], None]) -> list[PostingsRun]:
    """Merge inputs into runs that do not overlap, in the order of their keys, named ``name`` with a number.

    An existing run is not written again: the same inputs give the same run. Raises OSError and the errors of ``check``.
    """
    cuts = _cuts(inputs)
    bounds: list[tuple[int | None, int | None]] = list(zip([None, *cuts], [*cuts, None], strict=True))

    def make(n: int) -> list[PostingsRun]:
        check()
        return _runs(inputs, *bounds[n], folder, f"{name}-{n:04}")

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "merge") as pool:
        return [run for runs in pool.map(make, range(len(bounds))) for run in runs]


def _cuts(inputs: Sequence[Input]) -> list[int]:
    sample = sorted(key for one in inputs for key in one.sample)
    runs = -(-sum(one.rows for one in inputs) // RUN_ROWS)
    return sorted({sample[n * len(sample) // runs] for n in range(1, runs)} - {sample[0]}) if sample else []


def _runs(inputs: Sequence[Input], low: int | None, high: int | None, folder: Folder, name: str) -> list[PostingsRun]:
    """The postings in ``[low, high)`` as one run, or several if a key has very many postings."""
    runs: list[PostingsRun] = []
    parts: list[Part] = []
    held = 0
    for one in inputs:
        for part in _slices(one, low, high):
            parts.append(part)
            held += len(part[0])
        if held >= 4 * RUN_ROWS:
            runs.append(_run(parts, folder, f"{name}-{len(runs):02}.parquet"))
            parts, held = [], 0
    if held:
        runs.append(_run(parts, folder, f"{name}-{len(runs):02}.parquet"))
    return runs


def _run(parts: Sequence[Part], folder: Folder, name: str) -> PostingsRun:
    import numpy as np

    table = _sorted(*(np.concatenate([part[n] for part in parts]) for n in range(3)))
    size, digest = folder.add(name, lambda file: write(table, file, 3))
    keys: Any = table.column("key").to_numpy()
    return PostingsRun(name, size, digest, len(keys), int(keys[0]), int(keys[-1]))


def _slices(one: Input, low: int | None, high: int | None) -> Iterator[Part]:
    import numpy as np

    for table in _groups(one.store, one.key, low, high):
        keys = table.column("key").to_numpy()
        first = 0 if low is None else int(np.searchsorted(keys, low, "left"))
        after = len(keys) if high is None else int(np.searchsorted(keys, high, "left"))
        files, blocks = (table.column(name).to_numpy()[first:after] for name in ("file", "block"))
        mapped = one.mapping[files]
        keep = mapped >= 0
        if keep.all():
            yield keys[first:after], mapped, blocks
        else:
            yield keys[first:after][keep], mapped[keep], blocks[keep]


def _groups(store: ObjectStore, key: str, low: int | None, high: int | None) -> Iterator[pa.Table]:
    """The row groups that may have keys in ``[low, high)``, one after the other."""
    import pyarrow.parquet as pq

    with (
        store.open(key) as opened,
        pq.ParquetFile(opened.file, page_checksum_verification=True) as file,
    ):
        for n in range(file.metadata.num_row_groups):
            bounds = file.metadata.row_group(n).column(0).statistics
            if (low is None or bounds.max >= low) and (high is None or bounds.min < high):
                yield file.read_row_group(n, use_threads=False)


@frozen
class Hits:
    """The locations of some keys: the unique numbers of the files, and the file and block of each posting.

    ``places``: None if there are more postings than requested.
    """

    files: Whole
    places: Places | None


def find(store: ObjectStore, key: str, wanted: Numbers, most: int) -> Hits:
    """Find sorted keys in a run: the files, and up to ``most`` postings.

    Raises OSError and Arrow's errors if the run is gone or damaged, and UnsafePath if it is no regular file.
    """
    with store.open(key) as opened:
        return _find(store.location_of(key), opened, wanted, most)


def _find(location: str, opened: OpenObject, wanted: Numbers, most: int) -> Hits:
    import numpy as np
    import pyarrow.parquet as pq

    found, places, rows = [np.zeros(0, np.int32)], [_nowhere()], 0
    bounds = _bounds_of(location, opened)
    first, after = np.searchsorted(wanted, bounds.low, "left"), np.searchsorted(wanted, bounds.high, "right")
    groups = np.flatnonzero(first < after).tolist()
    if not groups:
        return Hits(found[0], places[0])
    with pq.ParquetFile(opened.file, metadata=bounds.metadata, page_checksum_verification=True) as file:
        for n in groups:
            table = file.read_row_group(n, ["key", "file", "block"][: 3 if rows <= most else 2], use_threads=False)
            keys, some = table.column("key").to_numpy(), wanted[first[n] : after[n]]
            starts, ends = np.searchsorted(keys, some, "left"), np.searchsorted(keys, some, "right")
            slices = [slice(s, e) for s, e in zip(starts, ends, strict=True) if e > s]
            files = table.column("file").to_numpy()
            found += [np.unique(files[one]) for one in slices]
            rows += int((ends - starts).sum())
            if rows <= most:
                blocks = table.column("block").to_numpy()
                places += [(files[one], blocks[one]) for one in slices]
    return Hits(np.unique(np.concatenate(found)), concatenated(places) if rows <= most else None)


def concatenated(places: Sequence[Places]) -> Places:
    """All places in one pair of arrays."""
    import numpy as np

    files, blocks = (np.concatenate([part[n] for part in [_nowhere(), *places]]) for n in range(2))
    return files, blocks


def _nowhere() -> Places:
    import numpy as np

    return np.zeros(0, np.int32), np.zeros(0, np.int32)


@frozen
class _Bounds:
    """The footer of a run, and the lowest and highest key of each of its row groups."""

    metadata: Any
    low: Numbers
    high: Numbers


def _bounds_of(location: str, opened: OpenObject) -> _Bounds:
    """The bounds of a run, cached for the next lookup: files of an index never change."""
    stored = opened.stored
    return _bounds.get((location, stored.size, stored.version), lambda: _read_bounds(opened))


def _read_bounds(opened: OpenObject) -> _Bounds:
    import numpy as np
    import pyarrow.parquet as pq

    metadata = pq.ParquetFile(opened.file).metadata
    columns = [metadata.row_group(n).column(0).statistics for n in range(metadata.num_row_groups)]
    low, high = (np.array([getattr(c, name) for c in columns], np.int64) for name in ("min", "max"))
    return _Bounds(metadata, low, high)
