"""The metadata that a rewrite, or its undoing, makes of an Iceberg table: by Iceberg's own transaction in the JVM.

Of the transaction nothing but its outcome is used: its own commit would build on whatever is current by then. Who asks
for it commits that outcome, in whichever way compares with what was loaded.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from distop.errors import UnsafePath
from distop.storage.confinement import copied, own_folder
from distop.storage.deletion import Place, delete, delete_or_log, write
from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.iceberg.iceberg_format import NO_SNAPSHOT
from distop.tables.iceberg.iceberg_rows import check_manifests_of, check_same, table_of, uri
from distop.tables.iceberg.metadata_file import read_file
from distop.tables.iceberg.written_folders import check_folder, check_metadata_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from distop_behaviors.apply.schema_target import Rewrite

log = logging.getLogger("distop.apply")

_METADATA = "metadata"
_LOG_LIMIT = "write.metadata.previous-versions-max"
FOLDER = "distop-"
"""How the folder begins that a commit through a catalog has its manifests in."""


class Production:
    """One transaction on a table as it was loaded. ``operation``: for whom, as the snapshot says."""

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
        self._made.commit(self.base, keeping_log(self._jvm, self.base))

    @property
    def _iceberg(self) -> Any:
        return self._jvm.org.apache.iceberg

    def rewritten(self, rewrite: Rewrite) -> Any:
        """With data files in the place of others, and the schema with them. Raises UnsafePath for a new file that does
        not lie in its stage, or is a link, and for a stage that others may have made.
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

    def rolled_back(
        self, schema: int, snapshot: int | None, kept: frozenset[str], change: Mapping[str, str | None]
    ) -> Any:
        """With a former schema and snapshot (None: it is still this one) as the current ones, and the data files
        ``kept`` of the present one.
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
        """Remove what was written on the way: nobody has taken the outcome. What does not lie below the table's
        metadata, by a setting of the table, is left to Iceberg's ``remove_orphan_files``.
        """
        snapshot = self._made.current().currentSnapshot()
        if snapshot is None or self.base.snapshot(snapshot.snapshotId()) is not None:
            return
        manifests = [m for m in snapshot.allManifests(self._table.io()) if m.snapshotId() == snapshot.snapshotId()]
        place = Place(_local(str(self._table.location())), _METADATA)
        for path in (*(_local(str(m.path())) for m in manifests), _local(str(snapshot.manifestListLocation()))):
            folder, _, name = path.rpartition("/")
            if folder == place.location:
                delete_or_log(place, name, log)
                delete_or_log(place, f".{name}.crc", log)

    def _data_files(self) -> Iterator[Any]:
        """Those of the snapshot that was loaded, with their statistics."""
        for manifest in self.base.currentSnapshot().dataManifests(self._table.io()):
            reader = self._iceberg.ManifestFiles.read(manifest, self._table.io(), self.base.specsById())
            yield from self._iceberg.relocated.com.google.common.collect.Lists.newArrayList(reader)
            reader.close()

    def _with(self, change: Mapping[str, str | None]) -> Any:
        current = self._made.current()
        return current.replaceProperties(properties(self._jvm, current, change))


def keeping_log(jvm: Any, base: Any) -> Any:
    """The metadata to build a commit on: ``base``, with all of its metadata log and its own file in that.

    Iceberg's commit deletes the files that the new log lacks, where ``write.metadata.delete-after-commit.enabled`` is
    set; and whoever writes a table's metadata chooses what its log names. The properties stay as they are: only while
    the log is made, its limit is another one.
    """
    room = properties(jvm, base, {_LOG_LIMIT: str(base.previousFiles().size() + 1)})
    logged = base.replaceProperties(room).replaceProperties(base.properties())
    # The change of a property and back is none of the steps that a catalog is told.
    return jvm.org.apache.iceberg.TableMetadata.buildFrom(logged).discardChanges().build()


def properties(jvm: Any, metadata: Any, change: Mapping[str, str | None]) -> Any:
    """Those of some metadata with a change."""
    changed = jvm.java.util.HashMap(metadata.properties())
    for name, value in change.items():
        if value is None:
            changed.remove(name)
        else:
            changed.put(name, value)
    return changed


@contextmanager
def detached(session: Any, source: str) -> Iterator[Any]:
    """The table of a metadata file that a catalog knows, for a :class:`Production`, without that catalog: as one by
    path, in a folder of its own below the table's metadata, where the manifests that are written stay. ``source``: as a
    plan names it. Nothing but those is left. Raises InvalidArgument where the metadata name another folder, and
    UnsafePath where others may change one on a disk.
    """
    file = read_file(source)
    table = _local(own_folder(source, str(file.content.location)))
    check_metadata_folder(table)
    place = Place(table, f"{_METADATA}/{FOLDER}{uuid.uuid4().hex}")
    folder = place.below(_METADATA)
    write(folder, "v1.metadata.json", file.text.encode())
    copied(source, f"{folder.location}/v1.metadata.json")
    write(folder, "version-hint.text", b"1")
    try:
        check_folder(folder)
        conf = session._jsparkSession.sessionState().newHadoopConf()
        yield session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf).load(uri(place.location))
    finally:
        for name in ("v1.metadata.json", "version-hint.text"):
            delete_or_log(folder, name, log)
            delete_or_log(folder, f".{name}.crc", log)
        with suppress(OSError, UnsafePath):  # they stay where there are manifests
            delete(place, _METADATA, only_empty=True)
            delete(place.parent, place.name, only_empty=True)


def _local(path: str) -> str:
    return local_path(path) or path
