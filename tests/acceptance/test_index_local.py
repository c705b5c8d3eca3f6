"""Lookups that read rows without Spark return the rows of a filter on the whole table, for all types."""

from __future__ import annotations

import math
import random
import re
import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from distop.behavior import TableRecord
from distop.tables.reading import arrow_rows
from distop_behaviors.index import lookup, row_lookup
from tests.acceptance.sparklake import Lake
from tests.support.index_runs import Indexes
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

NOON = datetime(2020, 1, 2, 12, 0, 0, 123456)  # noqa: DTZ001 -- without a zone
ROWS = 60

Values = dict[str, tuple[Any, "Callable[[random.Random], Any]"]]


def _columns() -> Values:
    """Column → its Arrow type and a function for random values."""
    inner = pa.struct([pa.field("a", pa.int16()), pa.field("t", pa.timestamp("us", "UTC")), pa.field("d", pa.date32())])

    def moment(rng: random.Random) -> datetime:
        return NOON + timedelta(microseconds=rng.randrange(10**15))

    def struct(rng: random.Random) -> Any:
        return {"a": rng.choice([None, 7]), "t": moment(rng), "d": date(1999, 1, rng.randint(1, 28))}

    return {
        "flag": (pa.bool_(), lambda r: r.random() < 0.5),
        "i8": (pa.int8(), lambda r: r.randint(-128, 127)),
        "i16": (pa.int16(), lambda r: r.randint(-(2**15), 2**15 - 1)),
        "i32": (pa.int32(), lambda r: r.randint(-(2**31), 2**31 - 1)),
        "i64": (pa.int64(), lambda r: r.choice([-(2**63), 2**63 - 1, r.randint(-9, 9)])),
        "u8": (pa.uint8(), lambda r: r.randint(0, 255)),
        "u16": (pa.uint16(), lambda r: r.randint(0, 2**16 - 1)),
        "u32": (pa.uint32(), lambda r: r.randint(0, 2**32 - 1)),
        "u64": (pa.uint64(), lambda r: r.choice([0, 2**63 + 5, 2**64 - 1])),
        "f32": (pa.float32(), lambda r: r.choice([0.0, -0.0, math.nan, math.inf, 0.1])),
        "f64": (pa.float64(), lambda r: r.choice([0.0, -0.0, math.nan, -math.inf, 0.1])),
        "dec": (pa.decimal128(9, 2), lambda r: Decimal(r.randint(-99999, 99999)).scaleb(-2)),
        "long_dec": (pa.decimal128(18, 3), lambda r: Decimal(r.randint(-(10**17), 10**17)).scaleb(-3)),
        "big_dec": (pa.decimal128(38, 10), lambda r: Decimal(r.randint(-(10**30), 10**30)).scaleb(-10)),
        "day": (pa.date32(), lambda r: date(2013, 1, 1) + timedelta(days=r.randint(-9999, 9999))),
        "ts": (pa.timestamp("us", "UTC"), moment),
        "ts_ms": (pa.timestamp("ms", "Europe/Berlin"), lambda r: moment(r).replace(microsecond=5000)),
        "ntz": (pa.timestamp("us"), moment),
        "text": (pa.string(), lambda r: r.choice(["", "a", "é😀", "x" * 300])),
        "large": (pa.large_string(), lambda r: r.choice(["", "b"])),
        "word": (pa.dictionary(pa.int32(), pa.string()), lambda r: r.choice(["one", "two"])),
        "bytes": (pa.binary(), lambda r: r.randbytes(r.randint(0, 9))),
        "fixed": (pa.binary(4), lambda r: r.randbytes(4)),
        "s": (inner, struct),
        "l": (pa.list_(pa.int32()), lambda r: [r.choice([None, 1, 2]) for _ in range(r.randint(0, 3))]),
        "ls": (pa.list_(inner), lambda r: [struct(r) for _ in range(r.randint(0, 2))]),
        "ll": (pa.large_list(pa.list_(pa.string())), lambda r: [["x", None], None, []][: r.randint(0, 3)]),
        "m": (
            pa.map_(pa.string(), pa.decimal128(9, 2)),
            lambda r: [("k", Decimal("1.5")), ("n", None)][: r.randint(0, 2)],
        ),
        "mt": (pa.map_(pa.int64(), pa.timestamp("us", "UTC")), lambda r: [(1, moment(r))]),
        "a b.c`d": (pa.int32(), lambda r: r.randint(0, 5)),
    }


NARROW = {"i16": pa.int8(), "i32": pa.int16(), "i64": pa.int32(), "f64": pa.float32(), "dec": pa.decimal128(8, 2)}
"""Column → a narrower type that some files have for it."""


def write(rng: random.Random, path: Path, first: int, *, narrow: bool) -> None:
    """Write a file with keys ``k`` from ``first`` on. Its columns are shuffled, have NULLs, and some are missing."""
    columns = list(_columns().items())
    rng.shuffle(columns)
    arrays: dict[str, Any] = {}
    for name, (kind, value) in columns[rng.choice([0, 3]) :]:
        values = [None if rng.random() < 0.2 else value(rng) for _ in range(ROWS)]
        if narrow and name in NARROW:
            kind, values = NARROW[name], [None if v is None else 1 for v in values]
        arrays[name] = pa.array(values, kind)
    arrays["k"] = pa.array([f"k{first + n}" for n in range(ROWS)])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(arrays),
        path,
        row_group_size=rng.choice([7, 25, 1000]),
        data_page_size=rng.choice([64, 1 << 20]),
        use_dictionary=rng.random() < 0.5,
        store_decimal_as_integer=rng.random() < 0.5,
        data_page_version=rng.choice(["1.0", "2.0"]),
        compression=rng.choice(["none", "snappy", "zstd"]),
        store_schema=rng.random() < 0.7,
    )


def is_local(frame: DataFrame) -> bool:
    """Whether the frame holds its rows and reads no files."""
    plan = frame._jdf.queryExecution().optimizedPlan().toString()
    return "LocalRelation" in plan and re.search(r"\b(Relation|RelationV2|LogicalRDD)\b", plan) is None


def schema_and_rows(frame: DataFrame) -> tuple[Any, list[str]]:
    return frame.schema, sorted(repr(row) for row in frame.collect())


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_local_rows_of_all_types_equal_those_of_a_filter(seed: int, spark: SparkSession, tmp_path: Path) -> None:
    """Values, types, nullability and names equal those of Spark's reader, and of a lookup that reads with Spark."""
    rng = random.Random(seed)
    table = tmp_path / "t"
    folders = ["p=1/q=a%3Ab", "p=02/q=%C3%A9", "p=__HIVE_DEFAULT_PARTITION__/q=x y"]
    for n in range(6):
        write(rng, table / folders[n % 3] / f"{n}.parquet", n * ROWS, narrow=n % 2 == 1)
    indexes = Indexes(table, tmp_path / "shared", partition_types={"p": "int"})
    indexes.build(columns=["k"])
    keys = [f"k{rng.randrange(6 * ROWS)}" for _ in range(40)]
    frame = lookup(spark, indexes.record, "i", keys)
    assert is_local(frame)
    schema, rows = schema_and_rows(frame)
    assert len(rows) == len(set(keys))
    by_spark = lookup(spark, indexes.record, "i", keys, local_bytes=0)
    assert not is_local(by_spark)
    assert schema_and_rows(by_spark) == (schema, rows)
    plain = spark.read.schema(schema).parquet(str(table)).where(F.col("k").isin(keys)).drop("q")
    assert schema_and_rows(plain) == schema_and_rows(frame.drop("q"))
    assert {row.q for row in frame.select("q").collect()} <= {"a:b", "é", "x y"}
    assert frame.where("p is null").count() + frame.where("p in (1, 2)").count() == len(rows)


KEYS: dict[str, tuple[Any, list[Any], Any]] = {
    "i": (pa.int32(), [1, 2, 3, None, 2], 2),
    "f": (pa.float32(), [0.1, -0.0, math.nan, None, 0.0], 0.0),
    "n": (pa.float64(), [0.1, -0.0, math.nan, None, math.nan], math.nan),
    "d": (pa.decimal128(9, 2), [Decimal("1.50"), Decimal(2), None, None, Decimal("1.50")], "1.5"),
    "t": (pa.timestamp("ms", "UTC"), [NOON.replace(microsecond=1000)] * 2 + [None] * 3, NOON.replace(microsecond=1000)),
    "z": (pa.timestamp("us"), [NOON, None, None, NOON, None], NOON),
    "y": (pa.date32(), [date(2020, 1, 2), None, date(2020, 1, 3), None, None], "2020-01-02"),
    "b": (pa.binary(), [b"\xff", b"", None, b"a", b"\xff"], b"\xff"),
    "g": (pa.bool_(), [True, False, None, True, None], True),
}


def test_keys_of_all_types_find_their_rows_and_no_others(spark: SparkSession, tmp_path: Path) -> None:
    """Keys are equal if Spark takes them for equal: zeros of both signs, NaN, and times in other units."""
    table = tmp_path / "t"
    table.mkdir()
    arrays = {name: pa.array(values, kind) for name, (kind, values, _) in KEYS.items()}
    pq.write_table(pa.table({**arrays, "row": list(range(5))}), table / "0.parquet", row_group_size=2)
    indexes = Indexes(table, tmp_path / "shared")
    for name, (_, values, key) in KEYS.items():
        indexes.build(name, columns=[name])
        frame = lookup(spark, str(table), name, [key])
        assert is_local(frame), name
        by_spark = lookup(spark, str(table), name, [key], local_bytes=0)
        assert schema_and_rows(frame) == schema_and_rows(by_spark), name
        assert frame.count() == (1 if name == "y" else 2), (name, values)
    indexes.build("both", columns=["i", "d"])
    frame = lookup(spark, str(table), "both", [(1, "1.5"), (2, "1.5"), {"i": 2, "d": 2}])
    assert (is_local(frame), sorted(row.row for row in frame.collect())) == (True, [0, 1, 4])


def test_rows_with_the_same_hash_as_a_key_are_omitted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index stores hashes of texts. In this test all texts have the same hash."""
    for module in ("postings", "key_lookup"):
        name = f"distop_behaviors.index.{module}"
        monkeypatch.setattr(sys.modules[name], "key_numbers", lambda parts, families: parts[0] * 0)
    table = tmp_path / "t"
    table.mkdir()
    pq.write_table(pa.table({"k": ["a", "b", "c", "b"]}), table / "0.parquet")
    Indexes(table, tmp_path / "shared").build(columns=["k"])
    assert [row.k for row in lookup(spark, str(table), "i", ["b"]).collect()] == ["b", "b"]
    none = lookup(spark, str(table), "i", ["nowhere"])
    assert (none.collect(), none.columns) == ([], ["k"])


def _plain(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table({"k": pa.array([1, 2, 3]), **columns}), path)


def _int96(path: Path) -> None:
    table = pa.table({"k": [1, 2, 3], "t": pa.array([NOON] * 3, pa.timestamp("us", "UTC"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)


READ_BY_SPARK: dict[str, Callable[[Path], None]] = {
    "old timestamps": _int96,
    "an ancient day": lambda path: _plain(path, d=pa.array([date(1500, 1, 1), None, date(2020, 1, 1)])),
    "an old time in a list": lambda path: _plain(
        path, d=pa.array([[datetime(1850, 1, 1, tzinfo=UTC)], [], None], pa.list_(pa.timestamp("us", "UTC")))
    ),
}


@pytest.mark.parametrize("what", READ_BY_SPARK)
def test_types_that_arrow_may_read_differently_are_read_by_spark(
    what: str, spark: SparkSession, tmp_path: Path
) -> None:
    table = tmp_path / "t"
    table.mkdir()
    READ_BY_SPARK[what](table / "0.parquet")
    Indexes(table, tmp_path / "shared").build(columns=["k"])
    frame = lookup(spark, str(table), "i", [1, 3])
    assert not is_local(frame)
    assert schema_and_rows(frame) == schema_and_rows(spark.read.parquet(str(table)).where("k in (1, 3)"))


def test_many_bytes_or_rows_are_read_by_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "t"
    table.mkdir()
    pq.write_table(pa.table({"k": [n % 100 for n in range(5000)]}), table / "0.parquet", row_group_size=1000)
    Indexes(table, tmp_path / "shared").build(columns=["k"])
    few = lookup(spark, str(table), "i", [7])
    assert (is_local(few), few.count()) == (True, 50)
    for most in (100, 0):
        frame = lookup(spark, str(table), "i", [7], local_bytes=most)
        assert (is_local(frame), frame.count()) == (False, 50)
    monkeypatch.setattr(row_lookup, "LOCAL_ROWS", 49)
    assert not is_local(lookup(spark, str(table), "i", [7]))


def test_a_file_that_changes_during_a_local_read_is_read_by_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row positions in the index no longer fit the file."""
    table = tmp_path / "t"
    table.mkdir()
    _plain(table / "0.parquet", v=pa.array([1, 2, 3]))
    Indexes(table, tmp_path / "shared").build(columns=["k"])
    real = arrow_rows._group_rows

    def picked(*arguments: Any) -> Any:
        _plain(table / "0.parquet", v=pa.array([10, 20, 30]), more=pa.array(["x"] * 3))
        return real(*arguments)

    monkeypatch.setattr(arrow_rows, "_group_rows", picked)
    frame = lookup(spark, str(table), "i", [2])
    assert not is_local(frame)
    assert [row.v for row in frame.collect()] == [20]


def test_local_rows_of_an_iceberg_table_equal_those_of_a_filter(spark: SparkSession, tmp_path: Path) -> None:
    """Columns are read by field id after schema changes, and partition columns by value. Spark reads files in which
    rows may be deleted.
    """
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    columns = "id int, f float, d decimal(9,2), t timestamp, n timestamp_ntz, c string, s struct<a: int, b: int>, "
    columns += "l array<struct<x: int>>, m map<string, int>, day date, gone string"
    lake.create("t", columns, "partitioned by (day)", 2)
    made = "cast(id as int) id, cast(id / 7 as float) f, cast(id / 100 as decimal(9,2)) d, "
    made += "timestamp_micros(id * 1234567891) t, timestamp_ntz '2020-01-02 03:04:05' n, cast(id as string) c, "
    made += "struct(cast(id as int) a, cast(-id as int) b) s, array(struct(cast(id as int) x)) l, "
    made += "map('k', cast(id as int)) m, if(id % 3 = 0, null, date '2020-01-01' + cast(id % 3 as int)) day, 'x' gone"
    lake.sql(f"insert into {{t}} select {made} from range(0, 100, 1, 1)")
    indexes = Indexes(lake.path("t"), tmp_path / "shared")
    indexes.record = TableRecord("t", "iceberg", str(lake.path("t")))
    indexes.build(columns=["c"])
    keys = ["7", "12", "50", "nowhere"]

    def compare(*, here: bool) -> None:
        frame = lookup(lake.spark, indexes.record, "i", keys)
        assert is_local(frame) == here
        listed = ", ".join(f"'{key}'" for key in keys)
        assert schema_and_rows(frame) == schema_and_rows(lake.rows("t").where(f"c in ({listed})"))

    compare(here=True)
    lake.sql("alter table {t} alter column id type bigint")
    lake.sql("alter table {t} alter column f type double")
    lake.sql("alter table {t} alter column d type decimal(18,2)")
    lake.sql("alter table {t} drop column gone")
    lake.sql("alter table {t} add column gone int")
    lake.sql("alter table {t} rename column n to was")
    compare(here=True)
    for old, new in (("s.a", "tmp"), ("s.b", "a"), ("s.tmp", "b")):
        lake.sql(f"alter table {{t}} rename column {old} to {new}")
    compare(here=False)
    lake.sql("alter table {t} drop column s")
    compare(here=True)
    lake.delete("t", "c = '12'")
    compare(here=False)
    keys[:] = ["7"]
    lake.sql("alter table {t} set tblproperties ('format-version'='3')")
    lake.delete("t", "c in ('7', '8')")
    compare(here=False)
