"""Copies one file to the target of an export, and verifies the copy."""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Self

from distop.errors import DistopError
from distop.protocol.frozen import frozen
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.folder_copies import FolderCopies
from distop.storage.object_store import PART, Listed, StoredObject
from distop.storage.opened_stores import OpenedBuckets, open_store, store_of
from distop.storage.storage_options import bucket_of
from distop.storage.store_errors import ObjectChanged, ObjectExists, ObjectMissing
from distop.tables.reading.file_facts import Unreadable
from distop.tables.reading.parquet_footers import check_unchanged
from distop_behaviors.export.export_manifest import CopiedFile
from distop_behaviors.export.export_plan import key_of
from distop_behaviors.orphans.other_tables import normal_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distop.storage.object_store import ObjectStore, Version
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.export.folder_copier import FolderCopier

_ETAG = re.compile(r'"?([0-9a-f]{32})(-1)?"?')
"""An ETag that may be the MD5 of an object, or with "-1" the MD5 of its MD5: it was written or copied as one part."""

_CORES = os.cpu_count() or 1
FILES_AT_ONCE, DISK_FILES_AT_ONCE = 8 * _CORES, 2 * _CORES
"""Files that are copied at the same time: to or from an object store, and from a disk to a disk."""

How = Literal["copied", "reused", "unchanged"]


class SourceChanged(DistopError):
    """A file of the version is missing, or is not the planned one."""


@frozen
class Copy:
    """A file at the target. ``how`` it came there; ``verified``: its checksum was compared with the source's."""

    file: CopiedFile
    how: How
    verified: bool


class FileCopier:
    """Copies files of a table below ``place`` to the place ``target``. Thread-safe.

    It is a context manager, with a pool of threads for the copiers of folders.
    """

    def __init__(self, place: str, target: Place) -> None:
        """Raises InvalidArgument."""
        self._places = normal_places(place)
        self._source_place = place
        self._target_place = target
        local = local_path(place)
        self._local = store_of(Place(str(local))) if local is not None else None
        self._buckets = OpenedBuckets()
        self._target = self.target = store_of(target)
        self._on_disk = local_path(target.anchor) is not None
        self._bucket = None if self._on_disk else bucket_of(target.location)
        self._whole_bucket: ObjectStore | None = None
        if self._bucket is not None and local is None:
            source = bucket_of(place)
            if source.prefix == self._bucket.prefix and source.anonymous == self._bucket.anonymous:
                found = target.location.partition("://")
                self._whole_bucket = open_store(f"{found[0]}://{found[2].partition('/')[0]}")

    def __enter__(self) -> Self:
        at_once = DISK_FILES_AT_ONCE if self._local is not None and self._on_disk else FILES_AT_ONCE
        self.pool = ThreadPoolExecutor(at_once)
        return self

    def __exit__(self, *raised: object) -> None:
        self.pool.shutdown()

    def key_of(self, path: str) -> str:
        """The key of a file at the target."""
        return key_of(path, self._places)

    def folder(self, folder: str, check: Callable[[], None]) -> FolderCopier:
        """The copier of a folder's files. ``check`` is called before each file, and raises to stop."""
        from distop_behaviors.export.folder_copier import BucketCopier, DiskCopier, FolderCopier

        local = local_path(self._source_place)
        if local is not None and self._on_disk:
            source, target = Place(str(local)), self._target_place
            if folder:
                source, target = source.below(folder), target.below(folder)
            return DiskCopier(self, folder, check, FolderCopies(source, target))
        if self._whole_bucket is not None:
            return BucketCopier(self, folder, check, open_store(self._source_place), self._whole_bucket)
        return FolderCopier(self, folder, check)

    def source_path(self, key: str) -> str:
        """The path of a file of the table in its bucket."""
        return f"{bucket_of(self._source_place).path}/{key}".lstrip("/")

    def target_path(self, key: str) -> str:
        """The path of a copy in its bucket."""
        return f"{bucket_of(self._target_place.location).path}/{key}"

    def copy(self, planned: PlannedFile, known: CopiedFile | None) -> Copy:
        """Copy a file, unless the copy is there. ``known``: what earlier exports know about it.

        Raises SourceChanged, UnsafePath, and StoreError.
        """
        path, _, stamp = planned
        key = self.key_of(path)
        store, source_key = (self._local, key) if self._local is not None else self._buckets.find(path)
        source = self._source(store, source_key, planned)
        try:
            there = self._target.head(key)
        except ObjectMissing:
            there = None
        if there is not None:
            same = known is not None and (known.bytes, known.source_stamp) == (source.size, source.stamp)
            if same and known is not None and there.stamp == known.target_stamp:
                return Copy(known.model_copy(update={"planned_stamp": stamp}), "reused", verified=False)
            if there.size == source.size and (checksum := self._equal(store, source, key, there)):
                return Copy(record_of(key, source, stamp, there, checksum), "reused", verified=True)
            self.remove(there)
        return self._copy_new(store, source, key, planned)

    def _copy_new(self, store: ObjectStore, source: StoredObject, key: str, planned: PlannedFile) -> Copy:
        hashes = _Hashes(etag=not self._on_disk)
        written: Version | None = None
        try:
            if self._whole_bucket is not None and self._bucket is not None:
                self._whole_bucket.copy_new(source.key, f"{self._bucket.path}/{key}")
            else:
                written = self._target.put_large(key, self._pieces(store, source, hashes))
        except ObjectExists:
            pass  # another attempt has copied it: its content decides
        except ObjectMissing:
            self._source(store, source.key, planned)
            raise
        if written is not None and written.etag and hashes.complete:
            # The store has answered with the version of what it has written.
            there = StoredObject(key, hashes.size, written, 0.0)
        else:
            there = self._target.head(key)
        checksum = ""
        if there.size == source.size:
            if hashes.complete and self._is_equal(hashes, key, there):
                checksum = hashes.text
            elif not hashes.complete:
                checksum = self._equal(store, source, key, there)
        try:
            changed = self._source(store, source.key, planned).stamp != source.stamp
        except SourceChanged:
            self.remove(there)
            raise
        if changed:
            self.remove(there)
            raise SourceChanged(f"the file {planned[0]} has changed while it was copied")
        if not checksum:
            self.remove(there)
            raise ObjectChanged(f"the copy {self._target.location_of(key)} differs from {planned[0]}")
        return Copy(record_of(key, source, planned[2], there, checksum), "copied", verified=True)

    def _source(self, store: ObjectStore, key: str, planned: PlannedFile) -> StoredObject:
        """The source. Raises SourceChanged if it is missing or is not the planned one."""
        path, size, stamp = planned
        try:
            found = store.head(key)
        except ObjectMissing as error:
            raise SourceChanged(f"the file {path} is missing ({error})") from error
        if found.size != size:
            raise SourceChanged(f"the file {path} has {found.size} bytes, but was planned with {size}")
        if stamp == 0 or stamp == found.stamp:
            return found
        if isinstance(stamp, str):
            raise SourceChanged(f"the file {path} has changed since the operation was planned")
        try:
            check_unchanged(path, size, stamp, self._buckets)
        except Unreadable as error:
            raise SourceChanged(str(error)) from error
        return found

    def _pieces(self, store: ObjectStore, source: StoredObject, hashes: _Hashes) -> Iterator[bytes]:
        for piece in _pieces(store, source):
            hashes.add(piece)
            yield piece
        hashes.complete = True

    def _equal(self, store: ObjectStore, source: StoredObject, key: str, there: StoredObject) -> str:
        """The checksum of two objects with the same content; "" if it is not the same."""
        if self._whole_bucket is not None and (found := checksum_of_one_part(source, there)):
            return found
        hashes = _Hashes(etag=not self._on_disk)
        for piece in _pieces(store, source):
            hashes.add(piece)
        return hashes.text if self._is_equal(hashes, key, there) else ""

    def _is_equal(self, hashes: _Hashes, key: str, there: StoredObject) -> bool:
        """Whether the copy has the hashed content: by its ETag, or by reading it."""
        if hashes.md5 is not None:
            expected = hashlib.md5(hashes.md5.digest(), usedforsecurity=False).hexdigest()
            if _of_one_part(there) == expected:
                return True
        again = _Hashes()
        for piece in _pieces(self._target, there):
            again.add(piece)
        return again.text == hashes.text

    def remove(self, there: StoredObject) -> None:
        """Remove an object that is not a copy of the planned file. A change meanwhile is left to the next step."""
        found = self._target.remove_listed([Listed(there.key, there.size, there.stamp)])
        for key, why in found.failed.items():
            raise ObjectChanged(f"cannot replace {self._target.location_of(key)}: {why}")


class _Hashes:
    """The checksums of bytes that pass. ``etag``: also that of an ETag."""

    def __init__(self, *, etag: bool = False) -> None:
        self.complete = False
        self.size = 0
        self._sha256 = hashlib.sha256()
        self.md5: Any = hashlib.md5(usedforsecurity=False) if etag else None

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._sha256.update(piece)
        if self.md5 is not None:
            self.md5.update(piece)

    @property
    def text(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"


def record_of(key: str, source: StoredObject, stamp: int | str, there: StoredObject, checksum: str) -> CopiedFile:
    """The record of a copy for the manifest. ``stamp``: of the source in its plan; ``there``: the copy."""
    return CopiedFile(
        path=key,
        bytes=source.size,
        checksum=checksum,
        planned_stamp=stamp,
        source_stamp=source.stamp,
        target_stamp=there.stamp,
    )


def checksum_of_one_part(source: StoredObject, there: StoredObject) -> str:
    """The checksum of two objects whose ETags show that they have the same content; "" if they do not show it."""
    found = _of_one_part(source)
    if not found or found != _of_one_part(there):
        return ""
    md5 = _md5(source)
    return f"md5:{md5}" if md5 else f"etag:{found}-1"


def _md5(found: StoredObject) -> str:
    match = _ETAG.fullmatch(found.version.etag)
    return match[1] if match and not match[2] else ""


def _of_one_part(found: StoredObject) -> str:
    """The MD5 of an object's MD5, as far as its ETag tells; "" if it does not.

    Encrypted objects have other ETags, which are equal to none that is calculated.
    """
    match = _ETAG.fullmatch(found.version.etag)
    if match is None:
        return ""
    return match[1] if match[2] else hashlib.md5(bytes.fromhex(match[1]), usedforsecurity=False).hexdigest()


def _pieces(store: ObjectStore, found: StoredObject) -> Iterator[bytes]:
    """The bytes of an object of this version. Raises ObjectChanged if it has another one."""
    with store.open(found.key) as opened:
        if opened.stored.stamp != found.stamp:
            raise ObjectChanged(f"{store.location_of(found.key)} has changed")
        while piece := opened.file.read(PART):
            yield piece


def in_pages(files: Sequence[PlannedFile], most: int, most_bytes: int) -> Iterator[Sequence[PlannedFile]]:
    """The files in pages of at most so many files and bytes, always the same ones; a page has at least one file."""
    start, size = 0, 0
    for n, (_, more, _) in enumerate(files):
        if n > start and (n - start >= most or size + more > most_bytes):
            yield files[start:n]
            start, size = n, 0
        size += more
    if start < len(files):
        yield files[start:]
