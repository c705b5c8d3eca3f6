"""Checks that all files of a snapshot may belong to its table, and that Java reads the same ones as Python.

Metadata are not trusted: a user who can write a table's metadata could name files of other tables. Spark opens any file
that the metadata name, so the checks run before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.runtime.lru_cache import LruCache
from distop.storage.confinement import TableFiles, table_of
from distop.storage.files import gone, identity, local_path
from distop.tables.iceberg.avro import Damaged
from distop.tables.iceberg.row_deletes import check_vector
from distop.tables.iceberg.snapshot_files import FileIdentity, data_files, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distop.tables.iceberg.metadata_file import MetadataFile

_checked: LruCache[tuple[FileIdentity, ...]] = LruCache(64)
"""The manifest list and manifests of metadata files whose files were checked (confinement)."""


def check_files(file: MetadataFile, check: Callable[[], None] = lambda: None) -> None:
    """Raises InvalidArgument if the current snapshot has a file that may not belong to the table, TableUnavailable.

    Results are cached as long as the manifests are the same files.
    """
    _checked_manifests(file, check)


def _checked_manifests(file: MetadataFile, check: Callable[[], None] = lambda: None) -> tuple[FileIdentity, ...]:
    """The manifest list and the manifests of the current snapshot after :func:`check_files`. Raises its errors."""
    found = _checked.get(file.key(), lambda: _read_all(file, check))
    if not are_same(found):
        found = _read_all(file, check)
        note_checked(file, found)
    return found


def note_checked(file: MetadataFile, manifests: Iterable[FileIdentity]) -> None:
    """Cache that all files of the current snapshot were checked.

    ``manifests``: identities of the manifest list and the manifests before they were read.
    """
    _checked.put(file.key(), tuple(manifests))


def are_same(files: Iterable[FileIdentity]) -> bool:
    """Whether all files exist and were not replaced."""
    return all(identity(file[0]) == file and file != gone(file[0]) for file in files)


def check_loaded(file: MetadataFile, snapshot: str, manifest_list: str) -> None:
    """Raises InvalidArgument if Java reads another current snapshot from a metadata file than Python.

    To be called before Java opens the manifest list. Also raises the errors of :func:`check_files`.
    """
    current = file.content.current_snapshot()
    found = (str(current.snapshot_id), _plain(current.manifest_list)) if current is not None else None
    if found != (snapshot, _plain(manifest_list)):
        raise InvalidArgument(
            f"Java and Python read the metadata file {file.source} differently: let the table's writer write it again"
        )
    check_files(file)


def check_manifests(file: MetadataFile, manifests: Sequence[str]) -> None:
    """Raises InvalidArgument if Java has read other ``manifests`` from the manifest list than Python.

    Their decoders can differ on a crafted list. Also raises the errors of :func:`check_files`.
    """
    check_same_manifests(file.source, [str(found[0]) for found in _checked_manifests(file)[1:]], manifests)


def check_same_manifests(source: str, known: Iterable[str], manifests: Iterable[str]) -> None:
    """Raises InvalidArgument unless the paths are the same. ``known``: the manifests that Python has read."""
    if [_plain(path) for path in known] != [_plain(path) for path in manifests]:
        raise InvalidArgument(
            f"Java and Python read the manifest list of {source} differently: let the table's writer write it again"
        )


def check_opened(source: str, data: Iterable[str], deletes: Iterable[tuple[str, int | None, int | None]]) -> None:
    """Raises InvalidArgument for a data or delete file of Java's plan that may not belong to the table.

    Java may read other files than Python from the same manifests. ``deletes``: path, and offset and size of a deletion
    vector.
    """
    files = TableFiles(table_of(source))
    files.check(data)
    deletes = list(deletes)
    files.check((path for path, _, _ in deletes), deletes=True)
    for path, offset, size in deletes:
        if offset is not None or size is not None:
            check_vector(path, offset, size)


def _plain(path: str) -> str:
    return str(local_path(path) or path)


def _read_all(file: MetadataFile, check: Callable[[], None]) -> tuple[FileIdentity, ...]:
    """Check all files of the current snapshot; returns the manifest list and the manifests."""
    manifests: list[FileIdentity] = []
    metadata, io = file.content, file.manifests()
    snapshot = metadata.current_snapshot()
    if snapshot is not None:
        try:
            with io.watched():
                for _ in data_files(file.source, metadata, snapshot, io, check, manifests):
                    pass
        except Damaged as error:
            raise unreadable(metadata, snapshot, error) from error
    return tuple(manifests)
