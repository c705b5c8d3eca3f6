"""Converts a bound or value of the argument to the unit of a column's type, exactly.

Whole numbers, decimals, dates and times become integers in the column's own unit (unscaled, days, micro- or
milliseconds). A bound between two values of the column is rounded inwards, which changes no result.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import Any

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import decimal_of

RANGES = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
MAX_DECIMAL = 10**38 - 1
_LARGEST = 1_000
"""Maximum digits and maximum exponent of a number: far beyond any column type."""
_LONGEST = 200
"""Maximum characters of a number in a path: a folder's name has at most 255."""

_ALIASES = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(r"(\d{4}-\d{2}-\d{2})(?:[T ](\d{2}:\d{2}(?::\d{2})?)(?:\.(\d{1,9}))?)?\s*(Z|[+-]\d{2}:?\d{2})?")


class Unfit(Exception):
    """A check or a bound does not fit the column's type; the text has the reason."""


@lru_cache(256)
def canonical(kind: str) -> str:
    """Spark's type name in one spelling: ``INTEGER`` → ``int``, ``numeric( 9 , 2 )`` → ``decimal(9,2)``."""
    text = re.sub(r"\s+", "", kind.lower())
    if text.startswith(("decimal", "dec", "numeric")):
        precision, scale = decimal_of(text)
        return f"decimal({precision},{scale})"
    return _ALIASES.get(text, text)


def family(kind: str) -> str:
    """whole, decimal, float, date, timestamp, string; or the type itself if bounds do not apply to it."""
    if kind in RANGES:
        return "whole"
    if kind.startswith("decimal"):
        return "decimal"
    if kind in ("float", "double"):
        return "float"
    if kind in ("timestamp", "timestamp_ntz"):
        return "timestamp"
    return kind


@frozen
class Bound:
    """A bound in a column's unit: an integer with ``scale`` decimal places, a float, or text."""

    value: Any
    scale: int = 0


def exact_number(value: Any) -> Fraction:
    """The exact value of a number (of a JSON number: its double), or of a text that is a number.

    Raises Unfit, also for text of more than 1,000 characters or an exponent beyond ±1,000: exact arithmetic with such a
    number takes hours, and blocks all other threads of the process.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Unfit(f"{value!r} is not a number")
    if isinstance(value, str) and len(value) > _LARGEST:
        raise Unfit(f"a number of {len(value)} characters is too long: at most {_LARGEST} are allowed")
    try:
        if not isinstance(value, str):
            return Fraction(value)
        number = Decimal(value)
        if number.is_finite() and abs(number.adjusted()) > _LARGEST:
            raise Unfit(f"the exponent of {value!r} is out of range: at most ±{_LARGEST} is allowed")
        return Fraction(number)
    except (InvalidOperation, ValueError, OverflowError):
        raise Unfit(f"{value!r} is not a number") from None


def bound_for(value: Any, kind: str, *, up: bool) -> Bound:
    """:func:`_of`, cached. The value's type is part of the cache key: 1, 1.0 and true are different values."""
    return _of(value, type(value).__name__, kind, up)


@lru_cache(4096)
def _of(value: Any, _kind_of_value: str, kind: str, up: bool) -> Bound:
    """The bound for a column of Spark type ``kind``, rounded ``up`` (for a minimum) or down (for a maximum).

    Raises Unfit.
    """
    group = family(kind)
    if group in ("whole", "decimal"):
        scale = decimal_of(kind)[1] if group == "decimal" else 0
        return Bound(_round(_decimal(value) * 10**scale, up), scale)
    if group == "float":
        return Bound(_double(value, up))
    if group == "date":
        days = _seconds(value) / 86_400
        return Bound(_round(days, up))
    if group == "timestamp":
        return Bound(_round(_seconds(value) * 10**6, up), 6)
    if group == "string":
        if not isinstance(value, str):
            raise Unfit(f"the column holds text, but {value!r} is not text: write it in quotes")
        return Bound(value)
    raise Unfit(f"bounds do not apply to a column of type {kind}: its values have no order")


def _decimal(value: Any) -> Fraction:
    """The value as it is written. 0.1 is one tenth, because whole and decimal columns hold numbers exactly."""
    return exact_number(repr(value) if isinstance(value, float) else value)


def set_member(value: Any, kind: str) -> Bound | None:
    """A value of ``in_set`` for a column of this type. None if the column cannot hold it. Raises Unfit."""
    if kind == "boolean":
        if not isinstance(value, bool):
            raise Unfit(f"the column holds true or false, but {value!r} is neither")
        return Bound(value)
    if isinstance(value, bool):
        raise Unfit(f"{value!r} is not a value of a column of type {kind}")
    low, high = bound_for(value, kind, up=True), bound_for(value, kind, up=False)
    return low if low == high else None


_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_FLOAT = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf(inity)?|nan)", re.IGNORECASE)
_MOMENT = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.\d{1,6})?)?(?:Z|[+-]\d{2}:\d{2})?)?",
    re.ASCII,
)


def check_path_value(column: str, text: str, kind: str) -> None:
    """Raises Unfit if a partition value in a path is not an exact value of the declared type.

    Spark's reader would wrap a whole number that is too large, and read 1.2 as 0.12 in a decimal(9,2).
    """
    if not _is_value(text, kind):
        raise Unfit(f"the value {text!r} of the partition column {column!r} is not a valid {kind}")


def _is_value(text: str, kind: str) -> bool:
    group = family(kind)
    ends = limits(kind)
    if ends is not None:
        if len(text) > _LONGEST or (_WHOLE if group == "whole" else _DECIMAL).fullmatch(text) is None:
            return False
        scale = decimal_of(kind)[1] if group == "decimal" else 0
        unscaled = Fraction(text) * int("1" + "0" * scale)
        return unscaled.denominator == 1 and ends[0] <= unscaled <= ends[1]
    if group == "float":
        return len(text) <= _LONGEST and _FLOAT.fullmatch(text) is not None
    if kind == "boolean":
        return text.lower() in ("true", "false")
    if group in ("date", "timestamp"):
        found = _MOMENT.fullmatch(text)
        if found is None or (group == "date" and found[4] is not None):
            return False
        try:
            datetime(*(int(part) for part in found.groups("0")))  # type: ignore[arg-type]  # noqa: DTZ001
        except ValueError:
            return False
    return True


def limits(kind: str) -> tuple[int, int] | None:
    """The smallest and the largest whole number (decimals: unscaled) of a type. None for other types."""
    if kind in RANGES:
        bits = RANGES[kind]
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if kind.startswith("decimal"):
        precision = decimal_of(kind)[0]
        return 1 - 10**precision, 10**precision - 1
    return None


def _round(value: Fraction, up: bool) -> int:
    return math.ceil(value) if up else math.floor(value)


def _double(value: Any, up: bool) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise Unfit(f"{value!r} is not a number") from None
        if math.isnan(number):
            raise Unfit("NaN cannot be a bound: it is greater than every value")
        return number
    wanted = exact_number(value)
    try:
        number = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    if up and Fraction(number) < wanted:
        return math.nextafter(number, math.inf)
    if not up and Fraction(number) > wanted:
        return math.nextafter(number, -math.inf)
    return number


def _seconds(value: Any) -> Fraction:
    """Seconds since the epoch of a date or time. Without a time zone it is UTC."""
    if not isinstance(value, str):
        raise Unfit(f"{value!r} is not a date or time: write it as '2013-01-31' or '2013-01-31 12:00:00'")
    found = _TIME.fullmatch(value.strip())
    try:
        if found is None:
            raise ValueError
        day, clock, fraction, zone = found.groups()
        date.fromisoformat(day)
        moment = datetime.fromisoformat(f"{day}T{clock or '00:00'}{zone or '+00:00'}")
    except ValueError:
        raise Unfit(f"{value!r} is not a date or time: write it as '2013-01-31' or '2013-01-31 12:00:00'") from None
    whole = moment - _EPOCH
    seconds = Fraction(whole.days * 86_400 + whole.seconds)
    return seconds + (Fraction(int(fraction), 10 ** len(fraction)) if fraction else 0)
