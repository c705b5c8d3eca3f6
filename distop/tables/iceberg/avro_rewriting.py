"""Rewrites the records of an Avro file, such as a manifest. Its schema, and the metadata in its header, stay.

So fields that are not known here keep their values, in any version of the format. Records are dictionaries by the names
of their fields, and optional values are None or the value.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

from distop.tables.iceberg.avro import Damaged, blocks, check

if TYPE_CHECKING:
    from collections.abc import Callable

MAGIC = b"Obj\x01"
_SYNC = 16
_SCHEMA, _CODEC = "avro.schema", "avro.codec"
_BLOCK = 1 << 20
"""Bytes of records in a new block."""
_LONGEST = 10
"""Maximum bytes of a number."""
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")


def rewritten(
    data: bytes,
    change: Callable[[dict[str, Any]], dict[str, Any] | None],
    location: str,
    interrupt: Callable[[], None] = lambda: None,
) -> tuple[bytes, int]:
    """A file with changed records, and their number. ``change`` returns None to leave out a record.

    ``interrupt`` is called regularly, and raises to stop. Raises Damaged, and InvalidArgument if the file exceeds the
    limits of a manifest.
    """
    check(data, location)
    try:
        header, schema, at = _header(data)
        types = _AvroTypes(schema)
        sync = hashlib.sha256(data).digest()[:_SYNC]
        out = bytearray(_header_of({**header, _CODEC: b"deflate"}, sync))
        block, pending, written = bytearray(), 0, 0

        def flush() -> None:
            nonlocal pending
            packing = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            packed = packing.compress(bytes(block)) + packing.flush()
            out.extend(_number(pending) + _number(len(packed)) + packed + sync)
            block.clear()
            pending = 0

        for count, content in blocks(data, header.get(_CODEC, b"null"), at):
            reader = _ByteReader(content)
            for n in range(count):
                if n % 1_000 == 0:
                    interrupt()
                record = change(types.read(schema, reader))
                if record is None:
                    continue
                types.write(schema, record, block)
                pending, written = pending + 1, written + 1
                if len(block) > _BLOCK:
                    flush()
            if reader.at != len(content):
                raise ValueError("a block has more bytes than records")
        if pending:
            flush()
        return bytes(out), written
    except (ValueError, KeyError, TypeError, IndexError, struct.error, RecursionError) as error:
        raise Damaged(f"the file {location} is damaged: {error}") from error


class _ByteReader:
    """Bytes that are read from the start."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if count < 0 or len(found) != count:
            raise ValueError("it ends within a value")
        self.at += count
        return found

    def number(self) -> int:
        found = 0
        for shift in range(_LONGEST):
            byte = self.take(1)[0]
            found |= (byte & 0x7F) << 7 * shift
            if not byte & 0x80:
                return (found >> 1) ^ -(found & 1)
        raise ValueError("a number is too long")

    def text(self) -> bytes:
        return self.take(self.number())


def _number(value: int) -> bytes:
    rest, found = (value << 1) ^ (value >> 63), bytearray()
    while rest & ~0x7F:
        found.append((rest & 0x7F) | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def _text(value: bytes) -> bytes:
    return _number(len(value)) + value


def _header(data: bytes) -> tuple[dict[str, bytes], Any, int]:
    """The metadata of a file, its schema, and where its blocks start."""
    reader, found = _ByteReader(data, len(MAGIC)), dict[str, bytes]()
    while count := reader.number():
        if count < 0:
            count = -count
            reader.number()
        for _ in range(count):
            name = reader.text().decode()
            found[name] = reader.text()
    return found, json.loads(found[_SCHEMA]), reader.at + _SYNC


def _header_of(header: dict[str, bytes], sync: bytes) -> bytes:
    parts = [MAGIC, _number(len(header))]
    for name, value in header.items():
        parts += [_text(name.encode()), _text(value)]
    return b"".join((*parts, _number(0), sync))


class _AvroTypes:
    """Reads and writes values of Avro's types. Named types are defined once, and then used by name."""

    def __init__(self, schema: Any) -> None:
        self._named: dict[str, Any] = {}
        self._find_named(schema)

    def _find_named(self, schema: Any) -> None:
        if isinstance(schema, list):
            for one in schema:
                self._find_named(one)
        elif isinstance(schema, dict):
            if "name" in schema and schema.get("type") in ("record", "fixed", "enum"):
                self._named[schema["name"]] = schema
            for field in schema.get("fields", ()):
                self._find_named(field["type"])
            for part in ("type", "items", "values"):
                if isinstance(schema.get(part), dict | list):
                    self._find_named(schema[part])

    def read(self, schema: Any, reader: _ByteReader) -> Any:
        if isinstance(schema, list):
            number = reader.number()
            if not 0 <= number < len(schema):
                raise ValueError("a union has no such type")
            value = self.read(schema[number], reader)
            return value if _is_optional(schema) else (number, value)
        kind = schema["type"] if isinstance(schema, dict) else schema
        match kind:
            case "null":
                return None
            case "boolean":
                return reader.take(1) == b"\x01"
            case "int" | "long" | "enum":
                return reader.number()
            case "float":
                return _FLOAT.unpack(reader.take(4))[0]
            case "double":
                return _DOUBLE.unpack(reader.take(8))[0]
            case "bytes":
                return reader.text()
            case "string":
                return reader.text().decode()
            case "fixed":
                return reader.take(schema["size"])
            case "record":
                return {field["name"]: self.read(field["type"], reader) for field in schema["fields"]}
            case "array":
                return self._read_items(reader, lambda: self.read(schema["items"], reader))
            case "map":
                return self._read_items(reader, lambda: (reader.text(), self.read(schema["values"], reader)))
        return self.read(self._inner(kind), reader)

    def _read_items(self, reader: _ByteReader, one: Callable[[], Any]) -> list[Any]:
        found: list[Any] = []
        while count := reader.number():
            if count < 0:
                count = -count
                reader.number()
            if count > len(reader.data):  # each has a byte at least
                raise ValueError("a list is too long")
            found += [one() for _ in range(count)]
        return found

    def write(self, schema: Any, value: Any, out: bytearray) -> None:
        if isinstance(schema, list):
            if _is_optional(schema):
                null = schema.index("null")
                number = null if value is None else 1 - null
            else:
                number, value = value
            out += _number(number)
            self.write(schema[number], value, out)
            return
        kind = schema["type"] if isinstance(schema, dict) else schema
        match kind:
            case "null":
                pass
            case "boolean":
                out.append(1 if value else 0)
            case "int" | "long" | "enum":
                out += _number(value)
            case "float":
                out += _FLOAT.pack(value)
            case "double":
                out += _DOUBLE.pack(value)
            case "bytes":
                out += _text(value)
            case "string":
                out += _text(value.encode())
            case "fixed":
                out += value
            case "record":
                for field in schema["fields"]:
                    self.write(field["type"], value[field["name"]], out)
            case "array" | "map":
                if value:
                    out += _number(len(value))
                for one in value:
                    if kind == "map":
                        out += _text(one[0])
                        self.write(schema["values"], one[1], out)
                    else:
                        self.write(schema["items"], one, out)
                out += _number(0)
            case _:
                self.write(self._inner(kind), value, out)

    def _inner(self, kind: Any) -> Any:
        """A type that is given by its name, or within another one."""
        if isinstance(kind, str):
            return self._named[kind]
        return kind


def _is_optional(schema: list[Any]) -> bool:
    return len(schema) == 2 and "null" in schema
