"""Decisions by statistics, rounding of bounds, and names of columns. No Spark."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distop.behavior import PartitionPlan
from distop.errors import InvalidArgument
from distop.tables.reading import footer_facts
from distop.tables.reading.file_facts import (
    Ambiguous,
    Chunk,
    FileFacts,
    Leaf,
    folded,
    match,
    resolve,
    split_path,
    widest,
)
from distop_behaviors.validate import statistics
from distop_behaviors.validate.certificate import columns_in_expression
from distop_behaviors.validate.partition_checks import Preparation
from distop_behaviors.validate.partition_state import Names
from distop_behaviors.validate.statistics import PASS, UNKNOWN, StatisticsDecision, decide, for_some_rows, merged_facts
from distop_behaviors.validate.typed_bounds import (
    Bound,
    Unfit,
    bound_for,
    canonical,
    check_path_value,
    exact_number,
    set_member,
)
from distop_behaviors.validate.validate_argument import Argument, Check
from scripts.validate_oracle.random_tables import generate
from scripts.validate_oracle.row_oracle import mistakes
from tests.support.context import FakeContext

if TYPE_CHECKING:
    from pathlib import Path

INT = Leaf(("x",), "int", "int", 32)
TEXT = Leaf(("x",), "string", "string")
FLOAT = Leaf(("x",), "float", "double")


def judge(check: dict[str, Any], *chunks: Chunk, leaf: Leaf = INT) -> StatisticsDecision:
    facts = FileFacts("f", sum(c.rows for c in chunks), {"x": leaf.type}, {("x",): leaf}, {("x",): chunks})
    return decide(Check.model_validate(check), facts)


def between(low: Any = None, high: Any = None) -> dict[str, Any]:
    return {"range": {"column": "x", **{k: v for k, v in (("min", low), ("max", high)) if v is not None}}}


@pytest.mark.parametrize(
    ("check", "chunks", "leaf", "expected"),
    [
        ({"not_null": "x"}, [Chunk(5, 0)], INT, PASS),
        ({"not_null": "x"}, [Chunk(5, 0), Chunk(5, None)], INT, UNKNOWN),
        ({"not_null": "x"}, [Chunk(5, 2), Chunk(5, 1)], INT, StatisticsDecision("violated", 3)),
        ({"not_null": "x"}, [Chunk(5, 2), Chunk(5, None)], INT, StatisticsDecision("violated", 2, exact=False)),
        ({"not_null": "x"}, [Chunk(5, None)], Leaf(("x",), "int", "int", optional=False), PASS),
        (between(0, 9), [Chunk(5, 0, 0, 9)], INT, PASS),
        (between(0, 9), [Chunk(5, None, 0, 9)], INT, PASS),
        (between(0, 9), [Chunk(5, 0)], INT, UNKNOWN),
        (between(0, 9), [Chunk(5, 5)], INT, PASS),
        (between(0, 9), [Chunk(5, 0, 0, 10)], INT, StatisticsDecision("violated", 1, exact=False)),
        (between(0, 9), [Chunk(5, 1, 10, 20)], INT, StatisticsDecision("violated", 4)),
        (between(0, 9), [Chunk(5, None, 10, 20)], INT, StatisticsDecision("violated", 1, exact=False)),
        (between(0.5, 9.5), [Chunk(5, 0, 1, 9)], INT, PASS),
        # Text bounds may be cut off: they prove that all pass or all fail, never that some row does.
        (between("b", "y"), [Chunk(5, 0, b"a", b"z")], TEXT, UNKNOWN),
        (between("b", "y"), [Chunk(5, 0, b"c", b"d")], TEXT, PASS),
        (between("b", "y"), [Chunk(5, 0, b"z", b"zz")], TEXT, StatisticsDecision("violated", 5)),
        # NaN hides above the maximum.
        (between(0.0, 9.0), [Chunk(5, 0, 1.0, 2.0)], FLOAT, UNKNOWN),
        (between(0.0), [Chunk(5, 0, 1.0, 2.0)], FLOAT, PASS),
        (between(5.0), [Chunk(5, 0, 1.0, 2.0)], FLOAT, StatisticsDecision("violated", 1, exact=False)),
        (between(5.0, 9.0), [Chunk(5, 0, 1.0, 2.0)], FLOAT, StatisticsDecision("violated", 5)),
        (between(0.0), [Chunk(5, 0, math.nan, math.nan)], FLOAT, UNKNOWN),
        ({"length": {"column": "x", "max": 9}}, [Chunk(5, 0, b"a", b"b")], TEXT, UNKNOWN),
        ({"length": {"column": "x", "max": 9}}, [Chunk(5, 5)], TEXT, PASS),
        ({"matches": {"column": "x", "pattern": "a"}}, [Chunk(5, 0, b"a", b"a")], TEXT, UNKNOWN),
        ({"in_set": {"column": "x", "values": [3]}}, [Chunk(5, 0, 3, 3)], INT, PASS),
        ({"in_set": {"column": "x", "values": [3, 9]}}, [Chunk(5, 0, 3, 9)], INT, UNKNOWN),
        ({"in_set": {"column": "x", "values": [3]}}, [Chunk(5, 1, 4, 9)], INT, StatisticsDecision("violated", 4)),
        (
            {"in_set": {"column": "x", "values": [3, 8]}},
            [Chunk(5, 0, 3, 9)],
            INT,
            StatisticsDecision("violated", 1, exact=False),
        ),
        ({"fits": {"column": "x", "type": "smallint"}}, [Chunk(5, 0, -32768, 32767)], INT, PASS),
        (
            {"fits": {"column": "x", "type": "smallint"}},
            [Chunk(5, 0, 0, 32768)],
            INT,
            StatisticsDecision("violated", 1, exact=False),
        ),
        ({"fits": {"column": "x", "type": "bigint"}}, [Chunk(5, 0)], INT, UNKNOWN),
        ({"fits": {"column": "x", "type": "int"}}, [Chunk(5, 0)], INT, PASS),
        ({"fits": {"column": "x", "type": "float"}}, [Chunk(5, 0, 0, 1 << 24)], INT, PASS),
        ({"fits": {"column": "x", "type": "float"}}, [Chunk(5, 0, 0, (1 << 24) + 1)], INT, UNKNOWN),
        ({"fits": {"column": "x", "type": "string"}}, [Chunk(5, 0, 1, 2)], INT, UNKNOWN),
        (between("a", "b"), [Chunk(5, 0, 1, 2)], INT, UNKNOWN),
    ],
)
def test_decisions_by_statistics(
    check: dict[str, Any], chunks: list[Chunk], leaf: Leaf, expected: StatisticsDecision
) -> None:
    assert judge(check, *chunks, leaf=leaf) == expected


@pytest.mark.parametrize(
    ("leaf", "settled"),
    [
        (Leaf(("x",), "date", "date", 32), -141_427),
        (Leaf(("x",), "timestamp", "timestamp", 64, 6), -2_208_988_800_000_000),
        (Leaf(("x",), "timestamp", "timestamp", 64, 3), -2_208_988_800_000),
    ],
)
def test_bounds_of_the_julian_calendar_prove_nothing(leaf: Leaf, settled: int) -> None:
    check = between("0001-01-01", "9999-12-31")
    assert judge(check, Chunk(5, 0, settled, settled + 9), leaf=leaf) == PASS
    assert judge(check, Chunk(5, 0, settled - 1, settled + 9), leaf=leaf) == UNKNOWN


def test_a_file_without_rows_passes_and_a_missing_column_is_null() -> None:
    empty = FileFacts("f", 0)
    other = FileFacts("f", 7, {"y": "int"})
    assert decide(Check(not_null="x"), empty) == PASS
    assert decide(Check(not_null="x"), other) == StatisticsDecision("violated", 7)
    assert decide(Check.model_validate(between(0, 1)), other) == PASS


def test_null_counts_in_structs_are_not_used() -> None:
    leaf = Leaf(("s", "x"), "int", "int", 32)
    facts = FileFacts("f", 5, {"s": ("struct", (("x", "int"),))}, {leaf.path: leaf}, {leaf.path: (Chunk(5, 0, 1, 2),)})
    assert decide(Check(not_null="s.x"), facts) == UNKNOWN
    assert decide(Check.model_validate({"range": {"column": "s.x", "max": 5}}), facts) == PASS
    low = decide(Check.model_validate({"range": {"column": "s.x", "max": 0}}), facts)
    assert low == StatisticsDecision("violated", 1, exact=False)


def test_with_where_statistics_prove_only_a_pass() -> None:
    assert for_some_rows(PASS) == PASS
    assert for_some_rows(StatisticsDecision("violated", 5)) == UNKNOWN


@given(st.lists(st.lists(st.none() | st.integers(-20, 20), min_size=1, max_size=6), max_size=4), st.data())
def test_statistics_prove_only_true_statements(groups: list[list[int | None]], data: st.DataObject) -> None:
    chunks = []
    for rows in groups:
        known = [r for r in rows if r is not None]
        bounds = (min(known), max(known)) if known and data.draw(st.booleans()) else (None, None)
        nulls = len(rows) - len(known) if data.draw(st.booleans()) else None
        chunks.append(Chunk(len(rows), nulls, *bounds))
    low, high = sorted((data.draw(st.integers(-21, 21)), data.draw(st.integers(-21, 21))))
    values = data.draw(st.lists(st.integers(-20, 20), min_size=1, max_size=5))
    rows = [r for group in groups for r in group]
    for check, actual in (
        ({"not_null": "x"}, sum(r is None for r in rows)),
        (between(low, high), sum(r is not None and not low <= r <= high for r in rows)),
        ({"in_set": {"column": "x", "values": values}}, sum(r is not None and r not in values for r in rows)),
    ):
        found = judge(check, *chunks)
        if found.verdict == "pass":
            assert actual == 0
        if found.verdict == "violated":
            assert found.violations == actual if found.exact else 0 < found.violations <= actual


def chunks_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Chunk]:
    """Chunks of a footer: with or without counts and bounds, or with invalid bounds."""
    numbers = st.none() | st.sampled_from([0, 0, 1, 5])
    bound = st.none() | values
    return st.builds(Chunk, st.just(5), numbers, bound, bound, numbers)


@given(st.data())
def test_a_check_that_merged_statistics_pass_is_passed_by_each_file(data: st.DataObject) -> None:
    leaf, values = data.draw(
        st.sampled_from(
            [
                (INT, st.integers(-4, 4)),
                (FLOAT, st.sampled_from([-4.0, -0.0, 0.0, 2.5, math.nan, math.inf])),
                (TEXT, st.sampled_from([b"Z", b"a", b"b", b"ba"])),
                (Leaf(("x",), "date", "date", 32), st.sampled_from([-200_000, 0, 1])),
                (Leaf(("x",), "int", "int", 32, optional=False), st.integers(-4, 4)),
            ]
        )
    )
    made = data.draw(st.lists(st.lists(chunks_of(values), max_size=2), min_size=1, max_size=4))
    columns, leaves = {"x": leaf.type}, {("x",): leaf}
    files = [
        FileFacts(f"f{n}", sum(c.rows for c in chunks), columns, leaves, {("x",): tuple(chunks)} if known else {})
        for n, chunks in enumerate(made)
        for known in [data.draw(st.integers(0, 3)) > 0]
    ]
    ends: dict[str, tuple[Any, Any]] = {"string": ("a", "b"), "date": ("1969-01-01", "1971-01-01")}
    for given_check in (
        {"not_null": "x"},
        between(*ends.get(leaf.type, (-3, 3))),
        between(ends.get(leaf.type, (-3, 3))[0]),
        {"fits": {"column": "x", "type": "smallint"}},
        {"length": {"column": "x", "max": 1}},
        *([{"in_set": {"column": "x", "values": [1, 2]}}] if leaf.kind == "int" else []),
    ):
        check = Check.model_validate(given_check)
        if decide(check, merged_facts(files)).verdict == "pass":
            assert {decide(check, facts).verdict for facts in files} == {"pass"}


@pytest.mark.parametrize(
    ("leaf", "odd"),
    [
        (INT, Chunk(5, 0, -4, 0)),
        (INT, Chunk(5, 0, 0, 4)),
        (INT, Chunk(5, 0)),
        (INT, Chunk(5, 0, 1, 0)),
        (FLOAT, Chunk(5, 0, math.nan, math.nan, 0)),
        (FLOAT, Chunk(5, 0, 0.0, 1.0, 1)),
        (FLOAT, Chunk(5, 0, 0.0, 1.0)),
    ],
)
def test_merged_statistics_do_not_pass_if_one_file_does_not(leaf: Leaf, odd: Chunk) -> None:
    check = Check.model_validate(between(-3, 3))
    plain, other = (
        FileFacts(f, 5, {"x": leaf.type}, {("x",): leaf}, {("x",): (chunk,)})
        for f, chunk in (("plain", Chunk(5, 0, -3, 3, 0)), ("odd", odd))
    )
    assert decide(check, merged_facts([plain, plain])) == decide(check, plain) == PASS
    assert decide(check, other) != PASS
    assert decide(check, merged_facts([plain, other])) != PASS
    assert decide(check, merged_facts([other, plain])) != PASS


def test_files_of_one_schema_are_decided_together() -> None:
    """For a check that all files pass, but not for one that a file violates."""
    columns, leaves = {"x": "int"}, {("x",): INT}
    files = [FileFacts(f"f{n}", 5, columns, leaves, {("x",): (Chunk(5, 0, n, n + 1),)}) for n in range(50)]
    assert decide(Check.model_validate(between(0, 50)), merged_facts(files)) == PASS
    argument = Argument.model_validate({"checks": [{"not_null": "x"}, between(0, 50), between(0, 49)]})
    preparation = Preparation(argument, Names((("x",),) * 3), {})
    preparation.merge(files)
    asked = []
    plain = statistics.decide
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "decide", lambda *given: asked.append(given) or plain(*given))
        parts = [preparation.prepare(PartitionPlan(n, str(n)), [facts]) for n, facts in enumerate(files)]
    assert [part.tallies[0].by_statistics + part.tallies[1].by_statistics for part in parts] == [2] * 50
    assert [bool(part.tallies[2].pending) for part in parts] == [False] * 49 + [True]
    assert len(asked) == 3 + 50, "once for all files, and for each file if that did not pass"


@pytest.mark.parametrize(
    "first",
    [*range(0, 250, 50), *(pytest.param(first, marks=pytest.mark.slow) for first in range(250, 500, 50))],
    ids=lambda n: f"seeds={n}-{n + 49}",
)
def test_statistics_alone_make_no_mistakes_on_generated_tables(first: int, tmp_path: Path) -> None:
    found = {}
    for seed in range(first, first + 50):
        made = generate(seed, tmp_path / str(seed), partitions=3)
        found[seed] = mistakes(made, lambda table: FakeContext(tmp_path, table), "only")
    assert {seed: lines for seed, lines in found.items() if lines} == {}


def test_bounds_are_rounded_inwards() -> None:
    assert bound_for(0.5, "int", up=True) == Bound(1)
    assert bound_for("0.5", "bigint", up=False) == Bound(0)
    assert bound_for("-0.995", "decimal(9,2)", up=True) == Bound(-99, 2)
    assert bound_for(0.1, "decimal(9,2)", up=False) == Bound(10, 2)
    assert bound_for("2013-01-01 12:00", "date", up=True) == Bound(15_707)
    assert bound_for("1970-01-01T01:00:00.5+01:00", "timestamp", up=True) == Bound(500_000, 6)
    assert bound_for(2**53 + 1, "double", up=True).value == 2.0**53 + 2
    assert bound_for(10**400, "double", up=False).value == math.inf
    assert bound_for("inf", "double", up=False).value == math.inf


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_double_bound_never_moves_outwards(value: float) -> None:
    up, down = bound_for(value, "double", up=True).value, bound_for(value, "double", up=False).value
    assert up == math.inf or up == -math.inf or Fraction(up) >= exact_number(value)
    assert down in (math.inf, -math.inf) or Fraction(down) <= exact_number(value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("x", "int"),
        (True, "int"),
        (1, "string"),
        ("NaN", "double"),
        ("monday", "date"),
        (5, "timestamp"),
        (1, "boolean"),
    ],
)
def test_bounds_of_another_type_are_refused(value: Any, kind: str) -> None:
    with pytest.raises(Unfit):
        bound_for(value, kind, up=True)


@pytest.mark.parametrize("kind", ["decimal(38,999999999)", "decimal(39,0)", "decimal(9,10)"])
def test_hole_9_a_column_type_that_spark_does_not_have_is_refused(kind: str) -> None:
    with pytest.raises(InvalidArgument, match="Spark has no type"):
        bound_for("1", kind, up=True)


@pytest.mark.parametrize("kind", ["int", "decimal(38,10)"])
@pytest.mark.parametrize("value", ["1E999999999", "-1E-999999999", "0E999999999", "9" * 1_001])
def test_hole_9_a_bound_with_too_many_digits_is_refused(value: str, kind: str) -> None:
    """Its exact fraction would take hours and gigabytes, and block all threads of the process."""
    with pytest.raises(Unfit, match="is too long|is out of range"):
        bound_for(value, kind, up=True)
    with pytest.raises(Unfit, match="is too long|is out of range"):
        set_member(value, kind)
    assert bound_for("1E400", kind, up=False).value == 10 ** (400 + (0 if kind == "int" else 10))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("int", ["0", "-5", "+5", "007", "2147483647"], ["", "abc", "1.0", "2147483648", " 5", "1e3", "\u0665"]),
        ("tinyint", ["127", "-128"], ["128", "300"]),
        ("decimal(9,2)", ["1", "1.2", "-.5", "1.500"], ["1.234", "12345678", "1e3", "NaN", "9" * 300]),
        ("double", ["1", "-1.5e-3", "NaN", "-Infinity"], ["", "1.5d", "0x1p3", "one"]),
        ("boolean", ["true", "FALSE"], ["1", "yes", ""]),
        ("date", ["2013-01-31", "2013-1-5"], ["2013-02-30", "2013-01-31 12:00", "31.1.2013", "20130131"]),
        ("timestamp", ["2013-01-31", "2013-01-31 12:00:00", "2013-01-31T12:00:00.5Z"], ["2013-01-31 25:00", "12:00"]),
        ("string", ["", "abc"], []),
    ],
)
def test_values_in_paths_must_fit_their_type(kind: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        check_path_value("p", text, kind)
    for text in bad:
        with pytest.raises(Unfit, match="partition column 'p' is not a valid "):
            check_path_value("p", text, kind)


def test_members_that_a_column_cannot_hold_are_ignored() -> None:
    assert set_member(0.5, "int") is None
    assert set_member("1.505", "decimal(9,2)") is None
    assert set_member(True, "boolean") == Bound(True)
    with pytest.raises(Unfit):
        set_member(1, "boolean")


def test_names_are_resolved_to_paths_of_columns() -> None:
    columns = {"A": "int", "a.b": "int", "s": ("struct", (("x.y", "int"), ("Z", "int")))}
    assert resolve("a", columns) == ("A",)
    assert resolve("a.b", columns) == ("a.b",)
    assert resolve("s.`x.y`", columns) == ("s", "x.y")
    assert resolve("S.z", columns) == ("s", "Z")
    assert resolve("s.nope", columns) is None
    assert split_path("`a``b`.c") == ("a`b", "c")
    with pytest.raises(Ambiguous):
        match("ab", ["AB", "aB"])


SIMILAR = [("s", "S"), ("\u017f", "s"), ("k", "\u212a"), ("i", "\u0130"), ("i", "\u0131"), ("\u03c2", "\u03a3")]
SIMILAR += [("\u1f80", "\u1f88"), ("\u00b5", "\u03bc"), ("\U00010400", "\U00010428")]


@pytest.mark.parametrize(("one", "other"), SIMILAR)
def test_names_are_compared_by_java_s_rule(one: str, other: str) -> None:
    """Each pair is equal by ``equalsIgnoreCase`` of Java 17.

    Spark also compares in lower case, so a name that matches by only one of both rules is refused.
    """
    assert folded(f"a{one}b") == folded(f"a{other}b")
    if one.lower() == other.lower():
        assert match(f"a{one}", ["b", f"a{other}"]) == f"a{other}"
    else:
        for asked, column in ((one, other), (other, one)):
            with pytest.raises(Ambiguous, match="may or may not match"):
                match(asked, ["b", column])
            assert match(asked, [asked, column]) == asked


@pytest.mark.parametrize(("one", "other"), [("\u00df", "ss"), ("\ufb01", "fi"), ("\u0149", "n"), ("\u1fb3", "\u03b1")])
def test_names_that_are_equal_only_in_python_s_upper_case_are_different(one: str, other: str) -> None:
    assert folded(one) != folded(other)
    assert match(one, [other]) is None


def test_a_name_that_is_the_same_only_in_lower_case_is_ambiguous() -> None:
    assert ("\u0130").lower() == "i\u0307"
    with pytest.raises(Ambiguous, match="may or may not match"):
        match("\u0130", ["i\u0307"])
    with pytest.raises(Ambiguous, match="matches both"):
        match("s\u017f", ["SS", "Ss"])


def test_a_column_is_found_in_an_expression_by_java_s_rule() -> None:
    assert columns_in_expression("\u017f > 0 and \u212a = 1", ["s", "k", "i"]) == ["s", "k"]


def test_the_common_type_of_columns_is_the_widest() -> None:
    assert widest("smallint", "bigint") == "bigint"
    assert widest("float", "double") == "double"
    assert widest("decimal(9,2)", "decimal(10,1)") == "decimal(11,2)"
    assert widest(("struct", (("a", "int"),)), ("struct", (("b", "int"), ("a", "bigint")))) == (
        "struct",
        (("a", "bigint"), ("b", "int")),
    )
    for pair in (
        ("int", "string"),
        ("date", "timestamp"),
        (("array", "int"), ("array", "string")),
        ("int", ("array", "int")),
    ):
        assert widest(*pair) is None
    assert canonical(" Numeric( 9 , 2 )") == "decimal(9,2)"


def test_bounds_of_decimals_in_bytes_are_trusted_only_of_writers_that_compare_numbers() -> None:
    for writer in (
        "parquet-cpp-arrow version 22.0.0",
        "parquet-mr version 1.15.2 (build x)",
        "parquet-rs version 55.0.0",
    ):
        assert footer_facts._SIGNED_ORDER.match(writer)
    for writer in ("", "parquet-mr", "parquet-mr version 1.8.1", "impala version 2.0", "parquet-cpp version 1.2.0"):
        assert not footer_facts._SIGNED_ORDER.match(writer)


@pytest.mark.parametrize("column", ["x", "nowhere"])
@pytest.mark.parametrize("kind", ["not_null", "range", "fits", "in_set", "length", "matches"])
def test_statistics_decide_nothing_for_a_file_without_row_count(kind: str, column: str) -> None:
    """A format may know only the columns of a file, and not even whether it has a row."""
    spec: dict[str, Any] = {
        "not_null": column,
        "range": {"column": column, "min": 0},
        "fits": {"column": column, "type": "tinyint"},
        "in_set": {"column": column, "values": [1]},
        "length": {"column": column, "min": 1},
        "matches": {"column": column, "pattern": "x"},
    }
    facts = FileFacts("f", None, {"x": "int"}, {("x",): Leaf(("x",), "int", "int")}, {("x",): (Chunk(0, 0),)})
    assert decide(Check.model_validate({kind: spec[kind]}), facts) is UNKNOWN
    assert facts.live_rows is None
