"""The second, small pass: fetches a few violating rows with their file, row index and values."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop_behaviors.validate import scan, spark_errors
from distop_behaviors.validate.validate_report import MAX_TEXT, shorten
from distop_behaviors.validate.violation_columns import any_of, column_at, where_true

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, SparkSession

    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.validate.scan import Group

_log = logging.getLogger(__name__)

FEW = 1_000
"""So many violating rows are fetched at once for all checks; a check that has more gets a query with a limit."""

_AS_IS = ("tinyint", "smallint", "int", "bigint", "boolean", "float", "double", "string")


@frozen
class Wish:
    """Samples of one check from one group's files, taken in order: ``known`` rows violate it in them, and fewer than
    ``limit`` in all of them but the last.

    ``shown``: the columns to show, as (name, path, type); no path: none of the files has it.
    """

    check: int
    column: Column
    files: tuple[PlannedFile, ...]
    known: int
    limit: int
    shown: tuple[tuple[str, tuple[str, ...], Any], ...]


@frozen
class Row:
    """One violating row of a check."""

    check: int
    file: str
    index: int
    values: dict[str, Any]


def fetch(session: SparkSession, group: Group, wishes: Sequence[Wish], where: Column | None) -> list[Row]:
    """The rows, the first of each wish among them. Raises what is unexpected."""
    few = [w for w in wishes if w.known <= FEW]
    many = [w for w in wishes if w.known > FEW]
    rows: list[Row] = []
    if few:
        try:
            rows = _query(session, group, few, where, None)
        except Exception as e:
            if spark_errors.is_unexpected(e):
                raise
            # A check may throw in a file that was chosen for another one.
            many = [*few, *many]
    for wish in many:
        *before, last = wish.files
        try:
            # Spark begins with the largest file, and a limit is reached there.
            first = _query(session, group, [replace(wish, files=tuple(before))], where, None) if before else []
            left = wish.limit - len(first)
            rows += first
            if left > 0:
                rows += _query(session, group, [replace(wish, files=(last,), limit=left)], where, left)
        except Exception as e:
            if spark_errors.is_unexpected(e):
                raise
            _log.warning("no samples of check %d: %s", wish.check, spark_errors.sentence_of(e))
    return rows


def _query(
    session: SparkSession, group: Group, wishes: Sequence[Wish], where: Column | None, limit: int | None
) -> list[Row]:
    from pyspark.sql import functions as F

    files = tuple(dict.fromkeys(f for w in wishes for f in w.files))
    frame = scan.relation(session, scan.of_files(group, files), keep=False)
    violated = any_of([w.column for w in wishes])
    frame = where_true(where_true(frame, where) if where is not None else frame, violated)
    shown = {path: kind for w in wishes for _, path, kind in w.shown if path}
    position = {path: i for i, path in enumerate(shown)}
    frame = frame.select(
        group.reader.file_column(frame).alias("file"),
        group.reader.position_column(frame).alias("row"),
        *(F.coalesce(w.column, F.lit(False)).alias(f"c{w.check}") for w in wishes),
        *(shown_as(path, kind).alias(f"v{position[path]}") for path, kind in shown.items()),
    )
    rows = frame.limit(limit).collect() if limit is not None else frame.collect()
    order = {f[0]: i for i, f in enumerate(files)}
    placed = ((group.reader.planned_path(r["file"]), r) for r in rows)
    found = sorted(placed, key=lambda x: (order.get(x[0], 0), x[1]["row"]))
    out = []
    for wish in wishes:
        mine = {f[0] for f in wish.files}
        hits = [(file, row) for file, row in found if row[f"c{wish.check}"] and file in mine]
        for file, row in hits[: wish.limit]:
            values = {name: plain(row[f"v{position[path]}"]) if path else None for name, path, _ in wish.shown}
            out.append(Row(wish.check, file, row["row"], values))
    return out


def shown_as(path: tuple[str, ...], kind: Any) -> Column:
    """The value at a path in a form that a sample shows, cut where it is long."""
    from pyspark.sql import functions as F

    column = column_at(path)
    if isinstance(kind, str) and kind in _AS_IS:
        # Only the beginning of a long text is fetched.
        return F.substring(column, 1, MAX_TEXT + 1) if kind == "string" else column
    if kind == "binary":
        return F.hex(F.substring(column, 1, MAX_TEXT // 2 + 1))
    return column.cast("string")


def plain(value: Any) -> Any:
    """JSON's own values; NaN and infinities as text."""
    if isinstance(value, str):
        return shorten(value, MAX_TEXT)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
