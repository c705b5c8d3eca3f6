"""Deletion vectors of Iceberg, looked at before Spark reads them: a manifest says where in which file one lies, and
Iceberg's reader takes as much memory as it says, and quotes the bytes that are not what it expects.
"""

from __future__ import annotations

import os
import zlib

from distop.core.texts import shown
from distop.errors import InvalidArgument, TableUnavailable
from distop.files import NotRegular, local_path, open_regular

VECTOR_FIELDS = ("content_offset", "content_size_in_bytes")
VECTOR_BYTES = 64 << 20
"""Of a vector at most: that is enough for half a billion rows, however they are chosen."""

_FILE = b"PFA1"
_VECTOR = b"\xd1\xd3\x39\x64"
_AROUND = 12
"""Bytes of a vector besides its bitmap: a length, a magic number and a checksum."""
_LEAST = _AROUND + 8
"""With the number of bitmaps."""
_KEY = slice(16, 20)
_FIRST_ONLY = 1
"""Bitmaps of a vector at most, each for four billion rows of a file: Iceberg makes all up to the last one."""


def check_vector(path: str, offset: int | None, size: int | None) -> None:
    """Raises InvalidArgument where there is no whole deletion vector of this size at this place of a file, of which
    nothing is quoted; TableUnavailable where that cannot be read. Of a file that is on no disk the numbers alone are
    looked at. The path is allowed already (confinement).
    """
    if offset is None or size is None or offset < len(_FILE) or not _LEAST <= size <= VECTOR_BYTES:
        raise _wrong(path, f"its place in the file is missing, or it is not of {_LEAST} to {VECTOR_BYTES} bytes")
    local = local_path(path)
    if local is None:
        return
    try:
        with open_regular(str(local)) as file:
            if file.read(len(_FILE)) != _FILE:
                raise _wrong(path, "that is no Puffin file")
            if offset + size > os.fstat(file.fileno()).st_size:
                raise _wrong(path, "it goes on past the end of the file")
            file.seek(offset)
            blob = file.read(size)
    except FileNotFoundError:
        return  # its reader says that it is gone
    except NotRegular as error:
        raise InvalidArgument(str(error)) from None
    except OSError as error:
        raise TableUnavailable(f"the file {shown(path)} cannot be read: {type(error).__name__}") from error
    length, said = (int.from_bytes(part, "big") for part in (blob[:4], blob[-4:]))
    if length != size - 8 or blob[4:8] != _VECTOR or zlib.crc32(blob[4:-4]) != said:
        raise _wrong(path, "its length, its magic number or its checksum is wrong")
    bitmaps = int.from_bytes(blob[8:16], "little")
    if bitmaps > _FIRST_ONLY or (bitmaps and any(blob[_KEY])):
        raise _wrong(path, "it is for rows past the first four billion of a file")


def _wrong(path: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"a deletion vector in the file {shown(path)} is not read: {what}")
