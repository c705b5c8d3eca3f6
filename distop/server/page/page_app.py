"""The page's routes: views, forms, one stream of events for each page, and its two files."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse

from distop.client.async_operation import parse_ref
from distop.client.service_errors import status_of
from distop.errors import DistopError, InvalidArgument, NotFound, NotIdentified
from distop.protocol.texts import shown
from distop.server.call_admission import CallerCredentials
from distop.server.http_server import STATUS
from distop.server.page import page_session as session
from distop.server.page.live_events import Cursor, PageStream, changed_parts, parts_of
from distop.server.page.local_channel import LocalChannel
from distop.server.page.operation_context import OperationContext, operations_context
from distop.server.page.page_actions import DONE, act
from distop.server.page.page_rendering import link, render
from distop.server.page.partition_reader import PartitionCache
from distop.server.page.start_context import problem_of, start_context
from distop.server.page.table_context import nodes_context, table_context, tables_context
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request

    from distop.protocol.keys import Keys
    from distop.server.call_admission import CallAdmission
    from distop.store.client import EtcdClient

    Body = Callable[[Request], Awaitable[bytes]]
    Query = Mapping[str, Sequence[str]]

log = logging.getLogger("distop.service")

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # without it a form would have no origin
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
OPERATIONS = {"open": "parts/open.html", "ended": "parts/ended.html"}
OPERATION = {
    name: f"parts/{name}.html" for name in ("head", "actions", "reasons", "failed", "report", "graph", "history")
}
NODES = {"nodes": "parts/nodes.html"}
TABLES = {"tables": "parts/tables.html"}
TABLE = {"table": "parts/table.html"}
MOST_DETAILS = 100
"""Partitions of a cell that are listed."""
FILES = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}


class PageApp:
    """The page of a service."""

    def __init__(
        self,
        services: Mapping[str, Any],
        admission: CallAdmission,
        etcd: EtcdClient,
        keys: Keys,
        partitions: PartitionCache | None = None,
    ) -> None:
        self._services = services
        self._admission = admission
        self._etcd, self._keys = etcd, keys
        self._partitions = partitions if partitions is not None else PartitionCache(etcd, keys)
        self._views: Mapping[str, Callable[[Request, LocalChannel, Query], Awaitable[Response]]] = {
            "/": self._home,
            "/operations": self._operations,
            "/operation": self._operation,
            "/partitions": self._details,
            "/tables": self._tables,
            "/table": self._table,
            "/nodes": self._nodes,
            "/start": self._start,
            "/live": self._live,
        }
        self.stopped = asyncio.Event()

    async def close(self) -> None:
        """End the streams, and forget what was read."""
        self.stopped.set()
        await self._partitions.close()

    @staticmethod
    def serves(path: str) -> bool:
        """Whether a path is the page's, not REST's."""
        return not path.startswith("/v1/") and path != "/openapi.json"

    async def answer(self, request: Request, body: Body) -> Response:
        """The answer to a request, also to one that fails."""
        path = _path(request)
        try:
            found = await self._answer(request, path, body)
        except DistopError as error:
            found = self._refusal(request, error)
        for name, value in HEADERS.items():
            found.headers.setdefault(name, value)
        return found

    async def _answer(self, request: Request, path: str, body: Body) -> Response:
        if path.startswith("/static/"):
            return _file(path.removeprefix("/static/"))
        query = _parsed(request.scope["query_string"])
        channel = LocalChannel(self._services, self._admission, session.credentials_of_page(request))
        await self._admission.renew_keys(channel.credentials)
        if request.method == "POST":
            return await self._post(request, path, channel, body)
        if request.method not in ("GET", "HEAD"):
            raise InvalidArgument(f"{path} takes GET and POST")
        if path == "/login":
            return self._login(request, query)
        view = self._views.get(path)
        if view is None:
            raise NotFound(f"there is no page {shown(path)}")
        self._admission.check_identity(f"GET {path}", channel.credentials)
        return await view(request, channel, query)

    # -------------------------------------------------------------------- views

    async def _home(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        return RedirectResponse("/operations", 303)

    async def _operations(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        content = await operations_context(channel, query)
        return self._view(request, channel, "operations.html", "Operations", OPERATIONS, content)

    async def _operation(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        ref = parse_ref(_one(query, "op"))
        with self._admission.admit(
            "Operations/ListJobs", operations_pb2.ListJobsRequest(op=str(ref)), channel.credentials
        ):
            async with self._partitions.reading(ref) as partitions:
                content = await OperationContext(channel, self._etcd, self._keys, ref, partitions).read()
        return self._view(request, channel, "operation.html", str(ref), OPERATION, content)

    async def _details(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        """The partitions of one cell, as a part of a page."""
        ref, first = parse_ref(_one(query, "op")), _whole(query, "first")
        after = min(_whole(query, "after"), first + MOST_DETAILS)
        with self._admission.admit(
            "Operations/ListJobs", operations_pb2.ListJobsRequest(op=str(ref)), channel.credentials
        ):
            async with self._partitions.reading(ref) as partitions:
                await partitions.until_complete(20.0)
                count = partitions.states.count if partitions.states is not None else 0
                rows = await partitions.details(range(first, min(after, count)))
        left = max(0, min(_whole(query, "after"), count) - after)
        return HTMLResponse(render("parts/partitions.html", {"rows": rows, "left": left, "first": first}))

    async def _tables(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        return self._view(request, channel, "tables.html", "Tables", TABLES, await tables_context(channel))

    async def _table(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        content = await table_context(channel, _one(query, "name"))
        return self._view(request, channel, "table.html", content["name"], TABLE, content)

    async def _nodes(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        return self._view(request, channel, "nodes.html", "Nodes", NODES, await nodes_context(channel))

    async def _start(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        content = await start_context(channel, _one(query, "type"), _one(query, "table"), _one(query, "arg"))
        return self._view(request, channel, "start.html", "Start", {}, content)

    def _login(self, request: Request, query: Query) -> Response:
        where = _safe_redirect(_one(query, "next"))
        if not self._admission.identifies:
            return RedirectResponse(where, 303)
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            # The browser left the cookie out, because a link of another site led here. It sends it with the next one.
            return HTMLResponse(render("again.html", {"next": where}))
        return self._page(request, None, "login.html", "Log in", {"next": where, "error": ""})

    def _view(
        self,
        request: Request,
        channel: LocalChannel,
        template: str,
        title: str,
        parts: Mapping[str, str],
        content: Mapping[str, Any],
    ) -> Response:
        """A whole page, with its parts and the cursor of its stream."""
        made = {"form_key": session.form_key(secret := session.form_secret(request))}
        cursor = Cursor()
        rendered = parts_of(parts, {**content, **made})
        changed_parts(rendered, cursor)
        live = link("/live", page=template.removesuffix(".html"), query=request.scope["query_string"].decode("latin-1"))
        shown_parts = {"parts": rendered, "live": live if parts else "", "cursor": str(cursor)}
        return self._page(request, channel, template, title, {**content, **shown_parts}, secret=secret)

    def _page(
        self,
        request: Request,
        channel: LocalChannel | None,
        template: str,
        title: str,
        content: Mapping[str, Any],
        status: int = 200,
        secret: str = "",
    ) -> Response:
        secret = secret or session.form_secret(request)
        identity = None
        if channel is not None:
            with suppress(NotIdentified):
                identity = self._admission.identity(channel.credentials)
        done = DONE.get(_one(_parsed(request.scope["query_string"]), "done"), "")
        shell = {
            "title": title,
            "form_key": session.form_key(secret),
            "identity": identity.name if identity is not None else "",
            "identifies": self._admission.identifies,
            "done": done,
            "path": _path(request),
            "live": "",
            "cursor": "",
        }
        found = HTMLResponse(render(template, {**shell, **content}), status)
        if request.cookies.get(session.FORM_COOKIE) != secret:
            session.remember_form(found, secret, secure=_secure(request))
        return found

    def _refusal(self, request: Request, error: DistopError) -> Response:
        code, text, _ = status_of(error)
        status = STATUS.get(code.name, 500)
        if (
            isinstance(error, NotIdentified)
            and request.method == "GET"
            and _path(request) not in ("/live", "/partitions")
        ):
            query = request.scope["query_string"].decode("latin-1")
            where = f"{_path(request)}?{query}" if query else _path(request)
            return RedirectResponse(link("/login", next=where), 303)
        if _path(request) in ("/live", "/partitions", "/check"):
            return JSONResponse({"error": {"message": text}}, status)
        channel = LocalChannel(self._services, self._admission, session.credentials_of_page(request))
        return self._page(request, channel, "error.html", "Not done", {"error": text, "status": status}, status)

    # -------------------------------------------------------------------- forms

    async def _post(self, request: Request, path: str, channel: LocalChannel, body: Body) -> Response:
        if path not in ("/login", "/logout"):
            self._admission.check_identity(f"POST {path}", channel.credentials)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/x-www-form-urlencoded":
            raise InvalidArgument(f"a form of the page has another content type than {shown(kind)}")
        given = _parsed(await body(request))
        form = {name: values[-1] for name, values in given.items()}
        session.check_form(request, form.get(session.FORM_FIELD, ""))
        if path == "/login":
            return await self._log_in(request, form)
        if path == "/logout":
            found: Response = RedirectResponse("/login", 303)
            session.forget_token(found, secure=_secure(request))
            return found
        if path == "/check":
            return await self._check(channel, form)
        return RedirectResponse(await act(path.removeprefix("/do/"), channel, form), 303)

    async def _log_in(self, request: Request, form: Mapping[str, str]) -> Response:
        where, token = _safe_redirect(form.get("next", "")), form.get("token", "").strip()
        credentials = CallerCredentials(token or None, (), session.credentials_of_page(request).peer)
        try:
            await self._admission.renew_keys(credentials)
            self._admission.check_identity("POST /login", credentials)
            found: Response = RedirectResponse(where, 303)
            session.remember_token(found, token, secure=_secure(request))
        except (NotIdentified, InvalidArgument) as error:
            return self._page(request, None, "login.html", "Log in", {"next": where, "error": str(error)}, 401)
        return found

    async def _check(self, channel: LocalChannel, form: Mapping[str, str]) -> Response:
        """Whether an argument fits, as it is typed."""
        type_name = form.get("type", "")
        declared = {one.type_name: one for one in await channel.backend().behaviors()}
        problem = await asyncio.to_thread(problem_of, declared.get(type_name), type_name, form.get("arg", ""))
        return JSONResponse({"problem": problem})

    # --------------------------------------------------------------------- live

    async def _live(self, request: Request, channel: LocalChannel, query: Query) -> Response:
        page = _one(query, "page")
        cursor = Cursor(request.headers.get("last-event-id") or _one(query, "cursor"))
        own = _parsed(_one(query, "query").encode())
        headers = {"x-accel-buffering": "no"}
        form_key = session.form_key(session.form_secret(request))
        events = self._events(page, own, channel, cursor, form_key)
        first = await anext(events)  # an error before it is the answer's status
        return StreamingResponse(_after(first, events), media_type="text/event-stream", headers=headers)

    async def _events(
        self, page: str, query: Query, channel: LocalChannel, cursor: Cursor, form_key: str
    ) -> AsyncGenerator[bytes, None]:
        """The stream of a page. Its calls are checked at each reading."""
        key = {"form_key": form_key}
        if page == "operation":
            ref = parse_ref(_one(query, "op"))
            request = operations_pb2.ListJobsRequest(op=str(ref))
            with self._admission.admit("Operations/ListJobs", request, channel.credentials) as admitted:
                async with self._partitions.reading(ref) as partitions:
                    context = OperationContext(channel, self._etcd, self._keys, ref, partitions)

                    async def read_operation() -> Mapping[str, Any]:
                        return {**await context.read(), **key}

                    stream = PageStream(read_operation, OPERATION, cursor, self.stopped, partitions, admitted.check)
                    async for one in stream.events():
                        yield one
            return
        readers: Mapping[str, tuple[Callable[[], Awaitable[Mapping[str, Any]]], Mapping[str, str]]] = {
            "operations": (lambda: operations_context(channel, query), OPERATIONS),
            "nodes": (lambda: nodes_context(channel), NODES),
            "tables": (lambda: tables_context(channel), TABLES),
            "table": (lambda: table_context(channel, _one(query, "name")), TABLE),
        }
        if page not in readers:
            raise NotFound(f"there is no page {shown(page)}")
        read, templates = readers[page]

        async def read_content() -> Mapping[str, Any]:
            return {**await read(), **key}

        async for one in PageStream(read_content, templates, cursor, self.stopped).events():
            yield one


async def _after(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for one in events:
            yield one
    except DistopError as error:  # the grant was removed
        log.info("A page's stream ended: %s", error)
    finally:
        await events.aclose()


def _parsed(text: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(text.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=200)
    except ValueError:
        raise InvalidArgument("the form has too many fields") from None


def _one(query: Query, name: str) -> str:
    values = query.get(name, ())
    return values[-1] if values else ""


def _whole(query: Query, name: str) -> int:
    text = _one(query, name)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidArgument(f"{name} must be a whole number, not {shown(text)}")
    return int(text)


def _safe_redirect(where: str) -> str:
    """The path if it is one of this page; the list of operations for any other target, such as another site."""
    return (
        where
        if where.startswith("/") and not where.startswith(("//", "/\\")) and where.isprintable()
        else "/operations"
    )


def _path(request: Request) -> str:
    """The path, which does not depend on the header Host, unlike that of ``request.url``."""
    return str(request.scope["path"])


def _secure(request: Request) -> bool:
    return bool(request.scope["scheme"] == "https")


def _file(name: str) -> Response:
    kind = FILES.get(name)
    if kind is None:
        raise NotFound(f"there is no file {shown(name)}")
    data = files("distop.server.page").joinpath("static", name).read_bytes()
    return Response(data, media_type=kind, headers={"cache-control": "no-cache"})
