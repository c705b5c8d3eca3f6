"""``compact`` on Iceberg tables of a catalog: the commit is one of the catalog, and other writers lose nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy.exc import OperationalError

from distop.tables.iceberg.iceberg_replacer import IcebergReplacer
from distop_behaviors.compact import Compact
from tests.acceptance.applying import At
from tests.support.catalog_bench import ROWS, CatalogBench, catalog_bench
from tests.support.context import FakeContext, run_operation
from tests.support.icebergrest import COMMIT_FAULTS
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]


def rows_of(bench: CatalogBench) -> Counter[str]:
    return Counter(map(repr, bench.loaded.scan().to_arrow().to_pylist()))


@pytest.mark.parametrize("kind", ["rest", "sql"])
def test_files_of_a_catalog_table_are_compacted_while_a_writer_appends(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    need(jar(), MAVEN)
    with catalog_bench(kind, tmp_path, spark) as bench:
        for _ in range(3):
            bench.loaded.append(ROWS)

        def context(_: Any) -> FakeContext:
            ctx = bench.context()
            ctx.operation = "t/compact/1"
            return ctx

        at = At(IcebergReplacer, "commit", 1, "before", lambda: bench.loaded.append(ROWS))
        monkeypatch.setattr(IcebergReplacer, "commit", at.wrapped)
        ran = run_operation(Compact(), bench.record, {"target_bytes": 1 << 20, "min_input_files": 2}, context)
        assert at.happened
        assert ran.report is not None, ran.message
        assert (ran.report["verdict"], ran.report["commits"]) == ("compacted", 1), ran.message
        assert len(list(bench.loaded.scan().plan_files())) == 2
        assert rows_of(bench) == Counter(dict.fromkeys(map(repr, ROWS.to_pylist()), 5))
        snapshot = bench.loaded.current_snapshot()
        assert snapshot.summary.additional_properties["distop.operation"] == "t/compact/1"


@pytest.mark.parametrize("fault", COMMIT_FAULTS)
def test_the_answers_of_a_rest_catalog_are_settled_by_reading(spark: SparkSession, tmp_path: Path, fault: str) -> None:
    """ClickHouse#115390: the commit is made once, and its files stay, whatever happens to requests and answers."""
    need(jar(), MAVEN)
    with catalog_bench("rest", tmp_path, spark) as bench:
        for _ in range(3):
            bench.loaded.append(ROWS)
        before = rows_of(bench)
        bench.server.on_commit = COMMIT_FAULTS[fault]()
        assert_compacted_once(bench, before)


@pytest.mark.parametrize("landed", [True, False])
def test_an_error_of_the_database_of_a_catalog_is_settled_by_reading(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    need(jar(), MAVEN)
    with catalog_bench("sql", tmp_path, spark) as bench:
        for _ in range(3):
            bench.loaded.append(ROWS)
        before, commit, calls = rows_of(bench), SqlCatalog.commit_table, [0]

        def lose(self: SqlCatalog, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] > 1:
                return commit(self, *args)
            if landed:
                commit(self, *args)
            raise OperationalError("COMMIT", {}, Exception("the connection was closed"))

        monkeypatch.setattr(SqlCatalog, "commit_table", lose)
        assert_compacted_once(bench, before)
        assert calls[0] == (1 if landed else 2)


def assert_compacted_once(bench: CatalogBench, before: Counter[str]) -> None:
    """Compact, and assert that the table has the same rows, and one commit of the operation."""

    def context(_: Any) -> FakeContext:
        ctx = bench.context()
        ctx.operation = "t/compact/1"
        return ctx

    ran = run_operation(Compact(), bench.record, {"target_bytes": 1 << 20, "min_input_files": 2}, context)
    assert ran.report is not None, ran.message
    assert (ran.report["verdict"], ran.report["commits"]) == ("compacted", 1), ran.message
    assert rows_of(bench) == before
    assert len(list(bench.loaded.scan().plan_files())) == 1
    summaries = [one.summary.additional_properties for one in bench.loaded.metadata.snapshots]
    assert sum("distop.operation" in one for one in summaries) == 1
