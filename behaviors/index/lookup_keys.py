"""The keys of a lookup: converted to the types of their columns, and to conditions for Spark."""

from __future__ import annotations

import math
import struct
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation, localcontext
from functools import reduce
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.tables.reading.arrow_types import FIRST_DAY, FIRST_TIME, micros_since_epoch
from distop.tables.reading.file_facts import decimal_of, quote
from distop_behaviors.index.key_values import Unindexable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_LITERALS = 200
"""Up to this many keys become literals in a condition, which Spark pushes down to the file reader; more are joined."""

Key = tuple[Any, ...]
"""One value for each column, None for NULL."""


class _Nowhere(Exception):
    """No row can have this value, because the column's type does not have it."""


def read(keys: Iterable[Any], columns: Mapping[str, str]) -> list[Key]:
    """The unique keys, as values of the columns (name → Spark type), without keys that no row can have.

    A key is a value if there is one column, a sequence of values for several, or a mapping by column. Raises
    InvalidArgument for a key that does not have its column's type.
    """
    found: dict[Any, Key] = {}
    for given in keys:
        values = _parts(given, columns)
        try:
            key = tuple(_typed(v, kind, name) for v, (name, kind) in zip(values, columns.items(), strict=True))
        except _Nowhere:
            continue
        # NaN does not equal NaN in Python; -0.0 and 0.0 are equal, and so one key.
        found[tuple("NaN" if _is_nan(v) else v for v in key)] = key
    return list(found.values())


def _parts(given: Any, columns: Mapping[str, str]) -> Sequence[Any]:
    if isinstance(given, dict):
        if set(given) != set(columns):
            raise InvalidArgument(f"the key {given!r} must have exactly the columns {', '.join(columns)}")
        return [given[name] for name in columns]
    if len(columns) == 1:
        return [given]
    if not isinstance(given, list | tuple) or len(given) != len(columns):
        raise InvalidArgument(f"the key {given!r} must have {len(columns)} values: {', '.join(columns)}")
    return given


def _typed(value: Any, kind: str, name: str) -> Any:
    """The value converted to the column's type. Raises _Nowhere and InvalidArgument."""
    if value is None:
        return None
    try:
        found = _of_kind(value, kind)
    except (ValueError, InvalidOperation, OverflowError):
        found = None
    if found is None:
        raise InvalidArgument(f"the key {value!r} is not a value of the column {name!r}, which is {kind}")
    return found


def _of_kind(value: Any, kind: str) -> Any:
    """The value converted to the type, or None if it is not a value of it."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind in _BITS:
        if number and not -(1 << (_BITS[kind] - 1)) <= value < 1 << (_BITS[kind] - 1):
            raise _Nowhere
        return value if number else None
    if kind in ("float", "double"):
        return _float(value, kind) if number or isinstance(value, float) else None
    if kind.startswith("decimal"):
        return _decimal(value, kind) if number or isinstance(value, Decimal | str) else None
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if kind == "date":
        if isinstance(value, str):
            return date.fromisoformat(value)
        return value if isinstance(value, date) and not isinstance(value, datetime) else None
    if kind in ("timestamp", "timestamp_ntz"):
        return _moment(value, kind)
    if kind == "binary":
        return bytes(value) if isinstance(value, bytes | bytearray) else None
    if not isinstance(value, str):
        return None
    value.encode()  # ValueError if it cannot be encoded as UTF-8
    return value


def _float(value: float, kind: str) -> float:
    found = float(value)
    if kind == "float" and math.isfinite(found):
        try:
            (found,) = struct.unpack("f", struct.pack("f", found))
        except OverflowError:
            raise _Nowhere from None
    return found


def _decimal(value: Any, kind: str) -> Decimal | None:
    precision, scale = decimal_of(kind)
    found = Decimal(value)
    if not found.is_finite():
        return None
    fitted = _scaled(found, scale)
    if fitted is None or abs(fitted) >= Decimal(10) ** (precision - scale):
        raise _Nowhere
    return fitted


def _scaled(value: Decimal, scale: int) -> Decimal | None:
    """The number with ``scale`` decimal places; None if it has more, or is too large."""
    with localcontext(prec=100) as exact:
        if value.adjusted() > 40:
            return None
        fitted = value.quantize(Decimal(1).scaleb(-scale), context=exact)
        return fitted if fitted == value else None


def _moment(value: Any, kind: str) -> datetime | None:
    """The time without a zone; for ``timestamp``, converted to UTC."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return None
    if value.tzinfo is None:
        return value
    return value.astimezone(UTC).replace(tzinfo=None) if kind == "timestamp" else None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def as_family(value: Any, family: str) -> Any:
    """A key's value (not None) as a value of an index's family; None if no indexed value can be equal to it.

    Raises Unindexable if that is unknown.
    """
    if isinstance(value, bool):
        kind = "bool"
    elif isinstance(value, Decimal):
        if family.startswith("decimal"):
            return _scaled(value, int(family[8:-1]))
        kind = "decimal"
    elif isinstance(value, float):
        if family == "int":
            return int(value) if value.is_integer() and abs(value) < 2**62 else None
        kind = "float"
    elif isinstance(value, datetime):
        kind = family if family.startswith("timestamp") else "timestamp"
        if value < FIRST_TIME:
            return None
    elif isinstance(value, date) and value < FIRST_DAY:
        return None
    else:
        kind = {int: "int", date: "date", str: "text", bytes: "binary"}[type(value)]
    if kind != family:
        raise Unindexable(f"cannot compare {value!r} with an index of {family}")
    return value


# ------------------------------------------------------------------ in Spark


def matching(frame: DataFrame, session: SparkSession, keys: Sequence[Key], columns: Mapping[str, str]) -> DataFrame:
    """The rows of the frame that have one of the keys. NULL and NaN are keys, too."""
    if len(keys) <= _LITERALS:
        return frame.where(_condition(keys, columns))
    from pyspark.sql import functions as F

    names = [f"key{n}" for n in range(len(columns))]
    kinds = list(columns.values())
    schema = ", ".join(f"{name} {_raw_type(kind)}" for name, kind in zip(names, kinds, strict=True))
    rows = [tuple(None if v is None else _raw(v, kind) for v, kind in zip(key, kinds, strict=True)) for key in keys]
    wanted = session.createDataFrame(rows, schema).select(
        *(_cooked(F.col(name), kind).alias(name) for name, kind in zip(names, kinds, strict=True))
    )
    equal = [frame[quote(c)].eqNullSafe(wanted[n]) for c, n in zip(columns, names, strict=True)]
    return frame.join(F.broadcast(wanted), reduce(lambda a, b: a & b, equal), "left_semi")


def _condition(keys: Sequence[Key], columns: Mapping[str, str]) -> Column:
    from pyspark.sql import functions as F

    if len(columns) == 1:
        ((name, kind),) = columns.items()
        plain = [key[0] for key in keys if not _special(key[0])]
        found = [_equal(name, kind, key[0]) for key in keys if _special(key[0])]
        if len(plain) == 1:
            found.append(_equal(name, kind, plain[0]))
        elif plain:
            found.append(F.col(quote(name)).isin([_literal(v, kind) for v in plain]))
    else:
        found = [
            reduce(lambda a, b: a & b, (_equal(n, k, v) for v, (n, k) in zip(key, columns.items(), strict=True)))
            for key in keys
        ]
    return reduce(lambda a, b: a | b, found)


def _special(value: Any) -> bool:
    """True for NULL, NaN and zero, which need conditions of their own.

    With a simple comparison, the file reader would wrongly skip row groups: statistics leave out NaN, and a dictionary
    distinguishes -0.0 from 0.0.
    """
    return value is None or (isinstance(value, float) and (math.isnan(value) or value == 0))


def _equal(name: str, kind: str, value: Any) -> Column:
    from pyspark.sql import functions as F

    column = F.col(quote(name))
    if value is None:
        return column.isNull()
    if _is_nan(value):
        return F.isnan(column)
    if isinstance(value, float) and value == 0:
        return (column == _literal(0.0, kind)) | (column == _literal(-0.0, kind))
    return column == _literal(value, kind)


def _literal(value: Any, kind: str) -> Column:
    from pyspark.sql import functions as F

    return _cooked(F.lit(_raw(value, kind)), kind)


def _raw(value: Any, kind: str) -> Any:
    """The value in a form that reaches the JVM unchanged (no time zone, calendar or precision is applied)."""
    if kind == "timestamp":
        return micros_since_epoch(value)
    if kind in ("date", "timestamp_ntz"):
        return value.isoformat()
    return f"{value:f}" if isinstance(value, Decimal) else value


def _raw_type(kind: str) -> str:
    if kind == "timestamp":
        return "bigint"
    return "string" if kind in ("date", "timestamp_ntz") or kind.startswith("decimal") else kind


def _cooked(column: Column, kind: str) -> Column:
    from pyspark.sql import functions as F

    return F.timestamp_micros(column) if kind == "timestamp" else column.cast(kind)
