"""The files that an Iceberg table's metadata reach: those of all its snapshots, so of all branches and tags.

Iceberg keeps a file while any snapshot in the metadata has it. Statistics files belong to a snapshot, too. Branches and
tags only protect snapshots from expiration.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, InvalidArgument
from distop.protocol.texts import shown
from distop.storage.confinement import own_folder, resolve_once
from distop.storage.store_errors import unavailable
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import HINT, METADATA, MetadataFile, json_of, read_file
from distop.tables.iceberg.snapshot_files import files_of
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT
from distop.tables.pinned_files import PinnedFiles
from distop.tables.reachability import (
    DATA,
    DELETES,
    MANIFEST,
    MANIFEST_LIST,
    STATISTICS,
    Reachability,
    ReadableVersion,
    TableFile,
    Unit,
)
from distop.tables.reachability import METADATA as METADATA_KIND

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

GC_ENABLED = "gc.enabled"
MAIN = "main"
_REMOVED = 2
"""The status of an entry for a file that the manifest's snapshot removed."""
_NEWEST = 3
"""The format version whose entries have all columns; older entries are read with its schema."""
_CHECKED_EVERY = 1_000
"""Number of entries between two checks whether to stop."""


class IcebergReachability(Reachability):
    """The files that a metadata file reaches. ``hint``: the table is in a folder with a version hint."""

    def __init__(self, file: MetadataFile, check: Callable[[], None] = lambda: None, *, hint: bool = False) -> None:
        """Raises InvalidArgument if the metadata's location is another folder than that of the metadata file."""
        self.source = file.source
        self.place = own_folder(file.source, str(file.content.location))
        self._metadata = file.content
        if str(file.content.properties.get(GC_ENABLED, "true")).strip().lower() == "false":
            self.protected = f"its property {GC_ENABLED} is false, because others than this table may need its files"
        self._file = file
        self._check = check
        self._hint = hint
        self._allowed = files_of(file.source, file.content)

    @classmethod
    def of(cls, source: str, check: Callable[[], None], *, hint: bool) -> IcebergReachability:
        """The files that the metadata file ``source`` reaches. Raises InvalidArgument and TableUnavailable."""
        return cls(read_file(source), check, hint=hint)

    def versions(self) -> Sequence[ReadableVersion]:
        names: dict[int, list[str]] = {}
        for name, ref in self._metadata.refs.items():
            names.setdefault(ref.snapshot_id, []).append(name)
        snapshots = sorted(self._metadata.snapshots, key=lambda one: (one.timestamp_ms, one.sequence_number or 0))
        refs = {snapshot: tuple(sorted(found)) for snapshot, found in names.items()}
        return [
            ReadableVersion(str(one.snapshot_id), one.timestamp_ms / 1000, refs.get(one.snapshot_id, ()))
            for one in snapshots
        ]

    def roots(self) -> Iterator[TableFile]:
        for entry in self._metadata.metadata_log:
            yield TableFile(entry.metadata_file, METADATA_KIND)
        if self._hint:
            yield TableFile(f"{self.place.rstrip('/')}/{METADATA}/{HINT}", METADATA_KIND, optional=True)
        yield TableFile(self.source, METADATA_KIND)

    def history(self) -> Iterator[TableFile]:
        seen = {file.path for file in self.roots()}
        for entry in self._earlier():
            if entry.metadata_file not in seen:
                yield TableFile(entry.metadata_file, METADATA_KIND)

    def _earlier(self) -> Iterator[Any]:
        """The entries of the metadata log, and of those of earlier metadata files as far as these exist."""
        seen: set[str] = set()
        log = self._metadata.metadata_log
        while True:
            new = [entry for entry in log if entry.metadata_file not in seen]
            if not new:
                return
            seen.update(entry.metadata_file for entry in new)
            yield from new
            self._check()
            try:
                log = read_file(log[0].metadata_file).content.metadata_log
            except DistopError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return  # deleted after a later commit, as the table's properties allow
                raise

    def other_states(self, paths: Sequence[str]) -> Iterator[Reachability]:
        """Two tables of catalogs may have one location. A table that two catalogs have registered has two histories.

        A metadata file that is older than the known history is a former state. One that no reader can parse is none:
        its writer was killed.
        """
        if not paths:
            return
        known, oldest = set[str](), self._metadata.last_updated_ms
        for entry in self._earlier():
            known.add(entry.metadata_file.rpartition("/")[2])
            oldest = min(oldest, entry.timestamp_ms)
        for path in paths:
            if path.rpartition("/")[2] in known:
                continue
            self._check()
            found = json_of(path)
            if found is None:
                continue
            if str(found.get("table-uuid", "")) != str(self._metadata.table_uuid):
                raise InvalidArgument(
                    f"the metadata file {shown(path)} belongs to another table, whose files may be anywhere in the "
                    "folder. If no catalog has that table any more, delete its metadata files"
                )
            if not found.get("last-updated-ms", oldest) < oldest:
                yield self.of(path, self._check, hint=False)

    def named(self, versions: Collection[str] | None = None) -> Iterator[TableFile]:
        for snapshot in self._snapshots(versions):
            yield TableFile(snapshot.manifest_list, MANIFEST_LIST)
        known = {snapshot.snapshot_id for snapshot in self._snapshots(None)}
        for one in (*self._metadata.statistics, *self._metadata.partition_statistics):
            # Statistics of an unknown snapshot are kept while the metadata name them.
            if versions is None or str(one.snapshot_id) in versions or one.snapshot_id not in known:
                yield TableFile(one.statistics_path, STATISTICS, one.file_size_in_bytes)

    def units(self, versions: Collection[str] | None = None) -> Iterator[Unit]:
        seen: set[str] = set()
        for snapshot in self._snapshots(versions):
            self._check()
            for manifest in self._read(partial(self._manifests, snapshot)):
                if manifest.manifest_path not in seen:
                    seen.add(manifest.manifest_path)
                    kind = DELETES if manifest.content else DATA
                    yield Unit(manifest.manifest_path, kind, manifest.manifest_length)

    def files(self, unit: Unit, *, removed: bool = False) -> Iterator[TableFile]:
        yield TableFile(unit.name, MANIFEST, unit.size or None)
        yield from self._read(partial(self._entries, unit, removed))

    def _snapshots(self, versions: Collection[str] | None) -> list[Any]:
        return [s for s in self._metadata.snapshots if versions is None or str(s.snapshot_id) in versions]

    def _manifests(self, snapshot: Any) -> list[Any]:
        io = self._file.manifests()
        self._allowed.check((snapshot.manifest_list,))
        with io.watched():
            found = manifests_of(snapshot, io)
        self._allowed.check(manifest.manifest_path for manifest in found)
        return found

    def _entries(self, unit: Unit, removed: bool) -> list[TableFile]:
        """The files of a manifest, each once: the vectors of many data files may be in one Puffin file."""
        from pyiceberg.manifest import MANIFEST_ENTRY_SCHEMAS

        from distop.tables.iceberg.avro_records import RecordFile

        schema = MANIFEST_ENTRY_SCHEMAS[_NEWEST]
        top = [field.name for field in schema.fields]
        struct: Any = schema.find_type("data_file")
        columns = [field.name for field in struct.fields]
        status_at, file_at = top.index("status"), top.index("data_file")
        path_at, size_at = columns.index("file_path"), columns.index("file_size_in_bytes")
        self._allowed.check((unit.name,))
        io = self._file.manifests()
        found: dict[str, TableFile] = {}
        with io.watched(), RecordFile[Any](io.new_input(unit.name), schema) as reader:
            for n, entry in enumerate(reader):
                if n % _CHECKED_EVERY == 0:
                    self._check()
                    io.alive()
                if removed or entry[status_at] != _REMOVED:
                    path, size = entry[file_at][path_at], entry[file_at][size_at]
                    found.setdefault(path, TableFile(path, unit.kind, size))
        with resolve_once():
            self._allowed.check(found)
        return list(found.values())

    def _read(self, read: Callable[[], list[Any]]) -> list[Any]:
        """Call ``read``. Raises TableUnavailable for every error of a reader."""
        try:
            return read()
        except OSError as error:
            raise unavailable(f"cannot read the metadata of {self._metadata.location!r}: {error}", error) from error
        except DistopError:
            raise
        except Exception as error:  # for a damaged file the reader raises any error, even SystemError
            raise unavailable(f"cannot read the metadata of {self._metadata.location!r}: {error}", error) from error


def snapshot_files(found: Reachability, table: str, version: str) -> PinnedFiles:
    """The data files of a snapshot. ``version``: its id, or a branch or a tag; "": the main branch.

    Raises InvalidArgument for an unknown version, and TableUnavailable.
    """
    wanted = version or MAIN
    snapshot = next((one for one in found.versions() if one.id == wanted or wanted in one.refs), None)
    if snapshot is None:
        if not version:
            return PinnedFiles(found.place, NO_SNAPSHOT, [])
        raise InvalidArgument(
            f"the table {table!r} has no snapshot, branch or tag {shown(version)}: it may have been expired"
        )
    sizes: dict[str, int] = {}
    deletes = False
    for unit in found.units({snapshot.id}):
        for file in found.files(unit):
            deletes = deletes or file.kind == DELETES
            if file.kind == DATA:
                sizes[file.path] = file.size or 0
    needs = "its snapshot has deleted rows, which are in files of their own" if deletes else ""
    return PinnedFiles(found.place, snapshot.id, [(path, size, 0) for path, size in sizes.items()], needs)
