"""Conditions of policies: their grammar, their units, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.errors import InvalidArgument
from distop.protocol import policy_condition
from distop.protocol.policy_condition import STATISTICS, dimension, parse

VALUES = {
    "files": 100.0,
    "small_files": 60.0,
    "bytes": 2.0**31,
    "delete_ratio": 0.05,
    "snapshots": 12.0,
    "oldest_snapshot": 6 * 86_400.0,
    "new_partitions": 0.0,
    "hours_since.compact": 7 * 3_600.0,
    "hours_since.remove-orphans": math.inf,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("small_files > 50", True),
        ("small_files>60", False),
        ("small_files >= 60 and files = 100", True),
        ("small_files > 60 or delete_ratio > 0.01", True),
        ("not small_files > 60", True),
        ("not (small_files > 50 or snapshots > 1)", False),
        ("not small_files > 50 and snapshots > 1", False),
        ("small_files > 50 or files < 0 and files < 0", True),
        ("(small_files > 50 or files < 0) and files < 0", False),
        ("bytes > 1GiB and bytes <= 2GiB", True),
        ("bytes > 1e9", True),
        ("oldest_snapshot > 5d", True),
        ("oldest_snapshot > 1w", False),
        ("144h == oldest_snapshot", True),
        ("hours_since.compact > 6", True),
        ("hours_since.compact > 8h", False),
        ("hours_since.remove-orphans > 1000000", True),
        ("10 < snapshots AND NOT snapshots != 12", True),
        ("small_files < files", True),
    ],
)
def test_a_condition_holds_or_not(text: str, holds: bool) -> None:
    assert parse(text).holds(VALUES) is holds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a statistic or a number is expected"),
        ("small_files", "a comparison"),
        ("small_files >", "a statistic or a number"),
        ("small_files > 5 or", "a statistic or a number"),
        ("small_files > 5 files > 1", "`and` or `or`"),
        ("(small_files > 5", r"`\)`"),
        ("small_files > 5)", "the end"),
        ("smal_files > 5", "did you mean 'small_files'"),
        ("hours_since. > 5", "names 'hours_since.'"),
        ("5 > 4", "must name a statistic"),
        ("oldest_snapshot > 5", "write 5h or 5d"),
        ("files > 5d", "not a duration"),
        ("files > 5MiB", "not a size"),
        ("bytes > 5MB", "unknown unit"),
        ("files > delete_ratio", "cannot be compared"),
        ("files > 5; import os", "cannot be read at ';"),
        ("__import__('os')", "cannot be read at"),
        ("not " * 100 + "files > 1", "nested more than"),
        ("(" * 100 + "files > 1" + ")" * 100, "nested more than"),
        ("files > 1 or " * 400 + "files > 1", "at most 2000"),
        ("and > 5", "a statistic or a number"),
    ],
)
def test_a_wrong_condition_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        parse(text)


def test_a_condition_names_its_statistics() -> None:
    found = parse("small_files > 50 or not (hours_since.compact < 6 and bytes > 1)").names()
    assert found == {"small_files", "hours_since.compact", "bytes"}
    assert {dimension(name) for name in STATISTICS} == set(STATISTICS.values())


OPERANDS = st.sampled_from(["files > 10", "files < 10", "snapshots >= 12", "delete_ratio > 1"])
CONDITIONS = st.recursive(
    OPERANDS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join),
        inner.map(lambda text: f"not ({text})"),
        inner.map(lambda text: f"({text})"),
    ),
    max_leaves=12,
)


@given(CONDITIONS)
def test_conditions_mean_what_python_says(text: str) -> None:
    assert parse(text).holds(VALUES) is bool(eval(text, {}, VALUES))  # the text is ours


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse(text)
    except InvalidArgument:
        return
    assert isinstance(found, policy_condition.Condition)
