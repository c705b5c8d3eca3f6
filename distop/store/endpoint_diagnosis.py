"""Why endpoints cannot be used, found out on plain sockets: for the one sentence that people read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.store.connection_settings import Endpoint

_LONGEST = 2.0
"""Seconds that it takes: what answers later counts as silent."""
_SHARE = 0.75
"""Of the time for connecting, where that is short."""
_LEAST = 0.2
"""Seconds, however late it begins."""


class Looking:
    """A look at all endpoints at once, in the last part of the time for connecting: its answer is there when that is
    up. ``connect_timeout`` in seconds.
    """

    def __init__(self, endpoints: Sequence[Endpoint], secure: bool, connect_timeout: float) -> None:
        self._endpoints = endpoints
        self._secure = secure
        self._takes = min(_LONGEST, _SHARE * connect_timeout)
        self._answers: asyncio.Future[list[str]] | None = None

    def begin(self, left: float) -> float:
        """Begin, if it is time: ``left`` seconds are left. Returns how many may pass before it is to be asked again."""
        if self._answers is None and left > self._takes:
            return left - self._takes
        if self._answers is None:
            until = asyncio.get_running_loop().time() + max(left, _LEAST)
            # A task: a cancelled gather logs its CancelledError where nobody awaits it.
            self._answers = asyncio.ensure_future(self._explain_all(until))
        return left

    async def _explain_all(self, until: float) -> list[str]:
        return await asyncio.gather(*(explain(endpoint, self._secure, until) for endpoint in self._endpoints))

    async def found(self) -> list[str]:
        """What is wrong with each endpoint; empty where it looks right. After :meth:`begin` had no time left."""
        assert self._answers is not None
        return await self._answers

    def stop(self) -> None:
        """Nobody wants to know any more."""
        if self._answers is not None:
            self._answers.cancel()


async def explain(endpoint: Endpoint, secure: bool, until: float) -> str:
    """What is wrong with the endpoint, as far as a connection attempt tells; empty where it looks right. ``until``: of
    the loop's clock.
    """
    try:
        async with asyncio.timeout_at(until):
            addresses = await _addresses(endpoint)
    except socket.gaierror:
        return "the host name is not known: correct it, or the machine's name service"
    except TimeoutError:
        return "the name service does not say in time where the host is"
    except (OSError, UnicodeError):
        return "this is no name of a host"
    if not await _opens(endpoint, addresses, None, until):
        return "nothing answers there"
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only whether TLS is spoken; nothing is sent
    speaks_tls = await _opens(endpoint, addresses, context, until)
    if speaks_tls and not secure:
        return "it speaks TLS: write https:// and give the CA certificate"
    if not speaks_tls and secure:
        return "it does not speak TLS: write http://, or correct the port"
    if secure:
        return "it speaks TLS, but its certificate or ours was not accepted: check the CA certificate and the host name"
    return ""


async def _addresses(endpoint: Endpoint) -> list[str]:
    """The host's addresses. Raises OSError, UnicodeError."""
    loop = asyncio.get_running_loop()
    host = endpoint.host.strip("[]")
    if isinstance(loop, asyncio.SelectorEventLoop):
        found = await _apart(host, endpoint.port)
    else:
        found = await loop.getaddrinfo(host, endpoint.port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _apart(host: str, port: int) -> asyncio.Future[list[Any]]:
    """The addresses, asked for in a thread that nobody waits for: this loop's own are joined at the end of the process,
    and a name service that is silent keeps them for half a minute.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Any]] = loop.create_future()

    def tell(found: list[Any] | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found or [])

    def ask() -> None:
        found, wrong = None, None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            wrong = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, found, wrong)

    threading.Thread(target=ask, name="distop-resolve", daemon=True).start()
    return answer


async def _opens(endpoint: Endpoint, addresses: list[str], context: ssl.SSLContext | None, until: float) -> bool:
    """One of the addresses takes a connection, with ``context`` one of TLS."""
    return any(await asyncio.gather(*(_takes(endpoint, address, context, until) for address in addresses)))


async def _takes(endpoint: Endpoint, address: str, context: ssl.SSLContext | None, until: float) -> bool:
    name = endpoint.host.strip("[]") if context is not None else None
    try:
        async with asyncio.timeout_at(until):
            _, writer = await asyncio.open_connection(address, endpoint.port, ssl=context, server_hostname=name)
    except ssl.SSLError as error:
        # A server that wants a client certificate has spoken TLS.
        return "CERTIFICATE" in str(error).upper()
    except (OSError, TimeoutError, ValueError):  # the last: the name is none that TLS could ask for
        return False
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
        async with asyncio.timeout_at(until):
            await writer.wait_closed()
    return True
