"""Prints JSON documents, and tables and sentences for people; colours appear on a terminal only."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from functools import lru_cache
from io import StringIO
from typing import TYPE_CHECKING, Any, TextIO

from distop.errors import InvalidArgument
from distop.protocol.texts import one_line, one_line_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import Console

_COLOURS = {
    **dict.fromkeys(("success", "valid", "ok", "running"), "green"),
    **dict.fromkeys(("failed", "violated", "error"), "red"),
    **dict.fromkeys(("cancelled", "cancelling", "paused", "unknown", "warning"), "yellow"),
}


class UnwritableOutput(InvalidArgument):
    """The output cannot be written, such as on a full disk."""


class Output:
    """Wraps stdout. Writing raises UnwritableOutput, or BrokenPipeError if the reader of the output has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _reported():
            return self._stream.write(text)

    def flush(self) -> None:
        with _reported():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwritableOutput(f"cannot write the output: {error.strerror}") from None


def drop_output() -> None:
    """Drop the text on stdout that could not be written. Python would report it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@lru_cache(maxsize=2)
def console(*, stderr: bool = False) -> Console:
    """Rich's console. Without a terminal it does not wrap lines, so that programs can read them."""
    from rich.console import Console

    stream = (sys.stderr if stderr else sys.stdout) or StringIO()  # None: it was closed, and print() drops its text
    width = None if stream.isatty() else 10_000
    return Console(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


def write_json(value: Any) -> None:
    """Print one JSON document in one line. Control characters and lone surrogates are JSON escapes."""
    print(one_line_json(json.dumps(value, ensure_ascii=False, default=str)), flush=True)


def write_bytes(data: bytes) -> None:
    """Write bytes on stdout. Raises UnwritableOutput."""
    with _reported():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def say(text: str) -> None:
    """Print one line on stdout, without markup. Control characters are escaped."""
    print(one_line(text), flush=True)


def say_lines(text: str, before: str = "") -> None:
    """Print a text of several lines, each with the prefix ``before``."""
    for line in text.split("\n"):
        say(f"{before}{line}")


def note(text: str) -> None:
    """Print one line on stderr, like :func:`say`."""
    print(one_line(text), file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str, right: Sequence[str] = ()) -> None:
    """Print a table, or the sentence ``empty`` if it has no rows. ``right``: right-aligned columns, of numbers."""
    lines = [[one_line(str(cell)) if cell is not None else "" for cell in row] for row in rows]
    if not lines:
        say(empty)
        return
    out = console()
    if not out.is_terminal:
        from rich.cells import cell_len  # some characters take two columns, others none

        shown = [[name.upper() for name in columns], *lines]
        widths = [max(cell_len(row[n]) for row in shown) for n in range(len(columns))]
        for row in shown:
            cells = []
            for name, cell, width in zip(columns, row, widths, strict=True):
                blank = " " * (width - cell_len(cell))
                cells.append(f"{blank}{cell}" if name in right else f"{cell}{blank}")
            say("  ".join(cells).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        drawn.add_column(name.upper(), justify="right" if name in right else "left", overflow="fold")
    for row in lines:
        drawn.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    out.print(drawn)


def fields(pairs: Mapping[str, Any]) -> None:
    """Print names and values, one pair in a line; pairs without a value are skipped."""
    shown = {name: value for name, value in pairs.items() if value not in (None, "")}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        say(f"{name.ljust(width)}  {value}")


def duration(seconds: float | None) -> str:
    """``0.4 s``, ``35 s``, ``2 min 05 s``, ``3 h 10 min``."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def amount(number: float) -> str:
    """``999 B``, ``1.2 kB``, ``30.0 GB``."""
    if number < 1000:
        return f"{number:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        number /= 1000
        if number < 999.95 or unit == "TB":
            break
    return f"{number:,.1f} {unit}"


def jobs(counts: Mapping[str, Any]) -> str:
    """``12/365``, or ``12/365, 2 failed``; ``-`` before the plan."""
    total = counts.get("total")
    done = (counts.get("success") or 0) + (counts.get("failed") or 0)
    text = f"{done}/{total}" if total is not None else "-"
    return f"{text}, {counts['failed']} failed" if counts.get("failed") else text
