"""Partial counts of Spark tasks are added up directly, and cached plans run again on current rows."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from distop.tables import plan_table, reader_of
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import scan
from distop_behaviors.validate.scan import FileGroup
from tests.acceptance.checked import Table, between

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

DEADLINE = 120.0


def group_of(table: Table, **more: Any) -> FileGroup:
    """A group with all files of a table and the column ``x``."""
    plans = plan_table(table.record).partitions
    files = tuple(file for plan in plans for file in plan.files)
    return FileGroup(files, {"x": "bigint"}, reader_of(table.record, plans), **more)


def test_a_file_in_several_tasks_is_counted_once(spark: SparkSession, table: Table) -> None:
    from pyspark.sql import functions as F

    path = table.add("a.parquet", {"x": list(range(8_000))}, row_group_size=1_000, compression="none")
    session = session_of(spark)
    session.conf.set("spark.sql.files.maxPartitionBytes", str(path.stat().st_size // 8))
    try:
        group = group_of(table, all_rows=True)
        checks = {0: F.col("x") % 2 == 0, 3: F.col("x") < 10}
        counts = scan.count(session, group, checks, None, lasting=True)
        query = scan._counting_query(scan.relation(session, group), group, tuple(checks.values()), None)
        tasks = scan.partial_counts(session, query)
    finally:
        session.conf.unset("spark.sql.files.maxPartitionBytes")
    assert tasks is not None
    assert len(tasks[0].collect()) > 1, "the file has several tasks"
    (found,) = counts.counts.values()
    assert (found.rows, found.violations) == (8_000, {0: 4_000, 3: 10})
    assert counts.read == 8_000
    assert scan.count(session, group, checks, None) == counts


def test_a_thread_unknown_to_spark_can_plan_the_query(spark: SparkSession, table: Table) -> None:
    from pyspark.sql import functions as F

    table.add("a.parquet", {"x": [1, 2, 3]})
    session, found = session_of(spark), list[Any]()
    group = group_of(table)
    checks = (F.col("x") > 1,)

    def run_query() -> None:
        query = scan._counting_query(scan.relation(session, group), group, checks, None)
        tasks = scan.partial_counts(session, query)
        found.extend(tasks[0].collect() if tasks is not None else ["planned otherwise"])

    # Each run of jobs in a child has its own thread.
    thread = threading.Thread(target=run_query)
    thread.start()
    thread.join(DEADLINE)
    assert [row[1] for row in found] == [2]


def test_a_cached_plan_runs_again_only_on_the_same_files(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[DataFrame, Any] | None] = []
    original = scan.partial_counts

    def recorded(session: SparkSession, query: DataFrame) -> tuple[DataFrame, Any] | None:
        planned.append(original(session, query))
        return planned[-1]

    monkeypatch.setattr(scan, "partial_counts", recorded)
    checks = (between("x", 2), {"not_null": "x"})
    table.add("a.parquet", {"x": [1, 2, None]})
    for _ in range(2):
        report = table.run(*checks, statistics="never").report
        assert [c["violations"] for c in report["checks"]] == [1, 1]
    assert [one is not None for one in planned] == [True]
    table.add("a.parquet", {"x": [0, 1, 2, None, None, None]})
    report = table.run(*checks, statistics="never").report
    assert [c["violations"] for c in report["checks"]] == [2, 3]
    assert [one is not None for one in planned] == [True, True]


@pytest.mark.parametrize("statistics", ["auto", "never"])
def test_a_check_that_cannot_be_violated_is_counted_beside_others(table: Table, statistics: str) -> None:
    """Spark optimizes a condition away if it is always false, so that its tasks do not count it."""
    data = {"x": pa.array([1, 2, None], pa.int8()), "y": ["a", "bb", "ccc"]}
    table.add("a.parquet", data, write_statistics=False)
    checks = (
        between("x", high=1_001),
        between("x", 2),
        {"length": {"column": "y", "max": 1}},
        between("x", high=2_000),
    )
    report = table.run(*checks, statistics=statistics).report
    assert [(c["verdict"], c["violations"]) for c in report["checks"]] == [
        *(("valid", 0), ("violated", 1), ("violated", 2), ("valid", 0)),
    ]
