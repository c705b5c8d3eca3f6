"""An Iceberg REST catalog: the endpoints that pyiceberg asks, on a real HTTP server, over a catalog in SQLite."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.table import CommitTableRequest

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WAREHOUSE = "main"


def sql_catalog(folder: Path, name: str = "prod") -> SqlCatalog:
    """A catalog in a SQLite file of this folder, which is its warehouse as well."""
    folder.mkdir(parents=True, exist_ok=True)
    return SqlCatalog(name, uri=f"sqlite:///{folder}/catalog.db", warehouse=str(folder / "warehouse"))


def configure(monkeypatch: pytest.MonkeyPatch, name: str = "prod", **settings: str) -> dict[str, str]:
    """Give this process, and those that it starts, the settings of a catalog; the options of records that name it."""
    for setting, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__{name.upper()}__{setting.upper()}", value)
    return {"catalog": name}


class RestCatalogServer:
    """Serves what ``tables`` has. ``token``: what callers have to bear; ``echoes``: a refusal of others quotes their
    ``Authorization`` and body; ``status``: answer everything by this one; ``page``: answer everything with it;
    ``held``: answer nothing until it is set; ``lose_answers``: of commits; ``defaults``, ``overrides``: of the
    client's properties; ``config``: of each table; ``properties``: in its metadata; ``redirect``: send everybody to
    this address; ``asked``: all requests, by method, path, headers and body.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables = sql_catalog(folder)
        self.token = ""
        self.echoes = False
        self.status = 0
        self.page = ""
        self.held = threading.Event()
        self.held.set()
        self.lose_answers = False
        self.defaults: dict[str, Any] = {}
        self.overrides: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.properties: dict[str, Any] = {}
        self.redirect = ""
        self.asked: list[tuple[str, str, dict[str, str], str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> RestCatalogServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.held.set()
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

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Quiet."""

        return Handler

    def answer(self, request: BaseHTTPRequestHandler, body: str) -> None:
        """Answer one request; ``body``: of a commit."""
        self.held.wait()
        self.asked.append((request.command, request.path, dict(request.headers), body))
        if self.redirect:
            request.send_response(307)
            request.send_header("Location", f"{self.redirect}{request.path}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        status, text = self._judge(request, body)
        if body and self.lose_answers:
            return
        request.send_response(status)
        request.send_header("Content-Length", str(len(text.encode())))
        request.end_headers()
        request.wfile.write(text.encode())

    def _judge(self, request: BaseHTTPRequestHandler, body: str) -> tuple[int, str]:
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
            wanted = parse_qs(url.query).get("warehouse", [WAREHOUSE])[0]
            if wanted != WAREHOUSE:
                return error(404, "NotFoundException", f"Unable to find warehouse {wanted}")
            return 200, json.dumps({"defaults": self.defaults, "overrides": self.overrides})
        _, namespace, _, name = parts
        try:
            return 200, self._table((*namespace.split("\x1f"), name), body)
        except NoSuchTableError as missing:
            return error(404, "NoSuchTableException", str(missing))
        except CommitFailedException as refused:
            return error(409, "CommitFailedException", str(refused))

    def _table(self, name: tuple[str, ...], body: str) -> str:
        table = self.tables.load_table(name)
        metadata, location = table.metadata, table.metadata_location
        if body:
            asked = CommitTableRequest.model_validate_json(body)
            done = self.tables.commit_table(table, asked.requirements, asked.updates)
            metadata, location = done.metadata, done.metadata_location
        told = json.loads(metadata.model_dump_json())
        told["properties"].update(self.properties)
        return json.dumps({"metadata-location": location, "metadata": told, "config": self.config})


def error(status: int, kind: str, message: str) -> tuple[int, str]:
    """An error as the protocol has it."""
    return status, json.dumps({"error": {"message": message, "type": kind, "code": status}})
