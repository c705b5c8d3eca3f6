"""An HTTP server that sends the bytes that a test chooses: also malformed, slow or endless ones."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TLS = b"\x16"
"""The first byte of a TLS handshake."""


class Server:
    """Answers each connection on ``url`` with ``answer``: bytes, or a function that yields them.

    ``requests``: the first line of each request. ``closed``: set when the test has ended.
    """

    def __init__(self, answer: bytes | Callable[[Server], Iterable[bytes]]) -> None:
        self.requests: list[str] = []
        self.sent = 0
        self.closed = threading.Event()
        self.answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/check"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            request = b""
            while b"\r\n\r\n" not in request and request[:1] != TLS and (more := connection.recv(4096)):
                request += more
            self.requests.append(request.partition(b"\r\n")[0].decode(errors="replace"))
            for part in (self.answer,) if isinstance(self.answer, bytes) else self.answer(self):
                connection.sendall(part)
                self.sent += len(part)

    def close(self) -> None:
        self.closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def ok(body: bytes, head: bytes = b"") -> bytes:
    """The bytes of a 200 response; ``head``: further header lines."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n" % (len(body), head) + body


@contextmanager
def answering(answer: bytes | Callable[[Server], Iterable[bytes]]) -> Iterator[Server]:
    """A server for one ``with`` block."""
    server = Server(answer)
    try:
        yield server
    finally:
        server.close()
