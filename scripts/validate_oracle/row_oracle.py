"""Compares results of validate on generated tables with results computed row by row in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distop.behavior import TableRecord
from distop_behaviors.validate import Validate
from tests.support.context import run_operation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.validate_oracle.random_tables import Case, Generated, Row
    from tests.support.context import FakeContext, Ran

SAMPLED = 3
WHERE = "i32 > 0 AND p <> '0'"
WHERES: dict[str, Callable[[Row], bool]] = {
    WHERE: lambda row: row["i32"] is not None and row["i32"] > 0 and row["p"] not in (None, "0"),
    # NaN is above all numbers, and -0.0 equals 0.0.
    "f64 > 20 OR f32 = 0": lambda row: _above(row["f64"], 20) or row["f32"] == 0,
    "NOT (f32 <= 1.5) AND i64 <> 0": lambda row: _above(row["f32"], 1.5) and row["i64"] not in (None, 0),
    "ts_ms <> timestamp'2001-09-09 01:46:40.0005Z'": lambda row: row["ts_ms"] is not None,
}
"""Conditions, and functions for the rows that they select."""


def _above(value: float | None, bound: float) -> bool:
    return value is not None and (math.isnan(value) or value > bound)


def run_checks(made: Generated, context: Callable[[TableRecord], FakeContext], *, batches: int = 1, **arg: Any) -> Ran:
    """Run validate with all checks of the table; ``arg``: further fields of its argument."""
    checks = [{**case.check, "name": f"c{n}"} for n, case in enumerate(made.cases)]
    table = TableRecord("t", "parquet", str(made.directory))
    return run_operation(Validate(), table, {"checks": checks, **arg}, context, batches=batches)


FAILING = (
    "try_to_timestamp(i32, 'MM-dd-yyyy') IS NOT NULL",  # its analysis raises an internal error
    f"{'(' * 3_000}i32 > 0{')' * 3_000}",  # the parser's stack overflows
)
"""Expressions that raise an internal error in Spark."""


def mistakes_with_failing_check(made: Generated, context: Callable[[TableRecord], FakeContext]) -> list[str]:
    """Mistakes of a validate that also has a check that fails in Spark: it must not change the other results."""
    found = []
    checks = [{**case.check, "name": f"c{n}"} for n, case in enumerate(made.cases)]
    table = TableRecord("t", "parquet", str(made.directory))
    for text in FAILING:
        arg = {"checks": [*checks, {"check": text, "name": "failing"}], "statistics": "never", "sample": SAMPLED}
        ran = run_operation(Validate(), table, arg, context, batches=2)
        failing = ran.report["checks"].pop()
        if (failing["verdict"], "\n" in (failing["error"] or "")) != ("error", False):
            found.append(f"{text[:40]}: {failing}")
        found += [f"with the check {text[:40]}: {line}" for line in _inexact_results(made, ran, scanned=True)]
    return found


def expected(made: Generated, case: Case, where: Callable[[Row], bool] = lambda row: True) -> dict[str, int]:
    """The number of violations by partition, among the rows that ``where`` selects."""
    return {
        name: sum(case.violates(row) and where(row) for rows in files.values() for row in rows)
        for name, files in made.rows.items()
    }


def mistakes(made: Generated, context: Callable[[TableRecord], FakeContext], mode: str) -> list[str]:
    """Differences between validate with ``statistics`` = ``mode`` and the correct results."""
    if mode == "only":
        return list(_false_proofs(made, run_checks(made, context, statistics="only")))
    ran = run_checks(made, context, statistics=mode, sample=SAMPLED)
    return list(_inexact_results(made, ran, scanned=mode == "never"))


def mistakes_with_condition(made: Generated, context: Callable[[TableRecord], FakeContext]) -> list[str]:
    """The same for validate with each condition of WHERES, in two batches."""
    found = []
    for where, selects in WHERES.items():
        ran = run_checks(made, context, batches=2, where=where, sample=SAMPLED)
        rows = sum(map(selects, (row for files in made.rows.values() for rows in files.values() for row in rows)))
        if ran.report["rows"] != rows:
            found.append(f"where {where}: {ran.report['rows']} rows, not {rows}")
        for case, entry in zip(made.cases, ran.report["checks"], strict=True):
            total = sum(expected(made, case, selects).values())
            if entry["violations"] != total:
                found.append(f"where {where}: {case.check}: {entry['violations']} violations, not {total}")
            if len(entry["samples"]) != min(total, SAMPLED):
                found.append(f"where {where}: {case.check}: {len(entry['samples'])} samples of {total} violations")
    return found


def _inexact_results(made: Generated, ran: Ran, *, scanned: bool) -> Iterator[str]:
    total_rows = sum(len(rows) for files in made.rows.values() for rows in files.values())
    if ran.report["rows"] != total_rows:
        yield f"{ran.report['rows']} rows, not {total_rows}"
    for n, (case, entry) in enumerate(zip(made.cases, ran.report["checks"], strict=True)):
        right = expected(made, case)
        found = {name: o.result["checks"][n].get("violations", 0) for name, o in ran.by_name.items()}
        if found != right:
            yield f"{case.check}: {found} by partition, not {right}"
        total = sum(right.values())
        verdict = (entry["verdict"], entry["violations"], entry["exact"])
        if verdict != ("violated" if total else "valid", total, True):
            yield f"{case.check}: {verdict}, but {total} rows violate it ({entry['error']})"
        if len(entry["samples"]) != min(total, SAMPLED):
            yield f"{case.check}: {len(entry['samples'])} samples of {total} violations"
        for sample in entry["samples"]:
            if not case.violates(made.rows[sample["partition"]][sample["file"]][sample["row_index"]]):
                yield f"{case.check}: the sample {sample} does not violate it"
        if scanned and entry["evidence"]["files_statistics"]:
            yield f"{case.check}: used statistics although they are disabled: {entry['evidence']}"


def _false_proofs(made: Generated, ran: Ran) -> Iterator[str]:
    """False verdicts from statistics alone: ``valid`` despite violations, or too many violations."""
    for n, case in enumerate(made.cases):
        for name, actual in expected(made, case).items():
            entry = ran.by_name[name].result["checks"][n]
            count, exact = entry.get("violations", 0), entry.get("exact", True)
            if entry["verdict"] == "valid" and actual:
                yield f"{case.check}: valid in {name}, but {actual} rows violate it"
            if entry["verdict"] == "violated" and not (0 < count <= actual and (count == actual or not exact)):
                yield f"{case.check}: {count} violations in {name} (exact: {exact}), but {actual} rows violate it"
