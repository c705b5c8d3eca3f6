"""lookup against a filter on the whole table, whatever became of the table since its index was built."""

from __future__ import annotations

import math
import random
import shutil
from datetime import UTC
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.errors import InvalidArgument, NotFound
from distop_behaviors.index import lookup
from distop_behaviors.index.lookup import find
from tests.support.generated import generate
from tests.support.indexed import Indexes

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SHOWN = ("i64", "text", "dec", "flag", "p")


def same(value: Any, key: Any) -> bool:
    """Equal as a lookup has it: NULL equals NULL, and what is not a number itself."""
    if isinstance(value, float) and isinstance(key, float) and math.isnan(value):
        return math.isnan(key)
    return bool(value == key) and (value is None) == (key is None)


def rows_in(directory: Path) -> list[dict[str, Any]]:
    """All rows, read by Arrow alone."""
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob("p=*/*.parquet")):
        for row in pq.ParquetFile(path).read().to_pylist():
            for name in ("ts", "ts_ms"):
                if row.get(name) is not None:
                    row[name] = row[name].astimezone(UTC)
            found.append({**row, "p": path.parent.name[2:]})
    return found


def looked_up(spark: SparkSession, directory: Path, index: str, keys: list[Any]) -> list[str]:
    frame = lookup(spark, str(directory), index, keys)
    return sorted(repr(tuple(row)) for row in frame.select(*SHOWN).collect())


def expected(rows: list[dict[str, Any]], columns: list[str], keys: list[Any]) -> list[str]:
    wanted = [key if len(columns) > 1 else (key,) for key in keys]
    found = [
        row
        for row in rows
        if any(all(same(row.get(c), k) for c, k in zip(columns, key, strict=True)) for key in wanted)
    ]
    return sorted(repr(tuple(row.get(name) for name in SHOWN)) for row in found)


@pytest.mark.parametrize("seed", range(4))
def test_it_gives_what_a_filter_gives(seed: int, spark: SparkSession, tmp_path: Path) -> None:
    """Over columns of all types, with NULL, NaN and zeros of both signs, alone and several at once; of tables to which
    files were added, and from which some were removed or replaced, since.
    """
    rng = random.Random(seed)
    directory = tmp_path / "t"
    generate(seed, directory)
    indexes = Indexes(directory, tmp_path / "shared")
    kinds = ["i8", "i32", "i64", "u64", "f32", "f64", "dec", "big_dec", "day", "ts", "ts_ms", "flag", "text"]
    made: dict[str, list[str]] = {}
    for n, columns in enumerate([*([k] for k in rng.sample(kinds, 4)), rng.sample(kinds, 2), ["text", "i32"]]):
        for kind in ("posting", "skip"):
            made[f"{kind}-{n}"] = columns
            indexes.build(f"{kind}-{n}", kind=kind, columns=columns, distinct=5, **({"bloom": n % 2 == 0}))
    files = sorted(directory.glob("p=*/*.parquet"))
    generate(seed + 100, tmp_path / "other", partitions=2)
    newer = sorted((tmp_path / "other").glob("p=*/*.parquet"))
    files[0].unlink()
    shutil.copyfile(newer[0], files[1])
    shutil.copyfile(newer[-1], directory / "p=2" / "newer.parquet")
    rows = rows_in(directory)
    for name, columns in made.items():
        present = [[row.get(c) for c in columns] for row in rng.sample(rows, min(3, len(rows)))]
        chosen: list[Any] = [key[0] if len(columns) == 1 else tuple(key) for key in present]
        if len(columns) == 1:
            chosen += [None, *([math.nan, 0.0, -0.0] if columns[0] in ("f32", "f64") else [])]
        else:
            chosen.append((None,) * len(columns))
        for keys in ([chosen[0]], chosen):
            assert looked_up(spark, directory, name, keys) == expected(rows, columns, keys), (name, columns, keys)
        found = find(str(directory), name, chosen)
        assert len(found.uncovered) == 2, (name, "what was replaced, and what came")
