"""Redacts secrets in the output of this process and its JVM.

The JVM prints file names unchanged, and these may contain line ends and terminal control characters. So each line of
the JVM gets the prefix :data:`MARK`, and its control characters are escaped.
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

_PIPE_SIZE = 1024 * 1024
"""Size in bytes of the pipe for a program's output, which fills while a job holds the GIL; also the longest line."""

MARK = b"jvm| "

_copying: list[threading.Thread] = []


class _Stream(io.TextIOWrapper):
    def write(self, text: str) -> int:
        super().write(secret_settings.redact(text))
        return len(text)


def redacting_stream(to: TextIO) -> TextIO:
    """A stream that writes redacted text to the same file."""
    return _Stream(to.buffer, encoding=to.encoding, errors=to.errors, write_through=True)


def copy_output(output: BinaryIO) -> None:
    """Copy a program's output, redacted, to our standard error in a thread until the output ends."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(output.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
    thread = threading.Thread(target=_copy, args=(output,), name="printed", daemon=True)
    _copying.append(thread)
    thread.start()


def wait_for_output(seconds: float) -> None:
    """Wait for the last lines of programs that have ended, at most ``seconds`` for each program."""
    for thread in _copying:
        thread.join(seconds)


def _copy(output: BinaryIO) -> None:
    kept, at_line_start = b"", True
    for line in itertools.chain(_lines(output), (b"",)):
        text = secret_settings.redact((kept + line).decode(errors="surrogateescape")).encode(errors="surrogateescape")
        # A line longer than the pipe is cut, possibly within a secret: keep its end for the next part.
        is_cut = line and not line.endswith(b"\n")
        cut = max(0, len(text) - 4 * secret_settings.longest()) if is_cut else len(text)
        text, kept = text[:cut], text[cut:]
        # A program blocks if its output is not read, so continue even if the disk is full.
        with contextlib.suppress(OSError):
            os.write(2, MARK * (at_line_start and bool(text)) + _escaped(text))
        at_line_start = text.endswith(b"\n") if text else at_line_start


def _escaped(text: bytes) -> bytes:
    line, end, _ = text.decode(errors="surrogateescape").partition("\n")
    return (one_line(line.rstrip("\r").expandtabs(4)) + end).encode(errors="surrogateescape")


def _lines(output: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: output.readline(_PIPE_SIZE), b"")
