"""``export`` with ``register`` of tables that Spark writes: Spark's own readers give the same rows at the target."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from distop.storage import export_targets
from tests.acceptance.sparklake import Lake
from tests.acceptance.test_compact_delta import ROWS, VECTORS, fill
from tests.support.delta import DeltaLake, jars, writing_session
from tests.support.export_runs import ExportRun
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

REGISTER = {"register": {"name": "copy"}}


@pytest.fixture(autouse=True)
def _allowed(tmp_path: Path) -> Iterator[None]:
    export_targets.configure([str(tmp_path / "out")])
    yield
    export_targets.configure(())


def counted(frame: Any) -> Counter[str]:
    return Counter(map(repr, frame.collect()))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("version", [1, 2])
def test_rows_of_iceberg_are_the_same(spark: SparkSession, tmp_path: Path, version: int) -> None:
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    lake.create("t", "id bigint, k int, c string", "", version)
    for _ in range(2):
        lake.fill("t")
    lake.sql("alter table {t} add column d int")
    lake.sql("alter table {t} rename column c to e")
    lake.load("t").updateSpec().addField("k").commit()
    lake.fill("t", "id, k, c as e, 1 as d")
    if version == 2:
        lake.delete("t", "id % 10 = 3")
        lake.delete("t", "id % 7 = 2")
        assert lake.delete_files("t")
    expected, before = counted(lake.rows("t")), bytes_of(lake.path("t"))
    run = ExportRun(lake.record("t"), str(tmp_path / "out" / "t"), tmp_path / "work")
    ran = run.run(**REGISTER)
    assert ran.report["registered"] == "copy"
    assert bytes_of(lake.path("t")) == before
    lake.path("t").rename(tmp_path / "moved-away")
    assert counted(lake.spark.read.format("iceberg").load(run.target)) == expected
    # The copy is a table of its own: a writer that knows nothing of the export goes on.
    tables = lake.spark._jvm.org.apache.iceberg.hadoop.HadoopTables(  # type: ignore[union-attr]
        lake.spark._jsparkSession.sessionState().newHadoopConf()
    )
    tables.load(run.target).updateProperties().set("a", "b").commit()
    assert counted(lake.spark.read.format("iceberg").load(run.target)) == expected


def test_equality_deletes_of_iceberg_apply_to_the_copies(spark: SparkSession, tmp_path: Path) -> None:
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    lake.create("t", "id bigint, k int, c string", "", 2)
    lake.fill("t")
    lake.delete_equal("t", "c", "7")
    lake.fill("t")  # later rows are not deleted
    lake.delete("t", "id = 11")
    expected = counted(lake.rows("t"))
    run = ExportRun(lake.record("t"), str(tmp_path / "out" / "t"), tmp_path / "work")
    run.run(**REGISTER)
    lake.path("t").rename(tmp_path / "moved-away")
    assert counted(lake.spark.read.format("iceberg").load(run.target)) == expected
    assert sum(expected.values()) == 200 - 1 - 2


@pytest.mark.parametrize(
    ("rest", "properties"),
    [
        ("partitioned by (day)", VECTORS),
        ("", {**VECTORS, "delta.columnMapping.mode": "name", "delta.checkpointInterval": "2"}),
    ],
    ids=["partitions", "mapping"],
)
def test_rows_of_delta_are_the_same(spark: SparkSession, tmp_path: Path, rest: str, properties: dict[str, str]) -> None:
    need(jars(), MAVEN)
    lake = DeltaLake(writing_session(spark), tmp_path)
    record = fill(lake, "t", rest, **properties)
    lake.sql("delete from {t} where id % 10 = 3", "t")
    if "delta.columnMapping.mode" in properties:
        lake.sql("alter table {t} rename column c to renamed", "t")
    expected, before = counted(lake.read("t")), bytes_of(tmp_path / "t")
    run = ExportRun(record, str(tmp_path / "out" / "t"), tmp_path / "work")
    run.run(**REGISTER)
    assert bytes_of(tmp_path / "t") == before
    (tmp_path / "t").rename(tmp_path / "moved-away")
    assert counted(lake.read("out/t")) == expected
    lake.sql("delete from {t} where id % 10 = 4", "out/t")
    lake.sql(ROWS.format(500, 510), "out/t")
    assert sum(counted(lake.read("out/t")).values()) == sum(expected.values()) - 40 + 10
