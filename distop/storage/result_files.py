"""Results that are too large for etcd: in a file of the shared directory, named by the outcome with size and checksum.

The outcome is the commit point, as of all output: a file that none names is what an attempt left that lost. Where the
file is, the outcome does not say: its path is made of the operation, the partition and the attempt, so that a record
makes nobody read another file.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, NotFound, UnreadableRecord, UnsafePath, describe
from distop.protocol.json_codec import loads
from distop.storage.deletion import read_regular
from distop.storage.deletion import write as write_file
from distop.storage.places import result_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.storage.deletion import Place
    from distop.storage.places import Attempt

POINTER = "distop:file"
"""The one field of a result that stands in a file: ``{"bytes", "sha256"}``."""
MAX_BYTES = 64 * 1024 * 1024
"""Of such a result: whoever reads it has it in memory."""


def write(shared: Place, attempt: Attempt, data: bytes) -> dict[str, Any]:
    """Write a result's JSON, whole; what stands in the outcome instead of it.

    Raises UnsafePath, OSError, and ValueError where it is too large.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, at most {MAX_BYTES} are kept in a file: return less")
    place = result_of(shared, attempt)
    write_file(place.parent, place.name, data)
    return {POINTER: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}


def file_of(result: Any) -> Mapping[str, Any] | None:
    """What is told of the file, where the result stands in one."""
    told = result.get(POINTER) if isinstance(result, dict) and len(result) == 1 else None
    return told if isinstance(told, dict) else None


def check_no_pointer(result: Any) -> None:
    """Raises InvalidArgument for a caller's result that would stand for one in a file."""
    if isinstance(result, dict) and POINTER in result:
        raise InvalidArgument(f"{POINTER!r} stands for a result in a file: give the field of the result another name")


def resolve(result: Any, shared: Place | None, attempt: Attempt | None) -> Any:
    """The result itself, read from its file where it stands in one: that of the attempt, below the shared directory.
    ``attempt``: None where no executor has run the job.

    Raises NotFound where the file cannot be read from here, UnreadableRecord where it is not what the outcome names.
    """
    told = file_of(result)
    if told is None:
        return result
    size, digest = told.get("bytes"), told.get("sha256")
    number = isinstance(size, int) and not isinstance(size, bool)
    if attempt is None or not number or not 0 <= size <= MAX_BYTES or not isinstance(digest, str):  # type: ignore[operator]
        raise UnreadableRecord(
            f"a result is said to be in a file, and no executor has written that: {POINTER!r} is void"
        )
    what = f"the result of partition {attempt.partition} of {attempt.op}"
    if shared is None:
        raise NotFound(
            f"{what} is in a file of the shared directory, which is not known here: name it (shared_dir of connect, or "
            "DISTOP_SHARED_DIR) as the executors' --shared-dir does"
        )
    place = result_of(shared, attempt)
    try:
        data = read_regular(place.parent, place.name, size)  # type: ignore[arg-type]
    except (OSError, UnsafePath) as error:
        reason = getattr(error, "strerror", None) or describe(error)
        raise NotFound(f"{what} is in the file {place.location}, which cannot be read from here: {reason}") from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise UnreadableRecord(f"{what} is in the file {place.location}, which has changed: its checksum is another")
    return loads(data)
