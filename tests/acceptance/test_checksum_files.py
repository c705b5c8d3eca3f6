"""Hadoop's checksum files beside a table's files: writers control their content, and Spark must not open them."""

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
from tests.integration.test_worker_runs import run, running_worker, sample_env
from tests.support.lake import Folder
from tests.support.localspark import FRUGAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

__all__ = ["sample_env"]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SECONDS = 60
HUGE = b"crc\0\x7f\xff\xff\xff"
"""A checksum file with one checksum for each 2 GiB, for which Hadoop allocates a buffer of that size."""


def checksum_paths(folder: Path) -> list[Path]:
    """The paths at which Hadoop looks for checksums of the files below a folder."""
    return [path.with_name(f".{path.name}.crc") for path in folder.rglob("*") if path.is_file()]


def create_pipes(folder: Path) -> list[Path]:
    """Create a pipe at each of these paths."""
    found = checksum_paths(folder)
    for path in found:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    return found


def result_of(call: Callable[[], Any], created_pipes: list[Path]) -> Any:
    """The result of the call. Fails if it takes longer than ``SECONDS``, and then opens the pipes to end the call."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    timed_out = thread.is_alive()
    while thread.is_alive():
        for path in created_pipes:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        thread.join(0.1)
    assert not timed_out
    return found[0]


def test_hole_9_no_checksum_file_of_an_iceberg_table_is_opened(spark: SparkSession, tmp_path: Path) -> None:
    """A process that opens such a pipe blocks for ever, and cannot be interrupted."""
    table = Folder(tmp_path).new(Schema(NestedField(1, "id", LongType(), required=False)))
    table.append(pa.table({"id": [1, 2]}))
    created_pipes = create_pipes(tmp_path)
    assert {path.name for path in created_pipes} > {".v2.metadata.json.crc", ".version-hint.text.crc"}
    (planned,) = plan_table(TableRecord("t", "iceberg", str(tmp_path))).partitions
    session: Any = spark
    conf = session._jsparkSession.sessionState().newHadoopConf()
    tables = session._jvm.org.apache.iceberg.hadoop.HadoopTables(conf)
    assert result_of(lambda: tables.load(str(tmp_path)).currentSnapshot().snapshotId(), created_pipes)
    rows = result_of(lambda: iceberg_rows.read(spark, planned.source, planned.files).collect(), created_pipes)
    assert sorted(row.id for row in rows) == [1, 2]


def test_hole_9_no_checksum_file_of_a_folder_is_opened(spark: SparkSession, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    created_pipes = create_pipes(tmp_path)
    rows = result_of(lambda: spark.read.parquet(str(tmp_path / "a.parquet")).collect(), created_pipes)
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
    """A checksum file of eight bytes once made the JVM allocate 2 GB and end."""
    folder = tmp_path / "t"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    settings: dict[str, Any] = {"spark_master": "local[2]", "spark_conf": {"spark.driver.extraJavaOptions": FRUGAL}}
    async with running_worker(tmp_path, sample_env, **settings) as worker:
        (folder / ".a.parquet.crc").write_bytes(HUGE)
        (end,) = (await run(worker, validate(folder, "t/validate/1", 0.0), 240)).values()
        assert (end.kind, end.error) == ("success", "")
        create_pipes(folder)
        (end,) = (await run(worker, validate(folder, "t/validate/2", 60.0), 120)).values()
        assert (end.kind, end.error) == ("success", "")
