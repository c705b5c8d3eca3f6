"""``compact`` on Delta tables that Delta itself writes, changes meanwhile, and reads afterwards."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from distop.storage.location import Location
from distop.tables.delta.delta_log import current_snapshot
from distop.tables.delta.delta_replacer import DeltaReplacer
from distop.testing import MemoryProgress
from distop_behaviors.compact import Compact
from tests.acceptance.applying import At
from tests.support import random_delta_tables
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.delta import MAVEN, DeltaLake, jars, writing_session
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import TableRecord

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

COLUMNS = "id bigint, c string, d decimal(12,2), at timestamp, day date, m map<string,int>, s struct<a:int,b:string>"
ROWS = (
    "insert into {{t}} select id, concat('v', id), id / 4, timestamp_micros(id * 987654321), "
    "date_add(date'2020-01-01', cast(id % 3 as int)), map('k', cast(id as int)), named_struct('a', 1, 'b', 'x') "
    "from range({}, {}, 1, 2)"
)
VECTORS = {"delta.enableDeletionVectors": "true"}
SMALL = {"target_bytes": 1 << 20, "min_input_files": 2}


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> DeltaLake:
    need(jars(), MAVEN)
    return DeltaLake(writing_session(spark), tmp_path)


def compact(lake: DeltaLake, spark: SparkSession, record: TableRecord, number: int = 1, **arg: Any) -> Ran:
    work = lake.root / "work"
    work.mkdir(exist_ok=True)

    def context(table: TableRecord) -> FakeContext:
        ctx = FakeContext(work, table, spark)
        ctx.operation, ctx.progress = f"t/compact/{number}", MemoryProgress()
        return ctx

    return run_operation(Compact(), record, {**SMALL, **arg}, context)


def rows_of(lake: DeltaLake, name: str) -> Counter[str]:
    return Counter(repr(row) for row in lake.read(name).collect())


def fill(lake: DeltaLake, name: str, rest: str = "", **properties: str) -> TableRecord:
    record = lake.create(name, COLUMNS, rest, **properties)
    for n in range(4):
        lake.sql(ROWS.format(n * 100, n * 100 + 100), name)
    return record


@pytest.mark.parametrize(
    ("rest", "properties"),
    [
        ("", VECTORS),
        ("partitioned by (day)", VECTORS),
        ("", {**VECTORS, "delta.columnMapping.mode": "name", "delta.checkpointInterval": "2"}),
        ("partitioned by (day)", {"delta.enableChangeDataFeed": "true", "delta.appendOnly": "false"}),
    ],
    ids=["vectors", "partitions", "mapping", "feed"],
)
def test_rows_and_deletes_are_merged(
    lake: DeltaLake, spark: SparkSession, rest: str, properties: dict[str, str]
) -> None:
    record = fill(lake, "t", rest, **properties)
    lake.sql("delete from {t} where id % 10 = 3", "t")
    before = rows_of(lake, "t")
    ran = compact(lake, spark, record)
    if ran.message:
        raise AssertionError(ran.message)
    assert ran.report["verdict"] == "compacted"
    assert rows_of(lake, "t") == before
    snapshot = current_snapshot(Location.of(record.location))
    assert all(file.vector is None for file in snapshot.files.values())
    assert len(snapshot.files) == (3 if rest else 1)
    assert compact(lake, spark, record, 2).report["verdict"] == "nothing to do"
    # Delta reads, skips by the new statistics, and still writes.
    assert lake.read("t").where("id = 57").count() == 1
    assert lake.read("t").where("c = 'v399'").count() == 1
    lake.sql("delete from {t} where id = 57", "t")
    lake.sql(ROWS.format(500, 510), "t")
    assert sum(rows_of(lake, "t").values()) == sum(before.values()) + 9


@pytest.mark.parametrize(
    "statement",
    [
        "delete from {t} where id % 7 = 0",
        "update {t} set c = 'new' where id % 7 = 0",
        "optimize {t}",
        "alter table {t} add columns (more int)",
        "insert overwrite {t} select * from {t} where id < 150",
        ROWS.format(900, 950),
    ],
    ids=["delete", "update", "optimize", "columns", "overwrite", "append"],
)
def test_a_concurrent_writer_of_delta_loses_nothing(
    lake: DeltaLake, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    record, alone = fill(lake, "t", **VECTORS), fill(lake, "alone", **VECTORS)
    assert alone.location != record.location
    lake.sql("delete from {t} where id % 10 = 3", "t")
    lake.sql("delete from {t} where id % 10 = 3", "alone")
    lake.sql(statement, "alone")
    at = At(DeltaReplacer, "commit", 1, "before", lambda: lake.sql(statement, "t"))
    monkeypatch.setattr(DeltaReplacer, "commit", at.wrapped)
    ran = compact(lake, spark, record)
    assert at.happened
    assert rows_of(lake, "t") == rows_of(lake, "alone"), ran.message


@pytest.mark.parametrize("folder", ["la ke", "100%", "a%3Ab"])
def test_spark_writes_into_folders_with_unusual_names(
    tmp_path: Path, lake: DeltaLake, spark: SparkSession, folder: str
) -> None:
    """Spark wrote the new files beside the table, into a folder with the percent-encoded name."""
    odd = DeltaLake(lake.session, tmp_path / folder)
    odd.root.mkdir()
    record = fill(odd, "t", **VECTORS)
    before = rows_of(odd, "t")
    ran = compact(odd, spark, record, sort_by=["id"])
    assert ran.report["verdict"] == "compacted", ran.message
    assert rows_of(odd, "t") == before
    assert [one.name for one in tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("sort_by", [[], ["id"]])
def test_a_large_file_becomes_files_near_the_target(lake: DeltaLake, spark: SparkSession, sort_by: list[str]) -> None:
    """Spark reads up to 128 MB in one task, which wrote one file however small the target was."""
    record = lake.create("t", "id bigint, c string", **VECTORS)
    lake.sql("insert into {t} select id, sha2(cast(id as string), 256) from range(0, 20000, 1, 1)", "t")
    lake.sql("delete from {t} where id % 10 = 3", "t")
    before = rows_of(lake, "t")
    (size,) = [file.size for file in current_snapshot(Location.of(record.location)).files.values()]
    ran = compact(lake, spark, record, target_bytes=size // 6, sort_by=sort_by)
    sizes = [file.size / (size // 6) for file in current_snapshot(Location.of(record.location)).files.values()]
    assert min(sizes) >= 0.5, sizes  # ranges of sorted rows are drawn from a sample
    assert max(sizes) <= 1.8, sizes
    assert ran.report["after"]["files"] >= 4
    assert rows_of(lake, "t") == before


def test_groups_are_sorted(lake: DeltaLake, spark: SparkSession) -> None:
    record = fill(lake, "t", **VECTORS)
    before = rows_of(lake, "t")
    ran = compact(lake, spark, record, sort_by=["day", "id"], codec="zstd")
    assert ran.report["verdict"] == "compacted", ran.message
    assert rows_of(lake, "t") == before
    (file,) = current_snapshot(Location.of(record.location)).files
    found = [(row["day"], row["id"]) for row in spark.read.parquet(file).collect()]
    assert found == sorted(found)


@pytest.mark.parametrize("seed", range(6))
def test_random_tables_keep_their_rows(lake: DeltaLake, spark: SparkSession, seed: int) -> None:
    table = random_delta_tables.make(lake, seed)
    name = f"seed{seed}"
    before = rows_of(lake, name)
    ran = compact(lake, spark, table.record, deletes_at_least=1)
    assert ran.report["verdict"] in ("compacted", "nothing to do"), (ran.message, table.history)
    assert rows_of(lake, name) == before, table.history
