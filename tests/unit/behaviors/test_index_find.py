"""Files that an index names: all files with a key, for all types; a posting index no others."""

from __future__ import annotations

import math
import random
import shutil
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.errors import InvalidArgument, NotFound
from distop_behaviors.index import file_summaries, key_lookup, key_values, postings
from distop_behaviors.index.key_lookup import find
from scripts.validate_oracle.random_tables import generate
from tests.support.index_runs import Indexes, data_of
from tests.support.slow_cases import mostly_slow

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ["i8", "i16", "i32", "i64", "u64", "f32", "f64", "dec", "big_dec", "day", "ts", "ts_ms", "flag", "text"]


def same(value: Any, key: Any) -> bool:
    """Equality of lookups: NULL equals NULL, and NaN equals NaN."""
    if isinstance(value, float) and isinstance(key, float) and math.isnan(value):
        return math.isnan(key)
    return bool(value == key) and (value is None) == (key is None)


def having(rows: list[dict[str, Any]], columns: list[str], keys: list[tuple[Any, ...]]) -> bool:
    return any(all(same(row.get(c), k) for c, k in zip(columns, key, strict=True)) for key in keys for row in rows)


def test_lookup_is_imported_on_first_use() -> None:
    from distop_behaviors import index

    assert index.lookup is key_lookup.lookup
    with pytest.raises(AttributeError, match="has no attribute 'look'"):
        index.look  # noqa: B018


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows make many row groups, runs and levels."""
    for name, rows in {"GROUP_ROWS": 8, "RUN_ROWS": 32, "LEVEL_ROWS": 128}.items():
        monkeypatch.setattr(postings, name, rows)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", mostly_slow(range(8), 3))
def test_an_index_names_every_file_with_a_key(seed: int, tmp_path: Path) -> None:
    """Before and after some files were removed, replaced and added, and again once the index was refreshed."""
    rng = random.Random(seed)
    directory = tmp_path / "t"
    generate(seed, directory)
    generate(seed + 100, tmp_path / "other", partitions=2)
    indexes = Indexes(directory, tmp_path / "shared")
    made = {
        f"{kind}-{n}": (kind, columns)
        for n, columns in enumerate([*([k] for k in rng.sample(KINDS, 3)), rng.sample(KINDS, 2), rng.sample(KINDS, 3)])
        for kind in ("posting", "skip")
    }
    settings = {"skip": {"distinct": rng.choice([0, 3, 1000]), "bloom": rng.random() < 0.5}, "posting": {}}
    for name, (kind, columns) in made.items():
        indexes.build(name, kind=kind, columns=columns, **settings[kind])
    files = sorted(directory.glob("p=*/*.parquet"))
    newer = sorted((tmp_path / "other").glob("p=*/*.parquet"))
    for step in ("as built", "changed", "refreshed"):
        if step == "changed":
            files[0].unlink()
            shutil.copyfile(newer[0], files[1])
            shutil.copyfile(newer[-1], files[-1].with_name("newer.parquet"))
        rows = {str(p): pq.ParquetFile(p).read().to_pylist() for p in directory.glob("p=*/*.parquet")}
        for name, (kind, columns) in made.items():
            if step == "refreshed":
                indexes.build(name, kind=kind, columns=columns, **settings[kind])
            everything = [row for some in rows.values() for row in some]
            keys = [tuple(row.get(c) for c in columns) for row in rng.sample(everything, min(2, len(everything)))]
            keys += [(None,) * len(columns), *([(math.nan,), (-0.0,)] if columns[0] in ("f32", "f64") else [])]
            keys = [key for key in keys if len(key) == len(columns)]
            found = find(str(directory), name, [key[0] if len(key) == 1 else key for key in keys])
            assert len(found.uncovered) == (2 if step == "changed" else 0)
            read = {f[0] for f in found.files}
            have = {path for path, some in rows.items() if having(some, columns, keys)}
            assert have <= read, (step, name, columns, keys)
            if kind == "posting" and (len(columns) == 1 or not any(None in key for key in keys)):
                named = {f[0] for f in found.named}
                assert named == have - {f[0] for f in found.uncovered}, (step, name, columns, keys)


def test_a_skip_index_accepts_keys_of_some_of_its_columns(tmp_path: Path) -> None:
    table = tmp_path / "t"
    table.mkdir()
    for n in range(4):
        many = pa.array([f"{n}-{i}" for i in range(2000)])
        pq.write_table(pa.table({"a": pa.array([n] * 2000), "b": many}), table / f"{n}.parquet")
    indexes = Indexes(table, tmp_path / "shared")
    report = indexes.build("s", kind="skip", columns=["a", "b"], bloom=True)
    assert (report.files, report.rows) == (4, 8000)

    def named(*keys: Any) -> list[str]:
        return [f[0][-9:] for f in find(str(table), "s", keys).named]

    assert named({"a": 2}) == ["2.parquet"]
    assert named({"b": "3-77"}, {"b": "1-1999"}) == ["1.parquet", "3.parquet"]
    assert named({"b": "1-77", "a": 2}) == [], "no file has both"
    assert named((2, "2-5")) == ["2.parquet"]
    assert named({"b": "nowhere"}) == []
    with pytest.raises(InvalidArgument, match="must have exactly the columns a"):
        named({"a": 1}, {"b": "x"})
    summary = pq.ParquetFile(next((data_of(indexes.folder("s"))).glob("*-files-*.parquet"))).read().to_pylist()[0]
    assert (summary["a.min"], summary["a.max"], summary["a.values"], summary["b.nulls"]) == (0, 0, [0], 0)
    assert summary["b.values"] is None, "there are more values than are kept"


NOON = datetime(2020, 1, 2)  # noqa: DTZ001 -- without a zone
EARLIER = datetime(2020, 1, 2, 1, tzinfo=timezone(timedelta(hours=1)))
PRICE = pa.array([Decimal("1.50")], pa.decimal128(9, 2))


@pytest.mark.parametrize(
    ("kind", "array", "good", "nowhere", "bad"),
    [
        ("int", pa.array([5], pa.int8()), [5], [300, -1], [5.0, "5", True]),
        ("double", pa.array([5.0]), [5, 5.0], [4], ["5", True]),
        ("float", pa.array([0.1], pa.float32()), [0.1], [1e300], []),
        ("decimal", PRICE, [Decimal("1.5"), "1.50"], ["1.505", 10**8], [1.5, "x"]),
        ("date", pa.array([date(2020, 1, 2)]), [date(2020, 1, 2), "2020-01-02"], ["2020-01-03"], [NOON, 1]),
        (
            "timestamp",
            pa.array([NOON], pa.timestamp("ms", "UTC")),
            [NOON, "2020-01-02", EARLIER],
            ["2020-01-02T00:00:01"],
            [date(2020, 1, 2)],
        ),
        (
            "timestamp_ntz",
            pa.array([NOON], pa.timestamp("us")),
            [NOON, "2020-01-02"],
            [],
            ["2020-01-02T00:00:00Z"],
        ),
        ("text", pa.array(["a"]), ["a"], ["b", ""], [b"a", 1, "\ud800"]),
        ("binary", pa.array([b"a"]), [b"a"], [b"b"], ["a"]),
    ],
)
def test_keys_must_be_values_of_their_column(
    kind: str, array: Any, good: list[Any], nowhere: list[Any], bad: list[Any], tmp_path: Path
) -> None:
    table = tmp_path / "t"
    table.mkdir()
    pq.write_table(pa.table({"c": array}), table / "0.parquet")
    Indexes(table, tmp_path / "shared").build(columns=["c"])
    assert [len(find(str(table), "i", [key]).named) for key in good] == [1] * len(good), kind
    assert [len(find(str(table), "i", [key]).named) for key in nowhere] == [0] * len(nowhere), kind
    for key in bad:
        with pytest.raises(InvalidArgument, match="is not a value of the column 'c'"):
            find(str(table), "i", [key])


def test_types_that_widen_later_do_not_hide_a_row(tmp_path: Path) -> None:
    """Some files have whole numbers, later ones decimals or doubles: the keys are values of the wider type."""
    table = tmp_path / "t"
    table.mkdir()
    pq.write_table(pa.table({"c": pa.array([1, 7], pa.int32())}), table / "0.parquet")
    pq.write_table(pa.table({"c": pa.array([7], pa.int16())}), table / "1.parquet")
    indexes = Indexes(table, tmp_path / "shared")
    indexes.build(columns=["c"])
    pq.write_table(pa.table({"c": pa.array([1.5, 7.0])}), table / "2.parquet")
    assert [f[0][-9:] for f in find(str(table), "i", [7.0]).files] == ["0.parquet", "1.parquet", "2.parquet"]
    assert [f[0][-9:] for f in find(str(table), "i", [1.5]).files] == ["2.parquet"]
    report = indexes.build(columns=["c"])
    assert report.not_indexed[0].why == "its columns are float, but the columns of the index are int"
    assert [f[0][-9:] for f in find(str(table), "i", [1.5]).uncovered] == ["2.parquet"]


def test_ancient_days_are_left_to_spark(tmp_path: Path) -> None:
    table = tmp_path / "t"
    table.mkdir()
    pq.write_table(pa.table({"c": pa.array([date(1500, 1, 1), date(2000, 1, 1)])}), table / "0.parquet")
    pq.write_table(pa.table({"c": pa.array([date(2000, 1, 1)])}), table / "1.parquet")
    report = Indexes(table, tmp_path / "shared").build(columns=["c"])
    assert "days before 15 October 1582" in report.not_indexed[0].why
    assert [f[0][-9:] for f in find(str(table), "i", [date(1500, 1, 1)]).files] == ["0.parquet"]


def test_a_bloom_filter_finds_its_values_and_few_others() -> None:
    numbers = key_values.hash_numbers(key_values.numbers(pa.array(range(5_000)), "int"))
    made = file_summaries.build_filter(numbers)
    assert all(file_summaries.may_hold(made, int(n)) for n in numbers)
    others = key_values.hash_numbers(key_values.numbers(pa.array(range(10_000, 20_000)), "int"))
    assert sum(file_summaries.may_hold(made, int(n)) for n in others) < 300


def test_truncated_or_invalid_texts_exclude_no_file(tmp_path: Path) -> None:
    """The lower bound of a truncated text has whole characters; invalid bytes give no bound."""
    table = tmp_path / "t"
    table.mkdir()
    between = "a\u00c0"
    texts = {
        "odd": [b"a\x80" + "\u00e9".encode() * 127, between.encode()],
        "long": [b"a" + "\u00e9".encode() * 200, b"b"],
        "exact": ["\u00e9".encode() * 128, "\u00ea".encode()],
    }
    assert len(texts["odd"][0]) == 256
    for name, some in texts.items():
        pq.write_table(pa.table({"c": pa.array(some, pa.binary()).view(pa.string())}), table / f"{name}.parquet")
    indexes = Indexes(table, tmp_path / "shared")
    indexes.build(kind="skip", columns=["c"], distinct=0)
    assert [f[0][-11:] for f in find(str(table), "i", [between]).named] == ["odd.parquet"]
    rows = pq.ParquetFile(next(data_of(indexes.folder()).glob("*-files-*.parquet"))).read().to_pylist()
    low = {row["path"]: row["c.min"] for row in rows}
    assert low["odd.parquet"] is None
    assert low["long.parquet"] == "a" + "\u00e9" * 127, "255 bytes: the next character would be cut"
    assert low["exact.parquet"] == "\u00e9" * 128


def test_a_lookup_without_index_or_table_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "t"
    table.mkdir()
    pq.write_table(pa.table({"c": [1]}), table / "0.parquet")
    with pytest.raises(NotFound, match="has no index 'i'"):
        find(str(table), "i", [1])
