"""Encodes values for etcd: compact JSON, times, ranges of ordinals.

Times are RFC 3339 in UTC. Nothing here reads a clock.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA_VERSION = 1
"""The ``v`` of all records that this release writes. Operations of a higher version are not touched."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What decoding raises for an invalid value: a person or another release wrote it."""


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8.

    A lone surrogate (from a path that is not UTF-8) is written as its JSON escape, which :func:`loads` restores: no
    text must prevent a report.
    """
    return _ENCODER.encode(value).encode(errors="backslashreplace")


def loads(value: bytes | str) -> Any:
    """The JSON value. Raises ValueError for invalid JSON."""
    # For bytes, json would detect the encoding first.
    return json.loads(value if isinstance(value, str) else value.decode(errors="surrogatepass"))


def word(text: str) -> bytes:
    """A plain word or number as a value."""
    return str(text).encode()


_FIRST, _LAST = -62_135_596_800.0, 253_402_300_799.0
"""The years 1 to 9999, which RFC 3339 can express: a time beyond them is written as the first or the last."""


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC with milliseconds: ``2013-01-01T00:00:00.000Z``."""
    milliseconds = int(min(max(seconds, _FIRST), _LAST) * 1000)
    return f"{_to_the_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@lru_cache(maxsize=256)
def _to_the_second(seconds: int) -> str:
    # Thousands of jobs end within the same few seconds.
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


def from_rfc3339(text: str) -> float:
    """Seconds since the epoch. Raises ValueError for an invalid time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except OverflowError as error:
        raise ValueError(f"{text} is out of range") from error


def parse_time(text: str) -> float:
    """Seconds since the epoch; 0 for an invalid time, which must not stop an operation."""
    try:
        return from_rfc3339(text) if text else 0.0
    except ValueError:
        return 0.0


MAX_ERROR_TEXT = 4_000
"""Characters of an error text that a record keeps; the executor's log has the full text."""


def shorten(text: str, limit: int) -> str:
    """The text within ``limit`` characters: its start and its end, which matter most in an error."""
    if len(text) <= limit:
        return text
    head = limit // 3
    return f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"


def to_ranges(ordinals: Iterable[int]) -> str:
    """Sorted ordinals as ranges: ``[3, 7, 8, 9]`` → ``"3,7-9"``."""
    runs: list[list[int]] = []
    for n in sorted(set(ordinals)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


MOST_ORDINALS = 1_000_000
"""The maximum number of partitions in a plan: a few bytes could name a range of any length."""


def from_ranges(text: str) -> list[int]:
    """The reverse of :func:`to_ranges`. Raises ValueError for more than :data:`MOST_ORDINALS` ordinals."""
    out: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        if int(last or first) - int(first) + len(out) >= MOST_ORDINALS:
            raise ValueError(f"more than {MOST_ORDINALS} ordinals")
        out.extend(range(int(first), int(last or first) + 1))
    return out


MAX_FAILED_BYTES = 64 * 1024
"""Maximum length of the text that lists failed jobs: decisions and history records are read as a whole."""


def failed_text(ordinals: Iterable[int]) -> tuple[str, bool]:
    """The failed jobs as ranges (``3,7-9``), and whether the list is truncated.

    It lists the first ones that fit into :data:`MAX_FAILED_BYTES`. The record has their number beside it.
    """
    text = to_ranges(ordinals)
    if len(text) <= MAX_FAILED_BYTES:
        return text, False
    return text[: text.rindex(",", 0, MAX_FAILED_BYTES + 1)], True
