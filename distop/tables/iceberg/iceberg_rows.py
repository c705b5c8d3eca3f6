"""Reads rows of an Iceberg table with Iceberg's Spark reader, which applies the deletes.

A partition is read as planned: the metadata file (``PartitionPlan.source``) and the data files are those of the plan.
Iceberg's data source reads whole snapshots; but its own rewrites give it the tasks to read (SparkTableCache,
ScanTaskSetManager), and this module does the same. No catalog is used, and later commits are not visible.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeVar

from distop.behavior import TableUnavailable
from distop.protocol.frozen import frozen
from distop.runtime.lru_cache import LruCache
from distop.storage.files import identity
from distop.tables.iceberg.iceberg_changes import equality_ids
from distop.tables.iceberg.iceberg_jar import check_installed
from distop.tables.iceberg.java_tables import (
    check_columns,
    check_manifests_of,
    check_not_needed,
    readable,
    supported,
    table_cache,
    table_of,
    uri,
)
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.missing_files import check_length, file_gone, snapshot_gone
from distop.tables.iceberg.scan_tasks import ScanTasks
from distop.tables.iceberg.snapshot_checks import check_files, check_opened
from distop.tables.reader import RowCounts
from distop.tables.reading.file_facts import Gone, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from distop.tables.iceberg.metadata_file import MetadataFile
    from distop.tables.reading.file_facts import PlannedFile

T = TypeVar("T")

FILE, POSITION = "_file", "_pos"
"""Iceberg's metadata columns: the path of a row's file as in the manifests, and the row's position in it."""
_DELETED = "_deleted"
"""The metadata column that is true for deleted rows. If it is selected, the reader also returns deleted rows."""
LINEAGE = ("_row_id", "_last_updated_sequence_number")
"""The metadata columns that identify a row, from version 3 of the table format."""

_REWRITES = "org.apache.iceberg.spark.SparkRewriteTableCatalog"
_CATALOG = "spark.sql.catalog.default_rewrite_catalog"
STAGED = 256
"""Maximum sets of tasks in the JVM: a batch has a few, and each is needed until its query has been planned."""
_OPENING, _LEAST, _MOST = 4 << 20, 16 << 20, 128 << 20
"""Bytes, Iceberg's defaults: the weight of opening a file, minimum and maximum of one Spark task."""
_TASKS = 4
"""Spark tasks per core."""
_GONE = ("org.apache.iceberg.exceptions.NotFoundException", "java.io.FileNotFoundException")

_snapshots: LruCache[_Snapshot] = LruCache(4)
_staged: OrderedDict[tuple[str, str], Any] = OrderedDict()
"""The tables whose tasks are staged in the JVM, by Spark's application id and the name of the set."""
_lock = threading.Lock()


def read(
    session: SparkSession, source: str, files: Sequence[PlannedFile], *, lineage: bool = False, piece: int | None = None
) -> DataFrame:
    """The rows of these files without deleted ones.

    ``lineage``: with the columns :data:`LINEAGE`, and without Iceberg's other metadata columns. ``piece``: bytes that
    one Spark task reads (None: a few tasks for each core). Raises Gone, Unreadable
    if Spark lacks the type of a column of the table, FatalError if it has no Iceberg, and Spark's errors.
    """
    return read_staged(session, stage(session, source, files, lineage=lineage), files, piece)


def read_staged(session: SparkSession, name: str, files: Sequence[PlannedFile], piece: int | None = None) -> DataFrame:
    """The rows of these files, for which :func:`stage` has returned this name. Raises Spark's errors."""
    session.conf.set(_CATALOG, _REWRITES)
    reading = session.read.format("iceberg")
    if piece is not None:
        return reading.option("split-size", str(piece)).option("file-open-cost", "0").load(name)
    # Iceberg only adapts the size to the cores for scans that it plans itself.
    size = split_size([size for _, size, _ in files], session.sparkContext.defaultParallelism)
    return reading.option("split-size", str(size)).load(name)


def count_rows(session: SparkSession, source: str, files: Sequence[PlannedFile]) -> RowCounts:
    """Count the rows of these files with a query; files without rows are missing. Raises the errors of :func:`read`."""
    from pyspark.sql import functions as F

    rows = read(session, source, files).select(FILE, _DELETED).groupBy(FILE)
    kept, deleted = (F.count_if(condition) for condition in (~F.col(_DELETED), F.col(_DELETED)))
    found = rows.agg(kept, deleted).collect()
    return RowCounts({row[0]: row[1] for row in found}, {row[0]: row[2] for row in found})


def split_size(sizes: Sequence[int], cores: int) -> int:
    """Bytes per Spark task, with Iceberg's weights of files: a few tasks per core, so that no core waits long."""
    weight = sum(max(size, _OPENING) for size in sizes)
    return max(_LEAST, min(_MOST, weight // (cores * _TASKS)))


def stage(session: SparkSession, source: str, files: Sequence[PlannedFile], *, lineage: bool = False) -> str:
    """Stage the tasks that read these files in the JVM; returns the name by which Spark reads them.

    The name changes when the snapshot is loaded and checked again. Spark looks the name up when it plans a query: call
    this again before a query of an older frame, so that the delete files of its tasks are checked.
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
        # Keep the package: each name in it is a request to the JVM.
        spark: Any = session._jvm.org.apache.iceberg.spark  # type: ignore[union-attr]
        tasks = snapshot.tasks.of_files(path for path, _, _ in files)
        spark.ScanTaskSetManager.get().stageTasks(snapshot.table, name, tasks)
        cache = table_cache(session)
        cache.add(name, snapshot.table)
        _staged[key] = snapshot.table
        while len(_staged) > STAGED:
            (_, oldest), table = _staged.popitem(last=False)
            cache.remove(oldest)
            spark.ScanTaskSetManager.get().removeTasks(table, oldest)
    return name


def partition_without_deletes(session: SparkSession, source: str, files: Sequence[PlannedFile]) -> Any:
    """The partition of these files, as Iceberg has it in the JVM; None if some of their rows are deleted.

    All files must be of one partition. Raises the errors of :func:`read`.
    """
    tasks = _snapshot(session, source).tasks.without_deletes(path for path, _, _ in files)
    return tasks.get(0).file().partition() if tasks is not None else None


def check_exists(session: SparkSession, source: str, file: PlannedFile) -> None:
    """Raises Gone if a planned file no longer exists, Unreadable if its size differs from its manifest.

    Also for files in object stores.
    """
    path, size, _ = file
    snapshot = _snapshot(session, source)
    found = snapshot.table.io().newInputFile(path)
    if not found.exists():
        raise Gone(file_gone(path, snapshot.id))
    check_length(path, size, int(found.getLength()))


@frozen
class _Snapshot:
    """A snapshot in the JVM: the table with its metadata, and the scan tasks of its files."""

    table: Any
    id: str
    tasks: ScanTasks
    number: int = field(default_factory=itertools.count(1).__next__)
    """Unique in this process, also if the same file is loaded again."""


def _snapshot(session: SparkSession, source: str, *, lineage: bool = False) -> _Snapshot:
    key = (session, lineage, *identity(source))
    found = _snapshots.get(key, lambda: _load(session, source, lineage=lineage))
    found.tasks.check_deletes(source)
    return found


def _load(session: SparkSession, source: str, *, lineage: bool) -> _Snapshot:
    from py4j.protocol import Py4JJavaError

    jvm: Any = session._jvm
    check_installed(jvm)
    file = _or_gone(source, lambda: read_file(source))
    if file.content.current_snapshot() is None:
        raise Unreadable(f"the metadata file {source} has no snapshot")
    _or_gone(source, lambda: check_files(file))
    iceberg = jvm.org.apache.iceberg
    try:
        table = table_of(session, file)
        current = table.currentSnapshot()
        _or_gone(source, lambda: check_manifests_of(file, current, table.io()))
        id_ = str(current.snapshotId())
        _check_types(file, json.loads(iceberg.SchemaParser.toJson(table.schema())), lineage=lineage)
        files = table.newScan().planFiles()
        try:
            tasks = ScanTasks(session, files, f"the snapshot {id_} of {source}")
        finally:
            files.close()
        # Check again: manifests may have been replaced since.
        _or_gone(source, lambda: check_files(file))
        check_opened(source, tasks.paths, ())
        return _Snapshot(readable(iceberg, table, uri(source), lineage=lineage), id_, tasks)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() in _GONE:
            raise Gone(snapshot_gone(source, str(error.java_exception.getMessage()))) from error
        raise


def _check_types(file: MetadataFile, schema: Any, *, lineage: bool) -> None:
    """Raises Unreadable if Spark needs a column whose type it lacks. ``schema``: the current one, as JSON."""
    if lineage:
        check_columns(schema)
    elif supported(schema) != schema:
        of_partitions = {field.source_id for spec in file.content.partition_specs for field in spec.fields}
        deletes = _or_gone(file.source, lambda: equality_ids(file.content, file.manifests()))
        check_not_needed(schema, of_partitions.union(*deletes))


def _or_gone(source: str, check: Callable[[], T]) -> T:
    """The result of ``check``. Raises Gone instead of its TableUnavailable if a file no longer exists."""
    try:
        return check()
    except TableUnavailable as error:
        cause = error.__cause__
        while cause is not None and not isinstance(cause, FileNotFoundError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise Gone(snapshot_gone(source, f"{cause.filename or 'a manifest'} is gone")) from error
