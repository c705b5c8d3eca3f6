"""The planner of ``compact``: which files are rewritten together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from distop.tables.commits import Candidate
from distop_behaviors.compact.compact_argument import CompactArgument, sizes_of
from distop_behaviors.compact.file_groups import groups_of, outputs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop_behaviors.compact.file_groups import RewriteGroup

TARGET = 100
WANTED = CompactArgument(target_bytes=TARGET)


def files(*sizes: int, partition: str = "", deletes: int = 0) -> list[Candidate]:
    return [Candidate((f"{partition}/{n}", size, 0), partition, deletes) for n, size in enumerate(sizes)]


def groups(candidates: Sequence[Candidate], wanted: CompactArgument = WANTED) -> list[RewriteGroup]:
    return [group for found in groups_of(candidates, wanted).values() for group in found]


def sizes(group: RewriteGroup) -> list[int]:
    return [one.file[1] for one in group.files]


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ([], []),
        ([10], []),
        ([10] * 4, []),
        ([10] * 5, [[10] * 5]),
        ([75] * 9, []),
        ([74] * 9, [[74] * 9]),
        ([60, 60], [[60, 60]]),  # more than the target, and fewer files afterwards
        ([70, 70, 70], [[70, 70, 70]]),
        ([74, 74], [[74, 74]]),  # one file of 148
        ([180], []),
        ([181], [[181]]),
        ([10, 100, 10, 100, 10, 10, 10], [[10] * 5]),
    ],
)
def test_files_of_other_sizes_are_rewritten_if_that_helps(given_sizes: list[int], expected: list[list[int]]) -> None:
    assert [sizes(group) for group in groups(files(*given_sizes))] == expected


def test_partitions_are_not_mixed() -> None:
    found = groups([*files(*[10] * 5, partition="a"), *files(*[10] * 5, partition="b"), *files(10, partition="c")])
    assert [(group.partition, group.number, len(group.files)) for group in found] == [("a", 0, 5), ("b", 0, 5)]
    assert groups_of(files(10, partition="c"), WANTED) == {"c": []}


def test_files_with_deletes_are_rewritten_alone() -> None:
    wanted = CompactArgument(target_bytes=TARGET, deletes_at_least=2)
    assert [sizes(group) for group in groups(files(100, deletes=2), wanted)] == [[100]]
    assert groups(files(100, deletes=1), wanted) == []
    assert groups(files(100, deletes=2)) == []


@given(st.integers(1, 10**7))
def test_outputs_are_near_the_target(size: int) -> None:
    count = outputs_of(size, TARGET)
    if size >= 0.75 * TARGET:
        assert 0.75 <= size / count / TARGET <= 1.5


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 8), st.integers(1, 12))
def test_each_file_is_in_one_group_of_a_limited_size(found: list[int], least: int, targets: int) -> None:
    wanted = CompactArgument(target_bytes=TARGET, min_input_files=least, max_group_bytes=targets * TARGET)
    planned = groups(files(*found), wanted)
    paths = [one.file[0] for group in planned for one in group.files]
    assert len(set(paths)) == len(paths)
    for group in planned:
        assert len(group.files) == 1 or group.bytes <= targets * TARGET
        assert all(not 75 <= size <= 180 for size in sizes(group))
        if len(group.files) > 1:
            assert outputs_of(group.bytes, TARGET) < len(group.files) or max(sizes(group)) > 180


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(2, 8))
def test_a_second_plan_finds_nothing(found: list[int], least: int) -> None:
    """After the groups became files of equal sizes, no group is left, however often the table is compacted."""
    wanted = CompactArgument(target_bytes=TARGET, min_input_files=least)
    now, rounds = files(*found), 0
    while planned := groups(now, wanted):
        rounds += 1
        assert rounds <= 3, "small rests of groups may come together, but not for ever"
        old = {one.file[0] for group in planned for one in group.files}
        new = [size for group in planned for size in equal_parts(group.bytes)]
        kept = [one.file[1] for one in now if one.file[0] not in old]
        now = files(*kept, *new)


def equal_parts(size: int) -> list[int]:
    count = outputs_of(size, TARGET)
    return [size // count + (n < size % count) for n in range(count)]


def test_a_group_holds_a_whole_file() -> None:
    with pytest.raises(ValidationError, match="max_group_bytes must be at least target_bytes"):
        CompactArgument(target_bytes=TARGET, max_group_bytes=TARGET - 1)
    assert WANTED.group_bytes == 8 * TARGET


def test_sizes_are_counted_as_shares_of_the_target() -> None:
    found = sizes_of([1, 9, 10, 74, 75, 180, 181], TARGET)
    assert found.model_dump() == {
        "below_10_percent": 2,
        "below_75_percent": 2,
        "around_target": 2,
        "above_180_percent": 1,
    }
