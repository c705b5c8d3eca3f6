"""Decodes records of Iceberg's Avro files safely: never beyond their bytes.

pyiceberg's decoder, written in C, does not check counts and lengths of lists and maps: it would read memory after its
input, or crash the process. A few compressed bytes may also be a list of any length.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyiceberg.avro.decoder import new_decoder
from pyiceberg.avro.file import SYNC_SIZE, AvroFile
from pyiceberg.avro.reader import (
    DefaultReader,
    FixedReader,
    ListReader,
    MapReader,
    OptionReader,
    StructReader,
    UnknownReader,
)
from pyiceberg.avro.resolver import resolve_reader
from pyiceberg.typedef import StructProtocol

from distop.errors import InvalidArgument
from distop.runtime.lru_cache import LruCache
from distop.tables.iceberg.avro import Damaged

if TYPE_CHECKING:
    from pyiceberg.avro.codecs.codec import Codec

RECORD_BYTES = 1 << 20
"""Maximum decompressed bytes of a record; a list of numbers needs some twenty times as much memory. The statistics of a
column have some fifty bytes.
"""

_EMPTY = (DefaultReader, UnknownReader)
"""Readers of values without bytes."""
_NUMBER = 10
"""Maximum bytes of a number."""
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_CONTINUED = bytes(range(0x80, 0x100))
"""Bytes of a number other than its last."""

_SCHEMA = "avro.schema"
CACHED_SCHEMA = 1 << 16
"""Maximum characters of a file's schema whose reader is cached."""
_readers: LruCache[tuple[Any, Any]] = LruCache(16)
"""The readers of files with one schema: to make one takes longer than to read a hundred records."""

D = TypeVar("D", bound=StructProtocol)


class RecordFile(AvroFile[D]):
    """pyiceberg's file of a manifest or a manifest list, with safe decoding.

    Iteration raises InvalidArgument for a record that is too long, Damaged for one that does not end in its block.
    """

    def __enter__(self) -> RecordFile[D]:
        with self.input_file.open() as file:
            self.decoder = new_decoder(file.read())
        self.header = self._read_header()
        written = self.header.meta.get(_SCHEMA, "")
        types, enums = tuple(self.read_types.items()), tuple(self.read_enums.items())
        key = (written, id(self.read_schema), types, enums)
        # The cached value keeps the schema that is read, so that no other one gets its id.
        found = _readers.get(key, lambda: (self.read_schema, self._new_reader()), keep=len(written) <= CACHED_SCHEMA)
        self.reader = found[1]
        return self

    def _new_reader(self) -> Any:
        schema = self.header.get_schema()
        found = resolve_reader(schema, self.read_schema or schema, self.read_types, self.read_enums)
        if _has_unbounded_list(found):
            raise Damaged(f"the file {self.input_file.location} is damaged: it has a list of values without bytes")
        return found

    def _read_block(self) -> int:
        if self.block and self.decoder.read(SYNC_SIZE) != self.header.sync:
            raise Damaged(f"the file {self.input_file.location} is damaged: the end of a block has no sync marker")
        count = self.decoder.read_int()
        data = self.decoder.read_bytes()
        codec: type[Codec] | None = self.header.compression_codec()
        records: Any = _Records(self.reader, count, codec.decompress(data) if codec else data, self.input_file.location)
        self.block = records
        return count


def _has_unbounded_list(reader: Any) -> bool:
    """Whether a list or map has elements without bytes, so that its length is not limited by the file's size."""
    if isinstance(reader, StructReader):
        return any(_has_unbounded_list(field) for _, field in reader.field_readers)
    if isinstance(reader, OptionReader):
        return _has_unbounded_list(reader.option)
    if isinstance(reader, ListReader):
        return _is_empty(reader.element) or _has_unbounded_list(reader.element)
    if isinstance(reader, MapReader):
        parts = (reader.key, reader.value)
        return all(map(_is_empty, parts)) or any(map(_has_unbounded_list, parts))
    return False


def _is_empty(reader: Any) -> bool:
    """Whether values of a reader have no bytes."""
    if isinstance(reader, StructReader):
        return all(_is_empty(field) for _, field in reader.field_readers)
    return isinstance(reader, _EMPTY) or (isinstance(reader, FixedReader) and len(reader) == 0)


class _Records(Generic[D]):
    """The records of a block. The decoder gets parts of the block, of at most twice the size of a record."""

    def __init__(self, reader: Any, count: int, data: bytes, location: str) -> None:
        self._reader = reader
        self._left = count
        self._data = data
        self._location = location
        self._at = 0
        self._decoder = _Decoder(data[: 2 * RECORD_BYTES])

    def has_next(self) -> bool:
        return self._left > 0

    def __next__(self) -> D:
        begin: int = self._decoder.tell()
        if begin > RECORD_BYTES and self._more():
            self._at += begin
            self._decoder, begin = _Decoder(self._data[self._at : self._at + 2 * RECORD_BYTES]), 0
        try:
            record: D = self._reader.read(self._decoder)
            end: int = self._decoder.tell()
            if end > self._decoder.size:
                raise EOFError
        except EOFError:
            if self._more():
                raise self._too_long() from None
            raise self._damaged() from None
        if end - begin > RECORD_BYTES:
            raise self._too_long()
        self._left -= 1
        if self._left == 0 and self._at + end != len(self._data):
            raise self._damaged()
        return record

    def _more(self) -> bool:
        """Whether the block has bytes after the current part."""
        return self._at + self._decoder.size < len(self._data)

    def _too_long(self) -> InvalidArgument:
        return InvalidArgument(
            f"the file {self._location} has an entry of more than {RECORD_BYTES} decompressed bytes, the limit for an "
            "entry: let the table's writer rewrite its manifests"
        )

    def _damaged(self) -> Damaged:
        return Damaged(f"the file {self._location} is damaged: an entry does not end in its block")


class _Decoder:
    """pyiceberg's decoder, which raises EOFError for a count or length that is negative or exceeds its bytes."""

    def __init__(self, data: bytes) -> None:
        # The zero ends an unterminated last number.
        inner = new_decoder(data + b"\0")
        self.size = len(data)
        self._data = data
        self._read, self._ints, self._skip = inner.read, inner.read_ints, inner.skip
        # Of pyiceberg's methods, only these check the end.
        self.tell, self.read_int = inner.tell, inner.read_int

    def read(self, n: int) -> bytes:
        if not 0 <= n <= self.size - self.tell():
            raise EOFError
        return self._read(n)

    def read_boolean(self) -> bool:
        return self.read(1) == b"\1"

    def read_float(self) -> float:
        return float(_FLOAT.unpack(self.read(4))[0])

    def read_double(self) -> float:
        return float(_DOUBLE.unpack(self.read(8))[0])

    def read_bytes(self) -> bytes:
        size = self.read_int()
        return self.read(size) if size else b""

    def read_utf8(self) -> str:
        return self.read_bytes().decode()

    def read_ints(self, n: int) -> Any:
        at = self.tell()
        left = self.size - at
        if not 0 <= n <= left:
            raise EOFError
        if n * _NUMBER > left and len(self._data[at:].translate(None, _CONTINUED)) < n:
            raise EOFError
        return self._ints(n)

    def read_int_bytes_dict(self, n: int, dest: dict[int, bytes]) -> None:
        if n < 0:
            raise EOFError
        read_int, tell, read, end = self.read_int, self.tell, self._read, self.size
        for _ in range(n):
            key, size = read_int(), read_int()
            if not 0 <= size <= end - tell():
                raise EOFError
            dest[key] = read(size) if size else b""

    def skip(self, n: int) -> None:
        if not 0 <= n <= self.size - self.tell():
            raise EOFError
        self._skip(n)

    def skip_bytes(self) -> None:
        self.skip(self.read_int())

    def skip_utf8(self) -> None:
        self.skip(self.read_int())

    def skip_int(self) -> None:
        self.read_int()

    def skip_boolean(self) -> None:
        self.skip(1)

    def skip_float(self) -> None:
        self.skip(4)

    def skip_double(self) -> None:
        self.skip(8)
