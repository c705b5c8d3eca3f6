"""validate on tables of Spark's catalog: columns, partitions and their folders come from the catalog."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyspark.sql import functions as F

from distop.behavior import TableRecord, TableUnavailable
from distop.errors import InvalidArgument
from distop.runtime.java import active
from distop.tables import check_reachable, folders_of, place_of, plan_table
from distop.tables.parquet.parquet_format import EMPTY
from distop_behaviors.apply import Apply
from distop_behaviors.validate import Validate, scan
from tests.acceptance.applying import At
from tests.acceptance.checked import between
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext, Ran, run_operation
from tests.support.icebergrest import RestCatalogServer
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.protocol.plan import Planned

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

SPARK_CATALOG = "org.apache.iceberg.spark.SparkCatalog"


class Shop:
    """Tables of one database. Statements name them in braces: ``insert into {sales} …``."""

    def __init__(self, spark: SparkSession, context: Callable[[TableRecord], FakeContext]) -> None:
        self.spark = spark
        self.context = context

    def sql(self, text: str) -> Any:
        return self.spark.sql(text.replace("{", "shop.").replace("}", ""))

    def record(self, name: str) -> TableRecord:
        return TableRecord(name, "spark", f"shop.{name}")

    def plan(self, name: str) -> Planned:
        return plan_table(self.record(name), spark=lambda: self.spark)

    def run(
        self, name: str, *checks: dict[str, Any], planned: Planned | None = None, batches: int = 1, **arg: Any
    ) -> Ran:
        planned = planned or self.plan(name)
        table = self.record(name).extended(planned.options)
        argument = {"checks": list(checks), **arg}
        return run_operation(Validate(), table, argument, self.context, partitions=planned.partitions, batches=batches)

    def agrees(self, name: str, checks: dict[str, dict[str, Any]], where: str | None = None) -> None:
        """Assert that each check counts the rows that Spark counts for its condition of violation.

        The checks run with statistics in one batch, and by scans in two batches.
        """
        rows = self.spark.table(f"shop.{name}")
        rows = rows if where is None else rows.where(where)
        total, *counted = rows.agg(F.count("*"), *(F.count_if(F.expr(condition)) for condition in checks)).collect()[0]
        planned = self.plan(name)
        for batches, mode in ((1, "auto"), (2, "never")):
            ran = self.run(
                name, *checks.values(), planned=planned, batches=batches, statistics=mode, where=where, sample=0
            )
            expected = [("violated" if n else "valid", n) for n in counted]
            assert verdicts(ran) == expected, (mode, [c["error"] for c in ran.report["checks"]])
            assert ran.report["rows"] == total


@pytest.fixture
def shop(spark: SparkSession, context: Callable[[TableRecord], FakeContext]) -> Shop:
    spark.sql("create database if not exists shop")
    return Shop(spark, context)


def verdicts(ran: Ran) -> list[tuple[str, int]]:
    return [(c["verdict"], c["violations"]) for c in ran.report["checks"]]


@pytest.mark.slow
def test_partition_values_come_from_the_catalog(shop: Shop, tmp_path: Path) -> None:
    shop.sql("create table {sales} (id bigint, Amount int) using parquet partitioned by (Day int, region string)")
    shop.sql(
        "insert into {sales} values (1, 10, 1, 'a:b/%'), (2, null, 1, 'é'), (3, 30, 2, null), (4, 40, null, '01'), "
        "(5, 50, 3, '1')"
    )
    # The name of this partition's folder has other values, and the folder is outside of the table's folder.
    elsewhere = tmp_path / "Day=7" / "region=nowhere"
    elsewhere.mkdir(parents=True)
    pq.write_table(
        pa.table({"id": pa.array([6, 7], pa.int64()), "amount": pa.array([None, 7], pa.int32())}), elsewhere / "f"
    )
    shop.sql(f"alter table {{sales}} add partition (day = 4, region = 'x y') location '{elsewhere}'")
    planned = shop.plan("sales")
    assert [p.name for p in planned.partitions] == [
        "Day=1/region=a%3Ab%2F%25",
        "Day=1/region=é",
        "Day=2/region=__HIVE_DEFAULT_PARTITION__",
        "Day=3/region=1",
        "Day=4/region=x y",
        "Day=__HIVE_DEFAULT_PARTITION__/region=01",
    ]
    assert planned.partitions[2].values == {"Day": "2", "region": None}
    assert planned.options["partition_types"] == {"Day": "int", "region": "string"}
    checks = {
        "amount is null": {"not_null": "AMOUNT"},
        "day is null": {"not_null": "day"},
        "day > 3": between("day", high=3),
        "region is null": {"not_null": "region"},
        "region not in ('é', '1', 'x y', 'a:b/%')": {
            "in_set": {"column": "region", "values": ["é", "1", "x y", "a:b/%"]}
        },
        "region = '01'": {"check": "region != '01'"},
        "day + amount > 50": {"check": "day + amount <= 50"},
        "id > 6": between("id", high=6),
    }
    shop.agrees("sales", checks)
    shop.agrees("sales", checks, where="day >= 1 and region != '1'")
    ran = shop.run("sales", {"check": "region != 'x y' or amount = 7"}, {"check": "day <= 3"})
    assert [(s["partition"], s["row_index"], s["values"]) for s in ran.report["checks"][1]["samples"]] == [
        ("Day=4/region=x y", 0, {"day": 4}),
        ("Day=4/region=x y", 1, {"day": 4}),
    ]
    shop.sql("alter table {sales} drop partition (day = 4)")
    assert len(shop.plan("sales").partitions) == 5
    assert shop.plan("sales").version != planned.version


def test_columns_and_types_come_from_the_catalog(shop: Shop, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    inner = pa.array(
        [{"x": 1, "more": 2}, {"x": None, "more": 2}], pa.struct([("x", pa.int32()), ("more", pa.int32())])
    )
    old = {"ID": pa.array([1, 2], pa.int32()), "extra": [1, 2], "wrong": ["a", "b"], "s": inner}
    pq.write_table(pa.table(old), folder / "old.parquet")
    shop.sql(
        "create table {typed} (id bigint, later string, wrong int, s struct<x: bigint>) "
        f"using parquet location '{folder}'"
    )
    checks = {
        "id is null": {"not_null": "id"},
        "id > 1": between("id", high=1),
        "later is null": {"not_null": "later"},
        "length(later) > 3": {"length": {"column": "later", "max": 3}},
        "later = 'b'": {"check": "later != 'b'"},
        "s.x is null": {"not_null": "s.x"},
        "s.x > 0": between("s.x", high=0),
    }
    shop.agrees("typed", checks)
    ran = shop.run("typed", {"not_null": "extra"}, between("wrong", 0), {"not_null": "id"})
    assert [c["verdict"] for c in ran.report["checks"]] == ["error", "error", "valid"]
    assert "extra" in ran.report["checks"][0]["error"]
    assert "'wrong' is string in the file" in ran.report["checks"][1]["error"]
    assert "but int in the catalog" in ran.report["checks"][1]["error"]
    pq.write_table(pa.table({"id": pa.array([3], pa.int64()), "later": ["b"]}), folder / "new.parquet")
    shop.spark.catalog.refreshTable("shop.typed")
    shop.agrees("typed", checks)
    assert [p.name for p in shop.plan("typed").partitions] == ["files-000000"]


def test_a_column_added_with_a_default_is_an_error_for_older_files(shop: Shop) -> None:
    shop.sql("create table {grown} (id bigint) using parquet partitioned by (k int)")
    shop.sql("insert into {grown} values (1, 1), (null, 2)")
    shop.sql("alter table {grown} add columns (c int default 5)")
    assert {row.c for row in shop.spark.table("shop.grown").collect()} == {5}
    for mode in ("auto", "never"):
        ran = shop.run(
            "grown", {"not_null": "c"}, between("c", high=4), {"check": "c < 5"}, {"not_null": "id"}, statistics=mode
        )
        assert verdicts(ran) == [("error", 0), ("error", 0), ("error", 0), ("violated", 1)]
        assert all("'c' cannot be read: it has a DEFAULT" in c["error"] for c in ran.report["checks"][:3])
    ran = shop.run("grown", {"not_null": "id"}, where="c > 4")
    assert "where: the column 'c' cannot be read: it has a DEFAULT" in ran.report["checks"][0]["error"]


def test_tables_of_hives_parquet_serde_are_read(shop: Shop) -> None:
    shop.sql("create table {served} (Id int, word string) partitioned by (k string) stored as parquet")
    shop.sql("insert into {served} partition (k = 'a') values (1, 'x'), (2, null)")
    shop.agrees("served", {"word is null": {"not_null": "word"}, "k = 'a'": {"check": "k != 'a'"}})


@pytest.mark.parametrize("catalog", ["", "spark_catalog.", "Spark_Catalog.", "`SPARK_CATALOG`."])
def test_hole_5_a_tables_properties_choose_no_class_to_instantiate(shop: Shop, catalog: str) -> None:
    """Spark instantiates the provider's class when it loads a table, and some classes call a host."""
    shop.sql("create table if not exists {odd} (id bigint) using parquet")
    session: Any = shop.spark
    client = session._jsparkSession.sharedState().externalCatalog().unwrapped().client()
    # Not by a Hive statement, which closes the class loader of all jars.
    table = client.getTable("shop", "odd")
    fields = [getattr(table, f"copy$default${n + 1}")() for n in range(table.productArity())]
    at = [str(table.productElementName(n)) for n in range(len(fields))].index("properties")
    fields[at] = fields[at].updated("spark.sql.sources.provider", "java.util.Timer")
    client.alterTable("shop", "odd", table.copy(*fields))

    def timers() -> set[str]:
        threads = session._jvm.java.lang.Thread.getAllStackTraces().keySet()
        return {name for name in (str(one.getName()) for one in threads) if name.startswith("Timer-")}

    before = timers()
    with pytest.raises(InvalidArgument, match=r"table of the format java.util.timer"):
        plan_table(TableRecord("odd", "spark", f"{catalog}shop.odd"), spark=lambda: shop.spark)
    assert timers() == before


def test_catalog_tables_that_cannot_be_read_are_refused(shop: Shop, tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"id": [1]}))
    shop.sql(f"create table {{removed}} (id bigint) using parquet location '{tmp_path}'")
    shop.sql("create table {orcs} (id int) using orc")
    shop.sql("create table {texts} (id int) using csv")
    shop.sql("create table {lines} (id int) stored as textfile")
    shop.sql("create or replace view {seen} as select 1 as id")
    for name, sentence in {
        "orcs": "'shop.orcs' is a table of the format orc in Spark's catalog",
        "texts": "'shop.texts' is a table of the format csv",
        "lines": "'shop.lines' is a table of the format hive \\(LazySimpleSerDe\\)",
        "seen": "'shop.seen' is a view",
        "removed": f"the location '{tmp_path}' is a Delta table: .* its removed rows would count",
        "nothing": "Spark's catalog has no table 'shop.nothing': it was dropped, renamed",
    }.items():
        with pytest.raises(InvalidArgument, match=sentence):
            shop.plan(name)
    for location, sentence in {
        "nowhere.orders": "Spark's catalog has no table 'nowhere.orders'",
        "lost.db.orders": "Spark has no catalog 'lost'",
    }.items():
        with pytest.raises(InvalidArgument, match=sentence):
            plan_table(TableRecord("t", "spark", location), spark=lambda: shop.spark)


def test_a_table_without_partitions_has_no_rows_unless_there_are_files(shop: Shop, tmp_path: Path) -> None:
    shop.sql(f"create table {{none}} (id int) using parquet partitioned by (k int) location '{tmp_path}/none'")
    assert [(p.name, p.files) for p in shop.plan("none").partitions] == [(EMPTY, ())]
    ran = shop.run("none", {"not_null": "id"}, {"not_null": "k"}, {"not_null": "nothing"})
    assert [c["verdict"] for c in ran.report["checks"]] == ["valid", "valid", "error"]
    (tmp_path / "none" / "k=1").mkdir(parents=True)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "none" / "k=1" / "f.parquet")
    repair = r"has files, but the catalog has no partitions .*: run MSCK REPAIR TABLE shop\.none"
    with pytest.raises(InvalidArgument, match=repair):
        shop.plan("none")
    shop.sql("alter table {none} recover partitions")
    assert [p.name for p in shop.plan("none").partitions] == ["k=1"]
    (tmp_path / "none" / "k=1" / "f.parquet").unlink()
    with pytest.raises(TableUnavailable, match="the folders of 'shop.none' have no files"):
        shop.plan("none")
    (tmp_path / "none" / "k=1").rmdir()
    with pytest.raises(TableUnavailable, match="cannot read the partition k=1 of 'shop.none': .* does not exist"):
        shop.plan("none")


def test_a_table_dropped_during_validate_is_an_error_with_the_reason(shop: Shop) -> None:
    shop.sql("create table {brief} (id int) using parquet")
    shop.sql("insert into {brief} values (1)")
    planned = shop.plan("brief")
    record = shop.record("brief")
    check_reachable(record, lambda: shop.spark)
    shop.sql("drop table {brief}")
    ran = shop.run("brief", {"not_null": "id"}, planned=planned)
    assert [c["verdict"] for c in ran.report["checks"]] == ["error"]
    assert "is gone since the operation was planned" in str(ran.outcomes[0].result["reasons"][0])
    with pytest.raises(InvalidArgument, match="'shop.brief': it was dropped, renamed"):
        shop.plan("brief")
    # Renaming a table moves its folder.
    shop.sql("create table {moved} (id int) using parquet")
    shop.sql("insert into {moved} values (1)")
    planned = shop.plan("moved")
    shop.sql("alter table {moved} rename to {renamed}")
    keys = [replace(partition, name="@table") for partition in planned.partitions]
    ran = shop.run("moved", {"unique": "id"}, planned=replace(planned, partitions=keys))
    assert "is gone since the operation was planned" in str(ran.report["checks"][0]["error"])
    assert shop.run("renamed", {"not_null": "id"}).report["verdict"] == "valid"


def test_an_iceberg_table_in_sparks_catalog_is_planned_as_an_iceberg_table(shop: Shop, tmp_path: Path) -> None:
    need(jar(), MAVEN)
    lake = Lake(shop.spark, tmp_path)
    lake.create("t", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.fill("t")
    lake.delete("t", "id in (0, 1, 5)")
    table = TableRecord("t", "spark", "lake.db.t")
    planned = plan_table(table, spark=lambda: lake.spark)
    assert planned.options == {}
    assert [p.name for p in planned.partitions] == ["k=0", "k=1", "k=2"]
    argument = {"checks": [{"not_null": "c"}]}
    ran = run_operation(Validate(), table, argument, shop.context, partitions=planned.partitions)
    assert verdicts(ran) == [("violated", 18)]


def test_a_catalog_is_found_with_any_active_session(shop: Shop, tmp_path: Path) -> None:
    need(jar(), MAVEN)
    lake = Lake(shop.spark, tmp_path)
    lake.create("t", "id bigint, k int, c string", "", 2)
    lake.fill("t")
    # Another name, because Spark caches the catalog that the statements have used.
    for name, value in {"": SPARK_CATALOG, ".type": "hadoop", ".warehouse": str(tmp_path)}.items():
        lake.spark.conf.set(f"spark.sql.catalog.again{name}", value)
    with active(shop.spark):
        planned = plan_table(TableRecord("t", "spark", "again.db.t"), spark=lambda: lake.spark)
    assert [len(p.files) for p in planned.partitions] == [1]


def test_hole_2_an_untrusted_catalog_server_of_spark_is_not_called(shop: Shop, tmp_path: Path) -> None:
    need(jar(), MAVEN)
    session = shop.spark.newSession()
    table = TableRecord("t", "spark", "hostile.sales.orders")
    with RestCatalogServer(tmp_path / "hostile") as hostile, RestCatalogServer(tmp_path / "other") as other:
        hostile.overrides = {"uri": other.uri}
        for name, value in {"": SPARK_CATALOG, ".type": "rest", ".uri": hostile.uri, ".token": "wasp"}.items():
            session.conf.set(f"spark.sql.catalog.hostile{name}", value)
        for function in (plan_table, folders_of, place_of):
            with pytest.raises(InvalidArgument, match=r"Spark's catalog 'hostile' is refused: its server"):
                function(table, spark=lambda: session)
        check_reachable(table, lambda: session)
        assert hostile.requests == other.requests == []
        # A trusted server can choose where the token is sent.
        session.conf.set("spark.distop.trustedCatalogs", "hostile")
        with pytest.raises((InvalidArgument, TableUnavailable)):
            plan_table(table, spark=lambda: session)
        assert [path.partition("?")[0] for _, path, _, _ in hostile.requests] == ["/v1/config"]
        assert "Bearer wasp" in {headers["Authorization"] for _, _, headers, _ in other.requests}


def test_key_checks_use_the_columns_and_partitions_of_the_catalog(shop: Shop, tmp_path: Path) -> None:
    """Each count equals that of Spark's own query on the table."""
    shop.sql("create table {orders} (id bigint, word string) using parquet partitioned by (Day int, region string)")
    shop.sql("insert into {orders} values (1, 'a', 1, 'x:y'), (2, null, 1, 'x:y'), (3, 'b', 2, null), (1, 'c', 2, 'z')")
    # Folders with other names than in the catalog, narrower types, another case, and a missing column.
    for place, ids in (("Day=9/region=no", [1, 7]), ("odd", [8, 8])):
        (tmp_path / place).mkdir(parents=True)
        pq.write_table(pa.table({"ID": pa.array(ids, pa.int32())}), tmp_path / place / "f.parquet")
    shop.sql(f"alter table {{orders}} add partition (day = 4, region = 'z') location '{tmp_path}/Day=9/region=no'")
    shop.sql(f"alter table {{orders}} add partition (day = 5, region = 'z') location '{tmp_path}/odd'")
    shop.sql("create table {days} (number bigint, Name string) using parquet partitioned by (k int)")
    shop.sql("insert into {days} values (1, 'a', 0), (4, 'b', 0), (5, null, 1)")
    rows, keys = "shop.orders", [["id"], ["day", "id"], ["region"], ["word", "id"]]
    expected = [
        shop.spark.sql(
            f"select coalesce(sum(n - 1), 0) from (select count(*) n from {rows} where "
            f"{' and '.join(f'{c} is not null' for c in key)} group by {', '.join(key)})"
        ).collect()[0][0]
        for key in keys
    ]
    assert expected == [3, 1, 5, 0]
    days = {"references": {"column": "day", "table": "days", "to": "number"}}
    words = {"references": {"columns": ["word", "day"], "table": "days", "to": ["name", "number"]}}
    context = shop.context

    def with_days(table: TableRecord) -> FakeContext:
        ctx = context(table)
        ctx.tables = {"days": shop.record("days")}
        return ctx

    # Both rows of day 2; and the words 'b' and 'c', which the other table lacks with this number.
    cases = [*(({"unique": key}, count) for key, count in zip(keys, expected, strict=True)), (days, 2), (words, 2)]
    few = [cases[1], (days, 2)]  # one of each kind: "never" reads the same rows in another way
    for mode, some in (("auto", cases), ("never", few)):
        checks = [check for check, _ in some]
        argument = {"checks": checks, "statistics": mode, "sample": 4 if mode == "auto" else 0}
        ran = run_operation(Validate(), shop.record("orders"), argument, with_days)
        assert [(c["error"], c["violations"]) for c in ran.report["checks"]] == [(None, count) for _, count in some]
        assert [o.name for o in ran.outcomes] == ["@table"]
        if mode == "never":
            continue
        shown = ran.report["checks"][1]["samples"]
        assert {(s["partition"], s["values"]["day"], s["values"]["id"]) for s in shown} == {("Day=5/region=z", 5, 8)}
    picked = run_operation(
        Validate(), shop.record("orders"), {"checks": [{"unique": "id"}], "where": "region = 'z'"}, with_days
    )
    assert picked.report["checks"][0]["violations"] == 2


@pytest.mark.slow
def test_a_validation_since_a_certificate_covers_changes_in_the_catalog(shop: Shop, tmp_path: Path) -> None:
    place = f"using parquet partitioned by (k int) location '{tmp_path}/certified'"  # dropping it keeps the files
    shop.sql(f"create table {{certified}} (id bigint, word string) {place}")
    shop.sql("insert into {certified} values (1, 'a', 1), (2, 'b', 2)")

    def validate(*checks: dict[str, Any], **arg: Any) -> Ran:
        return run_operation(Validate(), shop.record("certified"), {"checks": list(checks), **arg}, shop.context)

    first = validate({"not_null": "word"}, {"check": "k + id < 100"}, {"unique": "id"})
    certificate = first.report["certificate"]
    assert certificate["types"] == {"id": "bigint", "word": "string", "k": "int"}
    assert (certificate["uuid"], certificate["rows"]) == (None, 2)
    checks = ({"not_null": "word"}, {"check": "k + id < 100"})
    again = validate(*checks, since=certificate)
    assert (again.report["verdict"], again.report["rows"], again.outcomes) == ("valid", 0, [])
    # Only a new file and a partition with a changed value are validated.
    shop.sql("insert into {certified} values (3, 'c', 3)")
    shop.sql("alter table {certified} drop partition (k = 2)")
    shop.sql(f"alter table {{certified}} add partition (k = 99) location '{tmp_path}/certified/k=2'")
    second = validate(*checks, since=certificate)
    assert [o.name for o in second.outcomes] == ["k=3", "k=99"]
    assert [(c["verdict"], c["violations"]) for c in second.report["checks"]] == [("valid", 0), ("violated", 1)]
    shop.sql("alter table {certified} drop partition (k = 99)")
    third = validate(*checks, since=certificate)
    assert ([o.name for o in third.outcomes], third.report["certificate"]["since"]) == (
        ["k=3"],
        certificate["operation"],
    )
    assert third.report["certificate"]["types"] == certificate["types"]
    # A new column does not matter, but a changed column type does.
    shop.sql("alter table {certified} add columns (more int)")
    assert validate(*checks, since=third.report["certificate"]).report["rows"] == 0
    shop.sql("drop table {certified}")
    shop.sql(f"create table {{certified}} (id int, word string) {place}")
    shop.sql("alter table {certified} recover partitions")
    with pytest.raises(InvalidArgument, match="the type of 'id' was changed since"):
        validate(*checks, since=certificate)
    with pytest.raises(InvalidArgument, match="cannot change the schema of the table .* through Spark's catalog"):
        run_operation(Apply(), shop.record("certified"), {"certificate": certificate}, shop.context)


@pytest.mark.slow
def test_catalog_changes_during_a_scan_matter_only_if_files_are_removed(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes are made before the count. If files are kept, the planned ones are validated."""
    check = {"matches": {"column": "word", "pattern": "^a"}}

    def run(name: str, act: str) -> Ran:
        at = At(scan, "count", 1, "before", lambda: shop.sql(act))
        with monkeypatch.context() as patch:
            patch.setattr(scan, "count", at.wrapped)
            try:
                return shop.run(name, check, {"not_null": "id"})
            finally:
                assert at.happened

    place = f"using parquet partitioned by (k int) location '{tmp_path}/leaving'"
    shop.sql(f"create table {{leaving}} (id bigint, word string) {place}")
    shop.sql("insert into {leaving} values (1, 'a', 1), (2, 'b', 2)")
    found = [("violated", 1), ("valid", 0)]
    assert verdicts(run("leaving", "alter table {leaving} drop partition (k = 1)")) == found
    shop.sql("alter table {leaving} add partition (k = 1)")
    assert verdicts(run("leaving", "alter table {leaving} rename to {left}")) == found
    shop.sql("create table {going} (id bigint, word string) using parquet partitioned by (k int)")
    shop.sql("insert into {going} values (1, 'a', 1), (2, 'b', 2)")
    ran = run("going", "drop table {going}")
    assert verdicts(ran) == [("error", 0), ("error", 0)]
    assert all("is gone since the operation was planned" in c["error"] for c in ran.report["checks"])
