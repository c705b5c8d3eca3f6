"""The settings and the connection of a client."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from distop.client.async_client import Client
from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.settings import ClientConfig, Settings, client_config

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from types import TracebackType


def configure(
    endpoints: str | Iterable[str] | None = None,
    *,
    client: Any = None,
    namespace: str | None = None,
    username: str | None = None,
    password: str | None = None,
    ca_cert: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    connect_timeout: float | None = None,
    shared_dir: str | None = None,
) -> ClientConfig:
    """The settings of a client; what is left out comes from ``DISTOP_<NAME>``. Raises InvalidArgument.

    ``client``: an ``etcd3.Etcd3Client`` of the caller's, whose address is taken. It keeps neither the password nor the
    certificate files that it was made with, so those are given here as well.
    """
    if client is not None:
        if endpoints is not None:
            raise InvalidArgument("give either the endpoints or an etcd3 client, not both")
        endpoints = _address_of(client, bool(username), bool(ca_cert or cert))
    if endpoints is not None and not isinstance(endpoints, str):
        try:
            endpoints = list(endpoints)
        except TypeError:
            raise InvalidArgument(f"the endpoints must be a text or a list of texts, not {shown(endpoints)}") from None
    flags = {
        "etcd": endpoints,
        "namespace": namespace,
        "user": username,
        "password": password,
        "cacert": ca_cert,
        "cert": cert,
        "key": key,
        "connect_timeout": connect_timeout,
        "shared_dir": shared_dir,
    }
    names = {"etcd": "endpoints", "user": "username", "cacert": "ca_cert"}
    return client_config(Settings(flags, names={name: names.get(name, name) for name in flags}))


def _address_of(client: Any, user: bool, tls: bool) -> str:
    address = getattr(client, "_url", None)
    if not isinstance(address, str) or not address:
        raise InvalidArgument(f"{type(client).__name__} is not an etcd3.Etcd3Client: pass one, or the endpoints")
    if getattr(client, "call_credentials", None) is not None and not (user or os.environ.get("DISTOP_USER")):
        raise InvalidArgument("the etcd3 client has a user, but keeps no password: pass username and password as well")
    if getattr(client, "uses_secure_channel", False):
        if not (tls or os.environ.get("DISTOP_CACERT")):
            raise InvalidArgument("the etcd3 client speaks TLS, but keeps no certificate: pass ca_cert as well")
        return f"https://{address}"
    return address


class Connecting:
    """``await`` it, or enter it with ``async with``, for a connected :class:`Client`."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._connect().__await__()

    async def _connect(self) -> Client:
        client = Client(self._config)
        try:
            await client.connect()
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> Client:
        self._client = await self._connect()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


def connect(
    endpoints: str | Iterable[str] | None = None,
    *,
    client: Any = None,
    namespace: str | None = None,
    username: str | None = None,
    password: str | None = None,
    ca_cert: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    connect_timeout: float | None = None,
    shared_dir: str | None = None,
) -> Connecting:
    """Connect to etcd: one endpoint or several, ``DISTOP_ETCD`` when left out, else 127.0.0.1:2379.

    See :func:`configure` for the parameters. Raises InvalidArgument; awaiting it raises EtcdUnavailable when etcd does
    not answer within ``connect_timeout`` seconds (default 10), and PermissionDenied.
    """
    return Connecting(
        configure(
            endpoints,
            client=client,
            namespace=namespace,
            username=username,
            password=password,
            ca_cert=ca_cert,
            cert=cert,
            key=key,
            connect_timeout=connect_timeout,
            shared_dir=shared_dir,
        )
    )
