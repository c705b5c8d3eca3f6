"""Checks the page headers of a Parquet file against its footer.

A reader allocates the size that a page header states. A damaged header may state more memory than the JVM has, and the
JVM then dies without naming the file. So files that may have crashed a process are checked here before they are read
again. No page is decompressed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from distop.storage.files import open_filesystem, open_regular
from distop.tables.reading import parquet_tail
from distop.tables.reading.file_facts import Unreadable, folded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    Reader = Callable[[int, int], bytes]
    """Reads (offset, count): at most ``count`` bytes of a file from an offset on."""

WINDOW = 4 * 1024
"""Bytes read for a header at first; a header with long statistics is longer."""
MOST = 16 * 1024 * 1024
"""Maximum bytes of a header."""
_STRUCT, _LIST, _SET, _MAP, _BINARY, _DOUBLE, _BYTE, _TRUE, _FALSE = 12, 9, 10, 11, 8, 7, 3, 1, 2
_TYPE, _UNCOMPRESSED, _COMPRESSED = 1, 2, 3
_DATA_V1, _DICTIONARY = 0, 2
_FRAMED = "UNKNOWN"
"""pyarrow's name for the old codec LZ4, of which Hadoop frames each block by two sizes of four bytes.

pyarrow's "LZ4" is the codec LZ4_RAW.
"""
_DEPTH = 32
"""Maximum nesting of a header's structs."""


class _Torn(Exception):
    """The bytes end within a header, or are not a header."""


def check(path: str, columns: Collection[str], progress: Callable[[], None] = lambda: None) -> None:
    """Check the pages of these top-level columns against the file's footer; ``progress`` is called for each read.

    :mod:`parquet_tail` must be able to read the footer. Raises Unreadable if a page contradicts it, and OSError.
    """

    def reporting(read: Reader) -> Reader:
        def one(offset: int, count: int) -> bytes:
            progress()
            return read(offset, count)

        return one

    metadata = parquet_tail.read(path).metadata
    if parquet_tail.is_remote(path):
        filesystem, inner = open_filesystem(path)
        with filesystem.open_input_file(inner) as file:
            _check(path, metadata, columns, reporting(lambda offset, count: bytes(file.read_at(count, offset))))
    else:
        with open_regular(path) as opened:
            descriptor = opened.fileno()
            _check(path, metadata, columns, reporting(lambda offset, count: os.pread(descriptor, count, offset)))


def _check(path: str, metadata: Any, columns: Collection[str], read: Reader) -> None:
    wanted = {folded(column) for column in columns}  # Spark finds a column whatever its case
    for n in range(metadata.num_row_groups):
        group = metadata.row_group(n)
        for i in range(group.num_columns):
            chunk = group.column(i)
            column = folded(chunk.path_in_schema)
            if column.split(".")[0] not in wanted and column not in wanted:
                continue
            why = _wrong(chunk, read)
            if why:
                raise Unreadable(
                    f"the file {path} cannot be read: a page of the column {chunk.path_in_schema!r} is damaged ({why})"
                )


def _wrong(chunk: Any, read: Reader) -> str:
    """The fault in a column's pages in one row group; "" if there is none."""
    offset = chunk.dictionary_page_offset or chunk.data_page_offset
    end = offset + chunk.total_compressed_size
    while offset < end:
        try:
            kind, whole, stored, size = _header(read, offset)
        except _Torn:
            return f"there is no page header at byte {offset}"
        if not 0 <= whole <= chunk.total_uncompressed_size:
            return f"its header states {whole} bytes, but all pages together have {chunk.total_uncompressed_size}"
        if not 0 <= stored <= end - offset - size:
            return f"its header states {stored} compressed bytes, but only {end - offset - size} are left"
        if chunk.compression == _FRAMED and kind in (_DATA_V1, _DICTIONARY) and stored:
            block, inside = (int.from_bytes(read(offset + size + at, 4), "big") for at in (0, 4))
            if block > whole or inside > stored - 8:
                return "it is compressed with LZ4 without Hadoop's framing, which Spark expects"
        offset += size + stored
    return ""


def _header(read: Reader, offset: int) -> tuple[int, int, int, int]:
    """A page's type, its uncompressed and compressed size, and its header's size. Raises _Torn."""
    window = WINDOW
    while True:
        data = read(offset, window)
        try:
            found, size = _fields(data, 0)
            return (*(found[field] for field in (_TYPE, _UNCOMPRESSED, _COMPRESSED)), size)  # type: ignore[return-value]
        except KeyError:
            raise _Torn from None
        except (IndexError, _Torn):
            if len(data) < window or window >= MOST:
                raise _Torn from None
            window *= 16


def _fields(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, int], int]:
    """The integer fields of a struct in Thrift's compact protocol, and its end offset."""
    if depth > _DEPTH:
        raise _Torn
    found: dict[int, int] = {}
    number = 0
    while data[at]:
        head = data[at]
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _number(data, at)
        kind = head & 0x0F
        if kind in (_TRUE, _FALSE):
            continue
        value, at = _value(data, at, kind, depth)
        if value is not None:
            found[number] = value
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[int | None, int]:
    if depth > _DEPTH:
        raise _Torn
    if kind == _STRUCT:
        return None, _fields(data, at, depth + 1)[1]
    if kind in (_LIST, _SET):
        inner, count = data[at] & 0x0F, data[at] >> 4
        at += 1
        if count == 15:
            count, at = _varint(data, at)
        for _ in range(count):
            at = _value(data, at, inner, depth + 1)[1] if inner not in (_TRUE, _FALSE) else _within(data, at + 1)
        return None, at
    if kind == _BINARY:
        size, at = _varint(data, at)
        return None, _within(data, at + size)
    if kind in (_DOUBLE, _BYTE):
        return None, _within(data, at + (8 if kind == _DOUBLE else 1))
    if kind in (4, 5, 6):
        return _number(data, at)
    raise _Torn  # a page header has no map and no other type


def _within(data: bytes, at: int) -> int:
    if at > len(data):
        raise _Torn
    return at


def _number(data: bytes, at: int) -> tuple[int, int]:
    raw, at = _varint(data, at)
    return (raw >> 1) ^ -(raw & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise _Torn
