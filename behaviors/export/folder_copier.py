"""Copies the files of one folder to the target of an export, as fast as both sides allow.

In general a file is copied by itself (:class:`FolderCopier`). On a disk, all files of a folder are flushed together
(:class:`DiskCopier`). Within one bucket, the store copies, and a listing shows the copies of many files at once
(:class:`BucketCopier`). A file that is at the target already is always examined by itself.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Self

from distop.errors import InvalidArgument, UnsafePath
from distop.storage.folder_store import version_of
from distop.storage.store_errors import Denied, ObjectChanged, ObjectExists, ObjectMissing, Unsupported
from distop_behaviors.export.export_manifest import CopiedFile, in_folder
from distop_behaviors.export.file_copy import Copy, SourceChanged, checksum_of_one_part, in_pages, record_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.storage.folder_copies import FolderCopies
    from distop.storage.object_store import ObjectStore, StoredObject
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.export.file_copy import FileCopier

_OF_FILE = (SourceChanged, UnsafePath, InvalidArgument, Denied, Unsupported, ObjectMissing)
"""Errors of one file that no retry helps."""
_GROUP_FILES, _GROUP_BYTES = 64, 4 << 20
"""Small files of a disk that one thread copies before it takes the next ones."""
_STALE = 86_400.0
"""The age in seconds of files that a killed process has left incomplete, and that are removed."""


class FolderCopier:
    """Copies files of one folder, in the threads of ``copier``. It is a context manager."""

    disk: int | None = None
    """The disk of the copies: :meth:`flush` flushes all of them there. None: they are not on a disk."""

    def __init__(self, copier: FileCopier, folder: str, check: Callable[[], None]) -> None:
        self._copier = copier
        self._pool = copier.pool
        self._folder = folder
        self._check = check
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        """Prepare the copies. ``stack``: closed after them."""

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def copy(self, some: Sequence[PlannedFile], known: Mapping[str, CopiedFile]) -> Iterator[Copy | str]:
        """The copy of each file in turn, or the reason why there is none.

        ``known``: what earlier exports know about them.
        """
        return self._pool.map(lambda one: self._one(one, known), some)

    def flush(self) -> None:
        """Let the copies survive a crash of the machine."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file into the folder at the target, or replace it."""
        self._copier.target.put(in_folder(self._folder, name), data)

    def _one(self, planned: PlannedFile, known: Mapping[str, CopiedFile]) -> Copy | str:
        self._check()
        try:
            return self._copier.copy(planned, known.get(self._copier.key_of(planned[0])))
        except _OF_FILE as error:
            return str(error)


class DiskCopier(FolderCopier):
    """Copies from a disk to a disk."""

    def __init__(self, copier: FileCopier, folder: str, check: Callable[[], None], copies: FolderCopies) -> None:
        super().__init__(copier, folder, check)
        self._copies = copies

    def _open(self, stack: ExitStack) -> None:
        self._copier.target.delete_incomplete(self._folder, older_than=_STALE)
        stack.enter_context(self._copies)
        self.disk = self._copies.disk
        self._there = self._copies.names()

    def copy(self, some: Sequence[PlannedFile], known: Mapping[str, CopiedFile]) -> Iterator[Copy | str]:
        def copy_group(group: Sequence[PlannedFile]) -> list[Copy | str]:
            return [self._one(one, known) for one in group]

        groups = in_pages(some, _GROUP_FILES, _GROUP_BYTES)
        return (one for found in self._pool.map(copy_group, groups) for one in found)

    def flush(self) -> None:
        self._copies.flush()

    def put(self, name: str, data: bytes) -> None:
        self._copies.put(name, data)

    def _one(self, planned: PlannedFile, known: Mapping[str, CopiedFile]) -> Copy | str:
        path, size, stamp = planned
        key = self._copier.key_of(path)
        name = key.rpartition("/")[2]
        if name in self._there:
            return super()._one(planned, known)
        self._check()
        try:
            found = self._copies.copy(name, partial(_check_planned, planned))
        except ObjectExists:  # another attempt has copied it
            return super()._one(planned, known)
        except ObjectMissing as error:
            return f"the file {path} is missing ({error})"
        except ObjectChanged:
            return f"the file {path} has changed while it was copied"
        except _OF_FILE as error:
            return str(error)
        copy = CopiedFile(
            path=key,
            bytes=size,
            checksum=f"sha256:{found.sha256}",
            planned_stamp=stamp,
            source_stamp=found.original,
            target_stamp=found.copy,
        )
        return Copy(copy, "copied", verified=True)


class BucketCopier(FolderCopier):
    """Lets a store copy within one bucket: ``source`` is the table's place, ``whole`` all of the bucket."""

    def __init__(
        self, copier: FileCopier, folder: str, check: Callable[[], None], source: ObjectStore, whole: ObjectStore
    ) -> None:
        super().__init__(copier, folder, check)
        self._source = source
        self._whole = whole

    def _open(self, stack: ExitStack) -> None:
        self._sources = self._listed(self._source)
        self._there = self._listed(self._copier.target)

    def copy(self, some: Sequence[PlannedFile], known: Mapping[str, CopiedFile]) -> Iterator[Copy | str]:
        def request_copy(one: PlannedFile) -> Copy | str | None:
            """None: the listing will show the copy."""
            source = self._planned_source(one)
            if source is None:
                return self._one(one, known)
            self._check()
            try:
                self._whole.copy(self._copier.source_path(source.key), self._copier.target_path(source.key))
            except ObjectMissing:
                return self._one(one, known)
            except _OF_FILE as error:
                return str(error)
            return None

        tried = list(self._pool.map(request_copy, some))
        after = self._listed(self._copier.target) if None in tried else {}

        def verify(one: PlannedFile, answer: Copy | str | None) -> Copy | str:
            if answer is not None:
                return answer
            source = self._sources[self._copier.key_of(one[0])]
            there = after.get(source.key)
            same_size = there is not None and there.size == source.size
            if there is not None and same_size and (checksum := checksum_of_one_part(source, there)):
                return Copy(record_of(source.key, source, one[2], there, checksum), "copied", verified=True)
            found = self._one(one, known)
            if isinstance(found, str):
                if there is not None:
                    self._copier.remove(there)
                return found
            return Copy(found.file, "copied", verified=found.verified)

        return self._pool.map(verify, some, tried)

    def _listed(self, store: ObjectStore) -> dict[str, StoredObject]:
        return {one.key: one for one in store.list_folder(self._folder).objects}

    def _planned_source(self, planned: PlannedFile) -> StoredObject | None:
        """The source, if it is the planned one and is not at the target; else the file is examined by itself."""
        path, size, stamp = planned
        key = self._copier.key_of(path)
        source = self._sources.get(key)
        if key in self._there or source is None or source.size != size or stamp not in (0, source.stamp):
            return None
        # Without an ETag of one part, the copy could not be compared with its source.
        return source if checksum_of_one_part(source, source) else None


def flush(copiers: Iterable[FolderCopier]) -> None:
    """Let the copies of all these survive a crash of the machine, and the small files that were written with them."""
    first: dict[int | None, FolderCopier] = {}
    for copier in copiers:
        first.setdefault(copier.disk, copier)
    for copier in first.values():  # which a disk tells about all errors since the first folder was opened
        copier.flush()


def _check_planned(planned: PlannedFile, found: os.stat_result) -> None:
    """Raises SourceChanged if a file of a disk is not the planned one."""
    path, size, stamp = planned
    if found.st_size != size:
        raise SourceChanged(f"the file {path} has {found.st_size} bytes, but was planned with {size}")
    if stamp not in (0, found.st_mtime_ns, version_of(found).etag):
        raise SourceChanged(f"the file {path} has changed since the operation was planned")
