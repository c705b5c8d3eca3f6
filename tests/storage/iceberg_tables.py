"""Iceberg tables in the object stores of these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from tests.storage import servers
from tests.support.lake import Remote

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from distop.storage.object_store import ObjectStore

SCHEMA = Schema(NestedField(1, "a", LongType()), NestedField(2, "b", LongType()))


def properties_for(port: int) -> dict[str, str]:
    """pyiceberg's settings for writing to a store of S3 at a port."""
    return {
        "s3.endpoint": f"http://127.0.0.1:{port}",
        "s3.access-key-id": servers.KEY,
        "s3.secret-access-key": servers.SECRET,
        "s3.region": "us-east-1",
    }


def table_in(store: ObjectStore, port: int, *appended: dict[str, Any]) -> None:
    """Write a table to a store of S3 at a port, with one commit and one data file for each of ``appended``."""
    table = new_table(store, port, SCHEMA)
    for columns in appended:
        table.append(pa.table(columns, schema=pa.schema([("a", pa.int64()), ("b", pa.int64())])))


def new_table(store: ObjectStore, port: int, schema: Schema) -> Table:
    """Create an empty table in a store of S3 at a port."""
    return Remote(store, properties_for(port)).new(schema)
