"""Each file is read exactly once, whatever its name and folder: no name counts as a pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from distop.behavior import TableRecord
from distop.tables import plan_table
from distop.tables.parquet import parquet_rows
from distop_behaviors.validate import Validate
from scripts.validate_oracle.random_tables import ODD_NAMES
from tests.acceptance.checked import Table, between
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext, run_operation
from tests.support.footers import left_out
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

MATCHING_NAMES = ("plain", "qax", "star", "a", "b", "ax")
"""Names that some odd names match, as patterns."""
ROWS = 4
"""Rows of each file; ``v`` is NULL in the first."""
NOT_NULL = {"not_null": "v"}


def rows_of(first: int) -> dict[str, Any]:
    ids = [first + n for n in range(ROWS)]
    return {"id": pa.array(ids, pa.int64()), "v": pa.array([None, *ids[1:]], pa.int64())}


def add_files(table: Table, folder: str = "") -> list[Path]:
    """Add a file for each name, with different ids, and return the paths."""
    names = (*ODD_NAMES, *MATCHING_NAMES)
    return [table.add(f"{folder}{name}.parquet", rows_of(n * ROWS)) for n, name in enumerate(names)]


def assert_read_once(ran: Any, paths: list[Path]) -> None:
    checks = ran.report["checks"]
    assert [(c["verdict"], c["violations"], c["error"]) for c in checks] == [
        ("violated", len(paths), None),
        *[("valid", 0, None)] * (len(checks) - 1),
    ]
    assert ran.report["rows"] == ROWS * len(paths)
    assert {(s["file"], s["row_index"]) for s in checks[0]["samples"]} == {(str(path), 0) for path in paths}


@pytest.mark.parametrize("arg", [{}, {"where": "id >= 0"}], ids=["all rows", "where"])
def test_each_file_of_an_odd_name_is_read_once(table: Table, arg: dict[str, Any]) -> None:
    paths = add_files(table)
    checks = [NOT_NULL, between("id", 0), {"unique": ["id"]}]
    assert_read_once(table.run(*checks, statistics="never", sample=1_000, **arg), paths)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_each_file_of_a_table_in_a_folder_of_an_odd_name_is_read_once(
    name: str, tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    table = Table(tmp_path / name / name, context)
    paths = [table.add(f"f{n}.parquet", rows_of(n * ROWS)) for n in range(3)]
    Table(tmp_path / "a" / "a", context).add("f0.parquet", rows_of(0))
    assert_read_once(table.run(NOT_NULL, {"unique": ["id"]}, statistics="never", sample=1_000), paths)


def test_each_file_of_an_odd_name_in_partitions_is_read_once(table: Table) -> None:
    """Spark takes the values of the partitions from the paths."""
    paths = []
    for n, name in enumerate(ODD_NAMES):
        paths += [table.add(f"p={n}/{name}.parquet", rows_of(2 * n * ROWS))]
        paths += [table.add(f"p={n}/plain.parquet", rows_of((2 * n + 1) * ROWS))]
    checks = [NOT_NULL, {"not_null": "p"}, {"check": "p IS NOT NULL AND id >= 0"}, {"unique": ["p", "id"]}]
    assert_read_once(table.run(*checks, statistics="never", sample=1_000), paths)


def test_files_with_odd_names_in_a_catalogs_partition_are_read_once(
    spark: SparkSession, tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    """Partition values of a catalog are joined to rows by file."""
    spark.sql("create database if not exists names")
    spark.sql("drop table if exists names.t")
    spark.sql("create table names.t (id bigint, v bigint) using parquet partitioned by (p int)")
    paths = add_files(Table(tmp_path / "[prod]", context))
    spark.sql(f"alter table names.t add partition (p = 7) location '{tmp_path}/[prod]'")
    table = TableRecord("t", "spark", "names.t")
    planned = plan_table(table, spark=lambda: spark)
    arg = {"checks": [NOT_NULL, between("p", 7, 7)], "statistics": "never", "sample": 1_000}
    ran = run_operation(Validate(), table.extended(planned.options), arg, context, partitions=planned.partitions)
    assert_read_once(ran, paths)


def test_files_of_an_iceberg_table_in_a_folder_of_an_odd_name_are_read_once(
    spark: SparkSession, tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    """Iceberg's reader takes files, not patterns."""
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "st*r [ab] {a,b}")
    lake.create("t", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.fill("t")
    arg = {"checks": [{"not_null": "c"}, {"unique": ["id"]}], "statistics": "never"}
    for more in ({}, {"where": "id >= 0"}):
        ran = run_operation(Validate(), lake.record("t"), {**arg, **more}, context)
        assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [("violated", 20), ("valid", 0)]
        assert ran.report["rows"] == 100


def test_a_file_that_spark_would_read_twice_is_an_error(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could hide a file that Spark does not read: in this test the total of both files would be right."""
    paths = [table.add("a.parquet", rows_of(0)), table.add("b.parquet", rows_of(ROWS))]
    left_out(paths[1])
    patterns = {str(paths[0]): str(paths[0]), str(paths[1]): str(paths[1].with_name("[ab].parquet"))}
    monkeypatch.setattr(parquet_rows, "pattern_of", patterns.__getitem__)
    (check,) = table.run(between("id", 0), statistics="never").report["checks"]
    assert check["verdict"] == "error"
    assert "twice" in check["error"]


def test_an_unread_file_beside_files_of_odd_names_is_an_error(table: Table) -> None:
    """The rows of one file, read twice, once compensated for those of the other."""
    table.add("plain.parquet", rows_of(0))
    damaged = table.add("q?x.parquet", rows_of(ROWS))
    left_out(damaged)
    (check,) = table.run({"range": {"column": "id", "min": 0}}, statistics="never").report["checks"]
    assert check["verdict"] == "error"
    assert str(damaged) in check["error"]


def test_a_path_that_hadoop_cannot_match_is_an_error_with_the_reason(table: Table) -> None:
    for name in ("p=1/10:30 [x].parquet", "p=1/plain.parquet", "p=2/[x].parquet"):
        table.add(name, rows_of(0))
    ran = table.run(NOT_NULL, statistics="never")
    assert "its path has a ':' and one of ?*[]{}\\, which Hadoop cannot match" in ran.by_name["p=1"].error
    assert ran.by_name["p=2"].result["checks"][0]["violations"] == 1
