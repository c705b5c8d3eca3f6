"""``validate`` from statistics on an object store, beside bare requests by obstore and beside a local folder.

All run in this process, so coordination costs nothing. Requests are counted in one more run, at a proxy.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Result, Row, median, report_progress
from distop.behavior import load
from distop.protocol.records import TableRecord
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.storage.storage_access import storage_access_for
from distop.tables.reading.parquet_footers import THREADS
from distop.tables.reading.parquet_tail import FIRST_READ
from tests.storage import servers
from tests.storage.faulty_http import FaultyProxy
from tests.support.context import FakeContext, run_operation

if TYPE_CHECKING:
    from distop.storage.object_store import ObjectStore

PARTITIONS = 100
MOST = 3.0
"""How many times as long as the bare requests distop may take."""
COUNTED = 2_000
"""Files of the run whose requests are counted."""


def run(files: int = 10_000, runs: int = 5) -> Result:
    """Bare requests, validate on the store, and validate on a folder, ``runs`` times in turn."""
    result = Result("storage", {"files": files, "runs": runs, "threads": THREADS})
    data = _file(runs + 1)
    times: dict[str, list[float]] = {"bare": [], "store": [], "local": []}
    with tempfile.TemporaryDirectory(prefix="distop-storage-") as folder:
        place = Path(folder)
        local = _local_table(place / "table", files, data)
        (place / "gateway").mkdir()
        with servers.versitygw(place / "gateway") as served:
            os.environ.update(served.environment)
            _configure(served, served.port)
            store = _stored_table(served.url, files, data)
            for n in range(runs):
                times["bare"].append(_timed(lambda: _bare(store.location)))
                times["store"].append(_timed(lambda n=n: _validate(store.location, n, place)))
                times["local"].append(_timed(lambda n=n: _validate(str(local), n, place)))
                report_progress(
                    "storage: " + ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in times.items())
                )
            requests = _requests(served, min(files, COUNTED), data, place)
    result.samples |= times
    bare, stored, beside = (median(seconds) for seconds in times.values())
    result.rows += [
        Row("validate on S3, relative to bare requests", stored / bare, "×", MOST, note=f"{stored:.2f} : {bare:.2f} s"),
        Row("validate on S3, relative to a local folder", stored / beside, "×", note=f"{stored:.2f} : {beside:.2f} s"),
        Row("requests for a footer", requests["footers"], "a file", 2.0),
        Row("requests for a listing", requests["listings"], "in 1,000 objects", 1.0),
    ]
    return result


def _configure(served: servers.Served, port: int) -> None:
    """Configure distop for the server, with time limits for a busy machine."""
    tables = served.options(port).items()
    storage_options.configure({prefix: replace(one, request_timeout=60.0) for prefix, one in tables})


def _file(columns: int) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = io.BytesIO()
    pq.write_table(pa.table({f"c{n}": list(range(20)) for n in range(columns)}), written)
    return written.getvalue()


def _names(files: int) -> list[str]:
    return [f"part={n % PARTITIONS:03d}/{n:06d}.parquet" for n in range(files)]


def _local_table(folder: Path, files: int, data: bytes) -> Path:
    for n in range(PARTITIONS):
        (folder / f"part={n:03d}").mkdir(parents=True)
    for name in _names(files):
        (folder / name).write_bytes(data)
    return folder


def _stored_table(url: str, files: int, data: bytes) -> ObjectStore:
    report_progress(f"storage: writing {files} objects")
    store = open_store(f"{url}/{uuid.uuid4().hex}")
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda name: store.put_new(name, data), _names(files)))
    return store


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _bare(location: str) -> None:
    """List the objects, and read the end of each, by obstore alone."""
    import obstore

    access = storage_access_for(location)
    store = access.obstore()
    paths = [found["path"] for page in obstore.list(store, access.bucket.path, chunk_size=1000) for found in page]

    def read(path: str) -> int:
        return len(bytes(obstore.get(store, path, options={"range": {"suffix": FIRST_READ}}).bytes()))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, paths))


def _validate(location: str, column: int, folder: Path) -> None:
    """Plan and judge the table from statistics. Each run checks another column, whose statistics are not cached."""
    table = TableRecord("t", "parquet", location)
    argument = {"checks": [{"not_null": f"c{column}"}], "statistics": "only"}
    work = Path(tempfile.mkdtemp(dir=folder))
    report = run_operation(load("validate"), table, argument, lambda one: FakeContext(work, one)).report
    if report["verdict"] != "valid":
        raise RuntimeError(f"{location} is reported as {report['verdict']}")


def _requests(served: servers.Served, files: int, data: bytes, folder: Path) -> dict[str, float]:
    """Requests for each footer, and for each 1,000 objects of the listing."""
    store = _stored_table(served.url, files, data)
    with FaultyProxy(served.port) as proxy:
        _configure(served, proxy.port)
        _validate(store.location, 0, folder)
        footers = sum(".parquet?" in f"{seen.target}?" for seen in proxy.seen)
        listings = sum("list-type=2" in seen.target for seen in proxy.seen)
    return {"footers": footers / files, "listings": listings / (files / 1_000)}
