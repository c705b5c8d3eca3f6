"""Rows of an Iceberg table through Iceberg's own reader, which leaves out what its deletes remove.

A partition is read as its plan has it: the metadata file is the one of the plan (``PartitionPlan.source``), and so are
the data files. Iceberg's source reads whole snapshots by itself; but its own rewrites hand it the tasks that it shall
read (SparkTableCache, ScanTaskSetManager), and that is done here. No catalog is asked: what has been committed since
the plan was made is not seen.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import struct
import threading
from collections import OrderedDict
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from distop.behavior import FatalError, TableUnavailable
from distop.protocol.frozen import frozen
from distop.runtime.lru_cache import LruCache
from distop.storage.confinement import check_loadable
from distop.storage.files import identity
from distop.storage.storage_urls import check_paths
from distop.tables.iceberg.iceberg_format import (
    check_files,
    check_loaded,
    check_manifests,
    check_opened,
    check_same_manifests,
)
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.table_properties import for_reading
from distop.tables.reader import RowCounts
from distop.tables.reading.file_facts import Gone, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop.tables.reading.file_facts import PlannedFile

T = TypeVar("T")

FILE, POSITION = "_file", "_pos"
"""Iceberg's metadata columns: the path of a row's file as the manifests have it, and its position in that."""
_DELETED = "_deleted"
"""The metadata column that is true of deleted rows. Where it is selected, the reader returns them as well."""
LINEAGE = ("_row_id", "_last_updated_sequence_number")
"""Those by which a row is told, from version 3 of the table format on."""

VERSION = "1.11.0"
"""The release of Iceberg that the tests run with."""

_REWRITES = "org.apache.iceberg.spark.SparkRewriteTableCatalog"
_CATALOG = "spark.sql.catalog.default_rewrite_catalog"
_SCALA = "2.13"
"""PySpark's."""
ROW_LINEAGE = 3
"""The version of the table format from which on rows have ids."""
_STAGED = 256
"""Sets of tasks that the JVM keeps: a batch has a few, and each is wanted until its query has been planned."""
_OPENING, _LEAST, _MOST = 4 << 20, 16 << 20, 128 << 20
"""Bytes: what opening a file counts for, the least and the most that one Spark task reads, by Iceberg's defaults."""
_TASKS = 4
"""Spark tasks for each core."""
_UNREAD = ("time", "timestamp_ns", "timestamptz_ns")
"""Types of Iceberg for which its Spark has none."""
_GONE = ("org.apache.iceberg.exceptions.NotFoundException", "java.io.FileNotFoundException")

_snapshots: LruCache[_Snapshot] = LruCache(4)
_staged: OrderedDict[tuple[str, str], Any] = OrderedDict()
"""By Spark's application and the name: the table for which the JVM keeps the tasks."""
_lock = threading.Lock()


def read(session: SparkSession, source: str, files: Sequence[PlannedFile], *, lineage: bool = False) -> DataFrame:
    """The rows of these files that no delete removes; with ``lineage`` their :data:`LINEAGE`, and none of Iceberg's
    other metadata columns. Raises Gone, Unreadable where Spark has no type for a column of the table, FatalError where
    it has no Iceberg, and what Spark raises.
    """
    return read_staged(session, stage(session, source, files, lineage=lineage), files)


def read_staged(session: SparkSession, name: str, files: Sequence[PlannedFile]) -> DataFrame:
    """The rows of these files, whose tasks :func:`stage` has kept under a name. Raises what Spark raises."""
    session.conf.set(_CATALOG, _REWRITES)
    # Iceberg fits it to the cores by itself where it plans a scan, and not where it is handed the tasks.
    size = split_size([size for _, size, _ in files], session.sparkContext.defaultParallelism)
    return session.read.format("iceberg").option("split-size", str(size)).load(name)


def count_rows(session: SparkSession, source: str, files: Sequence[PlannedFile]) -> RowCounts:
    """Count the rows of these files with a query of its own; files without rows are missing. Raises as :func:`read`."""
    from pyspark.sql import functions as F

    rows = read(session, source, files).select(FILE, _DELETED).groupBy(FILE)
    kept, deleted = (F.count_if(condition) for condition in (~F.col(_DELETED), F.col(_DELETED)))
    found = rows.agg(kept, deleted).collect()
    return RowCounts({row[0]: row[1] for row in found}, {row[0]: row[2] for row in found})


def split_size(sizes: Sequence[int], cores: int) -> int:
    """Bytes that one Spark task reads, files weighed as Iceberg weighs them: a few tasks for each core, so that none is
    left waiting for the last.
    """
    weight = sum(max(size, _OPENING) for size in sizes)
    return max(_LEAST, min(_MOST, weight // (cores * _TASKS)))


def stage(session: SparkSession, source: str, files: Sequence[PlannedFile], *, lineage: bool = False) -> str:
    """Have the JVM keep the tasks that read these files; the name to read them by, which is another one where the
    snapshot has been loaded, and so checked, anew. What a frame of that name reads is looked up when its query is
    planned: call it again before one that was made earlier is run, for the delete files of these tasks to be looked at.
    """
    snapshot = _snapshot(session, source, lineage=lineage)
    digest = hashlib.blake2b(digest_size=16)
    for path, _, _ in files:
        digest.update(b"\0" + path.encode("utf-8", "surrogateescape"))
    name = f"distop-{snapshot.number}-{digest.hexdigest()}"
    key = (str(session.sparkContext.applicationId), name)
    with _lock:
        if key in _staged:
            _staged.move_to_end(key)
            return name
        # Each name on the way is a question to Java.
        spark: Any = session._jvm.org.apache.iceberg.spark  # type: ignore[union-attr]
        spark.ScanTaskSetManager.get().stageTasks(snapshot.table, name, snapshot.tasks.some(p for p, _, _ in files))
        cache = table_cache(session)
        cache.add(name, snapshot.table)
        _staged[key] = snapshot.table
        while len(_staged) > _STAGED:
            (_, oldest), table = _staged.popitem(last=False)
            cache.remove(oldest)
            spark.ScanTaskSetManager.get().removeTasks(table, oldest)
    return name


def table_cache(session: Any) -> Any:
    """The tables that are found by their names alone: the one SparkTableCache. Of its two methods ``get`` py4j looks at
    whichever the JVM names first, in an order that differs from one to the next, and finds no static one where that is
    the other; so it is called without a look.
    """
    from py4j.java_gateway import JavaMember
    from py4j.protocol import STATIC_PREFIX

    cls = session._jvm.org.apache.iceberg.spark.SparkTableCache
    return JavaMember("get", None, f"{STATIC_PREFIX}{cls._fqn}", cls._gateway_client)()


def check_there(session: SparkSession, source: str, file: PlannedFile) -> None:
    """Raises Gone where a file of the plan is no longer there, Unreadable where it is not as long as its manifest says,
    wherever it lies.
    """
    path, size, _ = file
    snapshot = _snapshot(session, source)
    found = snapshot.table.io().newInputFile(path)
    if not found.exists():
        raise Gone(file_gone(path, snapshot.id))
    check_length(path, size, int(found.getLength()))


def check_length(path: str, size: int, found: int) -> None:
    """Raises Unreadable where a data file has not so many bytes as its manifest says: what stands there of it is not
    what a reader finds.
    """
    if found != size:
        # Not how many it has: a link may lead from there to any file of this process's user.
        raise Unreadable(
            f"the file {path} does not have the {size} bytes that its manifest says: it was cut off, or written over"
        )


@frozen
class _Snapshot:
    """A snapshot in the JVM: the table as its metadata file has it, and the tasks that read its files."""

    table: Any
    id: str
    tasks: _Tasks
    number: int = field(default_factory=itertools.count(1).__next__)
    """Of this process: no other one has it, loaded though it may be from the same file."""


class _Tasks:
    """The tasks of a snapshot, in the JVM. A call into it takes longer than what Java does there with a hundred of
    them: so all of their paths come in one text, and those of a set are picked by a row of numbers.
    """

    def __init__(self, session: SparkSession, planned: Any, where: str) -> None:
        jvm: Any = session._jvm
        self._jvm = jvm
        self._gateway: Any = session.sparkContext._gateway
        self._where = where
        iceberg = self._jvm.org.apache.iceberg
        self._guava = iceberg.relocated.com.google.common
        self._all = self._guava.collect.Lists.newArrayList(planned)
        java = jvm.java
        location = self._method(iceberg.ContentFile, "location", _class(java.lang.String))
        file = self._method(iceberg.ContentScanTask, "file", _class(iceberg.ContentFile))
        paths = self._texts(self._all, java.lang.invoke.MethodHandles.filterReturnValue(file, location))
        self._numbers = {name: n for n, name in enumerate(paths)}
        of_task = self._method(iceberg.FileScanTask, "deletes", _class(java.util.List))
        distinct = self._guava.collect.Sets.newIdentityHashSet()
        self._guava.collect.Iterables.addAll(
            distinct, self._guava.collect.Iterables.concat(self._mapped(self._all, of_task))
        )
        deletes = self._guava.collect.Lists.newArrayList(distinct)
        places = (self._numbers_of(deletes, name) for name in ("contentOffset", "contentSizeInBytes"))
        self.deletes = list(zip(self._texts(deletes, location), *places, strict=True))
        """Each delete file of the tasks: its path, and where a deletion vector lies in it."""
        self._seen: list[tuple[str, ...]] | None = None
        """The identities of these files when they were checked."""

    def check_deletes(self, source: str) -> None:
        """Raises InvalidArgument where a delete file may not belong to the table. The metadata of a snapshot that is
        kept tell nothing of it: each use looks whether it is still the file that was checked.
        """
        now = [identity(path) for path, _, _ in self.deletes]
        if now != self._seen:
            check_opened(source, (), self.deletes)
            self._seen = now

    @property
    def paths(self) -> Iterable[str]:
        """The data files of the tasks."""
        return self._numbers

    def some(self, paths: Iterable[str]) -> Any:
        """A list of the tasks that read these files. Raises Unreadable where one is not of the snapshot."""
        numbers = []
        for path in paths:
            if path not in self._numbers:
                raise Unreadable(f"the file {path} is not in {self._where}")
            numbers.append(self._numbers[path])
        packed = bytearray(struct.pack(f">{len(numbers)}i", *numbers))
        java = self._jvm.java
        chosen = self._gateway.new_array(self._jvm.int, len(numbers))
        java.nio.ByteBuffer.wrap(packed).asIntBuffer().get(chosen)
        get = self._method(java.util.List, "get", _class(java.lang.Object), java.lang.Integer.TYPE).bindTo(self._all)
        return java.util.ArrayList(self._mapped(self._guava.primitives.Ints.asList(chosen), get))

    def _texts(self, values: Any, method: Any) -> list[str]:
        """The text that the method makes of each value. Raises Unreadable where one of them holds a NUL."""
        size = int(values.size())
        texts = str(self._jvm.java.lang.String.join("\0", self._mapped(values, method))).split("\0") if size else []
        if len(texts) != size:
            raise Unreadable(f"a path in {self._where} holds a NUL")
        return texts

    def _numbers_of(self, files: Any, name: str) -> list[int | None]:
        """What a method of each delete file gives: a number, or none."""
        java = self._jvm.java
        anything = _class(java.lang.Object)
        method = self._method(self._jvm.org.apache.iceberg.DeleteFile, name, _class(java.lang.Long))
        as_text = java.lang.invoke.MethodHandles.publicLookup().findStatic(
            _class(java.lang.String),
            "valueOf",
            java.lang.invoke.MethodType.methodType(_class(java.lang.String), anything),
        )
        of_any = method.asType(method.type().changeReturnType(anything))
        texts = self._texts(files, java.lang.invoke.MethodHandles.filterReturnValue(of_any, as_text))
        return [None if text == "null" else int(text) for text in texts]

    def _method(self, owner: Any, name: str, *types: Any) -> Any:
        """A method by the types of what it returns and takes."""
        invoke = self._jvm.java.lang.invoke
        return invoke.MethodHandles.publicLookup().findVirtual(
            _class(owner), name, invoke.MethodType.methodType(*types)
        )

    def _mapped(self, values: Any, method: Any) -> Any:
        """What the method makes of each value of a list. Java calls it by itself."""
        proxies = self._jvm.java.lang.invoke.MethodHandleProxies
        return self._guava.collect.Lists.transform(
            values, proxies.asInterfaceInstance(_class(self._guava.base.Function), method)
        )


def _class(cls: Any) -> Any:
    return cls._java_lang_class


def _snapshot(session: SparkSession, source: str, *, lineage: bool = False) -> _Snapshot:
    key = (session, lineage, *identity(source))
    found = _snapshots.get(key, lambda: _load(session, source, lineage=lineage))
    found.tasks.check_deletes(source)
    return found


def uri(location: str) -> str:
    """A planned path as Hadoop is to take it. Raises InvalidArgument where that is not allowed in data."""
    check_paths((location,))
    check_loadable(location)
    return f"file://{location}" if location.startswith("/") else location


def _load(session: SparkSession, source: str, *, lineage: bool) -> _Snapshot:
    from py4j.protocol import Py4JJavaError

    jvm: Any = session._jvm
    check_installed(jvm)
    file = _checked(source, lambda: read_file(source))
    if file.content.current_snapshot() is None:
        raise Unreadable(f"the metadata file {source} has no snapshot")
    _checked(source, lambda: check_files(file))
    iceberg = jvm.org.apache.iceberg
    try:
        table = table_of(session, file)
        current = table.currentSnapshot()
        _checked(source, lambda: check_manifests_of(file, current, table.io()))
        id_ = str(current.snapshotId())
        check_columns(json.loads(iceberg.SchemaParser.toJson(table.schema())))
        files = table.newScan().planFiles()
        try:
            tasks = _Tasks(session, files, f"the snapshot {id_} of {source}")
        finally:
            files.close()
        # Once more: manifests may have been exchanged since.
        _checked(source, lambda: check_files(file))
        check_opened(source, tasks.paths, ())
        return _Snapshot(_for_reading(iceberg, table, uri(source), lineage=lineage), id_, tasks)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() in _GONE:
            raise Gone(gone(source, str(error.java_exception.getMessage()))) from error
        raise


def table_of(session: Any, file: MetadataFile) -> Any:
    """The table in the JVM that has these metadata: Java parses what Python has read, and opens no file for it. Raises
    InvalidArgument where its path is not allowed in data, and what Java raises.
    """
    iceberg: Any = session._jvm.org.apache.iceberg
    location = uri(file.source)
    io = iceberg.hadoop.HadoopFileIO(session._jsparkSession.sessionState().newHadoopConf())
    metadata = iceberg.TableMetadataParser.fromJson(location, file.text)
    return iceberg.BaseTable(iceberg.StaticTableOperations(metadata, io), location)


def check_manifests_of(file: MetadataFile, snapshot: Any, io: Any) -> None:
    """:func:`check_loaded` for the current snapshot as the JVM has it, before Java opens its list of manifests, and
    :func:`check_manifests`, before it opens these.
    """
    check_loaded(file, str(snapshot.snapshotId()), str(snapshot.manifestListLocation()))
    check_manifests(file, _manifests(snapshot, io))


def check_same(source: str, manifests: Sequence[str], snapshot: Any, io: Any) -> None:
    """Raises InvalidArgument where Java reads other manifests from a snapshot's list than Python did."""
    check_same_manifests(source, manifests, _manifests(snapshot, io))


def _manifests(snapshot: Any, io: Any) -> list[str]:
    return [str(manifest.path()) for manifest in snapshot.allManifests(io)]


def _checked(source: str, check: Callable[[], T]) -> T:
    """What ``check`` gives. Raises Gone where metadata are gone, and what that raises."""
    try:
        return check()
    except TableUnavailable as error:
        cause = error.__cause__
        while cause is not None and not isinstance(cause, FileNotFoundError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise Gone(gone(source, f"{cause.filename or 'a manifest'} is gone")) from error


def check_columns(schema: Any) -> None:
    """Raises Unreadable where a schema, as JSON, has a column that Spark has no type for: it reads none of it then."""
    for name, kind in _leaves(schema, ""):
        if kind in _UNREAD:
            raise Unreadable(
                f"the table's column {name!r} is a {kind}, and Spark reads no row of a table that has one: only what "
                "statistics decide can be checked, on any column"
            )


def _leaves(kind: Any, name: str) -> Iterable[tuple[str, Any]]:
    """Columns, and what is inside them, by their names, with their types."""
    if not isinstance(kind, dict):
        yield name, kind
        return
    inner = [(field["name"], field["type"]) for field in kind.get("fields", ())]
    inner += [(part, kind[part]) for part in ("element", "key", "value") if part in kind]
    for part, type_ in inner:
        yield from _leaves(type_, f"{name}.{part}" if name else part)


def check_installed(jvm: Any) -> None:
    """Raises FatalError where this JVM has no Iceberg, or one for another Spark."""
    from py4j.java_gateway import JavaPackage
    from pyspark import __version__

    # What was compiled for another Spark is not linked, and found no more than what is not there. So the file is asked
    # for, of a class that knows nothing of Spark.
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    where = loader.getResource("org/apache/iceberg/Table.class")
    jar = str(where.toString()).removeprefix("jar:").partition("!")[0] if where is not None else None
    linked = not isinstance(jvm.org.apache.iceberg.spark.SparkRewriteTableCatalog, JavaPackage)
    if jar is None or not linked or misfits(jar, __version__):
        raise FatalError(missing(__version__, jar))


def misfits(jar: str, spark: str) -> bool:
    """The name of the jar says that it was made for another Spark: reading would end in errors of linking."""
    made_for = re.search(r"iceberg-spark-runtime-(\d+\.\d+)_(\d+\.\d+)", jar)
    return made_for is not None and made_for.groups() != (_minor(spark), _SCALA)


def missing(spark: str, jar: str | None) -> str:
    """What to do where Spark has no Iceberg, or one that does not fit."""
    what = "Spark has no Iceberg" if jar is None else f"the Iceberg of {jar} does not fit Spark {spark}"
    return (
        f"{what}: start the executors with --spark-conf spark.jars=FILE, where FILE is the jar "
        f"org.apache.iceberg:iceberg-spark-runtime-{_minor(spark)}_{_SCALA}:{VERSION}"
    )


def _minor(spark: str) -> str:
    return ".".join(spark.split(".")[:2])


def _for_reading(iceberg: Any, table: Any, location: str, *, lineage: bool) -> Any:
    """The table for reading alone, whose columns are all optional, and which has no row ids unless they are asked for.

    That a column is required is a promise of its writers, and one who began before it was made may break it: Spark
    would believe it, and find no NULL in the column whatever is in its files. With row ids among its columns, as a
    rewrite of version 3 wants them, Spark finds its other metadata columns no more; so the reader is told of version 2.
    What is deleted stands in the tasks. Of its properties a reader is given those that are listed.
    """
    metadata = table.operations().current()
    parser = iceberg.TableMetadataParser
    written = json.loads(parser.toJson(metadata))
    schemas = [optional(schema) for schema in written["schemas"]]
    version = metadata.formatVersion() if lineage else min(metadata.formatVersion(), ROW_LINEAGE - 1)
    properties = written.get("properties", {})
    changed = {"format-version": version, "schemas": schemas, "properties": for_reading(properties)}
    if changed == {"format-version": metadata.formatVersion(), "schemas": written["schemas"], "properties": properties}:
        return table
    told = {name: value for name, value in written.items() if name != "schema"} | changed
    return iceberg.BaseTable(
        iceberg.StaticTableOperations(parser.fromJson(location, json.dumps(told)), table.io()), location
    )


def optional(kind: Any) -> Any:
    """An Iceberg type, or schema, as JSON: without anything that is required, but for the keys of maps."""
    if not isinstance(kind, dict):
        return kind
    told = {name: optional(value) for name, value in kind.items() if name != "identifier-field-ids"}
    if "fields" in kind:
        told["fields"] = [{**field, "required": False, "type": optional(field["type"])} for field in kind["fields"]]
    return told | {name: False for name in ("element-required", "value-required") if name in kind}


def file_gone(path: str, snapshot: str) -> str:
    """What to say where a file of a plan is no longer there."""
    return (
        f"the file {path} is gone: since the operation was planned its snapshot {snapshot} was expired, or the table "
        "was dropped"
    )


def gone(source: str, why: str) -> str:
    """What to say where a plan's metadata, or what they name, is no longer there."""
    return (
        f"the snapshot that the operation was planned on can no longer be read through {source}: it was expired, or "
        f"the table was dropped ({why})"
    )
