"""Files that change during validate: it validates the planned files, or reports a changed one as an error.

Each moment is the start or end of a function within a job, which the tests patch.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.behavior import TableUnavailable
from distop.tables import plan_table
from distop.tables.reading import parquet_footers
from distop_behaviors.validate import Validate, batch, certification, key_queries, scan
from tests.acceptance.applying import At
from tests.acceptance.checked import between
from tests.support.context import run_operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from distop.behavior import PartitionPlan
    from tests.acceptance.checked import Table
    from tests.support.context import Ran

pytestmark = [pytest.mark.spark, pytest.mark.rotating]

VICTIM = "p=1/a.parquet"
CHECKS = [{"not_null": "a"}, between("a", high=100), {"matches": {"column": "w", "pattern": "^w"}}]
"""Footers decide the checks of ``a``; ``w`` needs a scan."""
MOMENTS: dict[str, tuple[Any, str, str]] = {
    "planned": (parquet_footers, "read_all", "before"),
    "looked-at": (parquet_footers, "_read_footer", "before"),
    "footers-read": (parquet_footers, "read_all", "after"),
    "counting": (scan, "count", "before"),
    "counted": (scan, "count", "after"),
}


def rows(*a: int | None, word: str = "w") -> pa.Table:
    return pa.table({"a": pa.array(a, pa.int64()), "w": [f"{word}{n}" for n in range(len(a))]})


@pytest.fixture
def plans(table: Table) -> Sequence[PartitionPlan]:
    """Three partitions. The second has a NULL, and the third has texts that do not match."""
    table.add("p=0/a.parquet", rows(1, 2, 3), compression="none")
    table.add(VICTIM, rows(1, None, 3), compression="none")
    table.add("p=2/a.parquet", rows(1, 2, 3, word="x"), compression="none")
    return plan_table(table.record).partitions


def run(table: Table, plans: Sequence[PartitionPlan], *checks: dict[str, Any], **arg: Any) -> Ran:
    return run_operation(
        Validate(), table.record, {"checks": list(checks or CHECKS), **arg}, table.context, partitions=plans
    )


def act_at(patch: pytest.MonkeyPatch, owner: Any, name: str, when: str, act: Callable[[], object]) -> At:
    """Call ``act`` once, before or after the first call of a function."""
    at = At(owner, name, 1, when, act)
    patch.setattr(owner, name, at.wrapped)
    return at


def replace(path: Path) -> None:
    """Replace a file by another one, as a careful writer does."""
    new_file = path.with_name(".new")
    pq.write_table(rows(1, 2, 3, 4), new_file)
    new_file.rename(path)


def write_over(path: Path) -> None:
    """Overwrite a file in place."""
    pq.write_table(rows(1, None, 3, None), path)


DISTURBANCES: dict[str, Callable[[Path], object]] = {
    "replaced": replace,
    "written over": write_over,
    "removed": lambda path: path.unlink(),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 20),
}


def outcomes(ran: Ran) -> dict[str, Any]:
    return {outcome.name: outcome.result for outcome in ran.outcomes}


EACH_RUN = {
    ("planned", "removed"),
    ("looked-at", "replaced"),
    ("footers-read", "cut"),
    ("counting", "replaced"),
    ("counted", "written over"),
}
"""The most difficult disturbance at each moment, for each run."""


@pytest.mark.parametrize(
    ("moment", "how"),
    [
        pytest.param(moment, how, marks=() if (moment, how) in EACH_RUN else pytest.mark.slow)
        for moment in MOMENTS
        for how in DISTURBANCES
    ],
)
def test_a_file_that_changed_since_planning_is_an_error_of_its_partition_only(
    moment: str, how: str, table: Table, plans: Sequence[PartitionPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aside = table.directory / VICTIM, table.directory / ".aside"
    shutil.copy2(path, aside)
    owner, name, when = MOMENTS[moment]
    with monkeypatch.context() as patch:
        at = act_at(patch, owner, name, when, lambda: DISTURBANCES[how](path))
        ran = run(table, plans)
    assert at.happened
    shutil.copy2(aside, path)
    undisturbed = outcomes(run(table, plans))
    assert [undisturbed[f"p={n}"]["verdict"] for n in range(3)] == ["valid", "violated", "violated"], (
        "no facts of the disturbed file are cached"
    )
    found = outcomes(ran)
    assert found.pop("p=1")["verdict"] == "error"
    assert str(path) in ran.by_name["p=1"].error
    assert found == {name: undisturbed[name] for name in found}


@pytest.mark.parametrize(
    "moment",
    [pytest.param(m, marks=() if m in ("looked-at", "counting") else pytest.mark.slow) for m in MOMENTS],
)
def test_a_table_dropped_or_renamed_during_validate_is_left_to_another_attempt(
    moment: str, table: Table, plans: Sequence[PartitionPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, when = MOMENTS[moment]
    elsewhere = table.directory.with_name("renamed")
    with monkeypatch.context() as patch:
        at = act_at(patch, owner, name, when, lambda: table.directory.rename(elsewhere))
        with pytest.raises(TableUnavailable):
            run(table, plans)
    assert at.happened


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (parquet_footers, "_read_footer", "before"),
        pytest.param(key_queries, "count_duplicates", "before", marks=pytest.mark.slow),
        (key_queries, "count_duplicates", "after"),
        pytest.param(key_queries, "sample_duplicates", "after", marks=pytest.mark.slow),
    ],
)
def test_keys_of_a_file_that_changed_since_planning_are_not_compared(
    owner: Any, name: str, when: str, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(2):
        table.add(f"p={n}/a.parquet", rows(1, 2, 2 + n))
    path = table.directory / VICTIM
    with monkeypatch.context() as patch:
        at = act_at(patch, owner, name, when, lambda: replace(path))
        ran = table.run({"unique": "a"})
    assert at.happened
    (check,) = ran.report["checks"]
    assert (check["verdict"], check["violations"], check["samples"]) == ("error", 0, [])
    assert f"the file {path} has changed since the operation was planned" in check["error"]


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        pytest.param(scan, "count", "before", marks=pytest.mark.slow),
        (scan, "count", "after"),
        (certification, "certify", "before"),
    ],
)
def test_a_certificate_covers_the_planned_files_despite_concurrent_writes(
    owner: Any, name: str, when: str, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An added file, and a file replaced after it was counted, are new files for a validation since the certificate."""
    for n in range(3):
        table.add(f"p={n}/a.parquet", rows(1, 2, 3))
    planned = plan_table(table.record)

    def write() -> None:
        table.add("p=3/a.parquet", rows(None))
        if name == "certify":
            replace(table.directory / VICTIM)

    with monkeypatch.context() as patch:
        at = act_at(patch, owner, name, when, write)
        ran = table.run(*CHECKS)
    assert at.happened
    assert (ran.report["verdict"], ran.report["rows"]) == ("valid", 9)
    certificate = ran.report["certificate"]
    assert certificate["version"] == planned.version
    later = table.run(*CHECKS, since=certificate)
    new = ["p=1", "p=3"] if name == "certify" else ["p=3"]
    assert [(outcome.name, outcome.result["verdict"]) for outcome in later.outcomes] == [
        (name, "violated" if name == "p=3" else "valid") for name in new
    ]


def test_a_footer_of_a_replaced_file_decides_no_check(
    table: Table, plans: Sequence[PartitionPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for this operation, and for the next one after the original file is back."""
    path, aside = table.directory / VICTIM, table.directory / ".aside"

    def other() -> None:
        path.rename(aside)
        pq.write_table(rows(1, 2, 3), path)

    with monkeypatch.context() as patch:
        act_at(patch, parquet_footers, "_read_footer", "before", other)
        ran = run(table, plans[1:2], CHECKS[0])
    assert ran.by_name["p=1"].result["verdict"] == "error"
    assert f"the file {path} has changed since the operation was planned" in ran.message
    aside.rename(path)
    ran = run(table, plans[1:2], CHECKS[0])
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [("violated", 1)]


def test_no_samples_are_taken_from_a_file_replaced_after_counting(
    table: Table, plans: Sequence[PartitionPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts are kept, and the report has no rows of the replaced file."""
    path = table.directory / VICTIM

    def other() -> None:
        os.truncate(path, 0)
        pq.write_table(rows(None, 2, 3), path, compression="none")

    with monkeypatch.context() as patch:
        at = act_at(patch, batch, "fetch", "before", other)
        ran = run(table, plans, *CHECKS)
    assert at.happened
    assert [(c["verdict"], c["violations"]) for c in ran.report["checks"]] == [
        ("violated", 1),
        ("valid", 0),
        ("violated", 3),
    ]
    assert [len(c["samples"]) for c in ran.report["checks"]] == [0, 0, 3]
