"""An object store (S3 over HTTP) that answers with errors and records requests."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import unquote

import pytest


def _listing(files: Mapping[str, bytes | None]) -> bytes:
    rows = "".join(
        f"<Contents><Key>{key}</Key><Size>{len(data or b'x')}</Size>"
        "<LastModified>2013-01-31T18:00:00.000Z</LastModified></Contents>"
        for key, data in sorted(files.items())
    )
    count = f"<KeyCount>{len(files)}</KeyCount>"
    return f"<ListBucketResult>{count}<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()


class RefusingStore:
    """Answers requests with ``status`` and the S3 error ``code``. Use it in a ``with`` block.

    It lists ``files`` (key → bytes or None) and serves those with bytes. ``requests``: requests that are no listings.
    """

    def __init__(
        self, status: int = 403, code: str = "AccessDenied", files: Mapping[str, bytes | None] | None = None
    ) -> None:
        store = self
        self.requests: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                path, _, query = self.path.partition("?")
                key = unquote(path).partition("/bucket")[2].lstrip("/")
                if files is not None and "list-type=2" in query:
                    self._send(200, _listing(files))
                    return
                store.requests.append(f"{self.command} {self.path}")
                data = files.get(key) if files is not None else None
                if data is not None:
                    self._send_range(data)
                elif files is not None and key not in files:
                    self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
                else:
                    self._refuse()

            def _send_range(self, data: bytes) -> None:
                first, last = 0, len(data) - 1
                if byte_range := self.headers.get("Range"):
                    begin, _, end = byte_range.partition("=")[2].partition("-")
                    if begin:
                        first, last = int(begin), min(int(end or last), last)
                    else:
                        first = max(0, len(data) - int(end))
                told = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if byte_range else {}
                self._send(206 if byte_range else 200, data[first : last + 1], told)

            def _refuse(self) -> None:
                body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'.encode()
                self._send(status, body)

            def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Last-Modified", "Thu, 31 Jan 2013 18:00:00 GMT")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = _answer

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the environment variables with which this server is used as S3."""
        for name, value in {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
