"""Which storage URLs are allowed in data: in table records, plans, file lists and Iceberg metadata.

Such a URL names a bucket or a container, and a path in it. It never names an endpoint, an account, a role or a secret:
those come from the environment and the settings of whoever opens it. What is no URL is a local path, which may have any
character in its names.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from distop.errors import InvalidArgument
from distop.protocol.texts import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

HOSTS = "DISTOP_STORAGE_HOSTS"
"""The environment variable with the hosts that URLs may name besides: ``namenode:8020,nameservice1``."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GOOGLE = re.compile(r"(?:anonymous@)?[A-Za-z0-9][A-Za-z0-9._-]*")
"""Without credentials nothing can be sent to anybody."""
_AZURE = re.compile(r"[A-Za-z0-9$-]+@[a-z0-9]+\.(?:dfs|blob)\.core\.windows\.net")
"""Any other host would be sent the token of this machine's identity."""
_NO_HOST = re.compile("")
_AUTHORITIES = {
    **dict.fromkeys(("s3", "s3a", "s3n"), _BUCKET),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), _AZURE),
    **dict.fromkeys(("hdfs", "viewfs"), _NO_HOST),
}
"""By scheme, what may stand between ``://`` and the path."""
SCHEMES = ("file", *_AUTHORITIES)

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")

_URI = re.compile(r"\s*(?!file:)(?:[a-z][a-z0-9+.-]*:)+//", re.IGNORECASE)
_NEXT = re.compile(r",(?=\s*[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
"""Between the URIs of several servers, as Hive has them."""
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")
_USER_IS_KEY = ("http", "https", "s3", "s3a", "s3n")
"""Schemes of which what stands before the ``@`` is a key or a token, no mere name; in ``abfs`` it is a container."""
_SECRET = re.compile(r"pass|pwd|secret|token|key|credential|signature", re.IGNORECASE)
"""In the name of a parameter: its value is a secret."""
_SIGNATURES = ("sig", "sas")
LONGEST_PATH = 4096
"""Characters of a file's path, as Linux has it; object stores have 1,024 bytes."""


def check_place(what: str, place: str) -> None:
    """Raises InvalidArgument where a location is a URL that is not allowed in data; a secret in it is not repeated."""
    if holds_secret(place):
        raise InvalidArgument(
            f"{what} with a password, a key or a token in it does not belong into a table record: leave that out, and "
            "give it to the executors, in their environment (AWS_ACCESS_KEY_ID and the like) and in Spark's settings "
            "(spark.hadoop.… as spark-conf in the settings file)"
        )
    if _URI.match(place):
        _check_url(what, place)


def check_paths(paths: Iterable[str]) -> None:
    """Raises InvalidArgument for a file's path that is neither local nor an allowed URL. Hadoop reads a scheme also
    where no ``//`` follows it, so such a path is refused as well, and so is one of over 4,096 characters.
    """
    known: set[str] = set()
    for path in paths:
        if len(path) > LONGEST_PATH:
            raise InvalidArgument(f"the path of a file, {shown(path)}, has over {LONGEST_PATH} characters")
        if path.startswith("/") or not (found := _SCHEME.match(path)) or found[1] == "file":
            continue
        end = path.find("/", found.end() + 2)
        bucket = path[: end + 1]
        # Without a slash after it, the end of the bucket's name is not known.
        if end >= 0 and bucket in known and "?" not in path and "#" not in path:
            continue
        check_place("the path of a file", path)
        if not _URI.match(path):
            raise InvalidArgument(f"the path of a file, {shown(path)}, is neither a local path nor a URL with '://'")
        known.add(bucket)


def _check_url(what: str, place: str) -> None:
    """Raises InvalidArgument where the URL has more than a scheme, a bucket or a container, and a path."""
    scheme, _, rest = place.partition("://")
    authority = rest.partition("/")[0]
    address = place.partition("?")[0].partition("#")[0]
    said = f"{what}, {shown(address)},"
    allowed = _AUTHORITIES.get(scheme.lower())
    if allowed is None:
        known = did_you_mean(scheme, SCHEMES, "known")
        raise InvalidArgument(f"{said} has the scheme {shown(scheme)}, which is not known{known}")
    if address != place:
        raise InvalidArgument(
            f"{said} has parameters, which could choose an endpoint, a role or an identity: leave them out, and give "
            "the executors what else it needs in their environment (AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the like)"
        )
    if authority and authority not in _listed_hosts() and not allowed.fullmatch(authority):
        raise InvalidArgument(
            f"{said} names the host or the account {shown(authority)}, which is not allowed: write s3://BUCKET/PATH, "
            "gs://BUCKET/PATH, abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH or hdfs:///PATH, or list this host "
            f"in the executors' environment, as {HOSTS}"
        )


def _listed_hosts() -> frozenset[str]:
    return frozenset(host.strip() for host in os.environ.get(HOSTS, "").split(",") if host.strip())


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
    return any(_has_secret(unquote(text)) for text in (parts.query, parts.fragment))


def _has_secret(parameters: str) -> bool:
    """Whether the name of a parameter says that its value is a secret. Takes linear time: anybody may write it."""
    for parameter in re.split("[&;]", parameters):
        for n, name in enumerate(parameter.split("=")[:-1]):
            _, asked, last = name.rpartition("?")
            if _SECRET.search(name) or ((asked or n == 0) and last.strip().lower() in _SIGNATURES):
                return True
    return False
