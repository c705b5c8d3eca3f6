"""Which files have no key in common: held against the keys themselves."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distop.tables.reading import parquet_footers
from distop.tables.reading.file_facts import Chunk, FileFacts, Leaf
from distop_behaviors.validate.disjoint_files import components, ranges, spread

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
            # Bounds need not be values: those of texts are cut, those of manifests widened.
            bounds = (min(held) - below, max(held) + above) if held else (None, None)
            columns[column] = ("int", [Chunk(len(rows), len(rows) - len(held), *bounds)])
        made.append(facts(str(n), **columns))
    groups = components(made, [ranges(made, A), ranges(made, B)])
    assert sorted(f.path for group in groups for f in group) == sorted(f.path for f in made)
    seen: dict[tuple[int, int], int] = {}
    for number, group in enumerate(groups):
        for file in group:
            for key in files[int(file.path)]:
                if None not in key:
                    assert seen.setdefault(key, number) == number  # type: ignore[arg-type]


def test_ranges_that_touch_may_share_a_key() -> None:
    files = [facts("x", a=("int", of(0, 5))), facts("y", a=("int", of(5, 9))), facts("z", a=("int", of(10, 11)))]
    found = components(files, [ranges(files, A)])
    assert [[f.path for f in group] for group in found] == [["x", "y"], ["z"]]


@pytest.mark.parametrize(
    "unclear",
    [
        facts("u", a=("int", of(None, None))),
        facts("u", a=("int", of(30, 20))),
        facts("u", a=("other", of(30, 31))),
        facts("u", a=("float", of(30.0, 31.0))),  # nothing says how many are NaN
        facts("u", a=("float", of(30.0, 31.0, nans=1))),
        facts("u", a=("int", [*of(30, 31), *of(None, None)])),
        FileFacts("u", 10, {"a": "int"}),
    ],
)
def test_a_file_whose_values_may_be_anywhere_goes_with_all_others(unclear: FileFacts) -> None:
    files = [facts("x", a=("int", of(0, 5))), facts("y", a=("int", of(10, 11))), unclear]
    assert len(components(files, [ranges(files, A)])) == 1


def test_floats_without_nan_are_told_apart_and_zeros_of_both_signs_are_not() -> None:
    files = [facts("x", a=("float", of(-1.0, -0.0, nans=0))), facts("y", a=("float", of(0.0, 2.0, nans=0)))]
    assert len(components(files, [ranges(files, A)])) == 1
    files = [facts("x", a=("float", of(-1.0, -0.5, nans=0))), facts("y", a=("float", of(0.0, 2.0, nans=0)))]
    assert len(components(files, [ranges(files, A)])) == 2


def test_row_groups_of_nulls_alone_say_nothing() -> None:
    files = [facts("x", a=("int", [*of(0, 5), *of(None, None, nulls=10)])), facts("y", a=("int", of(6, 9)))]
    assert len(components(files, [ranges(files, A)])) == 2


def test_the_same_column_in_other_units_is_not_compared() -> None:
    files = [facts("x", a=("int", of(0, 5))), facts("y", a=("decimal", of(600, 900)))]
    assert ranges(files, A) == [None, None]


def test_texts_whose_bounds_are_cut_to_the_same_bytes_go_together(tmp_path: Any) -> None:
    wanted = frozenset({"a"})
    paths = []
    for n, text in enumerate(["p", "q"]):
        path = tmp_path / f"{n}.parquet"
        pq.write_table(pa.table({"a": ["seventeen-same-bytes-" + text * 2_000]}), path)
        paths.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
    found = parquet_footers.read_all(paths, wanted)
    assert all(isinstance(one, FileFacts) for one in found)
    files = [one for one in found if isinstance(one, FileFacts)]
    for one, text in zip(ranges(files, A), "pq", strict=True):
        assert one is None or one[0] <= ("seventeen-same-bytes-" + text * 2_000).encode() <= one[1]


def test_parts_are_even_or_there_are_none() -> None:
    files = [facts(str(n), a=("int", of(10 * n, 10 * n + 5))) for n in range(12)]
    columns = [ranges(files, A)]
    parts = spread(files, columns, lambda _: 10, 4, 1_000)
    assert sorted(len(part) for part in parts) == [3, 3, 3, 3]
    assert sorted(f.path for part in parts for f in part) == sorted(f.path for f in files)
    assert spread(files, columns, lambda f: 1_000 if f.path == "0" else 10, 4, 10_000) == []
    assert spread(files, columns, lambda _: 10, 4, 20) == []
    assert spread(files, columns, lambda _: 10, 13, 1_000) == []
    assert spread(files, [[None] * 12], lambda _: 10, 4, 1_000) == []
