"""Texts of callers and of etcd: lone surrogates, quotes in errors, and characters that a terminal would obey."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SHOWN = 200
"""Characters of a value that an error message quotes."""

_SIMILAR = 0.75
"""Minimum similarity of a suggested name to the unknown one (``difflib``'s ratio)."""
_LONGEST_NAME = 100
"""Maximum characters of an unknown name for which a similar one is searched: the search is quadratic."""
_MOST_NAMES = 50
"""Maximum number of known names in a message."""

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
    except Exception:  # an int of over 4,300 digits, or a caller's object
        return f"a value of type {type(value).__name__}"
    text = text.replace("\n", " ")
    return text if len(text) <= limit else f"{text[:limit]}…"


def did_you_mean(name: object, known: Iterable[str], listed_as: str = "") -> str:
    """The end of an error message about an unknown name.

    An example: `` (did you mean 'validate'? known: index, validate)``. ``listed_as``: what the known names are called
    in their list; "": they are not listed. Returns "" if there is neither a near name nor a list.
    """
    from difflib import get_close_matches  # loads slowly, only needed for errors

    names = [str(one) for one in known]
    parts = []
    if isinstance(name, str) and len(name) <= _LONGEST_NAME:
        spellings = {one.lower(): one for one in names}
        if similar := get_close_matches(name.lower(), spellings, 1, _SIMILAR):
            parts.append(f"did you mean {spellings[similar[0]]!r}?")
    if listed_as:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        parts.append(f"{listed_as}: {', '.join(names[:_MOST_NAMES]) or 'none'}{more}")
    return f" ({' '.join(parts)})" if parts else ""


def plural(count: int, word: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def one_line(text: str) -> str:
    """The text in one line, with control and invisible characters as escapes.

    A terminal would obey control characters. A name, an error or a report in etcd may contain any of them.
    """
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


def one_line_json(document: str) -> str:
    """The same of a JSON text without line ends: the escapes are JSON's, so that it means the same."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def check_encodable(value: Any, what: str) -> None:
    """Raises InvalidArgument if this JSON value contains a lone surrogate.

    Its keys are checked as well. etcd's records are UTF-8, which has no code for a lone surrogate.
    """
    found = _LONE.search(value if isinstance(value, str) else _ENCODER.encode(value))
    if found is not None:
        raise InvalidArgument(
            f"{what} contains the lone surrogate {found[0]!r}, which is not a character: remove it, or encode its "
            "bytes differently (Python decodes file names that are not UTF-8 to lone surrogates)"
        )


def check_encoded(value: bytes, what: str) -> None:
    """Like :func:`check_encodable`, for JSON as ``json_codec.dumps`` writes it."""
    if b"\\ud" in value or b"\\uD" in value:
        check_encodable(json.loads(value), what)
