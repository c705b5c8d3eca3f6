"""Records of Iceberg's Avro files, decoded within their bytes.

pyiceberg's decoder, which is in C, takes any count and length of a list or a map for true: it reads the memory behind
its bytes, or ends the process. And a few bytes that are compressed may stand for a list of any length.
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
from pyiceberg.typedef import StructProtocol

from distop.errors import InvalidArgument
from distop.tables.iceberg.avro import Damaged

if TYPE_CHECKING:
    from pyiceberg.avro.codecs.codec import Codec

RECORD_BYTES = 1 << 20
"""Of a record at most, decompressed: in memory a list of numbers takes some twenty times as much. The statistics of a
column take some fifty bytes.
"""

_NOTHING = (DefaultReader, UnknownReader)
"""Readers of what takes no bytes."""
_NUMBER = 10
"""Bytes of a number at most."""
_FLOAT, _DOUBLE = struct.Struct("<f"), struct.Struct("<d")
_GOES_ON = bytes(range(0x80, 0x100))
"""Bytes of a number that are followed by another one."""

D = TypeVar("D", bound=StructProtocol)


class RecordFile(AvroFile[D]):
    """A manifest, or a list of manifests, as pyiceberg reads it. Its records raise InvalidArgument where one is too
    long, Damaged where one does not end within its block.
    """

    def __enter__(self) -> RecordFile[D]:
        super().__enter__()
        if _endless(self.reader):
            raise Damaged(f"the file {self.input_file.location} is damaged: it has a list of what takes no bytes")
        return self

    def _read_block(self) -> int:
        if self.block and self.decoder.read(SYNC_SIZE) != self.header.sync:
            raise Damaged(f"the file {self.input_file.location} is damaged: a block does not end where it should")
        count = self.decoder.read_int()
        data = self.decoder.read_bytes()
        codec: type[Codec] | None = self.header.compression_codec()
        records: Any = _Records(self.reader, count, codec.decompress(data) if codec else data, self.input_file.location)
        self.block = records
        return count


def _endless(reader: Any) -> bool:
    """A list in it may have any length, whatever its bytes are."""
    if isinstance(reader, StructReader):
        return any(_endless(field) for _, field in reader.field_readers)
    if isinstance(reader, OptionReader):
        return _endless(reader.option)
    if isinstance(reader, ListReader):
        return _takes_nothing(reader.element) or _endless(reader.element)
    if isinstance(reader, MapReader):
        parts = (reader.key, reader.value)
        return all(map(_takes_nothing, parts)) or any(map(_endless, parts))
    return False


def _takes_nothing(reader: Any) -> bool:
    if isinstance(reader, StructReader):
        return all(_takes_nothing(field) for _, field in reader.field_readers)
    return isinstance(reader, _NOTHING) or (isinstance(reader, FixedReader) and len(reader) == 0)


class _Records(Generic[D]):
    """The records of a block. Each is decoded in a part of the block that is hardly longer than a record may be."""

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
        """There is more than the part that is decoded now."""
        return self._at + self._decoder.size < len(self._data)

    def _too_long(self) -> InvalidArgument:
        return InvalidArgument(
            f"the file {self._location} has an entry of more than {RECORD_BYTES} bytes, decompressed, the most that is "
            "read of one"
        )

    def _damaged(self) -> Damaged:
        return Damaged(f"the file {self._location} is damaged: one of its entries does not end within its block")


class _Decoder:
    """pyiceberg's decoder, which raises EOFError where a count or a length is negative, or leads beyond its bytes."""

    def __init__(self, data: bytes) -> None:
        # The last number may not end: the zero ends it.
        inner = new_decoder(data + b"\0")
        self.size = len(data)
        self._data = data
        self._read, self._ints, self._skip = inner.read, inner.read_ints, inner.skip
        # Of its methods these alone look at the end.
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
        if n * _NUMBER > left and len(self._data[at:].translate(None, _GOES_ON)) < n:
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
