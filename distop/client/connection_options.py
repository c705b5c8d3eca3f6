"""ConnectionOptions: the one list of the options of a connection, and the client settings that follow from them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.runtime.keyword_signatures import takes_fields_of
from distop.settings import ClientConfig, Settings, client_config
from distop.store.connection_settings import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The options of a connection to etcd or to a service. The default of each one is ``DISTOP_<NAME>``.

    ``token``: a bearer token for a service, which has no users, namespaces or shared directories of its own.

    ``client``: an ``etcd3.Etcd3Client`` of the caller's, whose address is used. It stores neither its password nor its
    certificate files, so give these here as well.
    """

    client: Any = None
    namespace: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    connect_timeout: float | None = None
    shared_dir: str | None = None
    token: str | None = field(default=None, repr=False)


class ConnectionKeywords(TypedDict, total=False):
    """The keywords of ``connect``, for the type checker."""

    client: Any
    namespace: str | None
    username: str | None
    password: str | None
    ca_cert: str | None
    cert: str | None
    key: str | None
    connect_timeout: float | None
    shared_dir: str | None
    token: str | None


SERVICE = ("grpc://", "grpcs://")
"""How the URL of a service begins, which is given in the place of etcd's endpoints."""
_OF_SERVICES = ("ca_cert", "cert", "key", "connect_timeout")
"""Options of a connection to etcd that a connection to a service has as well."""
_SETTING_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("namespace", "password", "cert", "key", "connect_timeout", "shared_dir")},
        "username": "user",
        "ca_cert": "cacert",
    }
)
"""Option → its setting."""


@takes_fields_of(ConnectionOptions)
def configure(endpoints: str | Iterable[str] | None = None, **options: Unpack[ConnectionKeywords]) -> ClientConfig:
    """The settings of a client. Raises InvalidArgument."""
    given = ConnectionOptions(**options)
    if given.client is not None:
        if endpoints is not None:
            raise InvalidArgument("give either the endpoints or an etcd3 client, not both")
        endpoints = _address_of(given)
    if endpoints is not None and not isinstance(endpoints, str):
        try:
            endpoints = list(endpoints)
        except TypeError:
            raise InvalidArgument(f"the endpoints must be a text or a list of texts, not {shown(endpoints)}") from None
    elif endpoints is not None and endpoints.lower().startswith(SERVICE):
        return _service_config(endpoints, given)
    if given.token is not None:
        raise InvalidArgument("token is an option of a connection to a service (grpc://, grpcs://), not to etcd")
    flags = {setting: getattr(given, name) for name, setting in _SETTING_NAMES.items()}
    names = {setting: name for name, setting in _SETTING_NAMES.items()}
    return client_config(Settings({"etcd": endpoints, **flags}, names={"etcd": "endpoints", **names}))


def _service_config(url: str, given: ConnectionOptions) -> ClientConfig:
    """The settings of a client of a service. Raises InvalidArgument for options of a connection to etcd."""
    if named := [name for name in _SETTING_NAMES if getattr(given, name) is not None and name not in _OF_SERVICES]:
        raise InvalidArgument(f"{named[0]} is an option of a connection to etcd: a service has its own")
    names = {_SETTING_NAMES[name]: name for name in _OF_SERVICES}
    own = Settings({setting: getattr(given, name) for setting, name in names.items()}, names=names)
    tls = {name: own.get(_SETTING_NAMES[name]) for name in ("ca_cert", "cert", "key")}
    token = given.token if given.token is not None else os.environ.get("DISTOP_TOKEN", "")
    if not isinstance(token, str) or not (token.isascii() and token.isprintable()):
        raise InvalidArgument("the token must be a text of printable ASCII characters")
    etcd = EtcdConfig(connect_timeout=own.get("connect_timeout"), **tls)
    return ClientConfig(etcd, service=url, token=token)


def _address_of(given: ConnectionOptions) -> str:
    client = given.client
    address = getattr(client, "_url", None)
    if not isinstance(address, str) or not address:
        raise InvalidArgument(f"{type(client).__name__} is not an etcd3.Etcd3Client: pass one, or the endpoints")
    if getattr(client, "call_credentials", None) is not None and not (given.username or os.environ.get("DISTOP_USER")):
        raise InvalidArgument("the etcd3 client has a user, but keeps no password: pass username and password as well")
    if getattr(client, "uses_secure_channel", False):
        if not (given.ca_cert or given.cert or os.environ.get("DISTOP_CACERT")):
            raise InvalidArgument("the etcd3 client speaks TLS, but keeps no certificate: pass ca_cert as well")
        return f"https://{address}"
    return address
