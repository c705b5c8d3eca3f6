"""URLs of verifiers (C14).

Decides which are valid, and which of them an executor's list allows. The URL comes from the sender of a prepared
operation, and the executor sends the request. So it is compared with the prefixes of the executor's setting
``verifier-url`` part by part, never as text: ``https://host.evil/`` begins with ``https://host``.
``worker.child_side.sender_verification`` resolves the host and checks its addresses. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST = 1_000
"""Maximum characters of a URL."""
PORTS = {"http": 80, "https": 443}
_PRINTABLE = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|[0-9a-f:.]+")


@frozen
class VerifierUrl:
    """The parts of a URL.

    ``host``: in lower case, an IPv6 address without brackets. ``segments``: of the path, unescaped, without an empty
    last one.
    """

    scheme: str
    host: str
    port: int
    path: str
    segments: tuple[str, ...]

    def within(self, prefix: VerifierUrl) -> bool:
        """Whether the prefix has the same scheme, host and port, and its path is a prefix of this path."""
        same = (self.scheme, self.host, self.port) == (prefix.scheme, prefix.host, prefix.port)
        return same and self.segments[: len(prefix.segments)] == prefix.segments


def parse(url: str, what: str = "the URL of a verifier") -> VerifierUrl:
    """The parts of ``http(s)://host[:port][/path]``.

    Raises InvalidArgument for anything else; the message repeats no secret.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidArgument(f"{what} cannot be read: write it as https://host:port/path") from None
    if parts.scheme not in PORTS:
        raise InvalidArgument(f"a verifier is asked by http or https, not by {shown(parts.scheme[:20])}")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise InvalidArgument(
            f"{what} has neither a user, a password nor parameters: whoever reads etcd reads it, and external_id and "
            "op are added as parameters when it is asked"
        )
    host = parts.hostname or ""
    printable = _PRINTABLE.fullmatch(url) is not None and "\\" not in url
    if not printable or port == 0 or not _HOST.fullmatch(host) or len(url) > LONGEST:
        raise InvalidArgument(f"{what} is https://host:port/path, in printable ASCII, of at most {LONGEST} characters")
    segments = tuple(unquote(one, errors="replace") for one in parts.path.split("/")[1:])
    if any(_is_ambiguous(one) for one in segments):
        raise InvalidArgument(
            f"{what} has a path that servers resolve differently ('..', '//' or an escaped separator): write it plainly"
        )
    if segments and not segments[-1]:
        segments = segments[:-1]
    if not all(segments):
        raise InvalidArgument(f"{what} has an empty part in its path: write it plainly")
    return VerifierUrl(parts.scheme, host, port or PORTS[parts.scheme], parts.path or "/", segments)


def _is_ambiguous(segment: str) -> bool:
    """Whether servers may resolve the segment differently: doubly escaped, or with a semicolon before dots."""
    return segment.partition(";")[0] in (".", "..") or any(c in "/\\%" or not c.isprintable() for c in segment)


def allowing(url: VerifierUrl, prefixes: Iterable[VerifierUrl]) -> VerifierUrl | None:
    """The first prefix that the URL is within; None: it must not be asked."""
    return next((prefix for prefix in prefixes if url.within(prefix)), None)
