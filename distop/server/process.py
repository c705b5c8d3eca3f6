"""The service's process: connects to etcd, serves until SIGTERM or SIGINT, and then ends the open calls in order."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

from distop.client.direct_backend import DirectBackend
from distop.errors import InvalidArgument, UsageError
from distop.protocol.keys import Keys
from distop.server.grpc_face import GrpcFace
from distop.server.handlers import services
from distop.store.client import EtcdClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.settings import ClientConfig

log = logging.getLogger("distop.service")

GRACE = 10.0
"""Seconds for which open calls may go on after a signal."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_address(host: str) -> None:
    """Raises InvalidArgument for an address that others can reach: callers are not identified yet."""
    if host not in LOOPBACK:
        raise InvalidArgument(
            f"the service identifies no callers yet, so it serves this machine only: listen on 127.0.0.1, not {host}"
        )


async def serve(
    config: ClientConfig, listen: tuple[str, int], ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until a signal. ``ready`` is called with the port.

    Raises InvalidArgument (the address), EtcdUnavailable, PermissionDenied, UsageError (the address cannot be used).
    """
    host, port = listen
    check_address(host)
    backend = DirectBackend(EtcdClient(config.etcd), Keys(config.namespace), config.shared_dir)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await backend.connect()
        face = GrpcFace(services(backend))
        try:
            opened = await face.start(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error}") from None
        log.info("Serving gRPC on %s:%d", host, opened)
        ready(opened)
        await stopped.wait()
        log.info("Stopping: new calls are refused, open ones have %g s", GRACE)
        await face.stop(GRACE)
    finally:
        await backend.close()
