"""Missing files are an error of their partition; an unreachable table gives no verdict."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import JobCancelled, JobFailed, TableRecord, TableUnavailable, load
from distop.tables import plan_table
from tests.support.context import FakeContext

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from distop.behavior import PartitionPlan

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ARG = {"checks": [{"not_null": "a"}], "statistics": "only"}


@pytest.fixture
def table(tmp_path: Path) -> TableRecord:
    for n in range(2):
        folder = tmp_path / "mounted" / f"p={n}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"a": [1, 2]}), folder / "a.parquet")
    return TableRecord("t", "parquet", str(tmp_path / "mounted"))


def run(
    table: TableRecord, plans: Sequence[PartitionPlan], tmp_path: Path, arg: Any = ARG, *, stopped: bool = False
) -> list[Any]:
    behavior = load("validate")
    ctx = FakeContext(tmp_path, table)
    ctx.stopped = stopped
    return [result for _, result in behavior.run_batch(behavior.Arg.model_validate(arg), plans, ctx)]


def test_a_missing_file_is_an_error_of_its_partition(table: TableRecord, tmp_path: Path) -> None:
    plans = plan_table(table).partitions
    (tmp_path / "mounted/p=0/a.parquet").unlink()
    gone, there = run(table, plans, tmp_path)
    assert "is gone since the operation was planned" in str(gone)
    assert there.root.checks[0].verdict == "valid"


@pytest.mark.parametrize("left", [None, ".", "_distop"])
def test_an_unreachable_table_gives_no_verdict(table: TableRecord, tmp_path: Path, left: str | None) -> None:
    """The node has lost its disk, which another node may have."""
    plans = plan_table(table).partitions
    shutil.rmtree(tmp_path / "mounted")
    if left is not None:
        (tmp_path / "mounted" / left).mkdir(parents=True)
    with pytest.raises(TableUnavailable):
        run(table, plans, tmp_path)


def test_reading_footers_stops_when_the_job_is_cancelled(table: TableRecord, tmp_path: Path) -> None:
    with pytest.raises(JobCancelled):
        run(table, plan_table(table).partitions, tmp_path, stopped=True)


def test_a_modification_time_that_is_too_coarse_is_not_trusted(table: TableRecord, tmp_path: Path) -> None:
    """A PASS must not rest on a file that was replaced within the second, by one of the same size."""
    file = tmp_path / "mounted/p=0/a.parquet"
    arg = {"checks": [{"range": {"column": "a", "min": 0}}], "statistics": "only"}

    def verdict(value: int) -> str:
        pq.write_table(pa.table({"a": pa.array([value, 7], pa.int64())}), file, compression="none")
        os.utime(file, ns=(0, 1_700_000_000_000_000_000))
        found = run(table, plan_table(table).partitions, tmp_path, arg)[0]
        result = found.result if isinstance(found, JobFailed) else found
        return str(result.root.checks[0].verdict)

    assert verdict(1) == "valid"
    size = file.stat().st_size
    assert verdict(-1) == "violated"
    assert file.stat().st_size == size, "both files must have the same size"
