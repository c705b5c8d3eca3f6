"""Copies files from one folder of a disk into another one, and flushes all copies together.

A copy is written under a scratch name and then gets its own, so that a name never shows a part of the content. The
content is read once: its checksum is that of the bytes that are written, and each piece is read again from the copy and
compared. :meth:`FolderCopies.flush` lets all copies survive a crash of the machine.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

from distop.errors import UnsafePath
from distop.protocol.frozen import frozen
from distop.storage.deletion import made_folder, opened_folder
from distop.storage.folder_store import FILE_MODE, READ, disk_errors, version_of
from distop.storage.object_store import check_key, is_scratch, scratch_name
from distop.storage.store_errors import ObjectChanged, ObjectExists, ObjectMissing, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.storage.deletion import Place

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20
"""Bytes that are read, written and compared at once: they fit into the processor's cache."""
_REPORTS_ERRORS = (5, 8)
"""The Linux version since which ``syncfs`` reports write errors."""
_TRIES = 100
"""Tries to create a file in a folder that another process removes meanwhile because it is empty."""
_NO_REPLACE = 1
"""``RENAME_NOREPLACE`` of ``renameat2``."""


@frozen
class DiskCopy:
    """A copy: the size, the SHA-256 of the content, and the stamps of the original and of the copy."""

    size: int
    sha256: str
    original: str
    copy: str


class FolderCopies:
    """Copies files of the folder ``source`` into the folder ``target``, which is created. Thread-safe.

    It is a context manager. Raises UnsafePath for links on the way, and StoreError.
    """

    def __init__(self, source: Place, target: Place) -> None:
        self._from, self._to = source.location, target.location
        self._places = source, target
        self._threads = threading.local()
        self._stack = ExitStack()
        self._syncfs = _syncfs()
        self._rename = _system_call("renameat2")

    def __enter__(self) -> Self:
        source, target = self._places
        with ExitStack() as stack, disk_errors(f"write in {self._to}"):
            self._source = stack.enter_context(opened_folder(source))
            for left in reversed(range(_TRIES)):
                with ExitStack() as made:
                    self._target = made.enter_context(made_folder(target))
                    name = scratch_name()
                    try:
                        # Other processes remove folders that are empty.
                        os.close(os.open(name, _NEW, FILE_MODE, dir_fd=self._target))
                    except FileNotFoundError:
                        if not left:
                            raise
                        continue
                    made.callback(self._unlink, name)
                    stack.push(made.pop_all())
                    break
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """The names in the target folder, without those of files that are not complete."""
        with disk_errors(f"list {self._to}"):
            found = os.listdir(self._target)  # noqa: PTH208 -- of a descriptor
        return {name for name in found if not is_scratch(name)}

    def copy(self, name: str, examine: Callable[[os.stat_result], None]) -> DiskCopy:
        """Copy a file that does not exist in the target. ``examine`` may refuse the source: it raises.

        Raises ObjectMissing, ObjectExists, ObjectChanged if the source changes meanwhile, UnsafePath for anything but a
        regular file, and StoreError, also if the copy differs from the source.
        """
        path = f"{self._from}/{check_key(name)}"
        if self._source is None:
            raise ObjectMissing(f"cannot read {path}: there is no such folder")
        try:
            source = os.open(name, READ, dir_fd=self._source)
        except FileNotFoundError:
            raise ObjectMissing(f"cannot read {path}: there is no such file") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise UnsafePath(f"{path} is not a regular file: it is a link or a device") from None
            with disk_errors(f"read {path}"):
                raise
        try:
            before = os.fstat(source)
            if not stat.S_ISREG(before.st_mode):
                raise UnsafePath(f"{path} is not a regular file: it is a pipe, a device or a folder")
            examine(before)
            with disk_errors(f"copy {path} to {self._to}"):
                return self._copied(source, before, name)
        finally:
            os.close(source)

    def put(self, name: str, data: bytes) -> None:
        """Create a small file, or replace the one that is there."""
        with disk_errors(f"write {self._to}/{check_key(name)}"):
            scratch = scratch_name()
            target = os.open(scratch, _NEW, FILE_MODE, dir_fd=self._target)
            try:
                _write_all(target, memoryview(data), 0)
                if self._syncfs is None:
                    os.fsync(target)
                os.replace(scratch, name, src_dir_fd=self._target, dst_dir_fd=self._target)
            except BaseException:
                self._unlink(scratch)
                raise
            finally:
                os.close(target)

    def flush(self) -> None:
        """Let all files survive a crash of the machine. Raises StoreError if some could not be written."""
        with disk_errors(f"flush {self._to}"):
            if self._syncfs is not None:
                self._syncfs(self._target)
            else:  # each file is flushed already
                os.fsync(self._target)

    @property
    def disk(self) -> int:
        """A number that folders have in common if :meth:`flush` of one flushes the files of all."""
        return os.fstat(self._target).st_dev if self._syncfs is not None else -self._target

    def _copied(self, source: int, before: os.stat_result, name: str) -> DiskCopy:
        scratch = scratch_name()
        target = os.open(scratch, _NEW, FILE_MODE, dir_fd=self._target)
        try:
            digest = hashlib.sha256()
            size = self._write(source, target, digest, name)
            if self._syncfs is None:
                os.fsync(target)
            written, after = os.fstat(target), os.fstat(source)
            if version_of(after) != version_of(before) or written.st_size != size or size != before.st_size:
                raise ObjectChanged(f"{self._from}/{name} has changed while it was copied")
            self._link(scratch, name)
        except BaseException:
            self._unlink(scratch)
            raise
        finally:
            os.close(target)
        return DiskCopy(size, digest.hexdigest(), version_of(before).etag, version_of(written).etag)

    def _write(self, source: int, target: int, digest: Any, name: str) -> int:
        """Copy the content, and compare each piece with the copy; returns its size."""
        buffers = self._buffers()
        views = [memoryview(one) for one in buffers]
        at = 0
        while count := os.preadv(source, [buffers[0]], at):
            piece = views[0][:count]
            digest.update(piece)
            _write_all(target, piece, at)
            again = os.preadv(target, [views[1][:count]], at)
            whole = count == _PIECE
            if again != count or (buffers[0] != buffers[1] if whole else bytes(piece) != bytes(views[1][:count])):
                raise StoreError(f"the copy {self._to}/{name} differs from {self._from}/{name}")
            at += count
        return at

    def _buffers(self) -> tuple[bytearray, bytearray]:
        found = getattr(self._threads, "buffers", None)
        if found is None:
            found = self._threads.buffers = bytearray(_PIECE), bytearray(_PIECE)
        return found

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._target)

    def _link(self, scratch: str, name: str) -> None:
        """Give a file its name. Raises ObjectExists."""
        exists = ObjectExists(f"cannot create {self._to}/{name}: it exists already")
        if self._rename is not None:
            try:
                self._rename(self._target, os.fsencode(scratch), self._target, os.fsencode(name), _NO_REPLACE)
                return
            except FileExistsError:
                raise exists from None
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
            self._rename = None  # this file system cannot
        try:
            os.link(scratch, name, src_dir_fd=self._target, dst_dir_fd=self._target, follow_symlinks=False)
        except FileExistsError:
            raise exists from None
        os.unlink(scratch, dir_fd=self._target)


def _write_all(target: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], at + done)


def _syncfs() -> Callable[..., None] | None:
    """``syncfs``, which flushes a whole file system; None if there is none that reports write errors."""
    release = os.uname()
    try:
        version = tuple(map(int, release.release.split("-")[0].split(".")[:2]))
    except ValueError:
        return None
    if release.sysname != "Linux" or version < _REPORTS_ERRORS:
        return None
    return _system_call("syncfs")


def _system_call(name: str) -> Callable[..., None] | None:
    """A function of the C library that takes a descriptor first; None if it has none. It raises OSError."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is None:
        return None
    found.restype = ctypes.c_int

    def call(*arguments: Any) -> None:
        if found(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    return call
