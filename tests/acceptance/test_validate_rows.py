"""The violating rows of each kind of check equal those of plain Python, row by row.

The oracle compares a few violations of random tables. This test compares every violating row for chosen values and
about 140 checks (:mod:`tests.acceptance.row_cases`). ``test_validate_keys.py`` has key checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import JobFailed, TableRecord
from distop.tables import plan_table
from distop_behaviors.validate import Validate
from tests.acceptance import row_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.context import FakeContext

pytestmark = pytest.mark.spark

FILES = {"p=1/a.parquet": 0, "p=1/b.parquet": 1, "p=2/a.parquet": 2}
"""File → the number of its first row; each file has every third row."""
WHERE = "whole IS NULL OR whole >= 0"
Place = tuple[str, int]
"""A file, and the position of a row in it."""


def selected(row: row_cases.Row) -> bool:
    """Whether :data:`WHERE` selects the row."""
    return row["whole"] is None or row["whole"] >= 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[TableRecord, dict[Place, row_cases.Row]]:
    folder, rows = tmp_path_factory.mktemp("rows"), row_cases.rows()
    found: dict[Place, row_cases.Row] = {}
    for name, first in FILES.items():
        some = rows[first :: len(FILES)]
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        data = {c: pa.array([row[c] for row in some], kind) for c, (kind, _) in row_cases.COLUMNS.items()}
        pq.write_table(pa.table(data), path, row_group_size=7)
        found |= {(str(path), n): row for n, row in enumerate(some)}
    return TableRecord("t", "parquet", str(folder)), found


@pytest.mark.parametrize(
    "arg",
    [{"statistics": "auto"}, {"statistics": "never", "null_is": "fail", "where": WHERE}],
    ids=["auto", "never, NULL fails, where"],
)
def test_the_violating_rows_equal_those_of_plain_python(
    made: tuple[TableRecord, dict[Place, row_cases.Row]],
    arg: dict[str, Any],
    context: Callable[[TableRecord], FakeContext],
) -> None:
    table, rows = made
    cases = row_cases.cases()
    argument = Validate.Arg.model_validate({**arg, "checks": [case.check for case in cases], "sample": 1_000})
    found: list[set[Place]] = [set() for _ in cases]
    wrong = []
    for _, outcome in Validate().run_batch(argument, plan_table(table).partitions, context(table)):
        # Not the stored result, which may lack samples.
        answer = outcome.result if isinstance(outcome, JobFailed) else outcome
        for n, check in enumerate(answer.root.checks):
            found[n] |= {(sample.file, sample.row_index) for sample in check.samples}
            if check.error is not None or not check.exact or check.violations != len(check.samples):
                wrong.append(f"{cases[n].check}: {check.verdict}, {check.violations} violations, {check.error}")
    for case, places in zip(cases, found, strict=True):
        passes = {True, None} if "check" not in case.check or arg.get("null_is") != "fail" else {True}
        right = {
            place
            for place, row in rows.items()
            if case.holds(row) not in passes and ("where" not in arg or selected(row))
        }
        if "not_null" in case.check:
            assert case.check["not_null"] == "none" or right < rows.keys()
        for place in sorted(places ^ right):
            problem = "is reported as a violation" if place in places else "is not reported as a violation"
            shown = {name: value for name, value in rows[place].items() if name in str(case.check)}
            wrong.append(f"{case.check}: {shown} {problem}")
    assert wrong == [], "\n".join(wrong)


def test_most_cases_have_valid_and_violating_rows() -> None:
    """A check that holds for all rows or for none would prove little."""
    cases, rows = row_cases.cases(), row_cases.rows()
    mixed = [case for case in cases if len({case.holds(row) is not False for row in rows}) == 2]
    assert len(mixed) >= 0.8 * len(cases)
    for name, (_, values) in row_cases.COLUMNS.items():
        assert len({repr(row[name]) for row in rows}) == len({*map(repr, values), "None"}), name
