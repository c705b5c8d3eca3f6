"""The etcd connection's settings: endpoints, credentials, certificates, time-outs."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import field
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_ENDPOINT = "127.0.0.1:2379"

_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.%]+\]")
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+")

WRITE_LIMIT = 30.0
"""Maximum seconds for which a client repeats a transaction whose outcome is unknown."""


@frozen
class Endpoint:
    """One etcd member's client address. ``secure`` is None if the text had no scheme."""

    host: str
    port: int
    secure: bool | None = None

    @property
    def address(self) -> str:
        """``host:port``, gRPC's format."""
        return f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether the address is a loopback address of this machine."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def parse_endpoint(text: str) -> Endpoint:
    """Parse ``host:port``, ``http://host:port`` or ``https://host:port``.

    An IPv6 host needs brackets. Raises InvalidArgument for anything else.
    """
    rest, secure = text.strip(), None
    for scheme, value in (("http://", False), ("https://", True)):
        if rest.lower().startswith(scheme):
            rest, secure = rest[len(scheme) :], value
    rest = rest.removesuffix("/")
    host, colon, port = rest.rpartition(":")
    if not colon or not _HOST.fullmatch(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgument(
            f"{shown(text.strip())} is not an etcd endpoint: write host:port, http://host:port or https://host:port"
        )
    return Endpoint(host, int(port), secure)


def split_endpoints(text: str | Iterable[str]) -> tuple[str, ...]:
    """The endpoints of one or several comma-separated lists; blanks and empty parts are dropped."""
    parts = [text] if isinstance(text, str) else list(text)
    return tuple(piece.strip() for part in parts for piece in part.split(",") if piece.strip())


def plaintext_password_warning(config: EtcdConfig) -> str:
    """A warning if the password crosses a network without TLS; else ""."""
    remote = [endpoint.address for endpoint in config.members if not endpoint.loopback]
    if not config.username or config.secure or not remote:
        return ""
    return (
        f"the password of {config.username!r} is sent to {', '.join(remote)} without TLS, so it can be read on the "
        "network: use https:// endpoints or give --cacert"
    )


@frozen
class EtcdConfig:
    """etcd's endpoints, and our credentials and time-outs there.

    ``endpoints``: texts for :func:`parse_endpoint`, also comma-separated lists. ``ca_cert``, ``cert``, ``key``: paths
    of PEM files; any of them, or an ``https`` endpoint, enables TLS. Times are in seconds: ``connect_timeout`` for
    ``connect()``, ``request_timeout`` for one attempt of a request, ``read_timeout`` for all repetitions of a read
    (None: no limit, for daemons). ``namespace`` is used only in error texts: ``protocol.keys`` puts it into keys.
    ``accept_defects``: use a server version even if it has known defects (for tests with several members).

    Raises InvalidArgument if the fields contradict each other.
    """

    endpoints: tuple[str, ...] = (DEFAULT_ENDPOINT,)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    connect_timeout: float = 10.0
    request_timeout: float = 5.0
    namespace: str = ""
    read_timeout: float | None = 10.0
    accept_defects: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "endpoints", split_endpoints(self.endpoints))
        if not self.endpoints:
            raise InvalidArgument("no etcd endpoint is given: give host:port, or several separated by commas")
        schemes = {endpoint.secure for endpoint in self.members}
        if schemes >= {True, False}:
            raise InvalidArgument("the etcd endpoints mix http and https: use one scheme for all of them")
        if False in schemes and (self.ca_cert or self.cert or self.key):
            raise InvalidArgument("certificates are given for http endpoints: use https://, or omit the certificates")
        if bool(self.cert) != bool(self.key):
            raise InvalidArgument("a client certificate and its private key belong together: give both")
        if bool(self.username) != bool(self.password):
            raise InvalidArgument("etcd's user name and password belong together: give both")
        if self.namespace and not _NAMESPACE.fullmatch(self.namespace):
            raise InvalidArgument(
                f"the namespace {shown(self.namespace)} is invalid: use only letters, digits, '_' and '-'"
            )
        for name in ("connect_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(
                    f"{name} must be a number of seconds greater than 0, not {shown(getattr(self, name))}"
                )

    @property
    def members(self) -> tuple[Endpoint, ...]:
        """The endpoints, parsed."""
        return tuple(parse_endpoint(text) for text in self.endpoints)

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        return bool(self.ca_cert or self.cert) or any(endpoint.secure for endpoint in self.members)
