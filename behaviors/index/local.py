"""Rows that are known by file, row group and row, read by Arrow where that gives what Spark's reader would.

Spark takes longer to plan a scan than Arrow takes to read a few row groups. But the two do not read every file alike:
what is not known to be the same in both is left to Spark, by ``Unfaithful``.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.core.frozen import frozen
from distop_behaviors.index.alike import Unfaithful, arrow_type
from distop_behaviors.index.values import FIRST_DAY, FIRST_TIME
from distop_behaviors.reading import footers
from distop_behaviors.reading.facts import Unreadable
from distop_behaviors.reading.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from distop_behaviors.index.alike import Reading
    from distop_behaviors.index.keys import Key
    from distop_behaviors.index.values import Numbers
    from distop_behaviors.reading.facts import Chunk, SparkType
    from distop_behaviors.reading.footers import PlannedFile

LOCAL_BYTES = 64 << 20
"""Bytes, without compression, that are decoded here at most; above that Spark's tasks are quicker, as they are many."""
LOCAL_ROWS = 10_000
"""Rows at most: a frame carries them in its plan."""
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 -- as values.py
_footers: Kept[Any] = Kept(256)


@frozen
class Wanted:
    """Rows of one file: the index in the file of each, ascending, and the row group that it is in. ``constants``: the
    values of columns that the file's folder tells, as texts; ``fixed``: of columns whose values another source tells as
    well, how they are compared (kind and scale of a leaf), and what they are.
    """

    file: PlannedFile
    groups: Numbers
    rows: Numbers
    constants: Mapping[str, str | None]
    fixed: Mapping[str, tuple[str, int, Chunk]] = field(default_factory=dict)


def rows_of(
    wanted: Sequence[Wanted], schema: Mapping[str, SparkType], reading: Callable[[Any], Reading], most: int
) -> pa.Table:
    """These rows, with the columns of ``schema`` in Arrow's types for Spark's, then their constants. ``reading``: by
    the Parquet schema of a file. Raises Unfaithful, also where more than ``most`` bytes would have to be decoded.
    """
    import pyarrow as pa

    target = pa.schema([pa.field(name, arrow_type(kind)) for name, kind in schema.items()])
    try:
        opened = [_opened(one, most) for one in wanted]
        if sum(size for _, size in opened) > most:
            raise Unfaithful(f"more than {most} bytes are to be read")
        readings = _readings([file for file, _ in opened], reading)

        def read(n: int) -> pa.Table:
            return _read(wanted[n], opened[n][0], readings[n], target)

        if len(wanted) == 1:
            parts = [read(0)]
        else:
            with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1), "lookup") as pool:
                parts = list(pool.map(read, range(len(wanted))))
        return pa.concat_tables(parts)
    except (pa.ArrowException, OSError, ValueError, Unreadable) as e:
        raise Unfaithful(str(e).strip().split("\n")[0]) from e


def _opened(one: Wanted, most: int) -> tuple[Any, int]:
    """The file, and the bytes that are to be decoded of it."""
    import numpy as np
    import pyarrow.parquet as pq

    path = one.file[0]
    metadata = _footers.get(one.file, lambda: pq.read_metadata(path), keep=footers.tells_apart(one.file))
    size = 0
    for group in np.unique(one.groups).tolist():
        if group >= metadata.num_row_groups:
            raise Unfaithful(f"the file {path} has no row group {group}")
        size += metadata.row_group(group).total_byte_size
        if size > most:
            break
    return metadata, size


def _readings(found: Sequence[Any], reading: Callable[[Any], Reading]) -> list[Reading]:
    """Of each file: those of a table mostly share one schema."""
    readings: list[Reading] = []
    for n, metadata in enumerate(found):
        if n and found[n - 1].schema.equals(metadata.schema):
            readings.append(readings[-1])
        else:
            readings.append(reading(metadata.schema))
    return readings


def _read(one: Wanted, metadata: Any, reading: Reading, target: pa.Schema) -> pa.Table:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts: list[pa.Table] = []
    with pq.ParquetFile(one.file[0], metadata=metadata) as file:
        starts = np.cumsum([0, *(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))])
        for group in np.unique(one.groups).tolist():
            rows = one.rows[one.groups == group] - starts[group]
            if len(rows) and not 0 <= rows[0] <= rows[-1] < metadata.row_group(group).num_rows:
                raise Unfaithful(f"rows of the file {one.file[0]} are not in the row group that the index names")
            parts += _picked(file, group, rows, reading)
    if one.file[2]:
        # Else nobody replaces it: Iceberg's files have no time in a plan.
        footers.unchanged(*one.file)
    columns = [_column(parts, reading.names[column.name], column, len(one.rows)) for column in target]
    for name, (kind, scale, chunk) in one.fixed.items():
        _check_fixed(columns[target.get_field_index(name)], kind, scale, chunk)
    constants = {n: pa.repeat(pa.scalar(v, pa.string()), len(one.rows)) for n, v in one.constants.items()}
    return pa.table([*columns, *constants.values()], names=[*target.names, *constants])


def _picked(file: Any, group: int, rows: Numbers, reading: Reading) -> Iterator[pa.Table]:
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
        first = (FIRST_DAY - _EPOCH.date()).days
        if t.is_timestamp(kind):
            first = (FIRST_TIME - _EPOCH) // timedelta(microseconds=1)
        low = pc.min(array.cast(pa.int32() if t.is_date(kind) else pa.int64())).as_py()
        if low is not None and low < first:
            raise Unfaithful("days or times that Spark may read by another calendar")


# ------------------------------------------------------------------ keys


def having(rows: pa.Table, keys: Iterable[Key], columns: Mapping[str, str]) -> pa.Table:
    """Those of the rows that have one of the keys, none of which holds a NULL: postings name rows by a number that
    several keys may share. ``columns``: of the keys, with their types.
    """
    import pyarrow as pa

    wanted = {tuple(_told(value, kind) for value, kind in zip(key, columns.values(), strict=True)) for key in keys}
    found = [_values(rows.column(name), kind) for name, kind in columns.items()]
    keep = [row in wanted for row in zip(*found, strict=True)]
    return rows if all(keep) else rows.filter(pa.array(keep, pa.bool_()))


def _told(value: Any, kind: str) -> Any:
    """A key's value so that equal ones, by Spark's rules, are equal here, and no others are."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value  # and zero equals the negative zero
    if isinstance(value, str):
        return value.encode()
    if kind in ("timestamp", "timestamp_ntz"):
        return (value - _EPOCH) // timedelta(microseconds=1)
    return value


def _values(column: Any, kind: str) -> list[Any]:
    """The values of a column as :func:`_told` has them; None for NULL."""
    import pyarrow as pa

    if kind == "string":
        column = column.cast(pa.binary())
    elif kind in ("timestamp", "timestamp_ntz"):
        column = column.cast(pa.int64())
    found: list[Any] = column.to_pylist()
    return ["NaN" if isinstance(v, float) and math.isnan(v) else v for v in found] if kind in _FLOATS else found


_FLOATS = ("float", "double")


# ------------------------------------------------------------------ what folders tell


def in_folder(values: Mapping[str, str | None], folder: str) -> Mapping[str, str | None]:
    """The values that a folder's name tells, where Spark makes the same of it. Raises Unfaithful."""
    if any(value == "" for value in values.values()):
        raise Unfaithful("a partition's value is empty")
    try:
        unquote(folder, errors="strict").encode()
    except UnicodeError:
        raise Unfaithful("the folder's name is not UTF-8") from None
    return values
