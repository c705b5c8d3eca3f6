"""Checks storage URLs in data: in table records, plans, file lists and Iceberg metadata.

An allowed URL has only a bucket or container, and a path in it. It has no endpoint, account, role or secret: those come
from the environment and the settings of the process that opens it. Any other text is a local path, which may have any
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
"""The environment variable with further hosts that URLs may have: ``namenode:8020,nameservice1``."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GOOGLE = re.compile(r"(?:anonymous@)?[A-Za-z0-9][A-Za-z0-9._-]*")
"""``anonymous``: without credentials, so none can be sent to a wrong bucket."""
_AZURE = re.compile(r"[A-Za-z0-9$-]+@[a-z0-9]+\.(?:dfs|blob)\.core\.windows\.net")
"""Any other host would get a token of this machine's identity."""
_AZURE_NAMES = ("az", "azure", "adl")
"""Schemes of other libraries for Azure."""
_NO_HOST = re.compile("")
_AUTHORITIES = {
    **dict.fromkeys(("s3", "s3a", "s3n"), _BUCKET),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), _AZURE),
    **dict.fromkeys(("hdfs", "viewfs"), _NO_HOST),
}
"""The allowed texts between ``://`` and the path, by scheme."""
SCHEMES = ("file", *_AUTHORITIES)

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):")

_URI = re.compile(r"\s*(?!file:)(?:[a-z][a-z0-9+.-]*:)+//", re.IGNORECASE)
_NEXT = re.compile(r",(?=\s*[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
"""The separator between the URIs of several servers, like in Hive's settings."""
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")
_USER_IS_KEY = ("http", "https", "s3", "s3a", "s3n")
"""Schemes whose text before the ``@`` is a key or a token; in ``abfs`` it is a container."""
_SECRET = re.compile(r"pass|pwd|secret|token|key|credential|signature", re.IGNORECASE)
"""Names of parameters whose values are secrets."""
_SIGNATURES = ("sig", "sas")
LONGEST_PATH = 4096
"""Maximum characters of a file's path, like in Linux; object stores allow 1,024 bytes."""


def check_place(what: str, place: str) -> None:
    """Raises InvalidArgument for a URL that is not allowed in data; the error does not repeat a secret in it."""
    if holds_secret(place):
        raise InvalidArgument(
            f"{what} must not have a password, a key or a token in it: leave that out, and give it to the executors, "
            "in their environment (AWS_ACCESS_KEY_ID and the like) and in Spark's settings (spark.hadoop.… as "
            "spark-conf in the settings file)"
        )
    if _URI.match(place):
        _check_url(what, place)


def check_paths(paths: Iterable[str]) -> None:
    """Raises InvalidArgument for a file's path that is neither local nor an allowed URL, or has over 4,096 characters.

    A path with a scheme but without ``//`` is refused, because Hadoop would recognize the scheme.
    """
    known: set[str] = set()
    for path in paths:
        if len(path) > LONGEST_PATH:
            raise InvalidArgument(f"the path of a file, {shown(path)}, has over {LONGEST_PATH} characters")
        if path.startswith("/") or not (found := _SCHEME.match(path)) or found[1] == "file":
            continue
        end = path.find("/", found.end() + 2)
        bucket = path[: end + 1]
        # Without a slash after it, the end of the bucket's name is unknown.
        if end >= 0 and bucket in known and "?" not in path and "#" not in path:
            continue
        check_place("the path of a file", path)
        if not _URI.match(path):
            raise InvalidArgument(f"the path of a file, {shown(path)}, is neither a local path nor a URL with '://'")
        known.add(bucket)


def _check_url(what: str, place: str) -> None:
    """Raises InvalidArgument if a URL has more than a scheme, a bucket or container, and a path."""
    scheme, _, rest = place.partition("://")
    authority = rest.partition("/")[0]
    address = place.partition("?")[0].partition("#")[0]
    subject = f"{what}, {shown(address)},"
    allowed = _AUTHORITIES.get(scheme.lower())
    if allowed is None and scheme.lower() in _AZURE_NAMES:
        raise InvalidArgument(
            f"{subject} has the scheme {shown(scheme)}, which names no account, and which Spark does not know: write "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"
        )
    if allowed is None:
        known = did_you_mean(scheme, SCHEMES, "known")
        raise InvalidArgument(f"{subject} has the scheme {shown(scheme)}, which is not known{known}")
    if address != place:
        raise InvalidArgument(
            f"{subject} has parameters, which could choose an endpoint, a role or an identity: leave them out, and "
            "give the executors such settings in their environment (AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the like)"
        )
    if authority and authority not in _listed_hosts() and not allowed.fullmatch(authority):
        raise InvalidArgument(
            f"{subject} names the host or the account {shown(authority)}, which is not allowed: write "
            "s3://BUCKET/PATH, gs://BUCKET/PATH, abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH or hdfs:///PATH, "
            f"or list this host in the executors' environment, as {HOSTS}"
        )


def _listed_hosts() -> frozenset[str]:
    return frozenset(host.strip() for host in os.environ.get(HOSTS, "").split(",") if host.strip())


def holds_secret(place: str) -> bool:
    """Whether a URI has, or may have, a password, a key or a token before its host or in its parameters.

    An invalid port may be the start of a password with a ``/`` or a ``#`` in it.
    """
    return _URI.match(place) is not None and any(map(_in_uri, _NEXT.split(place)))


def _in_uri(uri: str) -> bool:
    scheme, _, rest = uri.strip().partition("://")
    try:
        parts = urlsplit(f"any://{rest}")
    except ValueError:
        return True  # an open bracket: the end of the host is unknown
    user, at, hosts = parts.netloc.rpartition("@")
    if ":" in user or (at and scheme.rpartition(":")[2].lower() in _USER_IS_KEY):
        return True
    if not all(_HOST.fullmatch(host) for host in hosts.split(",")):
        return True
    return any(_has_secret(unquote(text)) for text in (parts.query, parts.fragment))


def _has_secret(parameters: str) -> bool:
    """Whether a parameter's name shows that its value is a secret. Takes linear time, since the text is not trusted."""
    for parameter in re.split("[&;]", parameters):
        for n, name in enumerate(parameter.split("=")[:-1]):
            _, asked, last = name.rpartition("?")
            if _SECRET.search(name) or ((asked or n == 0) and last.strip().lower() in _SIGNATURES):
                return True
    return False
