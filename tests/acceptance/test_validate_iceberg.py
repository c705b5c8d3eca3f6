"""validate on Iceberg tables: deleted rows do not count, and the planned snapshot is validated."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from distop.behavior import FatalError, TableRecord, TableUnavailable
from distop.tables import plan_table
from distop.tables.iceberg import iceberg_jar, iceberg_rows
from distop_behaviors.validate import Validate, scan
from tests.acceptance.applying import At
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.footers import misplaced
from tests.support.lake import MAVEN, jar
from tests.support.needs import need
from tests.support.repeated_attempts import clear_caches

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

NOT_NULL = {"not_null": "c"}


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A warehouse with tables that have both kinds of row-level deletes of Spark.

    Each table has a hundred rows, with a NULL in ``c`` if the id ends in 0 or 5.
    """
    need(jar(), MAVEN)
    made = Lake(spark, tmp_path_factory.mktemp("lake"))
    for version in (2, 3):
        made.create(f"clean{version}", "id bigint, k int, c string", "partitioned by (k)", version)
        made.fill(f"clean{version}")
        made.delete(f"clean{version}", "c is null")
        made.create(f"dirty{version}", "id bigint, k int, c string", "partitioned by (k)", version)
        made.fill(f"dirty{version}")
        made.delete(f"dirty{version}", "id in (0, 1, 5)")
    return made


@pytest.fixture
def run(lake: Lake, context: Callable[[TableRecord], FakeContext]) -> Callable[..., Ran]:
    def run(name: str, *checks: dict[str, Any], partitions: Any = None, batches: int = 1, **arg: Any) -> Ran:
        argument = {"checks": list(checks), **arg}
        return run_operation(Validate(), lake.record(name), argument, context, partitions=partitions, batches=batches)

    return run


def verdicts(ran: Ran) -> list[tuple[str, int, bool]]:
    return [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]]


def error_of(ran: Ran) -> str:
    """The first reason in the result of the first partition."""
    return str(ran.outcomes[0].result["reasons"][0])


@pytest.mark.parametrize("version", [2, 3])
def test_a_deleted_null_is_no_violation(version: int, lake: Lake, run: Callable[..., Ran]) -> None:
    name = f"clean{version}"
    assert lake.delete_files(name) > 0
    planned = plan_table(lake.record(name))
    paths = [path for p in planned.partitions for path, _, _ in p.files]
    assert sum(pq.read_table(path, partitioning=None)["c"].null_count for path in paths) == 20
    for batches in (1, len(planned.partitions)):
        ran = run(name, NOT_NULL, batches=batches)
        assert verdicts(ran) == [("valid", 0, True)]
        assert ran.report["rows"] == 80
        assert ran.report["checks"][0]["evidence"] == {"files_statistics": 0, "files_scanned": len(paths)}


@pytest.mark.parametrize("version", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_remaining_nulls_are_counted_and_shown(version: int, lake: Lake, run: Callable[..., Ran]) -> None:
    name = f"dirty{version}"
    assert lake.delete_files(name) > 0
    for batches in (1, 3):
        ran = run(name, NOT_NULL, sample=100, batches=batches)
        assert verdicts(ran) == [("violated", 18, True)]
        assert ran.report["rows"] == 97
        samples = ran.report["checks"][0]["samples"]
        assert len(samples) == 18
        ids = []
        for sample in samples:
            row = pq.read_table(sample["file"], partitioning=None).slice(sample["row_index"], 1).to_pylist()[0]
            assert row["c"] is None
            assert sample["partition"] == f"k={row['k']}"
            assert sample["values"] == {"c": None}
            ids.append(row["id"])
        assert sorted(ids) == list(range(10, 100, 5))


@pytest.mark.parametrize("version", [2, 3])
def test_read_rows_are_counted_without_a_separate_query_and_a_wrong_footer_is_named(
    version: int, lake: Lake, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deletion vectors, the count considers the deleted rows."""
    name = f"lost{version}"
    lake.create(name, "id bigint, k int, c string", "partitioned by (k)", version)
    lake.fill(name)
    if version == 3:
        lake.delete(name, "id in (0, 1, 5)")
        assert lake.delete_files(name) > 0
    check = {"check": "id >= 0", "name": "sql"}
    with monkeypatch.context() as patch:
        # Counting the rows needs no separate query.
        patch.setattr(scan, "rows_by_file", None)
        assert verdicts(run(name, check, NOT_NULL, statistics="never"))[0] == ("valid", 0, True)
    bad, *_ = (Path(path) for p in plan_table(lake.record(name)).partitions for path, _, _ in p.files)
    misplaced(bad, padded=True)
    ran = run(name, check, statistics="never")
    assert ran.report["verdict"] == "error"
    assert str(bad) in ran.report["checks"][0]["error"]
    assert [o.success for o in ran.outcomes].count(False) == 1


@pytest.mark.parametrize("equality", [False, True])
def test_rows_hidden_in_a_file_with_uncounted_deletes_are_an_error(
    equality: bool, lake: Lake, run: Callable[..., Ran]
) -> None:
    """Manifests do not contain the number of rows that position and equality deletes remove."""
    name = f"hidden{equality}"
    lake.create(name, "id bigint, k int, c string", "" if equality else "partitioned by (k)", 2)
    lake.fill(name)
    if equality:
        lake.delete_equal(name, "c", "7")
    else:
        lake.delete(name, "id in (0, 1, 5)")
    checks: list[dict[str, Any]] = [{"check": "id >= 0", "name": "sql"}, {"unique": "id"}]
    choices: list[dict[str, Any]] = [{}, {"where": "id >= 0"}]
    for chosen in choices:
        assert verdicts(run(name, *checks, statistics="never", **chosen)) == [("valid", 0, True)] * 2
    bad, *_ = (Path(path) for p in plan_table(lake.record(name)).partitions for path, _, _ in p.files)
    misplaced(bad, padded=True)
    bad.with_name(f".{bad.name}.crc").unlink()
    for chosen in choices:
        ran = run(name, *checks, statistics="never", **chosen)
        assert [c["verdict"] for c in ran.report["checks"]] == ["error", "error"]
        for check in ran.report["checks"]:
            assert f"the file {bad} cannot be read: Spark finds 0 rows in it" in check["error"]


def test_equality_deletes_are_applied(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("equal", "id bigint, c string", "", 2)
    lake.fill("equal", "id, c")
    assert verdicts(run("equal", NOT_NULL)) == [("violated", 20, True)]
    lake.delete_equal("equal", "c", None)
    ran = run("equal", NOT_NULL, {"range": {"column": "id", "min": 2}})
    assert verdicts(ran) == [("valid", 0, True), ("violated", 1, True)]
    assert ran.report["rows"] == 80


def test_all_checks_count_what_spark_counts(lake: Lake, run: Callable[..., Ran]) -> None:
    checks: dict[str, dict[str, Any]] = {
        "c IS NULL": NOT_NULL,
        "id < 10 OR id > 90": {"range": {"column": "id", "min": 10, "max": 90}},
        "id NOT IN (1, 2, 3, 50)": {"in_set": {"column": "id", "values": [1, 2, 3, 50]}},
        "length(c) > 2": {"length": {"column": "c", "max": 2}},
        "c NOT RLIKE '1'": {"matches": {"column": "c", "pattern": "1"}},
        "NOT (id % 7 = 0 OR k = 1)": {"check": "id % 7 = 0 OR k = 1"},
        "false": {"fits": {"column": "id", "type": "smallint"}},
        "k > 1": {"range": {"column": "k", "max": 1}},
    }
    rows = lake.rows("dirty2")
    ran = run("dirty2", *checks.values())
    assert [n for _, n, _ in verdicts(ran)] == [rows.where(condition).count() for condition in checks]
    chosen = rows.where("id > 20")
    ran = run("dirty2", *checks.values(), where="id > 20", batches=3)
    assert [n for _, n, _ in verdicts(ran)] == [chosen.where(condition).count() for condition in checks]
    assert ran.report["rows"] == chosen.count()


def test_the_planned_snapshot_is_validated_despite_later_commits(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("pinned", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.sql("insert into {pinned} values (1, 1, 'a'), (2, 2, 'b')")
    planned = plan_table(lake.record("pinned")).partitions
    lake.sql("insert into {pinned} values (3, 1, null)")
    lake.sql("alter table {pinned} rename column c to d")
    assert verdicts(run("pinned", NOT_NULL, partitions=planned)) == [("valid", 0, True)]
    assert verdicts(run("pinned", {"not_null": "d"})) == [("violated", 1, True)]
    assert "c" in run("pinned", NOT_NULL).message


def test_columns_are_those_of_the_table_not_of_its_files(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("evolved", "id int, c string", "", 2)
    lake.sql("insert into {evolved} values (1, 'a'), (2, null)")
    lake.sql("alter table {evolved} rename column c to d")
    lake.sql("alter table {evolved} add column c string")
    lake.sql("alter table {evolved} alter column id type bigint")
    lake.sql("insert into {evolved} values (30000000000, 'b', 'c')")
    ran = run("evolved", NOT_NULL, {"not_null": "d"}, {"fits": {"column": "id", "type": "int"}}, {"not_null": "e"})
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [
        ("violated", 2),
        ("violated", 1),
        ("violated", 1),
        ("error", 0),
    ]
    assert "'e'" in ran.report["checks"][3]["error"]


def test_partitions_of_several_specs_are_all_read(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("specs", "id bigint, at timestamp, c string", "partitioned by (days(at))", 2)
    lake.sql("insert into {specs} values (1, timestamp'2013-01-31 10:00:00', null)")
    metadata: Any = lake.load("specs")
    metadata.updateSpec().removeField("at_day").commit()
    lake.sql("refresh table {specs}")
    lake.sql("insert into {specs} values (2, timestamp'2013-02-01 10:00:00', null)")
    ran = run("specs", NOT_NULL)
    assert [o.name for o in ran.outcomes] == ["at_day=2013-01-31", "spec-1/files-000000"]
    assert verdicts(ran) == [("violated", 2, True)]


def test_a_table_without_rows_is_valid_and_has_its_columns(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("empty", "id bigint, c string", "", 2)
    ran = run("empty", NOT_NULL, {"check": "id > 3"})
    assert verdicts(ran) == [("valid", 0, True), ("valid", 0, True)]
    assert ran.report["rows"] == 0
    assert run("empty", {"not_null": "nowhere"}).report["verdict"] == "error"


def test_statistics_alone_find_no_violation_among_possibly_deleted_rows(lake: Lake, tmp_path: Path) -> None:
    def without_spark(table: TableRecord) -> FakeContext:
        return FakeContext(tmp_path, table)

    # The number of rows that deletion vectors remove is known.
    for name, rows in (("clean2", None), ("dirty2", None), ("clean3", 80), ("dirty3", 97)):
        argument = {"checks": [NOT_NULL, {"not_null": "id"}], "statistics": "only"}
        ran = run_operation(Validate(), lake.record(name), argument, without_spark)
        assert verdicts(ran) == [("unknown", 0, False), ("valid", 0, True)]
        assert ran.report["rows"] == rows


def test_a_row_on_which_a_check_throws_is_an_error_of_its_partition(lake: Lake, run: Callable[..., Ran]) -> None:
    # The row with id 1 is deleted, and the check does not throw on the others.
    ran = run("dirty2", {"check": "1 / (id - 1) < 2"}, NOT_NULL)
    assert verdicts(ran) == [("valid", 0, True), ("violated", 18, True)]
    ran = run("dirty2", {"check": "1 / (id - 4) < 2"}, NOT_NULL)
    assert [c["verdict"] for c in ran.report["checks"]] == ["error", "violated"]
    assert verdicts(ran)[1] == ("violated", 18, True)
    assert "fails on 1 row of the file" in ran.report["checks"][0]["error"]
    assert {o.name for o in ran.outcomes if o.result["checks"][0]["verdict"] == "error"} == {"k=1"}


def test_an_expired_snapshot_is_an_error_with_the_reason(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("expired", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.sql("insert into {expired} values (1, 1, 'a'), (2, 2, null)")
    planned = plan_table(lake.record("expired")).partitions
    Path(planned[0].files[0][0]).unlink()
    ran = run("expired", NOT_NULL, partitions=planned)
    assert [c["verdict"] for c in ran.report["checks"]] == ["violated"]
    assert [o.result["verdict"] for o in ran.outcomes] == ["error", "violated"]
    assert re.search(r"the file .* is gone: .* its snapshot \d+ was expired, or the table was dropped", error_of(ran))
    # The manifests are removed, too, and not cached, as in another child.
    clear_caches()
    for manifest in (lake.path("expired") / "metadata").glob("snap-*.avro"):
        manifest.unlink()
    ran = run("expired", {"not_null": "id"}, partitions=planned)
    assert [o.result["verdict"] for o in ran.outcomes] == ["error", "error"]
    assert re.search(r"can no longer be read .* it was expired, or the table was dropped", error_of(ran))


def test_a_dropped_table_is_left_to_another_attempt(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("dropped", "id bigint, c string", "", 2)
    lake.sql("insert into {dropped} values (1, null)")
    planned = plan_table(lake.record("dropped")).partitions
    shutil.rmtree(lake.path("dropped"))
    with pytest.raises(TableUnavailable, match="it was dropped"):
        run("dropped", NOT_NULL, partitions=planned)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param("removed", r"is gone: .* its snapshot \d+ was expired", marks=pytest.mark.slow),
        ("cut", r"does not have the \d+ bytes that its manifest says: it was truncated"),
        ("dropped", ""),
    ],
)
def test_files_removed_between_plan_and_scan_are_an_error(
    how: str, message: str, lake: Lake, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are removed before the count, after the manifests were read."""
    name = f"going_{how}"
    lake.create(name, "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.sql(f"insert into {{{name}}} values (1, 1, 'a'), (2, 2, null)")
    planned = plan_table(lake.record(name)).partitions
    path = Path(planned[0].files[0][0])

    def act() -> None:
        if how == "removed":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size - 10)
            # Hadoop's checksum file would reveal the change, too.
            path.with_name(f".{path.name}.crc").unlink()
        else:
            shutil.rmtree(lake.path(name))

    at = At(scan, "count", 1, "before", act)
    monkeypatch.setattr(scan, "count", at.wrapped)
    check = {"matches": {"column": "c", "pattern": "a"}}
    if how == "dropped":
        with pytest.raises(TableUnavailable, match="it was dropped"):
            run(name, check, NOT_NULL, partitions=planned)
    else:
        ran = run(name, check, NOT_NULL, partitions=planned)
        assert [o.result["verdict"] for o in ran.outcomes] == ["error", "violated"]
        assert re.search(message, error_of(ran))
        assert str(path) in error_of(ran)
    assert at.happened


def test_a_missing_delete_file_is_an_error_of_affected_checks(lake: Lake, run: Callable[..., Ran]) -> None:
    lake.create("undeleted", "id bigint, k int, c string", "", 2)
    lake.fill("undeleted")
    lake.delete("undeleted", "c is null")
    for row in lake.spark.table("lake.db.undeleted.delete_files").collect():
        Path(row["file_path"].removeprefix("file:")).unlink()
    ran = run("undeleted", NOT_NULL, {"not_null": "id"})
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [("error", 0), ("valid", 0)]


def _without_resources() -> Any:
    """A Java namespace whose class loader finds nothing."""
    loader = SimpleNamespace(getResource=lambda _: None)
    thread = SimpleNamespace(getContextClassLoader=lambda: loader)
    return SimpleNamespace(lang=SimpleNamespace(Thread=SimpleNamespace(currentThread=lambda: thread)))


def test_the_error_of_spark_without_iceberg_has_advice(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    with pytest.raises(FatalError, match=r"Spark has no Iceberg: .*spark\.jars=FILE.*iceberg-spark-runtime-4\.1_"):
        iceberg_jar.check_installed(SimpleNamespace(org=jvm.nowhere.org, java=_without_resources()))
    assert iceberg_jar.misfits("file:/x/org.apache.iceberg_iceberg-spark-runtime-4.0_2.13-1.11.0.jar", "4.1.4")
    assert iceberg_jar.misfits("file:/x/iceberg-spark-runtime-4.1_2.12-1.11.0.jar", "4.1.4")
    assert not iceberg_jar.misfits("file:/x/iceberg-spark-runtime-4.1_2.13-1.11.0.jar", "4.1.4")
    assert not iceberg_jar.misfits("file:/x/built-here.jar", "4.1.4")
    assert "does not fit Spark 4.1.4" in iceberg_jar.missing("4.1.4", "file:/x.jar")


def test_tasks_evicted_from_the_jvm_are_sent_again(
    lake: Lake, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_rows, "STAGED", 1)
    iceberg_rows._staged.clear()
    for _ in range(2):
        assert verdicts(run("dirty2", NOT_NULL, batches=3)) == [("violated", 18, True)]
    assert len(iceberg_rows._staged) == 1
