"""The planner for tables of Spark's catalog, with descriptions of the catalog (acceptance tests have Spark)."""

from __future__ import annotations

import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.plan import Plan, chunked, decode_chunk
from distop.protocol.records import TableRecord
from distop.tables import check_table, plan_table
from distop.tables.reading.file_facts import Chunk, FileFacts, Leaf, holds, of_json
from distop.tables.spark.spark_catalog import CatalogPartition, Described, path_of
from distop.tables.spark.spark_format import plan
from distop.tables.table_options import TableOptions
from distop_behaviors.validate.partition_checks import Preparation
from distop_behaviors.validate.partition_state import Names
from distop_behaviors.validate.validate_argument import Argument

if TYPE_CHECKING:
    from distop.protocol.plan import Planned


def field(name: str, kind: Any, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": metadata}


def partitioned(*partitions: tuple[dict[str, str | None], str], kind: Any = "integer") -> Described:
    columns = [field("id", "long"), field("k", kind)]
    return Described("parquet", "/t", columns, ("k",), [CatalogPartition(v, place) for v, place in partitions])


def planned(described: Described, files: Any = lambda folder, deep=False: [(f"{folder}/f", 1, 2)]) -> Planned:
    return plan(described, "db.t", TableOptions(group_files=2), files, lambda: None)


def test_a_hundred_thousand_partitions_keep_one_schema() -> None:
    wide = [field(f"c{n}", "string") for n in range(2_000)]
    made = [CatalogPartition({"k": str(n)}, f"/elsewhere/{n % 7}/{n}") for n in range(100_000)]
    found = planned(Described("parquet", "/t", [*wide, field("k", "integer")], ("k",), made))
    assert [p.name for p in found.partitions[9:12]] == ["k=9", "k=10", "k=11"]
    assert found.partitions[99_999].files == (("/elsewhere/4/99999/f", 1, 2),)
    assert len(found.options["columns"]) == 2_000
    assert sum(map(len, chunked(found.partitions))) < 20_000_000
    kept = Plan.decode(Plan(1, "v", "d", 1, 0, found.options).encode())
    assert kept.options == found.options
    assert decode_chunk(chunked(found.partitions[:1])[0])[0] == found.partitions[0]


def test_types_are_read_from_spark_s_json() -> None:
    nested = {
        "type": "struct",
        "fields": [field("a", {"type": "array", "elementType": "byte"}), field("b", "decimal(3,1)")],
    }
    columns = [
        field("n", nested),
        field("m", {"type": "map", "keyType": "string", "valueType": "short"}),
        field("folded", "string", __COLLATIONS={"folded": "icu.UNICODE_CI"}),
        field("odd", {"type": "udt", "class": "x"}),
    ]
    found = planned(Described("parquet", "/t", columns))
    types = {name: of_json(kind) for name, kind in found.options["columns"].items()}
    assert types["n"] == ("struct", (("a", ("array", "tinyint")), ("b", "decimal(3,1)")))
    assert types["m"] == ("map", "string", "smallint")
    assert types["folded"][0] == types["odd"][0] == "unreadable"
    assert found.options["partition_types"] == {}
    assert [p.name for p in found.partitions] == ["files-000000"]


def test_a_column_with_a_default_does_not_count_as_null_in_files_without_it() -> None:
    default = {"CURRENT_DEFAULT": "5", "EXISTS_DEFAULT": "5"}
    columns = [field("id", "long"), field("c", "integer", **default), field("k", "integer", **default)]
    found = planned(Described("parquet", "/t", columns, ("k",), [CatalogPartition({"k": "1"}, "/t/k=1")]))
    assert found.options["partition_types"] == {"k": "int"}
    declared = {name: of_json(kind) for name, kind in found.options["columns"].items()}
    assert declared["id"] == "bigint"
    leaf = Leaf(("id",), "int", "bigint", 64)
    old = FileFacts("old", 3, {"id": "bigint"}, {("id",): leaf}, {("id",): (Chunk(3, 0),)})
    checks = [{"not_null": "c"}, {"range": {"column": "c", "max": 4}}, {"not_null": "c.inner"}, {"not_null": "id"}]
    verdicts: dict[str, list[str | None]] = {}
    for mode in ("auto", "never", "only"):
        argument = Argument.model_validate({"checks": checks, "statistics": mode})
        names = Names(tuple((check.column,) for check in argument.checks))
        part = Preparation(argument, names, {"k": "int"}, declared).prepare(found.partitions[0], [old])
        verdicts[mode] = [result.verdict for result in (tally.result() for tally in part.tallies)]
        assert all("has a DEFAULT" in str(t.error) for t in part.tallies[:3] if t.error is not None)
        assert (part.tallies[3].error, part.tallies[3].violations) == (None, 0)
    assert verdicts["auto"] == ["error", "error", "error", "valid"]
    assert verdicts["never"][:3] == ["error", "error", "error"]
    assert verdicts["only"] == ["unknown", "error", "error", "valid"]


def test_a_declared_type_holds_what_spark_widens_to_it() -> None:
    inner = ("struct", (("a", "int"), ("more", "string")))
    assert holds("bigint", "int")
    assert holds(("struct", (("A", "bigint"), ("later", "date"))), inner)
    assert holds(("array", "double"), ("array", "float"))
    assert not holds("int", "bigint")
    assert not holds(("struct", (("a", "string"),)), inner)
    assert not holds(("array", "int"), ("map", "int", "int"))
    assert not holds(("unreadable", "x"), ("unreadable", "x"))


def test_ambiguous_partitions_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="the partitions k=1 and k=01 of 'db.t' have the same folder: /p/1"):
        planned(partitioned(({"k": "1"}, "/p/1"), ({"k": "01"}, "/p/1/")))
    with pytest.raises(InvalidArgument, match="has the partition k=1 of 'db.t' twice"):
        planned(partitioned(({"k": "1"}, "/p/1"), ({"k": "1"}, "/p/2")))
    found = planned(partitioned(({"k": "1"}, "/p/1"), ({"k": "01"}, "/p/01"), ({"k": None}, "/p/null")))
    assert [p.name for p in found.partitions] == ["k=01", "k=1", "k=__HIVE_DEFAULT_PARTITION__"]
    assert [p.values["k"] for p in found.partitions] == ["01", "1", None]
    with pytest.raises(InvalidArgument, match="the partition column 'k' of 'db.t' has an unsupported type"):
        planned(partitioned(({"k": "1"}, "/p/1"), kind="binary"))


def test_an_empty_folder_beside_others_is_a_partition_and_a_missing_one_an_error() -> None:
    both = partitioned(({"k": "1"}, "/p/1"), ({"k": "2"}, "/p/2"))

    def some(folder: str, deep: bool = False) -> list[Any]:
        return [(f"{folder}/f", 1, 2)] if folder == "/p/1" else []

    assert [len(p.files) for p in planned(both, some).partitions] == [1, 0]
    with pytest.raises(TableUnavailable, match="the folders of 'db.t' have no files"):
        planned(both, lambda folder, deep=False: [])

    def gone(folder: str, deep: bool = False) -> list[Any]:
        if folder == "/p/2":
            raise TableUnavailable("the location '/p/2' does not exist")
        return some(folder)

    with pytest.raises(TableUnavailable, match="cannot read the partition k=2 of 'db.t': .*'/p/2' does not exist"):
        planned(both, gone)


def test_locations_of_the_catalog_are_unescaped_once() -> None:
    assert path_of("file:/a%20b/k=x%253Ay") == "/a b/k=x%3Ay"
    assert path_of("file:///a/b") == "/a/b"
    assert path_of("/a%20b") == "/a%20b"
    assert path_of("hdfs://host:8020/a%20b") == "hdfs://host:8020/a b"


class Thrown:
    """Replaces an exception of the JVM, with a real message of Derby."""

    def __init__(self, text: str, cause: Thrown | None = None, name: str = "java.sql.SQLException") -> None:
        self._text = text
        self._cause = cause
        self._name = name

    def getClass(self) -> Thrown:
        return self

    def getName(self) -> str:
        return self._name

    def getSimpleName(self) -> str:
        return self._name.rpartition(".")[2]

    def getMessage(self) -> str:
        return self._text

    def getCause(self) -> Thrown | None:
        return self._cause


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Another instance of Derby may have already booted the database /m/db.", "but Derby allows only one: use a"),
        (
            "Could not connect to meta store",
            "cannot read the table 'shop.t' from Spark's catalog: Could not connect",
        ),
    ],
)
def test_a_table_of_an_unreachable_metastore_is_left_to_another_node(text: str, sentence: str) -> None:
    with pytest.raises(TableUnavailable, match=sentence):
        plan_table(TableRecord("t", "spark", "shop.t"), spark=lambda: throwing(Thrown(text)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("com.fasterxml.jackson.core.JsonParseException", "Unrecognized token 'a-secret': was expecting"),
        ("org.apache.iceberg.shaded.com.fasterxml.jackson.core.JsonParseException", "Unrecognized token 'a-secret'"),
        ("java.lang.NumberFormatException", 'For input string: "a-secret"'),
        ("java.lang.IllegalArgumentException", "Cannot parse to an integer value: format-version: a-secret"),
    ],
)
def test_hole_1_text_of_a_file_that_java_quotes_is_omitted(name: str, text: str) -> None:
    """The owner of a table's folder can link its metadata file to any file of the executor's user."""
    thrown = Thrown(text, name=name)
    message = rf"Spark's catalog: {name.rpartition('.')[2]} \(its message is omitted"
    with pytest.raises(TableUnavailable, match=message) as refused:
        plan_table(TableRecord("t", "spark", "shop.t"), spark=lambda: throwing(thrown))
    assert "a-secret" not in "".join(traceback.format_exception(refused.value))


def throwing(cause: Thrown) -> Any:
    """A session whose catalog fails with this cause."""
    kind = type("AnalysisException", (Exception,), {"__module__": "pyspark.errors.exceptions.captured"})

    class Session:
        @property
        def _jsparkSession(self) -> Any:
            error = kind(f"as Spark says it: {cause.getMessage()}")
            error._origin = Thrown(str(error), cause)
            raise error

    return Session()


def test_registering_checks_only_the_record_and_needs_no_spark() -> None:
    code = (
        "import sys\n"
        "from distop.protocol.records import TableRecord\n"
        "from distop.tables import check_table\n"
        "record = TableRecord('t', 'spark', '`my shop`.orders', {'group_files': 3})\n"
        "assert check_table(record) == record\n"
        "assert not {'pyspark', 'py4j', 'pyiceberg'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for location in ("orders", "/data/shop/orders", "a.b.c.d", "shop.", "", "shop orders.t"):
        with pytest.raises(InvalidArgument, match="is not the name of a table in Spark's catalog"):
            check_table(TableRecord("t", "spark", location))
    for location in ("global_temp.v", "`Global_Temp`.v"):
        with pytest.raises(InvalidArgument, match="is a temporary view"):
            check_table(TableRecord("t", "spark", location))
    with pytest.raises(InvalidArgument, match="'partition_types' is not known for spark"):
        check_table(TableRecord("t", "spark", "shop.orders", {"partition_types": {}}))
    with pytest.raises(InvalidArgument, match="'columns' is not known for spark"):
        check_table(TableRecord("t", "spark", "shop.orders", {"columns": {}}))
    with pytest.raises(InvalidArgument, match="'spark.sql.catalog.evil' is not known for spark"):
        check_table(TableRecord("t", "spark", "evil.shop.orders", {"spark.sql.catalog.evil": "x.Y"}))
    with pytest.raises(InvalidArgument, match="a table of Spark's catalog needs Spark"):
        plan_table(TableRecord("t", "spark", "shop.orders"))


@pytest.mark.parametrize(
    "location",
    [
        "parquet.`file:///etc`",
        "csv.`/etc/passwd`",
        "text.`relative/path`",
        "delta.`s3://bucket/t`",
        "iceberg.`/lake/t`",
        "spark_catalog.delta.`/lake/t`",
        "shop.`http:`",
        "shop.a\\b",
        "`prod.uri`.shop.orders",
        "`prod.catalog-impl`.shop.orders",
        "shop.orders; DROP TABLE x",
    ],
)
def test_a_name_that_is_a_path_or_another_setting_is_refused_even_if_read_from_etcd(location: str) -> None:
    table = TableRecord.decode(TableRecord("t", "spark", location).encode())
    for ask in (check_table, lambda table: plan_table(table, spark=object)):  # a session that is not used
        with pytest.raises(InvalidArgument, match="is not the name of a table in Spark|has the scheme"):
            ask(table)
