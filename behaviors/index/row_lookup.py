"""Rows that are known by file and position, and read without Spark: which of them have one of some keys.

Spark takes longer to plan a scan than Arrow takes to read a few row groups.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa

    from distop_behaviors.index.lookup_keys import Key

LOCAL_BYTES = 64 << 20
"""Bytes of row groups, without compression, that are read here at most: of larger ones Spark skips pages, in many
tasks, where Arrow decodes all that stands before a row.
"""
LOCAL_ROWS = 10_000
"""Rows at most: a frame carries them in its plan."""
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 -- as values.py
_NAN = "NaN"
"""Stands for what is not a number, which equals nothing in Python."""
_FLOATS = ("float", "double")


def having(rows: pa.Table, keys: Iterable[Key], columns: Mapping[str, str]) -> pa.Table:
    """Those of the rows that have one of the keys, none of which holds a NULL. ``columns``: of the keys, with their
    types.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = {tuple(_told(value, kind) for value, kind in zip(key, columns.values(), strict=True)) for key in keys}
    may: Any = None
    for n, (name, kind) in enumerate(columns.items()):
        column, values = _comparable(rows.column(name), kind), {key[n] for key in wanted}
        found = pc.is_in(column, pa.array([v for v in values if v != _NAN], column.type))
        if kind in _FLOATS:
            # Zeros of both signs are equal, and so is all that is not a number.
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


def _told(value: Any, kind: str) -> Any:
    """A key's value so that equal ones, by Spark's rules, are equal here, and no others are."""
    if isinstance(value, float):
        return _NAN if math.isnan(value) else value  # and zero equals the negative zero
    if isinstance(value, str):
        return value.encode()
    if kind in ("timestamp", "timestamp_ntz"):
        return (value - _EPOCH) // timedelta(microseconds=1)
    return value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _comparable(column: Any, kind: str) -> Any:
    """The values of a column as :func:`_told` has them, but for those that are not a number."""
    import pyarrow as pa

    if kind == "string":
        return column.cast(pa.binary())
    return column.cast(pa.int64()) if kind in ("timestamp", "timestamp_ntz") else column
