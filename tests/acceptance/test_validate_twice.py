"""Idempotency of validate: repeated jobs, completions and operations give the results of one run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import TableRecord
from distop_behaviors.validate import Validate
from scripts.validate_oracle.random_tables import generate
from scripts.validate_oracle.row_oracle import WHERE, expected
from tests.support.context import FakeContext, run_operation
from tests.support.repeated_attempts import bytes_below, run_repeated

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import OutcomeRow
    from tests.support.context import Ran

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


def comparable_report(ran: Ran) -> Any:
    """The report without the time and operation of its certificate."""
    report = dict(ran.report)
    if report["certificate"] is not None:
        omitted = ("time", "digest", "operation")
        report["certificate"] = {k: v for k, v in report["certificate"].items() if k not in omitted}
    return report, ran.message, list(map(comparable_outcome, ran.outcomes))


def comparable_outcome(row: OutcomeRow) -> Any:
    """The outcome of a job without samples, whose number depends on the batch."""
    checks = [{name: value for name, value in check.items() if name != "samples"} for check in row.result["checks"]]
    return row.name, row.success, {**row.result, "checks": checks}, row.error


def table_checks(other: str) -> list[dict[str, Any]]:
    """Checks over all rows of the table, most of which are violated."""
    return [
        {"unique": ["i8", "text"]},
        {"unique": "day"},
        {"references": {"column": "i32", "table": other, "to": "i64"}},
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_repeated_steps_validate_a_random_table_with_the_same_results(
    seed: int, spark: SparkSession, tmp_path: Path
) -> None:
    """Each attempt of a job has the same outcome, and each completion and each repeated operation the same report.

    The only file written is the certificate's list of files, once.
    """
    print(f"the table of seed {seed}")
    rng = random.Random(seed)
    made = generate(seed, tmp_path / "t")
    record = TableRecord("t", "parquet", str(made.directory))
    (tmp_path / "shared").mkdir()

    def context(table: TableRecord, attempt: int = 1) -> FakeContext:
        ctx = FakeContext(tmp_path / "shared", table, spark)
        ctx.attempt, ctx.tables = attempt, {"t": record}
        return ctx

    valid = [case.check for case in made.cases if not any(expected(made, case).values())]
    some = [case.check for case in rng.sample(made.cases, 6)] + rng.sample(table_checks("t"), 2)
    for checks, where in ((some, rng.choice([None, WHERE])), (valid, None)):
        arg = {
            "checks": [{**check, "name": f"c{n}"} for n, check in enumerate(checks)],
            "statistics": rng.choice(["auto", "auto", "never"]),
            "sample": rng.choice([0, 3]),
            "max_violations": rng.choice([None, None, 2]),
            "where": where,
        }
        before = bytes_below(made.directory)
        once = run_operation(Validate(), record, arg, context)
        written = bytes_below(tmp_path / "shared")
        repeated = run_repeated(Validate(), record, arg, context, rng)
        for one, attempts in zip(once.outcomes, repeated.outcomes, strict=True):
            for row in attempts:
                assert comparable_outcome(row) == comparable_outcome(one)
        for ended in (*repeated.ended, run_operation(Validate(), record, arg, context)):
            assert comparable_report(ended) == comparable_report(once)
        assert (once.report["certificate"] is not None) == (once.report["verdict"] == "valid")
        assert bytes_below(made.directory) == before
        assert bytes_below(tmp_path / "shared") == written
