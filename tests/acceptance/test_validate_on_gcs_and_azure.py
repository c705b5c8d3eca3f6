"""validate on GCS and Azure: statistics decide without a connector of Spark, and a scan without one is an error."""

from __future__ import annotations

import io
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop.errors import TableRefused
from distop.storage import storage_options
from distop.storage.opened_stores import open_store
from distop.tables import check_table
from distop_behaviors.index import lookup
from distop_behaviors.validate import Validate
from tests.storage import servers
from tests.support.context import run_operation
from tests.support.index_runs import Indexes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from tests.support.context import FakeContext

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]
SERVERS = {"gs": servers.fake_gcs, "abfss": servers.azurite}


@pytest.fixture(params=SERVERS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A new place in an emulator, which distop is configured for; Spark has no connector for it."""
    (tmp_path / "server").mkdir()
    with SERVERS[request.param](tmp_path / "server") as served:
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        storage_options.configure(served.options())
        yield open_store(f"{served.url}/{uuid.uuid4().hex}")
    storage_options.configure({})


def put(store: ObjectStore, key: str, **columns: Any) -> None:
    data = io.BytesIO()
    pq.write_table(pa.table(columns), data)
    store.put_new(key, data.getvalue())


def test_statistics_decide_and_a_scan_names_the_missing_connector(
    store: ObjectStore, context: Callable[[TableRecord], FakeContext]
) -> None:
    put(store, "day=1/a.parquet", a=[1, 2, None], b=[0.5, 1.0, 2.0])
    put(store, "day=2/b c+é.parquet", a=[4, 5], b=[0.0, 9.0])
    table = check_table(TableRecord("t", "parquet", store.location))
    checks = [{"not_null": "a"}, {"range": {"column": "b", "min": 0}}]
    ran = run_operation(Validate(), table, {"checks": checks, "sample": 0}, context)
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [("violated", 1), ("valid", 0)]
    assert ran.report["rows"] == 5
    ran = run_operation(Validate(), table, {"checks": checks[1:]}, context)
    later = {"checks": checks[1:], "since": ran.report["certificate"]}
    put(store, "day=3/c.parquet", a=[1], b=[-1.0])
    ran = run_operation(Validate(), table, later, context)
    assert (ran.report["rows"], ran.report["checks"][0]["verdict"]) == (1, "violated")
    with pytest.raises(TableRefused, match=r"cannot read any of 3 files: no file system .* is installed"):
        run_operation(Validate(), table, {"checks": checks, "statistics": "never"}, context)


def test_an_index_is_built_and_looked_up_without_a_connector(
    store: ObjectStore, spark: SparkSession, tmp_path: Path
) -> None:
    put(store, "day=1/a.parquet", a=[1, 2, 3])
    put(store, "day=2/b.parquet", a=[4, 5, 6])
    indexes = Indexes(tmp_path, tmp_path / "shared")
    indexes.record = TableRecord("t", "parquet", store.location)
    for name, kind in {"i": "posting", "s": "skip"}.items():
        assert indexes.build(name, columns=["a"], kind=kind).not_indexed == []
    found = lookup(spark, indexes.record, "i", [5], local_bytes=1 << 20)
    assert [tuple(row) for row in found.select("a", "day").collect()] == [(5, "2")]
    for name in ("i", "s"):
        assert indexes.drop(name)
