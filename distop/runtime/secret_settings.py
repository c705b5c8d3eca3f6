"""Decides which settings and environment variables are secret, and redacts their values in texts.

The name decides: Spark's default pattern (``spark.redaction.regex`` in Spark 4.1), and names of keys, passwords and
headers that it lacks. A setting may extend the pattern, but not narrow it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus, unquote

from distop.protocol.json_codec import shorten
from distop.protocol.texts import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PATTERN = (
    "(?i)secret|passw(or)?d|passphrase|[.](pwd|pass)(?![a-z])|token|credential|access[.]?(key|signature)"
    "|(account|api|private|storage|encryption|sse|sse[.]customer|encryption[.]customer)[.]?key(?![a-z])"
    "|(azure|storage|adls|blob)[.]sas(?![a-z])|conn(ection)?[.]?str(ing)?(?![a-z])"
    "|header[.](.*[.])?(authorization|cookie)(?![a-z])|jaas[.]config"
)
"""Pattern of secret names, in which a dot stands for ``_``, ``-`` or several of them. Also valid in Java."""
PATTERN_SETTING = "spark.redaction.regex"
REPLACEMENT = "*********(redacted)"
"""Spark's replacement text."""
SHORTEST = 4
"""Minimum characters of a redacted value: shorter values occur in many texts."""

CREDENTIALS = frozenset(
    {"DISTOP_USER", "DISTOP_PASSWORD", "DISTOP_PASSWORD_FILE", "DISTOP_CERT", "DISTOP_KEY", "DISTOP_SPARK_CONF"}
)
"""Variables that no started program gets: the daemon's credentials for etcd, and Spark's settings."""
_CATALOGS = "PYICEBERG_"
"""Prefix of the variables of Iceberg catalogs. The process that runs behaviors needs them; Spark does not."""
_IN_URI = re.compile(r"://([^/@:\s]*):([^/@\s]+)@")
"""The user and the password in a URI."""
_IN_QUERY = re.compile(r"(?i)[?&;](?:password|passwd|pwd|secret|token|sig)=([^;&\s]+)")
"""A secret parameter of a URI."""
_IN_STRING = re.compile(
    r"""(?i)(?:key|password|passwd|pwd|secret|token|sig)\s*=\s*(?:"([^"]+)"|'([^']+)'|([^;&\s"']+))"""
)
"""The secret part of a connection string, of a shared access signature, or of a login module's configuration."""
_CREDENTIAL = re.compile(r"(?i)credential$")
"""Names of Iceberg's settings whose values are ``id:secret``."""
_SCHEME = re.compile(r"(?i)(?:basic|bearer) +(.+)")
"""The credential of an authorization header, after its scheme."""
_NO_SECRET = frozenset({"true", "false"})
_PATH_VARIABLE = re.compile(r"(?i)(?:file|path|dir|directory)$|^GOOGLE_APPLICATION_CREDENTIALS$")
"""Names of variables that hold the path of a secret, which errors must name."""
_SHORT_NUMBER = re.compile("[0-9]{1,7}")

_hiding = threading.Lock()
_hidden: frozenset[str] = frozenset()
_any_hidden: re.Pattern[str] | None = None


def is_secret(name: str, pattern: str = "") -> bool:
    """Whether a setting or variable of this name has a secret value. ``pattern``: further secret names."""
    found = re.search(PATTERN, re.sub("[._-]+", ".", name))
    if found is None and pattern:
        try:
            found = re.search(pattern, name)
        except re.error:  # a Java pattern that Python does not support; Spark itself uses it
            found = None
    return found is not None


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment for a started program: without credentials and the variables of catalogs."""
    return {name: value for name, value in own.items() if name not in CREDENTIALS and not name.startswith(_CATALOGS)}


def of_catalogs(own: Mapping[str, str]) -> dict[str, str]:
    """The variables of catalogs. The child gets them over its connection, because /proc shows an environment."""
    return {name: value for name, value in own.items() if name.startswith(_CATALOGS)}


def hide_settings(settings: Mapping[str, str]) -> None:
    """Let :func:`redact` replace the values of secret settings from now on."""
    pattern = settings.get(PATTERN_SETTING, "")
    _hide({name: value for name, value in settings.items() if is_secret(name, pattern)}, settings.values())


def hide_variables(own: Mapping[str, str], pattern: str = "") -> None:
    """Let :func:`redact` replace the values of secret environment variables from now on.

    ``pattern``: further secret names. Paths are not replaced, nor are numbers such as MAX_TOKENS.
    """
    secret = {name: value for name, value in own.items() if is_secret(name, pattern) and not _is_harmless(name, value)}
    _hide(secret, own.values())


def _is_harmless(name: str, value: str) -> bool:
    """Whether a variable with a secret name has no secret value: a path, or a limit or age of tokens."""
    if _PATH_VARIABLE.search(name) or os.path.exists(value):  # noqa: PTH110 - Path raises where a value is too long
        return True
    return "token" in name.lower() and _SHORT_NUMBER.fullmatch(value) is not None


def _hide(secret: Mapping[str, str], others: Iterable[str]) -> None:
    """Redact secret values and their secret parts, and secrets in other values, which may be URIs."""
    parts = (part for name, value in secret.items() for part in _parts(name, value))
    hide([*secret.values(), *parts, *(part for value in others for part in _in_uri(value))])


def _parts(name: str, value: str) -> Iterator[str]:
    """The parts of a secret value that are secret by themselves: programs send them, and servers may quote them."""
    for found in _IN_STRING.finditer(value):
        part = found[1] or found[2] or found[3]
        yield from (part, unquote(part))
    if _CREDENTIAL.search(name):
        yield value.partition(":")[2]
    if scheme := _SCHEME.fullmatch(value):
        yield scheme[1]


def _in_uri(value: str) -> Iterator[str]:
    for user, password in _IN_URI.findall(value):
        yield from (password, unquote(password), basic(unquote(user), unquote(password)))
    if "://" in value:
        for part in _IN_QUERY.findall(value):
            yield from (part, unquote(part))


def basic(user: str, password: str) -> str:
    """The encoding of user and password in HTTP's basic authentication."""
    return base64.b64encode(f"{user}:{password}".encode(errors="surrogatepass")).decode()


def hide(values: Iterable[str]) -> None:
    """Let :func:`redact` replace these values from now on, also in their forms in JSON, logs and URLs."""
    global _any_hidden, _hidden
    # Logs are redacted line by line, and a key has several lines.
    parts = {part.strip() for value in values for part in (value, *value.splitlines())}
    forms = (_forms(part) for part in parts if len(part) >= SHORTEST and part.lower() not in _NO_SECRET)
    new = {form for found in forms for form in found}
    with _hiding:
        if new <= _hidden:
            return
        _hidden = _hidden | new
        # Longest first, since one value may be part of another.
        _any_hidden = re.compile("|".join(map(re.escape, sorted(_hidden, key=len, reverse=True))))


def _forms(part: str) -> set[str]:
    """The forms that a value may have in a text."""
    in_json = (json.dumps(part, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
    as_bytes = part.encode(errors="surrogatepass")  # of a variable that is no UTF-8
    in_url = {quote(as_bytes), quote(as_bytes, safe=""), quote_plus(as_bytes)}
    lower = (re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), form) for form in in_url)
    return {part, one_line(part), *in_json, *in_url, *lower}


def longest() -> int:
    """The length of the longest redacted value."""
    return max(map(len, _hidden), default=0)


def redact(text: str) -> str:
    """The text with all known secrets replaced."""
    return _any_hidden.sub(REPLACEMENT, text) if _any_hidden is not None else text


def shortened(text: str, limit: int) -> str:
    """The redacted text, cut to ``limit`` characters.

    It is redacted before it is cut: a secret across the cut would not be recognized afterwards.
    """
    return shorten(redact(text), limit)
