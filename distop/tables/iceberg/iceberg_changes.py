"""Finds new data files of an Iceberg table since a snapshot, from the manifests that differ between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.storage.store_errors import unavailable
from distop.tables.iceberg.manifest_list import manifests_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distop.tables.iceberg.avro import ManifestIO

    File = tuple[str, int, int | str]

_READ_AS = 3
"""The format version whose manifest entries are read; fields that older versions lack are None."""
_CHECKED_EVERY = 1_000
"""Number of entries between two checks whether to stop."""
_PATH_ID = 2_147_483_546
"""The field id of the column of a position delete file that has the paths of data files."""


def new_files(metadata: Any, io: ManifestIO, since: str, check: Callable[[], None] = lambda: None) -> list[File] | None:
    """The data files of the current snapshot that may have rows which the snapshot ``since`` (an id) did not have.

    Each is (path, size, 0). None: any file may have new rows.

    A file that both snapshots have, with the same sequence number, has no new rows if each delete that applied to it
    still applies, since a rollback could restore deleted rows. If such a delete is gone, for example because it was
    rewritten, its data file counts as new; if its data file is unknown, all files may have new rows. The same holds if
    the older snapshot was expired. ``check`` is called regularly, and raises to stop.

    Raises TableUnavailable if a manifest cannot be read.
    """
    current = metadata.current_snapshot()
    if current is None:
        return []
    if str(current.snapshot_id) == since:
        return []
    former = next((s for s in metadata.snapshots if str(s.snapshot_id) == since), None)
    if former is None:
        return None
    try:
        with io.watched():
            return _difference(former, manifests_of(current, io), io, check)
    except OSError as error:
        raise unavailable(f"cannot read the manifests of {metadata.location!r}: {error}", error) from error


def replaced_files(
    metadata: Any, io: ManifestIO, since: str, check: Callable[[], None] = lambda: None
) -> frozenset[str] | None:
    """The data files of the snapshot ``since`` that were removed, or to which other deletes apply now.

    None: any of them may have changed. Raises TableUnavailable if a manifest cannot be read.
    """
    current = metadata.current_snapshot()
    former = next((s for s in metadata.snapshots if str(s.snapshot_id) == since), None)
    if former is None or current is None:
        return None
    if current is former:
        return frozenset()
    try:
        with io.watched():
            before, now = manifests_of(former, io), manifests_of(current, io)
            shared = {m.manifest_path for m in before} & {m.manifest_path for m in now}
            data, deletes = _split([m for m in now if m.manifest_path not in shared])
            old_data, old_deletes = _split([m for m in before if m.manifest_path not in shared])
            here = {(entry.data_file.file_path, _sequence(entry, m)) for m, entry in entries(data, io, check)}
            found = {
                entry.data_file.file_path
                for m, entry in entries(old_data, io, check)
                if (entry.data_file.file_path, _sequence(entry, m)) not in here
            }
            one, other = (
                {_identity(m, e): referenced_file(e) for m, e in entries(d, io, check)} for d in (old_deletes, deletes)
            )
    except OSError as error:
        raise unavailable(f"cannot read the manifests of {metadata.location!r}: {error}", error) from error
    for identity in one.keys() ^ other.keys():
        referenced = (one | other)[identity]
        if referenced is None:
            return None
        found.add(referenced)
    return frozenset(found)


@frozen
class PositionDeletes:
    """A file of position deletes, or a deletion vector: the paths of the data files that it may apply to."""

    low: str
    high: str

    def applies_to(self, path: str) -> bool:
        """Whether rows of a data file may be deleted."""
        return self.low <= path and (not self.high or path <= self.high)


def is_ancestor(metadata: Any, snapshot: str) -> bool:
    """Whether a snapshot, by its id, is the current one or was before it. False if an expired one is between them."""
    return snapshot in ancestors(metadata)


def ancestors(metadata: Any) -> Iterator[str]:
    """The ids of the current snapshot and of those before it, up to an expired one."""
    known = {str(one.snapshot_id): one for one in metadata.snapshots}
    current = metadata.current_snapshot()
    at = str(current.snapshot_id) if current is not None else None
    while at is not None and at in known:
        yield at
        parent = known.pop(at).parent_snapshot_id
        at = None if parent is None else str(parent)


def new_position_deletes(
    metadata: Any, io: ManifestIO, since: str, check: Callable[[], None] = lambda: None
) -> list[PositionDeletes] | None:
    """The position deletes of the current snapshot that the snapshot ``since`` did not have; None if that is unknown.

    Equality deletes are left out: they apply by sequence numbers. Raises TableUnavailable if a manifest cannot be read.
    """
    current = metadata.current_snapshot()
    former = next((s for s in metadata.snapshots if str(s.snapshot_id) == since), None)
    if former is None or current is None:
        return None
    if current is former:
        return []
    try:
        with io.watched():
            before, now = manifests_of(former, io), manifests_of(current, io)
            shared = {m.manifest_path for m in before} & {m.manifest_path for m in now}
            old = {_identity(m, e) for m, e in _position_deletes(before, shared, io, check)}
            fresh = [e for m, e in _position_deletes(now, shared, io, check) if _identity(m, e) not in old]
    except OSError as error:
        raise unavailable(f"cannot read the manifests of {metadata.location!r}: {error}", error) from error
    return [_paths_of(entry) for entry in fresh]


def _position_deletes(
    manifests: Sequence[Any], shared: set[str], io: ManifestIO, check: Callable[[], None]
) -> Iterator[tuple[Any, Any]]:
    from pyiceberg.manifest import DataFileContent

    deletes = [m for m in _split(manifests)[1] if m.manifest_path not in shared]
    for manifest, entry in entries(deletes, io, check):
        if entry.data_file.content == DataFileContent.POSITION_DELETES:
            yield manifest, entry


def _paths_of(entry: Any) -> PositionDeletes:
    referenced = referenced_file(entry)
    if referenced is not None:
        return PositionDeletes(referenced, referenced)
    file = entry.data_file
    low, high = ((bounds or {}).get(_PATH_ID) for bounds in (file.lower_bounds, file.upper_bounds))
    if low is None or high is None:
        return PositionDeletes("", "")
    return PositionDeletes(low.decode(), high.decode())


def equality_ids(metadata: Any, io: ManifestIO, check: Callable[[], None] = lambda: None) -> list[list[int]]:
    """The field ids of each equality delete file of the current snapshot. Raises TableUnavailable."""
    current = metadata.current_snapshot()
    if current is None:
        return []
    try:
        with io.watched():
            deletes = _split(manifests_of(current, io))[1]
            return [list(e.data_file.equality_ids) for _, e in entries(deletes, io, check) if e.data_file.equality_ids]
    except OSError as error:
        raise unavailable(f"cannot read the manifests of {metadata.location!r}: {error}", error) from error


def _difference(former: Any, current: Sequence[Any], io: ManifestIO, check: Callable[[], None]) -> list[File] | None:
    # A manifest never changes: one that both snapshots have has the same entries in both.
    now = {m.manifest_path for m in current}
    try:
        manifests = manifests_of(former, io)
        old_data, old_deletes = _split([m for m in manifests if m.manifest_path not in now])
        before = {(entry.data_file.file_path, _sequence(entry, m)) for m, entry in entries(old_data, io, check)}
        applied = {_identity(m, entry): referenced_file(entry) for m, entry in entries(old_deletes, io, check)}
    except FileNotFoundError:
        return None  # expired meanwhile; if all files are missing, reading them reports it
    shared = {m.manifest_path for m in manifests}
    data, deletes = _split([m for m in current if m.manifest_path not in shared])
    new: dict[str, int] = {
        entry.data_file.file_path: entry.data_file.file_size_in_bytes
        for m, entry in entries(data, io, check)
        if (entry.data_file.file_path, _sequence(entry, m)) not in before
    }
    still = {_identity(m, entry) for m, entry in entries(deletes, io, check)}
    gone = {referenced for identity, referenced in applied.items() if identity not in still}
    if None in gone:
        return None
    exposed = gone - new.keys()
    if exposed:
        for _, entry in entries(_split(current)[0], io, check):
            if entry.data_file.file_path in exposed:
                new[entry.data_file.file_path] = entry.data_file.file_size_in_bytes
    return [(path, size, 0) for path, size in sorted(new.items())]


def _split(manifests: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The manifests of data files, and those of delete files."""
    from pyiceberg.manifest import ManifestContent

    data = [m for m in manifests if m.content == ManifestContent.DATA]
    return data, [m for m in manifests if m.content != ManifestContent.DATA]


def entries(
    manifests: Sequence[Any], io: ManifestIO, check: Callable[[], None], *, removed: bool = False
) -> Iterator[tuple[Any, Any]]:
    """The live entries, each with its manifest. ``removed``: the entries of removed files instead."""
    from pyiceberg.manifest import (
        MANIFEST_ENTRY_SCHEMAS,
        DataFile,
        DataFileContent,
        FileFormat,
        ManifestEntry,
        ManifestEntryStatus,
    )

    from distop.tables.iceberg.avro_records import RecordFile

    for manifest in manifests:
        check()
        path = manifest.manifest_path
        with RecordFile[ManifestEntry](
            io.new_input(path),
            MANIFEST_ENTRY_SCHEMAS[_READ_AS],
            read_types={-1: ManifestEntry, 2: DataFile},
            read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
        ) as found:
            for n, entry in enumerate(found):
                if n % _CHECKED_EVERY == 0:
                    check()
                    io.alive()
                if (entry.status == ManifestEntryStatus.DELETED) == removed:
                    file = entry.data_file
                    io.count_numbers(len(file.split_offsets or ()) + len(file.equality_ids or ()), path)
                    yield manifest, entry


def _sequence(entry: Any, manifest: Any) -> int:
    """The sequence number, which decides which deletes apply. An entry added with its manifest inherits it."""
    number = entry.sequence_number
    return int(manifest.sequence_number if number is None else number)


def _identity(manifest: Any, entry: Any) -> tuple[str, int | None, int]:
    """The identity of an entry: path and offset, since a file may have the deletion vectors of several data files."""
    return entry.data_file.file_path, field_of(entry, "content_offset"), _sequence(entry, manifest)


def referenced_file(entry: Any) -> str | None:
    """The only data file to which a delete file applies, by its own field or its path bounds; None if unknown."""
    from pyiceberg.manifest import DataFileContent

    file = entry.data_file
    referenced = field_of(entry, "referenced_data_file")
    if referenced is not None or file.content != DataFileContent.POSITION_DELETES:
        return None if referenced is None else str(referenced)
    low, high = ((bounds or {}).get(_PATH_ID) for bounds in (file.lower_bounds, file.upper_bounds))
    return low.decode() if low is not None and low == high else None


def field_of(entry: Any, name: str) -> Any:
    """A field of an entry's file that pyiceberg's class lacks."""
    from pyiceberg.manifest import DATA_FILE_TYPE

    return entry.data_file[next(n for n, field in enumerate(DATA_FILE_TYPE[_READ_AS].fields) if field.name == name)]
