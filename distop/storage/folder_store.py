"""Objects as files of a local folder, also on a shared disk.

A new file is written under a scratch name, flushed to the disk, and linked to its name: the link is atomic, fails if
the name exists, and the name never shows a part of the content. obstore's local store does the same, but it follows
links, opens files of any kind, and flushes nothing, so distop's own rules are kept here: folders are opened one below
the other without following links (:mod:`distop.storage.deletion`), and only regular files are read.

To replace or to remove a file takes a lock on its folder, so these exclude each other among distop's processes.
Versions are derived from inode, size and modification time: distop itself never writes into an existing file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import UnsafePath
from distop.storage.conditional_writes import Deadline
from distop.storage.deletion import delete, made_folder, opened_folder
from distop.storage.files import read_whole
from distop.storage.object_store import (
    PART,
    Content,
    FolderListing,
    Listed,
    ObjectStore,
    OpenObject,
    Removed,
    StoredObject,
    Version,
    check_key,
    cut,
    is_scratch,
    merged,
    scratch_name,
)
from distop.storage.store_errors import (
    Denied,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    StoreError,
    TimedOut,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.storage.deletion import Place

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE = 0o644
"""Of new files, before the umask: other users may never write there."""
_UNSUPPORTED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EBADF, errno.ENOLCK)
"""Errors of hard links and of locks that a file system does not have."""
_TRIES = 100
"""Tries to write into a folder that another process removes meanwhile because it is empty."""


class FolderStore(ObjectStore):
    """The files below a folder, which need not exist. ``limit``: seconds to wait for the lock of a folder."""

    def __init__(self, place: Place, *, limit: float = 120.0) -> None:
        self.location = place.location
        self._place = place
        self._limit = limit

    # ---- reading

    def get(self, key: str, *, limit: int) -> Content:
        with self._opened(key) as file:
            stored = self._stored(key, os.fstat(file))
            with os.fdopen(file, "rb", closefd=False) as stream, disk_errors(f"read {self.location_of(key)}"):
                return Content(read_whole(stream, limit, self.location_of(key)), stored)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, version: Version | None = None) -> list[bytes]:
        asked = merged(ranges, 0)
        with self._opened(key) as file:
            if version is not None and version_of(os.fstat(file)) != version:
                raise ObjectChanged(f"cannot read {self.location_of(key)}: the file has changed")
            size = os.fstat(file).st_size
            with disk_errors(f"read {self.location_of(key)}"):
                read = [(start, _read_at(file, start, min(end, size))) for start, end in asked]
        return cut(ranges, read)

    @contextmanager
    def open(self, key: str) -> Iterator[OpenObject]:
        with self._opened(key) as file, os.fdopen(file, "rb", closefd=False) as stream:
            yield OpenObject(stream, self._stored(key, os.fstat(file)))

    def get_end(self, key: str, count: int) -> Content:
        with self._opened(key) as file:
            stored = self._stored(key, os.fstat(file))
            with disk_errors(f"read {self.location_of(key)}"):
                return Content(_read_at(file, max(0, stored.size - count), stored.size), stored)

    def head(self, key: str) -> StoredObject:
        with self._opened(key) as file:
            return self._stored(key, os.fstat(file))

    def list(self, folder: str = "", *, after: str = "") -> Iterator[StoredObject]:
        if folder:
            check_key(folder)
        yield from self._list(folder, after)

    def _list(self, folder: str, after: str) -> Iterator[StoredObject]:
        start = f"{folder}/" if folder else ""
        for name, found in self._entries(folder):
            key = start + name
            # Keys are sorted as texts, so the folder `a` comes where `a/` does.
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    yield from self._list(key[:-1], after)
            elif key > after:
                yield self._stored(key, found)

    def list_folder(self, folder: str = "") -> FolderListing:
        start = f"{check_key(folder)}/" if folder else ""
        entries = self._entries(folder)
        folders = tuple(sorted(name[:-1] for name, _ in entries if name.endswith("/")))
        objects = tuple(self._stored(start + name, found) for name, found in entries if not name.endswith("/"))
        return FolderListing(folders, objects)

    def _entries(self, folder: str) -> Sequence[tuple[str, os.stat_result]]:
        """The files of a folder, and its folders with a slash, sorted. Raises UnsafePath for anything else."""
        found, what = [], f"list {self.location_of(folder)}"
        with self._folder(folder, what) as opened, disk_errors(what):
            for name in [] if opened is None else os.listdir(opened):  # noqa: PTH208 -- of a descriptor
                if is_scratch(name):
                    continue
                try:
                    info = os.stat(name, dir_fd=opened, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    found.append((f"{name}/", info))
                elif stat.S_ISREG(info.st_mode):
                    found.append((name, info))
                else:
                    where = self.location_of(f"{folder}/{name}" if folder else name)
                    raise UnsafePath(f"{where} is not a regular file: it is a link or a device")
        return sorted(found, key=lambda one: one[0])

    # ---- writing

    def put_new(self, key: str, data: bytes) -> Version:
        return self._create(key, [data])

    def put_large(self, key: str, chunks: Iterable[bytes]) -> Version:
        return self._create(key, chunks)

    def copy_new(self, source: str, target: str) -> Version:
        check_key(target)
        with self._opened(source) as file:
            return self._create(target, _pieces(file))

    def _create(self, key: str, chunks: Iterable[bytes]) -> Version:
        what = f"create {self.location_of(key)}"
        folder, name = _split(key)
        # The scratch file is in the store's own folder, which nobody removes because it is empty.
        with self._made_root(what) as own, _scratch(own, chunks, what) as (scratch, version):
            for left in reversed(range(_TRIES)):
                with disk_errors(what):
                    try:
                        with made_folder(self._below(folder)) as opened:
                            os.link(scratch, name, src_dir_fd=own, dst_dir_fd=opened, follow_symlinks=False)
                            os.fsync(opened)
                            break
                    except FileExistsError:
                        raise ObjectExists(f"cannot {what}: it exists already") from None
                    except (FileNotFoundError, NotADirectoryError):
                        # Another process has removed the folder, which was empty; or a file is in the way.
                        if not left:
                            raise
            self._flush_parents(folder, what)
            return version

    def _flush_parents(self, folder: str, what: str) -> None:
        """Let the names of new folders survive a crash of the machine."""
        while folder:
            folder = folder.rpartition("/")[0]
            with self._folder(folder, what) as opened, disk_errors(what):
                if opened is not None:
                    os.fsync(opened)

    def replace_if(self, key: str, data: bytes, version: Version) -> Version:
        what = f"replace {self.location_of(key)}"
        changed = ObjectChanged(f"cannot {what}: the file has changed, or is gone")
        folder, name = _split(key)
        with self._folder(folder, what) as opened:
            if opened is None:
                raise changed
            with self._locked(opened, folder), _scratch(opened, [data], what) as (scratch, written), disk_errors(what):
                try:
                    found = os.stat(name, dir_fd=opened, follow_symlinks=False)
                except FileNotFoundError:
                    raise changed from None
                if not stat.S_ISREG(found.st_mode) or version_of(found) != version:
                    raise changed
                os.replace(scratch, name, src_dir_fd=opened, dst_dir_fd=opened)
                os.fsync(opened)
                return written

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            what = f"remove {self.location_of(key)}"
            folder, name = _split(key)
            with self._folder(folder, what) as opened:
                if opened is None:
                    continue
                with self._locked(opened, folder), disk_errors(what), suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=opened)
            self._remove_empty(folder, what)

    def remove_listed(self, objects: Sequence[Listed]) -> Removed:
        return self._each(objects, lambda one, opened, name: os.unlink(name, dir_fd=opened))

    def move_listed(self, objects: Mapping[Listed, str]) -> Removed:
        def move(one: Listed, opened: int, name: str) -> None:
            folder, new = _split(objects[one])
            with made_folder(self._below(folder)) as target:
                # A link fails if the name exists. It is the same file if an earlier move was interrupted.
                try:
                    os.link(name, new, src_dir_fd=opened, dst_dir_fd=target, follow_symlinks=False)
                except FileExistsError:
                    if not _is_same_file(os.stat(name, dir_fd=opened, follow_symlinks=False), target, new):
                        raise
                os.fsync(target)
            self._flush_parents(folder, f"move {self.location_of(one.key)}")
            os.unlink(name, dir_fd=opened)

        return self._each(list(objects), move)

    def _each(self, objects: Sequence[Listed], work: Callable[[Listed, int, str], None]) -> Removed:
        """Call ``work`` for each unchanged file, with its open folder, which is locked, and its name.

        A folder is opened and locked once for all of its files that follow each other.
        """
        removed: dict[str, bool | None] = {}
        failed: dict[str, str] = {}
        for folder, group in groupby(objects, lambda one: one.key.rpartition("/")[0]):
            some = list(group)
            try:
                where = check_key(folder) if folder else ""
                with self._folder(where, f"remove files of {self.location_of(where)}") as opened, ExitStack() as stack:
                    if opened is not None:
                        stack.enter_context(self._locked(opened, folder))
                    for one in some:
                        try:
                            removed[one.key] = self._work_on(one, opened, work)
                        except (Denied, Unsupported, UnsafePath) as error:
                            failed[one.key] = str(error)
            except (Denied, Unsupported, UnsafePath) as error:
                failed |= {one.key: str(error) for one in some}

        def those(wanted: bool | None) -> Sequence[str]:
            return [key for key, answer in removed.items() if answer is wanted]

        return Removed(those(True), those(None), those(False), failed)

    def _work_on(self, one: Listed, opened: int | None, work: Callable[[Listed, int, str], None]) -> bool | None:
        """Whether a file is unchanged, so that ``work`` was called; None: it is missing. ``opened``: its folder."""
        _, name = _split(one.key)
        if opened is None:
            return None
        with _removal_errors(f"remove {self.location_of(one.key)}"):
            try:
                found = os.stat(name, dir_fd=opened, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode) or not one.is_same(self._stored(one.key, found)):
                    return False
                work(one, opened, name)
            except FileNotFoundError:
                return None
        return True

    def delete_folder(self, folder: str) -> None:
        what = f"remove {self.location_of(check_key(folder))}"
        with disk_errors(what):
            delete(self._place, folder)
        self._remove_empty(folder.rpartition("/")[0], what)

    def delete_incomplete(self, folder: str = "", *, older_than: float = 0.0) -> None:
        what, limit = f"remove files of {self.location_of(folder)}", time.time() - older_than
        with self._folder(folder, what) as opened, disk_errors(what):
            for name in [] if opened is None else os.listdir(opened):  # noqa: PTH208 -- of a descriptor
                with suppress(FileNotFoundError):
                    if is_scratch(name) and (
                        not older_than or os.stat(name, dir_fd=opened, follow_symlinks=False).st_mtime < limit
                    ):
                        os.unlink(name, dir_fd=opened)

    def _remove_empty(self, folder: str, what: str) -> None:
        """Remove a folder and its parents below the store's own, as far as they are empty."""
        while folder:
            parent, name = _split(folder)
            with self._folder(parent, what) as opened:
                if opened is None:
                    return
                try:
                    os.rmdir(name, dir_fd=opened)
                except OSError:
                    return
            folder = parent

    # ---- folders

    @contextmanager
    def _folder(self, folder: str, what: str) -> Iterator[int | None]:
        """Open a folder of the store; yields None if it does not exist."""
        with ExitStack() as stack:
            with disk_errors(what):
                opened = stack.enter_context(opened_folder(self._below(folder)))
            yield opened

    @contextmanager
    def _made_root(self, what: str) -> Iterator[int]:
        """Open the store's own folder, which is created if it is missing."""
        with ExitStack() as stack:
            with disk_errors(what):
                opened = stack.enter_context(made_folder(self._place))
            yield opened

    def _below(self, folder: str) -> Place:
        return self._place.below(folder) if folder else self._place

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """Open a regular file to read it. Raises ObjectMissing, also for a folder, and UnsafePath for other kinds."""
        what = f"read {self.location_of(key)}"
        folder, name = _split(key)
        missing = ObjectMissing(f"cannot {what}: there is no such file")
        with self._folder(folder, what) as opened:
            if opened is None:
                raise missing
            try:
                file = os.open(name, READ, dir_fd=opened)
            except FileNotFoundError:
                raise missing from None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise UnsafePath(
                        f"{self.location_of(key)} is not a regular file: it is a link or a device"
                    ) from None
                raise _failed(what, error) from None
        try:
            mode = os.fstat(file).st_mode
            if stat.S_ISDIR(mode):
                raise missing
            if not stat.S_ISREG(mode):
                raise UnsafePath(f"{self.location_of(key)} is not a regular file: it is a pipe or a device")
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _locked(self, folder: int, name: str) -> Iterator[None]:
        """Lock an open folder until it is closed."""
        what = f"lock the folder {self.location_of(name)}"
        deadline = Deadline(self._limit)
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not deadline.pause():
                    raise TimedOut(f"cannot {what}: another process holds the lock") from None
            except OSError as error:
                raise _failed(what, error) from None
        try:
            yield
        finally:
            fcntl.flock(folder, fcntl.LOCK_UN)

    def _stored(self, key: str, found: os.stat_result) -> StoredObject:
        # A file that was moved here, or copied with its times, keeps its mtime.
        return StoredObject(key, found.st_size, version_of(found), max(found.st_mtime, found.st_ctime))


@contextmanager
def _scratch(folder: int, chunks: Iterable[bytes], what: str) -> Iterator[tuple[str, Version]]:
    """Write a new file; yields its name and version. It is removed at the end if it still has this name."""
    name = scratch_name()
    try:
        with disk_errors(what):
            file = os.open(name, _NEW, FILE_MODE, dir_fd=folder)
        with os.fdopen(file, "wb") as stream:
            for piece in chunks:
                with disk_errors(what):
                    stream.write(piece)
            with disk_errors(what):
                stream.flush()
                os.fsync(file)
                version = version_of(os.fstat(file))
        yield name, version
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise the system's errors in this block as errors of a store."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise _failed(what, error) from None


@contextmanager
def _removal_errors(what: str) -> Iterator[None]:
    """Raise the system's errors of a removal as refusals: EPERM is that of a sticky folder or an immutable file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise Denied(f"cannot {what}: {error.strerror or error}") from None


def _failed(what: str, error: OSError) -> StoreError:
    message = f"cannot {what}: {error.strerror or error}"
    if isinstance(error, PermissionError) and error.errno == errno.EACCES:
        return Denied(message)
    if error.errno in _UNSUPPORTED:
        return Unsupported(f"{message}: this file system has no hard links, or no locks of folders")
    return StoreError(message)


def _split(key: str) -> tuple[str, str]:
    """The folder of a key, and the name in it. Raises UnsafePath."""
    folder, _, name = check_key(key).rpartition("/")
    return folder, name


def _is_same_file(found: os.stat_result, folder: int, name: str) -> bool:
    other = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return (found.st_dev, found.st_ino) == (other.st_dev, other.st_ino)


def version_of(found: os.stat_result) -> Version:
    return Version(f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}")


def _pieces(file: int) -> Iterator[bytes]:
    while piece := os.read(file, PART):
        yield piece


def _read_at(file: int, start: int, end: int) -> bytes:
    """The bytes of a file from ``start`` to ``end``, or to its end."""
    found = bytearray()
    while len(found) < end - start and (piece := os.pread(file, end - start - len(found), start + len(found))):
        found += piece
    return bytes(found)
