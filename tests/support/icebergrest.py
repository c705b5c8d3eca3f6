"""An Iceberg REST catalog: an HTTP server with the endpoints that pyiceberg uses, on a catalog in SQLite."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import CommitTableRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest

WAREHOUSE = "main"
Answer = tuple[int, str]
"""The status and the body of an answer."""
CommitFault = Callable[[Callable[[], Answer]], Answer | None]


def lose_answer(commit: Callable[[], Answer]) -> None:
    """Commit, and do not answer."""
    commit()


def lose_request(_: Callable[[], Answer]) -> None:
    """Neither commit nor answer."""


def double(commit: Callable[[], Answer]) -> Answer:
    """Commit twice; the answer is that to the second request."""
    commit()
    return commit()


def throttle(_: Callable[[], Answer]) -> Answer:
    return 503, ""


def once(fault: CommitFault) -> CommitFault:
    """Only the first commit has this fault."""
    calls = [0]

    def first(commit: Callable[[], Answer]) -> Answer | None:
        calls[0] += 1
        return fault(commit) if calls[0] == 1 else commit()

    return first


def late() -> CommitFault:
    """Commit the first request only after the second one; it is not answered."""
    held: list[Callable[[], Answer]] = []

    def fault(commit: Callable[[], Answer]) -> Answer | None:
        if not held:
            held.append(commit)
            return None
        answer = commit()
        with suppress(ValueError):  # pyiceberg's errors for updates that do not fit the table any more
            held[0]()
        return answer

    return fault


COMMIT_FAULTS: dict[str, Callable[[], CommitFault]] = {
    "lost answer": lambda: once(lose_answer),
    "all answers lost": lambda: lose_answer,
    "lost request": lambda: once(lose_request),
    "doubled": lambda: double,
    "late": late,
    "throttled": lambda: once(throttle),
}
"""Faults of the commits of a catalog."""


def sql_catalog(
    folder: Path, name: str = "prod", warehouse: str = "", storage: Mapping[str, str] | None = None
) -> SqlCatalog:
    """A catalog in a SQLite file; its warehouse is in the same folder by default.

    ``storage``: pyiceberg's settings for the object store of a warehouse.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = warehouse or str(folder / "warehouse")
    return SqlCatalog(name, **{**(storage or {}), "uri": f"sqlite:///{folder}/catalog.db", "warehouse": place})


def configure(monkeypatch: pytest.MonkeyPatch, name: str = "prod", **settings: str) -> dict[str, str]:
    """Set the settings of a catalog in the environment; returns the options of table records that use it."""
    for setting, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__{name.upper()}__{setting.upper()}", value)
    return {"catalog": name}


class RestCatalogServer:
    """Serves the catalog ``tables`` (:func:`sql_catalog`). Attributes change its behavior:

    - ``token``: the required bearer token; ``echoes``: a 401 answer quotes the ``Authorization`` header and the body;
    - ``status``: the status of all answers; ``page``: the body of all answers; ``redirect``: where all requests go;
    - ``released``: an event; requests wait while it is cleared;
    - ``lose_answers``: close the connections of commits and drops without an answer; ``lose_drops``: of drops, also
      before they are done; ``refuse_drops``: answer them with 403;
    - ``on_commit``: gets a function that commits and returns the answer, and returns the answer to send, None for none;
    - ``defaults``, ``overrides``: properties of the client; ``config``: of each table; ``properties``: of its metadata;
    - ``vended``: credentials of the storage for each table (``storage-credentials``).

    ``requests``: all requests (method, path, headers, body).
    """

    def __init__(self, folder: Path, warehouse: str = "", storage: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.tables = sql_catalog(folder, warehouse=warehouse, storage=storage)
        self.token = ""
        self.echoes = False
        self.status = 0
        self.page = ""
        self.released = threading.Event()
        self.released.set()
        self.lose_answers = False
        self.lose_drops = False
        self.refuse_drops = False
        self.on_commit: CommitFault | None = None
        self.defaults: dict[str, Any] = {}
        self.overrides: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.properties: dict[str, Any] = {}
        self.vended: list[dict[str, Any]] = []
        self.redirect = ""
        self.requests: list[tuple[str, str, dict[str, str], str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> RestCatalogServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.tables.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self, "")

            def do_POST(self) -> None:
                server.answer(self, self.rfile.read(int(self.headers["Content-Length"])).decode())

            def do_DELETE(self) -> None:
                server.answer(self, "")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Log nothing."""

        return Handler

    def answer(self, request: BaseHTTPRequestHandler, body: str) -> None:
        """Answer one request; ``body``: that of a commit, else empty."""
        self.released.wait()
        self.requests.append((request.command, request.path, dict(request.headers), body))
        if self.redirect:
            request.send_response(307)
            request.send_header("Location", f"{self.redirect}{request.path}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        drops = request.command == "DELETE"
        if drops and self.lose_drops:
            return
        if body and self.on_commit is not None:
            found = self.on_commit(lambda: self._response(request, body))
        else:
            found = self._response(request, body)
        if found is None or ((body or drops) and self.lose_answers):
            return
        status, text = found
        request.send_response(status)
        request.send_header("Content-Length", str(len(text.encode())))
        request.end_headers()
        request.wfile.write(text.encode())

    def _response(self, request: BaseHTTPRequestHandler, body: str) -> tuple[int, str]:
        if self.page:
            return 200, self.page
        if self.status:
            return self.status, ""
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            quoted = f": {request.headers.get('Authorization')} {body}" if self.echoes else ""
            return error(401, "NotAuthorizedException", f"the token is not accepted{quoted}")
        url = urlsplit(request.path)
        parts = [unquote(part) for part in url.path.split("/")[2:]]
        if parts == ["config"]:
            warehouse = parse_qs(url.query).get("warehouse", [WAREHOUSE])[0]
            if warehouse != WAREHOUSE:
                return error(404, "NotFoundException", f"Unable to find warehouse {warehouse}")
            return 200, json.dumps({"defaults": self.defaults, "overrides": self.overrides})
        _, namespace, _, name = parts
        try:
            if request.command == "DELETE" and self.refuse_drops:
                return error(403, "ForbiddenException", "this principal drops no tables")
            if request.command == "DELETE":
                self.tables.drop_table((*namespace.split("\x1f"), name))
                return 204, ""
            return 200, self._table((*namespace.split("\x1f"), name), body)
        except NoSuchTableError as missing:
            return error(404, "NoSuchTableException", str(missing))
        except CommitFailedException as failed:
            return error(409, "CommitFailedException", str(failed))

    def _table(self, name: tuple[str, ...], body: str) -> str:
        table = self.tables.load_table(name)
        metadata, location = table.metadata, table.metadata_location
        if body:
            commit = CommitTableRequest.model_validate_json(body)
            done = self.tables.commit_table(table, commit.requirements, commit.updates)
            metadata, location = done.metadata, done.metadata_location
        answer = json.loads(metadata.model_dump_json())
        answer["properties"].update(self.properties)
        found = {"metadata-location": location, "metadata": answer, "config": self.config}
        return json.dumps({**found, "storage-credentials": self.vended})


def error(status: int, kind: str, message: str) -> tuple[int, str]:
    """The status and body of an error of the REST protocol."""
    return status, json.dumps({"error": {"message": message, "type": kind, "code": status}})
