"""Checks Avro files (manifests and manifest lists) before pyiceberg reads them, and limits their size.

pyiceberg's reader does not validate a file: in a damaged one it may find unlimited counts and lengths, or offsets that
make it loop forever. So the structure of a file is checked first: magic, header, and a sequence of blocks up to its
end, each followed by the sync marker. Damage inside a block only the reader can find; it is stopped after
:data:`STALL_TIMEOUT` seconds without a record. The decompressed size of the blocks is counted, because the reader holds
a block in memory and a few bytes may decompress to any number.
"""

from __future__ import annotations

import bz2
import ctypes
import io
import threading
import time
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.storage.confinement import check_form
from distop.storage.files import METADATA_BYTES
from distop.storage.storage_urls import check_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.storage.confinement import TableFiles

RECORDS = 1_000_000
"""Maximum records of a file: the reader holds all of them in memory."""
ENTRIES = 4_000_000
"""Maximum entries of all manifests in one reading of a table, including those of removed files."""
TOTAL_BYTES = 32 << 30
"""Maximum decompressed bytes of these manifests; they take some minutes to read."""
NUMBERS = 32_000_000
"""Maximum numbers in the lists of live entries (split offsets, column ids) in one reading: Java keeps them in memory,
eight bytes each.
"""
STALL_TIMEOUT = 60.0
"""Time-out in seconds for the next progress of a reader; a thousand entries take less than one second."""
WATCHER = "manifests"
"""The name of the thread that watches a reader."""
_RAISE_AGAIN = 0.2
"""Seconds between two attempts to stop a reader."""

_MAGIC = b"Obj\x01"
_SYNC = 16
"""Bytes of the sync marker, which follows the header and each block."""
_CODEC = b"avro.codec"
_PIECE = 1 << 20
"""Bytes that are decompressed at a time."""
_LONGEST = 10
"""Maximum bytes of a 64-bit number, with seven bits per byte."""


class Damaged(OSError):
    """The content of the file is damaged; the text names the file."""


class _Stalled(BaseException):
    """Raised in the thread of a stalled reader. A BaseException, so that the reader does not handle it as an error."""


class ManifestIO:
    """The ``FileIO`` with which pyiceberg reads a table's manifests: it opens only undamaged files of ``files``."""

    def __init__(self, inner: Any, files: TableFiles | None = None) -> None:
        self._inner = inner
        self._files = files
        self._watch: _Watch | None = None
        self._entries, self._bytes, self._numbers = ENTRIES, TOTAL_BYTES, NUMBERS

    def new_input(self, location: str) -> Any:
        """A file for pyiceberg's reader; opening it raises Damaged, and the errors of the inner ``FileIO``.

        Raises InvalidArgument for a path or URL that is not allowed in data, or that may not belong to the table.
        """
        check_paths((location,))
        check_form(location)
        if self._files is not None:
            self._files.check((location,))
        return _Input(self._inner.new_input(location), self)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """One reading of a table by this thread, within this module's limits. Raises Damaged if the reader stalls."""
        self._entries, self._bytes, self._numbers = ENTRIES, TOTAL_BYTES, NUMBERS
        self._watch = watch = _Watch(STALL_TIMEOUT)
        try:
            watch.start()
            yield
        except _Stalled:
            raise Damaged(
                f"the file {watch.location} is damaged: its reader made no progress within {watch.seconds:g} s"
            ) from None
        finally:
            # The exception may still arrive at any instruction, until ``end`` has returned.
            while True:
                try:
                    watch.end()
                    break
                except _Stalled:
                    continue
            self._watch = None

    def alive(self, location: str | None = None) -> None:
        """Report progress of the reader, or with ``location`` the start of a file."""
        if self._watch is not None:
            self._watch.alive(location)

    def count(self, entries: int, size: int, location: str) -> None:
        """Count a file's entries and decompressed bytes. Raises InvalidArgument if the reading exceeds its limits."""
        self._entries -= entries
        self._bytes -= size
        if self._entries < 0 or self._bytes < 0:
            raise InvalidArgument(
                f"the manifests up to {location} have more than {ENTRIES} entries or {TOTAL_BYTES} decompressed bytes, "
                "the limits for a table: let its writer rewrite its manifests"
            )

    def count_numbers(self, count: int, location: str) -> None:
        """Count numbers in the lists of an entry. Raises InvalidArgument if the reading exceeds its limit."""
        self._numbers -= count
        if self._numbers < 0:
            raise InvalidArgument(
                f"the manifests up to {location} have more than {NUMBERS} numbers in the lists of their entries "
                "(split_offsets, equality_ids), the limit for a table: let its writer rewrite its manifests"
            )


class _Input:
    def __init__(self, inner: Any, io: ManifestIO) -> None:
        self._inner = inner
        self._io = io
        self.location: str = inner.location

    def __len__(self) -> int:
        return len(self._inner)

    def exists(self) -> bool:
        return bool(self._inner.exists())

    def open(self, seekable: bool = True) -> io.BytesIO:
        with self._inner.open(seekable) as stream:
            data = stream.read()
        self._io.count(*check(data, self.location), self.location)
        # The time of the storage does not count: it has its own time-outs.
        self._io.alive(self.location)
        return io.BytesIO(data)


def check(data: bytes, location: str) -> tuple[int, int]:
    """The number of records and of decompressed bytes of an Avro file with this content.

    Raises Damaged for another or incomplete content, InvalidArgument if it exceeds the limits of a file.
    """
    try:
        return _walk(data)
    except _TooMuch:
        raise InvalidArgument(
            f"the file {location} has more than {METADATA_BYTES} decompressed bytes or {RECORDS} records, the limits "
            "for a manifest: let the table's writer rewrite its manifests"
        ) from None
    except _Invalid as error:
        raise Damaged(f"the file {location} is damaged: {error}") from None


class _Invalid(Exception):
    """The content is not an Avro file; the text has the reason."""


class _TooMuch(Exception):
    """The content exceeds the limits of a file."""


def _walk(data: bytes) -> tuple[int, int]:
    if data[: len(_MAGIC)] != _MAGIC:
        raise _Invalid("it does not start like an Avro file")
    codec, at = _header(data, len(_MAGIC))
    records, left = RECORDS, METADATA_BYTES
    sync, at = data[at : at + _SYNC], at + _SYNC
    if len(sync) < _SYNC:
        raise _Invalid("it ends in its header")
    while at < len(data):
        count, at = _number(data, at)
        size, at = _number(data, at)
        if count < 0 or size < 0 or data[at + size : at + size + _SYNC] != sync:
            raise _Invalid("the end of a block has no sync marker")
        records -= count
        left -= _decompressed(codec, data[at : at + size], left)
        if records < 0 or left < 0:
            raise _TooMuch
        at += size + _SYNC
    return RECORDS - records, METADATA_BYTES - left


def blocks(data: bytes, codec: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """The number of records and the decompressed bytes of each block of a checked file; ``at``: of the first one.

    Raises ValueError for a codec that is not supported.
    """
    while at < len(data):
        count, at = _number(data, at)
        size, at = _number(data, at)
        block = data[at : at + size]
        at += size + _SYNC
        if codec == b"snappy":
            raise ValueError("its blocks are compressed by Snappy, which cannot be rewritten")
        yield count, block if codec == b"null" else b"".join(_pieces(codec, block))


def _decompressed(codec: bytes, block: bytes, limit: int) -> int:
    """The number of decompressed bytes of a block; any number over ``limit`` if it has more."""
    if codec == b"null":
        return len(block)
    if codec == b"snappy":  # the block starts with its decompressed length
        return sum((byte & 0x7F) << 7 * n for n, byte in enumerate(_first_number(block)))
    found = 0
    for piece in _pieces(codec, block):
        found += len(piece)
        if found > limit:
            break
    return found


def _first_number(block: bytes) -> bytes:
    end = next((n for n, byte in enumerate(block[:_LONGEST]) if not byte & 0x80), None)
    if end is None:
        raise _Invalid("a number is missing")
    return block[: end + 1]


def _pieces(codec: bytes, block: bytes) -> Iterator[bytes]:
    if codec == b"zstandard":
        import zstandard

        try:
            with zstandard.ZstdDecompressor().stream_reader(block) as reader:
                while piece := reader.read(_PIECE):
                    yield piece
        except zstandard.ZstdError:
            raise _Invalid("a block cannot be decompressed") from None
        return
    try:
        if codec == b"deflate":
            inflating = zlib.decompressobj(-zlib.MAX_WBITS)
            while piece := inflating.decompress(block, _PIECE):
                yield piece
                block = inflating.unconsumed_tail
        elif codec == b"bzip2":
            while block:  # a block may have several streams
                unpacking = bz2.BZ2Decompressor()
                while not unpacking.eof and (piece := unpacking.decompress(block, _PIECE)):
                    yield piece
                    block = b""
                block = unpacking.unused_data
        else:
            raise _Invalid("its compression is unknown")
    except (zlib.error, OSError):
        raise _Invalid("a block cannot be decompressed") from None


def _header(data: bytes, at: int) -> tuple[bytes, int]:
    """The codec of the blocks, and the end offset of the header's map."""
    codec = b"null"
    while True:
        count, at = _number(data, at)
        if count == 0:
            return codec, at
        if count < 0:
            count, (_, at) = -count, _number(data, at)
        name = b""
        for n in range(2 * count):  # names and values alternate
            size, at = _number(data, at)
            value, at = data[at : at + size], at + size
            if size < 0 or at > len(data):
                raise _Invalid("its header is incomplete")
            if n % 2 and name == _CODEC:
                codec = value
            name = value


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number, and its end offset."""
    found = 0
    for shift, byte in enumerate(data[at : at + _LONGEST]):
        found |= (byte & 0x7F) << 7 * shift
        if not byte & 0x80:
            return (found >> 1) ^ -(found & 1), at + shift + 1
    raise _Invalid("a number is missing")


class _Watch:
    """A watchdog: raises _Stalled in the thread that started it if that makes no progress for ``seconds``.

    It can stop a loop in Python, but not one in C.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.location = ""
        self._progress = time.monotonic()
        self._changed = threading.Condition()
        self._ended = self._raised = False
        self._thread = threading.get_ident()

    def alive(self, location: str | None) -> None:
        """Note progress of the thread."""
        self._progress = time.monotonic()
        self.location = location or self.location

    def start(self) -> None:
        """Start watching the calling thread."""
        threading.Thread(target=self._watch, name=WATCHER, daemon=True).start()

    def end(self) -> None:
        """Stop watching. Raises _Stalled if the exception was already set: then call it again."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._raised:
            # Clear an exception that the thread has not seen yet: it must not be raised later.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                left = self._progress + self.seconds - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                self._raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Stalled))
                # Repeat it: Python drops the exception in a finalizer, or during garbage collection.
                self._changed.wait(_RAISE_AGAIN)
