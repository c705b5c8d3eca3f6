"""``expire-partitions`` on folders of Parquet files: a partition is removed by deleting its planned files."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop import testing
from distop.behavior import JobFailed, PartitionPlan, TableRecord, WorkDone
from distop.errors import InvalidArgument
from distop.storage.folder_store import FolderStore
from distop.storage.object_store import Removed
from distop.tables import plan_table
from distop_behaviors.expire import ExpirePartitions
from distop_behaviors.expire.partition_argument import ExpirePartitionsArgument
from tests.support.context import FakeContext
from tests.support.orphan_runs import snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from distop.testing import OperationRun

TODAY = datetime.now(UTC).date()


def ago(days: int) -> str:
    return f"{TODAY - timedelta(days=days)}"


def folder(path: Path, *partitions: str, files: int = 2) -> TableRecord:
    """A table with these partition folders, each with some files."""
    for partition in partitions:
        (path / partition).mkdir(parents=True)
        for n in range(files):
            pq.write_table(pa.table({"id": [n]}), path / partition / f"{n}.parquet")
    return TableRecord("t", "parquet", str(path))


def run(table: TableRecord, where: Path, **arg: Any) -> OperationRun:
    argument = {"column": "day", "older_than": "90d", **arg}
    return testing.run_operation(ExpirePartitions, argument, table=table, folder=where)


def planned(table: TableRecord, ctx: FakeContext, **arg: Any) -> list[PartitionPlan]:
    argument = ExpirePartitionsArgument.model_validate({"column": "day", "older_than": "90d", **arg})
    return list(ExpirePartitions().partitions(table, argument, ctx).partitions)


def test_old_partitions_lose_exactly_their_listed_files(tmp_path: Path) -> None:
    """Whatever the times of files are: only the values of partitions count."""
    names = [f"day={ago(n)}" for n in (1, 50, 91, 400)]
    table = folder(tmp_path / "t", *names)
    folder(tmp_path / "t-2", *names)
    hidden = tmp_path / "t" / names[3] / "_SUCCESS"
    hidden.write_text("")
    for n, file in enumerate(sorted((tmp_path / "t").rglob("*.parquet"))):
        os.utime(file, (0, 0) if n % 2 else (4e9, 4e9))
    beside = snapshot(tmp_path / "t-2")
    done = run(table, tmp_path / "work")
    assert (done.state, list(done.errors)) == ("success", [])
    assert [one.name for one in plan_table(table).partitions] == sorted(names[:2])
    assert snapshot(tmp_path / "t-2") == beside
    assert hidden.exists()
    report = done.report
    size = report["files"]["bytes"]
    assert (report["removed"], report["files"]["files"], report["deletes"]) == (2, 4, True)
    assert report["sample"] == sorted(names[2:])
    assert done.result.work == WorkDone(4, size, 4, size, 0, 4, size)
    assert run(table, tmp_path / "again").report["removed"] == 0


def test_a_dry_run_deletes_nothing(tmp_path: Path) -> None:
    table = folder(tmp_path / "t", f"day={ago(1)}", f"day={ago(100)}")
    before = snapshot(tmp_path / "t")
    report = run(table, tmp_path / "work", dry_run=True).report
    assert (report["removed"], report["files"]["files"], report["work"]["committed_files"]) == (1, 2, 0)
    assert snapshot(tmp_path / "t") == before


def test_files_that_came_or_were_replaced_since_the_plan_stay(tmp_path: Path) -> None:
    old = f"day={ago(100)}"
    table = folder(tmp_path / "t", f"day={ago(1)}", old, files=3)
    ctx = FakeContext(tmp_path / "work", table)
    (job,) = planned(table, ctx)[1:]
    pq.write_table(pa.table({"id": [7, 8]}), tmp_path / "t" / old / "0.parquet")
    pq.write_table(pa.table({"id": [9]}), tmp_path / "t" / old / "new.parquet")
    (tmp_path / "t" / old / "1.parquet").unlink()  # by an attempt that was killed
    ctx.partition = job
    result = ExpirePartitions().start_or_resume_job({}, job, ctx)
    assert sorted(path.name for path in (tmp_path / "t" / old).iterdir()) == ["0.parquet", "new.parquet"]
    assert (result.deleted.files, result.changed, result.work.committed_files) == (2, 1, 2)
    assert ctx.works[-1] == result.work
    assert result.work.files == 3


def test_a_partition_whose_files_were_all_replaced_does_not_count_as_removed(tmp_path: Path) -> None:
    old = f"day={ago(100)}"
    table = folder(tmp_path / "t", f"day={ago(1)}", old, files=1)
    ctx = FakeContext(tmp_path / "work", table)
    plans = planned(table, ctx)
    pq.write_table(pa.table({"id": [7, 8]}), tmp_path / "t" / old / "0.parquet")
    ctx.partition = plans[1]
    result = ExpirePartitions().start_or_resume_job({}, plans[1], ctx).model_dump(mode="json")
    report = cancelled(table, plans, [outcome_of(plans[1], result)], ctx)
    assert (report.removed, report.sample, report.files.files, report.changed) == (0, [], 0, 1)


def test_a_file_that_cannot_be_deleted_fails_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"day={ago(n)}" for n in (1, 2, 3, 100, 101)]
    table = folder(tmp_path / "t", *names)
    remove = FolderStore.remove_listed

    def denied(self: FolderStore, listed: Any) -> Removed:
        page = list(listed)
        if page[0].key.startswith(names[3]):
            return Removed(failed={page[0].key: "permission denied"})
        return remove(self, page)

    monkeypatch.setattr(FolderStore, "remove_listed", denied)
    done = run(table, tmp_path / "work")
    assert done.state == "failed"
    assert "1 file could not be deleted" in str(done.errors)
    assert (done.report["removed"], done.report["files"]["files"], done.report["failed_files"]) == (1, 2, 1)
    assert done.result.work is not None
    assert done.result.work.committed_files == 2
    with pytest.raises(JobFailed):
        ctx = FakeContext(tmp_path / "again", table)
        ExpirePartitions().start_or_resume_job({}, planned(table, ctx)[1], ctx)


def test_a_cancelled_operation_reports_what_is_deleted(tmp_path: Path) -> None:
    table = folder(tmp_path / "t", *(f"day={ago(n)}" for n in (1, 2, 3, 100, 101)))
    ctx = FakeContext(tmp_path / "work", table)
    plans = planned(table, ctx)
    rows = []
    for plan in plans[:2]:
        result = ExpirePartitions().start_or_resume_job({}, plan, ctx).model_dump(mode="json")
        rows.append(outcome_of(plan, result))
    report = cancelled(table, plans, rows, ctx)
    assert (report.removed, report.files.files, report.work.committed_files, report.work.of_files) == (1, 2, 2, 4)


def outcome_of(plan: PartitionPlan, result: Any) -> Any:
    from distop.behavior import OutcomeRow

    return OutcomeRow(plan.partition, plan.name, True, result, "")


def cancelled(table: TableRecord, plans: list[PartitionPlan], rows: list[Any], ctx: FakeContext) -> Any:
    from distop.behavior import Summary

    summary = Summary("cancelled", len(plans), len(rows), 0, lambda: iter(rows), plan=lambda: iter(plans))
    return ExpirePartitions().complete_operation({"column": "day", "older_than": "90d"}, table, summary, ctx)


def test_another_table_inside_refuses_the_whole(tmp_path: Path) -> None:
    table = folder(tmp_path / "t", f"day={ago(1)}", f"day={ago(100)}")
    inner = TableRecord("inner", "parquet", str(tmp_path / "t" / f"day={ago(100)}"))
    ctx = FakeContext(tmp_path / "work", table)
    ctx.tables = {"inner": inner}
    with pytest.raises(InvalidArgument, match="inner|inside"):
        planned(table, ctx)


def test_tables_without_partitions_or_in_a_catalog_are_refused(tmp_path: Path) -> None:
    table = folder(tmp_path / "t", f"day={ago(1)}", f"day={ago(100)}")
    with pytest.raises(InvalidArgument, match=r"'dayy' is not a partition column .*did you mean 'day'"):
        planned(table, FakeContext(tmp_path, table), column="dayy")
    (tmp_path / "flat").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "flat" / "x.parquet")
    flat = TableRecord("t", "parquet", str(tmp_path / "flat"))
    with pytest.raises(InvalidArgument, match="it has: none"):
        planned(flat, FakeContext(tmp_path, flat))
    catalog = TableRecord("t", "spark", "lake.db.t")
    with pytest.raises(InvalidArgument, match=r"ALTER TABLE … DROP PARTITION"):
        planned(catalog, FakeContext(tmp_path, catalog))


def test_a_hold_that_names_no_partition_is_reported(tmp_path: Path) -> None:
    table = folder(tmp_path / "t", *(f"day={ago(n)}" for n in (1, 2, 100)))
    hold = [ago(100), f"day={ago(2)}", "2013-02-30", "k=x"]
    report = run(table, tmp_path / "work", hold=hold).report
    assert (report["held"], report["removed"], report["unmatched_hold"]) == (1, 0, ["2013-02-30", "k=x"])


def test_the_breaker_counts_partitions_of_several_columns(tmp_path: Path) -> None:
    """A partition is a combination of the values of all columns, so three of four would go, not one day of two."""
    names = [f"day={ago(1)}/k=a", *(f"day={ago(100)}/k={k}" for k in "abc")]
    table = folder(tmp_path / "t", *names)
    done = run(table, tmp_path / "work")
    assert done.state == "failed"
    assert "75% of the partitions" in str(done.errors)
    done = run(table, tmp_path / "again", max_fraction=0.75, hold=["k=b"])
    assert (done.report["partitions"], done.report["removed"], done.report["held"]) == (4, 2, 1)
    assert [one.name for one in plan_table(table).partitions] == sorted([names[0], names[2]])


def test_declared_types_and_formats_give_the_time(tmp_path: Path) -> None:
    table = folder(tmp_path / "t", *(f"d={n}" for n in ("20130101", f"{TODAY:%Y%m%d}", "x")))
    report = run(table, tmp_path / "work", column="d", format="%Y%m%d").report
    assert (report["removed"], report["unknown"]) == (1, 1)
    typed = folder(tmp_path / "u", f"day={ago(1)}", f"day={ago(100)}", "day=__HIVE_DEFAULT_PARTITION__")
    typed = TableRecord("t", "parquet", typed.location, {"partition_types": {"day": "date"}})
    report = run(typed, tmp_path / "more", hold=[ago(3)]).report
    assert (report["removed"], report["unknown"], report["unmatched_hold"]) == (1, 1, [ago(3)])


def test_escaped_values_name_their_own_folder(tmp_path: Path) -> None:
    names = [f"day={ago(1)}/k=a", f"day={ago(100)}/k=b%2F %25ü", f"day={ago(100)}/k=b"]
    table = folder(tmp_path / "t", *names)
    report = run(table, tmp_path / "work", hold=["k=b"], max_fraction=1).report
    assert (report["removed"], report["files"]["files"]) == (1, 2)
    assert [one.name for one in plan_table(table).partitions] == sorted([names[0], names[2]])
