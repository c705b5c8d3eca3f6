"""Labels: texts by which a caller finds operations again, such as ``team=x``. distop does not interpret them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown

MAX_LABELS = 32
MAX_KEY = 63
MAX_VALUE = 255
"""Characters. With these an operation's labels take 40 KiB at most, in the spec and in the history record."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*")
_SHOWN = 80


def labels(value: Any) -> Mapping[str, str]:
    """The labels, sorted by key; {} for None. Raises InvalidArgument."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f'labels are a mapping of texts, such as {{"team": "x"}}, not {shown(value, _SHOWN)}')
    if len(value) > MAX_LABELS:
        raise InvalidArgument(f"an operation has at most {MAX_LABELS} labels, not {len(value)}")
    for key, text in value.items():
        if not isinstance(key, str) or len(key) > MAX_KEY or not _KEY.fullmatch(key):
            raise InvalidArgument(
                f"the label key {shown(key, _SHOWN)} must have 1 to {MAX_KEY} letters, digits, '.', '_', '/' and '-', "
                "and begin with a letter or digit"
            )
        if not isinstance(text, str):
            raise InvalidArgument(f"the label {key} must be a text, not {shown(text, _SHOWN)}")
        if len(text) > MAX_VALUE:
            raise InvalidArgument(f"the label {key} has {len(text)} characters; at most {MAX_VALUE} are allowed")
        if not text.isprintable():
            raise InvalidArgument(f"the label {key} must be printable text on one line, not {shown(text, _SHOWN)}")
    return {key: value[key] for key in sorted(value)}


def has(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether all wanted labels are present with these values."""
    return all(found.get(key) == text for key, text in wanted.items())
