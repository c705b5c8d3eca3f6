"""Delta tables in the object stores of these tests, written without Spark."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deltalake import write_deltalake

from distop.storage.store_errors import ObjectExists
from tests.storage import servers

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from distop.storage.object_store import ObjectStore


def append(url: str, port: int, rows: pa.Table, **options: Any) -> None:
    """Commit rows as one file for each partition, to a table in a store of S3 at a port. ``options``: of delta-rs."""
    storage = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": servers.KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    write_deltalake(url, rows, mode="append", storage_options=storage, **options)


def upload(folder: Path, store: ObjectStore) -> None:
    """Copy the files of a table to a store, except files that it has from an earlier copy."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.endswith(".crc"):
            with suppress(ObjectExists):
                store.put_new(str(path.relative_to(folder)), path.read_bytes())
