"""Queries about keys: rows with a duplicate key, and rows whose key is missing in another table.

Keys compare as in Spark's GROUP BY: NaN equals NaN, -0.0 equals 0.0, and texts compare by bytes. A key with a NULL does
not count as a key.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import ddl, widest
from distop_behaviors.reading.check_session import SETTINGS
from distop_behaviors.validate.row_samples import json_value, sample_column
from distop_behaviors.validate.typed_bounds import RANGES, Unfit
from distop_behaviors.validate.violation_columns import column_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import SparkType
    from distop_behaviors.validate.partition_state import CheckColumn

PART_BYTES = 64 * 1024 * 1024
"""Bytes of files per shuffle partition. For a large table, the few partitions of the session would be too large."""
MOST_PARTS = 2_000
BROADCAST_BYTES = 10 * 1024 * 1024
"""Maximum bytes of a table whose keys Spark broadcasts (Spark's default)."""
EXAMPLES = 16
"""Maximum number of duplicate keys whose rows are fetched as samples."""
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Decimal digits of whole numbers, by their bits."""


@frozen
class KeyViolations:
    """Rows that violate a key check, and how to find some of them.

    ``violations``: number of rows. ``examples``: hashes of some duplicate keys, for :func:`sample_duplicates`.
    ``frame``: the query that has run.
    """

    violations: int
    frame: DataFrame
    examples: tuple[int, ...] = ()


@frozen
class SampleRow:
    """A violating row: its planned file, its position in it, and the values of the key."""

    file: str
    index: int
    values: tuple[Any, ...]


def check_comparable(what: str, names: Sequence[str], kinds: Sequence[SparkType]) -> None:
    """Raises Unfit if values of one of these types cannot be compared."""
    for name, kind in zip(names, kinds, strict=True):
        if _has_map(kind):
            raise Unfit(f"{what} applies to columns whose values can be compared, but {name!r} is {ddl(kind)}")


def _has_map(kind: SparkType) -> bool:
    if not isinstance(kind, tuple):
        return False
    if kind[0] == "struct":
        return any(_has_map(inner) for _, inner in kind[1])
    return kind[0] == "map" or any(_has_map(inner) for inner in kind[1:])


def common_type(name: str, kind: SparkType, to: str, other: SparkType) -> SparkType:
    """The type in which the values of both columns compare without loss. Raises Unfit if there is none."""
    # Spark casts structs by the positions of their fields, not by their names.
    found = widest(kind, other) if isinstance(kind, str) or kind == other else None
    if found is None and isinstance(kind, str) and isinstance(other, str):
        numbers = [_as_decimal(k) for k in (kind, other)]
        if None not in numbers:
            found = widest(*numbers)
    if "void" in (kind, other):
        found = other if kind == "void" else kind
    if found is None:
        raise Unfit(f"the columns cannot be compared: {name!r} is {ddl(kind)} and {to!r} is {ddl(other)}")
    return found


def _as_decimal(kind: str) -> str | None:
    if kind in RANGES:
        return f"decimal({_DIGITS[RANGES[kind]]},0)"
    return kind if kind.startswith("decimal") else None


def key_columns(targets: Sequence[CheckColumn], kinds: Sequence[SparkType] | None = None) -> list[Column]:
    """The columns of the key, cast to ``kinds`` if given."""
    columns = [column_at(target.path) for target in targets]
    if kinds is None:
        return columns
    return [
        column if target.kind == kind else column.cast(ddl(kind))
        for column, target, kind in zip(columns, targets, kinds, strict=True)
    ]


def _named(key: Sequence[Column], prefix: str) -> list[Column]:
    return [column.alias(f"{prefix}{n}") for n, column in enumerate(key)]


def _keyed(rows: DataFrame, key: Sequence[Column], prefix: str = "k", *more: Column) -> DataFrame:
    """The rows whose key has no NULL: the key as ``k0``, ``k1`` …, and the columns ``more``."""
    whole = reduce(lambda a, b: a & b, (column.isNotNull() for column in key))
    return rows.where(whole).select(*_named(key, prefix), *more)


def _names(key: Sequence[Column], prefix: str = "k") -> list[str]:
    return [f"{prefix}{n}" for n in range(len(key))]


def key_hash(columns: Sequence[Column]) -> Column:
    """A hash of the key: equal keys have the same hash, and different keys may share one."""
    from pyspark.sql import functions as F

    return F.xxhash64(*columns)


def _spread(rows: DataFrame, names: Sequence[str], size: int) -> DataFrame:
    """The rows repartitioned by key, if ``size`` bytes of files need more partitions than the session has."""
    parts = min(size // PART_BYTES, MOST_PARTS)
    return rows.repartition(parts, *names) if parts > int(SETTINGS["spark.sql.shuffle.partitions"]) else rows


def count_duplicates(rows: Sequence[DataFrame], key: Sequence[Column], size: int) -> KeyViolations:
    """The rows beyond the first one of each key, in files of ``size`` bytes. Raises Spark's errors.

    ``rows``: one frame with all rows; or several frames without a common key, each of which one Spark task groups.

    It groups by the keys, not by their hashes, so that one query is exact. Hashes were not faster for a number and a
    tenth faster for a text of 40 characters, but need a second query if keys repeat.
    """
    from pyspark.sql import functions as F

    names = _names(key)

    def groups(keyed: DataFrame) -> DataFrame:
        return keyed.groupBy(*names).agg(F.count(F.lit(1)).alias("n")).where("n > 1")

    if len(rows) == 1:
        found = groups(_spread(_keyed(rows[0], key), names, size))
    else:
        # A frame with one partition is grouped without a shuffle.
        found = reduce(lambda a, b: a.union(b), (groups(_keyed(part, key).coalesce(1)) for part in rows))
    # The same query also returns the hashes of some duplicate keys, chosen by their low bits.
    some = (f"min(h) FILTER (WHERE pmod(h, {EXAMPLES}) = {n})" for n in range(EXAMPLES))
    number = key_hash([F.col(name) for name in names]).alias("h")
    frame = found.select("n", number).selectExpr("sum(n - 1)", *some)
    ((violations, *found_numbers),) = frame.collect()
    return KeyViolations(
        violations or 0, frame, tuple(sorted(number for number in found_numbers if number is not None))
    )


def _place(rows: DataFrame, reader: Reader) -> tuple[Column, Column]:
    """The location of a row: its file, and its position in the file."""
    return reader.file_column(rows).alias("file"), reader.position_column(rows).alias("row")


def sample_duplicates(
    rows: DataFrame,
    key: Sequence[Column],
    reader: Reader,
    examples: Sequence[int],
    limit: int,
    targets: Sequence[CheckColumn],
) -> list[SampleRow]:
    """Rows with duplicate keys: for some keys the first and the last row. Raises what Spark raises."""
    from pyspark.sql import functions as F

    names = _names(key)
    place = F.struct(*_place(rows, reader)).alias("place")
    some = _keyed(rows.where(key_hash(key).isin(list(examples))), key, "k", place)
    ends = some.groupBy(*names).agg(
        F.count(F.lit(1)).alias("n"), F.min("place").alias("first"), F.max("place").alias("last")
    )
    values = [sample_column((name,), target.kind) for name, target in zip(names, targets, strict=True)]
    found = ends.where("n > 1").orderBy("first").limit(max(limit // 2, 1)).select("first", "last", *values).collect()
    shown = [
        SampleRow(reader.planned_path(at["file"]), at["row"], tuple(map(json_value, value)))
        for first, last, *value in found
        for at in (first, last)
    ]
    return shown[:limit]


@frozen
class ReferencedRows:
    """The referenced table: its rows (None: no rows), its key columns, and the bytes of its files."""

    rows: DataFrame | None
    key: Sequence[Column]
    size: int


def _without_partner(
    rows: DataFrame, key: Sequence[Column], partners: ReferencedRows, size: int, *more: Column
) -> DataFrame:
    from pyspark.sql import functions as F

    mine = _keyed(rows, key, "k", *more)
    if partners.rows is None:
        return mine
    if partners.size > BROADCAST_BYTES:
        mine = _spread(mine, _names(key), size + partners.size)
    theirs = _keyed(partners.rows, partners.key, "p")
    pairs = [F.col(a) == F.col(b) for a, b in zip(_names(key), _names(partners.key, "p"), strict=True)]
    return mine.join(theirs, pairs, "left_anti")


def count_orphans(rows: DataFrame, key: Sequence[Column], partners: ReferencedRows, size: int) -> KeyViolations:
    """The rows whose key is missing in the other table, in files of ``size`` bytes. Raises what Spark raises."""
    frame = _without_partner(rows, key, partners, size).selectExpr("count(1)")
    ((violations,),) = frame.collect()
    return KeyViolations(violations, frame)


def sample_orphans(
    rows: DataFrame,
    key: Sequence[Column],
    partners: ReferencedRows,
    size: int,
    reader: Reader,
    limit: int,
    targets: Sequence[CheckColumn],
) -> list[SampleRow]:
    """The first rows whose key is missing in the other table. Raises what Spark raises."""
    place = _place(rows, reader)
    # The original values, not the values cast for the comparison.
    values = [sample_column(target.path, target.kind).alias(f"v{n}") for n, target in enumerate(targets)]
    found = _without_partner(rows, key, partners, size, *place, *values).orderBy("file", "row").limit(limit)
    names = [f"v{n}" for n in range(len(targets))]
    return [
        SampleRow(reader.planned_path(row["file"]), row["row"], tuple(json_value(row[name]) for name in names))
        for row in found.collect()
    ]
