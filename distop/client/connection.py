"""Connects a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from distop.client.async_client import Client
from distop.client.connection_options import ConnectionOptions, configure
from distop.runtime.keyword_signatures import takes_fields_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from types import TracebackType

    from distop.client.connection_options import ConnectionKeywords
    from distop.settings import ClientConfig


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


@takes_fields_of(ConnectionOptions)
def connect(endpoints: str | Iterable[str] | None = None, **options: Unpack[ConnectionKeywords]) -> Connecting:
    """Connect to etcd: one endpoint or several, ``DISTOP_ETCD`` when left out, else 127.0.0.1:2379.

    Or to a service: ``grpc://host:port``, or ``grpcs://`` with TLS (docs/reference/service.md), with a ``token``.
    Several addresses of services are separated by commas.

    See :class:`~distop.client.connection_options.ConnectionOptions` for the options. Raises InvalidArgument; awaiting
    it raises EtcdUnavailable when etcd does not answer within ``connect_timeout`` seconds (default 10), and
    PermissionDenied.
    """
    return Connecting(configure(endpoints, **options))
