"""An HTTP proxy on the loopback that loses answers, sends requests twice, or answers itself.

Each connection carries one request. Requests are forwarded as they are, so their signatures stay valid.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

_HEAD_END = b"\r\n\r\n"
_WAITS = 30.0


class Seen(NamedTuple):
    """A request: its method, its target, and all of its bytes."""

    method: str
    target: str
    whole: bytes


class FaultyProxy:
    """A proxy to a port. ``fault``: called for each request with a function that forwards it; returns the answer.

    None: the connection is closed without an answer. ``seen``: the requests in their order.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self.fault: Callable[[Seen, Callable[[bytes], bytes]], bytes | None] = lambda seen, forward: forward(seen.whole)
        self.seen: list[Seen] = []
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(_WAITS)
        for thread in self._threads:
            thread.join(_WAITS)

    def lose_answers(self, method: str, *, times: int = 1) -> None:
        """Forward the first requests of a method, and close the connection instead of answering."""
        left = [times]

        def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
            answer = forward(seen.whole)
            if seen.method == method and left[0] > 0:
                left[0] -= 1
                return None
            return answer

        self.fault = fault

    def lose_requests(self, method: str, *, times: int = 1) -> None:
        """Close the connection of the first requests of a method without forwarding them."""
        left = [times]

        def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
            if seen.method == method and left[0] > 0:
                left[0] -= 1
                return None
            return forward(seen.whole)

        self.fault = fault

    def repeat_requests(self, method: str) -> None:
        """Forward each request of a method twice, and return the second answer."""

        def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
            answer = forward(seen.whole)
            return forward(seen.whole) if seen.method == method else answer

        self.fault = fault

    def answer(
        self, status: str, body: bytes = b"", *, method: str = "", times: int = 1 << 30, suffix: str = ""
    ) -> None:
        """Answer the first requests of a method ("": any), whose path ends in ``suffix``, with a status."""
        left = [times]
        response = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body

        def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes | None:
            path = seen.target.partition("?")[0]
            if (not method or seen.method == method) and path.endswith(suffix) and left[0] > 0:
                left[0] -= 1
                return response
            return forward(seen.whole)

        self.fault = fault

    # ---- connections

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(_WAITS)
            whole = _read_message(client)
            if not whole:
                return
            method, target, _ = whole.split(b" ", 2)
            seen = Seen(method.decode(), target.decode(), whole)
            self.seen.append(seen)
            answer = self.fault(seen, self._forward)
            if answer is not None:
                client.sendall(answer)

    def _forward(self, whole: bytes) -> bytes:
        """The answer of the server, which is asked to close the connection after it."""
        head, _, body = whole.partition(_HEAD_END)
        kept = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        with socket.create_connection(("127.0.0.1", self._target), timeout=_WAITS) as server:
            server.sendall(b"\r\n".join([*kept, b"Connection: close"]) + _HEAD_END + body)
            found = bytearray()
            while piece := server.recv(1 << 16):
                found += piece
        head, _, body = bytes(found).partition(_HEAD_END)
        kept = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join([*kept, b"Connection: close"]) + _HEAD_END + body


def _read_message(client: socket.socket) -> bytes:
    """A request with its body, whose length is given."""
    found = bytearray()
    while _HEAD_END not in found:
        piece = client.recv(1 << 16)
        if not piece:
            return b""
        found += piece
    head = bytes(found).partition(_HEAD_END)[0]
    size = len(head) + len(_HEAD_END)
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            size += int(line.partition(b":")[2])
    while len(found) < size:
        piece = client.recv(1 << 16)
        if not piece:
            return b""
        found += piece
    return bytes(found)


def without_header(name: bytes) -> Callable[[Seen, Callable[[bytes], bytes]], bytes]:
    """A fault: requests lose a header."""

    def fault(seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        head, end, body = seen.whole.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(name + b":")]
        return forward(b"\r\n".join(lines) + end + body)

    return fault
