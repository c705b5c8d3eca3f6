"""Copies a snapshot of an Iceberg table with its metadata: a table of one snapshot at another place, without a JVM.

Manifest list and manifests are rewritten with new paths and nothing else: sequence numbers, partition specs, field ids
and statistics stay, so each delete applies to the same data files. Files of position deletes name data files, so they
are written again. Equality deletes name none, and are copied as they are.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.files import local_path
from distop.storage.location import Location
from distop.storage.normal_uris import normal
from distop.storage.opened_stores import store_of
from distop.storage.store_errors import ObjectChanged, ObjectExists, ObjectMissing
from distop.tables import commit_file
from distop.tables.commits import Conflict
from distop.tables.iceberg import avro_rewriting, position_deletes
from distop.tables.iceberg.iceberg_changes import entries
from distop.tables.iceberg.manifest_list import manifests_of
from distop.tables.iceberg.metadata_file import (
    HINT,
    HINT_BYTES,
    METADATA,
    current_metadata_file,
    hinted_version,
    metadata_version,
    read_file,
)
from distop.tables.iceberg.snapshot_files import files_of, unreadable
from distop.tables.iceberg.snapshot_plan import NO_SNAPSHOT
from distop.tables.pinned_files import PinnedFiles
from distop.tables.table_copy import MARK, TableCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.storage.deletion import Place
    from distop.storage.object_store import ObjectStore
    from distop.tables.iceberg.iceberg_reachability import IcebergReachability

_LAST_VERSION = 2
_MAIN = "main"
_REMOVED = 2
"""The status of an entry for a file that the manifest's snapshot removed."""
_PLACES = (
    *("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path"),
    *("write.location-provider.impl", "write.object-storage.enabled"),
)
"""Properties that would let writers of the copy write elsewhere."""
_TRIES = 10


class IcebergCopy(TableCopy):
    """A snapshot of a table in a metadata file. ``version``: its id, or a branch or a tag; "": the main branch."""

    def __init__(self, found: IcebergReachability, table: str, version: str, check: Callable[[], None]) -> None:
        """Raises InvalidArgument for an unknown version, and for a table that cannot be copied; TableUnavailable."""
        self.origin = found.source
        self._place = normal(found.place)
        self._check = check
        self.file = file = read_file(found.source)
        self.raw: dict[str, Any] = json.loads(file.text)
        self._named = table
        metadata = file.content
        if metadata.format_version > _LAST_VERSION:
            raise self._refused(
                f"it has the format version {metadata.format_version}, in which deletion vectors and row ids belong to "
                f"the original files: versions up to {_LAST_VERSION} are supported"
            )
        wanted = version or _MAIN
        self.snapshot: Any = next(
            (
                one
                for one in metadata.snapshots
                if str(one.snapshot_id) == wanted or _ref(metadata, wanted) == one.snapshot_id
            ),
            None,
        )
        if self.snapshot is None and version not in ("", NO_SNAPSHOT):
            raise InvalidArgument(
                f"the table {table!r} has no snapshot, branch or tag {shown(version)}: it may have been expired"
            )
        self.positions: dict[str, int] = {}
        """Files of position deletes, with their sizes."""
        files = dict(self._files()) if self.snapshot is not None else {}
        version = str(self.snapshot.snapshot_id) if self.snapshot is not None else NO_SNAPSHOT
        self.pinned = PinnedFiles(found.place, version, [(path, size, 0) for path, size in files.items()])
        self.schema()

    def _refused(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"the Iceberg table {self._named!r} cannot be registered at another place: {why}")

    def _files(self) -> Iterator[tuple[str, int]]:
        """The files that are copied as they are. Raises InvalidArgument and TableUnavailable."""
        from pyiceberg.manifest import DataFileContent, FileFormat

        metadata, snapshot, io = self.file.content, self.snapshot, self.file.manifests()
        allowed = files_of(self.origin, metadata)
        if not snapshot.manifest_list:
            raise self._refused("its snapshot has no manifest list: let its writer write a newer one")
        found: list[tuple[str, int]] = []
        try:
            with io.watched():
                for _, entry in entries(manifests_of(snapshot, io), io, self._check):
                    file = entry.data_file
                    path, size = str(file.file_path), int(file.file_size_in_bytes)
                    if file.key_metadata is not None:
                        raise self._refused("its files are encrypted")
                    if file.content != DataFileContent.POSITION_DELETES:
                        found.append((path, size))
                        continue
                    if file.file_format != FileFormat.PARQUET:
                        raise self._refused(f"it has position deletes in files of the format {file.file_format}")
                    self.positions[path] = size
        except (InvalidArgument, OSError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise unreadable(metadata, snapshot, error) from error
        for path in (*(path for path, _ in found), *self.positions):
            self.key(path)
        allowed.check((path for path, _ in found), deletes=True)
        allowed.check(self.positions, deletes=True)
        yield from found

    def key(self, path: str) -> str:
        """The path of a file below the table's folder. Raises InvalidArgument."""
        found = normal(path)
        if not self._place.has(found):
            raise self._refused(f"its file {shown(path)} is outside of the table's folder {self._place}")
        return found.below(self._place)

    def schema(self) -> Any:
        """The schema of the copy: the current one for the current snapshot, else that of the snapshot."""
        raw, snapshot = self.raw, self.snapshot
        current = raw.get("current-schema-id", 0)
        if snapshot is None or snapshot.snapshot_id == raw.get("current-snapshot-id") or snapshot.schema_id is None:
            return current
        if snapshot.schema_id == current:
            return current
        schema = next((one for one in self.file.content.schemas if one.schema_id == snapshot.schema_id), None)
        if schema is None:
            raise self._refused(f"its metadata lack the schema {snapshot.schema_id} of the snapshot")
        ids = set(schema.field_ids)
        specs = [field.source_id for spec in self.file.content.partition_specs for field in spec.fields]
        sorts = [field.source_id for order in self.file.content.sort_orders for field in order.fields]
        if missing := sorted({*specs, *sorts} - ids):
            raise self._refused(f"its partitions or sort orders use the field {missing[0]}, which that version lacks")
        return snapshot.schema_id

    # ------------------------------------------------------------------ writing

    def write(self, place: Place, check: Callable[[], None]) -> None:
        commit_file.check_suitable(place.location)
        writer = _CopyWriter(self, place, check)
        self._publish(writer, place)

    def _publish(self, writer: _CopyWriter, place: Place) -> None:
        """Commit the metadata, unless they are there."""
        text, store = writer.metadata(), store_of(place)
        for left in reversed(range(_TRIES)):
            number = self._next(place, text)
            if number is None:
                break
            try:
                store.put_new(f"{METADATA}/v{number}.metadata.json", text.encode())
            except ObjectExists as error:
                if not left:
                    raise Conflict(f"others keep committing to the table in {place.location}") from error
                continue
            break
        self._hint(store, metadata_version(current_metadata_file(Location.of(place.location))))

    def _next(self, place: Place, text: str) -> int | None:
        """The number of the next metadata file; None if the current one is this copy.

        Raises InvalidArgument if somebody else has changed the table.
        """
        location = Location.of(place.location)
        if not any(name.endswith(".metadata.json") for name in location.names_in(METADATA)):
            return 1
        there = read_file(current_metadata_file(location))
        if there.text == text:
            return None
        found: dict[str, Any] = json.loads(there.text)
        mark = str((found.get("properties") or {}).get(MARK, ""))
        if mark != _mark_of(found):
            raise InvalidArgument(
                f"the table in {place.location} has been changed since it was exported: export to another place"
            )
        return metadata_version(there.source) + 1

    @staticmethod
    def _hint(store: ObjectStore, number: int) -> None:
        """Write the version hint, unless it has this number or a higher one."""
        key, data = f"{METADATA}/{HINT}", str(number).encode()
        for _ in range(_TRIES):
            try:
                there = store.get(key, limit=HINT_BYTES)
                if (hinted_version(there.data.decode(errors="replace")) or 0) >= number:
                    return
                store.replace_if(key, data, there.stored.version)
                return
            except ObjectMissing:
                try:
                    store.put_new(key, data)
                    return
                except ObjectExists:
                    continue
            except ObjectChanged:
                continue


class _CopyWriter:
    """Writes the files of one copy at a place."""

    def __init__(self, copy: IcebergCopy, place: Place, check: Callable[[], None]) -> None:
        self._copy = copy
        self._check = check
        self._store = store_of(place)
        self._location = str(local_path(place.location) or place.location)
        self._sizes: dict[str, int] = {}
        """The sizes of rewritten files of position deletes, by their former paths."""

    def metadata(self) -> str:
        """Write everything but the metadata file; returns its text, which is always the same for the same copy."""
        copy = self._copy
        raw, snapshot = dict(copy.raw), copy.snapshot
        schema = copy.schema()
        raw |= {
            "location": self._location,
            "table-uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{raw.get('table-uuid')} {self._location}")),
            "current-schema-id": schema,
            "metadata-log": [],
            "statistics": [],
            "partition-statistics": [],
        }
        if "schema" in raw:  # format version 1
            raw["schema"] = next(
                one for one in raw.get("schemas", [raw["schema"]]) if one.get("schema-id", 0) == schema
            )
        properties = {name: value for name, value in (raw.get("properties") or {}).items() if name not in _PLACES}
        if snapshot is None:
            raw |= {"snapshots": [], "snapshot-log": [], "refs": {}, "current-snapshot-id": -1}
        else:
            number = snapshot.snapshot_id
            one = dict(next(found for found in raw["snapshots"] if found["snapshot-id"] == number))
            one.pop("parent-snapshot-id", None)
            one["manifest-list"] = self._manifest_list(str(snapshot.manifest_list))
            raw |= {
                "snapshots": [one],
                "snapshot-log": [{"snapshot-id": number, "timestamp-ms": one["timestamp-ms"]}],
                "refs": {_MAIN: {"snapshot-id": number, "type": "branch"}},
                "current-snapshot-id": number,
                "last-updated-ms": one["timestamp-ms"],
            }
        raw["properties"] = {**properties, MARK: ""}
        raw["properties"][MARK] = _mark_of(raw)
        return json.dumps(raw, ensure_ascii=False, separators=(",", ":"))

    def _manifest_list(self, path: str) -> str:
        def moved(record: dict[str, Any]) -> dict[str, Any] | None:
            found = self._manifest(str(record["manifest_path"]))
            if found is None:
                return None
            record |= {"manifest_path": found[0], "manifest_length": found[1]}
            # In format version 1 the counts may have other names.
            for name in ("deleted_files_count", "deleted_data_files_count", "deleted_rows_count"):
                if record.get(name) is not None:
                    record[name] = 0
            return record

        data, _ = avro_rewriting.rewritten(self._read(path), moved, path, self._check)
        return self._put(path, data)

    def _manifest(self, path: str) -> tuple[str, int] | None:
        """The path and the size of a rewritten manifest; None if it has no live entries."""

        def moved(entry: dict[str, Any]) -> dict[str, Any] | None:
            if entry["status"] == _REMOVED:
                return None
            file = entry["data_file"]
            former = str(file["file_path"])
            file["file_path"] = self._moved(former)
            if file.get("referenced_data_file") is not None:
                file["referenced_data_file"] = self._moved(file["referenced_data_file"])
            if former in self._copy.positions:
                file["file_size_in_bytes"] = self._position_deletes(former)
                for name in ("column_sizes", "split_offsets"):
                    if name in file:
                        file[name] = None
                for name in ("lower_bounds", "upper_bounds"):
                    if file.get(name) is not None:
                        file[name] = position_deletes.moved_bounds(file[name], self._moved_or_none)
            return entry

        data, count = avro_rewriting.rewritten(self._read(path), moved, path, self._check)
        return (self._put(path, data), len(data)) if count else None

    def _position_deletes(self, path: str) -> int:
        """Write a file of position deletes; returns its size."""
        if path not in self._sizes:
            self._check()
            data = position_deletes.moved(path, self._moved_or_none)
            self._sizes[path] = len(data)
            self._put_same(self._copy.key(path), data)
        return self._sizes[path]

    def _moved(self, path: str) -> str:
        return f"{self._location}/{self._copy.key(path)}"

    def _moved_or_none(self, path: str) -> str | None:
        try:
            return self._moved(path)
        except InvalidArgument:
            return None

    def _read(self, path: str) -> bytes:
        io = self._copy.file.manifests()
        with io.watched(), io.new_input(path).open() as stream:
            data: bytes = stream.read()
        return data

    def _put(self, former: str, data: bytes) -> str:
        """Write a file of metadata; returns its path. Manifests of any folders may have the same name."""
        name = f"{hashlib.sha256(former.encode()).hexdigest()[:12]}-{former.rpartition('/')[2]}"
        self._put_same(f"{METADATA}/{name}", data)
        return f"{self._location}/{METADATA}/{name}"

    def _put_same(self, key: str, data: bytes) -> None:
        """Write a file, unless it is there."""
        try:
            self._store.put_large(key, [data])
        except ObjectExists:
            if self._store.head(key).size != len(data) or self._store.get(key, limit=len(data)).data != data:
                self._store.put(key, data)


def _ref(metadata: Any, name: str) -> int | None:
    found = metadata.refs.get(name)
    if found is not None:
        return int(found.snapshot_id)
    return metadata.current_snapshot_id if name == _MAIN else None


def _mark_of(raw: dict[str, Any]) -> str:
    """What identifies the state of a copy: its snapshots and its schemas."""
    parts = [raw.get(name) for name in ("snapshots", "current-schema-id", "schemas", "partition-specs", "refs")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
