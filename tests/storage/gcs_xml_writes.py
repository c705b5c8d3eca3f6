"""Writes by GCS's XML API, which obstore sends and fake-gcs-server refuses, by its JSON API.

Conditions are passed on, so that fake-gcs-server decides about them.
"""

from __future__ import annotations

import itertools
import json
import threading
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.storage.faulty_http import Seen

_META = "x-goog-meta-"
_BOUNDARY = "part-of-a-write"


class XmlWrites:
    """Translates the writes; forwards other requests."""

    def __init__(self, port: int) -> None:
        self._host = f"127.0.0.1:{port}"
        self._ids = itertools.count()
        self._parts: dict[str, dict[int, bytes]] = {}
        self._metadata: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def answer(self, seen: Seen, forward: Callable[[bytes], bytes]) -> bytes:
        parts = urlsplit(seen.target)
        bucket, _, name = parts.path.removeprefix("/").partition("/")
        writes = seen.method in ("PUT", "POST") or (seen.method == "DELETE" and "uploadId" in parts.query)
        if not writes or not name or bucket in ("storage", "upload", "batch"):
            return forward(self._addressed(seen.whole))
        head, _, body = seen.whole.partition(b"\r\n\r\n")
        headers = {
            key.strip().lower(): value.strip()
            for key, _, value in (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
        }
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        metadata = {key.removeprefix(_META): value for key, value in headers.items() if key.startswith(_META)}
        name = unquote(name)
        condition = headers.get("x-goog-if-generation-match")
        if "uploads" in query:
            upload = str(next(self._ids))
            with self._lock:
                self._parts[upload], self._metadata[upload] = {}, metadata
            return _response(
                f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        if "partNumber" in query:
            with self._lock:
                self._parts[query["uploadId"]][int(query["partNumber"])] = body
            return _response("", {"ETag": f'"{query["partNumber"]}"'})
        if "uploadId" in query:
            with self._lock:
                kept = self._parts.pop(query["uploadId"], {})
                metadata = self._metadata.pop(query["uploadId"], {})
            if seen.method == "DELETE":
                return _response("")
            body = b"".join(data for _, data in sorted(kept.items()))
            answer = self._insert(forward, bucket, name, body, metadata, None)
            etag = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
            return _response(etag, _versions(answer)) if _status(answer) == 200 else answer
        if source := headers.get("x-goog-copy-source"):
            path = "/".join(map(quote, unquote(source).removeprefix("/").split("/", 1)))
            answer = forward(f"GET /{path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())
            if _status(answer) != 200:
                return answer
            body = answer.partition(b"\r\n\r\n")[2]
        answer = self._insert(forward, bucket, name, body, metadata, condition)
        return _response("", _versions(answer)) if _status(answer) == 200 else answer

    def _addressed(self, whole: bytes) -> bytes:
        """A request with the server's own host: the server finds the bucket by it."""
        head, end, body = whole.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"host:")]
        return b"\r\n".join([*lines, f"Host: {self._host}".encode()]) + end + body

    def _insert(
        self,
        forward: Callable[[bytes], bytes],
        bucket: str,
        name: str,
        body: bytes,
        metadata: Mapping[str, str],
        condition: str | None,
    ) -> bytes:
        description = json.dumps({"name": name, "metadata": metadata}).encode()
        start = f"--{_BOUNDARY}\r\nContent-Type: application/json\r\n\r\n".encode()
        middle = f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        content = start + description + middle + body + f"\r\n--{_BOUNDARY}--\r\n".encode()
        asked = "" if condition is None else f"&ifGenerationMatch={condition}"
        head = (
            f"POST /upload/storage/v1/b/{bucket}/o?uploadType=multipart{asked} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: multipart/related; boundary={_BOUNDARY}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return forward(head.encode() + content)


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def _versions(answer: bytes) -> dict[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = _unchunked(body)
    found = json.loads(body)
    return {"ETag": f'"{found["etag"].strip(chr(34))}"', "x-goog-generation": str(found["generation"])}


def _unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        found += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return found


def _response(body: str, headers: Mapping[str, str] | None = None) -> bytes:
    lines = [f"{name}: {value}" for name, value in (headers or {}).items()]
    head = "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *lines])
    return f"{head}\r\n\r\n{body}".encode()
