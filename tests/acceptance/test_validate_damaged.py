"""Damaged, encrypted and unreadable files: validate reports only proven verdicts.

pyarrow reads their content, in plain Python and in a separate process. ``scripts/oracle --parquet-files`` does the
same for any folder of files.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import Validate, scan
from scripts.validate_oracle.parquet_files import MODES, Answer, mistakes
from scripts.validate_oracle.parquet_reader import expect
from tests.acceptance.checked import Table, between
from tests.support import damaged, footers
from tests.support.context import FakeContext, run_operation

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import TableRecord

pytestmark = [pytest.mark.spark, pytest.mark.rotating]

IN_PROCESS = [kind for kind in damaged.KINDS if kind != "huge-page"]
"""Other kinds may end the JVM."""


def create_file(table: Table, kind: str, name: str = "a.parquet") -> Path:
    path = table.directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    damaged.KINDS[kind](path)
    return path


def verdicts(ran: Any) -> list[tuple[str, int, bool]]:
    return [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]]


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_no_mode_contradicts_an_independent_reader(table: Table, kind: str) -> None:
    path = create_file(table, kind, "no:colon.parquet" if kind == "no:colon" else "a.parquet")
    expected = expect(path)
    checks = [check for check, _ in expected.checks] or [{"not_null": "id"}]
    answers = {}
    for mode in MODES:
        report = table.run(*checks, statistics=mode, sample=2).report
        answers[mode] = Answer(report["rows"], report["checks"])
    assert list(mistakes(path, expected, answers)) == []


def test_a_damaged_file_keeps_what_its_statistics_prove(table: Table) -> None:
    """A scan would have to count the violations, but statistics prove that there are some."""
    path = create_file(table, "corrupt-pages")
    checks = [
        between("id", low=100),
        {"not_null": "name"},
        between("id", low=0),
        {"check": "name <> ''", "name": "sql"},
    ]
    only, auto = (table.run(*checks, statistics=mode) for mode in ("only", "auto"))
    expected = [("violated", 1, False), ("violated", 200, True), ("valid", 0, True)]
    assert verdicts(auto)[:3] == verdicts(only)[:3] == expected
    assert verdicts(auto)[3][0] == "error"
    for n in (0, 3):
        assert str(path) in auto.report["checks"][n]["error"]
    assert [c["error"] for c in auto.report["checks"][1:3]] == [None, None]


def test_a_damaged_file_fails_no_checks_of_other_files_in_its_partition(table: Table) -> None:
    """Checks that need only the sound file are counted."""
    bad, good = create_file(table, "corrupt-pages", "a.parquet"), create_file(table, "sound", "b.parquet")
    footers.without_statistics(good)
    ran = table.run({"not_null": "name"}, {"check": "name <> ''", "name": "sql"})
    assert verdicts(ran) == [("violated", 400, True), ("error", 0, False)]
    assert str(bad) in ran.report["checks"][1]["error"]
    assert ran.report["checks"][0]["evidence"] == {"files_statistics": 1, "files_scanned": 1}


def test_where_on_a_damaged_file_counts_no_rows(table: Table) -> None:
    create_file(table, "corrupt-pages")
    ran = table.run(between("id", low=0), {"not_null": "name"}, where="name <> 'x'")
    assert ran.report["rows"] is None
    assert [c["verdict"] for c in ran.report["checks"]] == ["valid", "error"]


def test_rows_are_counted_by_reading_if_a_footer_contradicts_itself(table: Table) -> None:
    create_file(table, "counts-no-rows")
    for mode in ("auto", "never"):
        ran = table.run({"not_null": "id"}, between("id", low=1_000), statistics=mode)
        assert verdicts(ran) == [("valid", 0, True), ("violated", 1_000, True)]
        assert ran.report["rows"] == damaged.ROWS


@pytest.mark.parametrize("mode", ["auto", "never"])
@pytest.mark.parametrize("check", [{"not_null": "id"}, {"unique": "id"}], ids=["rows", "keys"])
def test_a_footer_that_counts_more_rows_than_its_row_groups_is_an_error(
    table: Table, mode: str, check: dict[str, Any]
) -> None:
    path = create_file(table, "counts-too-many-rows")
    found = table.run(check, statistics=mode).report["checks"][0]
    assert found["verdict"] == "error"
    assert f"the file {path} cannot be read: Spark finds 2000 rows in it, but its footer counts 6000" in found["error"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["fewer-values-than-rows-in-lists", "fewer-rows-than-values", "pages-behind-the-end"])
def test_row_groups_that_contradict_themselves_are_an_error_of_expressions(table: Table, kind: str, mode: str) -> None:
    path = create_file(table, kind)
    found = table.run({"check": "id >= 0", "name": "sql"}, statistics=mode, where="id >= 0").report["checks"][0]
    assert found["verdict"] == "error"
    assert found["error"].startswith(f"the file {path} cannot be read: its footer contradicts itself: ")


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_decimals_with_more_digits_than_declared_do_not_fit(table: Table, mode: str) -> None:
    for more in ({"store_decimal_as_integer": True}, {}):
        path = table.add("a.parquet", {"v": [1]})
        values = pa.array([Decimal("12345.67"), Decimal("-12345.67"), Decimal("1.25"), None], pa.decimal128(9, 2))
        pq.write_table(pa.table({"v": values}), path, store_schema=False, **more)
        footers.with_precision(path, "v", 5)
        found = table.run({"fits": {"column": "v", "type": "decimal(5,2)"}}, statistics=mode)
        assert verdicts(found) == [("violated", 2, True)], more


def test_rows_that_spark_omits_are_an_error_for_undamaged_columns_too(table: Table) -> None:
    """Their statistics are valid, but no row can be read."""
    path = create_file(table, "pages-behind-the-end")
    found = table.run({"not_null": "id"}).report["checks"][0]
    assert (found["verdict"], found["evidence"]["files_statistics"]) == ("error", 0)
    assert str(path) in found["error"]


@pytest.mark.parametrize("mode", ["auto", "never"])
@pytest.mark.parametrize("where", [None, "id >= 0", "id % 2 = 0"])
def test_rows_that_spark_omits_are_an_error_that_names_the_file(table: Table, mode: str, where: str | None) -> None:
    """Each partition also has a sound file, whose rows are read.

    A condition may be pushed down to Spark's reader.
    """
    for part in ("1", "2"):
        create_file(table, "sound", f"p={part}/a.parquet")
    bad = create_file(table, "rows-left-out", "p=2/b.parquet")
    check = {"check": "id >= 0 AND coalesce(name, '') <> 'x'", "name": "sql"}
    ran = table.run(check, {"check": "id < 10000", "name": "ids"}, statistics=mode, where=where)
    assert [c["verdict"] for c in ran.report["checks"]] == ["error", "error"]
    assert all(str(bad) in c["error"] and "finds 0 rows" in c["error"] for c in ran.report["checks"])
    assert [c["verdict"] for c in ran.by_name["p=1"].result["checks"]] == ["valid", "valid"]


def test_read_rows_are_counted_without_a_separate_query(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers checks with and without expressions, and keys in one or several parts."""
    monkeypatch.setattr(scan, "rows_by_file", None)
    for n in range(8):
        path = create_file(table, "sound", f"{n}.parquet")
        pq.write_table(pa.table({"id": range(n * 10, n * 10 + 10), "name": [f"{n}"] * 10}), path)
    for checks in (
        ({"not_null": "id"}, {"not_null": "name"}),
        ({"check": "id >= 0", "name": "sql"}, {"matches": {"column": "name", "pattern": "."}}),
        ({"unique": ["id"]},),
    ):
        for mode in ("never", "auto", "never"):
            assert table.run(*checks, statistics=mode).report["verdict"] == "valid"


def test_a_condition_that_skips_rows_is_no_error(table: Table) -> None:
    """Spark skips row groups, partitions and whole scans by pushed-down conditions.

    Then the rows of each file are counted by a separate query.
    """
    for part in ("1", "2"):
        create_file(table, "sound", f"p={part}/a.parquet")
    for where, rows in (("id < 10", 20), ("p = '1'", damaged.ROWS), ("id < 0", 0), ("1 = 0", 0)):
        ran = table.run({"check": "id >= 0", "name": "sql"}, {"not_null": "id"}, statistics="never", where=where)
        assert (ran.report["rows"], ran.report["verdict"]) == (rows, "valid"), where
    assert table.run({"check": "1 = 1", "name": "true"}, statistics="never").report["verdict"] == "valid"


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_key_checks_fail_on_rows_that_spark_omits(table: Table, mode: str) -> None:
    """This holds for unique, and for references from and to the damaged table."""
    bad = create_file(table, "rows-left-out")
    other = Table(table.directory.parent / "other", table.context)
    create_file(other, "sound")
    others = {"t": table.record, "other": replace(other.record, name="other")}

    def run(name: str, check: dict[str, Any]) -> Any:
        def context(record: TableRecord) -> FakeContext:
            ctx: FakeContext = table.context(record)
            ctx.tables = others
            return ctx

        arg = {"checks": [check], "statistics": mode}
        return run_operation(Validate(), others[name], arg, context).report["checks"][0]

    for name, check in (
        ("t", {"unique": ["id"]}),
        ("t", {"references": {"column": "id", "table": "other", "to": "id"}}),
        ("other", {"references": {"column": "id", "table": "t", "to": "id"}}),
    ):
        found = run(name, check)
        assert found["verdict"] == "error", check
        assert str(bad) in found["error"]
    found = run("other", {"unique": ["id"]})
    assert (found["verdict"], found["violations"]) == ("valid", 0)


@pytest.mark.parametrize("where", [None, "id >= 0"])
def test_extra_rows_of_one_file_do_not_compensate_for_an_unread_file(
    table: Table, where: str | None, spark: SparkSession
) -> None:
    """One footer counts no rows, but a reader of one half finds 500; the 500 rows of the other file are not read."""
    ids = {"id": range(1_000)}
    path = table.add("p=1/a.parquet", ids, row_group_size=500, use_dictionary=False, compression="none")
    footers.with_rows_of_groups(path, 500, -500)
    unread = table.add("p=2/b.parquet", {"id": range(500)}, use_dictionary=False, compression="none")
    footers.misplaced(unread)
    conf, setting = session_of(spark, pushdown=False).conf, "spark.sql.files.maxPartitionBytes"
    before = conf.get(setting)
    conf.set(setting, str(path.stat().st_size // 2 + 100))
    try:
        ran = table.run(between("id", low=0), statistics="never", where=where)
    finally:
        conf.set(setting, before)
    assert ran.report["verdict"] == "error"
    for name, lying in (("p=1", path), ("p=2", unread)):
        assert str(lying) in ran.by_name[name].error
