"""Avro files that Python reads as some records, and Java as others.

pyiceberg reads the index of a union as a number of 64 bits, of which Java's decoder drops what is above 32. So the raw
index 2**32 says to Python that there is a value, and to Java that there is none: each skips as padding what the other
takes for the record.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"Obj\x01"
_MARK = bytes(16)
_ABSENT, _PRESENT = b"\x00", b"\x02"
_BOTH = b"\x80\x80\x80\x80\x10"


def _number(value: int) -> bytes:
    """A length, as Avro writes one."""
    left, found = value << 1, b""
    while left > 0x7F:
        found += bytes([left & 0x7F | 0x80])
        left >>= 7
    return found + bytes([left])


def _text(value: bytes) -> bytes:
    return _number(len(value)) + value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, len(_MAGIC)

    def number(self) -> int:
        found = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            found |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return (found >> 1) ^ -(found & 1)

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]


def _parts(path: Path) -> tuple[dict[bytes, bytes], bytes]:
    """The header of a file with one record, and that record."""
    reader = _Reader(path.read_bytes())
    header: dict[bytes, bytes] = {}
    while count := reader.number():
        for _ in range(count):
            name = reader.take(reader.number())
            header[name] = reader.take(reader.number())
    reader.take(len(_MARK))
    assert reader.number() == 1
    record = reader.take(reader.number())
    return header, zlib.decompress(record, -15) if header[b"avro.codec"] == b"deflate" else record


def _padded(schema: dict[str, Any]) -> dict[str, Any]:
    def maybe(name: str, number: int) -> dict[str, Any]:
        return {"name": name, "type": ["null", "bytes"], "default": None, "field-id": number}

    length = {"name": "pad_b", "type": "long", "field-id": 9998}
    return {**schema, "fields": [maybe("pad_a", 9997), length, *schema["fields"], maybe("pad_c", 9999)]}


def exchange_for_java(path: Path, other: Path) -> None:
    """Have Java read the record of an ``other`` file where Python reads that of ``path``. Each holds one record, of the
    same schema.
    """
    header, python = _parts(path)
    java = _parts(other)[1]
    of_python = _number(0) + python + _ABSENT
    of_java = java + _PRESENT + _number(len(of_python))
    # Python: pad_a is all of Java's. Java: pad_a is absent, pad_b is that length, and pad_c all of Python's.
    record = _BOTH + _text(of_java) + of_python
    header |= {b"avro.codec": b"null", b"avro.schema": json.dumps(_padded(json.loads(header[b"avro.schema"]))).encode()}
    meta = _number(len(header)) + b"".join(_text(name) + _text(value) for name, value in header.items()) + _number(0)
    path.write_bytes(_MAGIC + meta + _MARK + _number(1) + _text(record) + _MARK)
