"""``compact`` on Iceberg tables that Spark writes, changes meanwhile, and reads afterwards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from distop.storage.opened_stores import store_of
from distop.tables.commits import CommitUnknown
from distop.tables.iceberg.iceberg_replacer import IcebergReplacer
from distop.testing import MemoryProgress
from distop_behaviors.compact import Compact
from tests.acceptance.applying import At
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

SMALL = {"target_bytes": 1 << 20, "min_input_files": 2}
COLUMNS = "id bigint, k int, c string"


def local_size(path: str) -> int:
    return Path(path.removeprefix("file:")).stat().st_size


class CompactBench:
    """Iceberg tables in a warehouse, and compactions of them."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.lake = Lake(spark, folder / "lake")
        self.work = folder / "work"
        self.work.mkdir()
        self.number = 0

    def create(self, name: str, partitioned: str = "", version: int = 2, fills: int = 4) -> None:
        self.lake.create(name, COLUMNS, partitioned, version)
        for _ in range(fills):
            self.lake.fill(name)

    def rows(self, name: str) -> Counter[str]:
        return Counter(repr(row) for row in self.lake.rows(name).collect())

    def context(self, table: Any) -> FakeContext:
        ctx = FakeContext(self.work, table, self.spark)
        ctx.operation, ctx.progress = f"{table.name}/compact/{self.number}", MemoryProgress()
        return ctx

    def compact(self, name: str, **arg: Any) -> Ran:
        self.number += 1
        return run_operation(Compact(), self.lake.record(name), {**SMALL, **arg}, self.context)

    def files(self, name: str) -> int:
        return int(self.lake.spark.table(f"lake.db.{name}.files").where("content = 0").count())

    def summaries(self, name: str) -> list[dict[str, str]]:
        rows = self.lake.spark.table(f"lake.db.{name}.snapshots").orderBy("committed_at").collect()
        return [dict(row["summary"]) for row in rows]


@pytest.fixture
def bench(tmp_path: Path, spark: SparkSession) -> CompactBench:
    need(jar(), MAVEN)
    return CompactBench(spark, tmp_path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("partitioned", ["", "partitioned by (k)", "partitioned by (bucket(2, id))"])
def test_rows_and_deletes_are_merged(bench: CompactBench, version: int, partitioned: str) -> None:
    bench.create("t", partitioned, version)
    bench.lake.delete("t", "id % 10 = 3")
    if not partitioned and version == 2:
        bench.lake.delete_equal("t", "c", "7")
    before = bench.rows("t")
    ran = bench.compact("t")
    assert ran.report is not None, ran.message
    assert ran.report["verdict"] == "compacted", (ran.message, ran.report)
    assert bench.rows("t") == before
    assert bench.files("t") == {"": 1, "partitioned by (k)": 3}.get(partitioned, 2)
    assert ran.report["after"]["rows"] == sum(before.values())
    assert bench.summaries("t")[-1]["distop.operation"] == "t/compact/1"
    assert bench.compact("t").report["verdict"] == "nothing to do"
    bench.lake.fill("t")
    bench.lake.delete("t", "id = 57")
    assert sum(bench.rows("t").values()) == sum(before.values()) + 100 - 5


@pytest.mark.parametrize("partitioned", ["", "partitioned by (k)", "partitioned by (bucket(2, id))"])
def test_files_that_arrow_has_copied_have_statistics_and_partitions(bench: CompactBench, partitioned: str) -> None:
    bench.create("t", partitioned)
    before = bench.rows("t")
    old = {row["file_path"] for row in bench.lake.spark.table("lake.db.t.files").collect()}
    assert bench.compact("t").report["verdict"] == "compacted"
    now = bench.lake.spark.table("lake.db.t.files").collect()
    assert not old & {one["file_path"] for one in now}
    for one in now:
        footer = pq.read_metadata(one["file_path"].removeprefix("file:"))
        assert footer.created_by.startswith("parquet-cpp")
        assert (one["record_count"], one["file_size_in_bytes"]) == (footer.num_rows, local_size(one["file_path"]))
        assert one["split_offsets"] == [4]
    facts = [one["readable_metrics"] for one in now]
    assert sum(one["c"]["null_value_count"] for one in facts) == 80
    assert (min(one["id"]["lower_bound"] for one in facts), max(one["id"]["upper_bound"] for one in facts)) == (0, 99)
    if partitioned == "partitioned by (k)":
        assert sorted(one["partition"]["k"] for one in now) == [0, 1, 2]
        assert bench.lake.rows("t").where("k = 1").count() == sum(int("k=1" in row) * n for row, n in before.items())
    assert bench.lake.rows("t").where("id = 57").count() == 4
    assert bench.rows("t") == before


def test_a_delete_by_statistics_keeps_values_that_are_no_numbers(bench: CompactBench) -> None:
    """Without their count in the manifest, Iceberg removes a whole file: its bounds say that all values are below 5."""
    bench.lake.create("t", "id bigint, x double", "", 2)
    for n in range(2):
        bench.lake.sql(f"insert into {{t}} values ({n}, 1.5), ({10 + n}, double('NaN'))")
    assert bench.compact("t").report["verdict"] == "compacted"
    bench.lake.delete("t", "x < 5")
    assert sorted(row["id"] for row in bench.lake.rows("t").collect()) == [10, 11]


def test_a_table_of_format_version_1_is_compacted(bench: CompactBench) -> None:
    bench.create("t", "partitioned by (k)", 1)
    before = bench.rows("t")
    ran = bench.compact("t")
    assert ran.report["verdict"] == "compacted", ran.message
    assert (bench.rows("t"), bench.files("t")) == (before, 3)
    assert bench.compact("t").report["verdict"] == "nothing to do"
    bench.lake.fill("t")
    assert sum(bench.rows("t").values()) == sum(before.values()) + 100


def test_row_ids_are_kept(bench: CompactBench) -> None:
    bench.create("t", "", 3)

    def lineage() -> list[Any]:
        frame = bench.lake.rows("t").selectExpr("_row_id", "_last_updated_sequence_number", "id")
        return sorted(map(tuple, frame.collect()))

    before = lineage()
    assert bench.compact("t").report["verdict"] == "compacted"
    assert lineage() == before


def test_a_table_is_compacted_right_after_its_upgrade_to_version_3(bench: CompactBench) -> None:
    """Until the next commit its rows have no ids, but the copies have: the checksums differed."""
    bench.create("t")
    bench.lake.sql("alter table {t} set tblproperties ('format-version'='3')")
    before = bench.rows("t")
    ran = bench.compact("t")
    assert ran.report["verdict"] == "compacted", ran.message
    assert bench.rows("t") == before
    ids = [row["_row_id"] for row in bench.lake.rows("t").select("_row_id").collect()]
    assert None not in ids
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("version", [2, 3])
def test_schema_and_partition_evolution_are_kept(bench: CompactBench, version: int) -> None:
    bench.create("t", "partitioned by (k)", version)
    bench.lake.sql("alter table {t} add column d int")
    bench.lake.sql("alter table {t} rename column c to e")
    table = bench.lake.load("t")
    table.updateSpec().removeField("k").commit()
    for _ in range(3):
        bench.lake.fill("t", "id, k, c as e, 1 as d")
    bench.lake.delete("t", "id % 10 = 3")
    before = bench.rows("t")
    ran = bench.compact("t")
    assert ran.report["verdict"] == "compacted", ran.message
    assert bench.rows("t") == before
    specs = {row["spec_id"] for row in bench.lake.spark.table("lake.db.t.files").where("content = 0").collect()}
    assert specs == {0, 1}


def spark_compaction(bench: CompactBench) -> None:
    """Spark's own compaction of all files."""
    jvm: Any = bench.lake.spark._jvm
    actions = jvm.org.apache.iceberg.spark.actions.SparkActions.get(bench.lake.spark._jsparkSession)
    actions.rewriteDataFiles(bench.lake.load("t")).option("rewrite-all", "true").execute()


WRITERS: dict[str, Callable[[CompactBench], Any]] = {
    "append": lambda bench: bench.lake.fill("t"),
    "delete": lambda bench: bench.lake.delete("t", "id = 4"),
    "overwrite": lambda bench: bench.lake.sql("insert overwrite {t} select * from {t} where id < 50"),
    "column": lambda bench: bench.lake.sql("alter table {t} add column more int"),
    "compaction": spark_compaction,
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_concurrent_writer_loses_nothing(
    bench: CompactBench, monkeypatch: pytest.MonkeyPatch, writer: str, version: int
) -> None:
    bench.create("t", "", version)
    expected: list[Counter[str]] = []

    def act() -> None:
        WRITERS[writer](bench)
        expected.append(bench.rows("t"))

    at = At(IcebergReplacer, "commit", 1, "before", act)
    monkeypatch.setattr(IcebergReplacer, "commit", at.wrapped)
    ran = bench.compact("t")
    assert at.happened
    assert bench.rows("t") == expected[0], ran.message
    assert ran.report["groups"]["committed"] == (0 if writer in ("overwrite", "compaction") else 1), ran.message


def test_an_equality_delete_during_the_rewrite_is_not_lost(
    bench: CompactBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """iceberg#10312: rows that an equality delete removed during a compaction came back."""
    bench.create("t")
    before = bench.rows("t")
    at = At(IcebergReplacer, "commit", 1, "before", lambda: bench.lake.delete_equal("t", "c", "7"))
    monkeypatch.setattr(IcebergReplacer, "commit", at.wrapped)
    ran = bench.compact("t")
    assert at.happened
    assert (ran.report["verdict"], ran.report["groups"]["redone"]) == ("compacted", 0)
    assert bench.rows("t") == Counter({row: count for row, count in before.items() if "c='7'" not in row})
    assert sum(bench.rows("t").values()) == 396


def test_a_large_file_becomes_files_near_the_target(bench: CompactBench) -> None:
    """Spark read up to 128 MB in one task, which wrote one file however small the target was."""
    bench.create("t", fills=0)
    bench.lake.sql("alter table {t} set tblproperties ('write.parquet.row-group-size-bytes'='65536')")
    bench.lake.sql("insert into {t} select id, 1, sha2(cast(id as string), 256) from range(0, 40000, 1, 1)")
    before = bench.rows("t")
    (size,) = [row["file_size_in_bytes"] for row in bench.lake.spark.table("lake.db.t.files").collect()]
    ran = bench.compact("t", target_bytes=size // 6)
    files = bench.lake.spark.table("lake.db.t.files").collect()
    sizes = [row["file_size_in_bytes"] / (size // 6) for row in files]
    assert max(sizes) <= 1.8, sizes
    assert ran.report["after"]["files"] >= 4
    assert bench.rows("t") == before


def test_groups_are_sorted_and_committed_in_batches(bench: CompactBench) -> None:
    bench.create("t", "partitioned by (k)")
    before = bench.rows("t")
    ran = bench.compact("t", sort_by=["id"], commit_every=1, codec="zstd")
    assert (ran.report["verdict"], ran.report["commits"]) == ("compacted", 3)
    assert bench.rows("t") == before
    marks = [found["distop.batch"] for found in bench.summaries("t") if "distop.batch" in found]
    assert sorted(marks) == ["0", "1", "2"]
    for row in bench.lake.spark.table("lake.db.t.files").collect():
        found = [one["id"] for one in bench.spark.read.parquet(row["file_path"]).collect()]
        assert found == sorted(found)


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_outcome_is_settled_by_reading(
    bench: CompactBench, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    bench.create("t")
    before, original, calls = bench.rows("t"), IcebergReplacer.commit, [0]

    def commit(self: IcebergReplacer, *args: Any) -> str:
        calls[0] += 1
        if calls[0] > 1:
            return original(self, *args)
        if landed:
            original(self, *args)
        raise CommitUnknown("the answer was lost")

    monkeypatch.setattr(IcebergReplacer, "commit", commit)
    ran = bench.compact("t")
    assert ran.report["verdict"] == "compacted", ran.message
    assert calls[0] == (1 if landed else 2)
    assert bench.rows("t") == before
    assert bench.files("t") == 1


def test_a_group_whose_new_file_is_missing_is_rewritten_alone(
    bench: CompactBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.create("t", "partitioned by (k)")
    before, original, sizes = bench.rows("t"), IcebergReplacer.commit, list[int]()

    def commit(self: IcebergReplacer, head: Any, replacements: Any, marks: Any) -> str:
        sizes.append(len(replacements))
        if len(sizes) == 1:
            stage = replacements[1].stage
            stage.remove([one.key for one in store_of(stage.data).list()])
        return original(self, head, replacements, marks)

    monkeypatch.setattr(IcebergReplacer, "commit", commit)
    ran = bench.compact("t")
    assert ran.report["verdict"] == "compacted", ran.message
    assert (ran.report["groups"]["committed"], ran.report["groups"]["redone"]) == (3, 1)
    assert sizes == [3, 2, 1]
    assert bench.rows("t") == before
    assert bench.files("t") == 3
