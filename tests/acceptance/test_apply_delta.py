"""apply on Delta tables: Delta itself enforces the change, and rows of concurrent writers are found at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from distop.runtime.java import active
from distop_behaviors.apply.apply_loop import MARK
from distop_behaviors.apply.delta_commit import DeltaTarget
from tests.acceptance.applying import At, after_the_change, before_the_change
from tests.support.delta import MAVEN, DeltaLake, jars, writing_session
from tests.support.delta_bench import VALUE, Bench, rows
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

NOT_NULL = {"not_null": "c"}
POSITIVE = {"range": {"column": "id", "min": 0}, "name": "Positive"}
COLUMNS = "id bigint, c string, day date, year int generated always as (year(day))"
EVERYTHING = {
    "delta.enableDeletionVectors": "true",
    "delta.columnMapping.mode": "name",
    "delta.enableChangeDataFeed": "true",
    "delta.enableRowTracking": "true",
    "delta.enableTypeWidening": "true",
    "delta.checkpointPolicy": "v2",
    "delta.checkpointInterval": "2",
}
FILL = "insert into {t} (id, c, day) select id, concat('v', id), date '2020-01-01' from range(0, 10, 1, 1)"

BEFORE, AFTER = before_the_change(DeltaTarget), after_the_change(DeltaTarget)


@pytest.mark.parametrize(("owner", "method", "n", "when"), [*BEFORE, *AFTER])
def test_a_null_of_a_concurrent_writer_is_found_at_any_moment(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, n: int, when: str
) -> None:
    need(jars(), MAVEN)
    bench = Bench(tmp_path, spark).create()
    certificate = bench.certificate(NOT_NULL, POSITIVE)
    at = At(owner, method, n, when, lambda: bench.append_blindly(rows(None, first=7)))
    monkeypatch.setattr(owner, method, at.wrapped)
    ran = bench.apply(bench.context(), certificate)
    assert at.happened
    assert ran.report["verdict"] == "violated", ran
    late = (owner, method, n, when) in AFTER
    assert (ran.report["reverted"], bench.version) == (late, 3 if late else 1)
    assert not bench.required()
    assert not {VALUE, MARK} & bench.properties.keys()


@pytest.mark.parametrize("given", [{}, EVERYTHING], ids=["plain", "all features"])
def test_delta_enforces_the_change_after_it(spark: SparkSession, tmp_path: Path, given: dict[str, str]) -> None:
    need(jars(), MAVEN)
    lake = DeltaLake(writing_session(spark), tmp_path)
    lake.create("t", COLUMNS, "cluster by (id)" if given else "", **given)
    lake.sql(FILL, "t")
    bench = Bench(tmp_path, spark)
    # Delta refuses what a certificate proves.
    with pytest.raises(PySparkException, match="nullable"):
        lake.sql("alter table {t} alter column c set not null", "t")
    # Delta gives the number of violating rows, and no more.
    with pytest.raises(PySparkException, match=r"7 rows in .* violate the new CHECK constraint"):
        lake.sql("alter table {t} add constraint few check (id < 3)", "t")
    checks = [NOT_NULL, POSITIVE, {"check": "c <> '--'", "name": "dashes"}]
    ran = bench.apply(bench.context(), bench.certificate(*checks))
    assert ran.report["verdict"] == "applied", ran.message
    for values, why in {
        "(1, null)": "NOT NULL constraint violated",
        "(-1, 'x')": "CHECK constraint positive",
        "(1, '--')": "CHECK constraint dashes",
    }.items():
        with pytest.raises(Exception, match=why):
            lake.sql(f"insert into {{t}} (id, c) values {values}", "t")
    lake.sql("insert into {t} (id, c) values (null, 'a NULL passes')", "t")
    lake.sql("update {t} set c = 'z' where id = 1", "t")
    with pytest.raises(Exception, match="CHECK constraint positive"):
        lake.sql("update {t} set id = -1 where id = 2", "t")
    lake.sql("optimize {t}", "t")
    assert sorted(row.id or 0 for row in lake.read("t").collect()) == sorted([0, *range(10)])
    with active(lake.session):
        history = lake.session.sql(f"describe history delta.`{tmp_path}/t`").collect()
        with pytest.raises(Exception, match="already exists"):
            lake.sql("alter table {t} add constraint positive check (id > 0)", "t")
    (mine,) = (row for row in history if row.operation == "distop apply")
    assert mine.operationParameters == {"operation": "t/apply/1"}
    lake.sql("alter table {t} drop constraint positive", "t")
    lake.sql("insert into {t} (id, c) values (-1, 'x')", "t")


def test_a_column_is_widened_as_by_delta(spark: SparkSession, tmp_path: Path) -> None:
    need(jars(), MAVEN)
    lake = DeltaLake(writing_session(spark), tmp_path)
    given = {"delta.enableTypeWidening": "true", "delta.feature.timestampNtz": "supported"}
    for name in ("t", "by_delta"):
        lake.create(name, "id int, d decimal(9,2), day date", **given)
        lake.sql("insert into {t} values (1, 1.25, date '2020-01-01'), (null, null, null)", name)
        lake.sql("alter table {t} alter column id type bigint", name)
    bench = Bench(tmp_path, spark)
    for column, kind in {"id": "decimal(20,0)", "d": "decimal(12,4)", "day": "timestamp_ntz"}.items():
        ran = bench.apply(bench.context(), bench.certificate({"fits": {"column": column, "type": kind}}))
        assert ran.report["verdict"] == "applied", ran.message
        change = ran.report["changes"][0]
        assert (change["column"], change["type"], change["before"]) == (column, kind, "other")
        lake.sql(f"alter table {{t}} alter column {column} type {kind}", "by_delta")
    for name in ("t", "by_delta"):
        lake.sql("insert into {t} values (10000000000000000000, 1.1234, timestamp_ntz '2020-01-01 01:02:03')", name)
    ours, theirs = lake.read("t"), lake.read("by_delta")
    assert [(f.dataType, f.metadata) for f in ours.schema] == [(f.dataType, f.metadata) for f in theirs.schema]
    assert sorted(map(repr, ours.collect())) == sorted(map(repr, theirs.collect()))


def test_a_transaction_of_delta_that_began_before_the_change_fails(spark: SparkSession, tmp_path: Path) -> None:
    need(jars(), MAVEN)
    lake = DeltaLake(writing_session(spark), tmp_path)
    lake.create("t", "id bigint, c string")
    lake.sql("insert into {t} values (1, 'x')", "t")
    bench = Bench(tmp_path, spark)
    certificate = bench.certificate(NOT_NULL)
    jvm: Any = spark._jvm
    none = jvm.scala.Option.empty()
    with active(lake.session):
        log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(lake.session._jsparkSession, str(bench.path))
        began = log.startTransaction(none, none)
        began.snapshot().allFiles()
        bench.apply(bench.context(), certificate)
        nothing = jvm.scala.jdk.javaapi.CollectionConverters.asScala(jvm.java.util.ArrayList()).toSeq()
        update = getattr(getattr(jvm.org.apache.spark.sql.delta, "DeltaOperations$ManualUpdate$"), "MODULE$")
        with pytest.raises(Exception, match="DELTA_METADATA_CHANGED"):
            began.commit(nothing, update)
    assert bench.version == 2
