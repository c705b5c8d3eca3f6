"""expire-partitions on Iceberg tables: a snapshot that deletes whole partitions, and no other row."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, LongType, NestedField

from distop import testing
from distop.protocol.records import TableRecord
from distop.tables.commits import CommitUnknown
from distop.tables.iceberg.folder_publisher import FolderPublisher
from distop.tables.iceberg.metadata_file import read_metadata
from distop_behaviors.expire import ExpirePartitions
from tests.acceptance.sparklake import Lake
from tests.support.icebergrest import configure, sql_catalog
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.table_files import on_disk

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.rotating
DAYS = 200


def filled(spark: SparkSession, root: Path, partitioned: str, version: int) -> Lake:
    """A table with a row for each of the last days, of which some are deleted by delete files."""
    need(jar(), MAVEN)
    lake = Lake(spark, root)
    lake.create("t", "id bigint, k int, ts timestamp", f"partitioned by ({partitioned})", version)
    made = "select id, cast(id % 2 as int) k, timestamp_seconds(unix_seconds(current_timestamp()) - id * 86400) ts"
    lake.sql(f"insert into {{t}} {made} from range(0, {DAYS}, 1, 1)")
    lake.delete("t", "id % 10 = 3")
    return lake


def ids(lake: Lake) -> set[int]:
    return {row["id"] for row in lake.rows("t").collect()}


@pytest.mark.parametrize(("partitioned", "version"), [("days(ts)", 2), ("days(ts), k", 3), ("months(ts)", 2)])
def test_old_partitions_are_removed_and_all_other_rows_stay(
    spark: SparkSession, tmp_path: Path, partitioned: str, version: int
) -> None:
    lake = filled(spark, tmp_path, partitioned, version)
    before, files = ids(lake), {path for path in on_disk(lake.path("t")) if not path.endswith(".crc")}
    argument = {"column": "ts", "older_than": "90d", "max_fraction": 0.9}
    done = testing.run_operation(
        ExpirePartitions, argument, table=lake.record("t"), spark=spark, folder=tmp_path / "work"
    )
    assert (done.state, list(done.errors)) == ("success", [])
    cutoff = datetime.now(UTC) - timedelta(days=90)
    if partitioned.startswith("months"):
        month = cutoff.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        oldest = (datetime.now(UTC) - month).days
    else:
        oldest = 90
    assert ids(lake) == {number for number in before if number <= oldest}
    assert before - ids(lake)
    assert files <= on_disk(lake.path("t"))
    version_file = (lake.path("t") / "metadata" / "version-hint.text").read_text()
    metadata, _ = read_metadata(str(lake.path("t") / "metadata" / f"v{version_file}.metadata.json"))
    summary: Any = metadata.current_snapshot().summary
    assert (summary.operation.value, summary["distop.operation"]) == ("delete", "t/expire-partitions/1")
    assert summary["distop.fence"] == "completion"
    assert done.report["version"] == str(metadata.current_snapshot_id)


def test_an_answer_that_is_lost_is_settled_by_reading(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = filled(spark, tmp_path, "days(ts)", 2)
    before = ids(lake)
    commit, lost = FolderPublisher.commit, list[int]()

    def lose(self: FolderPublisher, head: Any, text: str) -> None:
        commit(self, head, text)
        if not lost:
            lost.append(1)
            raise CommitUnknown("no answer")

    monkeypatch.setattr(FolderPublisher, "commit", lose)
    argument = {"column": "ts", "older_than": "90d", "max_fraction": 0.9}
    done = testing.run_operation(
        ExpirePartitions, argument, table=lake.record("t"), spark=spark, folder=tmp_path / "work"
    )
    assert lost
    assert (done.state, list(done.errors)) == ("success", [])
    assert ids(lake) == {number for number in before if number <= 90}
    assert done.report["files"]["files"] == done.report["removed"]


def test_a_table_of_a_catalog(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(jar(), MAVEN)
    catalog = sql_catalog(tmp_path / "lake")
    catalog.create_namespace("db")
    schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "day", DateType()))
    spec = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "day"))
    table = catalog.create_table("db.t", schema, partition_spec=spec)
    today = datetime.now(UTC).date()
    days = [today, today - timedelta(days=1), today - timedelta(days=100)]
    table.append(pa.table({"id": [1, 2, 3], "day": days}))
    options = configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
    record = TableRecord("t", "iceberg", "db.t", options)
    argument = {"column": "day", "older_than": "90d"}
    done = testing.run_operation(ExpirePartitions, argument, table=record, spark=spark, folder=tmp_path / "work")
    assert (done.state, list(done.errors)) == ("success", [])
    assert sorted(catalog.load_table("db.t").scan().to_arrow()["id"].to_pylist()) == [1, 2]
    catalog.close()
