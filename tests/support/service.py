"""A service in this process, and clients that are connected to it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from distop import aio
from distop.client.async_client import Client
from distop.client.connection_options import configure
from distop.client.direct_backend import DirectBackend
from distop.protocol.keys import Keys
from distop.server.call_admission import CallAdmission
from distop.server.grpc_server import GrpcServer
from distop.server.handlers import services
from distop.server.operation_watches import OperationWatches
from distop.store.client import EtcdClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from distop.settings import ClientConfig


class ClientOfService(Client):
    """A client that is connected to a service, with etcd's client beside it for what only tests look at."""

    def __init__(self, url: str, backend: DirectBackend, config: ClientConfig) -> None:
        super().__init__(configure(url))
        self._tests = backend
        self.config = config

    @property
    def etcd(self) -> EtcdClient:
        return self._tests.etcd

    @property
    def keys(self) -> Keys:
        return self._tests.keys


@asynccontextmanager
async def client_of_service(endpoint: str, namespace: str) -> AsyncIterator[aio.Client]:
    """A connected client of a service that runs on this etcd."""
    config = configure(endpoint, namespace=namespace)
    backend = DirectBackend(EtcdClient(config.etcd), Keys(namespace))
    await backend.connect()
    watches = OperationWatches(backend.etcd, backend.keys)
    server = GrpcServer(services(backend, watches), CallAdmission())
    port = await server.start("127.0.0.1:0")
    try:
        async with ClientOfService(f"grpc://127.0.0.1:{port}", backend, config) as client:
            await client.connect()
            yield client
    finally:
        await server.stop(0)
        await watches.close()
        await backend.close()


class ServiceThread:
    """A service on this etcd, in a thread of its own. ``url``: for clients."""

    through = False
    """Whether the clients of the daemons' tests are connected to a service (``--through-service``)."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready: list[int] = []
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="service", daemon=True)
        self._thread.start()
        started.wait(30)
        assert self._ready, "the service has not started"
        self.url = f"grpc://127.0.0.1:{self._ready[0]}"

    def _run(self, started: threading.Event) -> None:
        try:
            self._loop.run_until_complete(self._serve(started))
        finally:
            started.set()
            self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        backend = DirectBackend(EtcdClient(configure(self._endpoint).etcd), Keys())
        await backend.connect()
        watches = OperationWatches(backend.etcd, backend.keys)
        server = GrpcServer(services(backend, watches), CallAdmission())
        self._ready.append(await server.start("127.0.0.1:0"))
        started.set()
        await self._stopped.wait()
        await server.stop(0)
        await watches.close()
        await backend.close()

    def close(self) -> None:
        """Stop it, and wait for its end."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(30)
