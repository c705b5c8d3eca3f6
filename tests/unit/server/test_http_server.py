"""REST: routes, JSON, errors, and what a browser may not do. Handlers are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from google.protobuf import descriptor_pool

from distop.client import service_messages as m
from distop.errors import (
    DistopError,
    EtcdUnavailable,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    ServiceUnavailable,
)
from distop.server import checked_streams, http_server
from distop.server.access import parse
from distop.server.call_admission import AccessFile, AuditLog, CallAdmission
from distop.server.handlers import services
from distop.server.http_routes import routes
from distop.server.http_server import HttpServer
from distop.server.json_messages import fill, to_json
from distop.server.open_api import document
from distop.v1 import operations_pb2, tables_pb2
from tests.unit.server.test_access import FILE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

NAMES = tuple(services(None))  # type: ignore[arg-type]
ROUTES = routes(NAMES)


class Scripted:
    """Handlers that remember their requests, and answer what was scripted."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, method: str) -> Any:
        if method == "Watch":
            return self._watch

        async def call(request: Any) -> Any:
            self.requests.append((method, request))
            answer = self.answers[method]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    async def _watch(self, request: Any) -> AsyncGenerator[Any, None]:
        self.requests.append(("Watch", request))
        for one in self.answers["Watch"]:
            if isinstance(one, Exception):
                raise one
            yield one


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def server(scripted: Scripted) -> HttpServer:
    return HttpServer(dict.fromkeys(NAMES, scripted), CallAdmission())


async def ask(server: HttpServer, verb: str, path: str, **given: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://127.0.0.1") as client:
        return await client.request(verb, path, **given)


# ------------------------------------------------------------------------ routes


def test_each_call_has_a_route() -> None:
    calls = {
        f"{name.rpartition('.')[2]}/{method.name}"
        for name in NAMES
        for method in descriptor_pool.Default().FindServiceByName(name).methods
    }
    assert {one.call for one in ROUTES} == calls - {"Operations/DeleteOperation"}
    assert len({(one.verb, one.template) for one in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize(
    ("verb", "path", "call", "values"),
    [
        ("GET", "/v1/operations/t/noop/1", "Operations/Get", {"op": "t/noop/1"}),
        ("GET", "/v1/operations/t/noop/1:watch", "Operations/Watch", {"op": "t/noop/1"}),
        ("GET", "/v1/operations/t/index/a%2Fb/1/jobs", "Operations/ListJobs", {"op": "t/index/a/b/1"}),
        ("GET", "/v1/operations/t%252F/noop/1:why", "Operations/Why", {"op": "t%2F/noop/1"}),
        ("POST", "/v1/operations", "Operations/Start", {}),
        ("POST", "/v1/operations:startGraph", "Operations/StartGraph", {}),
        ("POST", "/v1/operations/t/noop/1:cancel", "Operations/Cancel", {"op": "t/noop/1"}),
        ("GET", "/v1/tables/sales.orders", "Tables/Get", {"name": "sales.orders"}),
        ("PUT", "/v1/tables/sales.orders", "Tables/Add", {"table.name": "sales.orders"}),
        ("GET", "/v1/tables/t/policies", "Policies/List", {"table": "t"}),
        ("DELETE", "/v1/tables/t/policies/p", "Policies/Remove", {"table": "t", "name": "p"}),
        ("POST", "/v1/tables/t:autopilot", "Policies/Autopilot", {"table": "t"}),
    ],
)
def test_a_path_leads_to_its_call(verb: str, path: str, call: str, values: dict[str, str]) -> None:
    found = [(one.call, given) for one in ROUTES if (given := one.match(verb, path)) is not None]
    assert found[0] == (call, values)


def test_the_document_describes_each_route_and_each_schema() -> None:
    found = document(ROUTES)
    assert sum(len(one) for one in found["paths"].values()) == len(ROUTES)
    text = json.dumps(found)
    for ref in {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert ref in found["components"]["schemas"], ref
    assert {"op", "only_end", "revision"} == {
        one["name"] for one in found["paths"]["/v1/operations/{op}:watch"]["get"]["parameters"]
    }


# -------------------------------------------------------------------------- JSON


async def test_a_start_is_a_json_object(server: HttpServer, scripted: Scripted) -> None:
    scripted.answers["Start"] = operations_pb2.StartResponse(op="t/noop/1")
    body = {"type": "noop", "table": "t", "arg": {"n": 2**63}, "options": {"partitions": {"values": ["a"]}, "delay": 5}}
    answer = await ask(server, "POST", "/v1/operations", json=body)
    assert (answer.status_code, answer.json()) == (200, {"op": "t/noop/1", "already_started": False})
    ((_, request),) = scripted.requests
    assert m.given_json(request, "arg") == {"n": 2**63}
    assert m.start_options(request.options).given() == {"partitions": ["a"], "delay": 5.0}


async def test_the_path_decides_on_its_fields(server: HttpServer, scripted: Scripted) -> None:
    scripted.answers["Add"] = tables_pb2.Table(name="t", options=m.json_message({}))
    body = {"table": {"name": "other", "format": "parquet", "location": "/x", "options": {"a": 1}}, "replace": True}
    assert (await ask(server, "PUT", "/v1/tables/t", json=body)).status_code == 200
    request = scripted.requests[0][1]
    assert (request.table.name, request.replace, m.json_value(request.table.options)) == ("t", True, {"a": 1})


async def test_query_parameters_fill_a_reading_request(server: HttpServer, scripted: Scripted) -> None:
    scripted.answers["ListHistory"] = operations_pb2.ListHistoryResponse()
    query = "table=t&states=failed&states=success&labels.team=lake&page_size=5&alarms=true"
    assert (await ask(server, "GET", f"/v1/history?{query}")).json() == {"operations": []}
    request = scripted.requests[0][1]
    assert (request.table, list(request.states), dict(request.labels)) == ("t", ["failed", "success"], {"team": "lake"})
    assert (request.page_size, request.alarms, request.HasField("type")) == (5, True, False)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "the request must be an object"),
        ({"typ": "noop"}, "has no field 'typ' .did you mean 'type'"),
        ({"type": 5}, "type must be a text, not 5"),
        ({"type": "\ud800"}, "type must be a text in UTF-8"),
        ({"options": {"priority": "high"}}, "priority in options must be a number, not 'high'"),
        ({"options": {"priority": 1.5}}, "priority in options must be a whole number"),
        ({"options": {"priority": 2**64}}, "priority in options must be a whole number"),
        ({"options": {"one_off": 1}}, "one_off in options must be true or false"),
        ({"options": {"partitions": ["a"]}}, "partitions in options must be an object"),
        ({"options": {"after": {}}}, "after in options must be a list"),
        ({"options": {"labels": {"values": {"a": 1}}}}, "must be an object of texts"),
        ({"options": {"priority": math.inf}}, "priority in options must be a whole number"),
        ({"options": {"priority": math.nan}}, "priority in options must be a whole number"),
        ({"options": {"delay": 10**400}}, "delay in options must be a number"),
        ({"options": {"labels": {"values": {"a": "\ud800"}}}}, "must be a text in UTF-8"),
        ({"options": {"labels": {"values": {"\ud800": "a"}}}}, "must be a text in UTF-8"),
        ({"\ud800": 1}, "the request has no field"),
    ],
)
def test_a_wrong_body_is_refused_in_one_sentence(data: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        fill(operations_pb2.StartRequest(), data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "query", ["x=1", "page_size=a", "alarms=1", "labels=a", "table.x=1", "page_size=99999999999999999999"]
)
async def test_a_wrong_query_is_refused(server: HttpServer, query: str) -> None:
    answer = await ask(server, "GET", f"/v1/history?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_ARGUMENT")


def test_a_message_and_its_json_are_the_same() -> None:
    message = operations_pb2.Operation(op="t/n/1", state="running", record=m.json_message({"a": [1, 2**60]}))
    message.started.FromJsonString("2026-01-31T18:00:00Z")
    message.jobs.total = 5
    message.labels["team"] = "lake"
    data = to_json(message)
    assert (data["record"], data["started"], data["labels"]) == (
        {"a": [1, 2**60]},
        "2026-01-31T18:00:00Z",
        {"team": "lake"},
    )
    again = operations_pb2.Operation()
    fill(again, data)
    assert again == message


# ------------------------------------------------------------- errors and streams


@pytest.mark.parametrize(
    ("error", "status", "reason", "retryable"),
    [
        (NotFound("gone"), 404, "NotFound", False),
        (InvalidArgument("a wrong token of the tests"), 400, "InvalidArgument", False),
        (EtcdUnavailable("later"), 503, "EtcdUnavailable", True),
        (ServiceUnavailable("later"), 503, "ServiceUnavailable", True),
        (LimitExceeded("later"), 429, "LimitExceeded", True),
        (ValueError("a secret"), 500, None, None),
        (DistopError("a secret"), 500, None, None),
    ],
)
async def test_an_error_has_a_status_and_a_reason(
    server: HttpServer, scripted: Scripted, error: Exception, status: int, reason: str | None, retryable: bool | None
) -> None:
    scripted.answers["Get"] = error
    answer = await ask(server, "GET", "/v1/operations/t/noop/1")
    found = answer.json()["error"]
    assert (answer.status_code, found.get("reason"), found.get("retryable")) == (status, reason, retryable)
    assert ("retry-after" in answer.headers) is bool(retryable)
    assert "secret" not in answer.text


async def test_a_read_that_has_not_changed_has_no_body(server: HttpServer, scripted: Scripted) -> None:
    scripted.answers["List"] = tables_pb2.ListTablesResponse()
    first = await ask(server, "GET", "/v1/tables")
    again = await ask(server, "GET", "/v1/tables", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


async def test_a_stream_has_an_event_for_each_message(server: HttpServer, scripted: Scripted) -> None:
    watched = [
        operations_pb2.WatchResponse(
            operation=operations_pb2.Operation(op="t/n/1", record=m.json_message(n)), revision=n + 40
        )
        for n in (1, 2)
    ]
    scripted.answers["Watch"] = [*watched, NotFound("gone")]
    answer = await ask(server, "GET", "/v1/operations/t/n/1:watch?revision=7")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    found = [one.partition("\ndata: ") for one in events[:2]]
    assert [(head, json.loads(data)["operation"]["record"]) for head, _, data in found] == [
        ("id: 41", 1),
        ("id: 42", 2),
    ]
    assert events[2].startswith("event: error\ndata: ")
    assert scripted.requests[0][1].revision == 7
    scripted.answers["Watch"] = [NotFound("gone")]
    assert (await ask(server, "GET", "/v1/operations/t/n/1:watch")).status_code == 404


@pytest.mark.parametrize(
    ("path", "last", "revision"),
    [
        ("t/n/1:watch", "41", 41),
        ("t/n/1:watch?revision=7", "41", 7),
        ("t/n/1:watch", "9" * 30, 2**63 - 1),
        ("t/n/1:watch", "-1", 0),
        ("t/n/1:watch", "x", 0),
    ],
)
async def test_a_browser_goes_on_after_its_last_event(
    server: HttpServer, scripted: Scripted, path: str, last: str, revision: int
) -> None:
    scripted.answers["Watch"] = []
    answer = await ask(server, "GET", f"/v1/operations/{path}", headers={"last-event-id": last})
    assert scripted.requests[0][1].revision == revision
    assert answer.status_code == 204, "nothing follows, so the browser does not connect again"


# ---------------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:80"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:7782"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:80"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://127.0.0.1"}, 200),
    ],
)
async def test_pages_of_other_sites_reach_nothing(
    server: HttpServer, scripted: Scripted, headers: dict[str, str], status: int
) -> None:
    scripted.answers["List"] = tables_pb2.ListTablesResponse()
    assert (await ask(server, "GET", "/v1/tables", headers=headers)).status_code == status


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_is_not_declared_as_json_is_refused(
    server: HttpServer, scripted: Scripted, kind: str
) -> None:
    answer = await ask(server, "POST", "/v1/operations", content=b"{}", headers={"content-type": kind})
    assert (answer.status_code, scripted.requests) == (400, [])


async def test_a_body_that_is_too_large_or_no_json_is_refused(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_BODY", 100)
    kind = {"content-type": "application/json"}
    for content, words in ((b"x" * 101, "more than 100 bytes"), (b"{", "not valid JSON"), (b"\xff", "not valid JSON")):
        answer = await ask(server, "POST", "/v1/operations", content=content, headers=kind)
        assert (answer.status_code, words in answer.text) == (400, True), answer.text


async def test_an_unknown_route_is_not_found(server: HttpServer) -> None:
    for verb, path in (("GET", "/"), ("GET", "/v1/x"), ("GET", "/v1/operations/")):
        assert (await ask(server, verb, path)).status_code == 404
    for verb, path, allowed in (("DELETE", "/v1/operations", "GET, POST"), ("POST", "/openapi.json", "GET")):
        answer = await ask(server, verb, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


async def test_the_ids_of_the_document_are_unique(server: HttpServer) -> None:
    document = (await ask(server, "GET", "/openapi.json")).json()
    ids = [one["operationId"] for verbs in document["paths"].values() for one in verbs.values()]
    assert len(ids) == len(set(ids)) == len(ROUTES)


async def test_callers_of_rest_are_identified(scripted: Scripted, tmp_path: Any) -> None:
    assert parse(FILE, "f").identifies
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    server = HttpServer(dict.fromkeys(NAMES, scripted), CallAdmission(AccessFile(path)))
    scripted.answers |= {"List": tables_pb2.ListTablesResponse(), "Remove": tables_pb2.RemoveTableResponse()}
    for token, verb, target, status in (
        (None, "GET", "/v1/tables", 401),
        ("a wrong token of the tests", "GET", "/v1/tables", 401),
        ("etl token of the tests", "GET", "/v1/tables", 200),
        ("etl token of the tests", "DELETE", "/v1/tables/t", 403),
        ("root token of the tests", "DELETE", "/v1/tables/t", 200),
    ):
        headers = {"host": "lake.example", **({"authorization": f"Bearer {token}"} if token else {})}
        assert (await ask(server, verb, target, headers=headers)).status_code == status


async def test_nothing_of_a_request_is_read_before_its_caller_is_identified(scripted: Scripted, tmp_path: Any) -> None:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    server = HttpServer(
        dict.fromkeys(NAMES, scripted), CallAdmission(AccessFile(path), AuditLog(tmp_path / "audit.jsonl"))
    )

    kind = {"content-type": "application/json"}
    assert (await ask(server, "GET", "/v1/history?page_size=a")).status_code == 401
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in {**kind, "host": "a"}.items()]
    scope = {"type": "http", "method": "POST", "raw_path": b"/v1/operations", "query_string": b"", "headers": headers}
    await server({**scope, "path": "/v1/operations"}, receive, send)
    assert sent[0]["status"] == 401
    verdicts = [json.loads(line)["verdict"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert verdicts == ["NotIdentified", "NotIdentified"]


async def test_a_strange_host_is_no_internal_error(scripted: Scripted, tmp_path: Any) -> None:
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    server = HttpServer(dict.fromkeys(NAMES, scripted), CallAdmission(AccessFile(path)))
    scripted.answers["List"] = operations_pb2.ListResponse()
    for host in ("[", "a?table=x", "a#"):
        headers = {"host": host, "authorization": "Bearer etl token of the tests"}
        assert (await ask(server, "GET", "/v1/operations?table=t", headers=headers)).status_code == 200
        assert scripted.requests[-1][1].table == "t"


async def test_a_refused_site_is_in_the_audit_log(scripted: Scripted, tmp_path: Any) -> None:
    server = HttpServer(dict.fromkeys(NAMES, scripted), CallAdmission(None, AuditLog(tmp_path / "audit.jsonl")))
    await ask(server, "POST", "/v1/operations", headers={"origin": "http://evil.example"}, json={})
    line = json.loads((tmp_path / "audit.jsonl").read_text())
    assert (line["call"], line["verdict"]) == ("POST /v1/operations", "PermissionDenied")


async def test_the_bodies_of_all_requests_together_are_bounded(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_BODIES", 100)
    kind = {"content-type": "application/json"}
    for size, status in ((101, 503), (50, 400), (60, 400)):
        assert (await ask(server, "POST", "/v1/operations", content=b"x" * size, headers=kind)).status_code == status


class Endless(Scripted):
    """Handlers whose streams have no event."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def _watch(self, request: Any) -> AsyncGenerator[Any, None]:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        yield None


async def test_a_stream_without_events_begins_after_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_streams, "BEAT", 0.01)
    server = HttpServer(dict.fromkeys(NAMES, Endless()), CallAdmission())
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(30), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            async with client.stream("GET", "/v1/operations/t/n/1:watch?revision=7") as answer:
                lines = answer.aiter_lines()
                assert [await anext(lines) for _ in range(3)] == [": waiting", "", ": waiting"]
    finally:
        await server.stop(10)


class Talkative(Endless):
    """Handlers whose streams have events without end."""

    async def _watch(self, request: Any) -> AsyncGenerator[Any, None]:
        self.began.set()
        try:
            while True:
                yield operations_pb2.WatchResponse(operation=operations_pb2.Operation(op="x" * 100_000))
        finally:
            self.ended.set()


async def test_a_caller_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_TIMEOUT", 0.05)
    talkative = Talkative()
    server = HttpServer(dict.fromkeys(NAMES, talkative), CallAdmission())
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(30):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_000)
            writer.write(b"GET /v1/operations/t/n/1:watch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await talkative.ended.wait()
            writer.close()
    finally:
        await server.stop(10)


@pytest.mark.parametrize("later", [False, True])
async def test_a_stream_ends_when_its_caller_disconnects(later: bool) -> None:
    endless = Endless()
    server = HttpServer(dict.fromkeys(NAMES, endless), CallAdmission())
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(30):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/operations/t/n/1:watch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            if later:
                await endless.began.wait()
            writer.close()
            if later:
                await endless.ended.wait()
    finally:
        await server.stop(10)
    assert endless.ended.is_set() is endless.began.is_set()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v1/tables HTT", b"GET /v1/tables HTTP/1.1\r\nHost: 127.0.0.1\r\na: b\r\n"]
)
async def test_a_connection_without_whole_headers_is_closed(
    server: HttpServer, scripted: Scripted, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT", 0.05)
    scripted.answers["List"] = tables_pb2.ListTablesResponse()
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
    finally:
        await server.stop(10)


async def test_connections_beyond_the_limit_are_closed(
    server: HttpServer, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 2)
    port = await server.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(30):
            first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            for one in (writer, *(writer for _, writer in first)):
                one.close()
    finally:
        await server.stop(10)


async def test_a_websocket_is_not_served(server: HttpServer, scripted: Scripted) -> None:
    scripted.answers["List"] = tables_pb2.ListTablesResponse()
    port = await server.start("127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "eA==", "origin": "null"}
            assert (await client.get("/v1/tables", headers=headers)).status_code == 403
            for verb in ("HEAD", "OPTIONS"):
                answer = await client.request(verb, "/v1/tables")
                assert answer.status_code == 405
                assert not [name for name in answer.headers if name.startswith("access-control")]
    finally:
        await server.stop(10)


async def test_a_caller_does_not_choose_its_address_in_the_audit_log(scripted: Scripted, tmp_path: Any) -> None:
    server = HttpServer(dict.fromkeys(NAMES, scripted), CallAdmission(None, AuditLog(tmp_path / "audit.jsonl")))
    port = await server.start("127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            await client.get("/v1/tables", headers={"origin": "null", "x-forwarded-for": "192.0.2.1"})
    finally:
        await server.stop(10)
    assert json.loads((tmp_path / "audit.jsonl").read_text())["peer"].startswith("127.0.0.1:")
