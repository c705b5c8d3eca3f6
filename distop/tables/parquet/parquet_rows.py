"""Reads rows of Parquet files with Spark: exactly the planned files, each once, with their partitions' values."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import Unreadable, ddl, quote
from distop.tables.reading.spark_paths import pattern_of, plain_path, spark_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.tables.reading.file_facts import PlannedFile, SparkType

_FILE, _KNOWN = "__distop_file", "__distop_known"
_LOCAL = re.compile("^file:/*")
"""Spark writes paths of local files with one slash in some places, and with three in others."""
_NOT_ASCII = re.compile("%[89A-Fa-f][0-9A-Fa-f]")


@frozen
class RowRequest:
    """The files and columns to read.

    ``columns``: of the files, with types. ``partition_columns``: likewise; their values are in ``values``, by file and
    in order, or (None) in the paths below ``base``.
    """

    files: Sequence[PlannedFile]
    columns: Mapping[str, SparkType]
    partition_columns: Mapping[str, str]
    base: str
    values: Mapping[str, tuple[str | None, ...]] | None = None


def read(session: SparkSession, wanted: RowRequest) -> DataFrame:
    """The rows. Raises Unreadable if Spark would not read each file exactly once, and Spark's errors."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    # A check such as `1 = 1` needs no column, and DDL cannot express that.
    in_path = dict.fromkeys(wanted.partition_columns if wanted.values is None else (), "string")
    schema = ", ".join(f"{quote(n)} {ddl(t)}" for n, t in {**wanted.columns, **in_path}.items())
    reader = session.read.schema(schema or StructType([]))
    if in_path:
        reader = reader.option("basePath", spark_path(wanted.base))
    frame = reader.parquet(*(pattern_of(f[0]) for f in wanted.files))
    check_all_listed(frame, wanted.files)
    if wanted.values is not None:
        frame = _with_values(session, frame, wanted, wanted.values)
    # Spark's reader would convert some texts of paths to other values.
    typed = {n: F.col(quote(n)).cast(t) for n, t in wanted.partition_columns.items() if t != "string"}
    typed |= {n: _corrected(F.col(quote(n)), values) for n, values in _misread(wanted).items() if n not in typed}
    return frame.withColumns(typed) if typed else frame


def file_column(frame: DataFrame) -> Column:
    """The path of a row's file. Not selected by name: the data may have a column named like Spark's."""
    return frame.metadataColumn("_metadata")["file_path"]


def position_column(frame: DataFrame) -> Column:
    """The position of a row in its file."""
    return frame.metadataColumn("_metadata")["row_index"]


def _with_values(
    session: SparkSession, frame: DataFrame, wanted: RowRequest, values: Mapping[str, tuple[str | None, ...]]
) -> DataFrame:
    """The rows with the values of their files, as texts. A row of a file without values raises an error."""
    from pyspark.sql import functions as F

    jvm: Any = session._jvm
    # A Java array takes one call per element, a JSON text only one.
    files = json.loads(jvm.com.fasterxml.jackson.databind.ObjectMapper().writeValueAsString(frame._jdf.inputFiles()))
    rows = [(_LOCAL.sub("", file), *values[plain_path(file)]) for file in files]
    schema = ", ".join(f"{quote(name)} string" for name in (_KNOWN, *wanted.partition_columns))
    known = F.broadcast(session.createDataFrame(rows, schema))
    # Not input_file_name(): Spark would regard all expressions with it as nondeterministic.
    path = F.regexp_replace(file_column(frame), _LOCAL.pattern, "")
    # Join on a condition: a join on a name would hide Spark's metadata columns.
    joined = frame.withColumn(_FILE, path).join(known, F.col(_FILE) == F.col(_KNOWN), "left")
    unknown = F.raise_error(F.concat(F.lit("unknown partition of the file "), F.col(_FILE)))
    checked = {
        name: F.when(F.col(_KNOWN).isNotNull(), F.col(quote(name))).otherwise(unknown)
        for name in wanted.partition_columns
    }
    return joined.withColumns(checked).drop(_FILE, _KNOWN)


def _misread(wanted: RowRequest) -> dict[str, dict[str, str]]:
    """Escaped values in paths that Spark reads wrongly: by column, the correct value for each of Spark's.

    Spark reads each escaped byte as a character, but writers escape the bytes of UTF-8.
    """
    found: dict[str, dict[str, str]] = {}
    if not wanted.partition_columns or wanted.values is not None:
        return found
    folders = {f[0][len(wanted.base) :].rpartition("/")[0] for f in wanted.files}
    for part in {part for folder in folders if _NOT_ASCII.search(folder) for part in folder.split("/")}:
        name, _, value = part.partition("=")
        try:
            correct = unquote(value, errors="strict")
        except UnicodeDecodeError:
            continue
        if unquote(name) in wanted.partition_columns and _NOT_ASCII.search(value):
            read = re.sub("%([0-9A-Fa-f]{2})", lambda escaped: chr(int(escaped[1], 16)), value)
            found.setdefault(unquote(name), {})[read] = correct
    return found


def _corrected(column: Column, values: Mapping[str, str]) -> Column:
    from pyspark.sql import functions as F

    known = F.create_map(*(F.lit(text) for pair in values.items() for text in pair))
    return F.coalesce(F.try_element_at(known, column), column)


def check_all_listed(frame: DataFrame, files: Sequence[PlannedFile]) -> None:
    """Raises Unreadable if Spark does not list each file exactly once.

    Spark silently skips files with some names, and their rows would count as valid. If it listed a file twice, the rows
    of that file could compensate for those of an unread file.
    """
    found = frame._jdf.inputFiles()
    if len(found) != len(files):
        listed = {plain_path(path) for path in found}
        left_out = next((f[0] for f in files if f[0] not in listed), None)
        raise Unreadable(f"Spark does not read the file {left_out}: give it a name without '_' or '.' at its ends")
    # inputFiles() names each file once.
    listings = int(frame._jdf.logicalPlan().relation().location().allFiles().size())
    if listings != len(files):
        raise Unreadable(f"Spark lists {listings} files for {len(files)} paths: it reads some of them twice")
