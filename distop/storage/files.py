"""Opens and reads files at local paths and URLs safely, and writes local files atomically.

Small files are read as a whole, locally or at a URL that pyarrow supports. Files with fixed names are written
atomically and durably, and without following links.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.storage.folder_ownership import walked
from distop.storage.storage_access import storage_access_for
from distop.storage.storage_options import in_object_store
from distop.storage.storage_urls import check_place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader
    from typing import BinaryIO


_SCHEME = re.compile(r"\s*(?:[A-Za-z][A-Za-z0-9+.-]*:)+//")


def local_path(location: str) -> Path | None:
    """The local path of a location; None for a URL other than ``file:``. A ``://`` later in a path does not count."""
    if location.startswith("file:"):
        return Path("/" + location[len("file:") :].lstrip("/"))
    return None if _SCHEME.match(location) else Path(location)


def identity(location: str) -> tuple[str, ...]:
    """A cache key of a file, which changes when the file is replaced. For a remote file: its name only."""
    path = local_path(location)
    if path is None:
        return (location,)
    try:
        found = path.stat()
    except OSError:
        return gone(location)
    # A user who rewrites a file in place can reset its mtime, but not its ctime.
    numbers = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev)
    return (location, *map(str, numbers))


def gone(location: str) -> tuple[str, ...]:
    """The identity of a file that does not exist or cannot be examined."""
    return (location, "gone")


def open_filesystem(location: str) -> tuple[Any, str]:
    """pyarrow's file system for a URL, and the path in it.

    Raises InvalidArgument for a URL that is not allowed in data, and pyarrow's errors: OSError, ImportError,
    ValueError and others.
    """
    from pyarrow import fs

    check_place("the URL", location)
    if in_object_store(location):
        return storage_access_for(location).pyarrow()
    opened: tuple[Any, str] = fs.FileSystem.from_uri(location)
    return opened


_PIECE = 8 << 20
"""Bytes per read."""
METADATA_BYTES = 256 << 20
"""Maximum bytes of a table's metadata file, manifest or footer, decompressed: readers hold it in memory."""


class TooLarge(ValueError):
    """A file has more bytes than the limit for its kind."""


def read_whole(stream: Any, limit: int, location: str) -> bytes:
    """All bytes of an open file. Raises TooLarge if it has more than ``limit``, and OSError."""
    found = bytearray()
    while piece := stream.read(min(_PIECE, limit + 1 - len(found))):
        found += piece
        if len(found) > limit:
            raise TooLarge(f"the file {location} has more than {limit} bytes, the limit for such a file")
    return bytes(found)


_IRREGULAR = "the file {} is not a regular file: it is a pipe, a device or a folder"


class NotRegular(OSError):
    """The path is a pipe, a device or a link instead of a regular file."""


def open_regular(path: str, *, follow: bool = True) -> BufferedReader:
    """Open a regular file on a disk. Raises NotRegular and OSError.

    Other kinds are rejected: a pipe, for example, would block its reader, without reacting to signals. Links of other
    users are never followed; ``follow``: follow a link of root or of this user at the path itself.
    """

    def linked(what: str, why: str) -> NotRegular:
        return NotRegular(f"the file {path} was not opened: {what} {why}")

    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if follow:
            with walked(Path(path), linked, folders=False) as (place, opened):
                descriptor = os.open(f"/proc/self/fd/{opened}" if hasattr(os, "O_PATH") else place, flags)
        else:
            with walked(Path(path).parent, linked, folders=False) as (_, folder):
                descriptor = os.open(Path(path).name, flags | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotRegular(f"the file {path} is a symbolic link, which is not followed") from None
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise NotRegular(_IRREGULAR.format(path)) from None
        raise
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def for_arrow(path: str, *, follow: bool = True) -> AbstractContextManager[Any]:
    """An open file for Arrow, which by itself would open any kind of local file, and no bucket as it is configured.

    All bytes of an object are of one version. Raises the errors of :func:`open_regular` for a local path, and those of
    an object store or of :func:`open_filesystem` for a URL.
    """
    if (local := local_path(path)) is not None:
        return open_regular(str(local), follow=follow)
    if in_object_store(path):
        return _open_object(path)
    filesystem, inner = open_filesystem(path)
    opened: AbstractContextManager[Any] = filesystem.open_input_file(inner)
    return opened


@contextmanager
def _open_object(path: str) -> Iterator[BinaryIO]:
    from distop.storage.opened_stores import object_at

    store, key = object_at(path)
    with store.open(key) as found:
        yield found.file


def check_regular(path: str, mode: int) -> None:
    """Raises NotRegular unless the mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise NotRegular(_IRREGULAR.format(path))


def read(location: str, limit: int, *, follow: bool = True) -> bytes:
    """The bytes of a file; ``follow``: follow a link at a local path.

    Raises TooLarge if it has more than ``limit`` bytes, and OSError, including NotRegular.
    """
    path = local_path(location)
    if path is not None:
        with open_regular(str(path), follow=follow) as file:
            return read_whole(file, limit, location)
    if in_object_store(location):
        from distop.storage.opened_stores import object_at

        store, key = object_at(location)
        return store.get(key, limit=limit).data
    filesystem, inner = open_filesystem(location)
    with filesystem.open_input_stream(inner) as stream:
        return read_whole(stream, limit, location)


def open_fixed(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file like ``os.open``, but without following a link of this name. Raises OSError.

    ``mode``: of a new file, before the umask.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = f"{path.name} is a symbolic link, which is not followed"
        raise OSError(errno.ELOOP, why, str(path)) from None


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write or replace a file atomically; it is on the disk when this returns. Raises OSError.

    ``mode``: of a new file, before the umask.
    """
    scratch = path.with_suffix(".new")
    with os.fdopen(open_fixed(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
    scratch.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
