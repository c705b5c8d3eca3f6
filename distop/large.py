"""Results that are too large for etcd: in a file of the shared directory, named by the outcome with size and checksum.

The outcome is the commit point, as of all output: a file that none names is what an attempt left that lost.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from distop.core.codec import loads
from distop.errors import NotFound, UnreadableRecord, describe
from distop.files import read as read_file
from distop.files import write as write_file

if TYPE_CHECKING:
    from collections.abc import Mapping

POINTER = "distop:file"
"""The one field of a result that stands in a file: ``{"path", "bytes", "sha256"}``."""


def write(path: str, data: bytes) -> dict[str, Any]:
    """Write a result's JSON, whole; what stands in the outcome instead of it. Raises OSError."""
    write_file(path, data)
    return {POINTER: {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}


def file_of(result: Any) -> Mapping[str, Any] | None:
    """What is told of the file, where the result stands in one."""
    told = result.get(POINTER) if isinstance(result, dict) and len(result) == 1 else None
    return told if isinstance(told, dict) else None


def resolve(result: Any, what: str) -> Any:
    """The result itself, read from its file where it stands in one. ``what``: whose it is, for people.

    Raises NotFound where the file cannot be read from here, UnreadableRecord where it is not what the outcome names.
    """
    told = file_of(result)
    if told is None:
        return result
    path = str(told.get("path", ""))
    try:
        data = read_file(path)
    except OSError as error:
        reason = error.strerror or describe(error)
        raise NotFound(f"{what} is in the file {path}, which cannot be read from here: {reason}") from None
    if len(data) != told.get("bytes") or hashlib.sha256(data).hexdigest() != told.get("sha256"):
        raise UnreadableRecord(f"{what} is in the file {path}, which was changed: its checksum is another one")
    return loads(data)
