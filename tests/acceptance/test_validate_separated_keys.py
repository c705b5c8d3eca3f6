"""``unique`` on files that have no common keys by statistics: counted without a shuffle, and correctly."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableRecord
from distop_behaviors.validate import Validate, key_queries
from tests.acceptance.sparklake import Lake
from tests.support.context import FakeContext, run_operation
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

FILES = 8
TYPES: dict[str, pa.DataType] = {
    "apart": pa.int64(),
    "touching": pa.int32(),
    "dec": pa.decimal128(9, 2),
    "text": pa.string(),
    "f": pa.float64(),
    "mixed": pa.int64(),
}
KEYS = [
    *(["apart"], ["touching"], ["dec"], ["text"], ["f"], ["mixed"], ["p"]),
    *(["apart", "mixed"], ["mixed", "f"], ["p", "mixed"], ["p", "f"], ["p", "text"], ["touching", "text"]),
]
SEPARATED = [["apart"], ["dec"], ["apart", "mixed"], ["p", "mixed"], ["p", "f"], ["p", "text"]]
"""Keys that statistics separate for every seed."""
EACH_RUN = [["apart"], ["touching"], ["text"], ["mixed", "f"], ["p", "mixed"]]
"""One key for each reason for which keys are or are not separated. Each takes a second."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parts in which the rows of each check were counted."""
    found: list[int] = []
    plain = key_queries.count_duplicates

    def repeated(rows: Sequence[Any], *more: Any) -> key_queries.KeyViolations:
        found.append(len(rows))
        return plain(rows, *more)

    monkeypatch.setattr(key_queries, "count_duplicates", repeated)
    return found


def value(rng: random.Random, column: str, n: int) -> Any:
    if column == "apart":
        return 100 * n + rng.randint(0, 20)
    if column == "touching":
        return 10 * n + rng.randint(0, 10)  # the last value of one file is the first of the next
    if column == "dec":
        return Decimal(1_000 * n + rng.randint(0, 30)).scaleb(-2)
    if column == "text":
        return f"seventeen-same-bytes-{n // 2:02d}-" + "x" * rng.choice([0, 1, 100])
    if column == "f":
        return rng.choice([math.nan, 0.0, -0.0, 10.0 * n + rng.randint(0, 5)])
    return rng.randint(-5, 5)


def generate(seed: int, folder: Path, name: Callable[[int], str], files: int = FILES) -> list[dict[str, Any]]:
    """Write a file in each partition, and return all rows, with the partition's value as ``p``."""
    rng = random.Random(seed)
    found = []
    for n in range(files):
        rows = [
            {c: None if rng.random() < 0.1 else value(rng, c, n) for c in TYPES} for _ in range(rng.randint(25, 30))
        ]
        path = folder / name(n) / "rows.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {c: pa.array([row[c] for row in rows], kind) for c, kind in TYPES.items()}
        pq.write_table(pa.table(data), path, row_group_size=12)
        found += [{**row, "p": name(n).partition("=")[2].partition("/")[0]} for row in rows]
    return found


def count_repeated_keys(rows: Sequence[dict[str, Any]], key: Sequence[str]) -> int:
    """The number of rows with the key of an earlier row. NaN equals NaN, and both zeros are equal."""

    def plain(found: Any) -> Any:
        return "NaN" if isinstance(found, float) and math.isnan(found) else found

    seen = Counter(tuple(plain(row[c]) for c in key) for row in rows if all(row[c] is not None for c in key))
    return sum(n - 1 for n in seen.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_separated_keys_are_counted_as_in_plain_python(
    tmp_path: Path, context: Callable[[TableRecord], FakeContext], parts: list[int], seed: int
) -> None:
    # Each file is a part of the plan, on which its cost depends.
    rows = generate(seed, tmp_path / "t", lambda n: f"p=v{n}", FILES if seed else 4)
    record = TableRecord("t", "parquet", str(tmp_path / "t"))
    keys = KEYS if seed else EACH_RUN
    checks = [{"unique": key, "name": "-".join(key)} for key in keys]
    expected = [count_repeated_keys(rows, key) for key in keys]
    assert sum(map(bool, expected)) > len(keys) // 2
    ran = run_operation(Validate(), record, {"checks": checks, "sample": 4}, context)
    assert [(c["violations"], c["exact"]) for c in ran.report["checks"]] == [(n, True) for n in expected]
    in_parts = [key for key, count in zip(keys, parts, strict=True) if count > 1]
    assert all(key in in_parts for key in SEPARATED if key in keys)
    # Each file may have NaN, and the bounds of "mixed" overlap.
    assert not any(key in in_parts for key in (["f"], ["mixed"], ["mixed", "f"]))
    for check, count in zip(ran.report["checks"], expected, strict=True):
        samples = [tuple(sample["values"].items()) for sample in check["samples"]]
        assert bool(samples) == bool(count)
        assert all(samples.count(one) >= 2 for one in samples)
    parts.clear()
    # Without statistics no keys are separated.
    whole = [n for n, key in enumerate(keys) if key in in_parts]
    arg = {"checks": [checks[n] for n in whole], "statistics": "never", "sample": 0}
    again = run_operation(Validate(), record, arg, context)
    assert [c["violations"] for c in again.report["checks"]] == [expected[n] for n in whole]
    assert set(parts) == {1}


def test_partition_values_that_are_equal_numbers_are_one_value(
    tmp_path: Path, context: Callable[[TableRecord], FakeContext], parts: list[int]
) -> None:
    """``01`` and ``1`` are one whole number, but two texts."""
    rows = generate(7, tmp_path / "t", lambda n: f"p={n // 2:0{n % 2 + 1}d}")
    checks = [{"unique": ["p", "mixed"]}]
    for types, read in (({}, str), ({"p": "int"}, int)):
        record = TableRecord("t", "parquet", str(tmp_path / "t"), {"partition_types": types} if types else {})
        ran = run_operation(Validate(), record, {"checks": checks}, context)
        typed = [{**row, "p": read(row["p"])} for row in rows]
        assert ran.report["checks"][0]["violations"] == count_repeated_keys(typed, ["p", "mixed"])
    assert all(count > 1 for count in parts)


def test_where_applies_to_the_rows_of_each_part(
    tmp_path: Path, context: Callable[[TableRecord], FakeContext], parts: list[int]
) -> None:
    rows = generate(9, tmp_path / "t", lambda n: f"p={n}")
    record = TableRecord("t", "parquet", str(tmp_path / "t"))
    ran = run_operation(Validate(), record, {"checks": [{"unique": "apart"}], "where": "mixed > 0"}, context)
    picked = [row for row in rows if row["mixed"] is not None and row["mixed"] > 0]
    assert ran.report["checks"][0]["violations"] == count_repeated_keys(picked, ["apart"]) > 0
    assert parts[0] > 1


def test_deleted_rows_are_not_counted_in_any_part(
    spark: SparkSession,
    tmp_path: Path,
    context: Callable[[TableRecord], FakeContext],
    parts: list[int],
) -> None:
    need(jar(), MAVEN)
    lake = Lake(spark, tmp_path / "lake")
    lake.create("t", "id bigint, p string", "partitioned by (p)", 2)
    lake.sql("insert into {t} select id % 30 + 100 * (id % 8), concat('v', id % 8) from range(0, 400, 1, 1)")
    lake.delete("t", "id % 100 < 5 and p in ('v1', 'v2')")
    assert lake.delete_files("t") > 0
    rows = [row.asDict() for row in lake.rows("t").collect()]
    keys = [["id"], ["p", "id"]]
    checks = [{"unique": key, "name": "-".join(key)} for key in keys]
    ran = run_operation(Validate(), lake.record("t"), {"checks": checks}, context)
    expected = [count_repeated_keys(rows, key) for key in keys]
    assert [check["violations"] for check in ran.report["checks"]] == expected
    assert all(expected)
    assert all(count > 1 for count in parts)
