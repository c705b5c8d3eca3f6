"""How to reach etcd: endpoints, credentials, certificates, time limits."""

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
"""Seconds for which a client repeats a transaction whose outcome is unknown before it says so."""


@frozen
class Endpoint:
    """One etcd member's client address. ``secure`` is None where the text named no scheme."""

    host: str
    port: int
    secure: bool | None = None

    @property
    def address(self) -> str:
        """``host:port`` as gRPC takes it."""
        return f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether it is on this machine."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def parse_endpoint(text: str) -> Endpoint:
    """``host:port``, ``http://host:port`` or ``https://host:port``; an IPv6 host stands in brackets.

    Raises InvalidArgument for anything else.
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
    """The endpoints of a comma list, or of several of them; blanks and empty parts are dropped."""
    parts = [text] if isinstance(text, str) else list(text)
    return tuple(piece.strip() for part in parts for piece in part.split(",") if piece.strip())


def password_in_plain(config: EtcdConfig) -> str:
    """What to say where a password crosses a network without TLS; "" where it does not."""
    far = [endpoint.address for endpoint in config.members if not endpoint.loopback]
    if not config.username or config.secure or not far:
        return ""
    return (
        f"the password of {config.username!r} is sent to {', '.join(far)} without TLS, and whoever sees the network "
        "reads it: name the endpoints with https:// or give --cacert"
    )


@frozen
class EtcdConfig:
    """Where etcd is and who we are there.

    ``endpoints``: texts as :func:`parse_endpoint` takes them, comma lists too. ``ca_cert``, ``cert``, ``key``: paths of
    PEM files; any of them, or an ``https`` endpoint, means TLS. Times are seconds: ``connect_timeout`` bounds
    ``connect()``, ``request_timeout`` one attempt of a request, ``read_timeout`` the repetitions of a read (None: for
    ever, as daemons want it). ``namespace`` is only named in errors here: ``protocol.keys`` spells it into keys.
    ``accept_defects``: work with a server that is refused for its defects, as tests of several members have to.

    Raises InvalidArgument where the fields do not fit together.
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
            raise InvalidArgument("no etcd endpoint is given: write host:port, or several with commas between them")
        schemes = {endpoint.secure for endpoint in self.members}
        if schemes >= {True, False}:
            raise InvalidArgument("the etcd endpoints mix http and https: write all of them with the same scheme")
        if False in schemes and (self.ca_cert or self.cert or self.key):
            raise InvalidArgument("certificates are given for http endpoints: write https://, or leave them out")
        if bool(self.cert) != bool(self.key):
            raise InvalidArgument("a client certificate needs its key, and the key its certificate: give both")
        if bool(self.username) != bool(self.password):
            raise InvalidArgument("an etcd user name needs a password, and a password a user name: give both")
        if self.namespace and not _NAMESPACE.fullmatch(self.namespace):
            raise InvalidArgument(f"the namespace {shown(self.namespace)} may hold letters, digits, '_' and '-' only")
        for name in ("connect_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} is a number of seconds greater than 0, not {shown(getattr(self, name))}")

    @property
    def members(self) -> tuple[Endpoint, ...]:
        """The endpoints, parsed."""
        return tuple(parse_endpoint(text) for text in self.endpoints)

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return bool(self.ca_cert or self.cert) or any(endpoint.secure for endpoint in self.members)
