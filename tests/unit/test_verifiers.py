"""Asking whether a sender's transaction was completed: whatever a verifier does, there is an answer in bounded time and
memory.
"""

from __future__ import annotations

import http.server
import json
import resource
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from distop.worker import verifying
from distop.worker.verifying import MAX_ANSWER, MAX_HANGING, verify
from tests.support.answering import Server, answering, ok

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 10.0
YES, NO = b'{"completed": true}', b'{"completed": false}'


def ask(verifier: str, limit: float = LIMIT, external_id: str = "tx-17") -> dict[str, Any]:
    return verify({"verify": verifier, "external_id": external_id, "op": "t/noop/1", "limit": limit})


@pytest.mark.parametrize(("body", "completed"), [(YES, True), (NO, False), (b' {"a": [], "completed":true}\n', True)])
def test_C14_a_url_is_asked_with_id_and_operation(body: bytes, completed: bool) -> None:
    with answering(ok(body)) as server:
        assert ask(server.url, external_id="tx 17/ä&op=x") == {"completed": completed, "why": ""}
        method, target, _ = server.asked[0].split(" ")
        assert method == "GET"
        assert urlsplit(target).path == "/check"
        assert parse_qs(urlsplit(target).query) == {"external_id": ["tx 17/ä&op=x"], "op": ["t/noop/1"]}


WRONG = [
    (b"", "RemoteDisconnected"),
    (b"nonsense\r\n\r\n", "BadStatusLine"),
    (b"\xff" * 200_000, "LineTooLong"),
    (ok(b""), "is no JSON"),
    (ok(b"yes"), "is no JSON"),
    (ok(b"[" * 60_000), "is no JSON"),
    (ok(b"\xff\xfe"), "is no JSON"),
    (ok(b"true"), "is not"),
    (ok(b'{"completed": 1}'), "is not"),
    (ok(b'{"completed": "true"}'), "is not"),
    (ok(b'{"complete": true}'), "is not"),
    (ok(b"null"), "is not"),
    (ok(YES + b" " * MAX_ANSWER), "more than 65536 bytes"),
    (ok(YES)[:-1], "IncompleteRead|is no JSON"),
    (b"HTTP/1.1 500 Oh\r\nContent-Length: 19\r\n\r\n" + YES, "answered 500 Oh"),
    (b"HTTP/1.1 404 Not Found\r\n\r\n", "answered 404"),
    (b"HTTP/1.1 204 No Content\r\n\r\n", "answered 204"),
    (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000, "HTTPException"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "IncompleteRead|ValueError"),
]


@pytest.mark.parametrize(("answer", "why"), WRONG, ids=[repr(answer[:40]) for answer, _ in WRONG])
def test_C14_nonsense_is_no_answer(answer: bytes, why: str) -> None:
    import re

    with answering(answer) as server:
        found = ask(server.url)
    assert found["completed"] is None
    assert re.search(why, found["why"]), found["why"]
    assert len(found["why"]) <= 300
    assert "\n" not in found["why"]


def test_C14_a_redirect_is_not_followed() -> None:
    with answering(ok(YES)) as other:
        with answering(f"HTTP/1.1 302 Found\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n".encode()) as server:
            assert "redirects are not followed" in ask(server.url)["why"]
        assert other.asked == []


def endless(server: Server) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n"
    while not server.over.is_set():
        yield b" " * 65_536


def endless_chunks(server: Server) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while not server.over.is_set():
        yield b"10000\r\n" + b" " * 65_536 + b"\r\n"


@pytest.mark.parametrize("answer", [endless, endless_chunks])
def test_C14_an_answer_of_10_GB_is_not_read(answer: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(answer) as server:
        assert "more than 65536 bytes" in ask(server.url)["why"]
    assert server.sent < 64 * 1024 * 1024, "what fits the buffers of the sockets"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def silent(server: Server) -> Iterator[bytes]:
    server.over.wait(60)
    yield b""


def trickling(server: Server, first: bytes = b"HTTP/1.1 200 OK\r\n") -> Iterator[bytes]:
    """Each read gets something in time, and there is no end."""
    yield first
    while not server.over.wait(0.05):
        yield b"A"


def trickling_body(server: Server) -> Iterator[bytes]:
    return trickling(server, b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")


def continuing(server: Server) -> Iterator[bytes]:
    while not server.over.wait(0.05):
        yield b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("answer", [silent, trickling, trickling_body, continuing])
def test_C14_a_url_that_hangs_or_trickles_is_cut_at_its_deadline(answer: Any) -> None:
    with answering(answer) as server:
        assert ask(server.url, limit=0.5) == {"completed": None, "why": "no answer within 0.5 s"}
        gone_by = time.monotonic() + 30
        while any(thread.name == "verify" for thread in threading.enumerate()):
            assert time.monotonic() < gone_by, "its thread has ended, too"
            threading.Event().wait(0.01)


def test_C14_a_socket_that_gives_up_before_the_deadline_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying._Cut, "_cut", lambda self: None)
    with answering(silent) as server, pytest.raises(verifying.Unanswered, match=r"^no answer within 0\.2 s$"):
        verifying.ask_url(server.url, "id", "t/noop/1", 0.2)


def test_C14_a_server_that_speaks_no_tls_and_one_that_nobody_listens_at() -> None:
    with answering(ok(YES)) as server:
        assert "SSL" in ask(server.url.replace("http:", "https:"))["why"]
    assert "ConnectionRefusedError" in ask(server.url)["why"]


def test_C14_tls_that_trickles_is_cut_as_well() -> None:
    with answering(silent) as server:
        assert ask(server.url.replace("http:", "https:"), limit=0.5)["why"] == "no answer within 0.5 s"


def test_C14_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(ok(YES)) as server:
        assert ask(server.url)["completed"] is True


def test_C14_an_honest_server_of_the_standard_library() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            done = parse_qs(urlsplit(self.path).query)["external_id"] == ["tx-17"]
            body = json.dumps({"completed": done}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://localhost:{server.server_port}"
        assert ask(url)["completed"] is True
        assert ask(url, external_id="tx-18")["completed"] is False
        server.shutdown()


# ------------------------------------------------------------------- functions


def install(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(verifying, "registered", lambda name: function)


@pytest.mark.parametrize("answer", [True, False])
def test_C14_a_registered_function_is_asked(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def check(external_id: str, op: str) -> bool:
        asked.append((external_id, op))
        return answer

    install(monkeypatch, check)
    assert ask("orders") == {"completed": answer, "why": ""}
    assert asked == [("tx-17", "t/noop/1")]


def breaks(*_: str) -> bool:
    raise RuntimeError("the\ndata base is down " + "x" * 10_000)


def leaves(*_: str) -> bool:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (breaks, "RuntimeError: the"),
        (leaves, "SystemExit: 3"),
        (lambda *_: None, "returned NoneType"),
        (lambda *_: 1, "returned int"),
    ],
)
def test_C14_a_function_that_breaks_is_no_answer(function: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, function)
    found = ask("orders")
    assert found["completed"] is None
    assert why in found["why"]
    assert len(found["why"]) <= 300


def test_C14_one_that_is_not_installed_is_no_answer() -> None:
    assert "no verifier 'orders' is installed on this node" in ask("orders")["why"]


def test_C14_functions_that_hang_are_given_up_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_hanging", threading.Semaphore(2))
    over = threading.Event()
    install(monkeypatch, lambda *_: over.wait(60))
    for _ in range(2):
        assert ask("orders", limit=0.01)["why"] == "no answer within 0.01 s"
    assert ask("orders", limit=0.01)["why"] == f"{MAX_HANGING} verifications hang on this node"
    over.set()
    gone_by = time.monotonic() + 30
    while ask("orders")["completed"] is not True:
        assert time.monotonic() < gone_by
