"""Parquet footers and page headers, rewritten: Thrift's compact protocol, by hand."""

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
"""The codec whose blocks Hadoop frames in a way of its own."""
_ROW_GROUPS, _COLUMN_ORDERS, _CREATED_BY = 4, 7, 6
_CHUNKS, _META, _PATH, _STATISTICS = 1, 3, 3, 12
_MAX, _MIN, _MAX_VALUE, _MIN_VALUE, _MAX_EXACT, _MIN_EXACT = 1, 2, 5, 6, 7, 8

_SCHEMA, _REPETITION, _NAME, _CONVERTED, _PRECISION, _LOGICAL = 2, 3, 4, 6, 8, 10
_PLACES, _SIZES = (6, 7, 9, 10, 11), 16
"""Of a column chunk: sizes of its pages and offsets of the first data, index and dictionary page; level histograms."""
INT_8, INT_16, UINT_8 = 15, 16, 11
"""Some of Parquet's old logical types."""

Fields = dict[int, tuple[int, Any]]
"""A struct: type and value by field. Numbers stay the bytes that they are."""


def with_old_statistics(path: Path, bounds: Mapping[str, tuple[bytes, bytes]], writer: str) -> None:
    """Rewrite the footer: each column's minimum and maximum stand in the deprecated fields alone, those of ``bounds``
    as given; the order of columns is not told.
    """

    def change(footer: Fields) -> None:
        del footer[_COLUMN_ORDERS]
        footer[_CREATED_BY] = (_BINARY, writer.encode())
        for _, group in footer[_ROW_GROUPS][1][1]:
            for _, chunk in group[_CHUNKS][1][1]:
                meta = chunk[_META][1]
                name = ".".join(part.decode() for _, part in meta[_PATH][1][1])
                found: Fields = meta[_STATISTICS][1]
                low, high = bounds.get(name) or (found[_MIN_VALUE][1], found[_MAX_VALUE][1])
                for field in (_MAX_VALUE, _MIN_VALUE, _MAX_EXACT, _MIN_EXACT):
                    found.pop(field, None)
                found[_MIN], found[_MAX] = (_BINARY, low), (_BINARY, high)

    rewrite(path, change)


def rewrite(path: Path, change: Callable[[Fields], None], *, padded: bool = False) -> None:
    """Rewrite the footer's fields by ``change``. ``padded``: keep the file's length."""
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer, _ = _read_struct(data, len(data) - 8 - size)
    change(footer)
    written = _struct(footer)
    room = size - len(written)
    assert room >= 0 or not padded, "the footer is longer than it was"
    pages = data[: len(data) - 8 - size] + bytes(room if padded else 0)
    path.write_bytes(pages + written + len(written).to_bytes(4, "little") + b"PAR1")


def with_rows(path: Path, rows: int) -> None:
    """The footer counts so many rows, whatever its row groups hold."""
    rewrite(path, lambda footer: footer.update({_ROWS: (_I64, _whole(rows))}))


def with_rows_of_groups(path: Path, *rows: int) -> None:
    """Each row group counts so many rows, and the footer the sum of them."""

    def change(footer: Fields) -> None:
        footer[_ROWS] = (_I64, _whole(sum(rows)))
        for (_, group), count in zip(footer[_ROW_GROUPS][1][1], rows, strict=True):
            group[_ROWS] = (_I64, _whole(count))

    rewrite(path, change)


def with_codec(path: Path, codec: int) -> None:
    """By the footer, all pages are compressed with this codec."""
    rewrite(path, lambda footer: _each(footer, lambda meta: meta.update({_CODEC: (_I32, _whole(codec))})))


def with_values(path: Path, values: int) -> None:
    """The footer counts so many values of each column in each row group."""
    rewrite(path, lambda footer: _each(footer, lambda meta: meta.update({_VALUES: (_I64, _whole(values))})))


def with_values_of(path: Path, column: str, values: int) -> None:
    """The footer counts so many values of a top-level column in each row group, and has no statistics of it."""

    def change(meta: Fields) -> None:
        if meta[_PATH][1][1][0][1] == column.encode():
            meta[_VALUES] = (_I64, _whole(values))
            meta.pop(_STATISTICS, None)
            meta.pop(_SIZES, None)

    rewrite(path, lambda footer: _each(footer, change))


def with_nulls(path: Path, nulls: int) -> None:
    """The footer counts so many NULLs of each column in each row group."""
    rewrite(
        path, lambda footer: _each(footer, lambda meta: meta[_STATISTICS][1].update({_NULLS: (_I64, _whole(nulls))}))
    )


def with_nulls_alone(path: Path, nulls: int) -> None:
    """The footer counts so many NULLs of each column in each row group, and has no other statistics."""
    statistics = (_STRUCT, {_NULLS: (_I64, _whole(nulls))})
    rewrite(path, lambda footer: _each(footer, lambda meta: meta.update({_STATISTICS: statistics})))


def with_bounds(path: Path, group: int, column: str, low: bytes, high: bytes) -> None:
    """The footer gives a column these bounds in one row group. Bounds of the same length keep the file's length."""

    def change(footer: Fields) -> None:
        for _, chunk in footer[_ROW_GROUPS][1][1][group][1][_CHUNKS][1][1]:
            meta = chunk[_META][1]
            if ".".join(part.decode() for _, part in meta[_PATH][1][1]) == column:
                found: Fields = meta[_STATISTICS][1]
                for field, bound in ((_MIN, low), (_MAX, high), (_MIN_VALUE, low), (_MAX_VALUE, high)):
                    if field in found:
                        found[field] = (_BINARY, bound)

    rewrite(path, change)


def without_statistics(path: Path) -> None:
    """The footer has no statistics."""
    rewrite(path, lambda footer: _each(footer, lambda meta: meta.pop(_STATISTICS)))


def _each(footer: Fields, change: Callable[[Fields], None]) -> None:
    """Change the metadata of each column in each row group."""
    for _, group in footer[_ROW_GROUPS][1][1]:
        for _, chunk in group[_CHUNKS][1][1]:
            change(chunk[_META][1])


def with_group_rows(path: Path, group: int, rows: int) -> None:
    """The footer counts so many rows in one row group; the total follows, the column chunks do not."""

    def change(footer: Fields) -> None:
        groups = row_groups(footer)
        footer[_ROWS] = (_I64, _whole(_number(footer[_ROWS]) - _number(groups[group][_ROWS]) + rows))
        groups[group][_ROWS] = (_I64, _whole(rows))

    rewrite(path, change)


def with_chunks(path: Path, group: int, order: Sequence[int]) -> None:
    """One row group lists these of its column chunks, in this order.

    Their sizes by level are dropped: pyarrow aborts on those of texts in the place of numbers.
    """

    def change(footer: Fields) -> None:
        _each(footer, lambda meta: meta.pop(_SIZES, None))
        kind, (inner, chunks) = row_groups(footer)[group][_CHUNKS]
        row_groups(footer)[group][_CHUNKS] = (kind, (inner, [chunks[n] for n in order]))

    rewrite(path, change)


def with_shared_pages(path: Path, *, statistics: bool) -> None:
    """The second row group has the pages of the first one, and its statistics if ``statistics``."""

    def change(footer: Fields) -> None:
        first, second = (columns_of(group) for group in row_groups(footer)[:2])
        for one, other in zip(first, second, strict=True):
            for field in (*_PLACES, *([_STATISTICS] if statistics else [])):
                other.pop(field, None)
                if field in one:
                    other[field] = one[field]

    rewrite(path, change)


def with_required(path: Path, column: str) -> None:
    """By the schema, the column has a value in each row. Its sizes by level are dropped."""

    def change(footer: Fields) -> None:
        schema_element(footer, column)[_REPETITION] = (_I32, _whole(0))
        for group in row_groups(footer):
            for meta in columns_of(group):
                meta.pop(_SIZES, None)

    rewrite(path, change)


def with_converted_type(path: Path, column: str, kind: int) -> None:
    """By the schema, the column's numbers are of another of Parquet's old logical types."""

    def change(footer: Fields) -> None:
        element = schema_element(footer, column)
        element[_CONVERTED] = (_I32, _whole(kind))
        element.pop(_LOGICAL, None)

    rewrite(path, change)


def with_precision(path: Path, column: str, digits: int) -> None:
    """By the schema, the column's decimals have so many digits."""

    def change(footer: Fields) -> None:
        element = schema_element(footer, column)
        element[_PRECISION] = (_I32, _whole(digits))
        element.pop(_LOGICAL, None)

    rewrite(path, change)


def row_groups(footer: Fields) -> list[Fields]:
    """The row groups of a footer."""
    return [group for _, group in footer[_ROW_GROUPS][1][1]]


def columns_of(group: Fields) -> list[Fields]:
    """The metadata of each column chunk of a row group."""
    return [chunk[_META][1] for _, chunk in group[_CHUNKS][1][1]]


def schema_element(footer: Fields, name: str) -> Fields:
    """The first element of this name in a footer's schema."""
    found: Fields = next(one for _, one in footer[_SCHEMA][1][1] if one.get(_NAME, (0, b""))[1] == name.encode())
    return found


def _number(field: tuple[int, bytes]) -> int:
    raw, _ = _varint(field[1], 0)
    return (raw >> 1) ^ -(raw & 1)


def misplaced(path: Path, *, size: int = 1 << 24, padded: bool = False) -> None:
    """The footer gives the last column's pages ``size`` bytes.

    So readers that split a file by the middle of its row groups skip a row group.
    """

    def change(footer: Fields) -> None:
        for _, group in footer[_ROW_GROUPS][1][1]:
            # Sums that writers may leave out.
            for field in (_GROUP_OFFSET, _GROUP_COMPRESSED):
                group.pop(field, None)
            group[_CHUNKS][1][1][-1][1][_META][1][_COMPRESSED] = (_I64, _whole(size))

    rewrite(path, change, padded=padded)


def left_out(path: Path) -> None:
    """The footer gives each row group more bytes than the file has, and its column chunks the right ones.

    So readers that split a file by the middle of its row groups skip them.
    """

    def change(footer: Fields) -> None:
        for group in row_groups(footer):
            group[_GROUP_COMPRESSED] = (_I64, _whole(1 << 24))

    rewrite(path, change)


def of_unknown_type(path: Path) -> None:
    """The footer gives the first column's pages an unknown type: pyarrow aborts on it."""

    def change(footer: Fields) -> None:
        footer[_ROW_GROUPS][1][1][0][1][_CHUNKS][1][1][0][1][_META][1][_TYPE] = (_I32, _whole(99))

    rewrite(path, change)


def with_huge_page(path: Path, size: int) -> None:
    """The header of the first page states ``size`` uncompressed bytes.

    The file has one column.
    """
    data = path.read_bytes()
    header, end = _read_struct(data, 4)
    header[_HEADER_UNCOMPRESSED] = (_I32, _whole(size))
    written = _struct(header)
    path.write_bytes(data[:4] + written + data[end:])
    more = len(written) - (end - 4)

    def change(footer: Fields) -> None:
        meta = footer[_ROW_GROUPS][1][1][0][1][_CHUNKS][1][1][0][1][_META][1]
        (found, _) = _varint(meta[_COMPRESSED][1], 0)
        meta[_COMPRESSED] = (_I64, _whole((found >> 1) + more))

    rewrite(path, change)


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
        assert 0 < number - last < 16, "the fields of Parquet's footers are close together"
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
