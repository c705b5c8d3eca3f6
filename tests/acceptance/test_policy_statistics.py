"""The statistics that policies compare equal those of the formats' own metadata tables and files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

from distop.clock import time
from distop.protocol.records import TableRecord
from distop.tables import statistics_of
from distop.tables.statistics import TableStatistics
from tests.acceptance.test_expire_snapshots import written
from tests.support import delta
from tests.support.delta import DeltaLake, jars, writing_session
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.rotating
ALL = ("files", "small_files", "bytes", "delete_ratio", "snapshots", "oldest_snapshot", "partitions")


def compared(record: TableRecord, sizes: Sequence[int], oldest: float) -> TableStatistics:
    """The statistics, after a comparison with the sizes of the data files and the time of the oldest version."""
    limit = sorted(sizes)[len(sizes) // 2]
    before = time.time()
    found = statistics_of(record, ALL, limit)
    after = time.time()
    assert (found.files, found.bytes) == (len(sizes), sum(sizes))
    assert found.small_files == sum(size < limit for size in sizes)
    if oldest:
        assert before - oldest <= (found.oldest_snapshot or 0.0) + 1e-3
        assert (found.oldest_snapshot or 0.0) <= after - oldest + 1e-3
    return found


@pytest.mark.parametrize("version", [2, 3])
def test_iceberg(spark: SparkSession, tmp_path: Path, version: int) -> None:
    lake = written(spark, tmp_path, "t", version)
    for evolved in (False, True):
        if evolved:
            lake.load("t").updateSpec().removeField("k").commit()
            lake.fill("t")

        def table(query: str) -> list[tuple[object, ...]]:
            return [tuple(row) for row in lake.spark.sql(query).collect()]

        data = table("select file_size_in_bytes, record_count from lake.db.t.data_files")
        ((deleted,),) = table("select sum(record_count) from lake.db.t.delete_files")
        ((snapshots, oldest),) = table("select count(*), min(unix_millis(committed_at)) from lake.db.t.snapshots")
        ((partitions,),) = table("select count(*) from lake.db.t.partitions where file_count > 0")
        found = compared(lake.record("t"), [int(str(size)) for size, _ in data], int(str(oldest)) / 1_000)
        rows = sum(int(str(count)) for _, count in data)
        assert found.delete_ratio == int(str(deleted)) / rows
        assert 0 < int(str(deleted)) < rows
        assert (found.snapshots, found.partitions) == (snapshots, partitions)
    before = found.version
    lake.spark.sql("call lake.system.expire_snapshots(table => 'db.t', older_than => timestamp '2100-01-01')")
    expired = statistics_of(lake.record("t"), ALL, 0)
    assert expired.snapshots == lake.spark.table("lake.db.t.snapshots").count() < (found.snapshots or 0)
    assert expired.version == before, "no new version of the data"


def test_delta(spark: SparkSession, tmp_path: Path) -> None:
    need(jars(), delta.MAVEN)
    lake = DeltaLake(writing_session(spark), tmp_path)
    record = lake.create(
        "t", "id bigint, k int", "partitioned by (k)",
        **{"delta.enableDeletionVectors": "true", "delta.checkpointPolicy": "v2", "delta.checkpointInterval": "3"},
    )  # fmt: skip
    for n in range(3):
        lake.sql(f"insert into {{t}} select id, cast(id % 3 as int) from range({n * 100}, {n * 100 + 100})", "t")
        lake.sql(f"delete from {{t}} where id % 10 = {n}", "t")
    path = str(tmp_path / "t")
    (detail,) = lake.session.sql(f"describe detail delta.`{path}`").collect()
    history = lake.session.sql(f"describe history delta.`{path}`").collect()
    rows = lake.read("t")
    files = [unquote(one).removeprefix("file:") for one in rows.inputFiles()]
    physical = [pq.read_metadata(one) for one in files]
    sizes = [(tmp_path / "t" / one).stat().st_size for one in files]
    assert (len(sizes), sum(sizes)) == (detail["numFiles"], detail["sizeInBytes"])
    first = (tmp_path / "t" / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    (made,) = (one["commitInfo"]["timestamp"] for one in map(json.loads, first) if "commitInfo" in one)
    found = compared(record, sizes, made / 1_000)
    written_rows = sum(one.num_rows for one in physical)
    assert found.delete_ratio == pytest.approx(1 - rows.count() / written_rows)
    assert 0.0 < (found.delete_ratio or 0.0) < 1.0
    assert (found.snapshots, found.partitions) == (len(history), rows.select("k").distinct().count())


def test_parquet(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    made = spark.sql("select id, cast(id % 4 as int) k from range(0, 1000, 1, 3)")
    made.write.partitionBy("k").parquet(str(folder))
    frame = spark.read.parquet(str(folder))
    sizes = [(folder / unquote(one).removeprefix("file:")).stat().st_size for one in frame.inputFiles()]
    found = compared(TableRecord("t", "parquet", str(folder)), sizes, 0.0)
    assert (found.partitions, found.delete_ratio, found.snapshots) == (frame.select("k").distinct().count(), 0.0, None)
