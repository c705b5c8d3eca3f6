"""Parquet footers as old writers left them, which no writer of today can be asked for.

A footer is a Thrift struct in the compact protocol: it is read into ``{field: (type, value)}``, changed, and written.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Fields = dict[int, tuple[int, Any]]

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_VARINTS = (4, 5, 6)

ROW_GROUPS, CREATED_BY, COLUMN_ORDERS = 4, 6, 7  # of FileMetaData
COLUMNS, META_DATA, STATISTICS = 1, 3, 12  # of RowGroup, ColumnChunk, ColumnMetaData
OLD_MAX, OLD_MIN, MAX, MIN = 1, 2, 5, 6  # of Statistics


def as_old_writers_did(path: Path, writer: bytes, bounds: dict[str, tuple[bytes, bytes]]) -> None:
    """Leave of a file's bounds the deprecated ``min`` and ``max`` alone. ``bounds``: column → both, as a writer that
    compared signed bytes found them.
    """
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    fields = _Reader(data[-8 - size : -8]).fields()
    fields.pop(COLUMN_ORDERS)
    fields[CREATED_BY] = (_BINARY, writer)
    for group in fields[ROW_GROUPS][1][1]:
        for chunk in group[COLUMNS][1][1]:
            column = chunk[META_DATA][1]
            name = b".".join(column[3][1][1]).decode()
            statistics = column[STATISTICS][1]
            for field in [field for field in statistics if field not in (3, 4)]:
                del statistics[field]
            low, high = bounds[name]
            statistics |= {OLD_MAX: (_BINARY, high), OLD_MIN: (_BINARY, low)}
    footer = _struct(fields)
    path.write_bytes(data[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def fields(self) -> Fields:
        found: Fields = {}
        number = 0
        while (head := self._take(1)[0]) != 0:
            delta, kind = head >> 4, head & 0x0F
            number = number + delta if delta else _unzigzag(self._varint())
            found[number] = (kind, self._value(kind))
        return found

    def _value(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return None
        if kind in _VARINTS:
            return self._varint()
        if kind == _BYTE:
            return self._take(1)
        if kind == _DOUBLE:
            return self._take(8)
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.fields()
        assert kind in (_LIST, _SET), f"a field of type {kind}"
        head = self._take(1)[0]
        size = head >> 4 if head >> 4 < 15 else self._varint()
        inner = head & 0x0F
        # Elements that are booleans have a byte each.
        return inner, [self._take(1) if inner in (_TRUE, _FALSE) else self._value(inner) for _ in range(size)]


def _unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _struct(fields: Fields) -> bytes:
    out, before = b"", 0
    for number, (kind, value) in sorted(fields.items()):
        assert 0 < number - before < 16
        out += bytes([(number - before) << 4 | kind]) + _written(kind, value)
        before = number
    return out + b"\0"


def _written(kind: int, value: Any) -> bytes:
    if value is None:
        return b""
    if kind in _VARINTS:
        return _varint(value)
    if kind == _BINARY:
        return _varint(len(value)) + bytes(value)
    if kind == _STRUCT:
        return _struct(value)
    if kind in (_LIST, _SET):
        inner, items = value
        size = bytes([len(items) << 4 | inner]) if len(items) < 15 else bytes([0xF0 | inner]) + _varint(len(items))
        return size + b"".join(item if inner in (_TRUE, _FALSE) else _written(inner, item) for item in items)
    return bytes(value)
