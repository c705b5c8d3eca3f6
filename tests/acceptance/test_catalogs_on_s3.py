"""Tables of catalogs whose files are on S3: validate, indexes and lookups with Spark, by distop's one configuration."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord, TableUnavailable
from distop.errors import NotFound
from distop.tables import check_reachable, place_of, plan_table
from distop_behaviors.index import lookup
from distop_behaviors.validate import Validate
from tests.storage.catalog_lake import KINDS, THEIRS, catalog_lake
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.index_runs import Indexes
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.storage.object_store import ObjectStore
    from tests.storage.catalog_lake import CatalogLake
    from tests.storage.faulty_http import FaultyProxy
    from tests.storage.servers import Served

    Contexts = Callable[[TableRecord], FakeContext]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.rotating]


def verdicts(ran: Ran) -> list[tuple[str, int]]:
    return [(check["verdict"], check["violations"]) for check in ran.report["checks"]]


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()))


@pytest.fixture(params=KINDS)
def lake(
    request: pytest.FixtureRequest,
    s3_store: ObjectStore,
    s3_server: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[CatalogLake]:
    need(jar(), MAVEN)
    with catalog_lake(request.param, s3_store.location, s3_server.port, tmp_path / "catalog", monkeypatch) as found:
        yield found


@pytest.fixture
def indexes(spark: SparkSession, tmp_path: Path) -> Indexes:
    found = Indexes(tmp_path, tmp_path / "shared")
    found.spark = spark
    return found


def test_an_iceberg_table_of_a_catalog_is_validated(
    lake: CatalogLake, s3_proxy: FaultyProxy, context: Contexts
) -> None:
    """Statistics decide, or Spark scans, also with deleted rows; a later run reads only new files."""
    lake.add([3, 4, None], [3, 4, 5])
    lake.table.delete("a = 4")
    checks = [{"not_null": "a"}, {"check": "b < 5"}, {"unique": ["a"]}]
    for statistics in ("auto", "never"):
        ran = run_operation(Validate(), lake.record, {"checks": checks, "statistics": statistics}, context)
        assert verdicts(ran) == [("violated", 1), ("violated", 1), ("valid", 0)], ran.report
        assert ran.report["rows"] == 4
    assert any(b"aws-sdk-java" in one.whole and b".parquet" in one.whole for one in s3_proxy.seen)
    first = run_operation(Validate(), lake.record, {"checks": [{"check": "b is null or b > 0"}]}, context)
    lake.add([7], [-7])
    since = {"checks": [{"check": "b is null or b > 0"}], "since": first.report["certificate"]}
    ran = run_operation(Validate(), lake.record, since, context)
    assert (ran.report["rows"], verdicts(ran)) == (1, [("violated", 1)])


def test_an_iceberg_table_of_a_catalog_has_an_index(lake: CatalogLake, spark: SparkSession, indexes: Indexes) -> None:
    lake.add([3, 4], [3, 4])
    indexes.record = lake.record
    for name, kind in {"i": "posting", "s": "skip"}.items():
        report = indexes.build(name, columns=["a"], kind=kind)
        assert (report.files, report.indexed, report.not_indexed) == (2, 2, [])
    lake.add([5, 3], [5, 33])
    for name in ("i", "s"):
        for local in (0, 1 << 20):
            assert rows(lookup(spark, lake.record, name, [3, 5], local_bytes=local)) == [(3, 3), (3, 33), (5, 5)]
    assert indexes.build("i", columns=["a"]).indexed == 1
    assert rows(lookup(spark, lake.record, "i", [3, 5])) == [(3, 3), (3, 33), (5, 5)]
    for name in ("i", "s"):
        assert indexes.drop(name)
    with pytest.raises(NotFound, match="has no index 'i'"):
        lookup(spark, lake.record, "i", [3])


def test_spark_uses_no_endpoint_or_credential_of_the_catalog(
    lake: CatalogLake, s3_proxy: FaultyProxy, context: Contexts
) -> None:
    lake.rest.config, lake.rest.vended = dict(THEIRS), [{"prefix": lake.url, "config": THEIRS}]
    lake.forge({"s3.endpoint": THEIRS["s3.endpoint"], "io-impl": "org.apache.iceberg.aws.s3.S3FileIO"})
    s3_proxy.seen.clear()
    argument = {"checks": [{"not_null": "b"}], "statistics": "never"}
    assert verdicts(run_operation(Validate(), lake.record, argument, context)) == [("violated", 1)]
    assert all(b"Credential=tester/" in one.whole for one in s3_proxy.seen)
    assert not any(b"theirs" in one.whole for one in s3_proxy.seen)


class Shop:
    """Tables of a database of Spark's session catalog, whose folders are on S3. ``{t}`` in a statement: ``shop3.t``."""

    def __init__(self, spark: SparkSession, store: ObjectStore) -> None:
        self.spark = spark
        self.store = store
        self.record = TableRecord("t", "spark", "shop3.t")

    def sql(self, text: str) -> None:
        self.spark.sql(text.format(t="shop3.t", at=self.store.location))

    def put(self, key: str, **columns: Any) -> None:
        data = io.BytesIO()
        pq.write_table(pa.table(columns), data)
        self.store.put_new(key, data.getvalue())

    def run(self, context: Contexts, *checks: dict[str, Any], **arg: Any) -> Ran:
        planned = plan_table(self.record, spark=lambda: self.spark)
        table = self.record.extended(planned.options)
        return run_operation(Validate(), table, {"checks": list(checks), **arg}, context, partitions=planned.partitions)


@pytest.fixture
def shop(spark: SparkSession, s3_store: ObjectStore) -> Iterator[Shop]:
    spark.sql("create database if not exists shop3")
    yield Shop(spark, s3_store)
    spark.sql("drop table if exists shop3.t")


@pytest.mark.parametrize("scheme", ["s3", pytest.param("s3a", marks=pytest.mark.slow)])
def test_a_table_of_sparks_catalog_is_validated_and_has_an_index(
    scheme: str, shop: Shop, context: Contexts, indexes: Indexes
) -> None:
    """Spark wrote some of its partitions; one is in another folder of the bucket."""
    place = shop.store.location.replace("s3://", f"{scheme}://")
    shop.sql(
        f"create table {{t}} (id bigint, word string) using parquet partitioned by (day int, area string) "
        f"location '{place}/t'"
    )
    shop.sql("insert into {t} values (1, 'a', 1, 'x y')")
    shop.put("t/day=2/area=a%3Ab/f.parquet", id=[2], word=pa.array([None], pa.string()))
    shop.put("t/day=2/area=__HIVE_DEFAULT_PARTITION__/f.parquet", id=[3], word=["c"])
    shop.sql("msck repair table {t}")
    shop.put("elsewhere/é/f.parquet", id=[4, 5], word=["d", None])
    shop.sql(f"alter table {{t}} add partition (day = 3, area = 'z') location '{place}/elsewhere/é'")
    for statistics in ("auto", "never"):
        ran = shop.run(context, {"not_null": "word"}, {"check": "id < 5 and day < 3"}, statistics=statistics)
        assert verdicts(ran) == [("violated", 2), ("violated", 2)], ran.report
        assert ran.report["rows"] == 5
    indexes.record = shop.record
    assert place_of(shop.record, spark=lambda: shop.spark) == f"{place}/t"
    report = indexes.build(columns=["word"])
    assert (report.files, report.indexed, report.not_indexed) == (4, 4, [])
    shop.put("t/day=2/area=a%3Ab/g.parquet", id=[6], word=["c"])
    for local in (0, 1 << 20):
        found = lookup(shop.spark, shop.record, "i", ["c", None], local_bytes=local)
        assert rows(found.select("id", "day")) == [(2, 2), (3, 2), (5, 3), (6, 2)]
    assert indexes.build(columns=["word"]).indexed == 1
    assert indexes.drop()
    check_reachable(shop.record, spark=lambda: shop.spark)


def test_a_later_validation_of_sparks_table_reads_only_new_files(shop: Shop, context: Contexts) -> None:
    shop.sql("create table {t} (id bigint) using parquet partitioned by (day int) location '{at}/t'")
    for day in (1, 2):
        shop.put(f"t/day={day}/f.parquet", id=[day])
    shop.sql("msck repair table {t}")
    ran = run_operation(Validate(), shop.record, {"checks": [{"not_null": "id"}]}, context)
    shop.put("t/day=2/g.parquet", id=pa.array([None], pa.int64()))
    since = {"checks": [{"not_null": "id"}], "since": ran.report["certificate"]}
    ran = run_operation(Validate(), shop.record, since, context)
    assert (ran.report["rows"], verdicts(ran)) == (1, [("violated", 1)])


def test_a_partition_folder_that_is_gone_leaves_the_planning_to_another_node(shop: Shop) -> None:
    shop.sql("create table {t} (id bigint) using parquet partitioned by (day int) location '{at}/t'")
    for day in (1, 2):
        shop.put(f"t/day={day}/f.parquet", id=[day])
    shop.sql("msck repair table {t}")
    shop.store.delete_folder("t/day=1")
    with pytest.raises(TableUnavailable, match=r"cannot read the partition day=1 of 'shop3.t': the location "):
        plan_table(shop.record, spark=lambda: shop.spark)


def test_an_iceberg_table_of_sparks_catalog_is_validated_and_has_an_index(
    shop: Shop, context: Contexts, indexes: Indexes
) -> None:
    need(jar(), MAVEN)
    conf = shop.spark.conf
    for name, value in {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "hadoop",
        ".warehouse": shop.store.location,
        ".cache-enabled": "false",
    }.items():
        conf.set(f"spark.sql.catalog.lake3{name}", value)
    shop.spark.sql("create table lake3.db.t (id bigint, word string) using iceberg")
    shop.spark.sql("insert into lake3.db.t values (1, 'a'), (2, null)")
    shop.spark.sql("insert into lake3.db.t values (3, 'c')")
    shop.record = TableRecord("t", "spark", "lake3.db.t")
    for statistics in ("auto", "never"):
        assert verdicts(shop.run(context, {"not_null": "word"}, statistics=statistics)) == [("violated", 1)]
    indexes.record = shop.record
    assert indexes.build(columns=["word"]).not_indexed == []
    for local in (0, 1 << 20):
        assert rows(lookup(shop.spark, shop.record, "i", ["c", None], local_bytes=local)) == [(2, None), (3, "c")]
    assert indexes.drop()
