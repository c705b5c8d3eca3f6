"""A catalog of Iceberg whose tables are in an object store, and which distop is configured for."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from distop.behavior import TableRecord
from distop.storage.opened_stores import object_at
from tests.storage.iceberg_tables import SCHEMA, properties_for
from tests.support.icebergrest import RestCatalogServer, configure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pytest

KINDS = ("sql", "rest")
THEIRS = {
    "s3.endpoint": "http://127.0.0.1:1",
    "s3.access-key-id": "theirs",
    "s3.secret-access-key": "theirs-too",
    "s3.session-token": "of-theirs",
    "s3.region": "elsewhere",
}
"""What a catalog may answer, and distop does not use."""


class CatalogLake:
    """A catalog with the table ``sales.orders``. ``url``: of its warehouse; ``table``: pyiceberg's, to write to it."""

    def __init__(self, rest: RestCatalogServer, url: str, record: TableRecord) -> None:
        self.rest = rest
        self.url = url
        self.record = record
        rest.tables.create_namespace("sales")
        self.table = rest.tables.create_table("sales.orders", SCHEMA)
        self.add([1, 2], [1, None])

    def add(self, a: Sequence[int | None], b: Sequence[int | None]) -> None:
        """Append a file of rows."""
        kinds = pa.schema([("a", pa.int64()), ("b", pa.int64())])
        self.table.append(pa.table({"a": a, "b": b}, schema=kinds))

    def forge(self, properties: Mapping[str, str]) -> None:
        """Add properties to the table's metadata file: as a commit, pyiceberg's writer would obey them."""
        store, key = object_at(self.table.metadata_location)
        metadata = json.loads(store.get(key, limit=1 << 20).data)
        metadata["properties"] |= properties
        store.put(key, json.dumps(metadata).encode())


@contextmanager
def catalog_lake(
    kind: str, url: str, port: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CatalogLake]:
    """A catalog of a kind of :data:`KINDS`, with its files below a URL of S3, which is served at a port."""
    with RestCatalogServer(folder, url, properties_for(port)) as rest:
        uri = rest.uri if kind == "rest" else f"sqlite:///{folder}/catalog.db"
        option = configure(monkeypatch, type=kind, uri=uri)
        yield CatalogLake(rest, url, TableRecord("t", "iceberg", "sales.orders", option))
