"""Verifiers of a sender's transaction: each call ends in bounded time and memory."""

from __future__ import annotations

import errno
import http.server
import json
import resource
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from distop.decide import verifier_urls
from distop.errors import InvalidArgument
from distop.settings import SETTINGS
from distop.worker.child_side import sender_verification
from distop.worker.child_side.sender_verification import MAX_ANSWER, may_reach, verify
from tests.support.scripted_server import Server, answering, ok

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIMIT = 10.0
YES, NO = b'{"completed": true}', b'{"completed": false}'


def ask(
    verifier: str, limit: float = LIMIT, external_id: str = "tx-17", allowed: Sequence[str] | None = None
) -> dict[str, Any]:
    """``allowed`` None: the URL's own server."""
    own = () if "://" not in verifier else ("/".join(verifier.split("/")[:3]),)
    message = {"verify": verifier, "external_id": external_id, "op": "t/noop/1", "limit": limit}
    return verify(message, own if allowed is None else allowed)


@pytest.mark.parametrize(("body", "completed"), [(YES, True), (NO, False), (b' {"a": [], "completed":true}\n', True)])
def test_C14_a_url_is_asked_with_id_and_operation(body: bytes, completed: bool) -> None:
    with answering(ok(body)) as server:
        assert ask(server.url, external_id="tx 17/ä&op=x") == {"completed": completed, "why": ""}
        method, target, _ = server.requests[0].split(" ")
        assert method == "GET"
        assert urlsplit(target).path == "/check"
        assert parse_qs(urlsplit(target).query) == {"external_id": ["tx 17/ä&op=x"], "op": ["t/noop/1"]}


WRONG = [
    (b"", "not an answer"),
    (b"nonsense\r\n\r\n", "not an answer"),
    (b"\xff" * 200_000, "not an answer"),
    (ok(b""), "not an answer"),
    (ok(b"yes"), "not an answer"),
    (ok(b"[" * 60_000), "not an answer"),
    (ok(b"\xff\xfe"), "not an answer"),
    (ok(b"true"), "not an answer"),
    (ok(b'{"completed": 1}'), "not an answer"),
    (ok(b'{"completed": "true"}'), "not an answer"),
    (ok(b'{"complete": true}'), "not an answer"),
    (ok(b"null"), "not an answer"),
    (ok(YES + b" " * MAX_ANSWER), "not an answer"),
    (ok(YES)[:-1], "not an answer"),
    (b"HTTP/1.1 500 Oh\r\nContent-Length: 19\r\n\r\n" + YES, "status 5xx"),
    (b"HTTP/1.1 404 Not Found\r\n\r\n", "status 4xx"),
    (b"HTTP/1.1 204 No Content\r\n\r\n", "status 2xx"),
    (b"HTTP/1.1 999 What\r\n\r\n", "failed"),
    (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000, "not an answer"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not an answer"),
]


@pytest.mark.parametrize(("answer", "why"), WRONG, ids=[repr(answer[:40]) for answer, _ in WRONG])
def test_C14_an_invalid_answer_is_rejected(answer: bytes, why: str) -> None:
    with answering(answer) as server:
        assert ask(server.url) == {"completed": None, "why": why}


def test_C14_a_redirect_is_not_followed() -> None:
    with answering(ok(YES)) as other:
        with answering(f"HTTP/1.1 302 Found\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n".encode()) as server:
            assert ask(server.url, allowed=(server.url, other.url))["why"] == "status 3xx"
        assert other.requests == []


def endless(server: Server) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n"
    while not server.closed.is_set():
        yield b" " * 65_536


def endless_chunks(server: Server) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while not server.closed.is_set():
        yield b"10000\r\n" + b" " * 65_536 + b"\r\n"


@pytest.mark.parametrize("answer", [endless, endless_chunks])
def test_C14_an_answer_of_10_GB_is_not_read(answer: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(answer) as server:
        assert ask(server.url)["why"] == "not an answer"
    assert server.sent < 64 * 1024 * 1024, "at most the buffers of the sockets"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def silent(server: Server) -> Iterator[bytes]:
    server.closed.wait(60)
    yield b""


def trickling(server: Server, first: bytes = b"HTTP/1.1 200 OK\r\n") -> Iterator[bytes]:
    """Each read gets data in time, but the answer never ends."""
    yield first
    while not server.closed.wait(0.05):
        yield b"A"


def trickling_body(server: Server) -> Iterator[bytes]:
    return trickling(server, b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n")


def continuing(server: Server) -> Iterator[bytes]:
    while not server.closed.wait(0.05):
        yield b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("answer", [silent, trickling, trickling_body, continuing])
def test_C14_a_url_that_hangs_or_trickles_is_cut_at_its_deadline(answer: Any) -> None:
    with answering(answer) as server:
        assert ask(server.url, limit=0.5) == {"completed": None, "why": "timeout"}
        deadline = time.monotonic() + 30
        while any(thread.name == "verify" for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "its thread has not ended"
            threading.Event().wait(0.01)


def test_C14_a_time_out_of_the_socket_before_the_deadline_is_a_timeout_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_verification._ConnectionDeadline, "_shut_down", lambda self: None)
    with answering(silent) as server, pytest.raises(sender_verification.NoAnswer, match=r"^timeout"):
        sender_verification.ask_url(server.url, "id", "t/noop/1", 0.2, (server.url,))


def test_C14_a_server_without_tls_and_a_closed_port_are_reported() -> None:
    with answering(ok(YES)) as server:
        assert ask(server.url.replace("http:", "https:"))["why"] == "no TLS"
    assert ask(server.url)["why"] == "refused"
    assert ask("http://nowhere.invalid/")["why"] == "refused"


def test_C14_a_silent_tls_server_is_cut_at_the_deadline() -> None:
    with answering(silent) as server:
        assert ask(server.url.replace("http:", "https:"), limit=0.5)["why"] == "timeout"


def test_C14_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(ok(YES)) as server:
        assert ask(server.url)["completed"] is True


def test_C14_a_server_of_the_standard_library_can_be_asked() -> None:
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


# ---------------------------------------------------------------- allowed URLs


def test_hole_5_a_url_that_the_executor_does_not_list_is_not_asked() -> None:
    with answering(ok(YES)) as server:
        assert ask(server.url, allowed=()) == {"completed": None, "why": "not allowed"}
        assert server.requests == []


@pytest.mark.parametrize(
    ("url", "prefix", "within"),
    [
        ("https://orders/check", "https://orders", True),
        ("https://orders/check", "https://orders/", True),
        ("https://ORDERS:443/check", "https://orders", True),
        ("https://orders/check/it", "https://orders/check", True),
        ("https://orders/ch%65ck/it", "https://orders/check", True),
        ("https://[fd01::1]:8443/", "https://[FD01::1]:8443", True),
        ("https://orders.evil/check", "https://orders", False),
        ("https://orders:8443/check", "https://orders", False),
        ("http://orders/check", "https://orders", False),
        ("https://orders/checked", "https://orders/check", False),
        ("https://orders/", "https://orders/check", False),
        ("https://orders/check/it", "https://orders/check/", True),
        ("https://orders/admin", "https://orders/check/", False),
    ],
)
def test_hole_5_a_prefix_is_compared_part_by_part(url: str, prefix: str, within: bool) -> None:
    assert verifier_urls.parse(url).within(verifier_urls.parse(prefix)) is within


@pytest.mark.parametrize(
    "url",
    [
        "https://orders@evil/check",
        "https://a:b@orders/",
        "https://orders/check/../admin",
        "https://orders/check/%2e%2e/admin",
        "https://orders/check/%252e%252e/admin",
        "https://orders/check/..;/admin",
        "https://orders/check%2fit",
        "https://orders/check\\it",
        "https://orders//check",
        "https://orders/a b",
        "https://orders/\tcheck",
        "https://orders/check?op=1",
        "https://orders/check#x",
        "https://orders:0/",
        "https://orders:99999/",
        "https://",
        "https:///check",
        "https://[::1/",
        "ftp://orders/",
        "file:///etc/passwd",
        "https://" + "a" * 1_000,
        "https://or_ders\u2025/",
    ],
)
def test_hole_5_an_ambiguous_url_is_refused(url: str) -> None:
    """At prepare, as a prefix of the list, and in a forged record."""
    with pytest.raises(InvalidArgument):
        verifier_urls.parse(url)
    with pytest.raises(InvalidArgument):
        SETTINGS["verifier_url"].read([url])
    assert ask(url, allowed=("https://orders/check",))["why"] == "not allowed"


NODE_ADDRESSES = [
    *("127.0.0.1", "127.8.0.1", "0.0.0.0", "169.254.169.254", "224.0.0.1", "100.100.100.200", "255.255.255.255"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "64:ff9b:1:7f00:0:100::", "::ffff:0:7f00:1"),
    *("::127.0.0.1", "fd00:ec2::254", "168.63.129.16"),
    *("2001:0:7f00:1::f5ff:fffe", "2001:0:5db8:d822::80ff:fffe", "2001:0:5db8:d822::5601:5601"),
]


@pytest.mark.parametrize("address", NODE_ADDRESSES)
def test_hole_5_a_name_that_resolves_to_the_node_itself_is_not_asked(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [found])
    assert ask("http://orders/check") == {"completed": None, "why": "not allowed"}
    assert not may_reach("orders", address)


def own_addresses() -> list[str]:
    """The machine's addresses on its default routes, if there are any."""
    found = []
    for family, other in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((other, 9))
            found.append(sock.getsockname()[0])
    return found


def test_hole_5_an_address_of_the_machines_interfaces_is_not_asked() -> None:
    if not (own := own_addresses()):
        pytest.skip("the machine has no interface but loopback")
    for address in own:
        assert not may_reach("orders", address)
        assert may_reach(address, address)
        if ":" not in address:
            assert not may_reach("orders", f"::ffff:{address}")
            assert not may_reach("orders", f"64:ff9b::{address}")


def test_hole_5_an_address_that_cannot_be_checked_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ip_nonlocal_bind, and where sockets are forbidden, every address may be the machine's own."""

    class Binds(socket.socket):
        def bind(self, address: object) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Binds)
        assert not may_reach("orders", "10.1.2.3")
        assert may_reach("10.1.2.3", "10.1.2.3")

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(socket, "socket", refused)
    assert not may_reach("orders", "10.1.2.3")


def test_hole_5_an_address_that_the_list_names_is_asked() -> None:
    assert may_reach("127.0.0.1", "127.0.0.1")
    assert may_reach("localhost", "127.0.0.1")
    assert not may_reach("localhost", "169.254.169.254")
    assert not may_reach("127.0.0.1", "127.0.0.2")
    for ordinary in ("10.1.2.3", "192.168.0.1", "93.184.216.34", "fd01::1", "2606:2800::1", "64:ff9b::a01:203"):
        assert may_reach("orders", ordinary)


def test_hole_5_the_checked_address_is_the_one_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is resolved twice could have another address the second time (DNS rebinding)."""
    with answering(ok(YES)) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        answers = [[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]]
        connected: list[Any] = []
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.pop())

        def connect(self: socket.socket, address: Any) -> None:
            connected.append(address)
            raise ConnectionRefusedError

        monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"connect": connect}))
        assert ask(f"http://orders:{port}/check")["why"] == "refused"
    assert connected == [("192.0.2.1", port)]
    assert server.requests == []


def test_hole_5_text_from_a_server_is_neither_reported_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    for answer in (b"HTTP/1.1 500 TOP-SECRET\r\n\r\n", b"TOP-SECRET\r\n\r\n", ok(b'{"TOP-SECRET": 1}')):
        with answering(answer) as server:
            assert "TOP-SECRET" not in str(ask(server.url))
    assert "TOP-SECRET" not in caplog.text


# ------------------------------------------------------------------- functions


def install(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    monkeypatch.setattr(sender_verification, "registered", lambda name: function)


@pytest.mark.parametrize("answer", [True, False])
def test_C14_a_registered_function_is_asked(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def check(external_id: str, op: str) -> bool:
        asked.append((external_id, op))
        return answer

    install(monkeypatch, check)
    assert ask("orders") == {"completed": answer, "why": ""}
    assert asked == [("tx-17", "t/noop/1")]


def raises_an_error(*_: str) -> bool:
    raise RuntimeError("the\ndata base is down " + "x" * 10_000)


def exits(*_: str) -> bool:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (raises_an_error, "failed"),
        (exits, "failed"),
        (lambda *_: None, "not an answer"),
        (lambda *_: 1, "not an answer"),
    ],
)
def test_C14_a_failing_function_gives_no_answer(function: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, function)
    assert ask("orders") == {"completed": None, "why": why}


def test_C14_a_function_that_is_not_installed_gives_no_answer() -> None:
    assert ask("orders")["why"] == "not installed"


def test_C14_hanging_functions_are_abandoned_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    install(monkeypatch, lambda *_: over.wait(60))
    for _ in range(sender_verification.MAX_HANGING):
        assert ask("orders", limit=0.01)["why"] == "timeout"
    assert ask("orders", limit=0.01)["why"] == "busy"
    over.set()
    deadline = time.monotonic() + 30
    while ask("orders")["completed"] is not True:
        assert time.monotonic() < deadline
