"""``validate``, ``build-index`` and ``lookup`` on tables in an object store, beside the same tables in a local folder.

The store is versitygw on the same machine. All run in this process, so coordination costs nothing. Tables have ten
partitions. Nothing of a table is cached before a measurement. Stages are local. Requests are counted in one more run,
at a proxy.
"""

from __future__ import annotations

import io
import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import delta, iceberg
from benchmarks.common import Result, Row, median, report_progress
from benchmarks.index import session
from distop.behavior import load
from distop.protocol.records import TableRecord
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.tables.reading.parquet_footers import THREADS
from distop_behaviors.index import lookup
from tests.storage import servers
from tests.storage.faulty_http import FaultyProxy
from tests.support import s3_spark
from tests.support.context import FakeContext, run_operation
from tests.support.index_runs import Indexes
from tests.support.repeated_attempts import clear_caches

if TYPE_CHECKING:
    import pyarrow as pa

    from distop.storage.object_store import ObjectStore

FORMATS = ("parquet", "iceberg", "delta")
ROWS = 1_000
"""Rows of a file. The keys of each file span the whole range."""
PARTITIONS = 10
WARM = 1


def run(files: int = 1_000, runs: int = 5, formats: Sequence[str] = FORMATS) -> Result:
    """Each operation on S3 and on a folder in turn, ``runs`` times."""
    result = Result("lakes", {"files": files, "rows": ROWS * files, "runs": runs})
    jars = s3_spark.jars()
    if jars is None:
        raise RuntimeError(s3_spark.MAVEN)
    settings = [iceberg.FORMAT.spark(), delta.FORMAT.spark(), {"spark.jars": ",".join(map(str, jars))}]
    with tempfile.TemporaryDirectory(prefix="distop-lakes-") as folder, ExitStack() as running:
        place = Path(folder)
        (place / "gateway").mkdir()
        served = running.enter_context(servers.versitygw(place / "gateway"))
        os.environ.update(served.environment)
        _configure(served, served.port)
        spark = running.enter_context(session(settings))
        running.enter_context(s3_spark.configured(spark, served.url, servers.KEY, servers.SECRET))
        for name in formats:
            remote = open_store(f"{served.url}/{uuid.uuid4().hex}")
            local = open_store(str(place / name))
            tables = [_Table(name, store, served.port, place, spark, files) for store in (remote, local)]
            _measure(result, tables, runs)
            _count_requests(result, tables[0], served)
            _configure(served, served.port)
    return result


def _configure(served: servers.Served, port: int) -> None:
    """Configure distop for the server, with time limits for a busy machine."""
    options = served.options(port).items()
    storage_options.configure({prefix: replace(one, request_timeout=60.0) for prefix, one in options})


class _Table:
    """A table in a store: it is written by the constructor."""

    def __init__(self, name: str, store: ObjectStore, port: int, folder: Path, spark: Any, files: int) -> None:
        self.record = TableRecord("t", name, store.location)
        self._folder = folder
        self._spark = spark
        self._keys = ROWS * files
        report_progress(f"lakes: writing {files} files of {name} to {store.location}")
        {"parquet": _write_parquet, "iceberg": _write_iceberg, "delta": _write_delta}[name](store, port, files)
        self._indexes = Indexes(Path(), Path(tempfile.mkdtemp(dir=folder)))
        self._indexes.record = self.record

    def operations(self) -> dict[str, Callable[[], None]]:
        return {
            "validate from statistics": self._validate,
            "build-index": self._build,
            "lookup of a key": self._look_up,
        }

    def _validate(self) -> None:
        work = Path(tempfile.mkdtemp(dir=self._folder))
        argument = {"checks": [{"not_null": "k"}], "statistics": "only"}
        report = run_operation(load("validate"), self.record, argument, lambda one: FakeContext(work, one)).report
        if (report["verdict"], report["rows"]) != ("valid", self._keys):
            raise RuntimeError(f"{self.record.location} is reported as {report['verdict']}, {report['rows']} rows")

    def _build(self) -> None:
        report = self._indexes.build(columns=["k"], refresh="full")
        if (report.rows, report.not_indexed_files) != (self._keys, 0):
            raise RuntimeError(f"the index of {self.record.location} has {report.rows} rows")

    def _look_up(self) -> None:
        key = random.randrange(self._keys)
        (found,) = lookup(self._spark, self.record, "i", [key]).collect()
        if found["k"] != key:
            raise RuntimeError(f"the lookup of {key} in {self.record.location} returned {found}")


def _rows(file: int, files: int) -> pa.Table:
    """The rows of a file: every ``files``-th key."""
    import pyarrow as pa

    keys = pa.array(range(file, ROWS * files, files), pa.int64())
    parts = pa.array([file % PARTITIONS] * ROWS, pa.int64())
    return pa.table({"part": parts, "k": keys, "text": [f"row {n}" for n in range(ROWS)]})


def _commits(files: int) -> Iterator[pa.Table]:
    """The rows of each commit, with a file of each partition."""
    import pyarrow as pa

    for n in range(0, files, PARTITIONS):
        yield pa.concat_tables(_rows(file, files) for file in range(n, min(n + PARTITIONS, files)))


def _write_parquet(store: ObjectStore, port: int, files: int) -> None:
    import pyarrow.parquet as pq

    def write(n: int) -> None:
        written = io.BytesIO()
        pq.write_table(_rows(n, files).drop_columns(["part"]), written)
        store.put_new(f"part={n % PARTITIONS}/{n}.parquet", written.getvalue())

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, range(files)))


def _write_iceberg(store: ObjectStore, port: int, files: int) -> None:
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.types import LongType, NestedField, StringType

    from tests.storage.iceberg_tables import properties_for
    from tests.support.lake import Remote

    columns = ("part", LongType()), ("k", LongType()), ("text", StringType())
    fields = [NestedField(n, name, kind, required=False) for n, (name, kind) in enumerate(columns, 1)]
    spec = PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "part"))
    remote = store.location.startswith("s3:")
    table = Remote(store, properties_for(port) if remote else {}).new(Schema(*fields), spec, **iceberg.ONE_MANIFEST)
    for rows in _commits(files):
        table.append(rows)


def _write_delta(store: ObjectStore, port: int, files: int) -> None:
    from deltalake import write_deltalake

    from tests.storage.delta_tables import append

    for rows in _commits(files):
        if store.location.startswith("s3:"):
            append(store.location, port, rows, partition_by=["part"])
        else:
            write_deltalake(store.location, rows, mode="append", partition_by=["part"])


def _measure(result: Result, tables: Sequence[_Table], runs: int) -> None:
    """The operations on S3 and in the folder, in turn."""
    remote, local = tables
    for name in remote.operations():
        times: tuple[list[float], list[float]] = ([], [])
        for n in range(WARM + runs):
            for seconds, table in zip(times, (remote, local), strict=True):
                clear_caches()
                began = time.perf_counter()
                table.operations()[name]()
                if n >= WARM:
                    seconds.append(time.perf_counter() - began)
        on_s3, beside = map(median, times)
        what = f"{remote.record.format}: {name}"
        note = f"{on_s3:.3f} : {beside:.3f} s"
        report_progress(f"lakes: {what}: {note}")
        result.samples |= {f"{what}, S3": times[0], f"{what}, local": times[1]}
        result.rows.append(Row(f"{what} on S3, relative to a local folder", on_s3 / beside, "×", note=note))


def _count_requests(result: Result, table: _Table, served: servers.Served) -> None:
    with FaultyProxy(served.port) as proxy:
        _configure(served, proxy.port)
        for name, work in table.operations().items():
            clear_caches()
            proxy.seen.clear()
            work()
            listings = sum("list-type=2" in seen.target for seen in proxy.seen)
            row = f"{table.record.format}: requests of {name}"
            result.rows.append(Row(row, len(proxy.seen), note=f"{listings} of them listings"))
