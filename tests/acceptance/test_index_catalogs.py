"""Indexes of tables that are registered by name in a catalog (Spark's, or Iceberg's)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from distop.behavior import TableRecord
from distop.errors import InvalidArgument, NotFound
from distop.tables import place_of
from distop_behaviors.index import lookup
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.index.key_lookup import find
from tests.acceptance.sparklake import Lake
from tests.support.icebergrest import RestCatalogServer, configure
from tests.support.index_runs import Indexes, root_of
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]


@pytest.fixture
def indexes(spark: SparkSession, tmp_path: Path) -> Indexes:
    """Indexes of the table ``indexed.t`` in Spark's catalog."""
    spark.sql("create database if not exists indexed")
    found = Indexes(tmp_path, tmp_path / "shared")
    found.record, found.spark = TableRecord("t", "spark", "indexed.t"), spark
    return found


def rows(frame: Any) -> list[str]:
    return sorted(map(str, frame.collect()))


@pytest.mark.slow
def test_a_lookup_in_a_table_of_sparks_catalog_returns_the_rows_of_a_filter(
    spark: SparkSession, indexes: Indexes, tmp_path: Path
) -> None:
    """Columns, types, partition values and folders differ between the catalog and the files."""
    spark.sql("create table indexed.t (id bigint, Word string, later int) using parquet partitioned by (Day int)")
    spark.sql("insert into indexed.t values (1, 'a', 10, 1), (2, 'b', 20, 1), (3, null, 30, 2), (4, 'd', 40, null)")
    for place, data in {
        "Day=77": {"ID": pa.array([1, 9], pa.int32()), "word": ["a", "x"]},  # narrower type, other case, fewer columns
        "odd": {"id": pa.array(["1"]), "word": ["a"]},  # a type that Spark does not widen
    }.items():
        (tmp_path / place).mkdir()
        pq.write_table(pa.table(data), tmp_path / place / "f.parquet")
    spark.sql(f"alter table indexed.t add partition (day = 5) location '{tmp_path}/Day=77'")
    keys: list[Any] = [1, 4, 9, 5000]

    def assert_same(index: str = "i", column: str = "id", wanted: list[Any] = keys) -> None:
        literals = ", ".join(repr(key) for key in wanted if key is not None)
        condition = f"{column} in ({literals})" + (f" or {column} is null" if None in wanted else "")
        expected = rows(spark.table("indexed.t").where(condition).select("id", "word", "later", "day"))
        assert expected
        for local in (0, 1 << 20):
            found = lookup(spark, indexes.record, index, wanted, local_bytes=local)
            assert dict(found.dtypes) == {"id": "bigint", "Word": "string", "later": "int", "Day": "int"}
            assert rows(found.select("id", "word", "later", "day")) == expected

    report = indexes.build(columns=["ID"])
    assert (report.files, report.not_indexed_files) == (4, 0)
    assert_same()
    indexes.build("words", columns=["word"], kind="skip")
    assert_same("words", "word", ["a", None])
    (named,) = find(indexes.record, "i", [9], lambda: spark).files
    assert named[0] == f"{tmp_path}/Day=77/f.parquet"
    # Lookups read new files and omit a dropped partition; a refresh updates the index.
    spark.sql("insert into indexed.t values (1, 'new', 50, 6)")
    spark.sql("alter table indexed.t drop partition (day = 5)")
    assert_same(wanted=[1, 4])
    report = indexes.build(columns=["ID"])
    assert (report.files, report.indexed, report.removed) == (4, 1, 1)
    assert_same(wanted=[1, 4])
    spark.sql(f"alter table indexed.t add partition (day = 7) location '{tmp_path}/odd'")
    report = indexes.build(columns=["ID"])
    assert [n.why for n in report.not_indexed] == ["the column 'ID': it is string here, and bigint in the catalog"]
    spark.sql("alter table indexed.t drop partition (day = 7)")
    for column, why in {
        "day": "is a partition column and needs no index",
        "nothing": "the table has no column 'nothing'",
    }.items():
        with pytest.raises(InvalidArgument, match=why):
            indexes.plan("other", columns=[column])
    # A new table with the same name must not use the index of the previous one.
    place = place_of(indexes.record, spark=lambda: spark)
    assert Folder(place, "i").current() is not None
    kept = root_of(Folder(place, "i"))
    kept.rename(tmp_path / "kept")
    spark.sql("drop table indexed.t")
    spark.sql("create table indexed.t (id string, word string, later int) using parquet partitioned by (day int)")
    spark.sql("insert into indexed.t values ('1', 'a', 10, 1)")
    kept.parent.mkdir(parents=True)
    (tmp_path / "kept").rename(kept)
    assert [row.id for row in lookup(spark, indexes.record, "i", ["1"]).collect()] == ["1"]
    assert indexes.build(columns=["ID"]).indexed == 1
    assert [row.id for row in lookup(spark, indexes.record, "i", ["1"]).collect()] == ["1"]
    assert indexes.drop()
    with pytest.raises(NotFound, match="has no index 'i'"):
        lookup(spark, indexes.record, "i", ["1"])


def test_tables_of_unusual_shapes_have_indexes(spark: SparkSession, indexes: Indexes, tmp_path: Path) -> None:
    """Two thousand columns, nested ones, and one named ``_metadata``, with and without partitions."""
    numbers = {f"c{n}": pa.array([n, None, n + 2], pa.int32()) for n in range(1_990)}
    nested = {
        "s": pa.array([{"x": 1}, None, {"x": None}], pa.struct([("x", pa.int64())])),
        "l": pa.array([[1, None], [], None], pa.list_(pa.int32())),
        "m": pa.array([[("k", 1)], [("k", None)], None], pa.map_(pa.string(), pa.int32())),
        "_metadata": ["a", "b", None],
    }
    for place in ("flat", "parts/k=1", "parts/k=2"):
        (tmp_path / place).mkdir(parents=True)
        pq.write_table(pa.table({**numbers, **nested}), tmp_path / place / "f.parquet")
    for name in ("flat", "parts"):
        indexes.record = TableRecord("t", "parquet", str(tmp_path / name))
        assert indexes.build(columns=["_metadata", "c1989"]).not_indexed == []
        for local in (0, 1 << 20):
            found = lookup(spark, indexes.record, "i", [("a", 1989), ("b", None)], local_bytes=local)
            shown = {str(tuple(row)) for row in found.select("_metadata", "s.x", "l", "m", "c0").collect()}
            assert shown == {"('b', None, [], {'k': None}, None)", "('a', 1, [1, None], {'k': 1}, 0)"}
            assert len(found.columns) == 1_994 + (name == "parts")
    for column, why in {"s": "not struct", "l": "not array", "m": "not map"}.items():
        with pytest.raises(InvalidArgument, match=f"cannot be indexed: .*{why}"):
            indexes.plan("nested", columns=[column])


def test_iceberg_tables_in_each_kind_of_catalog_have_indexes(
    spark: SparkSession, indexes: Indexes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path)
    lake.create("t", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.fill("t")
    indexes.record, indexes.spark = TableRecord("t", "spark", "lake.db.t"), lake.spark
    assert indexes.build(columns=["id"]).files == 3
    lake.delete("t", "id = 7")
    found = lookup(lake.spark, indexes.record, "i", [7, 8])
    assert [(row.id, row.c) for row in found.collect()] == [(8, "8")]
    # The same index is found by the table's folder, and through a Hadoop catalog.
    for record in (
        lake.record("t"),
        TableRecord("t", "iceberg", "db.t", configure(monkeypatch, "folder", type="hadoop", warehouse=str(tmp_path))),
    ):
        assert [row.id for row in lookup(lake.spark, record, "i", [7, 8]).collect()] == [8]
    with RestCatalogServer(tmp_path / "rest") as server:
        server.tables.create_namespace("sales")
        schema = Schema(NestedField(1, "id", LongType()), NestedField(2, "c", StringType()))
        made = server.tables.create_table("sales.orders", schema)
        made.append(pa.table({"id": pa.array([1, 2], pa.int64()), "c": ["x", "y"]}))
        option = configure(monkeypatch, type="rest", uri=server.uri)
        indexes.record = TableRecord("t", "iceberg", "sales.orders", option)
        assert indexes.build("orders", columns=["c"]).files == 1
        made.append(pa.table({"id": pa.array([3], pa.int64()), "c": ["y"]}))
        assert rows(lookup(lake.spark, indexes.record, "orders", ["y"]).select("id")) == ["Row(id=2)", "Row(id=3)"]
        assert indexes.drop("orders")
