"""Statistics of a written file for a Delta log, from its footer.

Only bounds that are right by all readers' rules are written: none of floats, since a footer ignores NaN, which Spark
orders greatest, and no upper bound of a long text.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from distop.storage.files import for_arrow

if TYPE_CHECKING:
    from distop.tables.delta.delta_schema import DeltaSchema

_COLUMNS = 32
"""Maximum number of columns with statistics, Delta's default."""
_CHARACTERS = 32
"""Maximum characters of a text's bound, Delta's default."""
_NUMBER = "\0"
"""Marks a text that is a number in the JSON: a decimal, which a float would round."""
_MARKED = re.compile(r'"\\u0000(-?[0-9.]+)"')
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_MILLISECOND = timedelta(milliseconds=1)


def written_file(path: str, schema: DeltaSchema) -> tuple[int, str]:
    """The number of rows of a file, and its statistics as JSON. Raises OSError and Arrow's errors."""
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        metadata = pq.read_metadata(file)
    found: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    names = [name for name in schema.columns if name not in schema.partition_columns][:_COLUMNS]
    at = {metadata.schema.column(n).path: n for n in range(len(metadata.schema))}
    for name in names:
        number, kind = at.get(schema.physical[name]), schema.columns[name]
        if number is None or not isinstance(kind, str):
            continue
        chunks = [_statistics(metadata, group, number) for group in range(metadata.num_row_groups)]
        nulls = [chunk.null_count if chunk is not None and chunk.has_null_count else None for chunk in chunks]
        if None not in nulls:
            found["nullCount"][schema.physical[name]] = sum(nulls)
        with_values = [(chunk, metadata.row_group(n).num_rows) for n, chunk in enumerate(chunks) if chunk is not None]
        bounded = [chunk for chunk, rows in with_values if not (chunk.has_null_count and chunk.null_count == rows)]
        if len(with_values) < len(chunks) or not bounded or not all(chunk.has_min_max for chunk in bounded):
            continue
        low = _bound(min(chunk.min for chunk in bounded), kind, highest=False)
        high = _bound(max(chunk.max for chunk in bounded), kind, highest=True)
        if low is not None:
            found["minValues"][schema.physical[name]] = low
        if high is not None:
            found["maxValues"][schema.physical[name]] = high
    text = json.dumps({"numRecords": metadata.num_rows, **found, "tightBounds": True}, ensure_ascii=False)
    return metadata.num_rows, _MARKED.sub(r"\1", text)


def _statistics(metadata: Any, group: int, column: int) -> Any:
    chunk = metadata.row_group(group).column(column)
    return chunk.statistics if chunk.is_stats_set else None


def _bound(value: Any, kind: str, *, highest: bool) -> Any:
    """A bound as Delta writes it; None if it is not written."""
    if kind in _WHOLE and isinstance(value, int):
        return value
    if kind == "date" and isinstance(value, date):
        return value.isoformat()
    if kind.startswith("decimal") and isinstance(value, Decimal) and value.is_finite():
        return f"{_NUMBER}{value:f}"
    if kind == "string" and isinstance(value, str):
        if len(value) <= _CHARACTERS:
            return value
        return None if highest else value[:_CHARACTERS]
    if kind in ("timestamp", "timestamp_ntz") and isinstance(value, datetime):
        return _time(value, zoned=kind == "timestamp", highest=highest)
    return None


def _time(value: datetime, *, zoned: bool, highest: bool) -> str | None:
    """A time in milliseconds, rounded away from the other bound."""
    plain = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo is not None else value
    rest = plain.microsecond % 1000
    plain -= timedelta(microseconds=rest)
    if rest and highest:
        plain += _MILLISECOND
    if not 1 <= plain.year <= 9999:
        return None
    return f"{plain.isoformat(timespec='milliseconds')}{'Z' if zoned else ''}"
