"""Checks of every kind on difficult values, with the expected result for each row in plain Python.

The values are those of other validators' test suites: NULLs only, exact bounds, both zeros, NaN and infinities, texts
that look like numbers or dates, two Unicode forms of an accent, and times with a zone.
"""

from __future__ import annotations

import math
import re
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

Row = dict[str, Any]
Holds = bool | None
"""None: the check is NULL for the row; for expressions, ``null_is`` decides about it."""

ROWS = 97
"""A prime, so that each value of a column is combined with many values of the others."""


def single(value: float) -> float:
    """The nearest 32-bit float."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


_NOON = datetime(2000, 2, 29, 12, tzinfo=UTC)
_TIMES = [
    *(datetime(1970, 1, 1, tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
    *(_NOON, _NOON + timedelta(microseconds=1), _NOON - timedelta(microseconds=1), datetime(2038, 1, 19, tzinfo=UTC)),
    datetime(2013, 3, 31, 2, 30, tzinfo=UTC),
]
COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "tiny": (pa.int8(), [-128, -1, 0, 1, 127]),
    "whole": (pa.int32(), [-(2**31), -129, -1, 0, 1, 7, 10, 127, 128, 32_767, 32_768, 2**31 - 1]),
    "long": (pa.int64(), [-(2**63), -(2**31) - 1, 0, 7, 2**31, 2**53, 2**53 + 1, 2**63 - 1]),
    "real": (
        pa.float64(),
        [*(math.nan, math.inf, -math.inf, 0.0, -0.0, 0.1, 0.5, 1.0, 7.0, -7.25, 1e300, 5e-324, 2.0**63, 16_777_217.0)],
    ),
    "single": (
        pa.float32(),
        [math.nan, math.inf, 0.0, -0.0, *map(single, (0.1, 0.5, 1.0, 2.0**63, -(2.0**63), -3.4e38))],
    ),
    "dec": (pa.decimal128(9, 2), list(map(Decimal, ("-9999999.99", "-0.01", "0.00", "0.10", "1.00", "1.01", "99.99")))),
    "wide": (pa.decimal128(38, 10), list(map(Decimal, ("-1e27", "0", "0.0000000001", "0.1", "1.005", "1e27")))),
    "day": (
        pa.date32(),
        [date(1969, 12, 31), date(1970, 1, 1), date(2000, 2, 29), date(2013, 1, 31), date(9999, 12, 31)],
    ),
    "at": (pa.timestamp("us", "UTC"), _TIMES),
    "local": (pa.timestamp("us"), [moment.replace(tzinfo=None) for moment in _TIMES]),
    "text": (
        pa.string(),
        [
            *("", " ", "a", "A", "ab", "AB", "abc", "b", "é", "e\u0301", "ß", "😀", "😀x", "a\nb", "a.b", "a_b", "a%b"),
            *("0", "7", "007", " 7", "-7", "10", "9", "7.50", "1e3", "128", "NaN", "null", "true", "True", "it's"),
            *("2013-01-31", "2013-02-30", "2013-1-5", '{"a": 1}', "{a", "x@example.com", "\\d"),
        ],
    ),
    "other": (pa.string(), ["", "a", "A", "ab", "b", "é", "7", "10"]),
    "flag": (pa.bool_(), [True, False, True]),
    "raw": (pa.binary(), [b"", b"\0", b"a", b"\xff"]),
    "none": (pa.int32(), [None]),
    "item": (
        pa.struct([("code", pa.string()), ("n", pa.int32())]),
        [{"code": "a", "n": 1}, {"code": None, "n": 7}, {"code": "", "n": None}, {"code": "ab", "n": -1}],
    ),
}


def rows() -> list[Row]:
    """Rows in which each column cycles through its values and NULL, with its own step."""
    found = []
    for i in range(ROWS):
        row = {}
        for step, (name, (_, values)) in enumerate(COLUMNS.items(), 1):
            some = [*values, None]
            row[name] = some[i * step % ROWS % len(some)]
        found.append(row)
    return found


class Case(NamedTuple):
    """A check as in the argument, and a function from a row to its result."""

    check: dict[str, Any]
    holds: Callable[[Row], Holds]


def _known(names: str, test: Callable[..., Any]) -> Callable[[Row], Holds]:
    """The result is NULL if one of the columns is, and otherwise that of ``test`` on their values."""

    def holds(row: Row) -> Holds:
        values = [row[name] if not inner else (row[name] or {}).get(inner) for name, inner in parts]
        return None if any(value is None for value in values) else bool(test(*values))

    parts = [(name, inner) for name, _, inner in (text.partition(".") for text in names.split())]
    return holds


def _ordered(value: Any) -> Any:
    """A value in the order of Spark: NaN is the largest number, and texts compare by their bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return (0, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _between(column: str, low: Any, high: Any, least: Any = None, most: Any = None) -> Case:
    """``low`` and ``high`` are the bounds in the argument; ``least`` and ``most`` are their values, if different."""
    least, most = low if least is None else least, high if most is None else most

    def test(value: Any) -> bool:
        kept = _ordered(value)
        return not ((low is not None and kept < _ordered(least)) or (high is not None and kept > _ordered(most)))

    bounds = {name: bound for name, bound in (("min", low), ("max", high)) if bound is not None}
    return Case({"range": {"column": column, **bounds}}, _known(column, test))


def _among(column: str, values: list[Any], meant: list[Any] | None = None) -> Case:
    known = values if meant is None else meant
    return Case({"in_set": {"column": column, "values": values}}, _known(column, lambda v: v in known))


def _fits(column: str, kind: str, test: Callable[[Any], Any]) -> Case:
    return Case({"fits": {"column": column, "type": kind}}, _known(column, test))


def _long(column: str, low: int | None, high: int | None) -> Case:
    bounds = {name: bound for name, bound in (("min", low), ("max", high)) if bound is not None}
    return Case(
        {"length": {"column": column, **bounds}},
        _known(column, lambda v: (low or 0) <= len(v) <= (len(v) if high is None else high)),
    )


def _matching(pattern: str, python: str | None = None) -> Case:
    """``python``: the pattern in Python's syntax, if that differs."""
    compiled = re.compile(pattern if python is None else python, re.ASCII)
    return Case({"matches": {"column": "text", "pattern": pattern}}, _known("text", compiled.search))


def _expression(expression: str, names: str, test: Callable[..., Any]) -> Case:
    return Case({"check": expression}, _known(names, test))


def _whole(bits: int) -> Callable[[Any], bool]:
    return lambda v: -(1 << (bits - 1)) <= v < 1 << (bits - 1)


def _whole_of_float(v: float) -> bool:
    return math.isfinite(v) and v.is_integer() and -(2.0**63) <= v < 2.0**63


def _whole_of_text(v: str) -> bool:
    return re.fullmatch("0|-?[1-9][0-9]*", v) is not None


def _is_date(v: str) -> bool:
    try:
        return re.fullmatch(r"\d{4}-\d\d-\d\d", v) is not None and date.fromisoformat(v) is not None
    except ValueError:
        return False


def _not_null(name: str) -> Case:
    first, _, inner = name.partition(".")
    return Case({"not_null": name}, lambda row: row[first] is not None and (not inner or row[first][inner] is not None))


def _days(*texts: str) -> list[date]:
    return [date.fromisoformat(text) for text in texts]


def cases() -> list[Case]:
    """Checks of each kind on each type to which it applies."""
    tick = timedelta(microseconds=1)
    noon = _NOON.replace(tzinfo=None)
    return [
        *map(_not_null, (*COLUMNS, "item.code", "item.n")),
        _between("tiny", -128, 127),
        _between("tiny", -1, 1),
        _between("tiny", -1000, 0.5),
        _between("whole", 1, 10),
        _between("whole", 0.5, None),
        _between("whole", None, "7", most=7),
        _between("whole", -(2**40), 2**40),
        _between("whole", 2**40, None),
        _between("long", 2**53 + 1, None),
        _between("long", None, -(2**63)),
        _between("real", 0, None),
        _between("real", 0.0, 0.0),
        _between("real", -0.0, 1),
        _between("real", None, 1e300),
        _between("real", None, "inf", most=math.inf),
        _between("real", "-inf", None, least=-math.inf),
        _between("real", 2**53 + 1, None, least=math.nextafter(2.0**53, math.inf)),
        _between("single", 0.1, None),
        _between("single", None, 0.1),
        _between("single", -1, 0.5),
        _between("dec", "0.01", "1.00", Decimal("0.01"), Decimal(1)),
        _between("dec", "0.001", "1.009", Decimal("0.001"), Decimal("1.009")),
        _between("dec", 0.1, None, least=Decimal("0.1")),
        _between("wide", "0.0000000001", "1e27", Decimal("1e-10"), Decimal("1e27")),
        _between("wide", None, "1e30", most=Decimal("1e30")),
        _between("day", "1970-01-01", "2013-01-31", *_days("1970-01-01", "2013-01-31")),
        _between("day", "2000-02-29 12:00:00", None, least=date(2000, 3, 1)),
        _between("day", None, "2000-02-29 12:00:00", most=date(2000, 2, 29)),
        _between("at", "2000-02-29 12:00:00", "2038-01-19", _NOON, datetime(2038, 1, 19, tzinfo=UTC)),
        _between("at", "2000-02-29T17:45:00+05:45", None, least=_NOON),
        _between("at", None, "2000-02-29 11:59:59.9999991Z", most=_NOON - tick),
        _between("at", "1969-12-31 23:59:59.9999991", "2000-02-29 12:00:00.0000009", _TIMES[0], _NOON),
        _between("local", "2000-02-29 12:00:00.000001", None, least=noon + tick),
        _between("local", None, "2013-03-31 02:30", most=datetime(2013, 3, 31, 2, 30)),  # noqa: DTZ001
        _between("text", "a", "b"),
        _between("text", "", None),
        _between("text", "b", "é"),
        _between("text", None, "9"),
        _between("none", 0, 1),
        _between("item.n", 0, 1),
        _fits("whole", "tinyint", _whole(8)),
        _fits("whole", "smallint", _whole(16)),
        _fits("long", "int", _whole(32)),
        _fits("long", "double", lambda v: int(float(v)) == v and float(v) < 2.0**63),
        _fits("whole", "float", lambda v: int(single(v)) == v and single(v) < 2.0**31),
        _fits("whole", "decimal(5,2)", lambda v: abs(v) < 1000),
        _fits("real", "float", lambda v: not math.isfinite(v) or (abs(v) < 3.5e38 and single(v) == v)),
        _fits("real", "bigint", _whole_of_float),
        _fits("long", "float", lambda v: int(single(v)) == v and single(v) < 2.0**63),
        _fits("single", "bigint", _whole_of_float),
        _fits("single", "double", lambda v: True),
        _fits("dec", "decimal(4,1)", lambda v: abs(v) < 1000 and v * 10 == int(v * 10)),
        _fits("dec", "int", lambda v: v == int(v)),
        _fits("wide", "decimal(9,2)", lambda v: abs(v) < 10**7 and v * 100 == int(v * 100)),
        _fits("at", "date", lambda v: v.time() == datetime.min.time()),
        _fits("day", "timestamp", lambda v: True),
        _fits("text", "varchar(1)", lambda v: len(v) <= 1),
        _fits("text", "char(3)", lambda v: len(v) <= 3),
        _fits("text", "int", _whole_of_text),
        _fits("text", "date", _is_date),
        _fits("text", "boolean", lambda v: v in ("true", "false")),
        _fits("none", "tinyint", lambda v: True),
        _among("whole", [0, 7.0, "10"], [0, 7, 10]),
        _among("whole", [0.5, 2**40], []),
        _among("long", [2**53, 2**63 - 1]),
        _among("real", [0, 0.1, 16_777_217]),
        _among("single", [0.1, 0.5, 1]),
        _among("dec", ["0.1", 1, "1.005"], [Decimal("0.1"), Decimal(1)]),
        _among("wide", ["1.005", "0.00000000010"], [Decimal("1.005"), Decimal("1e-10")]),
        _among("day", ["2000-02-29", "1969-12-31"], _days("2000-02-29", "1969-12-31")),
        _among("at", ["2000-02-29T13:00:00+01:00", "1970-01-01"], [_NOON, _TIMES[0]]),
        _among("local", ["2000-02-29 12:00:00"], [noon]),
        _among("text", ["", "é", "it's", "a%b", "\\d", "nothing"]),
        _among("text", ["A", "e\u0301"]),
        _among("flag", [True]),
        _among("flag", [True, False]),
        _among("none", [1]),
        _among("item.code", ["", "a"]),
        _long("text", 1, None),
        _long("text", None, 1),
        _long("text", 2, 2),
        _long("text", 0, 0),
        _long("item.code", 1, 1),
        _matching(""),
        _matching("^a"),
        _matching("b"),
        _matching("^$"),
        _matching("^.$"),
        _matching("^a.b$"),
        _matching("(?s)^a.b$"),
        _matching(r"a\.b"),
        _matching("(?i)^ab$"),
        _matching(r"\d"),
        _matching(r"^\d+$"),
        _matching(r"^\s|\s$"),
        _matching(r"^-?\d+(\.\d+)?$"),
        _matching(r"^\p{L}+$", "^[aAbBcéßeulnNTrt]+$"),
        _matching("^(?!a)"),
        _matching(r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$"),
        _matching(r"\\d"),
        _expression("text NOT IN ('a', '7')", "text", lambda v: v not in ("a", "7")),
        _expression("whole NOT IN (0, 7)", "whole", lambda v: v not in (0, 7)),
        _expression("none IS NULL", "", lambda: True),
        Case({"check": "whole IS NULL"}, lambda row: row["whole"] is None),
        _expression("whole > 1 AND whole < 10", "whole", lambda v: 1 < v < 10),
        _expression("real < 'Infinity'", "real", lambda v: v < math.inf),
        Case({"check": "NOT isnan(real)"}, lambda row: row["real"] is None or not math.isnan(row["real"])),
        _expression("text LIKE 'a_b'", "text", lambda v: re.fullmatch("a.b", v, re.DOTALL)),
        _expression(r"text LIKE '%\%%'", "text", lambda v: "%" in v),
        _expression("NOT text RLIKE '^[0-9]'", "text", lambda v: not re.search("^[0-9]", v)),
        _expression("whole > tiny", "whole tiny", lambda a, b: a > b),
        _expression("whole >= tiny", "whole tiny", lambda a, b: a >= b),
        _expression("day <= to_date(at)", "day at", lambda a, b: a <= b.date()),
        _expression("text = other", "text other", lambda a, b: a == b),
        Case({"check": "text <=> other"}, lambda row: row["text"] == row["other"]),
        Case(
            {"check": "whole > 0 OR flag"},
            lambda row: _either(None if row["whole"] is None else row["whole"] > 0, row["flag"]),
        ),
        Case(
            # Structs compare as a whole: a struct with a NULL field is no NULL.
            {"check": "(tiny, flag) IN ((0Y, true), (1Y, false))"},
            lambda row: (row["tiny"], row["flag"]) in ((0, True), (1, False)),
        ),
        _expression("CAST(whole AS BIGINT) + tiny = 0", "whole tiny", lambda a, b: a + b == 0),
        _expression("dec * 2 > 1", "dec", lambda v: v * 2 > 1),
        _expression("wide / 2 = 0.05", "wide", lambda v: v == Decimal("0.1")),
        Case({"check": "size(array_distinct(array(text, other))) = 2"}, lambda row: row["text"] != row["other"]),
        Case({"check": "try_cast(text AS DATE) IS NOT NULL"}, lambda row: row["text"] in ("2013-01-31", "2013-1-5")),
        Case({"check": "get_json_object(text, '$.a') = '1'"}, lambda row: True if row["text"] == '{"a": 1}' else None),
        _expression("length(raw) > 0", "raw", bool),
        _expression("item.n > 0", "item.n", lambda v: v > 0),
    ]


def _either(a: Holds, b: Holds) -> Holds:
    if a or b:
        return True
    return None if None in (a, b) else False
