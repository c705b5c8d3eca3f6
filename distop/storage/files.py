"""Files: opening and reading them wherever they are, and writing local ones as a whole.

Small whole files at a path or a URL that pyarrow knows, such as those in the shared directory.

Files of fixed names: whole or not there, whatever happens to the machine, and never behind a link.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.storage.folder_ownership import walked
from distop.storage.storage_urls import check_place

if TYPE_CHECKING:
    from io import BufferedReader


_SCHEME = re.compile(r"\s*(?:[A-Za-z][A-Za-z0-9+.-]*:)+//")


def local_path(location: str) -> Path | None:
    """The local path of a location, or None for a URL of another kind: what has ``://`` further on is no URL."""
    if location.startswith("file:"):
        return Path("/" + location[len("file:") :].lstrip("/"))
    return None if _SCHEME.match(location) else Path(location)


def identity(location: str) -> tuple[str, ...]:
    """What tells a file from others, as a key of what is kept of it: one that was removed and written anew has the same
    name. Of one that is not on a disk this is the name alone.
    """
    path = local_path(location)
    if path is None:
        return (location,)
    try:
        found = path.stat()
    except OSError:
        return gone(location)
    # Who rewrites a file in its place can set the time of its content back, but not the other one.
    numbers = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev)
    return (location, *map(str, numbers))


def gone(location: str) -> tuple[str, ...]:
    """The identity of what is not there, or cannot be looked at."""
    return (location, "gone")


GCS_RETRIES = 20.0
"""Seconds for which Google's client repeats a request that fails; by itself it does so for a quarter of an hour."""


def open_filesystem(location: str) -> tuple[Any, str]:
    """pyarrow's file system of a URL, and the path in it.

    Raises InvalidArgument for a URL that is not allowed in data, and what pyarrow raises: OSError, ImportError,
    ValueError and others.
    """
    from pyarrow import fs

    check_place("the URL", location)
    if location.lower().startswith(("gs://", "gcs://")):
        location += f"?retry_limit_seconds={GCS_RETRIES:g}"
    opened: tuple[Any, str] = fs.FileSystem.from_uri(location)
    return opened


_PIECE = 8 << 20
"""Bytes that are read at once."""
METADATA_BYTES = 256 << 20
"""Of a table's metadata file, a manifest, or a footer at most, decompressed: whoever reads one has it in memory."""


class TooLarge(ValueError):
    """A file has more bytes than are read of one."""


def read_whole(stream: Any, limit: int, location: str) -> bytes:
    """All bytes of an open file. Raises TooLarge where it has more than ``limit``, and OSError."""
    found = bytearray()
    while piece := stream.read(min(_PIECE, limit + 1 - len(found))):
        found += piece
        if len(found) > limit:
            raise TooLarge(f"the file {location} has more than {limit} bytes, the most that is read of such a file")
    return bytes(found)


_IRREGULAR = "the file {} is not a regular file: it is a pipe, a device or a folder"


class NotRegular(OSError):
    """A pipe, a device or a link stands where a file should."""


def open_regular(path: str, *, follow: bool = True) -> BufferedReader:
    """Open a regular file on a disk: a pipe would hold up whoever opens it, and no signal would reach them. No link of
    another user is followed, whatever was looked at before; ``follow``: one of root or of this user at its place is.
    Raises NotRegular and OSError.
    """

    def linked(what: str, why: str) -> NotRegular:
        return NotRegular(f"the file {path} is not opened: {what} {why}")

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
    """What Arrow is given instead of a path, as it opens whatever is there: a regular file on a disk, opened so; else
    the path. Raises what :func:`open_regular` does.
    """
    return nullcontext(path) if local_path(path) is None else open_regular(path, follow=follow)


def check_regular(path: str, mode: int) -> None:
    """Raises NotRegular where this is the mode of no regular file."""
    if not stat.S_ISREG(mode):
        raise NotRegular(_IRREGULAR.format(path))


def read(location: str, limit: int, *, follow: bool = True) -> bytes:
    """The bytes of a file; ``follow``: also where a link on a disk leads to it. Raises TooLarge where it has more than
    ``limit``, and OSError: NotRegular among it.
    """
    path = local_path(location)
    if path is not None:
        with open_regular(str(path), follow=follow) as file:
            return read_whole(file, limit, location)
    filesystem, inner = open_filesystem(location)
    with filesystem.open_input_stream(inner) as stream:
        return read_whole(stream, limit, location)


def open_fixed(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a file, as ``os.open`` gives it; a link of this name is not followed. ``mode``: of a file that is
    new, before the umask. Raises OSError.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        why = f"{path.name} is a symbolic link, which is not followed"
        raise OSError(errno.ELOOP, why, str(path)) from None


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write or replace a file; it is on the disk when this returns, and never there in part. Raises OSError.

    ``mode``: of a file that is new, before the umask.
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
