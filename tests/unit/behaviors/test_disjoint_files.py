"""Groups of files without common keys, compared with the keys themselves."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distop.tables.reading import parquet_footers
from distop.tables.reading.file_facts import Chunk, FileFacts, Leaf
from distop_behaviors.validate.disjoint_files import disjoint_bins, disjoint_groups, value_ranges

A, B = ("a",), ("b",)


def facts(name: str, **columns: tuple[str, list[Chunk]]) -> FileFacts:
    leaves = {(c,): Leaf((c,), kind, kind) for c, (kind, _) in columns.items()}
    return FileFacts(name, 1, {}, leaves, {(c,): tuple(chunks) for c, (_, chunks) in columns.items()})


def of(low: Any, high: Any, **more: Any) -> list[Chunk]:
    return [Chunk(10, more.pop("nulls", 0), low, high, **more)]


VALUES = st.one_of(st.none(), st.integers(0, 12))
FILES = st.lists(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(FILES, st.integers(0, 3), st.integers(0, 3))
def test_no_key_is_in_two_groups(files: list[list[tuple[int | None, int | None]]], below: int, above: int) -> None:
    made = []
    for n, rows in enumerate(files):
        columns = {}
        for i, column in enumerate("ab"):
            held = [row[i] for row in rows if row[i] is not None]
            # Bounds need not be values: those of texts are truncated, those of manifests widened.
            bounds = (min(held) - below, max(held) + above) if held else (None, None)
            columns[column] = ("int", [Chunk(len(rows), len(rows) - len(held), *bounds)])
        made.append(facts(str(n), **columns))
    groups = disjoint_groups(made, [value_ranges(made, A), value_ranges(made, B)])
    assert sorted(f.path for group in groups for f in group) == sorted(f.path for f in made)
    seen: dict[tuple[int, int], int] = {}
    for number, group in enumerate(groups):
        for file in group:
            for key in files[int(file.path)]:
                if None not in key:
                    assert seen.setdefault(key, number) == number  # type: ignore[arg-type]


def test_ranges_that_touch_may_share_a_key() -> None:
    files = [facts("x", a=("int", of(0, 5))), facts("y", a=("int", of(5, 9))), facts("z", a=("int", of(10, 11)))]
    found = disjoint_groups(files, [value_ranges(files, A)])
    assert [[f.path for f in group] for group in found] == [["x", "y"], ["z"]]


@pytest.mark.parametrize(
    "unclear",
    [
        facts("u", a=("int", of(None, None))),
        facts("u", a=("int", of(30, 20))),
        facts("u", a=("other", of(30, 31))),
        facts("u", a=("float", of(30.0, 31.0))),  # the number of NaN is unknown
        facts("u", a=("float", of(30.0, 31.0, nans=1))),
        facts("u", a=("int", [*of(30, 31), *of(None, None)])),
        FileFacts("u", 10, {"a": "int"}),
    ],
)
def test_a_file_with_unknown_range_is_grouped_with_all_others(unclear: FileFacts) -> None:
    files = [facts("x", a=("int", of(0, 5))), facts("y", a=("int", of(10, 11))), unclear]
    assert len(disjoint_groups(files, [value_ranges(files, A)])) == 1


def test_floats_without_nan_are_grouped_by_range_and_both_zeros_are_equal() -> None:
    files = [facts("x", a=("float", of(-1.0, -0.0, nans=0))), facts("y", a=("float", of(0.0, 2.0, nans=0)))]
    assert len(disjoint_groups(files, [value_ranges(files, A)])) == 1
    files = [facts("x", a=("float", of(-1.0, -0.5, nans=0))), facts("y", a=("float", of(0.0, 2.0, nans=0)))]
    assert len(disjoint_groups(files, [value_ranges(files, A)])) == 2


def test_row_groups_of_nulls_only_do_not_affect_a_range() -> None:
    files = [facts("x", a=("int", [*of(0, 5), *of(None, None, nulls=10)])), facts("y", a=("int", of(6, 9)))]
    assert len(disjoint_groups(files, [value_ranges(files, A)])) == 2


def test_ranges_of_different_units_are_not_compared() -> None:
    files = [facts("x", a=("int", of(0, 5))), facts("y", a=("decimal", of(600, 900)))]
    assert value_ranges(files, A) == [None, None]


def test_texts_with_equal_truncated_bounds_are_in_one_group(tmp_path: Any) -> None:
    wanted = frozenset({"a"})
    paths = []
    for n, text in enumerate(["p", "q"]):
        path = tmp_path / f"{n}.parquet"
        pq.write_table(pa.table({"a": ["seventeen-same-bytes-" + text * 2_000]}), path)
        paths.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
    found = parquet_footers.read_all(paths, wanted)
    assert all(isinstance(one, FileFacts) for one in found)
    files = [one for one in found if isinstance(one, FileFacts)]
    for one, text in zip(value_ranges(files, A), "pq", strict=True):
        assert one is None or one[0] <= ("seventeen-same-bytes-" + text * 2_000).encode() <= one[1]


def test_bins_are_even_or_there_are_none() -> None:
    files = [facts(str(n), a=("int", of(10 * n, 10 * n + 5))) for n in range(12)]
    columns = [value_ranges(files, A)]
    parts = disjoint_bins(files, columns, lambda _: 10, 4, 1_000)
    assert sorted(len(part) for part in parts) == [3, 3, 3, 3]
    assert sorted(f.path for part in parts for f in part) == sorted(f.path for f in files)
    assert disjoint_bins(files, columns, lambda f: 1_000 if f.path == "0" else 10, 4, 10_000) == []
    assert disjoint_bins(files, columns, lambda _: 10, 4, 20) == []
    assert disjoint_bins(files, columns, lambda _: 10, 13, 1_000) == []
    assert disjoint_bins(files, [[None] * 12], lambda _: 10, 4, 1_000) == []
