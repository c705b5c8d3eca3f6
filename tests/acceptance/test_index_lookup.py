"""Lookups return the rows of a filter on the whole table, also after changes since the index was built."""

from __future__ import annotations

import math
import random
import shutil
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop_behaviors.index import lookup
from distop_behaviors.index.key_lookup import find
from scripts.validate_oracle.random_tables import VALUES, generate
from tests.acceptance.sparklake import Lake
from tests.support.index_runs import Indexes, data_of
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

KINDS = ["i8", "i32", "i64", "u64", "f32", "f64", "dec", "big_dec", "day", "ts", "ts_ms", "flag", "text"]
SHOWN = ("i64", "text", "dec", "flag", "p")


def same(value: Any, key: Any) -> bool:
    """Equality of a lookup: NULL equals NULL, and NaN equals NaN."""
    if isinstance(value, float) and isinstance(key, float) and math.isnan(value):
        return math.isnan(key)
    return bool(value == key) and (value is None) == (key is None)


def rows_in(directory: Path) -> list[dict[str, Any]]:
    """All rows of the table, read by Arrow."""
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob("p=*/*.parquet")):
        for row in pq.ParquetFile(path).read().to_pylist():
            for name in ("ts", "ts_ms"):
                if row.get(name) is not None:
                    row[name] = row[name].astimezone(UTC)
            found.append({**row, "p": VALUES[path.parent.name[2:]]})
    return found


def rows_of_lookup(spark: SparkSession, directory: Path, index: str, keys: list[Any]) -> list[str]:
    frame = lookup(spark, str(directory), index, keys)
    return sorted(repr(tuple(row)) for row in frame.select(*SHOWN).collect())


def expected_rows(rows: list[dict[str, Any]], columns: list[str], keys: list[Any]) -> list[str]:
    wanted = [key if len(columns) > 1 else (key,) for key in keys]
    found = [
        row
        for row in rows
        if any(all(same(row.get(c), k) for c, k in zip(columns, key, strict=True)) for key in wanted)
    ]
    return sorted(repr(tuple(row.get(name) for name in SHOWN)) for row in found)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_lookup_returns_what_a_filter_returns(seed: int, spark: SparkSession, tmp_path: Path) -> None:
    """Indexes have one or several columns of all types, and keys include NULL, NaN and both zeros. Files were added,
    removed and replaced since the build.
    """
    rng = random.Random(seed)
    directory = tmp_path / "t"
    generate(seed, directory)
    indexes = Indexes(directory, tmp_path / "shared")
    sets = [*([k] for k in rng.sample(KINDS, 3)), [rng.choice(["f32", "f64"])], rng.sample(KINDS, 2), ["text", "i32"]]
    made = {f"i{n}": (rng.choice(["posting", "skip"]), columns) for n, columns in enumerate(sets)}
    for name, (kind, columns) in made.items():
        indexes.build(name, kind=kind, columns=columns)
    files = sorted(directory.glob("p=*/*.parquet"))
    generate(seed + 100, tmp_path / "other", partitions=2)
    newer = sorted((tmp_path / "other").glob("p=*/*.parquet"))
    files[0].unlink()
    shutil.copyfile(newer[0], files[1])
    shutil.copyfile(newer[-1], files[-1].with_name("newer.parquet"))
    rows = rows_in(directory)
    for name, (_, columns) in made.items():
        present = [[row.get(c) for c in columns] for row in rng.sample(rows, 3)]
        keys: list[Any] = [key[0] if len(columns) == 1 else tuple(key) for key in present]
        if len(columns) == 1:
            keys += [None, *([math.nan, 0.0, -0.0] if columns[0] in ("f32", "f64") else [])]
        assert rows_of_lookup(spark, directory, name, keys) == expected_rows(rows, columns, keys), (name, columns, keys)
        assert len(find(str(directory), name, keys).uncovered) == 2, (
            "the replaced file and the new file are not covered"
        )


def test_lookups_of_many_or_missing_keys_and_with_partition_columns(spark: SparkSession, tmp_path: Path) -> None:
    table = tmp_path / "a table {with} odd*names"
    for month in ("1", "02", "__HIVE_DEFAULT_PARTITION__"):
        (table / f"m={month}").mkdir(parents=True)
        keys = [f"{month}/{n}" for n in range(500)]
        pq.write_table(pa.table({"a.b": keys, "n": list(range(500))}), table / f"m={month}" / "0.parquet")
    indexes = Indexes(table, tmp_path / "shared", partition_types={"m": "int"})
    indexes.build(columns=["a.b"])
    indexes.build("n", columns=["n"])
    wanted = [f"02/{n}" for n in range(100, 450)] + ["02/nowhere"]
    frame = lookup(spark, indexes.record, "i", wanted)
    assert [f[0].split("/")[-2] for f in find(indexes.record, "i", wanted).files] == ["m=02"]
    assert sorted(tuple(r) for r in frame.collect()) == sorted((f"02/{n}", n, 2) for n in range(100, 450))
    many = lookup(spark, indexes.record, "n", [*range(400, 900), None])
    assert many.count() == 300
    none = lookup(spark, indexes.record, "i", ["nowhere"])
    assert (none.collect(), none.schema) == ([], frame.schema)
    assert [f.dataType.simpleString() for f in none.schema] == ["string", "bigint", "int"]
    text = lookup(spark, str(table), "i", ["02/7"]).collect()
    assert [tuple(row) for row in text] == [("02/7", 7, "02")], "without a table record, partition columns are texts"
    pq.write_table(pa.table({"a.b": ["new"], "n": [-1], "more": [1.5]}), table / "m=02" / "1.parquet")
    assert [tuple(r) for r in lookup(spark, indexes.record, "i", ["1/3"]).collect()] == [("1/3", 3, None, 1)]
    current = indexes.folder().current()
    assert current is not None
    runs = [str(data_of(indexes.folder()) / run.name) for run in current.runs]
    ordinary = spark.read.option("__globPaths__", "false").parquet(*runs)
    assert (ordinary.columns, ordinary.count()) == (["key", "file", "block"], 1500)


def test_a_file_that_spark_cannot_read_is_an_error_of_the_lookup(spark: SparkSession, tmp_path: Path) -> None:
    """This is as in a scan of the whole table. An empty file counts as one without rows in Spark."""
    table = tmp_path / "t"
    table.mkdir()
    pq.write_table(pa.table({"k": list(range(1000))}), table / "0.parquet")
    (table / "1.parquet").write_bytes(b"")
    indexes = Indexes(table, tmp_path / "shared")
    assert indexes.build(columns=["k"]).not_indexed_files == 1
    assert lookup(spark, str(table), "i", [2]).count() == 1
    (table / "1.parquet").write_bytes((table / "0.parquet").read_bytes()[:2000])
    with pytest.raises(Exception, match=r"1\.parquet"):
        lookup(spark, str(table), "i", [2]).collect()


@pytest.mark.parametrize("kind", ["posting", "skip"])
def test_a_lookup_in_an_iceberg_table_reads_its_current_snapshot(
    kind: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Deleted rows are not found, files of later snapshots are read, and columns have their current names."""
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    lake.create("t", "id bigint, k int, c string", "partitioned by (k)", 2)
    lake.fill("t")
    indexes = Indexes(lake.path("t"), tmp_path / "shared")
    indexes.record = TableRecord("t", "iceberg", str(lake.path("t")))
    report = indexes.build(kind=kind, columns=["c"])
    assert (report.files, report.rows, report.not_indexed_files) == (3, 100, 0)
    assert report.table_version == str(lake.load("t").currentSnapshot().snapshotId())

    def ids(*keys: Any) -> list[int]:
        return sorted(row.id for row in lookup(lake.spark, str(lake.path("t")), "i", keys).collect())

    found = find(indexes.record, "i", ["7"])
    assert (len(found.named), len(found.uncovered)) == (1, 0)
    assert ids("7", "12", "nowhere") == [7, 12]
    assert len(ids(None)) == 20
    lake.delete("t", "id in (7, 0)")
    lake.sql("insert into {t} values (7000, 1, '7'), (7001, 1, null)")
    lake.sql("alter table {t} rename column c to d")
    with pytest.raises(Exception, match="no longer has a column 'c'"):
        ids("7")
    lake.sql("alter table {t} rename column d to c")
    assert ids("7", "12") == [12, 7000]
    assert len(ids(None)) == 20
    assert len(find(indexes.record, "i", ["7"]).uncovered) == 1
    report = indexes.build(kind=kind, columns=["c"])
    assert (report.indexed, report.not_indexed_files) == (1, 0)
    assert ids("7", "12") == [12, 7000]
    assert lookup(lake.spark, indexes.record, "i", ["nowhere"]).columns == ["id", "k", "c"]
