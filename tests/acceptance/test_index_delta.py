"""Lookups in Delta tables return the rows of Delta's own filter: without deleted rows, by the columns' identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from distop_behaviors.index import lookup
from distop_behaviors.index.key_lookup import find
from tests.acceptance.test_index_local import is_local, schema_and_rows
from tests.support.delta import MAVEN, DeltaLake, jars, writing_session
from tests.support.index_runs import Indexes
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

COLUMNS = (
    "id int, f float, d decimal(9,2), day date, n timestamp_ntz, c string, s struct<a: int, b: int>, "
    "l array<struct<x: int>>, m map<string, int>, k int, region string"
)
FILL = (
    "insert into {t} select cast(id as int), cast(id / 7 as float), cast(id / 100 as decimal(9,2)), "
    "date '2020-01-01' + cast(id as int), timestamp_ntz '2020-01-02 03:04:05', cast(id as string), "
    "struct(cast(id as int), cast(-id as int)), array(struct(cast(id as int))), map('k', cast(id as int)), "
    "if(id % 3 = 0, null, cast(id % 3 as int)), 'eu' from range(0, 100, 1, 1)"
)
KEYS = ["7", "12", "50", "nowhere"]


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DeltaLake:
    need(jars(), MAVEN)
    return DeltaLake(writing_session(spark), tmp_path_factory.mktemp("delta"))


class Lookups:
    """An index ``i`` of the column ``c``, and Delta's own filter to compare its lookups with."""

    def __init__(self, lake: DeltaLake, spark: SparkSession, name: str, shared: Path, **properties: str) -> None:
        self.lake, self.name, self._spark = lake, name, spark
        record = lake.create(name, COLUMNS, "partitioned by (k, region)", **properties)
        lake.sql(FILL, name)
        self.indexes = Indexes(lake.root / name, shared)
        self.indexes.record = record

    def sql(self, *statements: str) -> None:
        for statement in statements:
            self.lake.sql(statement, self.name)

    def compare(self, *keys: Any, here: bool) -> None:
        """Compare the rows of these keys. ``here``: they are read without Spark."""
        frame = lookup(self._spark, self.indexes.record, "i", list(keys))
        assert is_local(frame) == here
        wanted = self.lake.read(self.name).where(f"c in ({', '.join(repr(key) for key in keys)})")
        assert schema_and_rows(frame) == schema_and_rows(wanted)


@pytest.mark.parametrize("mode", ["none", "name", pytest.param("id", marks=pytest.mark.slow)])
def test_rows_equal_those_of_a_filter(mode: str, lake: DeltaLake, spark: SparkSession, tmp_path: Path) -> None:
    given = {"delta.enableDeletionVectors": "true", "delta.enableTypeWidening": "true"}
    found = Lookups(lake, spark, f"t_{mode}", tmp_path / "s", **given, **{"delta.columnMapping.mode": mode})
    report = found.indexes.build(columns=["c"])
    assert (report.files, report.rows, report.not_indexed_files) == (3, 100, 0)
    assert report.table_version.startswith("1-")
    # Nested fields have other names in the files of a mapped table, which Arrow does not translate.
    found.compare(*KEYS, here=mode == "none")
    found.sql(
        "alter table {t} alter column id type bigint",
        "alter table {t} alter column d type decimal(12,2)",
        "alter table {t} add column extra int",
    )
    if mode != "none":
        found.sql("alter table {t} rename column n to was", "alter table {t} rename column k to part")
        found.sql("alter table {t} drop columns (s, l, m)")
    found.compare(*KEYS, here=True)
    found.sql("delete from {t} where c = '12'")
    found.compare(*KEYS, here=False)
    found.compare("7", "50", here=True)
    found.sql("restore table {t} to version as of 1")
    found.compare(*KEYS, here=mode == "none")
    assert found.indexes.drop()


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_an_index_follows_deletes_and_renames(kind: str, lake: DeltaLake, spark: SparkSession, tmp_path: Path) -> None:
    given = {"delta.enableDeletionVectors": "true", "delta.columnMapping.mode": "name"}
    found = Lookups(lake, spark, f"deleting_{kind}", tmp_path / "s", **given)
    found.indexes.build(kind=kind, columns=["c"])

    def ids(*keys: Any) -> list[int]:
        return sorted(row.id for row in lookup(spark, found.indexes.record, "i", list(keys)).collect())

    assert ids("7", "12", "nowhere") == [7, 12]
    found.sql("delete from {t} where id in (7, 0)", "insert into {t} (id, c, k) values (7000, '7', 1), (7001, null, 1)")
    assert (ids("7", "12"), ids(None)) == ([12, 7000], [7001])
    assert find(found.indexes.record, "i", ["7"]).uncovered
    found.sql("alter table {t} rename column c to old")
    with pytest.raises(Exception, match="no longer has a column 'c'"):
        ids("7")
    found.sql("alter table {t} add column c string", "insert into {t} (id, c) values (1, '7')")
    assert ids("7") == [1], "a new column with the name"
    report = found.indexes.build(kind=kind, columns=["c"])
    assert (report.generation, report.not_indexed_files) == (2, 0)
    assert not find(found.indexes.record, "i", ["7"]).uncovered
    assert ids("7") == [1]
    assert lookup(spark, found.indexes.record, "i", ["nowhere"]).columns == lake.read(found.name).columns
