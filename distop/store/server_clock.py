"""Reads the clock of an etcd server from its HTTP ``Date`` header, accurate to one second.

etcd's gRPC protocol has no clock.
"""

from __future__ import annotations

import asyncio
import http.client
import ssl
from contextvars import ContextVar
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from distop.clock import time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.store.connection_settings import Endpoint, EtcdConfig

LIMIT = 2.0
"""Time-out in seconds for each step of the request."""


class ClockUnreadable(Exception):
    """The server's clock could not be read; the message is the cause."""


async def ahead(config: EtcdConfig, address: str, limit: float = LIMIT) -> float:
    """Minimum seconds by which this machine's clock is ahead of the member's (negative: behind it).

    0 if the clocks may agree. Raises ClockUnreadable.
    """
    endpoint = next(member for member in config.members if member.address == address)
    return await reading.get()(config, endpoint, limit)


async def _by_http(config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
    return await asyncio.to_thread(_ahead, config, endpoint, limit)


reading: ContextVar[Callable[[EtcdConfig, Endpoint, float], Awaitable[float]]] = ContextVar(
    "distop-server-clock", default=_by_http
)
"""Function that reads the clock of a member. The simulator replaces it."""


def _ahead(config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
    try:
        connection = _connection(config, endpoint, limit)
        try:
            connection.connect()
            sent = time.time()
            connection.request("GET", "/version")
            answer = connection.getresponse()
            received_at = time.time()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ClockUnreadable(f"HTTP request to {endpoint.address} failed: {error or type(error).__name__}") from None
    server_time = _seconds(answer.getheader("Date"))
    if answer.status != 200 or server_time is None:
        raise ClockUnreadable(f"the HTTP answer of {endpoint.address} has no valid Date header")
    # The server read its clock between the two times, and cut off the fraction of the second.
    least, most = sent - (server_time + 1), received_at - server_time
    return least if least > 0 else most if most < 0 else 0.0


def _connection(config: EtcdConfig, endpoint: Endpoint, limit: float) -> http.client.HTTPConnection:
    if not config.secure:
        return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=limit)
    context = ssl.create_default_context(cafile=config.ca_cert)
    if config.cert and config.key:
        # Without an explicit password OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(config.cert, config.key, password=lambda: b"")
    return http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=limit, context=context)


def _seconds(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
