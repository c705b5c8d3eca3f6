"""Random Iceberg tables with schema evolution, written by pyiceberg without a JVM, and their rows in plain Python."""

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

from scripts.validate_oracle.random_tables import (
    PREFIX,
    STRUCT_CASES,
    TEXTS,
    Case,
    Row,
    range_case,
    sort_key,
    struct_value,
    unless_null,
    with_sides,
)
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyiceberg.table import Table

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
_LONG = ["b", "bb", PREFIX, "c" * 5_000, "a" + "z" * 5_000]
"""Texts for a column; Parquet writes no bounds for texts over 4 KiB."""
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001
_MODES = ["none", "counts", "truncate(2)", "truncate(16)", "full"]


@dataclass
class Evolved:
    """A table, its rows (by the columns' first names), and checks (by their current names)."""

    path: Path
    table: Table
    rows: list[Row] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)


def evolve(seed: int, path: Path, *, version: int = 2, **properties: str) -> Evolved:
    """Write a table in one to three appends; between them columns are renamed, widened, moved, dropped and added."""
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
    constant_columns = {c for c in _TYPES if rng.random() < 0.4}
    for step in range(rng.randint(1, 3)):
        if step:
            change(made, rng)
        rows = random_rows(made, rng, constant_columns)
        made.table.append(as_arrow(made, rows))  # one file per partition
        made.rows += rows
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
    return rng.choice(TEXTS if column == "text" else _LONG)


def random_rows(made: Evolved, rng: random.Random, constant_columns: set[str]) -> list[Row]:
    """Further random rows, by the columns' first names. ``constant_columns``: those with one value in these rows."""
    count, nulls = rng.choice([1, 4, 12, 12]), rng.choice([0, 0, 0.1, 1.0])
    constants = {c: _value(rng, c) for c in _TYPES if c != "id"}
    rows: list[Row] = []
    for _ in range(count):
        row: Row = {"id": len(made.rows) + len(rows)}
        for c in constants:
            row[c] = constants[c] if c in constant_columns else None if rng.random() < nulls else _value(rng, c)
        rows.append({**row, "s": struct_value(rng, nulls)})
    return rows


def as_arrow(made: Evolved, rows: list[Row]) -> pa.Table:
    """Rows with the current names and types of the columns; columns without values are NULL."""
    named = [{made.names[c]: value for c, value in row.items()} for row in rows]
    return pa.Table.from_pylist(named, schema=schema_to_pyarrow(made.table.schema()))


def change(made: Evolved, rng: random.Random) -> None:
    """Randomly evolve the schema; partition columns keep their types."""
    partition_columns = {made.table.schema().find_column_name(f.source_id) for f in made.table.spec().fields}
    renamed = rng.sample(["text", "n", "d", "long"], rng.randint(0, 2))
    with made.table.update_schema() as update:
        for column in renamed:
            made.names[column] = f"{made.names[column]}_{len(made.rows)}"
            update.rename_column(made.names[column].rpartition("_")[0], made.names[column])
        for column, kind in (("i", LongType()), ("f", DoubleType()), ("dec", DecimalType(15, 2))):
            if rng.random() < 0.4 and made.names[column] not in partition_columns:
                update.update_column(made.names[column], kind)
        if rng.random() < 0.5:
            update.move_first("id")
    for column in renamed:
        _rename_mode(made.table, made.names[column])
    if rng.random() < 0.5:
        # A new column with the same name: it is NULL in all existing rows.
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
    """Rename the metrics mode of a renamed column, as Iceberg does."""
    prefix = "write.metadata.metrics.column."
    before = prefix + name.rpartition("_")[0]
    mode = table.properties.get(before)
    if mode is not None:
        with table.transaction() as change:
            change.set_properties({prefix + name: mode})
            change.remove_properties(before)


def _cases(made: Evolved, rng: random.Random) -> list[Case]:
    name = made.names

    found = [Case({"not_null": name[c]}, lambda r, c=c: r[c] is None) for c in _TYPES]  # type: ignore[misc]
    found += STRUCT_CASES
    for column in [c for c in _TYPES if c not in ("flag", "id")]:
        found.append(range_case(column, name[column], _bounds(rng, column)))
    for column, kind, least, most in (
        ("i", "tinyint", -128, 127),
        ("n", "int", -(2**31), 2**31 - 1),
        ("n", "smallint", -(2**15), 2**15 - 1),
        ("big", "decimal(4,2)", Decimal("-99.99"), Decimal("99.99")),
    ):
        test = unless_null(column, lambda v, a=least, b=most: not a <= v <= b)  # type: ignore[misc]
        found.append(Case({"fits": {"column": name[column], "type": kind}}, test))
    some, texts, text = [0, 1, 3, 7, 100], TEXTS[:6], name["text"]
    found.append(Case({"in_set": {"column": name["i"], "values": some}}, unless_null("i", lambda v: v not in some)))
    found.append(Case({"in_set": {"column": text, "values": texts}}, unless_null("text", lambda v: v not in texts)))
    found.append(Case({"in_set": {"column": name["flag"], "values": [True]}}, unless_null("flag", lambda v: not v)))
    found.append(Case({"length": {"column": text, "max": 2}}, unless_null("text", lambda v: len(v) > 2)))
    found.append(
        Case(
            {"matches": {"column": text, "pattern": "^N"}},
            unless_null("text", lambda v: not re.search("^N", v)),
        )
    )
    return found


def _bounds(rng: random.Random, column: str) -> tuple[Any, Any, Callable[[Any], bool]]:
    """Random bounds of a range: see :func:`with_sides`."""
    low, high = sorted((_plain(rng, column), _plain(rng, column)), key=sort_key)
    if rng.random() < 0.5 and not isinstance(low, str):
        margin: Any = timedelta(days=99) if isinstance(low, date) else 1_000
        low, high = low - margin, high + margin
    return with_sides(rng, low, high)


def _plain(rng: random.Random, column: str) -> Any:
    value = _value(rng, column)
    return 0.5 if isinstance(value, float) and math.isnan(value) else value
