"""Fetches samples after the scan: a few violating rows with file, row index and values."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop_behaviors.validate import scan, spark_errors
from distop_behaviors.validate.partition_result import MAX_TEXT, shorten
from distop_behaviors.validate.violation_columns import any_of, column_at, where_true

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, SparkSession

    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.validate.scan import FileGroup

_log = logging.getLogger(__name__)

FEW = 1_000
"""Checks with up to this many violations share one query. A check with more gets its own query with a limit."""

_AS_IS = ("tinyint", "smallint", "int", "bigint", "boolean", "float", "double", "string")


@frozen
class SampleRequest:
    """A request for samples of one check from a group's files, in order.

    ``known``: the number of violating rows in these files. All files but the last together have fewer than ``limit``.
    ``shown``: the columns to show, as (name, path, type); an empty path if no file has the column.
    """

    check: int
    column: Column
    files: tuple[PlannedFile, ...]
    known: int
    limit: int
    shown: tuple[tuple[str, tuple[str, ...], Any], ...]


@frozen
class ViolatingRow:
    """One violating row of a check."""

    check: int
    file: str
    index: int
    values: dict[str, Any]


def fetch(
    session: SparkSession, group: FileGroup, requests: Sequence[SampleRequest], where: Column | None
) -> list[ViolatingRow]:
    """The requested rows; a check whose query fails has no samples. Raises unexpected errors."""
    few = [w for w in requests if w.known <= FEW]
    many = [w for w in requests if w.known > FEW]
    rows: list[ViolatingRow] = []
    if few:
        try:
            rows = _query(session, group, few, where, None)
        except Exception as e:
            if spark_errors.is_unexpected(e):
                raise
            # A check may fail on a file that was chosen for another check.
            many = [*few, *many]
    for request in many:
        *before, last = request.files
        try:
            # Spark reads the largest file first, and a query with a limit would take all rows from it.
            first = _query(session, group, [replace(request, files=tuple(before))], where, None) if before else []
            left = request.limit - len(first)
            rows += first
            if left > 0:
                rows += _query(session, group, [replace(request, files=(last,), limit=left)], where, left)
        except Exception as e:
            if spark_errors.is_unexpected(e):
                raise
            _log.warning(
                "Cannot fetch samples of check %d; its counts stay: %s", request.check, spark_errors.message_of(e)
            )
    return rows


def _query(
    session: SparkSession, group: FileGroup, requests: Sequence[SampleRequest], where: Column | None, limit: int | None
) -> list[ViolatingRow]:
    from pyspark.sql import functions as F

    files = tuple(dict.fromkeys(f for w in requests for f in w.files))
    frame = scan.relation(session, scan.restricted_to(group, files), keep=False)
    violated = any_of([w.column for w in requests])
    frame = where_true(where_true(frame, where) if where is not None else frame, violated)
    shown = {path: kind for w in requests for _, path, kind in w.shown if path}
    position = {path: i for i, path in enumerate(shown)}
    frame = frame.select(
        group.reader.file_column(frame).alias("file"),
        group.reader.position_column(frame).alias("row"),
        *(F.coalesce(w.column, F.lit(False)).alias(f"c{w.check}") for w in requests),
        *(sample_column(path, kind).alias(f"v{position[path]}") for path, kind in shown.items()),
    )
    rows = frame.limit(limit).collect() if limit is not None else frame.collect()
    order = {f[0]: i for i, f in enumerate(files)}
    placed = ((group.reader.planned_path(r["file"]), r) for r in rows)
    found = sorted(placed, key=lambda x: (order.get(x[0], 0), x[1]["row"]))
    out = []
    for request in requests:
        mine = {f[0] for f in request.files}
        hits = [(file, row) for file, row in found if row[f"c{request.check}"] and file in mine]
        for file, row in hits[: request.limit]:
            values = {name: json_value(row[f"v{position[path]}"]) if path else None for name, path, _ in request.shown}
            out.append(ViolatingRow(request.check, file, row["row"], values))
    return out


def sample_column(path: tuple[str, ...], kind: Any) -> Column:
    """The value at a path in the form for a sample. A long value is truncated."""
    from pyspark.sql import functions as F

    column = column_at(path)
    if isinstance(kind, str) and kind in _AS_IS:
        # Fetch only the start of a long text.
        return F.substring(column, 1, MAX_TEXT + 1) if kind == "string" else column
    if kind == "binary":
        return F.hex(F.substring(column, 1, MAX_TEXT // 2 + 1))
    return column.cast("string")


def json_value(value: Any) -> Any:
    """The value for JSON: a long text is truncated, NaN and infinities become text."""
    if isinstance(value, str):
        return shorten(value, MAX_TEXT)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
