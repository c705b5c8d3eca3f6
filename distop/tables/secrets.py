"""Secrets in the places that a table record names. Everybody who reads etcd reads the record, so that they are refused.

What is no URI is a local path, which may have any character in its names.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from distop.errors import InvalidArgument

_URI = re.compile(r"\s*(?!file:)(?:[a-z][a-z0-9+.-]*:)+//", re.IGNORECASE)
_NEXT = re.compile(r",(?=\s*[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
"""Between the URIs of several servers, as Hive has them."""
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")
_USER_IS_KEY = ("http", "https", "s3", "s3a", "s3n")
"""Schemes of which what stands before the ``@`` is a key or a token, no mere name; in ``abfs`` it is a container."""
_GIVEN = re.compile(
    r"(?:pass|pwd|secret|token|key|credential|signature)[^=&;]*=|(?:^|[?&;])\s*(?:sig|sas)\s*=", re.IGNORECASE
)


def check_place(what: str, place: str) -> None:
    """Raises InvalidArgument where a location has a secret in it; the sentence does not repeat it."""
    if holds_secret(place):
        raise InvalidArgument(
            f"{what} with a password, a key or a token in it does not belong into a table record: leave that out, and "
            "give it to the executors, in their environment (AWS_ACCESS_KEY_ID and the like) and in Spark's settings "
            "(spark.hadoop.… as spark-conf in the settings file)"
        )


def holds_secret(place: str) -> bool:
    """Whether a URI has a password, a key or a token before its host or in its parameters, or may have: what stands
    where a port should, and is none, is the beginning of a password with a ``/`` or a ``#`` in it.
    """
    return _URI.match(place) is not None and any(map(_in_uri, _NEXT.split(place)))


def _in_uri(uri: str) -> bool:
    scheme, _, rest = uri.strip().partition("://")
    try:
        parts = urlsplit(f"any://{rest}")
    except ValueError:
        return True  # a bracket that is not closed: where its host ends cannot be told
    user, at, hosts = parts.netloc.rpartition("@")
    if ":" in user or (at and scheme.rpartition(":")[2].lower() in _USER_IS_KEY):
        return True
    if not all(_HOST.fullmatch(host) for host in hosts.split(",")):
        return True
    return any(_GIVEN.search(unquote(text)) for text in (parts.query, parts.fragment))
