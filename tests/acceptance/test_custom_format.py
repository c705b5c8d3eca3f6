"""A table format outside distop is one module with an entry point, and all behaviors can read its tables."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.store.embedded import EmbeddedEtcd
from distop.tables import check_table, plan_table
from distop.tables.formats import ENTRY_POINTS, names
from distop_behaviors.index import lookup
from distop_behaviors.validate import Validate
from tests.acceptance.checked import between
from tests.support.behaviors import ROOT, install, python_path
from tests.support.context import FakeContext, Ran, run_operation, store_certificate
from tests.support.daemons import SPARK, daemons
from tests.support.daemons import distop_process as distop
from tests.support.index_runs import Indexes
from tests.support.replay import violations

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

TYPES = {"id": "int", "price": "decimal(9,2)"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder in which the format is installed, for this process and (as a path) for others."""
    folder = tmp_path / "site"
    install(folder, "csv-format", f"[{ENTRY_POINTS}]\ncsv = tests.acceptance.csv_format:FORMAT\n")
    monkeypatch.syspath_prepend(str(folder))
    return str(folder)


@pytest.fixture
def table(site: str, tmp_path: Path) -> TableRecord:
    """Two files with six rows: one without a name, one with a negative price, and two with the same id."""
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "a.csv").write_text("id,name,price\n1,ann,1.50\n2,bob,-0.01\n3,,2.00\n")
    (folder / "b.csv").write_text('id,name,price\n4,"dan, d.",3.00\n3,eve,\n6,fay,9.99\n')
    return check_table(TableRecord("t", "csv", str(folder), {"types": TYPES}))


def validate(table: TableRecord, context: Any, *checks: dict[str, Any], **arg: Any) -> Ran:
    return run_operation(Validate(), table, {"checks": list(checks), **arg}, context)


def verdicts(ran: Ran) -> list[tuple[str, int]]:
    return [(check["verdict"], check["violations"]) for check in ran.report["checks"]]


def test_rows_of_the_format_are_validated(table: TableRecord, context: Any, tmp_path: Path) -> None:
    (tmp_path / "people").mkdir()
    pq.write_table(pa.table({"name": ["ann", "bob", "dan, d.", "eve"]}), tmp_path / "people" / "a.parquet")
    made: Callable[[TableRecord], FakeContext] = context

    def with_people(table: TableRecord) -> FakeContext:
        ctx = made(table)
        ctx.tables["people"] = TableRecord("people", "parquet", str(tmp_path / "people"))
        return ctx

    checks = [
        *({"not_null": "name"}, {"not_null": "id"}, between("price", 0), {"fits": {"column": "id", "type": "tinyint"}}),
        *({"check": "id < 6 OR price > 9"}, {"in_set": {"column": "name", "values": ["ann", "bob"]}}),
        *({"unique": "id"}, {"references": {"column": "name", "table": "people", "to": "name"}}),
    ]
    expected = [1, 0, 1, 0, 0, 3, 1, 1]
    for mode in ("auto", "never"):
        ran = validate(table, with_people, *checks, statistics=mode)
        assert verdicts(ran) == [("violated" if n else "valid", n) for n in expected]
        assert ran.report["rows"] == 6
    samples = ran.report["checks"][0]["samples"] + ran.report["checks"][2]["samples"]
    assert [(s["partition"], s["row_index"], s["values"]) for s in samples] == [
        ("a", 2, {"name": None}),
        ("a", 1, {"price": "-0.01"}),
    ]
    assert [s["row_index"] for s in ran.report["checks"][6]["samples"]] == [2, 1]
    picked = validate(table, context, {"not_null": "name"}, where="id > 3")
    assert (verdicts(picked), picked.report["rows"]) == ([("valid", 0)], 2)
    assert verdicts(validate(table, context, {"not_null": "id"}, statistics="only")) == [("unknown", 0)]


def test_an_invalid_or_changed_file_is_an_error_of_its_partition(table: TableRecord, context: Any) -> None:
    path = Path(table.location) / "b.csv"
    path.write_text("id,name,price\nmany,dan,3.00\n")
    ran = validate(table, context, {"not_null": "id"}, {"not_null": "name"})
    assert ran.by_name["b"].result["verdict"] == "error"
    assert [c["verdict"] for c in ran.by_name["a"].result["checks"]] == ["valid", "violated"]
    planned = plan_table(table)
    path.write_text("id,name,price\n4,dan,3.00\n5,eve,4.00\n")
    changed = run_operation(Validate(), table, {"checks": [{"not_null": "id"}]}, context, partitions=planned.partitions)
    assert f"the file {path} has changed since the operation was planned" in changed.by_name["b"].error


def test_a_certificate_covers_the_files_of_the_format(table: TableRecord, context: Any) -> None:
    certificate = validate(table, context, {"not_null": "id"}).report["certificate"]
    assert (certificate["format"], certificate["rows"], certificate["uuid"]) == ("csv", 6, None)
    (Path(table.location) / "c.csv").write_text("id,name,price\n7,gil,1.00\n")
    ran = validate(table, context, {"not_null": "id"}, since=store_certificate(certificate))
    assert (list(ran.by_name), ran.report["rows"]) == (["c"], 1)
    assert ran.report["certificate"]["rows"] == 7


def test_context_rows_read_the_format(table: TableRecord, context: Any) -> None:
    ctx = context(table)
    (plan, _) = plan_table(table).partitions
    reader, rows = ctx.reader(plan), ctx.rows(plan)
    found = rows.select("id", "name", reader.position_column(rows).alias("at")).collect()
    assert [tuple(row) for row in found] == [(1, "ann", 0), (2, "bob", 1), (3, None, 2)]


def test_an_index_of_the_format_covers_no_files_and_lookups_read_all(
    table: TableRecord, spark: SparkSession, tmp_path: Path
) -> None:
    """Arrow cannot read the files, so that lookups read all of them with Spark."""
    indexes = Indexes(Path(table.location), tmp_path / "shared")
    indexes.record = table
    report = indexes.build(columns=["id"])
    assert (report.files, {one.why for one in report.not_indexed}) == (
        0,
        {"only Spark can read files of the format csv"},
    )
    assert sorted(row.name for row in lookup(spark, table, "i", [4, 6]).collect()) == ["dan, d.", "fay"]


def test_a_table_of_the_format_is_validated_by_an_executor(site: str, table: TableRecord, tmp_path: Path) -> None:
    """The executor and the command line find the format by its entry point."""
    env = python_path(site, ROOT)
    with EmbeddedEtcd(compaction=None) as etcd:
        with daemons(etcd.endpoint, tmp_path) as group:
            group.start("ann", ttl=10, options=SPARK, env=env)
            group.client.add_table(table)
            argument = {"checks": [{"not_null": "id"}, between("price", 0)]}
            result = group.client.start_operation("validate", "t", argument).wait(200)
            assert result.state == "failed", group.tails()
            assert [check["violations"] for check in result.report["checks"]] == [0, 1]
            assert (result.report["rows"], result.jobs["total"]) == (6, 2)
            text = json.dumps({"checks": [{"not_null": "id"}]})
            ran = distop(group, "start", "validate", "t", "--arg", text, "--wait")
            assert ran.returncode == 0, ran.stderr
        assert not violations(etcd.endpoint)


def test_a_format_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    assert [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == "csv"] == []
    with pytest.raises(InvalidArgument, match=r"the format 'nowhere' of table 't' is not known \(known: parquet, ice"):
        check_table(TableRecord("t", "nowhere", str(tmp_path)))
    assert names() == ("parquet", "iceberg", "delta", "spark")
