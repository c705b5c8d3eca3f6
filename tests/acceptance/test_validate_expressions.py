"""CHECK expressions: their columns, refused expressions, and errors that affect no other check."""

from __future__ import annotations

import threading
import time
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import PartitionPlan
from distop.tables import plan_table
from distop_behaviors.validate import Validate
from distop_behaviors.validate.spark_errors import MAX_SENTENCE, is_unexpected
from tests.acceptance.checked import between
from tests.support.context import run_operation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.acceptance.checked import Table

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_a_check_without_columns_applies_to_every_row(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": [1, None]})
    table.add("p=2/a.parquet", {"x": [1]})
    checks = [{"check": c} for c in ("true", "1 = 1", "to_date('2020-01-02') > date'2020-01-01'", "1 = 2")]
    assert table.agrees(*checks) == [*[("valid", 0)] * 3, ("violated", 3)]
    assert table.agrees(*checks[:2]) == [("valid", 0)] * 2
    assert table.agrees(checks[3], where="1 = 2") == [("valid", 0)]
    samples = table.run(checks[3]).report["checks"][0]["samples"]
    assert [(s["partition"], s["row_index"], s["values"]) for s in samples] == [
        ("p=1", 0, {}),
        ("p=1", 1, {}),
        ("p=2", 0, {}),
    ]


WORDS = ["cancelled", "OutOfMemoryError"]
MORE_WORDS = ["interrupted", "Java gateway", "No space left"]


@pytest.mark.parametrize("word", [*WORDS, *(pytest.param(word, marks=pytest.mark.slow) for word in MORE_WORDS)])
def test_words_in_the_data_are_not_taken_for_errors_of_spark(table: Table, word: str) -> None:
    table.add("p=1/a.parquet", {"s": ["1", "2"], "x": [1, None]})
    table.add("p=2/a.parquet", {"s": ["1", word], "x": [None, None]})
    ran = table.run({"check": "cast(s AS int) > 0"}, {"not_null": "x"}, statistics="never")
    assert [(c["verdict"], c["violations"], c["exact"]) for c in ran.report["checks"]] == [
        ("error", 0, False),
        ("violated", 3, True),
    ]
    assert f"CAST_INVALID_INPUT] The value '{word}'" in ran.report["checks"][0]["error"]


def test_a_cancelled_spark_job_gives_no_verdict(spark: SparkSession) -> None:
    def cancel() -> None:
        deadline = time.monotonic() + 60
        while not spark.sparkContext.statusTracker().getActiveJobsIds() and time.monotonic() < deadline:
            pass
        spark.sparkContext.cancelAllJobs()

    cancelling = threading.Thread(target=cancel)
    cancelling.start()
    with pytest.raises(Exception, match="SPARK_JOB_CANCELLED") as caught:
        spark.range(10**12).where("id % 7 = 9").count()
    cancelling.join()
    assert is_unexpected(caught.value)


@pytest.mark.rotating
def test_a_large_check_finds_all_its_columns(table: Table) -> None:
    table.add("a.parquet", {"x": [1, 9_999, 3], "z": [1, 1, 5], "last": [1, 2, 3]})
    terms = " AND ".join(f"x <> {n}" for n in range(9_000, 9_700))
    assert table.agrees({"check": f"{terms} AND z <> 5 AND x <> 9999 AND last > 0"}) == [("violated", 2)]


@pytest.mark.parametrize("text", ["size(array(*)) = 2", "struct(table.*) IS NOT NULL", "coalesce(*) IS NOT NULL"])
def test_a_star_is_refused(table: Table, text: str) -> None:
    table.add("a.parquet", {"x": [1, 2], "y": [1, None]})
    ran = table.run({"check": text}, {"not_null": "y"})
    assert ran.report["checks"][0]["error"] == "the expression uses '*' instead of columns: name the columns"
    assert ran.report["checks"][1]["violations"] == 1
    assert table.run({"check": "x * 2 > 0 AND concat('*', y) <> '*'"}).report["verdict"] == "valid"


FAILING = {
    "analysis": "try_to_timestamp(x, 'MM-dd-yyyy') IS NOT NULL",
    "parser": f"{'(' * 5_000}x > 0{')' * 5_000}",
    "pattern": f"x RLIKE '{'(' * 20_000}{')' * 20_000}'",
    "task": "element_at(array(1, 2), cast(x + 7 AS int)) > 0",
    "depth": f"{' + '.join(['x'] * 3_000)} > 0",
}
"""Where Spark fails → an expression on which it fails there."""


STACK = (
    "a regular expression that repeats a group, such as (a|b)*, fails on a long text (java.lang.StackOverflowError): "
)
STACK += "use [ab]*"


@pytest.mark.rotating
@pytest.mark.parametrize("where", FAILING)
def test_an_expression_on_which_spark_fails_is_an_error_of_its_check_only(table: Table, where: str) -> None:
    for p in range(3):
        table.add(f"p={p}/a.parquet", {"x": [1, 2, -1], "s": ["a", None, "b"]})
    neighbours = ({"check": "x > 0"}, {"not_null": "s"}, between("x", -1, 2), {"check": "x + 1 > 1"})
    expected = [("violated", 3), ("violated", 3), ("valid", 0), ("violated", 3)]
    ran = table.run(*neighbours[:2], {"check": FAILING[where]}, *neighbours[2:], statistics="never")
    *others, failed = [*ran.report["checks"][:2], *ran.report["checks"][3:], ran.report["checks"][2]]
    assert [(check["verdict"], check["violations"]) for check in others] == expected
    assert all(check["exact"] and check["error"] is None for check in others)
    assert failed["verdict"] == "error"
    assert "\n" not in failed["error"]
    assert "\tat " not in failed["error"]
    assert len(failed["error"]) <= MAX_SENTENCE + 200


@pytest.mark.rotating
@pytest.mark.parametrize("statistics", ["auto", "never"])
def test_a_pattern_that_overflows_the_stack_is_an_error_of_its_check_only(table: Table, statistics: str) -> None:
    """Java matches a repeated alternative by recursion, one level for each character of the text."""
    for p in range(3):
        table.add(f"p={p}/a.parquet", {"x": [1, 2, -1], "s": ["a" * 200_000 if p == 1 else "a", None, "b"]})
    neighbours = ({"check": "x > 0"}, {"not_null": "s"}, between("x", -1, 2), {"check": "s RLIKE '^[ab]*$'"})
    ran = table.run({"check": "s RLIKE '^(a|b)*$'"}, *neighbours, statistics=statistics)
    failed, *others = ran.report["checks"]
    expected = [("violated", 3), ("violated", 3), ("valid", 0), ("valid", 0)]
    assert [(check["verdict"], check["violations"]) for check in others] == expected
    assert all(check["exact"] and check["error"] is None for check in others)
    assert failed["verdict"] == "error"
    assert failed["error"] == f"the files of partition p=1 cannot be checked: {STACK}"


def test_a_where_that_overflows_the_stack_is_reported_in_one_sentence(table: Table) -> None:
    table.add("p=1/a.parquet", {"x": [1, 2, -1], "s": ["a" * 200_000, None, "b"]})
    ran = table.run({"check": "x > 0"}, where="s RLIKE '^(a|b)*$'")
    assert ran.report["checks"][0]["verdict"] == "error"
    assert STACK in ran.report["checks"][0]["error"]


@pytest.mark.parametrize("where", ["analysis", "parser"])
def test_a_where_on_which_spark_fails_is_reported_in_one_sentence(table: Table, where: str) -> None:
    table.add("p=1/a.parquet", {"x": [1, 2, -1]})
    ran = table.run({"check": "x > 0"}, {"not_null": "x"}, where=FAILING[where])
    assert ran.message.startswith("where: ")
    assert "\n" not in ran.message
    assert len(ran.message) <= MAX_SENTENCE + 200


@pytest.mark.parametrize("text", ["rand() > 0.5", "java_method('java.lang.Math', 'abs', x) > 0", "uuid() > '0'"])
def test_nondeterministic_expressions_are_refused(table: Table, text: str) -> None:
    for p in range(3):
        table.add(f"p={p}/a.parquet", {"x": [1, 2, -1]})
    ran = table.run({"check": text}, {"check": "x > 0"})
    assert [c["verdict"] for c in ran.report["checks"]] == ["error", "violated"]
    assert ran.report["checks"][0]["error"].startswith("the expression uses ")
    assert ran.report["checks"][1]["violations"] == 3
    where = table.run({"not_null": "x"}, where=text)
    assert where.message.startswith("where: the expression uses ")


def test_a_damaged_file_in_an_escaped_folder_is_named(table: Table) -> None:
    for folder in ("ts=12%3A30", "ts=a b é%", "ts=100%2525"):
        table.add(f"{folder}/a.parquet", {"x": list(range(-1, 3000))})
        bad = table.add(f"{folder}/b.parquet", {"x": list(range(-1, 3000))}, compression="snappy")
        data = bytearray(bad.read_bytes())
        data[40:2000] = b"\xff" * 1960
        bad.write_bytes(data)
    ran = table.run({"check": "x >= 0"}, {"not_null": "x"})
    for name, outcome in ran.by_name.items():
        error = f"the file {table.directory / name / 'b.parquet'} cannot be read: it is damaged"
        assert outcome.result["checks"][0]["verdict"] == "error"
        assert error in outcome.error


def test_unreadable_samples_change_no_verdicts(table: Table) -> None:
    bad = table.add("p=1/a.parquet", {"x": [None, *range(3000)]}, compression="snappy")
    table.add("p=2/a.parquet", {"x": [None, 1]})
    data = bytearray(bad.read_bytes())
    data[40:2000] = b"\xff" * 1960
    bad.write_bytes(data)
    ran = table.run({"not_null": "x"})
    assert (ran.report["verdict"], ran.report["checks"][0]["violations"]) == ("violated", 2)


def test_an_invalid_partition_value_fails_checks_on_its_column_only(table: Table) -> None:
    table.options = {"partition_types": {"day": "int"}}
    table.add("day=1/h=1/a.parquet", {"x": [1, None]})
    table.add("day=abc/h=1/a.parquet", {"x": [1, None]})
    checks = [{"not_null": "x"}, {"not_null": "day"}, between("day", 0), {"check": "x > 0"}, {"check": "h = '1'"}]
    for mode in ("auto", "never"):
        ran = table.run(*checks, statistics=mode)
        assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [
            ("violated", 2),
            ("error", 0),
            ("error", 0),
            ("valid", 0),
            ("valid", 0),
        ]
        message = "the value 'abc' of the partition column 'day' is not a valid int (partition day=abc/h=1)"
        assert ran.report["checks"][1]["error"] == ran.report["checks"][2]["error"] == message
        assert ran.by_name["day=1/h=1"].result["checks"][2]["verdict"] == "valid"
    where = table.run({"not_null": "x"}, where="day > 0")
    assert where.report["checks"][0]["error"].startswith("where: the value 'abc' of the partition column 'day'")


def test_typed_partition_values_are_parsed(table: Table) -> None:
    table.options = {"partition_types": {"n": "decimal(9,2)", "t": "tinyint", "d": "date", "s": "timestamp"}}
    table.add("n=1.2/t=-5/d=2013-01-31/s=2013-01-31 12%3A00%3A00/a.parquet", {"x": [1]})
    assert (
        table.agrees(
            between("n", "1.2", "1.2"),
            between("t", -5, -5),
            between("d", "2013-01-31", "2013-01-31"),
            between("s", "2013-01-31 12:00:00", "2013-01-31 12:00:00"),
            {"check": "n = 1.2 AND t = -5 AND d = date'2013-01-31'"},
        )
        == [("valid", 0)] * 5
    )
    table.add("n=300/t=300/d=2013-02-01/s=2013-01-31/a.parquet", {"x": [1]})
    assert [v for v, _ in table.agrees(between("n", high=10), between("t", high=100))] == ["violated", "error"]


def test_a_file_that_spark_omits_is_an_error(table: Table) -> None:
    good = table.add("p=1/a.parquet", {"x": [1, -1]})
    left_out = table.add("p=2/b.parquet._COPYING_", {"x": [-1, None]})
    assert [p.name for p in plan_table(table.record).partitions] == ["p=1"]
    plans = [
        PartitionPlan(n, f"p={n + 1}", 1, ((str(f), f.stat().st_size, f.stat().st_mtime_ns),), values={"p": f"{n + 1}"})
        for n, f in enumerate((good, left_out))
    ]
    arg = {"checks": [{"check": "x > 0"}, {"not_null": "x"}]}
    ran = run_operation(Validate(), table.record, arg, table.context, partitions=plans)
    assert [c["verdict"] for c in ran.by_name["p=1"].result["checks"]] == ["violated", "valid"]
    assert f"Spark does not read the file {left_out}" in ran.by_name["p=2"].error
    assert [c["verdict"] for c in ran.by_name["p=2"].result["checks"]] == ["error", "violated"]


def test_dates_of_the_julian_calendar_are_read_as_in_spark(table: Table) -> None:
    data = {
        "d": pa.array([date(1000, 1, 1)]),
        "t": pa.array([datetime(1000, 1, 1, tzinfo=UTC)], pa.timestamp("us", "UTC")),
    }
    path = table.add("a.parquet", data)
    checks = [between(c, "1000-01-01", "1000-01-01") for c in data]
    assert table.agrees(*checks) == [("valid", 0)] * 2
    with pq.ParquetWriter(path, pa.table(data).schema, store_schema=False) as writer:
        writer.write_table(pa.table(data))
        writer.add_key_value_metadata({"org.apache.spark.version": "2.4.8"})
    assert table.agrees(*checks) == [("violated", 1)] * 2


def test_a_partition_with_an_empty_value_fails_alone(table: Table) -> None:
    table.add("c=/a.parquet", {"x": [1, None]})
    table.add("c=1/a.parquet", {"x": [1, None]})
    ran = table.run({"check": "c <> 'K'"}, {"not_null": "x"})
    assert [c["verdict"] for c in ran.by_name["c="].result["checks"]] == ["error", "violated"]
    assert [c["verdict"] for c in ran.by_name["c=1"].result["checks"]] == ["valid", "violated"]


def test_escaped_partition_values_are_unescaped(table: Table) -> None:
    table.options = {"partition_types": {"n": "int"}}
    for city in ("K%C3%B6ln", "Köln 2", "%E8%A1%A8%3A", "%E9"):
        table.add(f"c={city}/n=1/a.parquet", {"x": [1]})
    assert table.agrees(
        {"check": "c <> 'Köln'"},
        {"check": "c NOT IN ('Köln 2', '表:')"},
        {"in_set": {"column": "c", "values": ["Köln", "Köln 2", "表:"]}},
        between("n", 1, 1),
    ) == [("violated", 1), ("violated", 2), ("violated", 1), ("valid", 0)]
    sample = table.run({"check": "c <> 'Köln'"}).report["checks"][0]["samples"][0]
    assert (sample["partition"], sample["values"]) == ("c=K%C3%B6ln/n=1", {"c": "Köln"})
