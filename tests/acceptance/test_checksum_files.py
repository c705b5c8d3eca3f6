"""Checksum files of Hadoop beside files of a table: writers make them what they like, and Spark opens none."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.behavior import TableRecord
from distop.tables import plan_table
from distop.tables.iceberg import iceberg_rows
from distop.worker.daemon_side.requests import JobItem, RunRequest
from tests.integration.test_worker_runs import run, sample_env, started
from tests.support.lake import Folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

__all__ = ["sample_env"]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SECONDS = 60
HUGE = b"crc\0\x7f\xff\xff\xff"
"""A checksum for each 2 GiB: Hadoop makes room for as many bytes."""


def beside(folder: Path) -> list[Path]:
    """Where Hadoop looks for the checksums of the files below a folder."""
    return [path.with_name(f".{path.name}.crc") for path in folder.rglob("*") if path.is_file()]


def pipes(folder: Path) -> list[Path]:
    """A pipe at each of these places."""
    found = beside(folder)
    for path in found:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    return found


def ends(call: Callable[[], Any], opened: list[Path]) -> Any:
    """What the call returns: within a time, after which nothing waits for these pipes."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    waits = thread.is_alive()
    while thread.is_alive():
        for path in opened:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        thread.join(0.1)
    assert not waits
    return found[0]


def test_hole_9_no_checksum_file_of_an_iceberg_table_is_opened(spark: SparkSession, tmp_path: Path) -> None:
    """A pipe holds up whoever opens it for ever, and no interrupt reaches them."""
    table = Folder(tmp_path).new(Schema(NestedField(1, "id", LongType(), required=False)))
    table.append(pa.table({"id": [1, 2]}))
    opened = pipes(tmp_path)
    assert {path.name for path in opened} > {".v2.metadata.json.crc", ".version-hint.text.crc"}
    (planned,) = plan_table(TableRecord("t", "iceberg", str(tmp_path))).partitions
    session: Any = spark
    conf = session._jsparkSession.sessionState().newHadoopConf()
    tables = session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf)
    assert ends(lambda: tables.load(str(tmp_path)).currentSnapshot().snapshotId(), opened)
    rows = ends(lambda: iceberg_rows.read(spark, planned.source, planned.files).collect(), opened)
    assert sorted(row.id for row in rows) == [1, 2]


def test_hole_9_no_checksum_file_of_a_folder_is_opened(spark: SparkSession, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    opened = pipes(tmp_path)
    rows = ends(lambda: spark.read.parquet(str(tmp_path / "a.parquet")).collect(), opened)
    assert [row.id for row in rows] == [1]


def validate(folder: Path, op: str, time_limit: float) -> RunRequest:
    table = TableRecord("t", "parquet", str(folder))
    (plan,) = plan_table(table).partitions
    arg = {"checks": [{"check": "id > 0"}], "statistics": "never"}
    return RunRequest(
        op, "validate", arg, table.to_json(), (JobItem(plan.to_json(), 1, 100),), batch=True, time_limit=time_limit
    )


async def test_hole_9_the_spark_of_an_executor_opens_no_checksum_file(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    """Eight bytes in one had the JVM ask for 2 GB, and end."""
    folder = tmp_path / "t"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    async with started(tmp_path, sample_env, spark_master="local[2]") as worker:
        (folder / ".a.parquet.crc").write_bytes(HUGE)
        (end,) = (await run(worker, validate(folder, "t/validate/1", 0.0), 240)).values()
        assert (end.kind, end.error) == ("success", "")
        pipes(folder)
        (end,) = (await run(worker, validate(folder, "t/validate/2", 60.0), 120)).values()
        assert (end.kind, end.error) == ("success", "")
