"""Statistics of tables for policies, of each format, compared with what was written."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, NestedField, StringType

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import plan_table, statistics_of
from tests.support.delta_logs import DeltaLog, features, metadata, remove, statistics, vector
from tests.support.lake import Folder
from tests.support.row_deltas import commit, data_files, equality_deletes, new_files

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False), NestedField(2, "k", StringType(), required=False))
BY_K = PartitionSpec(PartitionField(source_id=2, field_id=1000, transform=IdentityTransform(), name="k"))
ALL = ("files", "small_files", "bytes", "delete_ratio", "snapshots", "oldest_snapshot", "partitions")
VECTOR = "^(]<&u-VY!GpVjU9LJQb"


def rows(*keys: str | None) -> pa.Table:
    return pa.table({"id": list(range(len(keys))), "k": pa.array(keys, pa.string())})


def sizes(record: TableRecord) -> list[int]:
    return [size for one in plan_table(record).partitions for _, size, _ in one.files]


def test_a_parquet_folder(tmp_path: Path) -> None:
    for name, count in (("k=a/1", 1), ("k=a/2", 5_000), ("k=b/1", 1)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": list(range(count))}), tmp_path / f"{name}.parquet")
    record = TableRecord("t", "parquet", str(tmp_path))
    found = statistics_of(record, ALL, 2_000)
    small = sum(size < 2_000 for size in sizes(record))
    assert (found.files, found.small_files, found.bytes, found.partitions) == (3, small, sum(sizes(record)), 2)
    assert 0 < small < 3
    assert found.values(["delete_ratio", "snapshots", "oldest_snapshot"]) == {
        "delete_ratio": 0.0,
        "snapshots": None,
        "oldest_snapshot": None,
    }
    assert found.version == statistics_of(record, (), 0).version == plan_table(record).version
    pq.write_table(pa.table({"id": [1]}), tmp_path / "k=b/2.parquet")
    assert statistics_of(record, (), 0).version != found.version


def test_an_iceberg_table(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    record = TableRecord("t", "iceberg", str(tmp_path))
    empty = statistics_of(record, ALL, 1_000_000)
    assert (empty.version, empty.files, empty.delete_ratio, empty.snapshots) == ("no snapshot", 0, 0.0, 0)
    table.append(rows("a", "b"))
    table.append(rows("b", None))
    found = statistics_of(record, ALL, 1_000_000)
    assert (found.files, found.small_files, found.partitions, found.snapshots) == (4, 4, 3, 2)
    assert found.bytes == sum(sizes(record))
    assert statistics_of(record, ALL, 1).small_files == 0
    assert 0.0 <= (found.oldest_snapshot or 0.0) < time.time() - 1_000_000_000
    cheap = statistics_of(record, ("snapshots",), 0)
    assert (cheap.version, cheap.files) == (found.version, None), "no manifest is read"
    assert found.version == plan_table(record).version


def test_deletes_of_an_iceberg_table_count_while_they_apply(tmp_path: Path) -> None:
    """A compaction leaves delete files that apply to none of its new files: a policy would start it for ever."""
    table = Folder(tmp_path).new(SCHEMA, BY_K)
    record = TableRecord("t", "iceberg", str(tmp_path))

    def deleted() -> float | None:
        return statistics_of(record, ("delete_ratio",), 0).delete_ratio

    table.append(rows("a", "a", "b", "b"))
    commit(table, deletes=equality_deletes(table, ["id"], [{"id": 0}]))
    assert deleted() == 0.5  # one row in each partition
    commit(table, removed=data_files(table), data=new_files(table, rows("a", "b")))
    assert deleted() == 0.0


def test_an_iceberg_table_whose_manifests_are_gone_is_unavailable(tmp_path: Path) -> None:
    table = Folder(tmp_path).new(SCHEMA)
    table.append(rows("a"))
    record = TableRecord("t", "iceberg", str(tmp_path))
    for manifest in Path(tmp_path, "metadata").glob("*.avro"):
        manifest.unlink()
    assert statistics_of(record, ("snapshots",), 0).snapshots == 1
    with pytest.raises(TableUnavailable, match="cannot read the snapshot"):
        statistics_of(record, ("files",), 0)


def test_a_delta_table(tmp_path: Path) -> None:
    record = TableRecord("t", "delta", str(tmp_path))
    for _ in range(3):
        write_deltalake(tmp_path, rows("a", "b"), mode="append", partition_by=["k"])
    found = statistics_of(record, ALL, 1_000_000)
    assert (found.files, found.small_files, found.partitions, found.snapshots) == (6, 6, 2, 3)
    assert (found.bytes, found.delete_ratio) == (sum(sizes(record)), 0.0)
    assert 0.0 <= (found.oldest_snapshot or 0.0) < 1_000.0
    assert found.version == statistics_of(record, (), 0).version == plan_table(record).version


def test_deleted_rows_of_a_delta_table(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path).create(features("deletionVectors"))
    log.commit(log.add("a.parquet", stats=statistics(10)), log.add("b.parquet", stats=statistics(10)))
    assert statistics_of(log.record, ALL, 0).delete_ratio == 0.0
    log.commit(remove("a.parquet"), log.add("a.parquet", stats=statistics(10), deletionVector=vector(VECTOR, rows=5)))
    assert statistics_of(log.record, ALL, 0).delete_ratio == 0.25
    log.commit(log.add("c.parquet", stats=None))
    assert statistics_of(log.record, ALL, 0).delete_ratio is None, "a file without statistics"


def test_a_delta_log_without_a_time_has_no_oldest_snapshot(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path).create()
    assert statistics_of(log.record, ALL, 0).oldest_snapshot is None
    assert metadata()["partitionColumns"] == []


def test_other_formats_and_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no statistics"):
        statistics_of(TableRecord("t", "spark", "db.t"), ("files",), 0)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    found = statistics_of(TableRecord("t", "parquet", str(tmp_path)), ("files",), 0)
    assert found.partitions == 1
    for name in ("version", "rows"):
        with pytest.raises(InvalidArgument, match="no statistic"):
            found.values([name])
