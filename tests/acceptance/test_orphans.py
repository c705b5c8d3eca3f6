"""The orphans of an Iceberg table are those that Iceberg's own action finds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.sparklake import Lake
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.orphan_runs import Run, wait_until_older

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.rotating]

ORPHANS = {
    "data/k=0/left.parquet",
    "data/k=9/left.parquet",
    "metadata/left.avro",
    "left",
    "data/k=caf\u00e9/x y.parquet",
}
HIDDEN = {"_temporary/0/x", "data/_hidden/x", "data/.x"}
LONG_AGO = 1_600_000_000


def plant(folder: Path) -> None:
    for name in ORPHANS | HIDDEN:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    for path in folder.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))
    wait_until_older(str(folder))


def test_the_orphans_are_those_of_iceberg_s_own_action(spark: SparkSession, tmp_path: Path) -> None:
    """Of a table with a branch, a tag, deleted rows and overwritten files."""
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    lake.create("t", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.fill("t")
    lake.delete("t", "id = 1")
    table = lake.load("t")
    snapshot = table.currentSnapshot().snapshotId()
    table.manageSnapshots().createTag("kept", snapshot).createBranch("side", snapshot).commit()
    lake.sql("insert overwrite {t} select 1L, 1, 'a'")
    folder = lake.path("t")
    plant(folder)
    report = Run(lake.record("t"), tmp_path / "work").run(dry_run=True)
    ours = set(report["sample"])
    assert ours == ORPHANS
    jvm: Any = lake.spark._jvm
    action = jvm.org.apache.iceberg.spark.actions.SparkActions.get(lake.spark._jsparkSession)
    found = action.deleteOrphanFiles(lake.load("t")).olderThan((LONG_AGO + 1) * 1000).execute()
    theirs = {str(path).removeprefix("file:").removeprefix(f"{folder}/") for path in found.orphanFileLocations()}
    assert theirs == ours
    plant(folder)  # they are gone by now
    before = lake.rows("t").count()
    assert Run(lake.record("t"), tmp_path / "work").run()["removed"]["files"] == len(ours)
    assert lake.rows("t").count() == before
    tagged = lake.spark.read.option("versionAsOf", "kept").table("lake.db.t")
    assert tagged.where("c is null or c is not null").count() == 99
