"""The files in which Iceberg keeps manifests and lists of them, held to their form before pyiceberg reads them.

Its reader takes any bytes for such a file. Of damaged ones it may make counts and lengths without bound, also such as
lead back to where it was, and never ends; so a file is looked at as a whole first: its magic, its header, and that its
blocks follow each other, mark by mark, up to its end. Inside a block nothing tells damage but the reader itself, which
is left no more than :data:`STALLED` seconds without a next record. What a block is decompressed to is counted on the
way: the reader has it in memory at once, and a few bytes may stand for any number of them.
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
"""Of a file at most: its reader has all of them in memory."""
ENTRIES = 4_000_000
"""Of the manifests that one reading of a table opens at most, with those of removed files: it keeps each live one."""
TOTAL_BYTES = 32 << 30
"""Of these manifests at most, decompressed: that takes some minutes."""
NUMBERS = 32_000_000
"""In the lists of live entries (places to split a file at, ids of columns) at most, in one reading: Java keeps them, in
eight bytes each.
"""
STALLED = 60.0
"""Seconds; a thousand entries take less than one."""
WATCHER = "manifests"
"""The name of the thread that watches a reader."""
STRIKE_AGAIN = 0.2
"""Seconds after which a reader that goes on all the same is stopped again."""

_MAGIC = b"Obj\x01"
_MARK = 16
"""Bytes that stand after the header and after each block, the same in all of a file."""
_CODEC = b"avro.codec"
_PIECE = 1 << 20
"""Bytes that are decompressed at once, to be counted."""
_LONGEST = 10
"""Bytes of a number of 64 bits, seven bits in each."""


class Damaged(OSError):
    """The file is not as it was written; the text names it."""


class _Stalled(BaseException):
    """Raised inside the reader, and for whoever watches it alone: nobody on the way is to take it for an error."""


class ManifestIO:
    """The ``FileIO`` of a table for reading manifests by pyiceberg: what it opens is whole, and one of ``files``."""

    def __init__(self, inner: Any, files: TableFiles | None = None) -> None:
        self._inner = inner
        self._files = files
        self._watch: _Watch | None = None
        self._entries, self._bytes, self._numbers = ENTRIES, TOTAL_BYTES, NUMBERS

    def new_input(self, location: str) -> Any:
        """The file, as pyiceberg's reader opens it. That raises Damaged, and what the other one raises. Raises
        InvalidArgument for one that lies where data may not send anybody.
        """
        check_paths((location,))
        check_form(location)
        if self._files is not None:
            self._files.check((location,))
        return _Input(self._inner.new_input(location), self)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is read in this block, on this thread, ends: it is one reading, within its bounds. Raises Damaged where
        the reader does not get on.
        """
        self._entries, self._bytes, self._numbers = ENTRIES, TOTAL_BYTES, NUMBERS
        self._watch = watch = _Watch(STALLED)
        try:
            watch.start()
            yield
        except _Stalled:
            raise Damaged(
                f"the file {watch.location} is damaged: its reader did not get on within {watch.seconds:g} s"
            ) from None
        finally:
            # A strike may come even now, at any instruction: the watch has ended only once ``end`` has returned.
            while True:
                try:
                    watch.end()
                    break
                except _Stalled:
                    continue
            self._watch = None

    def alive(self, location: str | None = None) -> None:
        """The reader got on, or begins with a file."""
        if self._watch is not None:
            self._watch.alive(location)

    def count(self, entries: int, size: int, location: str) -> None:
        """Entries of a file, and the bytes they are decompressed to. Raises InvalidArgument where all files together
        have too many.
        """
        self._entries -= entries
        self._bytes -= size
        if self._entries < 0 or self._bytes < 0:
            raise InvalidArgument(
                f"the manifests up to {location} have more than {ENTRIES} entries or more than {TOTAL_BYTES} bytes, "
                "decompressed, the most that is read of a table: have its writer rewrite its manifests"
            )

    def count_numbers(self, count: int, location: str) -> None:
        """Numbers in the lists of an entry. Raises InvalidArgument where all of a reading have too many."""
        self._numbers -= count
        if self._numbers < 0:
            raise InvalidArgument(
                f"the manifests up to {location} have more than {NUMBERS} numbers in the lists of their entries "
                "(split_offsets, equality_ids), the most that is read of a table"
            )


class _Input:
    def __init__(self, inner: Any, of: ManifestIO) -> None:
        self._inner = inner
        self._of = of
        self.location: str = inner.location

    def __len__(self) -> int:
        return len(self._inner)

    def exists(self) -> bool:
        return bool(self._inner.exists())

    def open(self, seekable: bool = True) -> io.BytesIO:
        with self._inner.open(seekable) as stream:
            data = stream.read()
        self._of.count(*check(data, self.location), self.location)
        # Not before: how long storage takes is for it to say.
        self._of.alive(self.location)
        return io.BytesIO(data)


def check(data: bytes, location: str) -> tuple[int, int]:
    """How many records these bytes of an Avro file have, and how many bytes they are decompressed to. Raises Damaged
    where they are no whole one, InvalidArgument where they stand for too many.
    """
    try:
        return _walk(data)
    except _TooMuch:
        raise InvalidArgument(
            f"the file {location} has more than {METADATA_BYTES} bytes, decompressed, or more than {RECORDS} records, "
            "the most that is read of such a file"
        ) from None
    except _Wrong as error:
        raise Damaged(f"the file {location} is damaged: {error}") from None


class _Wrong(Exception):
    pass


class _TooMuch(Exception):
    pass


def _walk(data: bytes) -> tuple[int, int]:
    if data[: len(_MAGIC)] != _MAGIC:
        raise _Wrong("it does not begin as an Avro file does")
    codec, at = _header(data, len(_MAGIC))
    records, left = RECORDS, METADATA_BYTES
    mark, at = data[at : at + _MARK], at + _MARK
    if len(mark) < _MARK:
        raise _Wrong("it ends in its header")
    while at < len(data):
        count, at = _number(data, at)
        size, at = _number(data, at)
        if count < 0 or size < 0 or data[at + size : at + size + _MARK] != mark:
            raise _Wrong("one of its blocks does not end where it should")
        records -= count
        left -= _decompressed(codec, data[at : at + size], left)
        if records < 0 or left < 0:
            raise _TooMuch
        at += size + _MARK
    return RECORDS - records, METADATA_BYTES - left


def _decompressed(codec: bytes, block: bytes, limit: int) -> int:
    """How many bytes a block is decompressed to; some number over ``limit`` where there are more."""
    if codec == b"null":
        return len(block)
    if codec == b"snappy":  # the length, which its reader makes room for, stands at the beginning
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
        raise _Wrong("there is no number where one should be")
    return block[: end + 1]


def _pieces(codec: bytes, block: bytes) -> Iterator[bytes]:
    if codec == b"zstandard":
        import zstandard

        try:
            with zstandard.ZstdDecompressor().stream_reader(block) as reader:
                while piece := reader.read(_PIECE):
                    yield piece
        except zstandard.ZstdError:
            raise _Wrong("one of its blocks cannot be decompressed") from None
        return
    try:
        if codec == b"deflate":
            inflating = zlib.decompressobj(-zlib.MAX_WBITS)
            while piece := inflating.decompress(block, _PIECE):
                yield piece
                block = inflating.unconsumed_tail
        elif codec == b"bzip2":
            while block:  # its reader takes one stream after the other
                unpacking = bz2.BZ2Decompressor()
                while not unpacking.eof and (piece := unpacking.decompress(block, _PIECE)):
                    yield piece
                    block = b""
                block = unpacking.unused_data
        else:
            raise _Wrong("it is compressed in a way that is not known")
    except (zlib.error, OSError):
        raise _Wrong("one of its blocks cannot be decompressed") from None


def _header(data: bytes, at: int) -> tuple[bytes, int]:
    """How its blocks are compressed, and where the map of the header ends."""
    codec = b"null"
    while True:
        count, at = _number(data, at)
        if count == 0:
            return codec, at
        if count < 0:
            count, (_, at) = -count, _number(data, at)
        name = b""
        for n in range(2 * count):  # names and values alike
            size, at = _number(data, at)
            value, at = data[at : at + size], at + size
            if size < 0 or at > len(data):
                raise _Wrong("its header is not whole")
            if n % 2 and name == _CODEC:
                codec = value
            name = value


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    found = 0
    for shift, byte in enumerate(data[at : at + _LONGEST]):
        found |= (byte & 0x7F) << 7 * shift
        if not byte & 0x80:
            return (found >> 1) ^ -(found & 1), at + shift + 1
    raise _Wrong("there is no number where one should be")


class _Watch:
    """Stops a thread that has made no progress for ``seconds``, by an exception.

    It watches the thread that started it. It can stop a loop in Python, not one in C.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.location = ""
        self._heard = time.monotonic()
        self._over = threading.Condition()
        self._done = self._struck = False
        self._of = threading.get_ident()

    def alive(self, location: str | None) -> None:
        """Something was heard of it."""
        self._heard = time.monotonic()
        self.location = location or self.location

    def start(self) -> None:
        """Start watching the calling thread."""
        threading.Thread(target=self._look, name=WATCHER, daemon=True).start()

    def end(self) -> None:
        """Stop watching.

        Raises _Stalled where an exception was on its way already: call it again.
        """
        with self._over:
            self._done = True
            self._over.notify()
        if self._struck:
            # A strike that is still on its way must not hit what the thread does next.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._of), None)

    def _look(self) -> None:
        with self._over:
            while not self._done:
                left = self._heard + self.seconds - time.monotonic()
                if left > 0:
                    self._over.wait(left)
                    continue
                self._struck = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._of), ctypes.py_object(_Stalled))
                # Again, where it is lost: Python takes it for nobody's in a finalizer, or while garbage is collected.
                self._over.wait(STRIKE_AGAIN)
