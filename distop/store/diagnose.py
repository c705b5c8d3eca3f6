"""Why an endpoint cannot be used, found out on a plain socket: for the one sentence that people read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distop.store.config import Endpoint

_WAIT = 1.0
_RESOLVE = 3.0


async def explain(endpoint: Endpoint, secure: bool) -> str:
    """What is wrong with the endpoint, as far as a connection attempt tells; empty where it looks right."""
    if (unknown := await _unresolved(endpoint)) is not None:
        return unknown
    if not await _opens(endpoint, None):
        return "nothing answers there"
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only whether TLS is spoken; nothing is sent
    speaks_tls = await _opens(endpoint, context)
    if speaks_tls and not secure:
        return "it speaks TLS: write https:// and give the CA certificate"
    if not speaks_tls and secure:
        return "it does not speak TLS: write http://, or correct the port"
    if secure:
        return "it speaks TLS, but its certificate or ours was not accepted: check the CA certificate and the host name"
    return ""


async def _unresolved(endpoint: Endpoint) -> str | None:
    """Why the host's name leads nowhere; None where it has an address."""
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait_for(loop.getaddrinfo(endpoint.host.strip("[]"), endpoint.port), _RESOLVE)
    except socket.gaierror:
        return "the host name is not known: correct it, or the machine's name service"
    except TimeoutError:
        return "the name service does not say in time where the host is"
    except (OSError, UnicodeError):
        return "this is no name of a host"
    return None


async def _opens(endpoint: Endpoint, context: ssl.SSLContext | None) -> bool:
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(endpoint.host.strip("[]"), endpoint.port, ssl=context), _WAIT
        )
    except ssl.SSLError as error:
        # A server that wants a client certificate has spoken TLS.
        return "CERTIFICATE" in str(error).upper()
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), _WAIT)
    return True
