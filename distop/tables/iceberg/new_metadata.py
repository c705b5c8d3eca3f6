"""Computes the metadata of an Iceberg table after a rewrite or a rollback, by an Iceberg transaction in the JVM.

The transaction is not committed, because its commit would apply to the metadata that is current at that moment. The
caller commits the resulting metadata, and compares with the loaded metadata.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from distop.errors import InvalidArgument, describe
from distop.protocol.frozen import frozen
from distop.storage.confinement import note_copy, own_folder
from distop.storage.deletion import Place
from distop.storage.opened_stores import store_of
from distop.tables.commits import FENCE, OPERATION
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.java_tables import check_manifests_of, check_same, table_of, uri
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT
from distop.tables.iceberg.written_folders import check_folder, check_metadata_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from distop.tables.iceberg.metadata_file import MetadataFile

log = logging.getLogger("distop.tables")

_METADATA = "metadata"
_VALIDATION = "org.apache.iceberg.exceptions.ValidationException"
_LOG_LIMIT = "write.metadata.previous-versions-max"
FOLDER = "distop-"
"""The prefix of the folder for the manifests of a commit through a catalog."""


class StagedTable(Protocol):
    """A staging table, whose one snapshot has the new files."""

    def metadata(self) -> tuple[MetadataFile, list[str]]:
        """Its metadata file and its manifests. Raises UnsafePath and InvalidArgument."""

    def check_file(self, path: str) -> None:
        """Raises UnsafePath for a data file that is outside the stage or a link, StagedFileLost and OSError."""


@frozen
class Rewrite:
    """Data files that replace others.

    ``schema``: the new current schema, as JSON, or None. ``staged``: the staging tables with the new files.
    ``replaced``: the paths of the data files to remove; None: all data files and all deletes. ``properties``: returns
    the table properties to set, or (None) to remove, for the id of the new snapshot.
    """

    schema: Mapping[str, Any] | None
    staged: Sequence[StagedTable]
    replaced: frozenset[str] | None
    properties: Callable[[str], Mapping[str, str | None]]


@frozen
class ReplacedFiles:
    """Data files that were read from one snapshot, and their replacement by staged files with the same rows.

    ``manifests``: those of the current snapshot with the removed files; ``delete_manifests``: those with deletes that
    apply to one of them alone.
    """

    read: int
    removed: frozenset[str]
    manifests: frozenset[str]
    delete_manifests: frozenset[str]
    staged: Sequence[StagedTable]


class FilesChanged(Exception):
    """The table no longer has files that are to be replaced, or other position deletes apply to them."""


class Production:
    """One transaction on a loaded table. ``operation``: its id, which is stored in the summary of the snapshot."""

    def __init__(self, session: Any, table: Any, operation: str) -> None:
        self._session = session
        self._jvm = session._jvm
        self._table = table
        self._operation = operation
        self._transaction = self._iceberg.Transactions.newTransaction(table.name(), table.operations())
        self._made = self._transaction.table().operations()
        self.base = self._transaction.startMetadata()
        if (snapshot := self.base.currentSnapshot()) is not None:
            check_manifests_of(read_file(_local(str(self.base.metadataFileLocation()))), snapshot, table.io())
        self._made.commit(self.base, with_full_log(self._jvm, self.base))

    @property
    def _iceberg(self) -> Any:
        return self._jvm.org.apache.iceberg

    def rewritten(self, rewrite: Rewrite) -> Any:
        """The metadata after replacing data files and the schema.

        Raises UnsafePath for a new file that is outside its stage or a link, and for a stage that other users may have
        written.
        """
        lists = self._iceberg.relocated.com.google.common.collect.Lists
        data, deletes, added = (self._jvm.java.util.HashSet() for _ in range(3))
        if rewrite.schema is not None:
            schema = self._iceberg.SchemaParser.fromJson(json.dumps(rewrite.schema))
            current = self._made.current()
            self._made.commit(current, current.updateSchema(schema))
        for staged in rewrite.staged:
            metadata, manifests = staged.metadata()
            source = table_of(self._session, metadata)
            if (snapshot := source.currentSnapshot()) is not None:
                check_same(metadata.source, manifests, snapshot, source.io())
                new = lists.newArrayList(snapshot.addedDataFiles(source.io()))
                for file in new:
                    staged.check_file(str(file.location()))
                added.addAll(new)
        former = self.base.currentSnapshot()
        if former is not None:
            for file in self._data_files():
                if rewrite.replaced is None or str(file.location()) in rewrite.replaced:
                    data.add(file)
            for manifest in former.deleteManifests(self._table.io()) if rewrite.replaced is None else ():
                reader = self._iceberg.ManifestFiles.readDeleteManifest(
                    manifest, self._table.io(), self.base.specsById()
                )
                deletes.addAll(lists.newArrayList(reader))
                reader.close()
        if data.size() or deletes.size():
            rewriting = self._transaction.newRewrite().validateFromSnapshot(former.snapshotId())
            rewriting.rewriteFiles(data, deletes, added, self._jvm.java.util.HashSet())
            rewriting.set("distop.operation", self._operation)
            rewriting.commit()
        snapshot = self._made.current().currentSnapshot()
        return self._with(rewrite.properties(str(snapshot.snapshotId()) if snapshot is not None else NO_SNAPSHOT))

    def replaced(self, batches: Sequence[ReplacedFiles], marks: Mapping[str, str]) -> Any:
        """The metadata after replacing data files by others with the same rows, in one snapshot for each batch.

        The new files get the sequence number of the snapshot that was read: equality deletes that were added since
        still apply to them. ``marks``: for the summaries of the snapshots. Raises FilesChanged if Iceberg finds that a
        file is missing, or has new position deletes; UnsafePath for a new file that is outside its stage.
        """
        from py4j.protocol import Py4JJavaError

        lists = self._iceberg.relocated.com.google.common.collect.Lists
        try:
            for batch in batches:
                rewriting = self._transaction.newRewrite().validateFromSnapshot(batch.read)
                read = self.base.snapshot(batch.read)
                if read is None:
                    raise FilesChanged(f"the snapshot {batch.read} that was read is expired")
                missing = set(batch.removed)
                for file in self._files_of(batch.manifests):
                    if (path := str(file.location())) in missing:
                        missing.discard(path)
                        rewriting.deleteFile(file)
                if missing:
                    raise FilesChanged(f"the table no longer has the file {min(missing)}")
                for delete in self._deletes_of(batch.removed, batch.delete_manifests):
                    rewriting.deleteFile(delete)
                for staged in batch.staged:
                    metadata, manifests = staged.metadata()
                    source = table_of(self._session, metadata)
                    if (snapshot := source.currentSnapshot()) is not None:
                        check_same(metadata.source, manifests, snapshot, source.io())
                        for file in lists.newArrayList(snapshot.addedDataFiles(source.io())):
                            staged.check_file(str(file.location()))
                            rewriting.addFile(file)
                rewriting.dataSequenceNumber(read.sequenceNumber())
                for name, value in marks.items():
                    rewriting.set(name, value)
                rewriting.commit()
        except Py4JJavaError as error:
            if str(error.java_exception.getClass().getName()) == _VALIDATION:
                raise FilesChanged(str(error.java_exception.getMessage())) from error
            raise
        return self._made.current()

    def _files_of(self, manifests: frozenset[str]) -> Iterator[Any]:
        """The data files in these manifests of the loaded snapshot, with their statistics."""
        lists = self._iceberg.relocated.com.google.common.collect.Lists
        for manifest in self.base.currentSnapshot().dataManifests(self._table.io()):
            if str(manifest.path()) in manifests:
                reader = self._iceberg.ManifestFiles.read(manifest, self._table.io(), self.base.specsById())
                yield from lists.newArrayList(reader)
                reader.close()

    def _deletes_of(self, removed: frozenset[str], manifests: frozenset[str]) -> Iterator[Any]:
        """The delete files in these manifests that apply to no other data file than one of the removed ones."""
        lists = self._iceberg.relocated.com.google.common.collect.Lists
        util = self._iceberg.util.ContentFileUtil
        for manifest in self.base.currentSnapshot().deleteManifests(self._table.io()):
            if str(manifest.path()) not in manifests:
                continue
            reader = self._iceberg.ManifestFiles.readDeleteManifest(manifest, self._table.io(), self.base.specsById())
            for delete in lists.newArrayList(reader):
                referenced = util.referencedDataFileLocation(delete)
                if referenced is not None and str(referenced) in removed:
                    yield delete
            reader.close()

    def deleted(self, paths: Collection[str], fence: str) -> Any:
        """The metadata after deleting whole data files of the loaded snapshot. ``fence``: as in ``Marks``."""
        deleting = self._transaction.newDelete()
        for file in self._data_files():
            if str(file.location()) in paths:
                deleting.deleteFile(file)
        deleting.set(OPERATION, self._operation)
        deleting.set(FENCE, fence)
        deleting.commit()
        return self._made.current()

    def rolled_back(
        self, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> Any:
        """The metadata after returning to an earlier schema and snapshot, with the data files ``kept``.

        ``snapshot`` None: the current snapshot is kept. ``kept``: paths of files of the current snapshot.
        """
        current = self._made.current()
        builder = self._iceberg.TableMetadata.buildFrom(current).setCurrentSchema(schema)
        if snapshot is not None:
            builder = builder.setBranchSnapshot(snapshot, "main")
        self._made.commit(current, builder.build())
        if snapshot is not None and kept:
            appending = self._transaction.newFastAppend()
            for file in self._data_files():
                if str(file.location()) in kept:
                    appending.appendFile(file)
            appending.commit()
        return self._with(change)

    def discard(self) -> None:
        """Remove the manifests of this transaction, after its metadata was not committed.

        Manifests outside the table's metadata folder, by a setting of the table, are left to Iceberg's
        ``remove_orphan_files``.
        """
        snapshot = self._made.current().currentSnapshot()
        if snapshot is None or self.base.snapshot(snapshot.snapshotId()) is not None:
            return
        manifests = [m for m in snapshot.allManifests(self._table.io()) if m.snapshotId() == snapshot.snapshotId()]
        place = Place(_local(str(self._table.location())), _METADATA)
        written = (*(_local(str(m.path())) for m in manifests), _local(str(snapshot.manifestListLocation())))
        found = (path.rpartition("/") for path in written)
        _remove_or_log(place, [name for folder, _, name in found if folder == place.location])

    def _data_files(self) -> Iterator[Any]:
        """The data files of the loaded snapshot, with their statistics."""
        for manifest in self.base.currentSnapshot().dataManifests(self._table.io()):
            reader = self._iceberg.ManifestFiles.read(manifest, self._table.io(), self.base.specsById())
            yield from self._iceberg.relocated.com.google.common.collect.Lists.newArrayList(reader)
            reader.close()

    def _with(self, change: Mapping[str, str | None]) -> Any:
        current = self._made.current()
        return current.replaceProperties(properties(self._jvm, current, change))


def with_full_log(jvm: Any, base: Any) -> Any:
    """The metadata to base a commit on: ``base`` with its whole metadata log, and its own file in the log.

    With ``write.metadata.delete-after-commit.enabled``, Iceberg's commit deletes the files that the new log lacks, and
    a writer of the table can put any file into its log. The log's limit is raised only while the log is built; the
    properties stay as they are.
    """
    room = properties(jvm, base, {_LOG_LIMIT: str(base.previousFiles().size() + 1)})
    logged = base.replaceProperties(room).replaceProperties(base.properties())
    # Setting the property and setting it back must not be among the updates that are sent to a catalog.
    return jvm.org.apache.iceberg.TableMetadata.buildFrom(logged).discardChanges().build()


def properties(jvm: Any, metadata: Any, change: Mapping[str, str | None]) -> Any:
    """The properties of this metadata after a change."""
    changed = jvm.java.util.HashMap(metadata.properties())
    for name, value in change.items():
        if value is None:
            changed.remove(name)
        else:
            changed.put(name, value)
    return changed


@contextmanager
def without_catalog(session: Any, source: str) -> Iterator[Any]:
    """A table of a catalog as a table by path, for a :class:`Production` without the catalog.

    Its folder is new, below the table's metadata; only written manifests remain there. ``source``: the metadata file's
    path, like in a plan. Raises InvalidArgument if the metadata has another location, and UnsafePath if other users may
    change a folder on a disk.
    """
    file = read_file(source)
    table = _local(own_folder(source, str(file.content.location)))
    check_metadata_folder(table)
    place = Place(table, f"{_METADATA}/{FOLDER}{uuid.uuid4().hex}")
    folder, written = place.below(_METADATA), ("v1.metadata.json", "version-hint.text")
    store = store_of(folder)
    store.put_new(written[0], file.text.encode())
    note_copy(source, f"{folder.location}/{written[0]}")
    store.put_new(written[1], b"1")
    try:
        check_folder(folder)
        conf = session._jsparkSession.sessionState().newHadoopConf()
        yield session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(uri(place.location))
    finally:
        # The folders stay if they hold manifests.
        _remove_or_log(place.parent, [f"{place.name}/{_METADATA}/{name}" for name in written])


def _remove_or_log(place: Place, names: Sequence[str]) -> None:
    """Remove files of a place, and the checksums that Hadoop keeps beside local files. Logs errors."""
    inner = (name.rpartition("/") for name in names)
    checksums = [f"{folder}{slash}.{name}.crc" for folder, slash, name in inner]
    try:
        store_of(place).delete_many([*names, *checksums])
    except (OSError, InvalidArgument) as error:
        log.warning("Cannot remove files of a transaction in %s: %s", place.location, describe(error))


def _local(path: str) -> str:
    return local_path(path) or path
