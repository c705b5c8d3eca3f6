"""Rows of Parquet files that Arrow reads: all of a file in order, or those at some positions.

Arrow and Spark do not read every file alike. Of positions, what is not known to be the same in both is left to Spark,
by ``Unfaithful``.
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
from distop.tables.reading.arrow_types import EPOCH, FIRST_DAY, FIRST_TIME, Unfaithful, arrow_type, micros_since_epoch
from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from distop.tables.reading.arrow_types import Reading
    from distop.tables.reading.file_facts import Chunk, FileFacts, PlannedFile, SparkType

_footers: LruCache[Any] = LruCache(256)


@frozen
class Blocks:
    """Rows of a file by position: ``numbers`` of blocks of ``size`` rows each, ascending."""

    file: PlannedFile
    numbers: Any
    size: int


@frozen
class Wanted:
    """Blocks of rows of a file on a disk. ``constants``: the values of columns that the file's folder tells, as texts;
    ``fixed``: of columns whose values another source tells as well, how they are compared (kind and scale of a leaf),
    and what they are.
    """

    blocks: Blocks
    constants: Mapping[str, str | None]
    fixed: Mapping[str, tuple[str, int, Chunk]] = field(default_factory=dict)

    @property
    def file(self) -> PlannedFile:
        """As the file system has it."""
        return self.blocks.file


@frozen
class _Opened:
    """A file's footer, and the rows that are wanted by the row groups that they are in: their indexes in it, ascending.
    ``size``: of these row groups, in bytes.
    """

    metadata: Any
    groups: Mapping[int, Any]
    size: int

    @property
    def rows(self) -> int:
        """How many."""
        return sum(len(rows) for rows in self.groups.values())


def rows_of(
    wanted: Sequence[Wanted], schema: Mapping[str, SparkType], reading: Callable[[Any], Reading], most: int
) -> pa.Table:
    """The rows of these blocks, with the columns of ``schema`` in Arrow's types for Spark's, then their constants.
    ``reading``: by the Parquet schema of a file. Raises Unfaithful, also where it takes decoding more than ``most``
    bytes.
    """
    import pyarrow as pa

    target = pa.schema([pa.field(name, arrow_type(kind)) for name, kind in schema.items()])
    try:
        opened: list[_Opened] = []
        for one in wanted:
            opened.append(_opened(one))
            if sum(file.size for file in opened) > most:
                raise Unfaithful(f"more than {most} bytes are to be read")
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
        raise Unfaithful(str(e).strip().split("\n")[0]) from e


def _opened(one: Wanted) -> _Opened:
    import numpy as np

    path = one.file[0]
    metadata = _footers.get(one.file, lambda: _metadata(path), keep=parquet_footers.tells_apart(one.file))
    size = one.blocks.size
    rows = (one.blocks.numbers.astype(np.int64)[:, None] * size + np.arange(size)).ravel()
    starts = np.cumsum([0, *(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))])
    if len(rows) and rows[-size] >= starts[-1]:
        raise Unfaithful(f"the file {path} does not have the rows at these positions")
    cuts = np.searchsorted(rows, starts, "left")
    groups = {n: rows[cuts[n] : cuts[n + 1]] - starts[n] for n in range(len(starts) - 1) if cuts[n] < cuts[n + 1]}
    return _Opened(metadata, groups, sum(metadata.row_group(n).total_byte_size for n in groups))


def _metadata(path: str) -> Any:
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        return pq.read_metadata(file)


def _readings(found: Sequence[Any], reading: Callable[[Any], Reading]) -> list[Reading]:
    """Of each file: those of a table mostly share one schema."""
    readings: list[Reading] = []
    for n, metadata in enumerate(found):
        if n and found[n - 1].schema.equals(metadata.schema):
            readings.append(readings[-1])
        else:
            readings.append(reading(metadata.schema))
    return readings


def _read(one: Wanted, opened: _Opened, reading: Reading, target: pa.Schema) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts: list[pa.Table] = []
    with for_arrow(one.file[0]) as regular, pq.ParquetFile(regular, metadata=opened.metadata) as file:
        for group, rows in opened.groups.items():
            parts += _picked(file, group, rows, reading)
    if one.file[2]:
        # Else nobody replaces it: the format changes no file.
        parquet_footers.unchanged(*one.file)
    columns = [_column(parts, reading.names[column.name], column, opened.rows) for column in target]
    for name, (kind, scale, chunk) in one.fixed.items():
        _check_fixed(columns[target.get_field_index(name)], kind, scale, chunk)
    constants = {n: pa.repeat(pa.scalar(v, pa.string()), opened.rows) for n, v in one.constants.items()}
    return pa.table([*columns, *constants.values()], names=[*target.names, *constants])


def _picked(file: Any, group: int, rows: Any, reading: Reading) -> Iterator[pa.Table]:
    """The rows of a row group, which is decoded no further than to the last of them."""
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
    raise Unfaithful("a row group has fewer rows than its footer says")


def _column(parts: Sequence[pa.Table], name: str | None, wanted: pa.Field, rows: int) -> Any:
    import pyarrow as pa

    if name is None:
        return pa.nulls(rows, wanted.type)
    column = pa.chunked_array([chunk for part in parts for chunk in part.column(name).chunks])
    if len(column) != rows:
        raise Unfaithful(f"the column {name!r} has {len(column)} values in {rows} rows")
    if column.type != wanted.type:
        column = column.cast(wanted.type)
    for chunk in column.chunks:
        _check_calendar(chunk)
    return column


def _check_fixed(column: Any, kind: str, scale: int, chunk: Chunk) -> None:
    """Raises Unfaithful where a column has values that are not those that another source tells."""
    import pyarrow as pa

    if kind in ("date", "timestamp"):
        column = column.cast(pa.int32() if kind == "date" else pa.int64())
    elif kind == "string":
        column = column.cast(pa.binary())
    elif kind not in ("int", "bool", "decimal"):
        raise Unfaithful(f"of a {kind} it is not known here what the metadata mean")
    for value in column.to_pylist():
        if kind == "decimal" and value is not None:
            value = int(value.scaleb(scale))
        same = bool(chunk.nulls) if value is None else chunk.low is not None and chunk.low == value == chunk.high
        if not same:
            raise Unfaithful("a file has other values than the metadata tell of its partition")


def _check_calendar(array: Any) -> None:
    """Raises Unfaithful for days and times that may have been written by another calendar."""
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
            raise Unfaithful("days or times that Spark may read by another calendar")


def in_folder(values: Mapping[str, str | None], folder: str) -> Mapping[str, str | None]:
    """The values that a folder's name tells, where Spark makes the same of it. Raises Unfaithful."""
    if any(value == "" for value in values.values()):
        raise Unfaithful("a partition's value is empty")
    try:
        unquote(folder, errors="strict").encode()
    except UnicodeError:
        raise Unfaithful("the folder's name is not UTF-8") from None
    return values


def facts_of(file: PlannedFile) -> FileFacts:
    """What the footer of a file says, which is there as it was planned. Raises Unreadable."""
    (facts,) = parquet_footers.read_all([file], frozenset())
    if isinstance(facts, Unreadable):
        raise facts
    return facts


def batches(path: str, names: Sequence[str], size: int) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
    """All rows of a file in order, as :meth:`~distop.tables.reader.Reader.batches` has them. Raises Unreadable where
    its data cannot be read or has not as many rows as its footer says, MemoryError as it is.
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
                        f"the file {path} cannot be read: a row group has {rows + first - end} rows, and "
                        f"{rows} by its footer"
                    )
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError, ValueError) as e:
        reason = str(e).strip().split("\n")[0]
        raise Unreadable(f"the file {path} cannot be read: {reason}") from e
