"""The files in which Iceberg keeps manifests and lists of them, held to their form before pyiceberg reads them.

Its reader takes any bytes for such a file. Of damaged ones it may make counts and lengths without bound, also such as
lead back to where it was, and never ends; so a file is looked at as a whole first: its magic, its header, and that its
blocks follow each other, mark by mark, up to its end. Inside a block nothing tells damage but the reader itself, which
is left no more than :data:`STALLED` seconds without a next record.
"""

from __future__ import annotations

import ctypes
import io
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distop.confinement import check_form
from distop.storage_urls import check_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

STALLED = 60.0
"""Seconds; a thousand entries take less than one."""
WATCHER = "manifests"
"""The name of the thread that watches a reader."""
STRIKE_AGAIN = 0.2
"""Seconds after which a reader that goes on all the same is stopped again."""

_MAGIC = b"Obj\x01"
_MARK = 16
"""Bytes that stand after the header and after each block, the same in all of a file."""
_LONGEST = 10
"""Bytes of a number of 64 bits, seven bits in each."""


class Damaged(OSError):
    """The file is not as it was written; the text names it."""


class _Stalled(BaseException):
    """Raised inside the reader, and for whoever watches it alone: nobody on the way is to take it for an error."""


class ManifestIO:
    """The ``FileIO`` of a table for reading manifests by pyiceberg: what it opens is whole."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._watch: _Watch | None = None

    def new_input(self, location: str) -> Any:
        """The file, as pyiceberg's reader opens it. That raises Damaged, and what the other one raises. Raises
        InvalidArgument for one that lies where data may not send anybody.
        """
        check_paths((location,))
        check_form(location)
        return _Input(self._inner.new_input(location), self)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is read in this block, on this thread, ends. Raises Damaged where the reader does not get on."""
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
        check(data, self.location)
        # Not before: how long storage takes is for it to say.
        self._of.alive(self.location)
        return io.BytesIO(data)


def check(data: bytes, location: str) -> None:
    """Raises Damaged where these bytes are no whole Avro file."""
    try:
        _walk(data)
    except _Wrong as error:
        raise Damaged(f"the file {location} is damaged: {error}") from None


class _Wrong(Exception):
    pass


def _walk(data: bytes) -> None:
    if data[: len(_MAGIC)] != _MAGIC:
        raise _Wrong("it does not begin as an Avro file does")
    at = _header(data, len(_MAGIC))
    mark, at = data[at : at + _MARK], at + _MARK
    if len(mark) < _MARK:
        raise _Wrong("it ends in its header")
    while at < len(data):
        count, at = _number(data, at)
        size, at = _number(data, at)
        if count < 0 or size < 0 or data[at + size : at + size + _MARK] != mark:
            raise _Wrong("one of its blocks does not end where it should")
        at += size + _MARK


def _header(data: bytes, at: int) -> int:
    """Where the map of the header ends."""
    while True:
        count, at = _number(data, at)
        if count == 0:
            return at
        if count < 0:
            count, (_, at) = -count, _number(data, at)
        for _ in range(2 * count):  # names and values alike
            size, at = _number(data, at)
            at += size
            if size < 0 or at > len(data):
                raise _Wrong("its header is not whole")


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
