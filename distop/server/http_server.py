"""The services over HTTP: JSON for each call, and server-sent events for streams."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import resource
import ssl
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from distop.client.service_errors import DOMAIN, RETRY_AFTER, RETRYABLE, status_of
from distop.errors import DistopError, InvalidArgument, NotFound, PermissionDenied, ServiceUnavailable
from distop.protocol.json_codec import dumps, loads
from distop.protocol.texts import shown
from distop.runtime import caller_trace
from distop.server.call_admission import CallerCredentials
from distop.server.checked_streams import checked
from distop.server.http_routes import HttpRoute, routes, set_path_fields
from distop.server.json_messages import fill, fill_from_query, to_json
from distop.server.open_api import document
from distop.store import tls_files
from distop.store.connection_settings import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from starlette.types import Receive, Scope, Send

    from distop.server.call_admission import CallAdmission
    from distop.server.page.page_app import PageApp

log = logging.getLogger("distop.service")

MOST_BODY = 8 << 20
"""Maximum bytes of a request's body."""
MOST_BODIES = 256 << 20
"""Maximum bytes of all bodies that are being read. Further ones are refused."""
BODY_TIMEOUT = 30.0
"""Seconds for a request's body to arrive."""
HEADER_TIMEOUT = 10.0
"""Seconds for a request's headers to arrive. The connection is then closed."""
MOST_CONNECTIONS = 10_000
"""Maximum connections, if the process may have twice as many files. Others are closed at once."""
READ_TIMEOUT = 30.0
"""Seconds in which a caller reads nothing of its answer, after which the connection is closed."""
MOST_REVISION = 2**63 - 1
_DONE: Any = object()
CERTIFICATES = "distop.certificates"
"""The names in the caller's certificate, in the scope of a request."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
STATUS = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400, "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
"""gRPC's code → status of the answer; 500 for all others."""


class MethodNotAllowed(InvalidArgument):
    """There is a route, but not with this method."""

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class HttpServer:
    """An HTTP server of these services (full name → handlers)."""

    def __init__(self, services: Mapping[str, Any], admission: CallAdmission, page: PageApp | None = None) -> None:
        """``page``: serves all paths but those of REST; None: there is no page."""
        self._services = services
        self._admission = admission
        self._page = page
        self._routes = routes(services)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._read_bytes = 0
        self._files = EtcdConfig()
        self._stamp: tls_files.Stamp = ()

    # ---------------------------------------------------------------- process

    async def start(self, host: str, port: int, cert: str = "", key: str = "", client_ca: str = "") -> int:
        """Serve at this address, with TLS if there are files for it; returns the port.

        ``client_ca``: callers may show a certificate that it has signed. Raises OSError if the address cannot be used.
        """
        self._files = EtcdConfig(cert=cert or None, key=key or None)
        self._stamp = tls_files.stamp(self._files)
        config = uvicorn.Config(
            self,
            host=host,
            port=port,
            ssl_certfile=cert or None,
            ssl_keyfile=key or None,
            ssl_ca_certs=client_ca or None,
            ssl_cert_reqs=ssl.CERT_OPTIONAL if client_ca else ssl.CERT_NONE,  # browsers have tokens
            log_config=None,
            access_log=False,
            lifespan="off",
            http=_Connection,
            ws="none",
            proxy_headers=False,  # a caller could choose its address in the audit log
            timeout_keep_alive=30,
            limit_concurrency=min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
            server_header=False,
            h11_max_incomplete_event_size=64 << 10,
        )
        socket = config.bind_socket() if port else None
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(None if socket is None else [socket]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise OSError(f"cannot listen on {host}:{port}")
            await asyncio.sleep(0.01)
        opened: int = self._server.servers[0].sockets[0].getsockname()[1]
        return opened

    def renew_tls(self) -> None:
        """Use the TLS files again if they have changed. Files that are not valid are logged, and not used."""
        if self._server is None or (context := self._server.config.ssl) is None:
            return
        if (stamp := tls_files.stamp(self._files)) == self._stamp:
            return
        self._stamp = stamp
        try:
            tls_files.read(self._files)  # checks them
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(str(self._files.cert), str(self._files.key), password=lambda: b"")
        except (InvalidArgument, OSError) as error:
            log.error("The changed TLS files are not used for HTTP: %s", error)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, and wait for open ones for ``grace`` seconds."""
        self._stopped.set()
        if self._page is not None:
            self._page.stopped.set()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        try:
            async with asyncio.timeout(grace):
                await asyncio.shield(self._serving)
        except TimeoutError:
            self._server.force_exit = True
            await self._serving

    # -------------------------------------------------------------- one call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Exception as error:
            if isinstance(error, ClientDisconnect):
                return
            response = _refusal(error)
        response.headers["x-content-type-options"] = "nosniff"
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace")
        credentials = credentials_of(request)
        try:
            self._check_browser(request)
        except PermissionDenied as error:
            self._admission.log_refusal(f"{request.method} {path}", credentials, error)
            raise
        if self._page is not None and self._page.serves(path):
            return await self._page.answer(request, self._body)
        if path == "/openapi.json" and request.method == "GET":
            return JSONResponse(document(self._routes))
        route, values = self._route(request.method, path)
        await self._admission.renew_keys(credentials)
        self._admission.check_identity(route.call, credentials)
        message = route.request()
        if route.has_body:
            fill(message, await self._json(request))
        else:
            # Not of request.url, which depends on the header Host.
            query = request.scope["query_string"].decode("latin-1")
            fill_from_query(message, parse_qsl(query, keep_blank_values=True))
        set_path_fields(message, values)
        caller_trace.answered(request.headers.get("traceparent"))
        handler = getattr(self._services[route.service], route.call.partition("/")[2])
        if route.streams:
            return await self._stream(route, handler, message, request)
        with self._admission.admit(route.call, message, credentials) as admitted:
            answer = await admitted.run(handler)
        return _tagged(dumps(to_json(answer)), request)

    def _check_browser(self, request: Request) -> None:
        """Raises PermissionDenied for requests that pages of other sites let a browser send to this machine."""
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin.partition("://")[2] != host:
            raise PermissionDenied(f"requests of the site {shown(origin)} are not served")
        # An image or a script has no origin. A link to the page may be followed: nobody else can read its answer.
        follows = self._is_page(request) and request.headers.get("sec-fetch-dest") == "document"
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and not follows:
            raise PermissionDenied("requests of other sites are not served")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if not self._admission.identifies and name not in LOOPBACK:
            raise PermissionDenied(f"the host {shown(host)} is not this machine: the service identifies no callers")

    def _is_page(self, request: Request) -> bool:
        """Whether a request reads a page."""
        return self._page is not None and request.method == "GET" and self._page.serves(request.scope["path"])

    def _route(self, verb: str, path: str) -> tuple[HttpRoute, dict[str, str]]:
        """The route of a raw path, and the fields in the path. Raises NotFound and MethodNotAllowed."""
        for one in self._routes:
            if (values := one.match(verb, path)) is not None:
                return one, values
        allowed = sorted({one.verb for one in self._routes if one.pattern.fullmatch(path)})
        if path == "/openapi.json":
            allowed = ["GET"]
        if allowed:
            raise MethodNotAllowed(f"{path} takes {', '.join(allowed)}, not {shown(verb)}", allowed)
        raise NotFound(f"there is no route {verb} {shown(path)}: /openapi.json lists all")

    async def _stream(self, route: HttpRoute, handler: Any, message: Any, request: Request) -> Response:
        """Server-sent events. An error before the first one is the answer's status."""
        known = request.headers.get("last-event-id", "")
        if known.isascii() and known.isdigit() and hasattr(message, "revision") and not message.revision:
            message.revision = min(int(known[:20]), MOST_REVISION)
        # No with block: the call stays admitted until the last event, long after this method has returned.
        admission = self._admission.admit(route.call, message, credentials_of(request))
        admitted = admission.__enter__()
        responses = checked(handler(message), admitted.check)
        try:
            first = await _while_connected(request, anext(responses, _DONE))
        except BaseException as error:
            await responses.aclose()
            admission.__exit__(type(error), error, None)
            raise
        if first is _DONE:
            admission.__exit__(None, None, None)
            return Response(status_code=204)  # a browser then does not connect again
        body = self._events(first, responses, admission)
        return StreamingResponse(body, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _events(
        self, first: Any, responses: AsyncGenerator[Any, None], admission: AbstractContextManager[Any]
    ) -> AsyncGenerator[bytes, None]:
        """The events. Ends the admission of the call, which :meth:`_stream` has begun."""
        failed: DistopError | None = None
        following: asyncio.Future[Any] | None = None
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            found = first
            while found is not _DONE:
                yield b": waiting\n\n" if found is None else _event(found)
                following = asyncio.ensure_future(anext(responses, _DONE))
                await asyncio.wait([following, stopped], return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    return
                found = following.result()
        except DistopError as error:
            failed = error
            yield b"event: error\ndata: " + dumps(_error(error)[1]) + b"\n\n"
        finally:
            stopped.cancel()
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await responses.aclose()
            with suppress(DistopError):  # it is raised again, after its event was sent
                admission.__exit__(None if failed is None else type(failed), failed, None)

    async def _json(self, request: Request) -> Any:
        """The JSON body of a request. Raises InvalidArgument; ServiceUnavailable if too many bodies are being read.

        The content type must be JSON's: a browser sends others for pages of other sites without asking.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        found = await self._body(request)
        if kind != "application/json":
            raise InvalidArgument(f"the content type must be application/json, not {shown(kind)}")
        try:
            return loads(found) if found else {}
        except (ValueError, RecursionError):
            raise InvalidArgument("the body is not valid JSON") from None

    async def _body(self, request: Request) -> bytes:
        """The body of a request. Raises InvalidArgument; ServiceUnavailable if too many bodies are being read."""
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for part in request.stream():
                    found += part
                    self._read_bytes += len(part)
                    if len(found) > MOST_BODY:
                        raise InvalidArgument(f"the body has more than {MOST_BODY} bytes")
                    if self._read_bytes > MOST_BODIES:
                        raise ServiceUnavailable("the service reads too many large requests: call again later")
        except TimeoutError:
            raise InvalidArgument(f"the body has not arrived within {BODY_TIMEOUT:g} s") from None
        finally:
            self._read_bytes -= len(found)
        return bytes(found)


async def _while_connected(request: Request, found: Awaitable[Any]) -> Any:
    """The result, unless the caller disconnects before. Raises ClientDisconnect."""
    answer, gone = asyncio.ensure_future(found), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for one in (answer, gone):
            one.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Connection(H11Protocol):
    """A connection whose callers send their headers, and read their answers, in time."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
            return
        self.app = _with_certificates(self.app, transport.get_extra_info("peercert"))
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()
        self._note_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_reading()

    def _note_reading(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _expect_headers(self) -> None:
        """Start the time, unless a request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_nothing()
        elif self._late is None:
            self._late = self.loop.call_later(HEADER_TIMEOUT, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _with_certificates(app: Any, certificate: Mapping[str, Any] | None) -> Any:
    """The application, which finds the names in the caller's verified certificate in the scope."""
    if not certificate:
        return app
    names = certificate_names(certificate)

    async def called(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, CERTIFICATES: names}, receive, send)

    return called


def certificate_names(certificate: Mapping[str, Any]) -> list[str]:
    """The names in a verified certificate, as of :meth:`ssl.SSLSocket.getpeercert`, each with its kind."""
    parts = [pair for group in certificate.get("subject", ()) for pair in group]
    common = [f"CN={value}" for name, value in parts if name == "commonName"]
    others = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    return common + others


class _Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _event(response: Any) -> bytes:
    """A server-sent event. Its id is the revision, which the browser sends when it connects again."""
    revision = getattr(response, "revision", 0)
    return (b"id: %d\n" % revision if revision else b"") + b"data: " + dumps(to_json(response)) + b"\n\n"


def credentials_of(request: Request) -> CallerCredentials:
    """What identifies the caller."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" and token.strip() else None
    peer = f"{request.client.host}:{request.client.port}" if request.client is not None else ""
    return CallerCredentials(bearer, request.scope.get(CERTIFICATES, ()), peer)


def _tagged(body: bytes, request: Request) -> Response:
    """The answer with an ETag; without a body if a read has the same answer as before."""
    if request.method != "GET":
        return Response(body, media_type="application/json")
    headers = {"etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"', "cache-control": "no-cache"}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _refusal(error: Exception) -> Response:
    if not isinstance(error, DistopError):
        log.error("Unexpected error in a call", exc_info=error)
    status, content = _error(error if isinstance(error, DistopError) else DistopError())
    headers = {"retry-after": str(RETRY_AFTER)} if isinstance(error, RETRYABLE) else {}
    if isinstance(error, MethodNotAllowed):
        status, headers["allow"] = 405, ", ".join(error.allowed)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(dumps(content), status, headers, "application/json")


def _error(error: DistopError) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error."""
    code, text, details = status_of(error)
    content: dict[str, Any] = {"code": code.name, "message": text}
    if details:
        reason = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == DistopError.__module__)
        content |= {"reason": reason, "domain": DOMAIN, "retryable": isinstance(error, RETRYABLE)}
    return STATUS.get(code.name, 500), {"error": content}
