"""Old versions and partitions of tables on S3."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from distop import testing
from distop.protocol.records import TableRecord
from distop.storage.opened_stores import open_store
from distop.tables import plan_table, reachability_of
from distop_behaviors.expire import ExpirePartitions, ExpireSnapshots
from tests.storage import delta_tables, iceberg_tables
from tests.storage.conftest import REMOTE, S3
from tests.storage.test_parquet_tables import parquet
from tests.support.context import FakeContext, complete, run_jobs
from tests.support.table_files import LoggedRemote

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.servers import Served

pytestmark = [pytest.mark.timeout(300)]


def keys(location: str) -> set[str]:
    return {f"{location}/{one.key}" for one in open_store(location).list() if not one.key.startswith("_distop/")}


@pytest.mark.parametrize("served", S3, indirect=True)
def test_files_of_old_snapshots_on_s3_are_deleted(served: Served, tmp_path: Path) -> None:
    location = f"{served.url}/{uuid.uuid4().hex}/t"
    table = LoggedRemote(open_store(location), iceberg_tables.properties_for(served.port)).new(iceberg_tables.SCHEMA)
    for n in range(3):
        table.overwrite(pa.table({"a": [n], "b": [n]}))
    open_store(location).put_new("beside", b"x")
    before, record = keys(location), TableRecord("lake", "iceberg", location)
    current = {path for one in plan_table(record).partitions for path, _, _ in one.files}
    argument = {"older_than": 0, "allow_recent": True}
    done = testing.run_operation(ExpireSnapshots, argument, table=record, folder=tmp_path)
    assert (done.state, list(done.errors)) == ("success", [])
    assert keys(location) == {file.path for file in reachability_of(record).all_files()} | {f"{location}/beside"}
    assert current <= keys(location)
    deleted = done.report["deleted"]
    assert sum(found["files"] for found in deleted.values()) == len(before - keys(location)) > 0
    assert deleted["data"]["files"] == 2
    assert (done.report["missing"], done.report["failed_files"]) == (0, 0)


@pytest.mark.parametrize("served", S3, indirect=True)
def test_old_partitions_on_s3_are_removed_and_then_their_files(served: Served, tmp_path: Path) -> None:
    location = f"{served.url}/{uuid.uuid4().hex}/t"
    today = datetime.now(UTC).date()
    rows = pa.table({"id": [1, 2, 3], "day": [today, today - timedelta(days=1), today - timedelta(days=100)]})
    kept = {"delta.deletedFileRetentionDuration": "interval 0 seconds"}
    delta_tables.append(location, served.port, rows, partition_by=["day"], configuration=kept)
    record = TableRecord("lake", "delta", location)
    argument = {"column": "day", "older_than": "90d"}
    done = testing.run_operation(ExpirePartitions, argument, table=record, folder=tmp_path / "a")
    assert (done.state, list(done.errors)) == ("success", [])
    current = {path for one in plan_table(record).partitions for path, _, _ in one.files}
    assert len(current) == 2
    done = testing.run_operation(
        ExpireSnapshots, {"older_than": 0, "allow_recent": True}, table=record, folder=tmp_path / "b"
    )
    assert (done.state, list(done.errors)) == ("success", [])
    assert done.report["deleted"]["data"]["files"] == 1
    assert {key for key in keys(location) if "/_delta_log/" not in key} == current


@pytest.mark.parametrize("served", REMOTE, indirect=True)
def test_old_partitions_of_a_folder_lose_exactly_their_listed_objects(served: Served, tmp_path: Path) -> None:
    location = f"{served.url}/{uuid.uuid4().hex}/t"
    today = datetime.now(UTC).date()
    names = [f"day={today - timedelta(days=n)}/k=a%2Fb" for n in (1, 2, 100)]
    store = open_store(location)
    for name in names:
        for n in range(2):
            store.put_new(f"{name}/{n}.parquet", parquet(n))
    store.put_new(f"{names[2]}/_SUCCESS", b"")
    open_store(f"{location}-2").put_new(f"{names[2]}/0.parquet", parquet(0))
    record = TableRecord("lake", "parquet", location)
    argument = ExpirePartitions.Arg.model_validate({"column": "day", "older_than": "90d"})
    ctx = FakeContext(tmp_path, record)
    plans = list(ExpirePartitions().partitions(record, argument, ctx).partitions)
    store.put(f"{names[2]}/1.parquet", parquet(7, 8))  # replaced since the plan
    store.put_new(f"{names[2]}/new.parquet", parquet(9))
    rows = run_jobs(ExpirePartitions(), argument, plans, ctx)
    report = complete(ExpirePartitions(), argument, record, rows, plans, ctx, version="").report
    assert (report["removed"], report["files"]["files"], report["changed"]) == (1, 1, 1)
    left = {f"{location}/{names[2]}/{name}" for name in ("1.parquet", "new.parquet", "_SUCCESS")}
    assert keys(location) == left | {f"{location}/{name}/{n}.parquet" for name in names[:2] for n in range(2)}
    assert len(keys(f"{location}-2")) == 1
