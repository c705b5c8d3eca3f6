"""Small whole files at a path or a URL that pyarrow knows, such as those in the shared directory."""

from __future__ import annotations

import os
from pathlib import Path

from distop.clock import uuid


def local_path(location: str) -> Path | None:
    """The local path of a location, or None for a URL of another kind."""
    if location.startswith("file:"):
        return Path("/" + location[len("file:") :].lstrip("/"))
    return None if "://" in location else Path(location)


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
    return (location, str(found.st_ino), str(found.st_size), str(found.st_mtime_ns))


def gone(location: str) -> tuple[str, ...]:
    """The identity of what is not there, or cannot be looked at."""
    return (location, "gone")


def write(location: str, data: bytes) -> None:
    """Write a whole file, seen wholly or not at all; its folders are made."""
    path = local_path(location)
    if path is None:
        from pyarrow import fs

        filesystem, inner = fs.FileSystem.from_uri(location)
        filesystem.create_dir(inner.rpartition("/")[0], recursive=True)
        with filesystem.open_output_stream(inner) as stream:
            stream.write(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read(location: str) -> bytes:
    """The bytes of a file. Raises OSError."""
    path = local_path(location)
    if path is not None:
        return path.read_bytes()
    from pyarrow import fs

    filesystem, inner = fs.FileSystem.from_uri(location)
    with filesystem.open_input_stream(inner) as stream:
        return bytes(stream.read())
