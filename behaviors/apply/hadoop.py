"""The metadata of an Iceberg table by path, swapped by Iceberg itself.

``TableOperations.commit`` takes the very object that was loaded, and refuses any other: one by another writer meanwhile
has a file of the next number, which is not overwritten. ``UpdateSchema.commit`` is not called, it only makes the
schema: it builds on whatever is current when it is asked for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from distop.behavior import TableUnavailable
from distop.tables.iceberg import NO_SNAPSHOT, folder_of
from distop_behaviors.apply.target import Change, Head, Moved, Rewrite, Unsure
from distop_behaviors.reading.fields import local_path
from distop_behaviors.reading.iceberg import check_installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distop.behavior import JobContext, TableRecord

_PACKAGE = "org.apache.iceberg.exceptions"
_FAILED, _UNKNOWN, _NONE = (
    f"{_PACKAGE}.{name}" for name in ("CommitFailedException", "CommitStateUnknownException", "NoSuchTableException")
)


class HadoopTarget:
    """A table of a Hadoop catalog, or made by path."""

    def __init__(self, table: TableRecord, ctx: JobContext) -> None:
        self._table = table
        self._ctx = ctx

    def load(self) -> Head:
        """See Target. Raises also FatalError where Spark has no Iceberg."""
        from py4j.protocol import Py4JJavaError

        session: Any = self._ctx.spark
        jvm = session._jvm
        check_installed(jvm)
        location = folder_of(self._table)
        assert location is not None, "a table whose catalog alone knows its folder"
        try:
            # Loaded anew, so that what is kept by nobody is compared.
            table = jvm.org.apache.iceberg.hadoop.HadoopTables(self._conf()).load(_uri(location))
        except Py4JJavaError as error:
            self._ctx.check_reachable()
            if _name(error) == _NONE:
                raise TableUnavailable(f"there is no Iceberg table at {location!r} any more: it was dropped") from error
            raise
        base = table.operations().current()
        return Head(_source(base), dict(base.properties()), (table, base, jvm))

    def swap(self, head: Head, change: Change) -> None:
        """See Target."""
        table, base, jvm = head.base
        operations = table.operations()
        update = table.updateSchema().allowIncompatibleChanges()
        for field_id in change.required:
            update.requireColumn(base.schema().findColumnName(field_id))
        for field_id in change.optional:
            update.makeColumnOptional(base.schema().findColumnName(field_id))
        properties = _properties(jvm, base, change.properties or {})
        self._commit(operations, base, base.updateSchema(update.apply()).replaceProperties(properties))

    def rewrite(self, head: Head, rewrite: Rewrite) -> None:
        """Replace data files, and the schema with them, in one commit, if the table is still what was loaded. Raises as
        ``swap`` does; what was written on the way is removed where it was refused.

        The steps are those of a transaction, of which nothing but its outcome is used: its own commit would build on
        whatever is current by then.
        """
        table, _, jvm = head.base
        iceberg = jvm.org.apache.iceberg
        operations = table.operations()
        transaction = iceberg.Transactions.newTransaction(table.name(), operations)
        base = transaction.startMetadata()
        if _source(base) != head.source:
            raise Moved(f"the table has other metadata by now: {_source(base)}")
        made = transaction.table().operations()
        if rewrite.schema is not None:
            schema = iceberg.SchemaParser.fromJson(json.dumps(rewrite.schema))
            made.commit(base, base.updateSchema(schema))
        former = base.currentSnapshot()
        lists = iceberg.relocated.com.google.common.collect.Lists
        data, deletes, added = (jvm.java.util.HashSet() for _ in range(3))
        for staged in rewrite.staged:
            source = iceberg.hadoop.HadoopTables(self._conf()).load(_uri(staged))
            if (snapshot := source.currentSnapshot()) is not None:
                added.addAll(lists.newArrayList(snapshot.addedDataFiles(source.io())))
        if former is not None:
            for manifest in former.dataManifests(table.io()):
                reader = iceberg.ManifestFiles.read(manifest, table.io(), base.specsById())
                files = lists.newArrayList(reader)
                reader.close()
                if rewrite.replaced is None:
                    data.addAll(files)
                    continue
                for file in files:
                    if str(file.location()) in rewrite.replaced:
                        data.add(file)
            for manifest in former.deleteManifests(table.io()) if rewrite.replaced is None else ():
                reader = iceberg.ManifestFiles.readDeleteManifest(manifest, table.io(), base.specsById())
                deletes.addAll(lists.newArrayList(reader))
                reader.close()
        if data.size() or deletes.size():
            rewriting = transaction.newRewrite().validateFromSnapshot(former.snapshotId())
            rewriting.rewriteFiles(data, deletes, added, jvm.java.util.HashSet())
            rewriting.set("distop.operation", self._ctx.operation)
            rewriting.commit()
        current = made.current()
        snapshot = current.currentSnapshot()
        told = rewrite.properties(str(snapshot.snapshotId()) if snapshot is not None else NO_SNAPSHOT)
        try:
            self._commit(operations, base, current.replaceProperties(_properties(jvm, current, told)))
        except Moved:
            if snapshot is not None and (former is None or snapshot.snapshotId() != former.snapshotId()):
                _remove(table.io(), snapshot)
            raise

    def roll_back(
        self, head: Head, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> None:
        """Make a former schema and snapshot (None: it is still this one) the current ones again, with the data files
        ``kept`` of the present one, in one commit. Raises as ``swap`` does.
        """
        table, _, jvm = head.base
        iceberg = jvm.org.apache.iceberg
        operations = table.operations()
        transaction = iceberg.Transactions.newTransaction(table.name(), operations)
        base = transaction.startMetadata()
        if _source(base) != head.source:
            raise Moved(f"the table has other metadata by now: {_source(base)}")
        made = transaction.table().operations()
        builder = iceberg.TableMetadata.buildFrom(base).setCurrentSchema(schema)
        if snapshot is not None:
            builder = builder.setBranchSnapshot(snapshot, "main")
        made.commit(base, builder.build())
        if snapshot is not None and kept:
            appending = transaction.newFastAppend()
            for file in self._data_files(jvm, table, base):
                if str(file.location()) in kept:
                    appending.appendFile(file)
            appending.commit()
        current = made.current()
        self._commit(operations, base, current.replaceProperties(_properties(jvm, current, change)))

    @staticmethod
    def _data_files(jvm: Any, table: Any, metadata: Any) -> Iterator[Any]:
        """The data files of the current snapshot, with their statistics."""
        iceberg = jvm.org.apache.iceberg
        for manifest in metadata.currentSnapshot().dataManifests(table.io()):
            reader = iceberg.ManifestFiles.read(manifest, table.io(), metadata.specsById())
            yield from iceberg.relocated.com.google.common.collect.Lists.newArrayList(reader)
            reader.close()

    def _conf(self) -> Any:
        session: Any = self._ctx.spark
        return session._jsparkSession.sessionState().newHadoopConf()

    @staticmethod
    def _commit(operations: Any, base: Any, updated: Any) -> None:
        from py4j.protocol import Py4JJavaError

        try:
            operations.commit(base, updated)
        except Py4JJavaError as error:
            name = _name(error)
            if name == _FAILED:
                raise Moved(str(error.java_exception.getMessage())) from error
            if name == _UNKNOWN:
                raise Unsure(str(error.java_exception.getMessage())) from error
            raise


def _properties(jvm: Any, base: Any, change: Mapping[str, str | None]) -> Any:
    properties = jvm.java.util.HashMap(base.properties())
    for name, value in change.items():
        if value is None:
            properties.remove(name)
        else:
            properties.put(name, value)
    return properties


def _remove(io: Any, snapshot: Any) -> None:
    """The manifests of a snapshot that is none of the table."""
    for manifest in snapshot.allManifests(io):
        if manifest.snapshotId() == snapshot.snapshotId():
            io.deleteFile(manifest.path())
    io.deleteFile(snapshot.manifestListLocation())


def _source(metadata: Any) -> str:
    """The file of some metadata, as a plan names it."""
    source = str(metadata.metadataFileLocation())
    return local_path(source) or source


def _uri(location: str) -> str:
    return f"file://{location}" if location.startswith("/") else location


def _name(error: Any) -> str:
    return str(error.java_exception.getClass().getName())
