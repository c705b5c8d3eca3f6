"""Filters rows by keys without Spark, if an index has found the rows.

Spark needs more time to plan a scan than Arrow needs to read a few row groups.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from distop.tables.reading.arrow_types import micros_since_epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa

    from distop_behaviors.index.lookup_keys import Key

LOCAL_BYTES = 64 << 20
"""Maximum uncompressed bytes of row groups to read without Spark. For more, Spark is faster: it skips pages and runs
many tasks, while Arrow decodes everything before a row.
"""
LOCAL_ROWS = 10_000
"""Maximum rows: the frame has them in its plan."""
_NAN = "NaN"
"""Represents NaN, which does not equal itself in Python."""
_FLOATS = ("float", "double")


def rows_with_keys(rows: pa.Table, keys: Iterable[Key], columns: Mapping[str, str]) -> pa.Table:
    """The rows that have one of the keys, which have no NULL. ``columns``: the keys' columns and their types."""
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = {tuple(_key_value(value, kind) for value, kind in zip(key, columns.values(), strict=True)) for key in keys}
    may: Any = None
    for n, (name, kind) in enumerate(columns.items()):
        column, values = _comparable(rows.column(name), kind), {key[n] for key in wanted}
        found = pc.is_in(column, pa.array([v for v in values if v != _NAN], column.type))
        if kind in _FLOATS:
            # -0.0 equals 0.0, and all NaNs are equal.
            more = [pc.is_nan(column)] * (_NAN in values) + [pc.equal(column, 0.0)] * (0.0 in values)
            for other in more:
                found = pc.or_(found, pc.fill_null(other, False))
        may = found if may is None else pc.and_(may, found)
    rows = rows.filter(may)
    if len(columns) == 1:
        return rows
    parts = [_comparable(rows.column(name), kind).to_pylist() for name, kind in columns.items()]
    keep = [tuple(_NAN if _is_nan(v) else v for v in row) in wanted for row in zip(*parts, strict=True)]
    return rows.filter(pa.array(keep, pa.bool_()))


def _key_value(value: Any, kind: str) -> Any:
    """A key's value in a form whose equality in Python is Spark's equality."""
    if isinstance(value, float):
        return _NAN if math.isnan(value) else value  # -0.0 equals 0.0
    if isinstance(value, str):
        return value.encode()
    if kind in ("timestamp", "timestamp_ntz"):
        return micros_since_epoch(value)
    return value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _comparable(column: Any, kind: str) -> Any:
    """The values of a column in the form of :func:`_key_value`, except NaN."""
    import pyarrow as pa

    if kind == "string":
        return column.cast(pa.binary())
    return column.cast(pa.int64()) if kind in ("timestamp", "timestamp_ntz") else column
