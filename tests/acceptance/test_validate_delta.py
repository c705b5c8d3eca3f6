"""validate on Delta tables written by Delta itself: deleted rows do not count, and columns keep their identity."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop import testing
from distop.behavior import TableRecord
from distop.behavior_source import BehaviorSource
from distop.tables import plan_table, reader_of
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import Validate
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.delta import MAVEN, DeltaLake, jars, writing_session
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
NOT_NULL = {"not_null": "c"}
VECTORS = {"delta.enableDeletionVectors": "true"}
FILL = "insert into {t} select id, cast(id % 2 as int), if(id % 5 = 0, null, concat('v', id)) from range(0, 100, 1, 1)"


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DeltaLake:
    """Delta tables of a hundred rows each, with a NULL in ``c`` if the id ends in 0 or 5."""
    need(jars(), MAVEN)
    made = DeltaLake(writing_session(spark), tmp_path_factory.mktemp("delta"))
    for name, deleted in {"clean": "c is null", "dirty": "id in (0, 1, 5)"}.items():
        made.create(name, "id bigint, k int, c string", "partitioned by (k)", **VECTORS)
        made.sql(FILL, name)
        made.sql(f"delete from {{t}} where {deleted}", name)
    return made


@pytest.fixture
def run(lake: DeltaLake, context: Callable[[TableRecord], FakeContext]) -> Callable[..., Ran]:
    def run(name: str, *checks: dict[str, Any], partitions: Any = None, batches: int = 1, **arg: Any) -> Ran:
        argument = {"checks": list(checks), **arg}
        return run_operation(Validate(), record(lake, name), argument, context, partitions=partitions, batches=batches)

    return run


def record(lake: DeltaLake, name: str) -> TableRecord:
    return TableRecord("t", "delta", str(lake.root / name))


def verdicts(ran: Ran) -> list[tuple[str, int, bool]]:
    return [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]]


def test_a_deleted_null_is_no_violation(lake: DeltaLake, run: Callable[..., Ran]) -> None:
    assert list((lake.root / "clean").glob("deletion_vector_*.bin"))
    for batches in (1, 2):
        for mode in ("auto", "never"):
            ran = run("clean", NOT_NULL, statistics=mode, batches=batches)
            assert verdicts(ran) == [("valid", 0, True)]
            assert ran.report["rows"] == 80


@pytest.mark.rotating
def test_the_remaining_nulls_are_counted_and_shown(lake: DeltaLake, run: Callable[..., Ran]) -> None:
    checks = [NOT_NULL, {"range": {"column": "id", "min": 2}}, {"unique": "id"}, {"check": "id <> 3"}]
    for mode in ("auto", "never"):
        ran = run("dirty", *checks, statistics=mode, sample=30)
        assert verdicts(ran) == [("violated", 18, True), ("valid", 0, True), ("valid", 0, True), ("violated", 1, True)]
        assert ran.report["rows"] == 97
        samples = [s for outcome in ran.outcomes for s in outcome.result["checks"][3].get("samples", [])]
        [sample] = samples
        # Positions in the file count deleted rows: the file of odd ids begins with 1.
        assert sample["row_index"] == 1


@pytest.mark.rotating
def test_statistics_decide_what_deletes_cannot_change(lake: DeltaLake, run: Callable[..., Ran]) -> None:
    ran = run("dirty", {"range": {"column": "id", "min": 0, "max": 99}}, {"not_null": "k"}, statistics="only")
    assert verdicts(ran) == [("valid", 0, True), ("valid", 0, True)]


@pytest.mark.rotating
@pytest.mark.parametrize("mode", ["name", pytest.param("id", marks=pytest.mark.slow)])
def test_columns_keep_their_identity(mode: str, lake: DeltaLake, run: Callable[..., Ran]) -> None:
    name = f"mapped_{mode}"
    given = VECTORS | {"delta.columnMapping.mode": mode}
    lake.create(name, "id bigint, k int, c string", "partitioned by (k)", **given)
    lake.sql(FILL, name)
    first = run(name, {"not_null": "id"}).report["certificate"]
    lake.sql("alter table {t} rename column c to old", name)
    lake.sql("alter table {t} add column c string", name)
    lake.sql("alter table {t} rename column k to part", name)
    lake.sql("insert into {t} values (100, 0, 'x', 'y')", name)
    lake.sql("delete from {t} where id = 7", name)
    checks = [{"not_null": "old"}, NOT_NULL, {"in_set": {"column": "part", "values": [0, 1]}}, {"not_null": "id"}]
    for statistics in ("auto", "never"):
        ran = run(name, *checks, statistics=statistics)
        assert [found[:2] for found in verdicts(ran)] == [
            ("violated", 20),
            ("violated", 99),
            ("valid", 0),
            ("valid", 0),
        ]
        assert ran.report["rows"] == 100
    # Only the new file, since a first deletion vector only deletes rows.
    assert run(name, {"not_null": "id"}, since=first).report["rows"] == 1


@pytest.mark.rotating
def test_a_v2_checkpoint_and_widened_types_are_read_as_by_delta(
    lake: DeltaLake, run: Callable[..., Ran], spark: SparkSession
) -> None:
    lake.create(
        "wide",
        "id int, f float",
        **{"delta.enableTypeWidening": "true", "delta.checkpointPolicy": "v2", "delta.checkpointInterval": "2"},
    )
    lake.sql("insert into {t} values (1, cast(0.1 as float)), (2, null)", "wide")
    lake.sql("alter table {t} alter column id type bigint", "wide")
    lake.sql("alter table {t} alter column f type double", "wide")
    lake.sql("insert into {t} values (5000000000, 0.3)", "wide")
    assert list((lake.root / "wide" / "_delta_log").glob("*.checkpoint.*.json"))
    planned = plan_table(record(lake, "wide"))
    files = [file for p in planned.partitions for file in p.files]
    frame = reader_of(record(lake, "wide"), planned.partitions).rows(session_of(spark), files)
    assert sorted(frame.collect()) == sorted(lake.read("wide").collect())
    # The float 0.1 is greater than the double 0.1.
    over = {"range": {"column": "f", "max": 0.1}}
    for mode in ("auto", "never"):
        assert verdicts(run("wide", over, {"not_null": "f"}, statistics=mode)) == [
            ("violated", 2, True),
            ("violated", 1, True),
        ]


@pytest.mark.rotating
def test_rows_that_are_deleted_between_two_validations_do_not_count(lake: DeltaLake, run: Callable[..., Ran]) -> None:
    """The file keeps its path and size, and Spark's plans of the first validation are in the cache."""
    shutil.copytree(lake.root / "dirty", lake.root / "between")
    for statement, nulls in (
        ("delete from {t} where id = 10", 18),
        ("delete from {t} where id in (15, 20)", 17),
        ("restore table {t} to version as of 2", 15),
        ("", 18),
    ):
        assert verdicts(run("between", NOT_NULL, statistics="never")) == [("violated", nulls, True)]
        if statement:
            lake.sql(statement, "between")


@pytest.mark.rotating
@pytest.mark.parametrize("feature", ["", "supported"])
def test_features_of_writers_do_not_matter(feature: str, lake: DeltaLake, run: Callable[..., Ran]) -> None:
    """Delta checks that the protocol of a table has the features that its schema uses."""
    name = f"writers_{feature}"
    columns = "id bigint not null, c string default 'x', twice bigint generated always as (id * 2), "
    columns += "number bigint generated always as identity"
    given = {"delta.feature.allowColumnDefaults": "supported"}
    if feature:
        given |= VECTORS | {"delta.enableChangeDataFeed": "true", "delta.enableRowTracking": "true"}
    lake.create(name, columns, "cluster by (id)" if feature else "", **given)
    lake.sql("alter table {t} add constraint small check (id < 1000)", name)
    lake.sql("insert into {t} (id, c) select id, if(id % 5 = 0, null, 'v') from range(0, 100, 1, 1)", name)
    checks = [NOT_NULL, {"check": "twice = id * 2"}, {"unique": "number"}, {"not_null": "id"}]
    ran = run(name, *checks, statistics="never")
    assert verdicts(ran) == [("violated", 20, True), ("valid", 0, True), ("valid", 0, True), ("valid", 0, True)]
    assert ran.report["rows"] == 100


@pytest.mark.rotating
def test_the_error_of_a_vacuumed_file_names_the_cause(lake: DeltaLake, run: Callable[..., Ran]) -> None:
    for what in ("part-*.parquet", "deletion_vector_*.bin"):
        name = f"gone_{what[0]}"
        shutil.copytree(lake.root / "dirty", lake.root / name)
        planned = plan_table(record(lake, name))
        for path in (lake.root / name).rglob(what):
            path.unlink()
        ran = run(name, NOT_NULL, partitions=planned.partitions, statistics="never")
        assert [c["verdict"] for c in ran.report["checks"]] == ["error"]
        reasons = str([outcome.result for outcome in ran.outcomes])
        assert "since the operation was planned the table was vacuumed, or dropped" in reasons


@pytest.mark.rotating
def test_the_planned_version_is_read_after_later_commits(
    lake: DeltaLake, run: Callable[..., Ran], spark: SparkSession
) -> None:
    shutil.copytree(lake.root / "dirty", lake.root / "later")
    planned = plan_table(record(lake, "later"))
    lake.sql("delete from {t} where true", "later")
    lake.sql("insert into {t} values (1, 1, null)", "later")
    assert verdicts(run("later", NOT_NULL, partitions=planned.partitions)) == [("violated", 18, True)]
    assert verdicts(run("later", NOT_NULL)) == [("violated", 1, True)]


@pytest.mark.rotating
def test_the_example_behavior_counts_rows_without_deleted_ones(lake: DeltaLake, spark: SparkSession) -> None:
    row_count = BehaviorSource.parse(f"{ROOT / 'examples' / 'row_count.py'}:RowCount").load()
    ran = testing.run_operation(row_count, table=record(lake, "dirty"), spark=spark)
    assert (ran.state, ran.report) == ("success", {"rows": 97})


@pytest.mark.rotating
def test_texts_with_a_collation_are_an_error_of_their_checks_alone(lake: DeltaLake, run: Callable[..., Ran]) -> None:
    """The tested release of Delta writes none; others do."""
    key = "spark.databricks.delta.schema.typeCheck.enabled"
    lake.session.conf.set(key, "false")
    try:
        lake.create("collated", "id bigint, x string collate UTF8_LCASE")
        lake.sql("insert into {t} values (1, 'B'), (2, 'a')", "collated")
    finally:
        lake.session.conf.unset(key)
    checks = [{"check": "id > 0"}, {"range": {"column": "x", "max": "Z"}}, {"not_null": "x"}]
    for mode in ("auto", "never"):
        ran = run("collated", *checks, statistics=mode)
        valid, text, present = ran.report["checks"]
        assert (valid["verdict"], text["verdict"]) == ("valid", "error")
        assert "texts with a collation are not supported" in text["error"]
        assert present["verdict"] == ("valid" if mode == "auto" else "error")
