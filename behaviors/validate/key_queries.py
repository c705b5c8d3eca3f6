"""The queries about keys: rows that share one, and rows whose key is not in another table.

Keys compare as Spark groups by them: NaN equals NaN, -0.0 equals 0.0, texts by their bytes. A key with a NULL is none.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import ddl, widest
from distop_behaviors.reading.check_session import SETTINGS
from distop_behaviors.validate.row_samples import plain, shown_as
from distop_behaviors.validate.typed_bounds import RANGES, Unfit
from distop_behaviors.validate.violation_columns import column_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import SparkType
    from distop_behaviors.validate.partition_checks import Target

PART_BYTES = 64 * 1024 * 1024
"""Of files, for each part of a shuffle: the session's own few parts would each hold too many keys of a large table."""
MOST_PARTS = 2_000
BROADCAST_BYTES = 10 * 1024 * 1024
"""Spark's own limit: the keys of a table up to which they are sent to where the rows are."""
EXAMPLES = 16
"""So many of the keys that several rows have are looked up for samples, at most."""
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Decimal digits of whole numbers by their bits."""


@frozen
class Found:
    """Rows that violate a key check, and how to find some of them.

    ``violations``: number of rows. ``examples``: what :func:`sharing` finds some of them by. ``frame``: the query that
    was run.
    """

    violations: int
    frame: DataFrame
    examples: tuple[int, ...] = ()


@frozen
class Shown:
    """A row: its file as it was planned, its position there, and the key's values in order."""

    file: str
    index: int
    values: tuple[Any, ...]


def check_comparable(what: str, names: Sequence[str], kinds: Sequence[SparkType]) -> None:
    """Raises Unfit where values of one of these types do not compare."""
    for name, kind in zip(names, kinds, strict=True):
        if _has_map(kind):
            raise Unfit(f"{what} applies to columns whose values compare, and {name!r} is {ddl(kind)}")


def _has_map(kind: SparkType) -> bool:
    if not isinstance(kind, tuple):
        return False
    if kind[0] == "struct":
        return any(_has_map(inner) for _, inner in kind[1])
    return kind[0] == "map" or any(_has_map(inner) for inner in kind[1:])


def common(name: str, kind: SparkType, to: str, other: SparkType) -> SparkType:
    """The type in which values of both columns are compared, without loss. Raises Unfit where there is none."""
    # Spark casts structs by the places of their fields, whatever these are called.
    found = widest(kind, other) if isinstance(kind, str) or kind == other else None
    if found is None and isinstance(kind, str) and isinstance(other, str):
        numbers = [_as_decimal(k) for k in (kind, other)]
        if None not in numbers:
            found = widest(*numbers)
    if "void" in (kind, other):
        found = other if kind == "void" else kind
    if found is None:
        raise Unfit(f"{name!r} is {ddl(kind)}, which does not compare with {to!r}, which is {ddl(other)}")
    return found


def _as_decimal(kind: str) -> str | None:
    if kind in RANGES:
        return f"decimal({_DIGITS[RANGES[kind]]},0)"
    return kind if kind.startswith("decimal") else None


def key_of(targets: Sequence[Target], kinds: Sequence[SparkType] | None = None) -> list[Column]:
    """The key's columns, as values of ``kinds`` where these are given."""
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
    """The rows whose key has no NULL: the key as ``k0``, ``k1``…, and ``more``."""
    whole = reduce(lambda a, b: a & b, (column.isNotNull() for column in key))
    return rows.where(whole).select(*_named(key, prefix), *more)


def _names(key: Sequence[Column], prefix: str = "k") -> list[str]:
    return [f"{prefix}{n}" for n in range(len(key))]


def hashed(columns: Sequence[Column]) -> Column:
    """A number of the key, the same for equal ones; others may share it."""
    from pyspark.sql import functions as F

    return F.xxhash64(*columns)


def _spread(rows: DataFrame, names: Sequence[str], size: int) -> DataFrame:
    """The rows in as many parts by their key as ``size`` bytes of files call for, where the session's do not do."""
    parts = min(size // PART_BYTES, MOST_PARTS)
    return rows.repartition(parts, *names) if parts > int(SETTINGS["spark.sql.shuffle.partitions"]) else rows


def repeated(rows: Sequence[DataFrame], key: Sequence[Column], size: int) -> Found:
    """How many rows there are beyond the first of each key, in files of so many bytes. ``rows``: all of them; or in
    several parts, no two of which have a key in common, each of which is then one Spark task's. Raises what Spark
    raises.

    The keys themselves are grouped, not their hashes: that is exact at once. By hash it took as long for a number and a
    tenth less for a text of 40 characters, and would need a second look at the rows wherever keys repeat.
    """
    from pyspark.sql import functions as F

    names = _names(key)

    def groups(keyed: DataFrame) -> DataFrame:
        return keyed.groupBy(*names).agg(F.count(F.lit(1)).alias("n")).where("n > 1")

    if len(rows) == 1:
        found = groups(_spread(_keyed(rows[0], key), names, size))
    else:
        # What is in one part is grouped without a shuffle.
        found = reduce(lambda a, b: a.union(b), (groups(_keyed(part, key).coalesce(1)) for part in rows))
    # Of what repeats, some keys by a part of their hashes: so they are known without a second look.
    some = (f"min(h) FILTER (WHERE pmod(h, {EXAMPLES}) = {n})" for n in range(EXAMPLES))
    number = hashed([F.col(name) for name in names]).alias("h")
    frame = found.select("n", number).selectExpr("sum(n - 1)", *some)
    ((violations, *found_numbers),) = frame.collect()
    return Found(violations or 0, frame, tuple(sorted(number for number in found_numbers if number is not None)))


def _place(rows: DataFrame, reader: Reader) -> tuple[Column, Column]:
    """Where a row is: its file, and its position there."""
    return reader.file_column(rows).alias("file"), reader.position_column(rows).alias("row")


def sharing(
    rows: DataFrame,
    key: Sequence[Column],
    reader: Reader,
    examples: Sequence[int],
    limit: int,
    targets: Sequence[Target],
) -> list[Shown]:
    """Rows that share a key, of some keys the first and the last by file and position. Raises what Spark raises."""
    from pyspark.sql import functions as F

    names = _names(key)
    place = F.struct(*_place(rows, reader)).alias("place")
    some = _keyed(rows.where(hashed(key).isin(list(examples))), key, "k", place)
    ends = some.groupBy(*names).agg(
        F.count(F.lit(1)).alias("n"), F.min("place").alias("first"), F.max("place").alias("last")
    )
    values = [shown_as((name,), target.kind) for name, target in zip(names, targets, strict=True)]
    found = ends.where("n > 1").orderBy("first").limit(max(limit // 2, 1)).select("first", "last", *values).collect()
    shown = [
        Shown(reader.planned_path(at["file"]), at["row"], tuple(map(plain, value)))
        for first, last, *value in found
        for at in (first, last)
    ]
    return shown[:limit]


@frozen
class Partners:
    """The other table's rows (None: there are none), the key's columns there, and the bytes of its files."""

    rows: DataFrame | None
    key: Sequence[Column]
    size: int


def _without_partner(rows: DataFrame, key: Sequence[Column], partners: Partners, size: int, *more: Column) -> DataFrame:
    from pyspark.sql import functions as F

    mine = _keyed(rows, key, "k", *more)
    if partners.rows is None:
        return mine
    if partners.size > BROADCAST_BYTES:
        mine = _spread(mine, _names(key), size + partners.size)
    theirs = _keyed(partners.rows, partners.key, "p")
    pairs = [F.col(a) == F.col(b) for a, b in zip(_names(key), _names(partners.key, "p"), strict=True)]
    return mine.join(theirs, pairs, "left_anti")


def alone(rows: DataFrame, key: Sequence[Column], partners: Partners, size: int) -> Found:
    """Rows whose key no row of the other table has, in files of ``size`` bytes.

    Raises what Spark raises.
    """
    frame = _without_partner(rows, key, partners, size).selectExpr("count(1)")
    ((violations,),) = frame.collect()
    return Found(violations, frame)


def lonely(
    rows: DataFrame,
    key: Sequence[Column],
    partners: Partners,
    size: int,
    reader: Reader,
    limit: int,
    targets: Sequence[Target],
) -> list[Shown]:
    """The first of those rows, by file and position. Raises what Spark raises."""
    place = _place(rows, reader)
    # As they were written, not as they were compared.
    values = [shown_as(target.path, target.kind).alias(f"v{n}") for n, target in enumerate(targets)]
    found = _without_partner(rows, key, partners, size, *place, *values).orderBy("file", "row").limit(limit)
    names = [f"v{n}" for n in range(len(targets))]
    return [
        Shown(reader.planned_path(row["file"]), row["row"], tuple(plain(row[name]) for name in names))
        for row in found.collect()
    ]
