"""expire-snapshots leaves the files that Iceberg's procedure leaves; reachability equals its metadata tables."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from distop.protocol.records import TableRecord
from distop.tables import reachability_of
from distop.tables.reachability import DATA, DELETES, MANIFEST, MANIFEST_LIST, STATISTICS
from tests.acceptance.sparklake import Lake
from tests.support import delta
from tests.support.delta import DeltaLake, jars, writing_session
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.table_files import on_disk
from tests.unit.behaviors.test_expire_snapshots import expire, own

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.rotating


def written(spark: SparkSession, root: Path, name: str, version: int) -> Lake:
    """A table with all kinds of files: row deletes, a branch, a tag, statistics, rewritten manifests."""
    need(jar(), MAVEN)
    lake = Lake(spark, root)
    call = f"call lake.system.%s('db.{name}')"
    lake.create(name, "id bigint, k int, c string", "partitioned by (k)", version)
    lake.fill(name)
    lake.delete(name, "id < 7")
    marks = lake.load(name).manageSnapshots()
    marks.createTag("kept", lake.load(name).currentSnapshot().snapshotId()).commit()
    lake.fill(name)
    lake.spark.sql(call % "compute_table_stats")
    marks = lake.load(name).manageSnapshots()
    marks.createBranch("side", lake.load(name).currentSnapshot().snapshotId()).commit()
    lake.sql(f"insert into {{{name}.branch_side}} values (1000, 1, 'x')")
    lake.sql(f"insert overwrite {{{name}}} select id + 1, k, c from {{{name}}} where id > 50")
    lake.delete(name, "id % 7 = 1")
    lake.spark.sql(call % "rewrite_manifests")
    lake.spark.sql(call % "compute_table_stats")
    return lake


def column(lake: Lake, table: str, name: str) -> set[str]:
    rows = lake.spark.sql(f"select {name} from lake.db.{table}").collect()
    return {str(row[0]).removeprefix("file:") for row in rows}


@pytest.mark.parametrize("version", [2, 3])
def test_the_reached_files_are_those_of_the_metadata_tables(spark: SparkSession, tmp_path: Path, version: int) -> None:
    lake = written(spark, tmp_path, "t", version)
    found: dict[str, set[str]] = {}
    for file in reachability_of(lake.record("t")).all_files():
        found.setdefault(file.kind, set()).add(file.path.removeprefix("file:"))
    assert found[DATA] == column(lake, "t.all_data_files", "file_path")
    assert found[DELETES] == column(lake, "t.all_delete_files", "file_path")
    assert found[MANIFEST] == column(lake, "t.all_manifests", "path")
    assert found[MANIFEST_LIST] == column(lake, "t.snapshots", "manifest_list")
    assert len(found[STATISTICS]) == 2
    assert {path for path in on_disk(lake.path("t")) if not path.endswith(".crc")} == set().union(*found.values())


@pytest.mark.parametrize("version", [2, 3])
def test_the_files_that_remain_are_those_of_the_procedure(spark: SparkSession, tmp_path: Path, version: int) -> None:
    lake = written(spark, tmp_path / "a", "t", version)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    rows = sorted(lake.rows("t").collect())
    # The copy has the paths of the original in its metadata, so both run in the same folder, one after the other.
    lake.spark.sql(
        "call lake.system.expire_snapshots(table => 'db.t', older_than => timestamp '2100-01-01', retain_last => 2)"
    )
    theirs = {path for path in own(lake.path("t")) if not path.endswith((".crc", ".metadata.json", ".text"))}
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "b", tmp_path / "a")
    report = expire(lake.record("t"), tmp_path / "work", retain_last=2)
    ours = {path for path in own(lake.path("t")) if not path.endswith((".crc", ".metadata.json", ".text"))}
    assert ours == theirs
    assert report.removed
    assert report.deleted
    assert sorted(lake.rows("t").collect()) == rows
    assert {row[0] for row in lake.spark.sql("select name from lake.db.t.refs").collect()} == {"main", "kept", "side"}


def test_a_delta_table_with_deletion_vectors_and_sidecars_keeps_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    need(jars(), delta.MAVEN)
    lake = DeltaLake(writing_session(spark), tmp_path)
    table = lake.create(
        "t", "id bigint, k int", "partitioned by (k)",
        **{
            "delta.enableDeletionVectors": "true",
            "delta.deletedFileRetentionDuration": "interval 0 seconds",
            "delta.checkpointPolicy": "v2",
            "delta.checkpointInterval": "3",
        },
    )  # fmt: skip
    for n in range(4):
        lake.sql(f"insert into {{t}} select id, cast(id % 3 as int) from range({n * 100}, {n * 100 + 100})", "t")
        lake.sql(f"delete from {{t}} where id = {n * 100 + 1}", "t")
    lake.sql("optimize {t}", "t")
    rows = sorted(lake.read("t").collect())
    reached = {file.path for file in reachability_of(table).all_files()}
    assert {path for path in on_disk(tmp_path / "t") if not path.endswith(".crc")} <= reached
    active = {"/" + unquote(path).removeprefix("file:").lstrip("/") for path in lake.read("t").inputFiles()}
    report = expire(TableRecord("t", "delta", str(tmp_path / "t")), tmp_path / "work")
    assert {path for path in data_of(tmp_path / "t") if path.endswith(".parquet")} == active
    assert report.deleted["data"].files
    assert report.deleted["deletes"].files
    assert sorted(lake.read("t").collect()) == rows


def data_of(folder: Path) -> set[str]:
    return {path for path in own(folder) if "/_delta_log/" not in path and not path.endswith(".crc")}
