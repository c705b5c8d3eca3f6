"""Turns a bound or value of the argument into what compares with a column of some type, exactly.

Whole numbers, decimals, dates and times become integers in the column's own unit (unscaled, days, micro- or
milliseconds), so a bound between two values of the column is rounded inwards and nothing is lost.
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
"""Digits of a number, and its exponent: far beyond any type of a column."""
_LONGEST = 200
"""Characters of a number in a path: a folder's name has at most 255."""

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
    """The bound does not fit the column's type; the text says so."""


@lru_cache(256)
def canonical(kind: str) -> str:
    """Spark's type name in one spelling: ``INTEGER`` → ``int``, ``numeric( 9 , 2 )`` → ``decimal(9,2)``."""
    text = re.sub(r"\s+", "", kind.lower())
    if text.startswith(("decimal", "dec", "numeric")):
        precision, scale = decimal_of(text)
        return f"decimal({precision},{scale})"
    return _ALIASES.get(text, text)


def family(kind: str) -> str:
    """whole, decimal, float, date, timestamp, string, or the type itself where bounds mean nothing."""
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


def exact(value: Any) -> Fraction:
    """A number, or text that is one, as it is written (a JSON number as the double that it is).

    Raises Unfit, also for text of more than 1,000 characters, or with an exponent beyond ±1,000: exact arithmetic with
    it would take hours, in which no other thread of the process runs.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Unfit(f"{value!r} is no number")
    if isinstance(value, str) and len(value) > _LARGEST:
        raise Unfit(f"a number of {len(value)} characters is refused: at most {_LARGEST} are exact")
    try:
        if not isinstance(value, str):
            return Fraction(value)
        number = Decimal(value)
        if number.is_finite() and abs(number.adjusted()) > _LARGEST:
            raise Unfit(f"{value!r} is refused: exponents are exact up to ±{_LARGEST}")
        return Fraction(number)
    except (InvalidOperation, ValueError, OverflowError):
        raise Unfit(f"{value!r} is no number") from None


def of(value: Any, kind: str, *, up: bool) -> Bound:
    """See :func:`_of`, which is asked once for each bound and type (1, 1.0 and true are different values)."""
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
            raise Unfit(f"the column holds text, and {value!r} is none: write it in quotes")
        return Bound(value)
    raise Unfit(f"a column of type {kind} has no order that bounds apply to")


def _decimal(value: Any) -> Fraction:
    """A JSON number such as 0.1 is meant as it is written, in columns that hold such numbers exactly."""
    return exact(repr(value) if isinstance(value, float) else value)


def member(value: Any, kind: str) -> Bound | None:
    """A value of ``in_set`` for a column of this type; None where the column cannot hold it. Raises Unfit."""
    if kind == "boolean":
        if not isinstance(value, bool):
            raise Unfit(f"the column holds true or false, and {value!r} is neither")
        return Bound(value)
    if isinstance(value, bool):
        raise Unfit(f"{value!r} is no value of a column of type {kind}")
    low, high = of(value, kind, up=True), of(value, kind, up=False)
    return low if low == high else None


_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_FLOAT = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf(inity)?|nan)", re.IGNORECASE)
_MOMENT = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:[ T](\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.\d{1,6})?)?(?:Z|[+-]\d{2}:\d{2})?)?",
    re.ASCII,
)


def path_value(column: str, text: str, kind: str) -> None:
    """Raises Unfit where a partition's value in a path is none of the type that it is declared as, without loss.

    Spark's reader wraps whole numbers that are too large there, and takes 1.2 for 0.12 in a decimal(9,2).
    """
    if not _is_value(text, kind):
        raise Unfit(f"the value {text!r} of the partition column {column!r} is no {kind}")


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
    """The smallest and the largest whole number (decimals: unscaled) of a type; None where it has none."""
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
            raise Unfit(f"{value!r} is no number") from None
        if math.isnan(number):
            raise Unfit("NaN is above every bound and cannot be one")
        return number
    wanted = exact(value)
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
    """Seconds since the epoch of a date or time; without a zone it is UTC."""
    if not isinstance(value, str):
        raise Unfit(f"{value!r} is no date or time: write it as '2013-01-31' or '2013-01-31 12:00:00'")
    found = _TIME.fullmatch(value.strip())
    try:
        if found is None:
            raise ValueError
        day, clock, fraction, zone = found.groups()
        date.fromisoformat(day)
        moment = datetime.fromisoformat(f"{day}T{clock or '00:00'}{zone or '+00:00'}")
    except ValueError:
        raise Unfit(f"{value!r} is no date or time: write it as '2013-01-31' or '2013-01-31 12:00:00'") from None
    whole = moment - _EPOCH
    seconds = Fraction(whole.days * 86_400 + whole.seconds)
    return seconds + (Fraction(int(fraction), 10 ** len(fraction)) if fraction else 0)
