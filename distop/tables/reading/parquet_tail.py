"""Reads the raw footer of a Parquet file from its last bytes; pyarrow parses it.

Encryption is detected here. If a file has encrypted columns and a plain footer, pyarrow aborts the process when it is
asked for an encrypted column. So such a footer is never given to pyarrow.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.storage.files import METADATA_BYTES, open_filesystem, open_regular
from distop.storage.location import stamp_of
from distop.storage.opened_stores import OpenedBuckets
from distop.storage.storage_options import in_object_store
from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.storage.object_store import StoredObject
    from distop.tables.reading.file_facts import PlannedFile

FIRST_READ = 64 * 1024
"""Bytes read at first; nearly every footer is shorter."""
_END = 8
"""Bytes after a footer: its length and the magic."""
_ENCRYPTED = b"PARE"
_SIGNATURE = 28
"""Bytes between a footer and its length where columns are encrypted and the footer is plain: nonce and tag (Parquet
Modular Encryption 5.2)."""
_KEYS = "distop has no keys: validate a copy that is not encrypted"

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(path: str) -> bool:
    """Whether this is a URL, not a local path."""
    return _REMOTE.match(path) is not None


@frozen
class Footer:
    """A file's metadata as pyarrow reads it, and the file's size in bytes."""

    metadata: Any
    size: int


def read(path: str, planned: PlannedFile | None = None, buckets: OpenedBuckets | None = None) -> Footer:
    """The footer of a file. Raises Unreadable if it is encrypted, truncated, or not a footer, and OSError.

    An object is compared with its plan, if ``planned`` is given: all bytes are of the planned version. ``buckets``: to
    be shared by the calls for several files.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if in_object_store(path):
        tail, size = _of_object(path, planned, OpenedBuckets() if buckets is None else buckets)
    elif is_remote(path):
        filesystem, inner = open_filesystem(path)
        with filesystem.open_input_file(inner) as file:
            size = file.size()
            tail = _tail(path, size, lambda count: bytes(file.read_at(count, size - count)))
    else:
        with open_regular(path) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            tail = _tail(path, size, lambda count: os.pread(descriptor, count, size - count))
    try:
        metadata = pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError, ValueError) as e:
        reason = str(e).strip().split("\n")[0]
        raise Unreadable(f"the file {path} is not a readable Parquet file: {reason}") from e
    if _length(tail) - metadata.serialized_size == _SIGNATURE:
        raise Unreadable(f"the file {path} cannot be read: its columns are encrypted, and {_KEYS}")
    return Footer(metadata, size)


def check_planned(planned: PlannedFile, found: StoredObject) -> None:
    """Raises Unreadable if an object differs from its plan."""
    path, size, stamp = planned
    if (found.size, stamp_of(found)) != (size, stamp):
        raise Unreadable(f"the file {path} has changed since the operation was planned")


def _of_object(path: str, planned: PlannedFile | None, buckets: OpenedBuckets) -> tuple[bytes, int]:
    """The last bytes of an object, at least its whole footer, and its size. Takes one request for nearly all files."""
    store, key = buckets.find(path)
    end = store.get_end(key, FIRST_READ)
    if planned is not None:
        check_planned(planned, end.stored)
    size = end.stored.size

    def last(count: int) -> bytes:
        if count <= len(end.data):
            return end.data[len(end.data) - count :]
        return store.get_ranges(key, [(size - count, size)], version=end.stored.version)[0]

    return _tail(path, size, last), size


def _tail(path: str, size: int, last: Callable[[int], bytes]) -> bytes:
    """The last bytes of a file, at least its whole footer.

    Raises Unreadable if the footer is encrypted, truncated or too large.
    """
    tail = last(min(size, FIRST_READ))
    if tail.endswith(_ENCRYPTED):
        raise Unreadable(f"the file {path} cannot be read: it is encrypted, and {_KEYS}")
    if len(tail) < _END or not tail.endswith(b"PAR1"):
        return tail  # not Parquet: pyarrow raises the error
    wanted = _length(tail) + _END
    if wanted > size:
        raise Unreadable(
            f"the file {path} is not a readable Parquet file: its last bytes give a footer length of "
            f"{wanted - _END} bytes, but the file has only {size}"
        )
    if wanted > METADATA_BYTES:
        raise Unreadable(
            f"the file {path} cannot be read: its footer has {wanted - _END} bytes, and at most "
            f"{METADATA_BYTES - _END} are read"
        )
    return last(wanted) if wanted > len(tail) else tail


def _length(tail: bytes) -> int:
    return int.from_bytes(tail[-_END:-4], "little")
