"""Results that are too large for etcd: in a file of the shared directory, named by the outcome with size and checksum.

The outcome is the commit point, as of all output: a file that none names is what an attempt left that lost. Where the
file is, the outcome does not say: its path is made of the operation, the partition and the attempt, so that a record
makes nobody read another file.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from distop.core.codec import loads
from distop.errors import InvalidArgument, NotFound, UnreadableRecord, describe
from distop.files import read_regular
from distop.files import write as write_file
from distop.shared_folder import result_file, result_path

if TYPE_CHECKING:
    from collections.abc import Mapping

POINTER = "distop:file"
"""The one field of a result that stands in a file: ``{"fence", "bytes", "sha256"}``."""
MAX_BYTES = 64 * 1024 * 1024
"""Of such a result: whoever reads it has it in memory."""


def write(path: str, data: bytes, fence: int) -> dict[str, Any]:
    """Write a result's JSON, whole; what stands in the outcome instead of it. Raises OSError, ValueError."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data)} bytes, at most {MAX_BYTES} are kept in a file: return less")
    write_file(path, data)
    return {POINTER: {"fence": fence, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}


def file_of(result: Any) -> Mapping[str, Any] | None:
    """What is told of the file, where the result stands in one."""
    told = result.get(POINTER) if isinstance(result, dict) and len(result) == 1 else None
    return told if isinstance(told, dict) else None


def check_no_pointer(result: Any) -> None:
    """Raises InvalidArgument for a caller's result that would stand for one in a file."""
    if isinstance(result, dict) and POINTER in result:
        raise InvalidArgument(f"{POINTER!r} stands for a result in a file: give the field of the result another name")


def path_of(result: Any, shared: str, op: str, partition: int, incarnation: str) -> str:
    """Where the file of such a result is. Raises UnreadableRecord."""
    return result_path(shared, op, partition, _told(result, "the result", incarnation)[0], incarnation)


def resolve(result: Any, shared: str, op: str, partition: int, incarnation: str) -> Any:
    """The result itself, read from its file where it stands in one: that of the attempt of this incarnation, below the
    shared directory.

    Raises NotFound where the file cannot be read from here, UnreadableRecord where it is not what the outcome names.
    """
    if file_of(result) is None:
        return result
    what = f"the result of partition {partition} of {op}"
    fence, size, digest = _told(result, what, incarnation)
    if not shared:
        raise NotFound(
            f"{what} is in a file of the shared directory, which is not known here: name it (shared_dir of connect, or "
            "DISTOP_SHARED_DIR) as the executors' --shared-dir does"
        )
    path = result_path(shared, op, partition, fence, incarnation)
    try:
        data = read_regular(shared, result_file(op, partition, fence, incarnation), size)
    except OSError as error:
        reason = error.strerror or describe(error)
        raise NotFound(f"{what} is in the file {path}, which cannot be read from here: {reason}") from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise UnreadableRecord(f"{what} is in the file {path}, which was changed: its checksum is another one")
    return loads(data)


def _told(result: Any, what: str, incarnation: str) -> tuple[int, int, str]:
    told = file_of(result) or {}
    fence, size, digest = told.get("fence"), told.get("bytes"), told.get("sha256")
    numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in (fence, size))
    if not incarnation or not numbers or not 0 <= size <= MAX_BYTES or not isinstance(digest, str):  # type: ignore[operator]
        raise UnreadableRecord(f"{what} is said to be in a file, and no executor has written that: {POINTER!r} is void")
    return fence, size, digest  # type: ignore[return-value]
