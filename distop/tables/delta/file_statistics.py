"""Reads the statistics and partition values of files in a Delta log.

A writer rounds some bounds: texts are cut, times have milliseconds, and long decimals may be rounded to floats. If a
deletion vector has deleted rows, the statistics still include them (``tightBounds`` is false): a number of NULLs then
only shows none, all or some.
"""

from __future__ import annotations

import json
import math
import re
import struct
from datetime import date, datetime, timedelta
from decimal import Context, Decimal, DecimalException
from typing import TYPE_CHECKING, Any

from distop.tables.delta.deletion_vectors import is_count
from distop.tables.reading.file_facts import Chunk, FileFacts, Unreadable, decimal_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.tables.delta.delta_log import AddedFile
    from distop.tables.delta.delta_schema import DeltaField, DeltaSchema
    from distop.tables.reading.file_facts import Path

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 -- times are compared as numbers
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d(?::\d\d)?)?)?", re.ASCII
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,19}", re.ASCII)
_DECIMAL = re.compile(r"-?\d{1,38}(?:\.\d{1,38})?", re.ASCII)
_ROUNDED = 999
"""Microseconds by which a maximum in milliseconds may be too low."""
_SECONDS_DROPPED = 59_999_999
"""Microseconds by which a time with an offset in minutes may be wrong, if its zone had seconds then."""
_ZONES_SETTLED = datetime(1973, 1, 1)  # noqa: DTZ001
"""Since then, offsets of all time zones are whole minutes."""
_EXACT = ("int", "date", "decimal", "bool")
"""Kinds whose bounds are not rounded. Texts are cut, times rounded, and of floats only some values are ordered."""
_REPLACED = "?\ufffd"
"""Characters that a writer puts for half of a surrogate pair, which it has cut."""
_CUT_AT = "\ufffd"
"""The character that old releases of Delta put after a cut text. In UTF-8 it is smaller than four-byte characters."""
_DIGITS = 38
"""Maximum digits of a decimal."""
_EXACT_DECIMAL = 10**15
"""Unscaled decimals below it are exact as 64-bit floats. Some writers write bounds as such, or cut them to 64 bits."""
_ARITHMETIC = Context(prec=4 * _DIGITS)
_RANGES = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def facts_of(file: AddedFile, schema: DeltaSchema, wanted: Mapping[Path, DeltaField]) -> FileFacts:
    """The facts of a file that the log has; ``rows`` is None if the log does not have their number.

    Raises Unreadable if the log deletes more rows than the file has.
    """
    leaves = {path: field.leaf for path, field in wanted.items()}
    statistics = _parsed(file.statistics)
    rows = statistics.get("numRecords")
    if not is_count(rows):
        return FileFacts(file.path, None, schema.columns, leaves)
    deleted = file.vector.rows if file.vector is not None else 0
    if deleted > rows:
        raise Unreadable(f"the log deletes {deleted} rows of the file {file.path}, which has {rows} rows")
    tight = statistics.get("tightBounds")
    whole = not tight if isinstance(tight, bool) else file.vector is not None
    chunks: dict[Path, tuple[Chunk, ...]] = {}
    for path, field in wanted.items():
        if path[0] in schema.partition_columns:
            found = of_partition(field, file.values.get(field.physical[0]), rows)
        else:
            found = _chunk(field, statistics, rows, whole=whole, vector=file.vector is not None)
        if found is not None:
            chunks[path] = (found,)
    return FileFacts(file.path, rows, schema.columns, leaves, chunks, deleted)


def _parsed(statistics: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The statistics as an object; empty if they cannot be parsed."""
    if not isinstance(statistics, str):
        return statistics or {}
    try:
        found = json.loads(statistics, parse_float=Decimal)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _chunk(field: DeltaField, statistics: Mapping[str, Any], rows: int, *, whole: bool, vector: bool) -> Chunk | None:
    """The statistics of a column; None if the log has none.

    ``whole``: they are those of the whole file, before rows were deleted. ``vector``: rows may be deleted.
    """
    nulls = _at(statistics.get("nullCount"), field.physical)
    if not is_count(nulls, rows) or (whole and nulls not in (0, rows)):
        nulls = None
    low, high = (_at(statistics.get(name), field.physical) for name in ("minValues", "maxValues"))
    least, most = physical(field, low, highest=False), physical(field, high, highest=True)
    if nulls is least is most is None:
        return None
    exact = field.leaf.kind in _EXACT and not whole and not vector and not field.widened
    return Chunk(rows, nulls, least, most, tight=exact)


def _at(values: Any, path: Path) -> Any:
    for name in path:
        if not isinstance(values, dict):
            return None
        values = values.get(name)
    return values


def physical(field: DeltaField, value: Any, *, highest: bool) -> Any:
    """A bound in the log as a comparable value that is not inside the column's values; None if there is none."""
    kind = field.leaf.kind
    if value is None or kind in ("other", "binary"):
        return None
    try:
        if kind == "int":
            return value if isinstance(value, int) and not isinstance(value, bool) else None
        if kind == "bool":
            return value if isinstance(value, bool) else None
        if kind == "float":
            return _float(field, value, highest=highest)
        if kind == "decimal":
            unscaled = _unscaled(value, field.leaf.scale)
            return unscaled if unscaled is not None and abs(unscaled) < _EXACT_DECIMAL else None
        if kind == "string":
            return _text(value, highest=highest)
        if kind == "date":
            return _days(value)
        return _micros(value, highest=highest, zoned=field.leaf.type == "timestamp")
    except (ValueError, OverflowError, DecimalException):
        return None


def _float(field: DeltaField, value: Any, *, highest: bool) -> float | None:
    """JSON has special values as texts. NaN is greater than all numbers, so as a maximum it says nothing."""
    if isinstance(value, str):
        found = {"Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    else:
        found = float(value) if isinstance(value, int | float | Decimal) and not isinstance(value, bool) else None
    if found is None or math.isnan(found) or (math.isinf(found) and not isinstance(value, str | float)):
        return None
    if field.leaf.bits == 32:
        return _narrow(found)
    if field.widened:
        # The text of a narrower value has fewer digits than the value.
        return max(found, _narrow(found)) if highest else min(found, _narrow(found))
    return found


def _narrow(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _unscaled(value: Any, scale: int) -> int | None:
    """A decimal as a whole number of its last place; None if it has more places."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    found = Decimal(value)
    if not found.is_finite() or (found and not -_DIGITS <= found.adjusted() <= _DIGITS):
        return None  # an exponent of a billion would take hours
    found = _ARITHMETIC.scaleb(found, scale)
    return int(found) if found == found.to_integral_value() else None


def _text(value: Any, *, highest: bool) -> bytes | None:
    if not isinstance(value, str):
        return None
    if highest and value.endswith(_CUT_AT):
        return None
    if highest and len(value) > 1 and value[-2] in _REPLACED and ord(value[-1]) >= 0x7F:
        return None
    return value.encode()


def _days(value: Any) -> int | None:
    if isinstance(value, str) and _DATE.fullmatch(value):
        value = date.fromisoformat(value)
    if not isinstance(value, date) or isinstance(value, datetime):
        return None
    return (value - _EPOCH.date()).days


def _micros(value: Any, *, highest: bool, zoned: bool) -> int | None:
    """Microseconds of a time. ``zoned``: it is an instant, so its text needs an offset."""
    if isinstance(value, datetime):
        found, slack = value.replace(tzinfo=None), 0
        if value.utcoffset():
            return None
    else:
        match = _TIME.fullmatch(value) if isinstance(value, str) else None
        # Without a time it is the date that a column of times had before it was widened.
        if match is None or (zoned and match[8] is None) or (not zoned and match[8] is not None):
            return None
        year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
        found = datetime(year, month, day, hour, minute, second)  # noqa: DTZ001
        found += timedelta(microseconds=int((match[7] or "").ljust(6, "0")[:6]))
        slack = _SECONDS_DROPPED if match[8] not in (None, "Z") and found < _ZONES_SETTLED else 0
        found -= _offset(match[8])
    micros = (found - _EPOCH) // timedelta(microseconds=1)
    return micros + _ROUNDED + slack if highest else micros - slack


def _offset(text: str | None) -> timedelta:
    if text in (None, "Z"):
        return timedelta()
    assert text is not None
    hours, minutes, *seconds = (int(part) for part in text[1:].split(":"))
    found = timedelta(hours=hours, minutes=minutes, seconds=seconds[0] if seconds else 0)
    return -found if text[0] == "-" else found


def of_partition(field: DeltaField, text: str | None, rows: int) -> Chunk | None:
    """The statistics of a partition column: one value in all rows. None if Delta may read another value."""
    if text is None:
        return Chunk(rows, rows)
    kind = field.leaf.kind
    found: Any = None
    if kind == "string" and text:
        try:
            found = text.encode()
        except UnicodeEncodeError:
            return None
    elif kind == "int" and _WHOLE.fullmatch(text):
        bits = _RANGES[field.leaf.type]
        found = int(text) if -(1 << bits - 1) <= int(text) < 1 << bits - 1 else None
    elif kind == "bool":
        found = {"true": True, "false": False}.get(text)
    elif kind == "date" and _DATE.fullmatch(text):
        try:
            found = _days(text)
        except ValueError:
            found = None
    elif kind == "decimal" and _DECIMAL.fullmatch(text):
        found = _unscaled(Decimal(text), field.leaf.scale)
        if found is not None and abs(found) >= 10 ** decimal_of(field.leaf.type)[0]:
            found = None
    return None if found is None else Chunk(rows, 0, found, found, nans=0)
