"""Which settings and environment variables are secret, and how their values stay out of environments and texts.

Secret is decided by name: by Spark's own default pattern (``spark.redaction.regex`` in Spark 4.1), and by the names of
keys of object stores that it misses. A setting may widen the pattern, never narrow it.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

from distop.core.codec import shorten
from distop.core.texts import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PATTERN = (
    "(?i)secret|password|token|credential|access[.]?key|(account|api|private|storage|encryption)[.]?key(?![a-z])"
    "|azure[.]sas"
)
"""Names that match are secret."""
PATTERN_SETTING = "spark.redaction.regex"
REPLACEMENT = "*********(redacted)"
"""Spark's own."""
SHORTEST = 4
"""Characters of the shortest value that is replaced in texts: a shorter one occurs everywhere."""

CREDENTIALS = frozenset(
    {"DISTOP_USER", "DISTOP_PASSWORD", "DISTOP_PASSWORD_FILE", "DISTOP_CERT", "DISTOP_KEY", "DISTOP_SPARK_CONF"}
)
"""Variables that no started program gets: what the daemon proves itself to etcd with, and Spark's settings."""
_CATALOGS = "PYICEBERG_"
"""Prefix of the variables of Iceberg catalogs. The process that runs behaviors needs them; Spark does not."""
_IN_URI = re.compile(r"://[^/@:\s]*:([^/@\s]+)@")
"""The password in a URI."""
_NO_SECRET = frozenset({"true", "false"})
_PATH_VARIABLE = re.compile(r"(?i)(?:file|path|dir|directory)$|^GOOGLE_APPLICATION_CREDENTIALS$")
"""Names of variables that hold the path of a secret, which errors must name."""
_SHORT_NUMBER = re.compile("[0-9]{1,7}")

_hidden: set[str] = set()
_any_hidden: re.Pattern[str] | None = None


def is_secret(name: str, pattern: str = "") -> bool:
    """Whether the value of a setting or a variable of this name is secret. ``pattern``: names that are, besides."""
    found = re.search(PATTERN, re.sub("[_-]", ".", name))
    if found is None and pattern:
        try:
            found = re.search(pattern, name)
        except re.error:  # a pattern of Java's that Python does not read: Spark itself obeys it
            found = None
    return found is not None


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is started here: without credentials and the variables of catalogs."""
    return {name: value for name, value in own.items() if name not in CREDENTIALS and not name.startswith(_CATALOGS)}


def of_catalogs(own: Mapping[str, str]) -> dict[str, str]:
    """The variables of catalogs. The child gets them over its connection, because /proc shows an environment."""
    return {name: value for name, value in own.items() if name.startswith(_CATALOGS)}


def hide_settings(settings: Mapping[str, str]) -> None:
    """Replace the values of secret settings in all texts that :func:`redact` sees from now on."""
    pattern = settings.get(PATTERN_SETTING, "")
    hide(value for name, value in settings.items() if is_secret(name, pattern))
    _hide_in_uris(settings.values())


def hide_variables(own: Mapping[str, str], pattern: str = "") -> None:
    """Replace the values of secret environment variables in all texts that :func:`redact` sees from now on.

    ``pattern``: names that are secret, besides. Paths are not replaced, nor is the number of MAX_TOKENS.
    """
    hide(
        value
        for name, value in own.items()
        if is_secret(name, pattern) and not _is_harmless(name, value)
    )
    _hide_in_uris(own.values())


def _is_harmless(name: str, value: str) -> bool:
    """Whether the value of a variable with a secret name is none: the path of a secret, or a limit or age of tokens."""
    if _PATH_VARIABLE.search(name) or os.path.exists(value):  # noqa: PTH110 - Path raises where a value is too long
        return True
    return "token" in name.lower() and _SHORT_NUMBER.fullmatch(value) is not None


def _hide_in_uris(values: Iterable[str]) -> None:
    hide(found[1] for value in values for found in _IN_URI.finditer(value))


def hide(values: Iterable[str]) -> None:
    """Replace these values in all texts that :func:`redact` sees from now on, also as JSON and logs spell them."""
    global _any_hidden
    # Logs are redacted line by line, and a key has several.
    parts = (part.strip() for value in values for part in (value, *value.splitlines()))
    for part in parts:
        if len(part) >= SHORTEST and part.lower() not in _NO_SECRET:
            in_json = (json.dumps(part, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
            _hidden.update((part, one_line(part), *in_json))
    # The longest first: one may be part of another.
    ordered = sorted(_hidden, key=len, reverse=True)
    _any_hidden = re.compile("|".join(map(re.escape, ordered))) if ordered else None


def hides() -> bool:
    """Whether any value is hidden."""
    return _any_hidden is not None


def longest() -> int:
    """Characters of the longest hidden value."""
    return max(map(len, _hidden), default=0)


def redact(text: str) -> str:
    """The text without the values that are hidden."""
    return _any_hidden.sub(REPLACEMENT, text) if _any_hidden is not None else text


def shortened(text: str, limit: int) -> str:
    """The text without hidden values, within ``limit`` characters.

    A text that is cut before it is redacted keeps most of a value across the cut: no value equals it any more.
    """
    return shorten(redact(text), limit)
