"""Random Iceberg tables that change while they are written, by pyiceberg without a JVM; their rows in plain Python."""

from __future__ import annotations

import math
import random
import re
import struct
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from scripts.judging.generated import PREFIX, Case
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.table import Table

Row = dict[str, Any]

_TYPES: dict[str, Any] = {
    "id": LongType(),
    "k": StringType(),
    "i": IntegerType(),
    "n": LongType(),
    "f": FloatType(),
    "d": DoubleType(),
    "dec": DecimalType(9, 2),
    "big": DecimalType(30, 2),
    "day": DateType(),
    "ts": TimestampType(),
    "tz": TimestamptzType(),
    "flag": BooleanType(),
    "text": StringType(),
    "long": StringType(),
}
_LEAF, _NEED = 201, 202
_TEXTS = ["", "a", "ab", "é", "😀x", "N1", "N12AB", PREFIX, PREFIX + "a", PREFIX + "z", "zz", "~"]
_LONG = ["b", "bb", PREFIX, "c" * 5_000, "a" + "z" * 5_000]
"""Parquet has no bounds of texts over 4 KiB."""
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001
_MODES = ["none", "counts", "truncate(2)", "truncate(16)", "full"]


@dataclass
class Evolved:
    """A table, its rows (by the columns' first names), and checks (by their last ones)."""

    path: Path
    table: Table
    rows: list[Row] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)


def evolve(seed: int, path: Path, *, version: int = 2, **properties: str) -> Evolved:
    """Write a table in a few steps, between which its columns are renamed, widened, moved, dropped and added."""
    rng = random.Random(seed)
    fields = [NestedField(n, name, kind, required=False) for n, (name, kind) in enumerate(_TYPES.items(), 1)]
    rng.shuffle(fields)
    inner = StructType(
        NestedField(_LEAF, "leaf", IntegerType()), NestedField(_NEED, "need", IntegerType(), required=True)
    )
    schema = Schema(*fields, NestedField(200, "s", inner, required=False))
    spec = PartitionSpec()
    if rng.random() < 0.6:
        ids = {f.name: f.field_id for f in fields}
        chosen = rng.sample(["k", "flag", "dec", "day"], rng.choice([1, 1, 2]))
        spec = PartitionSpec(
            *(PartitionField(ids[c], 1000 + n, IdentityTransform(), f"by_{c}") for n, c in enumerate(chosen))
        )
    modes = {f"write.metadata.metrics.column.{c}": rng.choice(_MODES[:2]) for c in rng.sample(sorted(_TYPES), 4)}
    modes |= {f"write.metadata.metrics.column.{c}": rng.choice(_MODES) for c in ("text", "long")}
    table = Folder(path).new(
        schema,
        spec,
        **{
            "format-version": str(version),
            "write.parquet.row-group-limit": rng.choice(["3", "1000"]),
            **modes,
            **properties,
        },
    )
    made = Evolved(path, table, names={c: c for c in [*_TYPES, "s"]})
    dull = {c for c in _TYPES if rng.random() < 0.4}
    for step in range(rng.randint(1, 3)):
        if step:
            _change(made, rng)
        _write(made, rng, dull)
    made.cases = _cases(made, rng)
    return made


def _value(rng: random.Random, column: str) -> Any:
    if column == "k":
        return rng.choice(["x", "y/z", "ü"])
    if column == "i":
        return rng.choice([0, 1, 7, 100, rng.randint(-120, 120), 2**31 - 1 if rng.random() < 0.1 else 3])
    if column == "n":
        return rng.choice([0, 5, rng.randint(-(10**6), 10**6), 2**40 if rng.random() < 0.1 else 9])
    if column in ("f", "d"):
        value = rng.choice([0.0, -0.0, 1.5, -2.25, 100.0, math.nan if rng.random() < 0.2 else 7.5])
        return struct.unpack("f", struct.pack("f", value))[0]
    if column in ("dec", "big"):
        return Decimal(rng.randint(-300, 300)).scaleb(-2)
    if column == "day":
        return date(2013, 1, 1) + timedelta(days=rng.randint(-40, 40))
    if column in ("ts", "tz"):
        value = _EPOCH + timedelta(microseconds=rng.randint(10**15, 10**15 + 10**13))
        return value if column == "ts" else value.replace(tzinfo=UTC)
    if column == "flag":
        return rng.random() < 0.5
    return rng.choice(_TEXTS if column == "text" else _LONG)


def _write(made: Evolved, rng: random.Random, dull: set[str]) -> None:
    """One append: a file for each partition that its rows are of."""
    count, nulls = rng.choice([1, 4, 12, 12]), rng.choice([0, 0, 0.1, 1.0])
    steady = {c: _value(rng, c) for c in _TYPES if c != "id"}
    rows: list[Row] = []
    for _ in range(count):
        row: Row = {"id": len(made.rows) + len(rows)}
        for c in steady:
            row[c] = steady[c] if c in dull else None if rng.random() < nulls else _value(rng, c)
        whole = None if rng.random() < 0.2 else {"leaf": rng.randint(-5, 5), "need": rng.randint(0, 9)}
        if whole is not None and rng.random() < nulls:
            whole["leaf"] = None
        rows.append({**row, "s": whole})
    schema = schema_to_pyarrow(made.table.schema())
    named = [{made.names[c]: value for c, value in row.items()} for row in rows]
    made.table.append(pa.Table.from_pylist(named, schema=schema))
    made.rows += rows


def _change(made: Evolved, rng: random.Random) -> None:
    """What a table's owner may do; partition columns stay what they are."""
    by = {made.table.schema().find_column_name(f.source_id) for f in made.table.spec().fields}
    renamed = rng.sample(["text", "n", "d", "long"], rng.randint(0, 2))
    with made.table.update_schema() as update:
        for column in renamed:
            made.names[column] = f"{made.names[column]}_{len(made.rows)}"
            update.rename_column(made.names[column].rpartition("_")[0], made.names[column])
        for column, kind in (("i", LongType()), ("f", DoubleType()), ("dec", DecimalType(15, 2))):
            if rng.random() < 0.4 and made.names[column] not in by:
                update.update_column(made.names[column], kind)
        if rng.random() < 0.5:
            update.move_first("id")
    for column in renamed:
        _rename_mode(made.table, made.names[column])
    if rng.random() < 0.5:
        # The same name, and another column: what was written is NULL in it.
        column = rng.choice(["tz", "big", "ts"])
        with made.table.update_schema() as update:
            update.delete_column(made.names[column])
        with made.table.update_schema() as update:
            update.add_column(made.names[column], _TYPES[column])
        for row in made.rows:
            row[column] = None
    if rng.random() < 0.3 and made.table.spec().fields:
        with made.table.update_spec() as spec:
            spec.remove_field(made.table.spec().fields[0].name)


def _rename_mode(table: Table, name: str) -> None:
    """The metrics mode of a column goes with it, as in Iceberg itself."""
    prefix = "write.metadata.metrics.column."
    before = prefix + name.rpartition("_")[0]
    mode = table.properties.get(before)
    if mode is not None:
        with table.transaction() as change:
            change.set_properties({prefix + name: mode})
            change.remove_properties(before)


def _cases(made: Evolved, rng: random.Random) -> list[Case]:
    name = made.names

    def of(column: str, test: Callable[[Any], bool]) -> Callable[[Row], bool]:
        return lambda row: row[column] is not None and test(row[column])

    found = [Case({"not_null": name[c]}, lambda r, c=c: r[c] is None) for c in _TYPES]  # type: ignore[misc]
    found.append(Case({"not_null": "s.leaf"}, lambda r: r["s"] is None or r["s"]["leaf"] is None))
    found.append(Case({"not_null": "s.need"}, lambda r: r["s"] is None))
    found.append(
        Case(
            {"range": {"column": "s.leaf", "max": 4}},
            lambda r: r["s"] is not None and r["s"]["leaf"] is not None and r["s"]["leaf"] > 4,
        )
    )
    for column in [c for c in _TYPES if c not in ("flag", "id")]:
        low, high, outside = _bounds(rng, column)
        spec = {
            "column": name[column],
            **({} if low is None else {"min": low}),
            **({} if high is None else {"max": high}),
        }
        found.append(Case({"range": spec}, of(column, outside)))
    for column, kind, least, most in (
        ("i", "tinyint", -128, 127),
        ("n", "int", -(2**31), 2**31 - 1),
        ("n", "smallint", -(2**15), 2**15 - 1),
        ("big", "decimal(4,2)", Decimal("-99.99"), Decimal("99.99")),
    ):
        test = of(column, lambda v, a=least, b=most: not a <= v <= b)  # type: ignore[misc]
        found.append(Case({"fits": {"column": name[column], "type": kind}}, test))
    some, texts = [0, 1, 3, 7, 100], _TEXTS[:6]
    found.append(Case({"in_set": {"column": name["i"], "values": some}}, of("i", lambda v: v not in some)))
    found.append(Case({"in_set": {"column": name["text"], "values": texts}}, of("text", lambda v: v not in texts)))
    found.append(Case({"in_set": {"column": name["flag"], "values": [True]}}, of("flag", lambda v: not v)))
    found.append(Case({"length": {"column": name["text"], "max": 2}}, of("text", lambda v: len(v) > 2)))
    found.append(
        Case({"matches": {"column": name["text"], "pattern": "^N"}}, of("text", lambda v: not re.search("^N", v)))
    )
    return found


def _bounds(rng: random.Random, column: str) -> tuple[Any, Any, Callable[[Any], bool]]:
    """Minimum, maximum as the argument writes them (None: left out), and which values lie outside."""
    low, high = sorted((_plain(rng, column), _plain(rng, column)), key=_key)
    if rng.random() < 0.5 and not isinstance(low, str):
        margin: Any = timedelta(days=99) if isinstance(low, date) else 1_000
        low, high = low - margin, high + margin
    sides = rng.choice(["both", "min", "max"])

    def outside(value: Any) -> bool:
        nan = isinstance(value, float) and math.isnan(value)
        below = sides != "max" and not nan and _key(value) < _key(low)
        return below or (sides != "min" and (nan or _key(value) > _key(high)))

    return (None if sides == "max" else _json(low)), (None if sides == "min" else _json(high)), outside


def _plain(rng: random.Random, column: str) -> Any:
    value = _value(rng, column)
    return 0.5 if isinstance(value, float) and math.isnan(value) else value


def _key(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _json(value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    return value.isoformat() if isinstance(value, date) else value
