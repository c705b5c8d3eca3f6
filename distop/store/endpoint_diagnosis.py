"""Diagnoses with plain sockets why etcd endpoints cannot be used, for the connect error."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.store.connection_settings import Endpoint

_DURATION = 2.0
"""Seconds of the diagnosis: endpoints that answer later count as silent."""
_SHARE = 0.75
"""Maximum share of the connect time-out."""
_MIN_DURATION = 0.2
"""Minimum seconds, however late the diagnosis starts."""


class Diagnosis:
    """Examines all endpoints concurrently in the last seconds of the connect time-out.

    So its results are ready when the time-out ends. ``connect_timeout`` in seconds.
    """

    def __init__(self, endpoints: Sequence[Endpoint], secure: bool, connect_timeout: float) -> None:
        self._endpoints = endpoints
        self._secure = secure
        self._duration = min(_DURATION, _SHARE * connect_timeout)
        self._results: asyncio.Future[list[str]] | None = None

    def start_if_due(self, left: float) -> float:
        """Start if the ``left`` seconds of the time-out require it. Returns seconds until the next call is needed."""
        if self._results is None and left > self._duration:
            return left - self._duration
        if self._results is None:
            until = asyncio.get_running_loop().time() + max(left, _MIN_DURATION)
            # A task: a cancelled gather logs its CancelledError if nobody awaits it.
            self._results = asyncio.ensure_future(self._explain_all(until))
        return left

    async def _explain_all(self, until: float) -> list[str]:
        return await asyncio.gather(*(explain(endpoint, self._secure, until) for endpoint in self._endpoints))

    async def results(self) -> list[str]:
        """The problem of each endpoint, "" for none. Call it only after the diagnosis has started."""
        assert self._results is not None
        return await self._results

    def cancel(self) -> None:
        """Cancel the diagnosis; its results are not needed."""
        if self._results is not None:
            self._results.cancel()


async def explain(endpoint: Endpoint, secure: bool, until: float) -> str:
    """The problem that a connection attempt shows, "" for none. ``until``: a time of the loop's clock."""
    try:
        async with asyncio.timeout_at(until):
            addresses = await _addresses(endpoint)
    except socket.gaierror:
        return "unknown host name: correct it, or fix this machine's DNS"
    except TimeoutError:
        return "DNS lookup of the host timed out"
    except (OSError, UnicodeError):
        return "invalid host name"
    if not await _opens(endpoint, addresses, None, until):
        return "connection refused or timed out"
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # tests only whether the server uses TLS; nothing is sent
    uses_tls = await _opens(endpoint, addresses, context, until)
    if uses_tls and not secure:
        return "the server uses TLS: use https:// and give the CA certificate"
    if not uses_tls and secure:
        return "the server does not use TLS: use http://, or correct the port"
    if secure:
        return "its certificate or ours was rejected: check the CA certificate and the host name"
    return ""


async def _addresses(endpoint: Endpoint) -> list[str]:
    """The host's addresses; a numeric address is its own. Raises OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    host = endpoint.host.strip("[]")
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    if isinstance(loop, asyncio.SelectorEventLoop):
        found = await _resolve_in_daemon_thread(host, endpoint.port)
    else:
        found = await loop.getaddrinfo(host, endpoint.port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _resolve_in_daemon_thread(host: str, port: int) -> asyncio.Future[list[Any]]:
    """The addresses of a host, resolved in a daemon thread.

    The loop's own threads are joined when the process ends, and a silent DNS server blocks them for half a minute.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Any]] = loop.create_future()

    def deliver(found: list[Any] | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found or [])

    def resolve() -> None:
        found, failure = None, None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, found, failure)

    threading.Thread(target=resolve, name="distop-resolve", daemon=True).start()
    return answer


async def _opens(endpoint: Endpoint, addresses: list[str], context: ssl.SSLContext | None, until: float) -> bool:
    """Whether a connection to any of the addresses succeeds; with ``context``, one with TLS."""
    return any(await asyncio.gather(*(_connects(endpoint, address, context, until) for address in addresses)))


async def _connects(endpoint: Endpoint, address: str, context: ssl.SSLContext | None, until: float) -> bool:
    name = endpoint.host.strip("[]") if context is not None else None
    try:
        async with asyncio.timeout_at(until):
            _, writer = await asyncio.open_connection(address, endpoint.port, ssl=context, server_hostname=name)
    except ssl.SSLError as error:
        # A server that requires a client certificate uses TLS.
        return "CERTIFICATE" in str(error).upper()
    except (OSError, TimeoutError, ValueError):  # ValueError: the host name is invalid for TLS
        return False
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
        async with asyncio.timeout_at(until):
            await writer.wait_closed()
    return True
