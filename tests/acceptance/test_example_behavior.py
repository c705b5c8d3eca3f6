"""The example of docs/how-to/write-a-behavior.md: its length, its text in the document, and its results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import PartitionPlan, TableRecord
from distop.behavior_source import BehaviorSource
from distop.errors import InvalidArgument
from distop.tables import plan_table
from distop.tables.reading.file_facts import Unreadable
from distop.testing import run_operation
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.tables import write_partitions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distop.behavior import Behavior

pytestmark = pytest.mark.rotating

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "row_count.py"


@pytest.fixture(scope="module")
def row_count() -> type[Behavior]:
    return BehaviorSource.parse(f"{EXAMPLE}:RowCount").load()


def test_the_example_has_less_than_forty_lines_and_is_in_the_document() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 40
    assert text in (ROOT / "docs/how-to/write-a-behavior.md").read_text()


@pytest.mark.spark
def test_row_count_counts_rows_and_fails_small_partitions(
    row_count: type[Behavior], tmp_path: Path, spark: SparkSession
) -> None:
    data = pa.table({"x": [1, 2, 3], "p": [1, 1, 2]})
    table = TableRecord("t", "parquet", str(write_partitions(data, tmp_path / "table", ["p"])))
    ran = run_operation(row_count, {"at_least": 2}, table=table, spark=spark)
    assert (ran.state, ran.report) == ("failed", {"rows": 2})
    assert ran.job("p=1").result == {"rows": 2}
    assert (ran.job("p=2").success, ran.job("p=2").error) == (False, "p=2 has 1 rows, fewer than 2")


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("deletes", ["none", "by position", "by value", "both"])
def test_row_count_omits_deleted_rows_of_an_iceberg_table(
    deletes: str, row_count: type[Behavior], spark: SparkSession, tmp_path: Path
) -> None:
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    lake.create("t", "id bigint, k int, c string", "", 2)
    lake.fill("t")
    if deletes in ("by position", "both"):
        lake.delete("t", "id < 10")
        assert lake.delete_files("t") == 1
    if deletes in ("by value", "both"):
        lake.delete_equal("t", "k", 2)
    expected = {"none": 100, "by position": 90, "by value": 67, "both": 60}[deletes]
    assert lake.rows("t").count() == expected
    ran = run_operation(row_count, table=lake.record("t"), spark=spark)
    assert (ran.state, ran.report) == ("success", {"rows": expected})


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_row_count_counts_the_partitions_of_a_table_in_sparks_catalog(
    row_count: type[Behavior], spark: SparkSession, tmp_path: Path, context: Any
) -> None:
    """This includes a partition in another folder, and omits a folder that is no partition."""
    spark.sql("create database if not exists counted")
    spark.sql(f"create table counted.t (x bigint, p int) using parquet partitioned by (p) location '{tmp_path / 't'}'")
    try:
        spark.sql("insert into counted.t select id, cast(id % 2 as int) from range(10)")
        spark.range(7).selectExpr("id as x").write.parquet(str(tmp_path / "elsewhere"))
        spark.sql(f"alter table counted.t add partition (p = 5) location '{tmp_path / 'elsewhere'}'")
        spark.range(3).selectExpr("id as x").write.parquet(str(tmp_path / "t" / "p=9"))
        assert spark.table("counted.t").count() == 17
        record = TableRecord("t", "spark", "counted.t")
        planned = plan_table(record, spark=lambda: spark)
        ran = run_operation(row_count, table=record, spark=spark)
        assert {job.name: job.result["rows"] for job in ran.jobs} == {"p=0": 5, "p=1": 5, "p=5": 7}
        ctx = context(record.extended(planned.options))
        last = ctx.rows(next(plan for plan in planned.partitions if plan.name == "p=5"))
        assert (last.columns, {row.p for row in last.collect()}) == (["x", "p"], {5})
    finally:
        spark.sql("drop table counted.t")


@pytest.mark.spark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["parquet", "iceberg"])
def test_context_rows_have_all_columns_with_file_and_position(
    kind: str, spark: SparkSession, tmp_path: Path, context: Any
) -> None:
    if kind == "iceberg":
        need(jar(), MAVEN)
        lake = Lake(spark, tmp_path / "lake")
        lake.create("t", "id bigint, k int", "partitioned by (k)", 2)
        lake.fill("t", "id, k")
        lake.delete("t", "id = 3")
        table = lake.record("t")
    else:
        data = pa.table({"id": list(range(100)), "k": [n % 3 for n in range(100)]})
        folder = write_partitions(data, tmp_path / "t", ["k"])
        pq.write_table(pa.table({"id": [100], "extra": ["x"]}), folder / "k=1" / "more.parquet")
        table = TableRecord("t", "parquet", str(folder), {"partition_types": {"k": "int"}})
    ctx = context(table)
    found = {}
    for plan in plan_table(table).partitions:
        reader, rows = ctx.reader(plan), ctx.rows(plan)
        places = rows.select(
            "id", "k", reader.file_column(rows).alias("file"), reader.position_column(rows).alias("at")
        )
        paths = {path for path, _, _ in plan.files}
        for row in places.collect():
            assert reader.planned_path(row.file) in paths
            found[row.id] = (row.k, reader.planned_path(row.file), row.at)
        assert ("extra" in rows.columns) == (kind == "parquet" and plan.name == "k=1")
    assert sorted(found) == ([n for n in range(100) if n != 3] if kind == "iceberg" else list(range(101)))
    assert all(k == n % 3 for n, (k, _, _) in found.items())
    assert len({(path, at) for _, path, at in found.values()}) == len(found)


@pytest.mark.spark
def test_a_file_replaced_after_planning_is_refused(tmp_path: Path, context: Any) -> None:
    path = tmp_path / "t" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), path)
    table = TableRecord("t", "parquet", str(path.parent))
    (plan,) = plan_table(table).partitions
    pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    with pytest.raises(Unreadable, match="has changed since the operation was planned"):
        context(table).rows(plan)


def test_rows_without_a_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="the operation has no table"):
        FakeContext(tmp_path).rows(PartitionPlan(0, "all"))


def test_the_example_has_a_valid_declaration(row_count: type[Behavior]) -> None:
    declared = row_count.declaration()
    assert (declared.type_name, declared.completes, declared.batch) == ("row_count", True, False)
    assert declared.arg_schema["properties"]["at_least"]["type"] == "integer"
