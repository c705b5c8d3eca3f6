"""Rows of an Iceberg table through Iceberg's own reader, which leaves out what its deletes remove.

A partition is read as its plan has it: the metadata file is the one of the plan (``PartitionPlan.source``), and so are
the data files. Iceberg's source reads whole snapshots by itself; but its own rewrites hand it the tasks that it shall
read (SparkTableCache, ScanTaskSetManager), and that is done here. No catalog is asked: what has been committed since
the plan was made is not seen.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from distop.behavior import FatalError
from distop.core.frozen import frozen
from distop_behaviors.reading.facts import FileFacts, Unreadable
from distop_behaviors.reading.kept import Kept

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from distop.behavior import PartitionPlan
    from distop_behaviors.reading.facts import SparkType
    from distop_behaviors.reading.footers import PlannedFile

FILE, POSITION = "_file", "_pos"
"""Iceberg's metadata columns: the path of a row's file as the manifests have it, and its position in that."""

VERSION = "1.11.0"
"""The release of Iceberg that the tests run with."""

_REWRITES = "org.apache.iceberg.spark.SparkRewriteTableCatalog"
_CATALOG = "spark.sql.catalog.default_rewrite_catalog"
_SCALA = "2.13"
"""PySpark's."""
_ROW_LINEAGE = 3
"""The version of the table format from which on rows have ids."""
_STAGED = 256
"""Sets of tasks that the JVM keeps: a batch has a few, and each is wanted until its query has been planned."""
_GONE = ("org.apache.iceberg.exceptions.NotFoundException", "java.io.FileNotFoundException")

_columns: Kept[Mapping[str, SparkType]] = Kept(16)
_snapshots: Kept[_Snapshot] = Kept(4)
_staged: OrderedDict[tuple[str, str], Any] = OrderedDict()
"""By Spark's application and the name: the table for which the JVM keeps the tasks."""
_lock = threading.Lock()


class Gone(Unreadable):
    """What the plan was made of is no longer there."""


def facts_of(plan: PartitionPlan) -> list[FileFacts]:
    """What is known of the partition's files without Spark: their columns, which are the table's. Their rows are not:
    some may be deleted. Raises Gone, and Unreadable where a type is not known.
    """
    columns = _columns.get((plan.source,), lambda: _read_columns(plan.source))
    if not plan.files:
        return [FileFacts(plan.source, 0, columns)]
    return [FileFacts(path, 0, columns, proves=False) for path, _, _ in plan.files]


def read(session: SparkSession, source: str, files: Sequence[PlannedFile]) -> DataFrame:
    """The rows of these files that no delete removes. Raises Gone, FatalError where Spark has no Iceberg, and what
    Spark raises.
    """
    name = stage(session, source, files)
    session.conf.set(_CATALOG, _REWRITES)
    return session.read.format("iceberg").load(name)


def stage(session: SparkSession, source: str, files: Sequence[PlannedFile]) -> str:
    """Have the JVM keep the tasks that read these files; the name to read them by. What a frame of that name reads is
    looked up when its query is planned: call it again before one that was made earlier is run.
    """
    digest = hashlib.blake2b(source.encode(), digest_size=16)
    for path, _, _ in files:
        digest.update(b"\0" + path.encode("utf-8", "surrogateescape"))
    name, snapshot = f"distop-{digest.hexdigest()}", _snapshot(session, source)
    spark: Any = session._jvm.org.apache.iceberg.spark  # type: ignore[union-attr]
    key = (str(session.sparkContext.applicationId), name)
    with _lock:
        if key in _staged:
            _staged.move_to_end(key)
            return name
        tasks: Any = session._jvm.java.util.ArrayList()  # type: ignore[union-attr]
        for path, _, _ in files:
            tasks.add(snapshot.task(path))
        spark.ScanTaskSetManager.get().stageTasks(snapshot.table, name, tasks)
        cache = _table_cache(spark.SparkTableCache)
        cache.add(name, snapshot.table)
        _staged[key] = snapshot.table
        while len(_staged) > _STAGED:
            (_, oldest), table = _staged.popitem(last=False)
            cache.remove(oldest)
            spark.ScanTaskSetManager.get().removeTasks(table, oldest)
    return name


def _table_cache(cls: Any) -> Any:
    """The one SparkTableCache. Of its two methods ``get`` py4j looks at whichever the JVM names first, in an order that
    differs from one to the next, and finds no static one where that is the other; so it is called without a look.
    """
    from py4j.java_gateway import JavaMember
    from py4j.protocol import STATIC_PREFIX

    return JavaMember("get", None, f"{STATIC_PREFIX}{cls._fqn}", cls._gateway_client)()


def rows_of(session: SparkSession, source: str, files: Sequence[PlannedFile]) -> dict[str, int] | None:
    """How many rows each file has, where no delete applies to any of them; else None: they must be counted."""
    snapshot = _snapshot(session, source)
    tasks = {path: snapshot.task(path) for path, _, _ in files}
    if snapshot.deletes and any(not task.deletes().isEmpty() for task in tasks.values()):
        return None
    return {path: int(task.file().recordCount()) for path, task in tasks.items()}


def check_there(session: SparkSession, source: str, path: str) -> None:
    """Raises Gone where a file of the plan is no longer there."""
    snapshot = _snapshot(session, source)
    if not snapshot.table.io().newInputFile(path).exists():
        raise Gone(
            f"the file {path} is gone: since the operation was planned its snapshot {snapshot.id} was expired, or the "
            "table was dropped"
        )


@frozen
class _Snapshot:
    """A snapshot in the JVM: the table as its metadata file has it, and the task that reads each of its files.
    ``deletes``: there are some in it.
    """

    table: Any
    id: str
    source: str
    deletes: bool
    tasks: Mapping[str, Any]

    def task(self, path: str) -> Any:
        if path not in self.tasks:
            raise Unreadable(f"the file {path} is not in the snapshot {self.id} of {self.source}")
        return self.tasks[path]


def _snapshot(session: SparkSession, source: str) -> _Snapshot:
    return _snapshots.get((session, source), lambda: _load(session, source))


def _load(session: SparkSession, source: str) -> _Snapshot:
    from py4j.protocol import Py4JJavaError

    jvm: Any = session._jvm
    check_installed(jvm)
    location = f"file://{source}" if source.startswith("/") else source
    iceberg = jvm.org.apache.iceberg
    conf = session._jsparkSession.sessionState().newHadoopConf()
    try:
        table = iceberg.hadoop.HadoopTables(conf).load(location)
        current = table.currentSnapshot()
        tasks: dict[str, Any] = {}
        files = table.newScan().planFiles()
        try:
            planned = files.iterator()
            while planned.hasNext():
                task = planned.next()
                tasks[str(task.file().location())] = task
        finally:
            files.close()
        deletes = not current.deleteManifests(table.io()).isEmpty()
        return _Snapshot(_for_reading(iceberg, table, location), str(current.snapshotId()), source, deletes, tasks)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() in _GONE:
            raise Gone(_gone(source, str(error.java_exception.getMessage()))) from error
        raise


def check_installed(jvm: Any) -> None:
    """Raises FatalError where this JVM has no Iceberg, or one for another Spark."""
    from py4j.java_gateway import JavaPackage
    from pyspark import __version__

    catalog = jvm.org.apache.iceberg.spark.SparkRewriteTableCatalog
    if isinstance(catalog, JavaPackage):
        raise FatalError(missing(__version__, None))
    source = catalog._java_lang_class.getProtectionDomain().getCodeSource()
    jar = str(source.getLocation()) if source is not None else ""
    if misfits(jar, __version__):
        raise FatalError(missing(__version__, jar))


def misfits(jar: str, spark: str) -> bool:
    """The name of the jar says that it was made for another Spark: reading would end in errors of linking."""
    made_for = re.search(r"iceberg-spark-runtime-(\d+\.\d+)_(\d+\.\d+)", jar)
    return made_for is not None and made_for.groups() != (_minor(spark), _SCALA)


def missing(spark: str, jar: str | None) -> str:
    """What to do where Spark has no Iceberg, or one that does not fit."""
    what = "Spark has no Iceberg" if jar is None else f"the Iceberg of {jar} does not fit Spark {spark}"
    return (
        f"{what}: start the executors with --spark-conf spark.jars.packages="
        f"org.apache.iceberg:iceberg-spark-runtime-{_minor(spark)}_{_SCALA}:{VERSION}"
    )


def _minor(spark: str) -> str:
    return ".".join(spark.split(".")[:2])


def _for_reading(iceberg: Any, table: Any, location: str) -> Any:
    """The table for reading alone, whose columns are all optional, and which has no row ids.

    That a column is required is a promise of its writers, and one who began before it was made may break it: Spark
    would believe it, and find no NULL in the column whatever is in its files. With row ids among its columns, as a
    rewrite of version 3 wants them, Spark finds its other metadata columns no more; so the reader is told of version 2.
    What is deleted stands in the tasks.
    """
    metadata = table.operations().current()
    parser = iceberg.TableMetadataParser
    written = json.loads(parser.toJson(metadata))
    schemas = [_optional(schema) for schema in written["schemas"]]
    version = min(metadata.formatVersion(), _ROW_LINEAGE - 1)
    if version == metadata.formatVersion() and schemas == written["schemas"]:
        return table
    told = {name: value for name, value in written.items() if name != "schema"}
    told |= {"format-version": version, "schemas": schemas}
    return iceberg.BaseTable(
        iceberg.StaticTableOperations(parser.fromJson(location, json.dumps(told)), table.io()), location
    )


def _optional(kind: Any) -> Any:
    """An Iceberg type, or schema, as JSON: without anything that is required, but for the keys of maps."""
    if not isinstance(kind, dict):
        return kind
    told = {name: _optional(value) for name, value in kind.items() if name != "identifier-field-ids"}
    if "fields" in kind:
        told["fields"] = [{**field, "required": False, "type": _optional(field["type"])} for field in kind["fields"]]
    return told | {name: False for name in ("element-required", "value-required") if name in kind}


def _gone(source: str, why: str) -> str:
    return (
        f"the snapshot that the operation was planned on can no longer be read through {source}: it was expired, or "
        f"the table was dropped ({why})"
    )


def _read_columns(source: str) -> Mapping[str, SparkType]:
    from pyiceberg.io import load_file_io
    from pyiceberg.serializers import FromInputFile

    try:
        metadata = FromInputFile.table_metadata(load_file_io({}, source).new_input(source))
    except FileNotFoundError as error:
        raise Gone(_gone(source, "it is gone")) from error
    except (OSError, ValueError) as error:
        raise Unreadable(f"the metadata file {source} cannot be read: {str(error).splitlines()[0]}") from error
    return {field.name: _spark_type(field.field_type) for field in metadata.schema().fields}


_PLAIN = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
    "string": "string",
    "uuid": "string",
    "binary": "binary",
    "unknown": "void",
}


def _spark_type(kind: Any) -> SparkType:
    """Spark's type for one of Iceberg's, as Iceberg's reader gives it."""
    from pyiceberg import types

    if isinstance(kind, types.StructType):
        return ("struct", tuple((field.name, _spark_type(field.field_type)) for field in kind.fields))
    if isinstance(kind, types.ListType):
        return ("array", _spark_type(kind.element_type))
    if isinstance(kind, types.MapType):
        return ("map", _spark_type(kind.key_type), _spark_type(kind.value_type))
    if isinstance(kind, types.DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    if isinstance(kind, types.FixedType):
        return "binary"
    text = str(kind)
    return _PLAIN.get(text) or ("unreadable", f"Iceberg does not read the type {text} in Spark")
