"""Random tables with all column types that validate supports, and checks whose results are computed in plain Python."""

from __future__ import annotations

import math
import random
import re
import struct
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Row = dict[str, Any]

PREFIX = "seventeen-same-bytes-"
TEXTS = ["", "a", "ab", "é", "😀x", "N1", "N12AB", PREFIX, PREFIX + "a", PREFIX + "z", "zz", "~"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Case:
    """A check in the form of validate's argument, and a function for the rows that violate it."""

    check: dict[str, Any]
    violates: Callable[[Row], bool]


@dataclass(frozen=True)
class Generated:
    """A table on disk. ``rows``: by partition name, then by file path, in file order; ``p``: the partition's value."""

    directory: Path
    rows: dict[str, dict[str, list[Row]]]
    cases: list[Case]


def _value(rng: random.Random, column: str) -> Any:
    if column in ("i8", "i16", "i32", "i64"):
        bits = int(column[1:])
        extreme = [-(1 << (bits - 1)), (1 << (bits - 1)) - 1]
        return rng.choice([0, 1, -1, 7, 100, -100, rng.randint(-120, 120), *(extreme if rng.random() < 0.1 else [])])
    if column == "u64":
        return rng.choice([0, 1, 2**63 - 1, 2**63 + 5, rng.randint(0, 50)])
    if column in ("f32", "f64"):
        value = rng.choice([0.0, -0.0, 1.5, -2.25, 100.0, rng.uniform(-50, 50)])
        if rng.random() < 0.1:
            value = rng.choice([math.inf, -math.inf]) if rng.random() < 0.02 else math.nan
        return struct.unpack("f", struct.pack("f", value))[0] if column == "f32" else value
    if column in ("dec", "big_dec"):
        return Decimal(rng.randint(-9_999, 9_999)).scaleb(-2)
    if column == "day":
        return date(2013, 1, 1) + timedelta(days=rng.randint(-400, 400))
    if column in ("ts", "ts_ms"):
        return _EPOCH + timedelta(milliseconds=rng.randint(-(10**9), 10**12))
    if column == "flag":
        return rng.random() < 0.5
    if column == "text":
        return rng.choice(TEXTS)
    raise AssertionError(column)


def _types() -> dict[str, Any]:
    import pyarrow as pa

    return {
        "i8": pa.int8(),
        "i16": pa.int16(),
        "i32": pa.int32(),
        "i64": pa.int64(),
        "u64": pa.uint64(),
        "f32": pa.float32(),
        "f64": pa.float64(),
        "dec": pa.decimal128(9, 2),
        "big_dec": pa.decimal128(30, 2),
        "day": pa.date32(),
        "ts": pa.timestamp("us", "UTC"),
        "ts_ms": pa.timestamp("ms", "UTC"),
        "flag": pa.bool_(),
        "text": pa.string(),
    }


def struct_value(rng: random.Random, nulls: float) -> dict[str, Any] | None:
    """A random value of the column ``s``; ``nulls``: the share of NULL in its field ``leaf``."""
    value = None if rng.random() < 0.2 else {"leaf": rng.randint(-5, 5), "need": rng.randint(0, 9)}
    if value is not None and rng.random() < nulls:
        value["leaf"] = None
    return value


VALUES = {"0": "0", "1": "1", "01": "01", "a%3Ab": "a:b", "__HIVE_DEFAULT_PARTITION__": None}
"""Partition values: the text in the folder's name, and the value."""
ODD_NAMES = [
    *("q?x", "st*r", "[ab]", "[!a]", "[", "a]", "{a,b}", "{a", "a}", "a\\x", "\\", "\\*"),
    *("new\nline", "100%", "a%3Ab", "x y"),
]
"""Unusual names of files and folders. Hadoop interprets most of them as patterns."""


def generate(seed: int, directory: Path, partitions: int = 4, files: int = 2) -> Generated:
    """Write a random table.

    Its files differ in column order, missing columns, row groups, version of the format, encoding of times and
    decimals, statistics and names.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, names = random.Random(seed), random.Random(f"names {seed}")
    types = _types()
    rows: dict[str, dict[str, list[Row]]] = {}
    constant_columns = {c for c in types if rng.random() < 0.35}
    """Columns with one value per file and no NULL: statistics decide their checks more often."""
    for text in rng.sample(sorted(VALUES), partitions):
        name = f"p={text}"
        rows[name] = {}
        (directory / name).mkdir(parents=True)
        for f in range(rng.randint(1, files)):
            columns = list(types)
            rng.shuffle(columns)
            columns = columns[: len(columns) - rng.choice([0, 0, 0, 2])]
            count = rng.choice([0, 1, 3, 40, 40, 40])
            nulls = rng.choice([0, 0, 0.1, 1.0])
            constant = {c: _value(rng, c) for c in columns}
            made: list[Row] = []
            for _ in range(count):
                row: Row = {**dict.fromkeys(types), "p": VALUES[text]}
                for c in columns:
                    if c in constant_columns:
                        row[c] = constant[c]
                    elif rng.random() >= nulls:
                        row[c] = _value(rng, c)
                inner = struct_value(rng, nulls)
                some = None if rng.random() < nulls else [rng.choice([None, 3]) for _ in range(rng.randint(0, 3))]
                made.append({**row, "s": inner, "l": some})
            arrays = {c: pa.array([r[c] for r in made], types[c]) for c in columns}
            nested = pa.struct([pa.field("leaf", pa.int32()), pa.field("need", pa.int32(), nullable=False)])
            lists = pa.array([r["l"] for r in made], pa.list_(pa.int32()))
            table = pa.table({**arrays, "s": pa.array([r["s"] for r in made], nested), "l": lists})
            path = directory / name / f"{names.choice(['part', *ODD_NAMES])}-{f}.parquet"
            statistics: Any = rng.choice([True, True, True, False, columns[::2]])
            pq.write_table(
                table,
                path,
                row_group_size=rng.choice([7, 1000]),
                write_statistics=statistics,
                store_decimal_as_integer=rng.random() < 0.5,
                use_dictionary=rng.random() < 0.5,
                version=rng.choice(["1.0", "2.4", "2.6"]),
                data_page_version=rng.choice(["1.0", "2.0"]),
                use_deprecated_int96_timestamps=rng.random() < 0.2,
                write_page_index=rng.random() < 0.3,
            )
            rows[name][str(path)] = made
    return Generated(directory, rows, cases(rng))


def unless_null(column: str, test: Callable[[Any], bool]) -> Callable[[Row], bool]:
    """Whether a row's value violates a check; NULL never does."""
    return lambda row: row[column] is not None and test(row[column])


def _bounds(rng: random.Random, column: str) -> tuple[Any, Any, Callable[[Any], bool]]:
    """Random bounds of a range: see :func:`with_sides`."""
    low, high = sorted((_value(rng, column), _value(rng, column)), key=lambda v: (v != v, v))
    while isinstance(low, float) and not (math.isfinite(low) and math.isfinite(high)):
        low, high = sorted((_value(rng, column), _value(rng, column)))
    if rng.random() < 0.5 and column != "text":
        low, high = _widened(low, high)
    return with_sides(rng, low, high)


def with_sides(rng: random.Random, low: Any, high: Any) -> tuple[Any, Any, Callable[[Any], bool]]:
    """One or both bounds in the form of the argument (None: omitted), and a function for the values outside."""
    sides = rng.choice(["both", "min", "max"])

    def outside(value: Any) -> bool:
        nan = isinstance(value, float) and math.isnan(value)
        below = sides != "max" and not nan and sort_key(value) < sort_key(low)
        above = sides != "min" and (nan or sort_key(value) > sort_key(high))
        return below or above

    return (None if sides == "max" else plain_json(low)), (None if sides == "min" else plain_json(high)), outside


def range_case(column: str, name: str, bounds: tuple[Any, Any, Callable[[Any], bool]]) -> Case:
    """A range check on a column; ``name``: the column's name in the check."""
    low, high, outside = bounds
    spec = {"column": name, **({} if low is None else {"min": low}), **({} if high is None else {"max": high})}
    return Case({"range": spec}, unless_null(column, outside))


def sort_key(value: Any) -> Any:
    """The order of values: texts are ordered by their bytes."""
    return value.encode() if isinstance(value, str) else value


STRUCT_CASES = (
    Case({"not_null": "s.leaf"}, lambda r: r["s"] is None or r["s"]["leaf"] is None),
    Case({"not_null": "s.need"}, lambda r: r["s"] is None),
    Case(
        {"range": {"column": "s.leaf", "max": 4}},
        lambda r: r["s"] is not None and r["s"]["leaf"] is not None and r["s"]["leaf"] > 4,
    ),
)
"""Checks of the fields of the column ``s``."""


def _widened(low: Any, high: Any) -> tuple[Any, Any]:
    if isinstance(low, date):
        return low - timedelta(days=9_999), high + timedelta(days=9_999)
    return low - 1000, high + 1000


def plain_json(value: Any) -> Any:
    """A bound in the form of the argument."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return value.isoformat() if isinstance(value, date) else value


def _fits_float(value: float) -> bool:
    if math.isnan(value) or math.isinf(value):
        return True
    return bool(struct.unpack("f", struct.pack("f", value))[0] == value)


def cases(rng: random.Random) -> list[Case]:
    """Checks of every kind, with bounds near the values of the table."""
    found = [
        Case({"not_null": c}, lambda r, c=c: r[c] is None)  # type: ignore[misc]
        for c in rng.sample(sorted(_types()), 4)
    ]
    found += STRUCT_CASES[:2]
    found.append(Case({"not_null": "s"}, lambda r: r["s"] is None))
    found.append(Case({"not_null": "l"}, lambda r: r["l"] is None))
    found.append(Case({"not_null": "p"}, lambda r: r["p"] is None))
    known = ["1", "a:b"]
    found.append(Case({"in_set": {"column": "p", "values": known}}, unless_null("p", lambda v: v not in known)))
    found.append(STRUCT_CASES[2])
    for column in rng.sample([c for c in sorted(_types()) if c != "flag"], 6):
        found.append(range_case(column, column, _bounds(rng, column)))
    for column, kind, low_int, high_int in (
        ("i16", "tinyint", -128, 127),
        ("i64", "int", -(2**31), 2**31 - 1),
        ("i32", "bigint", -(2**63), 2**63),
        ("u64", "bigint", 0, 2**63 - 1),
        ("i8", "decimal(3,1)", -99, 99),
    ):
        test = unless_null(column, lambda v, a=low_int, b=high_int: not a <= v <= b)  # type: ignore[misc]
        found.append(Case({"fits": {"column": column, "type": kind}}, test))
    found.append(Case({"fits": {"column": "f64", "type": "float"}}, unless_null("f64", lambda v: not _fits_float(v))))
    found.append(Case({"fits": {"column": "big_dec", "type": "decimal(4,2)"}}, unless_null("big_dec", _over_99)))
    some = [0, 1, 7, 100]
    found.append(Case({"in_set": {"column": "i32", "values": some}}, unless_null("i32", lambda v: v not in some)))
    texts = TEXTS[:6]
    found.append(Case({"in_set": {"column": "text", "values": texts}}, unless_null("text", lambda v: v not in texts)))
    found.append(Case({"in_set": {"column": "flag", "values": [True]}}, unless_null("flag", lambda v: not v)))
    found.append(Case({"length": {"column": "text", "max": 2}}, unless_null("text", lambda v: len(v) > 2)))
    pattern = "^N[0-9A-Z]+$"
    found.append(
        Case(
            {"matches": {"column": "text", "pattern": pattern}},
            unless_null("text", lambda v: not re.search(pattern, v)),
        )
    )
    found.append(
        Case(
            {"check": "i32 IS NULL OR i64 IS NULL OR i32 <= i64"},
            lambda r: r["i32"] is not None and r["i64"] is not None and r["i32"] > r["i64"],
        )
    )
    found.append(
        # NULL OR FALSE is NULL, which does not violate the check.
        Case({"check": "p <> '1' OR i8 < 50"}, lambda r: r["p"] == "1" and r["i8"] is not None and r["i8"] >= 50)
    )
    return found


def _over_99(value: Decimal) -> bool:
    return abs(value) > Decimal("99.99")
