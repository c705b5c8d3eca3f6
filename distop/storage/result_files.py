"""Stores results too large for etcd in the shared directory; the outcome has size and checksum.

The outcome is the commit point, as for all output: a file without an outcome belongs to a superseded attempt. The
outcome has no path: the path is derived from the operation, the partition and the attempt, so that a forged record
cannot name another file.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, NotFound, UnreadableRecord, describe
from distop.protocol.json_codec import loads
from distop.storage.files import TooLarge
from distop.storage.opened_stores import store_of
from distop.storage.places import result_key
from distop.storage.store_check import publishing_store
from distop.storage.store_errors import ObjectMissing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.storage.deletion import Place
    from distop.storage.places import Attempt

POINTER = "distop:file"
"""The only field of a result stored in a file: ``{"bytes", "sha256"}``."""
MAX_BYTES = 64 * 1024 * 1024
"""Maximum bytes of such a result: readers hold it in memory."""


def write(shared: Place, attempt: Attempt, data: bytes) -> dict[str, Any]:
    """Write a result's JSON to its file; returns the outcome's pointer to it.

    Raises UnsafePath, OSError, ValueError if it is too large, and InvalidArgument for a shared directory that is not
    allowed or not suitable.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes: at most {MAX_BYTES} are allowed in a file; return less")
    # An earlier process may have run the same attempt.
    publishing_store(shared).put(result_key(attempt), data)
    return {POINTER: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}


def file_of(result: Any) -> Mapping[str, Any] | None:
    """The pointer to a result's file; None for a result that is not in a file."""
    pointer = result.get(POINTER) if isinstance(result, dict) and len(result) == 1 else None
    return pointer if isinstance(pointer, dict) else None


def check_no_pointer(result: Any) -> None:
    """Raises InvalidArgument for a caller's result that has the reserved field of a pointer."""
    if isinstance(result, dict) and POINTER in result:
        raise InvalidArgument(f"the result's field {POINTER!r} is reserved for results in files: rename it")


def resolve(result: Any, shared: Place | None, attempt: Attempt | None) -> Any:
    """The result itself, read from the attempt's file if it is stored in one.

    ``attempt``: None if no executor has run the job. Raises NotFound if the file cannot be read here, UnreadableRecord
    if size or checksum differ from the outcome's.
    """
    pointer = file_of(result)
    if pointer is None:
        return result
    size, digest = pointer.get("bytes"), pointer.get("sha256")
    number = isinstance(size, int) and not isinstance(size, bool)
    if attempt is None or not number or not 0 <= size <= MAX_BYTES or not isinstance(digest, str):  # type: ignore[operator]
        raise UnreadableRecord(f"a result has an invalid {POINTER!r}: no executor has written it")
    what = f"the result of partition {attempt.partition} of {attempt.op}"
    if shared is None:
        raise NotFound(
            f"{what} is in a file of the shared directory, which is not configured here: give the executors' "
            "--shared-dir (shared_dir of connect, or DISTOP_SHARED_DIR)"
        )
    location = shared.below(result_key(attempt)).location
    changed = UnreadableRecord(f"{what} is in the file {location}, whose size or checksum has changed")
    try:
        data = store_of(shared).get(result_key(attempt), limit=size).data  # type: ignore[arg-type]
    except TooLarge:
        raise changed from None
    except (OSError, InvalidArgument) as error:
        reason = "there is no such file" if isinstance(error, ObjectMissing) else describe(error)
        raise NotFound(f"{what} is in the file {location}, which cannot be read here: {reason}") from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise changed
    return loads(data)
