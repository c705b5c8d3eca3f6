"""Conditions on partition columns."""

from __future__ import annotations

import itertools
import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.errors import InvalidArgument
from distop.tables.partition_condition import PartitionCondition

COLUMNS = {
    "day": "date",
    "country": "string",
    "n": "int",
    "price": "double",
    "amount": "decimal(10,2)",
    "flag": "boolean",
    "at": "timestamp",
}


def holds(text: str, **values: str | None) -> bool:
    return PartitionCondition(text, COLUMNS, "t").holds(values)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("day >= '2026-01-01' and country = 'DE'", {"day": "2026-01-01", "country": "DE"}, True),
        ("day >= '2026-01-01' and country = 'DE'", {"day": "2025-12-31", "country": "DE"}, False),
        ("day >= '2026-01-01' or country = 'DE'", {"day": "2025-12-31", "country": "DE"}, True),
        ("n < 10", {"n": "9"}, True),
        ("n < 10", {"n": "11"}, False),
        ("10 > n", {"n": "9"}, True),
        ("n between 2 and 4", {"n": "4"}, True),
        ("n in (1, 2)", {"n": "2"}, True),
        ("n not in (1, 2)", {"n": "2"}, False),
        ("country like 'D%'", {"country": "DE"}, True),
        ("country not like 'D%'", {"country": "DE"}, False),
        ("country > 'DE'", {"country": "FR"}, True),
        ("price > 1.5", {"price": "2"}, True),
        ("amount = 1.50", {"amount": "1.5"}, True),
        ("flag = true", {"flag": "true"}, True),
        ("at < '2026-01-01T12:00:00'", {"at": "2026-01-01 11:59:59"}, True),
        ("DAY = '2026-01-01'", {"day": "2026-01-01"}, True),
        ("\"day\" = '2026-01-01'", {"day": "2026-01-01"}, True),
        ("country = 'it''s'", {"country": "it's"}, True),
        # NULL, a value of another type (which Spark reads as NULL), and a column that the files are not partitioned by.
        ("n is null", {"n": None}, True),
        ("n is null", {"n": "x"}, True),
        ("n is null", {}, False),
        ("n is not null", {"n": None}, False),
        ("not (n = 1)", {"n": None}, False),
        ("n <> 1 or country = 'DE'", {"n": None, "country": "DE"}, True),
        ("not (n = 1 and country = 'FR')", {"n": None, "country": "DE"}, True),
        ("not (n = 1)", {}, False),
        ("n = 1", {"other": "1"}, False),
    ],
)
def test_a_condition_holds_for_values(text: str, values: dict[str, str | None], expected: bool) -> None:
    assert holds(text, **values) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contry = 'DE'", r"where names 'contry', which is not a partition column of the table 't'.*did you mean"),
        ("total > 3", "its partition columns: day, country"),
        ("true", "where needs a condition on partition columns"),
        ("day = 3", "where compares 'day', whose type is date, with 3"),
        ("day = '2026-13-01'", "whose type is date, with '2026-13-01'"),
        ("country = 3", "write a text in single quotes"),
        ("n = 'x'", "whose type is int, with 'x'"),
        ("flag = 1", "whose type is boolean"),
        ("n like '1%'", "whose type is int, with '1'|which is not text"),
        ("country like 'a%b'", "only supports wildcard"),
        ("n =", "where cannot be read at"),
        ("n = 1 and", "where cannot be read at"),
        ("n = 1; drop table t", "where cannot be read at '; drop table t'"),
        ("exists (select 1)", "where cannot be read"),
        ("upper(country) = 'DE'", "where cannot be read"),
        ("(" * 30 + "n = 1" + ")" * 30, "nested more than 20 times"),
        ("n = 1 or " * 300 + "n = 1", "at most 2000 are allowed"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        holds(text)


COMPARISON = st.builds(
    "{} {} {}".format,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["<", "<=", ">", ">=", "=", "<>"]),
    st.integers(0, 3),
)
CONDITION = st.recursive(
    st.one_of(COMPARISON, st.sampled_from(["a is null", "b is not null", "a in (1, 2)", "b not in (0, 3)"])),
    lambda inner: st.one_of(
        st.builds("({}) and ({})".format, inner, inner),
        st.builds("({}) or ({})".format, inner, inner),
        st.builds("not ({})".format, inner),
    ),
    max_leaves=6,
)


@given(CONDITION)
def test_the_meaning_is_that_of_sql(text: str) -> None:
    values: list[Any] = [None, 0, 1, 2, 3]
    condition = PartitionCondition(text, {"a": "int", "b": "bigint"}, "t")
    with sqlite3.connect(":memory:") as sql:
        for a, b in itertools.product(values, values):
            (expected,) = sql.execute(f"select ({text}) from (select ? as a, ? as b)", (a, b)).fetchone()
            found = condition.holds({"a": None if a is None else str(a), "b": None if b is None else str(b)})
            assert found is bool(expected), (text, a, b)
