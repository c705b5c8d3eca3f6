"""The clock of an etcd server: its protocol does not tell it, each answer of its HTTP side does, to a second."""

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
"""Seconds for each step of the request."""


class Untold(Exception):
    """The server's clock could not be read; the message says why."""


async def ahead(config: EtcdConfig, address: str, limit: float = LIMIT) -> float:
    """Seconds that this machine's clock is ahead of that of the member at this address (less than 0: behind it), as far
    as that is certain: 0 where nothing speaks against it. Raises Untold.
    """
    endpoint = next(member for member in config.members if member.address == address)
    return await reading.get()(config, endpoint, limit)


async def _by_http(config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
    return await asyncio.to_thread(_ahead, config, endpoint, limit)


reading: ContextVar[Callable[[EtcdConfig, Endpoint, float], Awaitable[float]]] = ContextVar(
    "distop-server-clock", default=_by_http
)
"""Reads the clock of a member. The simulator replaces it."""


def _ahead(config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
    try:
        connection = _connection(config, endpoint, limit)
        try:
            connection.connect()
            sent = time.time()
            connection.request("GET", "/version")
            answer = connection.getresponse()
            heard = time.time()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Untold(f"no HTTP at {endpoint.address}: {error or type(error).__name__}") from None
    told = _seconds(answer.getheader("Date"))
    if answer.status != 200 or told is None:
        raise Untold(f"the HTTP of {endpoint.address} does not tell its time")
    # It was read somewhere between the two times, and what it told had begun up to a second before.
    least, most = sent - (told + 1), heard - told
    return least if least > 0 else most if most < 0 else 0.0


def _connection(config: EtcdConfig, endpoint: Endpoint, limit: float) -> http.client.HTTPConnection:
    if not config.secure:
        return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=limit)
    context = ssl.create_default_context(cafile=config.ca_cert)
    if config.cert and config.key:
        # Without a password of ours OpenSSL would ask the terminal for one.
        context.load_cert_chain(config.cert, config.key, password=lambda: b"")
    return http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=limit, context=context)


def _seconds(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
