"""Parses the deletion vectors of a Delta log, and checks their files before Spark reads them.

A vector lists the deleted rows of one data file. Delta's reader allocates as much memory as the log says, so sizes are
limited.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeGuard

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.storage.files import NotRegular, local_path, open_regular
from distop.tables.delta.table_paths import for_spark, vector_path
from distop.tables.reading.file_facts import Gone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.storage.confinement import TableFiles

VECTOR_BYTES = 64 << 20
"""Maximum bytes of a vector: enough for half a billion rows in any distribution."""
_RELATIVE, _INLINE, _ABSOLUTE = "u", "i", "p"
_LENGTH, _CHECKSUM = 4, 4
"""Bytes before and after a vector in its file."""


@frozen
class DeletionVector:
    """A deletion vector.

    ``path``: the path of its file, or "" if ``text`` is the vector itself. ``rows``: the number of deleted rows.
    """

    text: str
    path: str
    offset: int
    size: int
    rows: int

    def for_spark(self) -> dict[str, Any]:
        """The descriptor for Delta's reader, with an absolute path."""
        found = {"sizeInBytes": self.size, "cardinality": self.rows}
        if not self.path:
            return {"storageType": _INLINE, "pathOrInlineDv": self.text, **found}
        return {
            "storageType": _ABSOLUTE,
            "pathOrInlineDv": for_spark(self.path),
            "offset": self.offset,
            **found,
        }

    def check(self) -> None:
        """Raises Gone if its file no longer exists, InvalidArgument if the vector exceeds it, TableUnavailable.

        Files in object stores are not opened. The path was checked before (confinement).
        """
        local = local_path(self.path) if self.path else None
        if local is None:
            return
        try:
            with open_regular(str(local), follow=False) as file:
                length = os.fstat(file.fileno()).st_size
                file.seek(self.offset)
                stated = int.from_bytes(file.read(_LENGTH), "big")
        except FileNotFoundError:
            raise Gone(
                f"the deletion vectors {self.path} are gone: since the operation was planned the table was vacuumed, "
                "or dropped; start the operation again"
            ) from None
        except NotRegular as error:
            raise InvalidArgument(str(error)) from None
        except OSError as error:
            raise TableUnavailable(f"cannot read the file {shown(self.path)}: {type(error).__name__}") from error
        if stated != self.size or self.offset + _LENGTH + self.size + _CHECKSUM > length:
            raise InvalidArgument(
                f"invalid deletion vector in the file {shown(self.path)}: its size differs from the log, or it exceeds "
                "the end of the file"
            )


def vector_id(found: Any) -> str:
    """The identity of the deletion vector of an ``add`` or ``remove``; "" without one."""
    if not isinstance(found, dict):
        return ""
    return f"{found.get('storageType')}{found.get('pathOrInlineDv')}@{found.get('offset')}"


def vector_of(root: str, found: Mapping[str, Any], files: TableFiles) -> DeletionVector:
    """The deletion vector of an ``add``.

    Raises InvalidArgument if it is invalid, its file may not belong to the table, or has an absolute path.
    """
    kind, text, offset = found.get("storageType"), found.get("pathOrInlineDv"), found.get("offset")
    size, rows = found.get("sizeInBytes"), found.get("cardinality")
    if not (
        isinstance(text, str)
        and is_count(size, VECTOR_BYTES)
        and is_count(rows)
        and (offset is None or is_count(offset))
    ):
        raise InvalidArgument(f"the log of {root!r} has the invalid deletion vector {shown(dict(found))}")
    if kind == _INLINE:
        return DeletionVector(text, "", 0, size, rows)
    if kind != _RELATIVE:
        what = "an absolute path" if kind == _ABSOLUTE else f"the storage type {shown(kind)}"
        raise InvalidArgument(
            f"the log of {root!r} has a deletion vector with {what}: only vectors in the table's folder are supported, "
            "so copy the rows of a shallow clone to a new table"
        )
    path = vector_path(root, text)
    files.check((path,), below=True)
    return DeletionVector(text, path, offset or 0, size, rows)


def is_count(value: Any, most: int = (1 << 63) - 1) -> TypeGuard[int]:
    """Whether a value of JSON is a whole number from 0 to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
