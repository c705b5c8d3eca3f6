"""``purge`` finds all files that Iceberg's own ``DROP TABLE … PURGE`` deletes, of a table that Spark has written."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import TableRecord
from tests.acceptance.sparklake import Lake
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.table_files import on_disk
from tests.unit.behaviors.test_purge import left, purge

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.rotating]


def test_no_file_is_left_that_drop_table_purge_deletes(spark: SparkSession, tmp_path: Path) -> None:
    """Of a table with a branch, a tag, deleted rows, statistics, and rewritten manifests."""
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    lake.create("t", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.fill("t")
    lake.delete("t", "id = 1")
    table = lake.load("t")
    snapshot = table.currentSnapshot().snapshotId()
    table.manageSnapshots().createTag("kept", snapshot).createBranch("side", snapshot).commit()
    lake.sql("insert overwrite {t} select 1L, 1, 'a'")
    jvm: Any = lake.spark._jvm
    actions = jvm.org.apache.iceberg.spark.actions.SparkActions.get(lake.spark._jsparkSession)
    actions.computeTableStats(lake.load("t")).execute()
    actions.rewriteManifests(lake.load("t")).execute()
    folder = lake.path("t")
    shutil.copytree(folder, tmp_path / "copy")
    before = on_disk(folder)
    metadata = str(lake.load("t").operations().current().metadataFileLocation())
    found = actions.deleteReachableFiles(metadata).io(lake.load("t").io()).execute()
    counted = sum(
        (
            *(found.deletedDataFilesCount(), found.deletedPositionDeleteFilesCount()),
            *(found.deletedEqualityDeleteFilesCount(), found.deletedManifestsCount()),
            *(found.deletedManifestListsCount(), found.deletedOtherFilesCount()),
        )
    )
    theirs = before - on_disk(folder)
    assert counted >= len([path for path in theirs if not path.endswith(".crc")])
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    report = purge(TableRecord("t", "iceberg", str(folder)), tmp_path / "work")
    assert report.complete
    assert report.missing == 0
    assert theirs <= before - left(folder)
    assert left(folder) == set()
