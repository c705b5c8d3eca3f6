"""Texts of callers and of etcd: lone surrogates, quotes in errors, and characters that a terminal would obey."""

from __future__ import annotations

import json
import re
from typing import Any

from distop.errors import InvalidArgument

MAX_SHOWN = 200
"""Characters of a value that an error message quotes."""

_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters (escape codes, line ends), line separators, bidirectional overrides, lone surrogates."""
_LONE = re.compile(r"[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False)


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """The value's ``repr`` for an error message, cut after ``limit`` characters.

    Never raises.
    """
    if isinstance(value, str | bytes):
        quoted = repr(value[:limit])
        return quoted if len(value) <= limit and len(quoted) <= 2 * limit else f"{quoted[: limit + 1]}…"
    try:
        text = repr(value)
    except Exception:  # an int of over 4,300 digits, or an object of the caller's own
        return f"a value of type {type(value).__name__}"
    text = text.replace("\n", " ")
    return text if len(text) <= limit else f"{text[:limit]}…"


def one_line(text: str) -> str:
    """The text in one line: control characters, which a terminal would obey, and what else is not seen, as escapes.

    A name, an error or a report in etcd may contain any of them.
    """
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


def one_line_json(document: str) -> str:
    """The same of a JSON text without line ends: the escapes are JSON's, so that it means the same."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def check_encodable(value: Any, what: str) -> None:
    """Raises InvalidArgument where this JSON value contains a lone surrogate.

    Keys count as well. etcd's records are UTF-8, which has no code for a lone surrogate.
    """
    found = _LONE.search(value if isinstance(value, str) else _ENCODER.encode(value))
    if found is not None:
        raise InvalidArgument(
            f"{what} holds the lone surrogate {found[0]!r}, which is no character: remove it, or encode its bytes in "
            "another way (a name that is not UTF-8 reads so in Python)"
        )


def check_encoded(value: bytes, what: str) -> None:
    """Like :func:`check_encodable`, for JSON as ``json_codec.dumps`` writes it."""
    if b"\\ud" in value or b"\\uD" in value:
        check_encodable(json.loads(value), what)
