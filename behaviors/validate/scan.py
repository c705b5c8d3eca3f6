"""The scan: one Spark query counts the violations of all checks in every file of a group.

The files of a group share one schema. Rows without a violation are filtered out before the aggregation, so that the
aggregation by file is cheap, and the query is as fast as a hand-written count over the table.

Spark would add the partial counts of its tasks up in a second stage, and plan the query again for each run. The partial
counts are few: one row per file and task, and a file is in as many tasks as it has splits. So only the first stage
runs, its plan is cached, and the counts are added up here.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.runtime.java import active
from distop.runtime.lru_cache import LruCache
from distop.tables.reading import row_counts
from distop.tables.reading.file_facts import ddl, may_match, quote
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.reading.spark_expressions import parse_expression
from distop_behaviors.validate.spark_errors import is_internal, is_unexpected, message_of
from distop_behaviors.validate.violation_columns import not_pushed_down, try_eval, where_true

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import FileFacts, PlannedFile
    from distop.tables.reading.row_counts import RowsRead


_log = logging.getLogger(__name__)

_relations: LruCache[DataFrame] = LruCache(8)
_counting: LruCache[_Counting] = LruCache(8)
_expression_errors: LruCache[str | None] = LruCache(256)


@frozen
class FileGroup:
    """Files that ``reader`` reads with one schema.

    ``columns``: the needed columns with their types. ``missing``: needed columns that no file has.
    ``partition_columns``: with one value per file. ``all_rows``: also count rows without a violation, because the facts
    have no row count.
    """

    files: tuple[PlannedFile, ...]
    columns: Mapping[str, Any]
    reader: Reader
    missing: tuple[str, ...] = ()
    partition_columns: Mapping[str, str] = field(default_factory=dict)
    all_rows: bool = False


@dataclass(slots=True)
class Counts:
    """The counts of one file.

    ``rows``: its rows, or the rows that ``where`` selects (None: not counted). ``violations``: by check. ``threw``: by
    check, the rows on which evaluating it threw, if that was tried; ``where_threw``: the same for ``where``.
    """

    rows: int | None = None
    violations: dict[int, int] = field(default_factory=dict)
    threw: dict[int, int] = field(default_factory=dict)
    where_threw: int = 0


@frozen
class Scanned:
    """The counts of a scan by file, and the number of rows that it read.

    ``counts`` may lack files without violations. ``read`` is None if that number is unknown, or if ``where`` skipped
    rows.
    """

    counts: dict[str, Counts]
    read: int | None = None


@frozen
class _Counting:
    """A cached query that counts violations.

    ``planned``: whether the query is a finished plan that Spark runs again. ``rows``: its row counters. ``held``: the
    objects that the query uses; they are kept alive, because their ids are cache keys.
    """

    query: DataFrame
    planned: bool
    rows: RowsRead | None
    held: Any
    running: threading.Lock = field(default_factory=threading.Lock)
    """Held during a run: the row counters serve one run at a time."""


def reading_session(spark: SparkSession, statistics: str, files: Iterable[FileFacts]) -> SparkSession:
    """The session that reads these files.

    It does not skip rows by statistics if ``statistics`` is ``never``, or if the facts of a file are contradictory.
    """
    return session_of(spark, pushdown=statistics != "never" and not any(facts.contradiction for facts in files))


def restricted_to(group: FileGroup, files: Sequence[PlannedFile]) -> FileGroup:
    """The group restricted to these files."""
    return replace(group, files=tuple(files))


def _schema(group: FileGroup) -> str:
    return ", ".join(f"{quote(n)} {ddl(t)}" for n, t in {**group.columns, **group.partition_columns}.items())


def relation(session: SparkSession, group: FileGroup, *, keep: bool = True) -> DataFrame:
    """The rows of the group, cached with Spark's file listing, by each file's path, size and time."""
    from pyspark.sql import functions as F

    reader = group.reader
    staged = reader.stage(session, group.files)
    key = (session, reader.table.format, reader.table.location, group.files, _schema(group), _values(group), staged)
    frame = _relations.get(key, lambda: _read(session, group, staged), keep=keep)
    return frame.withColumns({name: F.lit(None) for name in distinct(group.missing)}) if group.missing else frame


def distinct(names: Sequence[str]) -> list[str]:
    """The names without those that Spark treats as equal to an earlier one (it ignores case)."""
    found: list[str] = []
    for name in names:
        if not may_match(name, found):
            found.append(name)
    return found


def _values(group: FileGroup) -> tuple[tuple[str | None, ...], ...]:
    """The values of the partition columns by file, if a file may move to another partition (for the cache key)."""
    if not group.partition_columns or not group.reader.moves:
        return ()
    names = list(group.partition_columns)
    found = (group.reader.values(file[0]) for file in group.files)
    return tuple(tuple(values[name] for name in names) for values in found)


def _read(session: SparkSession, group: FileGroup, staged: str) -> DataFrame:
    return group.reader.rows(session, group.files, group.columns, group.partition_columns, staged=staged)


def count(
    session: SparkSession,
    group: FileGroup,
    checks: Mapping[int, Column],
    where: Column | None,
    *,
    lasting: bool = False,
) -> Scanned:
    """Count the violations by file and check. Raises Spark's errors.

    ``lasting``: no condition has a constant of the current day, so the plan can be reused.

    Creating a query takes dozens of calls into the JVM, two analyses and a plan, so the last queries are cached.
    """
    with_rows = where is not None or group.all_rows
    if not with_rows and not checks:
        return Scanned({})
    frame, found = relation(session, group), tuple(checks.values())
    key = (id(frame), tuple(map(id, found)), id(where), with_rows, lasting)

    def made() -> _Counting:
        query = _counting_query(frame, group, found, where)
        held = (frame, found, where)
        planned = _planned(session, query) if lasting else None
        if planned is None:
            return _Counting(query, False, None, held)
        return _Counting(planned[0], True, row_counts.of_plan(planned[1]), held)

    rows, read = _run(_counting.get(key, made))
    counts: dict[str, Counts] = {}
    for row in rows:
        path = group.reader.planned_path(row[0])
        of_file = counts.setdefault(path, Counts(0 if with_rows else None, dict.fromkeys(checks, 0)))
        if with_rows:
            of_file.rows = (of_file.rows or 0) + row[1]
        for i, n in enumerate(checks, 2 if with_rows else 1):
            of_file.violations[n] += row[i]
    return Scanned(counts, read)


def _run(counting: _Counting) -> tuple[Sequence[Any], int | None]:
    """Run a counting query; returns its result rows, and the number of rows that it read (None: unknown)."""
    if not counting.planned:
        # A new query each time: a query that has run would reuse its old shuffle files.
        query = counting.query.select("*")
        return query.collect(), row_counts.of_frame(query)
    if counting.rows is None:
        return counting.query.collect(), None
    with counting.running:
        before = counting.rows.total()
        return counting.query.collect(), counting.rows.total() - before


def rows_by_file(session: SparkSession, group: FileGroup) -> dict[str, int]:
    """The number of rows that Spark finds in each file of a group, without reading a column. Raises Spark's errors."""
    counts = count(session, replace(group, all_rows=True), {}, None, lasting=True).counts
    return {path: found.rows or 0 for path, found in counts.items()}


def misread_files(
    session: SparkSession, group: FileGroup, files: Sequence[FileFacts], found: Mapping[str, int] | None = None
) -> dict[str, str]:
    """The files of a group in which Spark does not find all rows, each with an error message.

    ``found``: the rows by file, if known; otherwise a separate query counts them, and also the deleted rows if their
    number is unknown. Raises Spark's errors.
    """
    reader = group.reader
    files = [facts for facts in files if facts.rows is not None]
    if not files or reader.counted_by is None:
        return {}
    if any(facts.deleted is None for facts in files):
        counts = reader.count_rows(session, group.files)
        files, found = row_counts.with_deletes(files, counts.deleted), counts.kept
    return row_counts.misread_files(files, rows_by_file(session, group) if found is None else found, reader.counted_by)


def _planned(session: SparkSession, query: DataFrame) -> tuple[DataFrame, Any] | None:
    """The query as a reusable plan of one stage; None if that fails, and then the query itself reports the error."""
    try:
        return partial_counts(session, query)
    except Exception:
        _log.warning("Cannot reuse the plan of a count; Spark plans it again for each run", exc_info=True)
        return None


def _counting_query(frame: DataFrame, group: FileGroup, checks: Sequence[Column], where: Column | None) -> DataFrame:
    from pyspark.sql import functions as F

    totals = [F.count_if(column) for column in checks]
    if where is not None:
        frame = where_true(frame, where)
    if where is not None or group.all_rows:
        totals.insert(0, F.count(F.lit(1)))
    else:
        # Not pushed down to the file reader: the statistics did not decide these files, so checking pages and
        # dictionaries would only take time; and it could skip a row on which a check throws.
        frame = frame.where(not_pushed_down(*checks))
    return frame.groupBy(group.reader.counting_column(frame)).agg(*totals)


def count_attempts(
    session: SparkSession, group: FileGroup, checks: Mapping[int, Column], where: Column | None
) -> Scanned:
    """Like :func:`count`, but a row on which a check throws is counted and does not fail the query."""
    from pyspark.sql import functions as F

    frame = relation(session, group)
    path = group.reader.file_column(frame).alias("file")
    tried = [try_eval(column).alias(f"c{n}") for n, column in checks.items()]
    picked = F.lit(True) if where is None else try_eval(where)
    frame = frame.select(path, picked.alias("w"), *tried)
    chosen = F.lit(True) if where is None else F.coalesce(F.col("w.v"), F.lit(False))
    totals = [F.count_if(chosen), F.count_if(F.col("w").isNull())]
    for n in checks:
        totals.append(F.count_if(chosen & F.col(f"c{n}.v")))
        totals.append(F.count_if(chosen & F.col(f"c{n}").isNull()))
    out = {}
    query = frame.groupBy("file").agg(*totals)
    for row in query.collect():
        counts = Counts(row[1] if where is not None or group.all_rows else None, where_threw=row[2])
        for i, n in enumerate(checks):
            counts.violations[n], counts.threw[n] = row[3 + 2 * i], row[4 + 2 * i]
        out[group.reader.planned_path(row[0])] = counts
    return Scanned(out, row_counts.of_frame(query))


def expression_error(session: SparkSession, group: FileGroup, text: str) -> str | None:
    """The error of an expression as a condition on this group's columns; None if it is valid.

    The result depends only on the columns' names and types, so it is cached for later batches.
    """
    key = (session, _schema(group), group.missing, text)
    return _expression_errors.get(key, lambda: _refusal(session, relation(session, group), text))


def _refusal(session: SparkSession, frame: DataFrame, text: str) -> str | None:
    from pyspark.errors import AnalysisException

    try:
        frame.where(parse_expression(session, text).column)._jdf.queryExecution().analyzed()
    except AnalysisException as e:
        kind, given = e.getCondition() or "", e.getMessageParameters() or {}
        if kind == "DATATYPE_MISMATCH.FILTER_NOT_BOOLEAN":
            found = given.get("type", "").strip('"')
            # A column that these files lack is NULL, and so is the expression.
            return None if found == "VOID" else f"the expression is of type {found.lower()}, not boolean"
        return message_of(e)
    except Exception as e:
        if is_unexpected(e):
            raise
        return message_of(e)
    return None


def condition_error(session: SparkSession, group: FileGroup, column: Column) -> str | None:
    """Spark's error for this condition on this group's columns; None if it accepts the condition."""
    from pyspark.errors import AnalysisException

    frame = relation(session, group)
    try:
        # The expression is planned as well, to find what the optimizer fails on. An error of the expression itself (a
        # constant that cannot be cast) is reported when the rows are counted.
        frame.where(not_pushed_down(column))._jdf.queryExecution().executedPlan()
    except AnalysisException as e:
        return message_of(e)
    except Exception as e:
        if is_unexpected(e):
            raise
        return message_of(e) if is_internal(e) else None
    return None


_AGGREGATION = "HashAggregate"


def partial_counts(session: SparkSession, query: DataFrame) -> tuple[DataFrame, Any] | None:
    """The partial counts of each task, which the caller adds up by key, and their plan.

    Each ``collect()`` computes them again. None if Spark plans the query in another way, or reads more than files for
    it. Raises Spark's errors.

    A constant of the current day, such as '12:30' as a timestamp, keeps the day of planning: do not cache such a query.
    """
    from pyspark.sql.classic.dataframe import DataFrame as Classic

    # This plan has no shuffle yet between the partial and the final aggregation.
    whole = query._jdf.queryExecution().sparkPlan()
    if str(whole.nodeName()) != _AGGREGATION:
        return None
    partial = whole.child()
    if str(partial.nodeName()) != _AGGREGATION:
        return None
    if partial.output().length() != len(query.columns):
        return None  # Spark has optimized away a constant or duplicate count, and adds it in the final aggregation
    if partial.collectLeaves().length() != 1:
        return None  # each run would first read a second source
    jvm: Any = session._jvm
    jsession: Any = session._jsparkSession
    with active(session):
        stage = jvm.org.apache.spark.sql.execution.QueryExecution.prepareExecutedPlan(jsession, partial)
        frame = Classic(jsession.internalCreateDataFrame(stage.execute(), stage.schema(), False), session)
        return frame, stage
