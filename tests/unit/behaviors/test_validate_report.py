"""How partitions' results are stored and become the report. No Spark."""

from __future__ import annotations

import json

import pytest

from distop.protocol.jobs import MAX_OUTCOME_BYTES
from distop_behaviors.validate.partition_result import Answer, CheckResult, Result, Sample, bounded
from distop_behaviors.validate.validate_argument import MAX_CHECKS, Argument
from distop_behaviors.validate.validate_report import combine, sentence


def result(*checks: CheckResult, rows: int | None = 10) -> Result:
    return Result(verdict="valid", rows=rows, checks=list(checks))


def test_the_report_sums_up_all_partitions() -> None:
    argument = Argument.model_validate({"checks": [{"not_null": "x"}], "sample": 2})
    sample = Sample(partition="p", file="f", row_index=1, values={"x": None})
    bad = CheckResult(verdict="violated", violations=3, samples=[sample] * 3, files_statistics=1)
    fine = CheckResult(files_scanned=2)
    report = combine(argument, [("a", result(bad)), ("b", result(fine)), ("c", result(bad))], complete=True)
    assert (report.verdict, report.rows) == ("violated", 30)
    check = report.checks[0]
    assert (check.violations, check.exact, len(check.samples)) == (6, True, 2)
    assert (check.evidence.files_statistics, check.evidence.files_scanned) == (2, 2)
    assert combine(argument, [("a", result(fine)), ("b", "it crashed")], complete=True).checks[0].error == (
        "partition b: it crashed"
    )
    assert combine(argument, [("a", result(fine))], complete=False).verdict == "unknown"
    half = combine(
        argument, [("a", result(bad)), ("b", result(CheckResult(verdict="error", error="e")))], complete=True
    )
    assert (half.verdict, half.checks[0].exact, half.checks[0].error) == ("violated", False, "e")


def test_a_missing_column_is_an_error_only_if_no_partition_has_it() -> None:
    argument = Argument.model_validate({"checks": [{"check": "x + y > 1"}]})
    without = [("a", result(CheckResult(missing=["x"]))), ("b", result(CheckResult(missing=["y"])))]
    assert combine(argument, without, complete=True).verdict == "valid"
    nowhere = [*without[:1], ("b", result(CheckResult(missing=["y", "x"])))]
    assert combine(argument, nowhere, complete=True).checks[0].error == "none of the table's files has the column 'x'"


def test_without_partitions_each_check_is_an_error() -> None:
    argument = Argument.model_validate({"checks": [{"not_null": "never"}, {"check": "x > 1"}], "where": "y > 0"})
    report = combine(argument, [], complete=True)
    assert (report.verdict, report.rows) == ("error", 0)
    message = "the table has no partition, so there is nothing to check"
    assert [(c.verdict, c.error, c.exact) for c in report.checks] == [("error", message, False)] * 2
    assert sentence(argument.names(), report.checks) == f"never_not_null, check: error: {message}"
    cut = combine(argument, [], complete=False)
    assert (cut.verdict, [c.error for c in cut.checks]) == ("unknown", [None, None])


def test_checks_of_the_whole_table_are_reported_separately() -> None:
    argument = Argument.model_validate({"checks": [{"not_null": "x"}, {"unique": "x"}]})
    part = result(CheckResult(files_scanned=1), CheckResult())
    wide = result(CheckResult(), CheckResult(verdict="violated", violations=2, files_scanned=3, scope="table"), rows=20)
    report = combine(argument, [("a", part), ("b", part), ("@table", wide)], complete=True)
    assert report.rows == 20
    assert [(c.violations, c.evidence.files_scanned, c.scope) for c in report.checks] == [(0, 2, None), (2, 3, "table")]
    assert "scope" not in report.model_dump()["checks"][0]
    # A rerun of that job alone reports no other check; without that job its check is an error.
    assert [c.name for c in combine(argument, [("@table", wide)], complete=True).checks] == ["x_unique"]
    without = combine(argument, [("a", part)], complete=True)
    assert [(c.verdict, c.error) for c in without.checks] == [
        ("valid", None),
        ("error", "no job has checked the whole table"),
    ]
    assert combine(argument, [("a", part)], complete=False).checks[1].verdict == "unknown"
    crashed = combine(argument, [("a", part), ("@table", "it crashed")], complete=True)
    assert [(c.verdict, c.error) for c in crashed.checks] == [("valid", None), ("error", "@table: it crashed")]


def stored(found: Result, names: list[str]) -> tuple[Result, int]:
    """The result as read back from etcd, and the size of the result and its sentence in bytes."""
    text = json.dumps(found.compact(), ensure_ascii=False)
    return Answer.model_validate(json.loads(text)).root, len((text + sentence(names, found.checks)).encode())


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("letter", ["a", "😀"])
def test_two_hundred_checks_with_long_reasons_can_be_stored(alike: bool, letter: str) -> None:
    names = [f"{letter * 196}{n:04}" for n in range(MAX_CHECKS)]
    reasons = [f"{0 if alike else n:03} the file /{letter * 580} is gone" for n in range(MAX_CHECKS)]
    found = result(*(CheckResult(verdict="error", error=reason, exact=False) for reason in reasons))
    back, size = stored(found, names)
    assert size < MAX_OUTCOME_BYTES * 0.9
    assert [c.verdict for c in back.checks] == ["error"] * MAX_CHECKS
    if alike:
        assert back == found
    else:
        assert [(c.error or "")[:3] for c in back.checks] == [r[:3] for r in reasons]


def test_samples_are_dropped_before_counts() -> None:
    sample = Sample(partition="p" * 200, file="f" * 200, row_index=1, values={"x": "y" * 250})
    bad = CheckResult(verdict="violated", violations=10**12, exact=False, samples=[sample] * 20, missing=["c" * 60])
    back, size = stored(result(*[bad] * MAX_CHECKS), ["n"] * MAX_CHECKS)
    assert size < MAX_OUTCOME_BYTES * 0.9
    assert sum(len(c.samples) for c in back.checks) > 10
    assert [c.violations for c in back.checks] == [10**12] * MAX_CHECKS


def test_the_longest_texts_are_cut_first() -> None:
    assert bounded(["abc", "x" * 90, "é" * 90], 63) == ["abc", "x" * 27 + "…", "é" * 13 + "…"]
    assert bounded(["abc", "x" * 90], 93) == ["abc", "x" * 90]
    assert bounded([], 0) == []


def test_an_error_shared_by_checks_is_reported_once() -> None:
    argument = Argument.model_validate({"checks": [{"not_null": f"c{n}"} for n in range(8)]})
    gone = CheckResult(verdict="error", error="the file /x is gone")
    report = combine(argument, [("a", result(*[gone] * 7, CheckResult(verdict="error", error="else")))], complete=True)
    message = "c0_not_null, c1_not_null, c2_not_null, c3_not_null, c4_not_null and 2 more: error: the file /x is gone"
    assert sentence(argument.names(), report.checks) == f"{message}; c7_not_null: error: else"


def test_the_first_error_is_reported_with_the_number_of_others() -> None:
    argument = Argument.model_validate({"checks": [{"not_null": "x"}]})

    def error_of(*errors: str) -> str | None:
        parts = [(error, result(CheckResult(verdict="error", error=error))) for error in errors]
        return combine(argument, parts, complete=True).checks[0].error

    assert error_of("f is cut", "f is cut") == "f is cut"
    assert error_of("f is cut", "g is cut") == "f is cut; and another error in 1 more partition"
    assert error_of("f is cut", "g is cut", "f is cut", "h") == "f is cut; and another error in 2 more partitions"
    long = error_of("x" * 600, "g is cut")
    assert long is not None
    assert (len(long), long.endswith("…; and another error in 1 more partition")) == (600, True)


def test_the_errors_of_a_report_are_bounded() -> None:
    argument = Argument.model_validate({"checks": [{"not_null": f"c{n}"} for n in range(MAX_CHECKS)]})
    long = CheckResult(verdict="error", error="😀" * 600)
    report = combine(argument, [("a", result(*[long] * MAX_CHECKS))], complete=True)
    assert len(json.dumps(report.model_dump(mode="json"), ensure_ascii=False).encode()) < 128 * 1024
