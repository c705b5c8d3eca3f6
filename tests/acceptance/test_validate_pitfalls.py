"""A test for each pitfall of Parquet statistics and each invalid input; ``auto`` is compared with a full scan."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from distop.errors import TableUnavailable
from distop.tables import plan_table
from distop_behaviors.validate import Validate
from tests.acceptance.checked import Table, between
from tests.support.context import FakeContext, run_operation
from tests.support.footers import with_old_statistics
from tests.support.slow_cases import mostly_slow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.rotating]


def test_nan_is_above_every_bound_without_appearing_in_statistics(table: Table) -> None:
    table.add("a.parquet", {"x": pa.array([1.0, math.nan, 2.0, None])})
    assert table.agrees(between("x", 0, 5), between("x", 0), between("x", 3), between("x", high=0.5)) == [
        ("violated", 1),
        ("valid", 0),
        ("violated", 2),
        ("violated", 3),
    ]


def test_a_column_of_nan_only(table: Table) -> None:
    table.add("a.parquet", {"x": pa.array([math.nan, math.nan])})
    assert table.agrees(between("x", 0), between("x", high=9), {"not_null": "x"}) == [
        ("valid", 0),
        ("violated", 2),
        ("valid", 0),
    ]


def test_both_zeros_are_equal(table: Table) -> None:
    table.add("a.parquet", {"x": pa.array([-0.0, 0.0])})
    assert table.agrees(between("x", 0.0), between("x", high=-0.0)) == [("valid", 0), ("valid", 0)]


@pytest.mark.parametrize(
    ("where", "violations"),
    mostly_slow(
        [
            ("x > 100", 1),
            ("x = double('NaN')", 1),
            ("s.x >= 100 OR s.x = 0", 2),
            ("x <> 3 AND x <> 5", 2),
            ("NOT (x <= 5)", 1),
            ("x = 0.0D", 1),
            ("x IN (0.0D, 7.0D)", 1),
            ("g = 1 AND x = 0", 1),
        ],
        3,
    ),
)
def test_where_selects_rows_that_statistics_and_dictionaries_hide(table: Table, where: str, violations: int) -> None:
    """Parquet's reader skips rows by bounds, which omit NaN, and by dictionaries, in which zero has a sign."""
    for n, x in enumerate((math.nan, -0.0, 5.0)):
        values = pa.array([x, x, 3.0], pa.float64())
        key, inside = pa.array([None, n, n], pa.int64()), pa.StructArray.from_arrays([values], ["x"])
        table.add(f"g={n}/a.parquet", {"k": key, "x": values, "s": inside})
    checks = [{"not_null": "k"}, {"unique": "x"}]
    assert table.agrees(*checks, where=where) == [("violated", violations), ("violated", violations)]
    assert table.run(*checks, where=where).report["rows"] == 2 * violations


@pytest.mark.parametrize(
    "where",
    [
        "t < timestamp'1970-01-01 00:00:00.0005Z'",
        "t <> timestamp'1970-01-01 00:00:00.0005Z'",
        "NOT (t >= timestamp'1970-01-01 00:00:00.0005Z')",
        "t NOT IN (timestamp'1970-01-01 00:00:00.0005Z', timestamp'1980-01-01 00:00:00Z')",
    ],
)
def test_where_compares_milliseconds_with_the_exact_literal(table: Table, where: str) -> None:
    """For a file of milliseconds Spark truncates the literal, and skips rows by the truncated value."""
    table.add("a.parquet", {"k": [None, 1], "t": pa.array([0, 0], pa.timestamp("ms", "UTC"))})
    assert table.agrees({"not_null": "k"}, {"unique": "t"}, where=where) == [("violated", 1)] * 2


def test_a_time_below_a_bound_within_its_millisecond_has_a_sample(table: Table) -> None:
    table.add("a.parquet", {"t": pa.array([0, 0], pa.timestamp("ms", "UTC"))})
    (found,) = table.run(between("t", "1970-01-01T00:00:00.0005Z"), sample=1).report["checks"]
    assert (found["violations"], len(found["samples"])) == (2, 1)


@pytest.mark.parametrize(
    "check", [between("x", 0, 5), between("x", high=5), {"in_set": {"column": "x", "values": [1, 2]}}]
)
def test_a_violation_that_statistics_hide_has_a_sample(table: Table, check: dict[str, Any]) -> None:
    table.add("a.parquet", {"x": pa.array([1.0, math.nan, 2.0])})
    (found,) = table.run(check).report["checks"]
    assert (found["violations"], [s["row_index"] for s in found["samples"]]) == (1, [1])


def test_the_bounds_of_int96_timestamps_are_ignored(table: Table) -> None:
    times = pa.array([0, 10**15, None], pa.timestamp("us"))
    table.add("a.parquet", {"x": times}, use_deprecated_int96_timestamps=True)
    assert table.agrees(between("x", "1980-01-01"), {"not_null": "x"}) == [("violated", 1), ("violated", 1)]


@pytest.mark.parametrize("writer", ["parquet-mr version 1.8.1 (build x)", "parquet-mr", "impala version 2.0"])
def test_deprecated_bounds_are_used_for_signed_numbers_only(table: Table, writer: str) -> None:
    texts, whole, unsigned = ["aé", "aa", "b"], [-1, 5, None], pa.array([1, 2**31 + 5, 7], pa.uint32())
    path = table.add("a.parquet", {"t": texts, "n": whole, "u": unsigned})
    # Those writers compared bytes and unsigned numbers as signed ones.
    bounds = {"t": ("aé".encode(), b"b"), "u": ((2**31 + 5).to_bytes(4, "little"), (7).to_bytes(4, "little"))}
    with_old_statistics(path, bounds, writer)
    checks = [between("t", "ab"), between("t", "aa", "az"), between("u", 0, 100), between("n", -1, 5), between("n", 9)]
    assert table.agrees(*checks, {"not_null": "n"}) == [
        ("violated", 1),
        ("violated", 2),
        ("violated", 1),
        ("valid", 0),
        ("violated", 2),
        ("violated", 1),
    ]
    only = table.run(*checks, statistics="only")
    assert [c["verdict"] for c in only.report["checks"]] == [*["unknown"] * 3, "valid", "violated"]


@pytest.mark.parametrize("as_integer", [True, False])
def test_decimals_compare_as_numbers(table: Table, as_integer: bool) -> None:
    values = [Decimal("-1.00"), Decimal("1.00"), Decimal("300.00")]
    table.add("a.parquet", {"x": pa.array(values, pa.decimal128(9, 2))}, store_decimal_as_integer=as_integer)
    assert table.agrees(between("x", -1, 300), between("x", "-0.995"), between("x", high=299.99)) == [
        ("valid", 0),
        ("violated", 1),
        ("violated", 1),
    ]


def test_a_required_leaf_of_an_optional_struct_can_be_null(table: Table) -> None:
    kind = pa.struct([pa.field("leaf", pa.int32(), nullable=False)])
    table.add("a.parquet", {"s": pa.array([{"leaf": 1}, None], kind)})
    assert table.agrees({"not_null": "s.leaf"}, {"not_null": "s"}) == [("violated", 1), ("violated", 1)]


def test_a_leaf_with_required_parents_needs_no_scan(table: Table) -> None:
    inner = pa.struct([pa.field("leaf", pa.int32(), nullable=False)])
    schema = pa.schema([pa.field("s", inner, nullable=False)])
    table.add("a.parquet", pa.table([pa.array([{"leaf": 1}], inner)], schema))
    ran = table.run({"not_null": "s.leaf"}, statistics="only")
    assert ran.report["checks"][0]["verdict"] == "valid"


def test_null_counts_of_lists_are_of_their_elements(table: Table) -> None:
    table.add("a.parquet", {"x": pa.array([[1, None], [], None])})
    assert table.agrees({"not_null": "x"}) == [("violated", 1)]


def test_columns_are_found_by_name_in_any_order(table: Table) -> None:
    table.add("p=1/a.parquet", {"a": [1, 2], "b": [None, 5]})
    table.add("p=1/b.parquet", {"b": [3, 4], "c": [1, 1], "a": [None, 9]})
    table.add("p=2/a.parquet", {"B": [7, None]})
    assert table.agrees({"not_null": "a"}, {"not_null": "b"}, between("a", 0, 8), {"check": "b < 7"}) == [
        ("violated", 3),
        ("violated", 2),
        ("violated", 1),
        ("violated", 1),
    ]


def test_files_with_widened_types_are_compared_by_value(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": pa.array([1, 2], pa.int32()), "y": pa.array([1.5], pa.float32()).take([0, 0])})
    table.add("p=1/b.parquet", {"x": pa.array([2**40], pa.int64()), "y": pa.array([2.5], pa.float64())})
    assert table.agrees(between("x", 0, 10), between("y", 2), {"fits": {"column": "x", "type": "int"}}) == [
        ("violated", 1),
        ("violated", 2),
        ("violated", 1),
    ]


def test_a_file_with_an_incompatible_type_is_an_error_of_its_partition(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": [1, 2], "y": [1, 2]})
    odd = table.add("p=1/b.parquet", {"x": ["a"], "y": [3]})
    table.add("p=2/a.parquet", {"x": [4, -4], "y": [5, 6]})
    ran = table.run(between("x", 0), {"not_null": "y"})
    assert [c["verdict"] for c in ran.report["checks"]] == ["violated", "valid"]
    assert str(odd) in ran.by_name["p=1"].error
    assert ran.by_name["p=1"].result["checks"][0]["verdict"] == "error"
    assert ran.by_name["p=2"].result["checks"][0]["violations"] == 1


def test_files_without_rows_are_valid(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": pa.array([], pa.int32())})
    table.add("p=2/a.parquet", {"x": pa.array([1], pa.int32())})
    assert table.agrees({"not_null": "x"}, between("x", 0), {"check": "x > 0"}) == [("valid", 0)] * 3


def test_a_table_without_files_is_not_valid(table: Table) -> None:
    """A missing disk or removed data must not give the verdict valid."""
    table.directory.mkdir()
    with pytest.raises(TableUnavailable, match="is empty"):
        table.run({"not_null": "x"})
    ran = run_operation(Validate(), table.record, {"checks": [{"not_null": "x"}]}, table.context, partitions=[])
    assert (ran.report["verdict"], ran.report["rows"]) == ("error", 0)
    assert ran.message == "x_not_null: error: the table has no partition, so there is nothing to check"


def test_texts_with_seventeen_equal_leading_bytes_are_compared_correctly(table: Table) -> None:
    same = "0123456789abcdefg"
    table.add("a.parquet", {"x": [same + "1", same + "5", None]})
    assert table.agrees(
        between("x", same, same + "5"),
        between("x", same + "2"),
        between("x", high=same + "4"),
        between("x", "zzz"),
        {"in_set": {"column": "x", "values": [same]}},
    ) == [("valid", 0), ("violated", 1), ("violated", 1), ("violated", 2), ("violated", 2)]


def test_unsigned_numbers_above_two_to_the_63_are_compared_correctly(table: Table) -> None:
    table.add("a.parquet", {"x": pa.array([1, 2**63 + 5], pa.uint64()), "y": pa.array([1, 2**31 + 5], pa.uint32())})
    assert table.agrees(
        between("x", 0, 2**63),
        between("x", 0, 2**64),
        {"fits": {"column": "x", "type": "bigint"}},
        {"fits": {"column": "y", "type": "int"}},
        between("y", 0),
    ) == [("violated", 1), ("valid", 0), ("violated", 1), ("violated", 1), ("valid", 0)]


def test_files_without_statistics_are_scanned(table: Table) -> None:
    table.add("a.parquet", {"x": [1, None]}, write_statistics=False)
    assert table.agrees({"not_null": "x"}, between("x", 0)) == [("violated", 1), ("valid", 0)]
    only = table.run({"not_null": "x"}, between("x", 0), statistics="only")
    assert [c["verdict"] for c in only.report["checks"]] == ["unknown", "unknown"]


def test_all_columns_of_a_wide_table_can_be_checked(table: Table) -> None:
    table.add("a.parquet", {f"c{i}": [i, None if i == 149 else i] for i in range(150)})
    assert table.agrees({"not_null": "c149"}, {"not_null": "c120"}, between("c149", 149, 149)) == [
        ("violated", 1),
        ("valid", 0),
        ("valid", 0),
    ]


def test_partition_values_are_text_unless_typed(table: Table) -> None:
    table.add("d=01/t=a%3Ab/a.parquet", {"x": [1]})
    table.add("d=1/t=__HIVE_DEFAULT_PARTITION__/a.parquet", {"x": [1, 2]})
    assert table.agrees(
        {"in_set": {"column": "d", "values": ["01"]}},
        {"in_set": {"column": "t", "values": ["a:b"]}},
        {"not_null": "t"},
        {"check": "d = '01' OR x > 1"},
    ) == [("violated", 2), ("valid", 0), ("violated", 2), ("violated", 1)]
    table.options = {"partition_types": {"d": "int"}}
    assert table.agrees(between("d", 1, 1), {"check": "d = 1"}) == [("valid", 0), ("valid", 0)]


def test_columns_and_files_with_odd_names_are_checked(table: Table) -> None:
    odd = ["a.b", "x y", "it`s", "表", "😀", "100%", "*"]
    path = table.add("k=a %25{*}[x]/f *é.parquet", {name: [1, None] for name in odd})
    ran = table.run(*({"not_null": name} for name in odd), {"check": "`a.b` > 5 AND `表` > 0"}, statistics="never")
    assert [c["violations"] for c in ran.report["checks"]] == [1] * 8
    assert {s["file"] for c in ran.report["checks"] for s in c["samples"]} == {str(path)}
    assert ran.report["checks"][7]["samples"][0]["values"] == {"a.b": 1, "表": 1}


def test_times_are_utc_and_samples_are_plain_json(table: Table) -> None:
    data = {
        "t": pa.array([10**15 + 1], pa.timestamp("us", "UTC")),
        "d": pa.array([0], pa.date32()),
        "n": pa.array([Decimal("1.50")], pa.decimal128(9, 2)),
        "f": pa.array([math.inf]),
        "b": pa.array([b"\x00\xff"]),
        "s": pa.array(["x" * 1000]),
    }
    table.add("a.parquet", data)
    ran = table.run({"check": "t IS NULL AND d > '1' AND n > 0 AND f > 0 AND b IS NULL AND s > ''"})
    values = ran.report["checks"][0]["samples"][0]["values"]
    assert values.pop("s").startswith("xxx")
    assert values == {"t": "2001-09-09 01:46:40.000001", "d": "1970-01-01", "n": "1.50", "f": "Infinity", "b": "00FF"}
    assert table.agrees(between("t", high="2001-09-09T01:46:40.000001Z"), between("t", high="2001-09-09 01:46:40")) == [
        ("valid", 0),
        ("violated", 1),
    ]


def test_null_is_decides_whether_null_violates_a_check(table: Table) -> None:
    table.add("a.parquet", {"x": [1, None, -1]})
    assert table.agrees({"check": "x > 0"}) == [("violated", 1)]
    assert table.agrees({"check": "x > 0"}, null_is="fail") == [("violated", 2)]


def test_counting_stops_at_max_violations(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": [None] * 9})
    table.add("p=2/a.parquet", {"x": [None, 1]})
    check = table.run({"not_null": "x"}, max_violations=5).report["checks"][0]
    assert (check["verdict"], check["violations"], check["exact"]) == ("violated", 5, False)
    check = table.run({"not_null": "x"}, max_violations=50, sample=0).report["checks"][0]
    assert (check["violations"], check["exact"], check["samples"]) == (10, True, [])


def test_a_column_missing_in_some_files_is_null_and_in_all_files_an_error(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": [1]})
    table.add("p=2/a.parquet", {"x": [1], "y": [2]})
    ran = table.run(
        {"not_null": "y"}, {"not_null": "nope"}, {"check": "y > 1"}, {"check": "nope > 1"}, {"not_null": "x"}
    )
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [
        ("violated", 1),
        ("error", 0),
        ("valid", 0),
        ("error", 0),
        ("valid", 0),
    ]
    assert "has the column 'nope'" in ran.report["checks"][1]["error"]


def test_an_invalid_check_is_an_error_of_this_check_only(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": [1, -1], "t": ["a", "b"]})
    ran = table.run(
        {"check": "x >"},
        {"check": "x + 1"},
        {"check": "sum(x) > 1"},
        {"check": "no_such_function(x) > 1"},
        between("t", 1),
        {"length": {"column": "x", "max": 1}},
        {"matches": {"column": "t", "pattern": "("}},
        {"check": "x > 0", "name": "good"},
    )
    assert [c["verdict"] for c in ran.report["checks"]] == ["error"] * 7 + ["violated"]
    assert ran.report["verdict"] == "violated"
    assert "parse" in ran.report["checks"][0]["error"]
    assert all("\n" not in c["error"] for c in ran.report["checks"][:7])
    errors = [c["error"] for c in ran.report["checks"]]
    assert errors[1] == "the expression is of type bigint, not boolean"
    assert "uses 'sum', which is not on the list" in errors[2]
    assert "no_such_function" in errors[3]
    assert not any("coalesce" in e for e in errors[:7])


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("x + 1", "the expression is of type bigint, not boolean"),
        ("max(x) > 1", "uses 'max', which is not on the list"),
        ("t", "the expression is of type string, not boolean"),
        ("no_such_function(x)", "no_such_function"),
        ("x >", "cannot parse the expression"),
    ],
)
def test_an_invalid_where_is_reported_once(table: Table, where: str, words: str) -> None:
    table.add("a.parquet", {"x": [1, -1], "t": ["a", "b"]})
    ran = table.run({"not_null": "x"}, {"check": "x > 0"}, where=where)
    assert ran.message.startswith("where: ")
    assert ran.message.count(words) == 1
    assert {c["error"] for c in ran.report["checks"]} == {ran.message}
    assert all(c["evidence"]["files_scanned"] == 0 for c in ran.report["checks"])


def test_a_where_on_an_unknown_column_is_an_error_without_a_scan(table: Table) -> None:
    for p in range(3):
        table.add(f"p={p}/a.parquet", {"a": [1, None]})
    ran = table.run({"not_null": "a"}, where="nope > 1")
    assert ran.message == "where: none of the table's files has the column 'nope'"
    assert ran.report["rows"] is None
    assert ran.report["checks"][0]["evidence"] == {"files_statistics": 0, "files_scanned": 0}


def test_a_where_on_a_column_missing_in_some_files_selects_no_rows_there(table: Table) -> None:
    table.add("p=1/a.parquet", {"a": [1, None], "flag": [True, True]})
    table.add("p=2/a.parquet", {"a": [None, None]})
    assert table.agrees({"not_null": "a"}, {"check": "flag"}, where="flag") == [("violated", 1), ("valid", 0)]


def test_a_missing_column_is_named_beside_a_corrupt_file(table: Table) -> None:
    table.add("p=1/a.parquet", {"a": [1]})
    table.add("p=2/a.parquet", {"a": [1]}).write_bytes(b"\0" * 500)
    error = table.run({"not_null": "zz"}).report["checks"][0]["error"]
    assert error.startswith("none of the files that could be read has the column 'zz'; ")
    assert "p=2/a.parquet" in error


def test_validate_without_a_table_is_refused(table: Table) -> None:
    from distop.behavior import OperationFailed, PartitionPlan, Summary
    from distop.errors import InvalidArgument

    arg, ctx = {"checks": [{"not_null": "a"}]}, table.context(None)
    with pytest.raises(InvalidArgument, match="validate needs a table"):
        Validate().start_or_resume_job(arg, PartitionPlan(0, "whole"), ctx)
    with pytest.raises(OperationFailed, match="validate needs a table"):
        Validate().complete_operation(arg, None, Summary("failed", 1, 0, 1), ctx)


def test_a_check_that_throws_is_an_error_of_its_partition_only(table: Table) -> None:
    for p in range(6):
        table.add(f"p={p}/a.parquet", {"x": [1, 2, 0 if p == 3 else 5], "y": [1, -1, 1]})
    bad = {"check": "10 / x < 10", "name": "divides"}
    good = {"check": "y > 0", "name": "good"}
    ran = table.run(bad, good)
    verdicts = {n: [c["verdict"] for c in o.result["checks"]] for n, o in ran.by_name.items()}
    assert verdicts == {f"p={p}": ["error" if p == 3 else "violated", "violated"] for p in range(6)}
    assert "DIVIDE_BY_ZERO" in ran.by_name["p=3"].error
    assert "fails on 1 row of the file" in ran.by_name["p=3"].error
    assert "p=3/a.parquet" in ran.by_name["p=3"].error
    assert ran.report["checks"][1]["violations"] == 6
    assert len(ran.report["checks"][1]["samples"]) == 6
    where = table.run(good, where="10 / x > 0")
    assert where.by_name["p=3"].result["verdict"] == "error"
    assert where.by_name["p=2"].result["verdict"] == "violated"


def test_missing_changed_and_damaged_files_are_errors_of_their_partitions(table: Table) -> None:
    paths = {}
    for name in ("good", "gone", "cut", "changed", "rubbish"):
        paths[name] = table.add(f"p={name}/a.parquet", {"x": list(range(-1, 2000)), "y": ["text"] * 2001})
    plans = plan_table(table.record).partitions
    paths["gone"].unlink()
    os.truncate(paths["cut"], 200)
    os.utime(paths["changed"], ns=(1, 1))
    paths["rubbish"].write_bytes(b"\0" * 500)
    fresh = {p.name: p for p in plan_table(table.record).partitions}
    plans = [fresh[p.name] if p.name in ("p=cut", "p=rubbish") else p for p in plans]
    plans = [replace(plan, partition=n) for n, plan in enumerate(plans)]
    for check in (between("x", 0), {"check": "x >= 0"}, {"check": "length(y) > 0 AND x >= 0"}):
        ran = run_operation(Validate(), table.record, {"checks": [check]}, table.context, partitions=plans)
        verdicts = {n: o.result["verdict"] for n, o in ran.by_name.items()}
        assert verdicts.pop("p=good") == "violated"
        assert set(verdicts.values()) == {"error"}
        for name in ("gone", "cut", "changed", "rubbish"):
            assert str(paths[name]) in ran.by_name[f"p={name}"].error
        assert ran.report["verdict"] == "violated"
        assert ran.report["checks"][0]["violations"] == 1


def test_a_file_with_corrupt_pages_and_a_valid_footer_is_an_error(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": list(range(-1, 3000))})
    bad = table.add("p=2/a.parquet", {"x": list(range(-1, 3000))}, compression="snappy")
    data = bytearray(bad.read_bytes())
    data[40:2000] = b"\xff" * 1960
    bad.write_bytes(data)
    ran = table.run({"check": "x >= 0"}, {"not_null": "x"})
    assert ran.by_name["p=1"].result["verdict"] == "violated"
    assert ran.by_name["p=2"].result["checks"][0]["verdict"] == "error"
    assert str(bad) in ran.by_name["p=2"].error


def test_a_column_of_a_type_that_spark_cannot_read_is_decided_by_statistics_or_an_error(table: Table) -> None:
    table.add("a.parquet", {"t": pa.array([1, None], pa.timestamp("ns")), "x": [1, 2]})
    ran = table.run({"not_null": "t"}, between("t", "2000-01-01"), {"check": "x > 0"}, {"check": "t IS NULL"})
    assert [c["verdict"] for c in ran.report["checks"]] == ["violated", "error", "valid", "error"]
    assert "nanoseconds" in ran.report["checks"][1]["error"]


def test_a_cancelled_job_raises_job_cancelled(table: Table) -> None:
    from distop.behavior import JobCancelled

    table.add("a.parquet", {"x": [1, None]})
    ctx = table.context(table.record)
    ctx.stopped = True
    plan = plan_table(table.record).partitions[0]
    with pytest.raises(JobCancelled):
        Validate().start_or_resume_job({"checks": [{"check": "x > 0"}]}, plan, ctx)


def test_a_result_stays_below_64_kib(table: Table) -> None:
    from distop.protocol.jobs import MAX_OUTCOME_BYTES
    from distop.protocol.json_codec import dumps

    table.add("a.parquet", {"x": ["😀" * 400] * 500})
    checks = [{"matches": {"column": "x", "pattern": f"{i}$"}, "name": f"n{i}"} for i in range(10)]
    ran = table.run(*checks, sample=400)
    assert len(dumps(ran.outcomes[0].result)) < MAX_OUTCOME_BYTES * 0.9
    assert all(c["violations"] == 500 for c in ran.report["checks"])


def test_unpartitioned_tables_are_split_into_groups_of_files(table: Table) -> None:
    for n in range(5):
        table.add(f"part-{n}.parquet", {"x": [n, None]})
    table.options = {"group_files": 2}
    assert len(plan_table(replace(table.record)).partitions) == 3
    assert table.agrees({"not_null": "x"}, between("x", 0, 3)) == [("violated", 5), ("violated", 1)]


def test_local_paths_are_local_with_any_default_file_system_of_spark(table: Table, spark: SparkSession) -> None:
    elsewhere = spark.newSession()
    elsewhere.conf.set("fs.defaultFS", "hdfs://nowhere.invalid:8020")
    table.context = lambda record: FakeContext(table.directory.parent / "work", record, elsewhere)
    table.options["partition_types"] = {"k": "string"}
    table.add("k=a b%20#c/one two.parquet", {"x": [1, 2, None]})
    assert table.agrees({"not_null": "x"}, {"check": "k = 'a b #c'"}) == [("violated", 1), ("valid", 0)]


def test_a_cached_query_reads_the_files_again(table: Table) -> None:
    """The file has the same size and time as before, but the shuffle of the first run must not be used again."""
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    path = table.add("a.parquet", {"a": [1, 2, 3, 4]}, **plain)
    check, before = {"range": {"column": "a", "min": 0}}, path.stat()
    assert table.run(check, statistics="never").report["checks"][0]["violations"] == 0
    table.add("a.parquet", {"a": [1, -2, -3, 4]}, **plain)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert table.run(check, statistics="never").report["checks"][0]["violations"] == 2
