"""The fused pass: one Spark query counts the violations of all checks in every file of a group.

A group's files share one schema. Rows that violate nothing are filtered out before they are aggregated, so that the
aggregation by file costs next to nothing, and the query is no slower than a hand-written count over the table.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.core.frozen import frozen
from distop.files import identity
from distop.recent import Kept
from distop.tables.reading import iceberg, rows_read
from distop.tables.reading.facts import Unreadable, ddl, may_match, quote
from distop_behaviors.reading.row_expressions import parsed
from distop_behaviors.reading.session import session_of
from distop_behaviors.validate import onestage
from distop_behaviors.validate.expressions import attempted, unpushed, where_true
from distop_behaviors.validate.failures import is_internal, is_unexpected, plain_path, sentence_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.tables.reading.facts import FileFacts
    from distop.tables.reading.footers import PlannedFile
    from distop.tables.reading.rows_read import RowsRead

_log = logging.getLogger(__name__)

_FILE, _KNOWN = "__distop_file", "__distop_known"
_LOCAL = re.compile("^file:/*")
"""Spark writes the paths of local files with one slash here, and with three there."""
_NOT_ASCII = re.compile("%[89A-Fa-f][0-9A-Fa-f]")
_SPECIAL = re.compile(r"[][{}?*\\]")
"""Characters by which Spark takes a path for a pattern."""

_relations: Kept[DataFrame] = Kept(8)
_counting: Kept[_Counting] = Kept(8)
_judged: Kept[str | None] = Kept(256)


@frozen
class Group:
    """Files to be read with one schema. ``columns`` are those that the checks need, with their types in DDL;
    ``missing`` those that none of the files has; ``partition_columns`` come from the files' paths below ``base``.
    ``source``: the metadata file through which Iceberg's are read; "" where the files are Parquet, and all there is.
    ``values``: those of the partition columns by file, in their order, where they are not in the paths.
    ``all_rows``: those without a violation are counted, too: nothing else tells how many there are.
    """

    files: tuple[PlannedFile, ...]
    columns: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    partition_columns: Mapping[str, str] = field(default_factory=dict)
    base: str = ""
    source: str = ""
    values: Mapping[str, tuple[str | None, ...]] | None = None
    all_rows: bool = False

    def path(self, name: str) -> str:
        """A file's planned path, of what a query names it."""
        return name if self.source else plain_path(name)

    def file_column(self, frame: DataFrame) -> Column:
        """The path of a row's file, in a frame of the group's rows."""
        return self._told(frame, iceberg.FILE, "file_path")

    def row_column(self, frame: DataFrame) -> Column:
        """The position of a row in its file."""
        return self._told(frame, iceberg.POSITION, "row_index")

    def _told(self, frame: DataFrame, of_iceberg: str, of_spark: str) -> Column:
        """Not by name alone: the data may have a column of Spark's name."""
        from pyspark.sql import functions as F

        return F.col(of_iceberg) if self.source else frame.metadataColumn("_metadata")[of_spark]


@dataclass(slots=True)
class Counts:
    """One file: its rows, or those that ``where`` picks (None: not counted), violations by check; and, where rows were
    tried one by one, how many threw (``where_threw``: on the condition itself).
    """

    rows: int | None = None
    violations: dict[int, int] = field(default_factory=dict)
    threw: dict[int, int] = field(default_factory=dict)
    where_threw: int = 0


@frozen
class Scanned:
    """What a scan counted by file, and how many rows it read.

    Files without violations may be missing in ``counts``. ``read`` is None where that number is not known, or where
    ``where`` skipped rows.
    """

    counts: dict[str, Counts]
    read: int | None = None


@frozen
class _Counting:
    """A cached query that counts violations.

    ``rows``: the row counters, where Spark has planned the query for good. ``held``: the objects that the query uses;
    they are kept alive so that no other object gets their ids.
    """

    query: DataFrame
    planned: bool
    rows: RowsRead | None
    held: Any
    running: threading.Lock = field(default_factory=threading.Lock)
    """Held during a run: the counters belong to one run at a time."""


def reading_session(spark: SparkSession, statistics: str, files: Iterable[FileFacts]) -> SparkSession:
    """The session that reads these files.

    It skips no rows by statistics if ``statistics`` is ``never``, or if a footer contradicts itself.
    """
    return session_of(spark, pushdown=statistics != "never" and not any(facts.contradiction for facts in files))


def spark_path(path: str) -> str:
    """A planned path as Spark is to take it: one without a scheme would be looked for in Hadoop's default file system,
    while its footer is read here. Hadoop unescapes nothing in it."""
    return f"file://{path}" if path.startswith("/") else path


def pattern_of(path: str) -> str:
    """The pattern that matches this planned path alone.

    Raises Unreadable if Hadoop cannot match the path. Without patterns (``__globPaths__``) Spark reads files more than
    once: for each path with a special character it lists all paths again.
    """
    pattern = _SPECIAL.sub(r"\\\g<0>", path)
    if pattern != path and ":" in path.partition("://")[2 if "://" in path else 0]:
        raise Unreadable(
            f"Spark cannot read the file {path}: its path has a ':' and one of ?*[]{{}}\\, which Hadoop cannot match: "
            "rename it"
        )
    return spark_path(pattern)


def of_files(group: Group, files: Sequence[PlannedFile]) -> Group:
    """The group with these files alone."""
    return replace(group, files=tuple(files))


def _schema(group: Group) -> str:
    return ", ".join(f"{quote(n)} {ddl(t)}" for n, t in {**group.columns, **group.partition_columns}.items())


def relation(session: SparkSession, group: Group, *, keep: bool = True) -> DataFrame:
    """The group's rows. What Spark listed is kept for the next operation: the key holds each file's size and time."""
    from pyspark.sql import functions as F

    values = None if group.values is None else tuple(group.values[f[0]] for f in group.files)
    source = identity(group.source) if group.source else ()
    key = (session, group.files, _schema(group), group.base, source, values)
    if group.source:
        iceberg.stage(session, group.source, group.files)
    frame = _relations.get(key, lambda: _read(session, group), keep=keep)
    return frame.withColumns({name: F.lit(None) for name in distinct(group.missing)}) if group.missing else frame


def distinct(names: Sequence[str]) -> list[str]:
    """The first of those names that Spark may take for one column: it adds no second one, and finds the first by each
    of them.
    """
    found: list[str] = []
    for name in names:
        if not may_match(name, found):
            found.append(name)
    return found


def _read(session: SparkSession, group: Group) -> DataFrame:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    if group.source:
        return iceberg.read(session, group.source, group.files)
    # A check such as `1 = 1` needs no column, which DDL cannot say.
    in_path = dict.fromkeys(group.partition_columns if group.values is None else (), "string")
    schema = _schema(replace(group, partition_columns=in_path))
    reader = session.read.schema(schema or StructType([]))
    if in_path:
        reader = reader.option("basePath", spark_path(group.base))
    frame = reader.parquet(*(pattern_of(f[0]) for f in group.files))
    _hold_all(frame, group)
    if group.values is not None:
        frame = _with_values(session, frame, group, group.values)
    # Spark's reader would make other values of some: bounds.path_value tells of which.
    typed = {n: F.col(quote(n)).cast(t) for n, t in group.partition_columns.items() if t != "string"}
    typed |= {n: _as_written(F.col(quote(n)), values) for n, values in _misread(group).items() if n not in typed}
    return frame.withColumns(typed) if typed else frame


def _with_values(
    session: SparkSession, frame: DataFrame, group: Group, values: Mapping[str, tuple[str | None, ...]]
) -> DataFrame:
    """The rows with the values of their files, as texts. A row of a file that has none throws: it must not pass."""
    from pyspark.sql import functions as F

    jvm: Any = session._jvm
    # An array of Java costs a call for each element; as one text it costs one.
    files = json.loads(jvm.com.fasterxml.jackson.databind.ObjectMapper().writeValueAsString(frame._jdf.inputFiles()))
    rows = [(_LOCAL.sub("", file), *values[plain_path(file)]) for file in files]
    schema = ", ".join(f"{quote(name)} string" for name in (_KNOWN, *group.partition_columns))
    known = F.broadcast(session.createDataFrame(rows, schema))
    # Not input_file_name(): with it no expression would count as one that always answers the same.
    path = F.regexp_replace(group.file_column(frame), _LOCAL.pattern, "")
    # By a condition: a join on a name would hide Spark's own columns.
    joined = frame.withColumn(_FILE, path).join(known, F.col(_FILE) == F.col(_KNOWN), "left")
    lost = F.raise_error(F.concat(F.lit("no partition is known of the file "), F.col(_FILE)))
    held = {
        name: F.when(F.col(_KNOWN).isNotNull(), F.col(quote(name))).otherwise(lost) for name in group.partition_columns
    }
    return joined.withColumns(held).drop(_FILE, _KNOWN)


def _misread(group: Group) -> dict[str, dict[str, str]]:
    """What Spark makes of escaped values in the files' paths that are not ASCII, and what they are, by column: it takes
    each escaped byte for a character, where writers escape UTF-8.
    """
    found: dict[str, dict[str, str]] = {}
    if not group.partition_columns or group.values is not None:
        return found
    folders = {f[0][len(group.base) :].rpartition("/")[0] for f in group.files}
    for part in {part for folder in folders if _NOT_ASCII.search(folder) for part in folder.split("/")}:
        name, _, value = part.partition("=")
        try:
            meant = unquote(value, errors="strict")
        except UnicodeDecodeError:
            continue
        if unquote(name) in group.partition_columns and _NOT_ASCII.search(value):
            read = re.sub("%([0-9A-Fa-f]{2})", lambda escaped: chr(int(escaped[1], 16)), value)
            found.setdefault(unquote(name), {})[read] = meant
    return found


def _as_written(column: Column, values: Mapping[str, str]) -> Column:
    from pyspark.sql import functions as F

    known = F.create_map(*(F.lit(text) for pair in values.items() for text in pair))
    return F.coalesce(F.try_element_at(known, column), column)


def _hold_all(frame: DataFrame, group: Group) -> None:
    """Raises Unreadable if Spark does not list each file once.

    It silently skips files with some names: their rows would pass. If it listed a file twice, the rows of that file
    could make up for those of a file that it does not read.
    """
    found = frame._jdf.inputFiles()
    if len(found) != len(group.files):
        listed = {plain_path(path) for path in found}
        left_out = next((f[0] for f in group.files if f[0] not in listed), None)
        raise Unreadable(f"Spark does not read the file {left_out}: give it a name without '_' or '.' at its ends")
    # inputFiles() names each file once.
    listings = int(frame._jdf.logicalPlan().relation().location().allFiles().size())
    if listings != len(group.files):
        raise Unreadable(f"Spark lists {listings} files for {len(group.files)} paths: it reads some of them twice")


def count(
    session: SparkSession, group: Group, checks: Mapping[int, Column], where: Column | None, *, lasting: bool = False
) -> Scanned:
    """Violations by file and check.

    Raises what Spark raises. ``lasting``: no condition depends on the time, or on anything else outside of the row.

    A query takes dozens of calls into the JVM, two analyses and a plan, so the last queries and their conditions are
    cached.
    """
    with_rows = where is not None or group.all_rows
    if not with_rows and not checks:
        return Scanned({})
    frame, found = relation(session, group), tuple(checks.values())
    key = (id(frame), tuple(map(id, found)), id(where), with_rows, lasting)

    def made() -> _Counting:
        query = _counting_query(frame, group, found, where)
        held = (frame, found, where)
        planned = _planned(session, query) if lasting and group.values is None else None
        if planned is None:
            return _Counting(query, False, None, held)
        return _Counting(planned[0], True, rows_read.of_plan(planned[1]), held)

    rows, read = _run(_counting.get(key, made))
    counts: dict[str, Counts] = {}
    for row in rows:
        of_file = counts.setdefault(group.path(row[0]), Counts(0 if with_rows else None, dict.fromkeys(checks, 0)))
        if with_rows:
            of_file.rows = (of_file.rows or 0) + row[1]
        for i, n in enumerate(checks, 2 if with_rows else 1):
            of_file.violations[n] += row[i]
    return Scanned(counts, read)


def _run(counting: _Counting) -> tuple[Sequence[Any], int | None]:
    """Run a counting query: its rows, and how many rows it read."""
    if not counting.planned:
        # Selected from: a query that was run once would find what it shuffled then.
        query = counting.query.select("*")
        return query.collect(), rows_read.of_frame(query)
    if counting.rows is None:
        return counting.query.collect(), None
    with counting.running:
        before = counting.rows.total()
        return counting.query.collect(), counting.rows.total() - before


def rows_by_file(session: SparkSession, group: Group) -> dict[str, int]:
    """How many rows Spark finds in each file of a group, without reading a column.

    Raises what Spark raises.
    """
    counts = count(session, replace(group, all_rows=True), {}, None, lasting=True).counts
    return {path: found.rows or 0 for path, found in counts.items()}


def misread_files(
    session: SparkSession, group: Group, files: Sequence[FileFacts], found: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Files of a group of which Spark does not find all rows, each with an error message.

    ``found``: rows by file, if they are known; else a separate query counts them. Where manifests do not tell how many
    rows are deleted, that query counts these as well. Raises what Spark raises.
    """
    if not files:
        return {}
    if not group.source:
        return rows_read.misread_files(files, rows_by_file(session, group) if found is None else found)
    if any(facts.deleted is None for facts in files):
        counts = iceberg.count_rows(session, group.source, group.files)
        files, found = rows_read.with_deletes(files, counts.deleted), counts.kept
    return rows_read.misread_files(files, rows_by_file(session, group) if found is None else found, "manifest")


def _planned(session: SparkSession, query: DataFrame) -> tuple[DataFrame, Any] | None:
    """None where Spark's own means do not serve as they did: what is wrong with the data the query itself will tell."""
    try:
        return onestage.of_tasks(session, query)
    except Exception:
        _log.warning("a count is planned anew whenever it is run", exc_info=True)
        return None


def _counting_query(frame: DataFrame, group: Group, checks: Sequence[Column], where: Column | None) -> DataFrame:
    from pyspark.sql import functions as F

    totals = [F.count_if(column) for column in checks]
    if where is not None:
        frame = where_true(frame, where)
    if where is not None or group.all_rows:
        totals.insert(0, F.count(F.lit(1)))
    else:
        # No filter for Parquet's reader: that one looks up pages and dictionaries for row groups
        # which the footers have left open already, and may skip a row on which a check throws.
        frame = frame.where(unpushed(*checks))
    # Not _metadata.file_path: Spark would make a struct of it for every row, before the filter.
    return frame.groupBy(group.file_column(frame) if group.source else F.input_file_name()).agg(*totals)


def count_attempts(session: SparkSession, group: Group, checks: Mapping[int, Column], where: Column | None) -> Scanned:
    """Like :func:`count`, but a row on which a check throws does not fail the query."""
    from pyspark.sql import functions as F

    frame = relation(session, group)
    path = group.file_column(frame).alias("file")
    tried = [attempted(column).alias(f"c{n}") for n, column in checks.items()]
    picked = F.lit(True) if where is None else attempted(where)
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
        out[group.path(row[0])] = counts
    return Scanned(out, rows_read.of_frame(query))


def refused(session: SparkSession, group: Group, text: str) -> str | None:
    """Why an expression is no condition on this group's columns, or None where it is one: that depends on their names
    and types alone, and is remembered for the next batch.
    """
    key = (session, _schema(group), group.missing, text)
    return _judged.get(key, lambda: _refusal(session, relation(session, group), text))


def _refusal(session: SparkSession, frame: DataFrame, text: str) -> str | None:
    from pyspark.errors import AnalysisException

    try:
        frame.where(parsed(session, text).column)._jdf.queryExecution().analyzed()
    except AnalysisException as e:
        kind, given = e.getCondition() or "", e.getMessageParameters() or {}
        if kind == "DATATYPE_MISMATCH.FILTER_NOT_BOOLEAN":
            found = given.get("type", "").strip('"')
            # A column that these files do not have is NULL in them.
            return None if found == "VOID" else f"the expression is of type {found.lower()}, not boolean"
        return sentence_of(e)
    except Exception as e:
        if is_unexpected(e):
            raise
        return sentence_of(e)
    return None


def analysed(session: SparkSession, group: Group, column: Column) -> str | None:
    """Why Spark refuses this condition on this group's columns, or None where it accepts it."""
    from pyspark.errors import AnalysisException

    frame = relation(session, group)
    try:
        # The expression is planned as well, to find what the optimizer fails on. An error of the expression itself (a
        # constant that cannot be cast) is reported when the rows are counted.
        frame.where(unpushed(column))._jdf.queryExecution().executedPlan()
    except AnalysisException as e:
        return sentence_of(e)
    except Exception as e:
        if is_unexpected(e):
            raise
        return sentence_of(e) if is_internal(e) else None
    return None
