"""Rewrites Parquet footers and page headers (in Thrift's compact protocol), for damaged or unusual files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_STRUCT, _LIST, _SET, _BINARY, _DOUBLE, _BYTE, _TRUE, _FALSE = 12, 9, 10, 8, 7, 3, 1, 2
_I32, _I64 = 5, 6
_ROWS, _GROUP_OFFSET, _GROUP_COMPRESSED, _TYPE, _VALUES, _COMPRESSED = 3, 5, 6, 1, 5, 7
_HEADER_UNCOMPRESSED, _NULLS, _CODEC = 2, 3, 4
HADOOP_LZ4 = 5
"""The codec LZ4 with Hadoop's own framing of blocks."""
_ROW_GROUPS, _COLUMN_ORDERS, _CREATED_BY = 4, 7, 6
_CHUNKS, _META, _PATH, _STATISTICS = 1, 3, 3, 12
_MAX, _MIN, _MAX_VALUE, _MIN_VALUE, _MAX_EXACT, _MIN_EXACT = 1, 2, 5, 6, 7, 8

_SCHEMA, _REPETITION, _NAME, _CONVERTED, _PRECISION, _LOGICAL = 2, 3, 4, 6, 8, 10
_PLACES, _SIZES = (6, 7, 9, 10, 11), 16
"""Fields of a column chunk: sizes and offsets of pages; and size statistics with level histograms."""
INT_8, INT_16, UINT_8 = 15, 16, 11
"""Some of Parquet's deprecated logical types."""

Fields = dict[int, tuple[int, Any]]
"""A struct: type and value by field number. Numbers are kept as encoded bytes."""


def rewrite(path: Path, change: Callable[[Fields], object], *, padded: bool = False) -> None:
    """Change the fields of the footer with ``change``. ``padded``: keep the file's length."""
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer, _ = _read_struct(data, len(data) - 8 - size)
    change(footer)
    written = _struct(footer)
    room = size - len(written)
    assert room >= 0 or not padded, "the new footer is too long to keep the file's length"
    pages = data[: len(data) - 8 - size] + bytes(room if padded else 0)
    path.write_bytes(pages + written + len(written).to_bytes(4, "little") + b"PAR1")


def _rewrite_columns(path: Path, change: Callable[[Fields], object]) -> None:
    """Change the metadata of each column chunk of each row group with ``change``."""
    rewrite(path, lambda footer: [change(meta) for group in row_groups(footer) for meta in columns_of(group)])


def _rewrite_schema(path: Path, column: str, field: int, value: int) -> None:
    """Set one field of a column in the schema, and remove its logical type."""

    def change(footer: Fields) -> None:
        element = schema_element(footer, column)
        element[field] = _i32(value)
        element.pop(_LOGICAL, None)

    rewrite(path, change)


def row_groups(footer: Fields) -> list[Fields]:
    """The row groups of a footer."""
    return [group for _, group in footer[_ROW_GROUPS][1][1]]


def columns_of(group: Fields) -> list[Fields]:
    """The metadata of each column chunk of a row group."""
    return [chunk[_META][1] for _, chunk in group[_CHUNKS][1][1]]


def schema_element(footer: Fields, name: str) -> Fields:
    """The first element with this name in the schema of a footer."""
    found: Fields = next(one for _, one in footer[_SCHEMA][1][1] if one.get(_NAME, (0, b""))[1] == name.encode())
    return found


def _name_of(meta: Fields) -> str:
    return ".".join(part.decode() for _, part in meta[_PATH][1][1])


def with_old_statistics(path: Path, bounds: Mapping[str, tuple[bytes, bytes]], writer: str) -> None:
    """Move minimum and maximum to the deprecated fields, and remove the column orders.

    ``bounds`` replaces the bounds of some columns; ``writer`` is the new ``created_by``.
    """

    def change(footer: Fields) -> None:
        del footer[_COLUMN_ORDERS]
        footer[_CREATED_BY] = (_BINARY, writer.encode())
        for meta in (meta for group in row_groups(footer) for meta in columns_of(group)):
            found: Fields = meta[_STATISTICS][1]
            low, high = bounds.get(_name_of(meta)) or (found[_MIN_VALUE][1], found[_MAX_VALUE][1])
            for field in (_MAX_VALUE, _MIN_VALUE, _MAX_EXACT, _MIN_EXACT):
                found.pop(field, None)
            found[_MIN], found[_MAX] = (_BINARY, low), (_BINARY, high)

    rewrite(path, change)


def with_rows(path: Path, rows: int) -> None:
    """Set the total number of rows in the footer, without changing the row groups."""
    rewrite(path, lambda footer: footer.update({_ROWS: _i64(rows)}))


def with_rows_of_groups(path: Path, *rows: int) -> None:
    """Set the number of rows of each row group, and the total to their sum."""

    def change(footer: Fields) -> None:
        footer[_ROWS] = _i64(sum(rows))
        for group, count in zip(row_groups(footer), rows, strict=True):
            group[_ROWS] = _i64(count)

    rewrite(path, change)


def with_group_rows(path: Path, number: int, rows: int) -> None:
    """Set the number of rows of one row group and adjust the total, without changing the column chunks."""

    def change(footer: Fields) -> None:
        group = row_groups(footer)[number]
        footer[_ROWS] = _i64(_number(footer[_ROWS]) - _number(group[_ROWS]) + rows)
        group[_ROWS] = _i64(rows)

    rewrite(path, change)


def with_codec(path: Path, codec: int) -> None:
    """Set the compression codec of all pages."""
    _rewrite_columns(path, lambda meta: meta.update({_CODEC: _i32(codec)}))


def with_values(path: Path, values: int) -> None:
    """Set the number of values of each column in each row group."""
    _rewrite_columns(path, lambda meta: meta.update({_VALUES: _i64(values)}))


def with_values_of(path: Path, column: str, values: int) -> None:
    """Set the number of values of a top-level column in each row group, and remove its statistics."""

    def change(meta: Fields) -> None:
        if meta[_PATH][1][1][0][1] == column.encode():
            meta[_VALUES] = _i64(values)
            meta.pop(_STATISTICS, None)
            meta.pop(_SIZES, None)

    _rewrite_columns(path, change)


def with_nulls(path: Path, nulls: int) -> None:
    """Set the number of NULLs of each column in each row group."""
    _rewrite_columns(path, lambda meta: meta[_STATISTICS][1].update({_NULLS: _i64(nulls)}))


def with_nulls_alone(path: Path, nulls: int) -> None:
    """Replace the statistics of each column in each row group by a number of NULLs."""
    _rewrite_columns(path, lambda meta: meta.update({_STATISTICS: (_STRUCT, {_NULLS: _i64(nulls)})}))


def without_statistics(path: Path) -> None:
    """Remove all statistics."""
    _rewrite_columns(path, lambda meta: meta.pop(_STATISTICS))


def with_bounds(path: Path, number: int, column: str, low: bytes, high: bytes) -> None:
    """Set the bounds of a column in one row group. Bounds of the same length keep the file's length."""

    def change(footer: Fields) -> None:
        for meta in columns_of(row_groups(footer)[number]):
            if _name_of(meta) == column:
                found: Fields = meta[_STATISTICS][1]
                for field, bound in ((_MIN, low), (_MAX, high), (_MIN_VALUE, low), (_MAX_VALUE, high)):
                    if field in found:
                        found[field] = (_BINARY, bound)

    rewrite(path, change)


def with_chunks(path: Path, number: int, order: Sequence[int]) -> None:
    """List only these column chunks of one row group, in this order.

    Removes their size statistics: pyarrow aborts if a column of numbers has those of texts.
    """

    def change(footer: Fields) -> None:
        group = row_groups(footer)[number]
        kind, (inner, chunks) = group[_CHUNKS]
        group[_CHUNKS] = (kind, (inner, [chunks[n] for n in order]))

    _rewrite_columns(path, lambda meta: meta.pop(_SIZES, None))
    rewrite(path, change)


def with_shared_pages(path: Path, *, statistics: bool) -> None:
    """Give the second row group the pages of the first one, and its statistics if ``statistics``."""

    def change(footer: Fields) -> None:
        first, second = (columns_of(group) for group in row_groups(footer)[:2])
        for one, other in zip(first, second, strict=True):
            for field in (*_PLACES, *([_STATISTICS] if statistics else [])):
                other.pop(field, None)
                if field in one:
                    other[field] = one[field]

    rewrite(path, change)


def with_required(path: Path, column: str) -> None:
    """Make the column required in the schema, and remove all size statistics."""
    _rewrite_columns(path, lambda meta: meta.pop(_SIZES, None))
    rewrite(path, lambda footer: schema_element(footer, column).update({_REPETITION: _i32(0)}))


def with_converted_type(path: Path, column: str, kind: int) -> None:
    """Set a deprecated logical type for a column of numbers."""
    _rewrite_schema(path, column, _CONVERTED, kind)


def with_precision(path: Path, column: str, digits: int) -> None:
    """Set the number of digits of a column of decimals."""
    _rewrite_schema(path, column, _PRECISION, digits)


def misplaced(path: Path, *, size: int = 1 << 24, padded: bool = False) -> None:
    """Set the size of the last column's pages to ``size`` bytes.

    Readers that assign row groups to splits by their middle then skip a row group.
    """

    def change(footer: Fields) -> None:
        for group in row_groups(footer):
            # Optional sums.
            for field in (_GROUP_OFFSET, _GROUP_COMPRESSED):
                group.pop(field, None)
            columns_of(group)[-1][_COMPRESSED] = _i64(size)

    rewrite(path, change, padded=padded)


def left_out(path: Path) -> None:
    """Set the size of each row group to more bytes than the file has, without changing the column chunks.

    Readers that assign row groups to splits by their middle then skip them.
    """
    rewrite(path, lambda footer: [group.update({_GROUP_COMPRESSED: _i64(1 << 24)}) for group in row_groups(footer)])


def of_unknown_type(path: Path) -> None:
    """Set an unknown type for the first column, on which pyarrow aborts."""
    rewrite(path, lambda footer: columns_of(row_groups(footer)[0])[0].update({_TYPE: _i32(99)}))


def with_huge_page(path: Path, size: int) -> None:
    """Set the uncompressed size in the header of the first page of a file with one column."""
    data = path.read_bytes()
    header, end = _read_struct(data, 4)
    header[_HEADER_UNCOMPRESSED] = _i32(size)
    written = _struct(header)
    path.write_bytes(data[:4] + written + data[end:])
    more = len(written) - (end - 4)

    def change(footer: Fields) -> None:
        meta = columns_of(row_groups(footer)[0])[0]
        meta[_COMPRESSED] = _i64(_number(meta[_COMPRESSED]) + more)

    rewrite(path, change)


def _number(field: tuple[int, bytes]) -> int:
    raw, _ = _varint(field[1], 0)
    return (raw >> 1) ^ -(raw & 1)


def _i32(value: int) -> tuple[int, bytes]:
    return _I32, _whole(value)


def _i64(value: int) -> tuple[int, bytes]:
    return _I64, _whole(value)


def _whole(value: int) -> bytes:
    return _length(value << 1 if value >= 0 else (-value << 1) - 1)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _read_struct(data: bytes, at: int) -> tuple[Fields, int]:
    fields: Fields = {}
    number = 0
    while data[at]:
        head = data[at]
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            raw, at = _varint(data, at)
            number = (raw >> 1) ^ -(raw & 1)
        kind = head & 0x0F
        value: Any = None
        if kind not in (_TRUE, _FALSE):
            value, at = _read(data, at, kind)
        fields[number] = (kind, value)
    return fields, at + 1


def _read(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRUCT:
        return _read_struct(data, at)
    if kind in (_LIST, _SET):
        inner, count = data[at] & 0x0F, data[at] >> 4
        at += 1
        if count == 15:
            count, at = _varint(data, at)
        items = []
        for _ in range(count):
            item, at = _read(data, at, inner)
            items.append((inner, item))
        return (inner, items), at
    if kind == _BINARY:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    if kind in (_DOUBLE, _BYTE, _TRUE, _FALSE):
        size = 8 if kind == _DOUBLE else 1
        return data[at : at + size], at + size
    _, end = _varint(data, at)
    return data[at:end], end


def _length(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _struct(fields: Fields) -> bytes:
    out, last = b"", 0
    for number in sorted(fields):
        kind, value = fields[number]
        assert 0 < number - last < 16, "only the short form of field headers is supported"
        out += bytes([(number - last) << 4 | kind]) + _value(kind, value)
        last = number
    return out + b"\0"


def _value(kind: int, value: Any) -> bytes:
    if value is None:
        return b""
    if kind == _STRUCT:
        return _struct(value)
    if kind in (_LIST, _SET):
        inner, items = value
        head = bytes([len(items) << 4 | inner]) if len(items) < 15 else bytes([0xF0 | inner]) + _length(len(items))
        return head + b"".join(_value(inner, item) for _, item in items)
    return _length(len(value)) + value if kind == _BINARY else bytes(value)
