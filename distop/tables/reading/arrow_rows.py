"""Reads rows of Parquet files with Arrow: all rows of a file in order, or the rows at given positions.

Arrow and Spark read some files differently. Rows at positions raise SparkOnly unless both certainly read the same.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.protocol.frozen import frozen
from distop.runtime.lru_cache import LruCache
from distop.storage.files import for_arrow
from distop.tables.reading import parquet_footers
from distop.tables.reading.arrow_types import EPOCH, FIRST_DAY, FIRST_TIME, SparkOnly, arrow_type, micros_since_epoch
from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from distop.tables.reading.arrow_types import Reading
    from distop.tables.reading.file_facts import Chunk, FileFacts, PlannedFile, SparkType

_footers: LruCache[Any] = LruCache(256)
"""pyarrow's metadata of files."""


@frozen
class Blocks:
    """Rows of a file by position: ``numbers`` of blocks of ``size`` rows each, in ascending order."""

    file: PlannedFile
    numbers: Any
    size: int


@frozen
class RequestedRows:
    """Requested blocks of rows of a file on a disk.

    ``constants``: columns whose values are in the name of the file's folder, as texts. ``fixed``: columns whose values
    another source has as well; for each, kind and scale of its leaf for the comparison, and the expected values.
    """

    blocks: Blocks
    constants: Mapping[str, str | None]
    fixed: Mapping[str, tuple[str, int, Chunk]] = field(default_factory=dict)

    @property
    def file(self) -> PlannedFile:
        """The file with its size and time in the file system."""
        return self.blocks.file


@frozen
class _Opened:
    """A file's footer, and the requested rows by row group: their indexes in it, in ascending order.

    ``size``: bytes of these row groups.
    """

    metadata: Any
    groups: Mapping[int, Any]
    size: int

    @property
    def rows(self) -> int:
        """The number of requested rows."""
        return sum(len(rows) for rows in self.groups.values())


def rows_of(
    wanted: Sequence[RequestedRows], schema: Mapping[str, SparkType], reading: Callable[[Any], Reading], most: int
) -> pa.Table:
    """The requested rows: the columns of ``schema`` in Arrow's types for Spark's, then the constants.

    ``reading`` returns the :class:`Reading` for a file's Parquet schema. Raises SparkOnly, also if more than ``most``
    bytes would have to be decoded.
    """
    import pyarrow as pa

    target = pa.schema([pa.field(name, arrow_type(kind)) for name, kind in schema.items()])
    try:
        opened: list[_Opened] = []
        for one in wanted:
            opened.append(_opened(one))
            if sum(file.size for file in opened) > most:
                raise SparkOnly(f"more than {most} bytes would be read")
        readings = _readings([file.metadata for file in opened], reading)

        def read(n: int) -> pa.Table:
            return _read(wanted[n], opened[n], readings[n], target)

        if len(wanted) == 1:
            parts = [read(0)]
        else:
            with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1), "lookup") as pool:
                parts = list(pool.map(read, range(len(wanted))))
        return pa.concat_tables(parts)
    except (pa.ArrowException, OSError, ValueError, Unreadable) as e:
        raise SparkOnly(str(e).strip().split("\n")[0]) from e


def _opened(one: RequestedRows) -> _Opened:
    import numpy as np

    path = one.file[0]
    metadata = _footers.get(one.file, lambda: _metadata(path), keep=parquet_footers.shows_replacement(one.file))
    size = one.blocks.size
    rows = (one.blocks.numbers.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
    starts = np.cumsum([0, *(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))])
    if len(rows) and rows[-size] >= starts[-1]:
        raise SparkOnly(f"the file {path} has no rows at these positions")
    cuts = np.searchsorted(rows, starts, "left")
    groups = {n: rows[cuts[n] : cuts[n + 1]] - starts[n] for n in range(len(starts) - 1) if cuts[n] < cuts[n + 1]}
    return _Opened(metadata, groups, sum(metadata.row_group(n).total_byte_size for n in groups))


def _metadata(path: str) -> Any:
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        return pq.read_metadata(file)


def _readings(found: Sequence[Any], reading: Callable[[Any], Reading]) -> list[Reading]:
    """The reading of each file; computed once for consecutive files with the same schema."""
    readings: list[Reading] = []
    for n, metadata in enumerate(found):
        if n and found[n - 1].schema.equals(metadata.schema):
            readings.append(readings[-1])
        else:
            readings.append(reading(metadata.schema))
    return readings


def _read(one: RequestedRows, opened: _Opened, reading: Reading, target: pa.Schema) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts: list[pa.Table] = []
    with for_arrow(one.file[0]) as regular, pq.ParquetFile(regular, metadata=opened.metadata) as file:
        for group, rows in opened.groups.items():
            parts += _group_rows(file, group, rows, reading)
    if one.file[2]:  # a time of 0: the format never changes files
        parquet_footers.check_unchanged(*one.file)
    columns = [_column(parts, reading.names[column.name], column, opened.rows) for column in target]
    for name, (kind, scale, chunk) in one.fixed.items():
        _check_fixed(columns[target.get_field_index(name)], kind, scale, chunk)
    constants = {n: pa.repeat(pa.scalar(v, pa.string()), opened.rows) for n, v in one.constants.items()}
    return pa.table([*columns, *constants.values()], names=[*target.names, *constants])


def _group_rows(file: Any, group: int, rows: Any, reading: Reading) -> Iterator[pa.Table]:
    """The requested rows of a row group, which is decoded only up to the last of them."""
    import numpy as np
    import pyarrow as pa

    if reading.chosen == ():
        return
    first, chosen = 0, None if reading.chosen is None else list(reading.chosen)
    for batch in file.iter_batches(int(rows[-1]) + 1, [group], chosen):
        after = first + batch.num_rows
        low, high = np.searchsorted(rows, [first, after], "left")
        if high > low:
            yield pa.Table.from_batches([batch.take(pa.array(rows[low:high] - first))])
        first = after
        if first > rows[-1]:
            return
    raise SparkOnly("a row group has fewer rows than its footer says")


def _column(parts: Sequence[pa.Table], name: str | None, wanted: pa.Field, rows: int) -> Any:
    """A column of the result; ``name``: its name in the file, None for a column of NULLs."""
    import pyarrow as pa

    if name is None:
        return pa.nulls(rows, wanted.type)
    column = pa.chunked_array([chunk for part in parts for chunk in part.column(name).chunks])
    if len(column) != rows:
        raise SparkOnly(f"the column {name!r} has {len(column)} values in {rows} rows")
    if column.type != wanted.type:
        column = column.cast(wanted.type)
    for chunk in column.chunks:
        _check_calendar(chunk)
    return column


def _check_fixed(column: Any, kind: str, scale: int, chunk: Chunk) -> None:
    """Raises SparkOnly if a column's values differ from those that another source has for it."""
    import pyarrow as pa

    if kind in ("date", "timestamp"):
        column = column.cast(pa.int32() if kind == "date" else pa.int64())
    elif kind == "string":
        column = column.cast(pa.binary())
    elif kind not in ("int", "bool", "decimal"):
        raise SparkOnly(f"values of the type {kind} cannot be compared with the table's metadata")
    for value in column.to_pylist():
        if kind == "decimal" and value is not None:
            value = int(value.scaleb(scale))
        same = bool(chunk.nulls) if value is None else chunk.low is not None and chunk.low == value == chunk.high
        if not same:
            raise SparkOnly("a file has values that differ from those of its partition in the metadata")


def _check_calendar(array: Any) -> None:
    """Raises SparkOnly for dates and times that may have been written in the Julian calendar."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as t

    kind = array.type
    if t.is_struct(kind):
        for inner in array.flatten():
            _check_calendar(inner)
    elif t.is_map(kind):
        _check_calendar(array.keys)
        _check_calendar(array.items)
    elif t.is_list(kind):
        _check_calendar(array.flatten())
    elif t.is_date(kind) or t.is_timestamp(kind):
        first = (FIRST_DAY - EPOCH.date()).days
        if t.is_timestamp(kind):
            first = micros_since_epoch(FIRST_TIME)
        low = pc.min(array.cast(pa.int32() if t.is_date(kind) else pa.int64())).as_py()
        if low is not None and low < first:
            raise SparkOnly("Spark may read old dates or times in the Julian calendar")


def in_folder(values: Mapping[str, str | None], folder: str) -> Mapping[str, str | None]:
    """The values in a folder's name. Raises SparkOnly if Spark reads other values from it."""
    if any(value == "" for value in values.values()):
        raise SparkOnly("a partition's value is empty")
    try:
        unquote(folder, errors="strict").encode()
    except UnicodeError:
        raise SparkOnly("the folder's name is not UTF-8") from None
    return values


def facts_of(file: PlannedFile) -> FileFacts:
    """The facts in a file's footer. Raises Unreadable, also if the file has changed since it was planned."""
    (facts,) = parquet_footers.read_all([file], frozenset())
    if isinstance(facts, Unreadable):
        raise facts
    return facts


def batches(path: str, names: Sequence[str], size: int) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
    """All rows of a file in order, in the form of :meth:`~distop.tables.reader.Reader.batches`.

    Raises Unreadable if its data cannot be read, or a row group's number of rows differs from the footer; MemoryError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with for_arrow(path) as opened, pq.ParquetFile(opened, coerce_int96_timestamp_unit="us") as file:
            first = end = 0
            for group in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                end += rows
                if not names:
                    yield first, rows, None
                    first = end
                    continue
                for batch in file.iter_batches(size, [group], list(names), use_threads=False):
                    yield first, batch.num_rows, batch
                    first += batch.num_rows
                if first != end:
                    raise Unreadable(
                        f"the file {path} cannot be read: a row group has {rows + first - end} rows, but its footer "
                        f"says {rows}"
                    )
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError, ValueError) as e:
        reason = str(e).strip().split("\n")[0]
        raise Unreadable(f"the file {path} cannot be read: {reason}") from e
