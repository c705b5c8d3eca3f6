"""``statistics: never``: no rows are skipped by statistics of a file, not even within Spark."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from distop.behavior import TableRecord
from distop.tables import plan_table
from distop_behaviors.validate import Validate
from tests.acceptance.checked import Table, between
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext, run_operation
from tests.support.footers import with_bounds, with_nulls, with_nulls_alone
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

ROWS = 1_000
"""Rows of each of two row groups. In the second one all values of ``v`` are NULL."""
LOW, HIGH = struct.pack("<q", 0), struct.pack("<q", 5)
"""False bounds of ``id`` in the second row group."""


def with_false_bounds(table: Table) -> Path:
    ids = pa.array(range(2 * ROWS), pa.int64())
    values = pa.array([n if n < ROWS else None for n in range(2 * ROWS)], pa.int64())
    path = table.add("a.parquet", {"id": ids, "v": values}, row_group_size=ROWS)
    with_bounds(path, 1, "id", LOW, HIGH)
    return path


def verdicts(ran: Any) -> list[tuple[str, int, bool]]:
    return [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]]


def test_where_picks_rows_beyond_the_bounds_of_their_row_group(table: Table) -> None:
    path = with_false_bounds(table)
    ran = table.run({"not_null": "v"}, statistics="never", where=f"id >= {ROWS}", sample=3)
    assert verdicts(ran) == [("violated", ROWS, True)]
    assert ran.report["rows"] == ROWS
    assert [(s["file"], s["row_index"]) for s in ran.report["checks"][0]["samples"]] == [
        (str(path), ROWS + n) for n in range(3)
    ]


def test_samples_are_found_beyond_the_bounds_of_their_row_group(table: Table) -> None:
    with_false_bounds(table)
    ran = table.run(between("id", high=ROWS - 1), statistics="never", sample=2)
    assert verdicts(ran) == [("violated", ROWS, True)]
    assert [s["row_index"] for s in ran.report["checks"][0]["samples"]] == [ROWS, ROWS + 1]


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_keys_are_found_where_a_footer_counts_only_nulls(table: Table, mode: str) -> None:
    """With such bounds the footer contradicts itself, and ``auto`` reads the file as ``never`` does."""
    path = table.add("a.parquet", {"id": [7] * 20}, row_group_size=10)
    with_nulls(path, 10)
    assert verdicts(table.run({"unique": ["id"]}, statistics=mode)) == [("violated", 19, True)]


def test_where_picks_rows_of_a_footer_that_contradicts_itself(table: Table) -> None:
    path = table.add("a.parquet", {"id": [7] * 20, "v": [None] * 10 + [1] * 10}, row_group_size=10)
    with_nulls(path, 10)
    ran = table.run({"not_null": "v"}, statistics="auto", where="id = 7")
    assert verdicts(ran) == [("violated", 10, True)]
    assert ran.report["rows"] == 20


def test_keys_of_the_other_table_are_found_where_its_footer_counts_only_nulls(
    tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    table, other = Table(tmp_path / "t", context), Table(tmp_path / "other", context)
    table.add("a.parquet", {"id": [7] * 20})
    with_nulls_alone(other.add("a.parquet", {"id": [7] * 20}), 20)

    def with_other(record: TableRecord) -> FakeContext:
        ctx = context(record)
        ctx.tables = {"other": TableRecord("other", "parquet", str(other.directory))}
        return ctx

    arg = {"checks": [{"references": {"column": "id", "table": "other", "to": "id"}}], "statistics": "never"}
    ran = run_operation(Validate(), table.record, arg, with_other)
    assert verdicts(ran) == [("valid", 0, True)]


def test_where_picks_rows_of_an_iceberg_table_beyond_the_bounds_of_their_row_group(
    spark: SparkSession, tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path)
    lake.create("t", "id bigint, k int, c string", "", 2)
    lake.fill("t")
    for planned in plan_table(lake.record("t")).partitions:
        for path, size, _ in planned.files:
            with_bounds(Path(path), 0, "id", struct.pack("<q", -5), struct.pack("<q", -1))
            assert Path(path).stat().st_size == size
            Path(path).with_name(f".{Path(path).name}.crc").unlink()
    arg = {"checks": [{"not_null": "c"}], "statistics": "never", "where": "id >= 0"}
    ran = run_operation(Validate(), lake.record("t"), arg, context)
    assert verdicts(ran) == [("violated", 20, True)]
    assert ran.report["rows"] == 100
