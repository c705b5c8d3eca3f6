"""What this process and its JVM print, without the values of secret settings.

A name of a file may hold line ends and what a terminal obeys, and the JVM prints it as it is. So each line of the JVM
begins with :data:`MARK`, and has control characters as escapes.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import threading
from typing import TYPE_CHECKING, BinaryIO, TextIO

from distop.protocol.texts import one_line
from distop.runtime import secret_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOM = 1024 * 1024
"""Bytes that a program may print while nothing is copied, as long as a job holds the GIL; also the longest line."""

MARK = b"jvm| "

_copying: list[threading.Thread] = []


class _Stream(io.TextIOWrapper):
    def write(self, text: str) -> int:
        super().write(secret_settings.redact(text))
        return len(text)


def stream(to: TextIO) -> TextIO:
    """A stream that prints to the same file."""
    return _Stream(to.buffer, encoding=to.encoding, errors=to.errors, write_through=True)


def copy(printed: BinaryIO) -> None:
    """Copy what a program prints to our standard error, in a thread, until it ends."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(printed.fileno(), fcntl.F_SETPIPE_SZ, _ROOM)
    thread = threading.Thread(target=_copy, args=(printed,), name="printed", daemon=True)
    _copying.append(thread)
    thread.start()


def finish(seconds: float) -> None:
    """Wait for the last lines of programs that have ended. One that goes on is not waited for beyond ``seconds``."""
    for thread in _copying:
        thread.join(seconds)


def _copy(printed: BinaryIO) -> None:
    kept, begins = b"", True
    for line in itertools.chain(_lines(printed), (b"",)):
        text = secret_settings.redact((kept + line).decode(errors="surrogateescape")).encode(errors="surrogateescape")
        # A line longer than the room is cut, and the cut may be within a secret: its end waits for what follows.
        is_cut = line and not line.endswith(b"\n")
        cut = max(0, len(text) - 4 * secret_settings.longest()) if is_cut else len(text)
        text, kept = text[:cut], text[cut:]
        # A program whose output nobody takes stands still, so this goes on where a disk is full.
        with contextlib.suppress(OSError):
            os.write(2, MARK * (begins and bool(text)) + _escaped(text))
        begins = text.endswith(b"\n") if text else begins


def _escaped(text: bytes) -> bytes:
    line, end, _ = text.decode(errors="surrogateescape").partition("\n")
    return (one_line(line.rstrip("\r").expandtabs(4)) + end).encode(errors="surrogateescape")


def _lines(printed: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: printed.readline(_ROOM), b"")
