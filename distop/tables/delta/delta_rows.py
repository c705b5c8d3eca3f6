"""Reads rows of a Delta table with Delta's own reader: exactly the planned files, without deleted rows.

Delta's reader normally finds the files in the log by itself. Here it gets them from the log that distop has read and
checked: each file with an absolute path, its partition values and its deletion vector. So nothing is listed or read
twice, a version can be read after its log was cleaned up, and Java cannot take another file than Python.
"""

from __future__ import annotations

import json
import tempfile
import threading
from typing import TYPE_CHECKING, Any

from distop.runtime.java import active
from distop.tables.delta.delta_jar import check_installed
from distop.tables.delta.table_features import COLUMN_MAPPING, DELETION_VECTORS
from distop.tables.delta.table_paths import for_spark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from distop.tables.delta.delta_log import AddedFile, DeltaSnapshot

_SETTINGS_CHECK = "spark.databricks.delta.requiredSparkConfsCheck.enabled"
"""Delta's check that the session has Delta's extension and catalog, which serve SQL statements only."""
_FIELD_IDS = "spark.sql.parquet.fieldId.read.enabled"
"""Lets Spark's reader find columns by ids; those of schemas without ids are still found by their names."""
_MODE = "delta.columnMapping.mode"
_BY_SCHEMA = frozenset({"allowColumnDefaults", "generatedColumns", "identityColumns", "invariants"})
"""The features for writers that a schema may use. Delta requires that the protocol has them, also to read."""
_lock = threading.Lock()
_folders: list[tempfile.TemporaryDirectory[str]] = []
"""The empty folder in place of a table's folder: paths are absolute, so Delta needs no log."""


def read(session: SparkSession, snapshot: DeltaSnapshot, files: Sequence[AddedFile]) -> DataFrame:
    """The rows of these files with the table's columns. Raises FatalError if Spark has no Delta, and Spark's errors."""
    from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame

    jvm: Any = session._jvm
    check_installed(jvm)
    session.conf.set(_SETTINGS_CHECK, "false")
    if snapshot.schema.mode == "id":
        session.conf.set(_FIELD_IDS, "true")
    delta, own = jvm.org.apache.spark.sql.delta, session._jsparkSession
    with active(session):
        log = delta.DeltaLog.forTable(own, f"file://{_empty_folder()}")
        none = jvm.scala.Option.empty()
        protocol, metadata, added = _parsed(jvm, [_protocol(snapshot), _metadata(snapshot), *map(_add, files)])
        table = delta.DummySnapshot(log.logPath(), log, metadata, none, jvm.scala.Some(protocol))
        plan = log.createDataFrame(table, added, False, none).queryExecution().analyzed()
        # Delta's session extension would add the filter of deleted rows. Added here, it is in the plan in any session.
        plan = delta.PreprocessTableWithDVsStrategy(own).preprocessTablesWithDVs(plan)
        frame: DataFrame = ClassicFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(own, plan), session)
        if any(file.vector is not None for file in files):
            # The filter of deleted rows needs the positions, which Spark would not read if no query selects them.
            frame = frame.where(frame.metadataColumn("_metadata")["row_index"] >= 0)
        return frame


def _parsed(jvm: Any, actions: Sequence[dict[str, Any]]) -> tuple[Any, Any, Any]:
    """A protocol, metadata and a Scala sequence of files, from actions in this order.

    A call into the JVM takes longer than Java's parsing of an action, so all are parsed in one call.
    """
    java, delta = jvm.java, jvm.org.apache.spark.sql.delta.actions.Action
    action, text = delta._java_lang_class, java.lang.String._java_lang_class
    handles = java.lang.invoke
    parse = handles.MethodHandles.publicLookup().findStatic(
        action, "fromJson", handles.MethodType.methodType(action, text)
    )
    function = handles.MethodHandleProxies.asInterfaceInstance(java.util.function.Function._java_lang_class, parse)
    lines = java.io.BufferedReader(java.io.StringReader("\n".join(map(json.dumps, actions)))).lines()
    found = lines.map(function).toList()
    files = found.subList(2, found.size())
    return found.get(0), found.get(1), jvm.scala.jdk.javaapi.CollectionConverters.asScala(files).toSeq()


def _protocol(snapshot: DeltaSnapshot) -> dict[str, Any]:
    """The protocol with deletion vectors, without which Delta's reader hides the positions of rows.

    It has each feature for writers that a schema may use: a table's protocol may have them without listing them.
    """
    features = sorted(snapshot.features | {DELETION_VECTORS})
    writer = sorted({*features, *_BY_SCHEMA, *((COLUMN_MAPPING,) if snapshot.schema.mode != "none" else ())})
    found = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": writer}
    return {"protocol": found}


def _metadata(snapshot: DeltaSnapshot) -> dict[str, Any]:
    """The table's schema, without properties, which could change how its files are read."""
    schema = snapshot.schema
    return {
        "metaData": {
            "id": snapshot.table_id,
            "format": {"provider": "parquet", "options": {}},
            "schemaString": schema.text,
            "partitionColumns": list(schema.partition_columns),
            "configuration": {} if schema.mode == "none" else {_MODE: schema.mode},
        }
    }


def _add(file: AddedFile) -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": for_spark(file.path),
        "partitionValues": dict(file.values),
        "size": file.size,
        "modificationTime": file.time,
        "dataChange": True,
    }
    if file.vector is not None:
        found["deletionVector"] = file.vector.for_spark()
    return {"add": found}


def _empty_folder() -> str:
    with _lock:
        if not _folders:
            _folders.append(tempfile.TemporaryDirectory(prefix="distop-delta-"))
        return _folders[0].name
