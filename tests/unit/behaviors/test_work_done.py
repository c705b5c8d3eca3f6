"""What the maintenance operations report of their work while they run, and in the end."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from distop.behavior import Summary, TableRecord, WorkDone, registered
from distop.storage import export_targets
from distop_behaviors.compact import Compact
from distop_behaviors.expire import ExpirePartitions, ExpireSnapshots
from distop_behaviors.export import Export
from distop_behaviors.orphans import RemoveOrphans, Restore
from distop_behaviors.purge import Purge
from tests.support.export_runs import ExportRun
from tests.support.orphan_runs import Run
from tests.unit.behaviors.test_compact_delta import Bench, table_of
from tests.unit.behaviors.test_expire_snapshots import Expiring, grown, record
from tests.unit.behaviors.test_purge import Purging, parquet
from tests.unit.behaviors.test_remove_orphans import delta, plant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.context import FakeContext

TYPES = (Compact, ExpireSnapshots, ExpirePartitions, RemoveOrphans, Restore, Purge, Export)


def work_of(report: Any) -> WorkDone:
    return WorkDone.from_json(report["work"])


def grows(works: list[WorkDone]) -> bool:
    """Whether no number of a report is smaller than in the report before."""
    pairs = itertools.pairwise(works)
    return bool(works) and all(getattr(a, f.name) <= getattr(b, f.name) for a, b in pairs for f in fields(WorkDone))


@pytest.mark.parametrize("kind", TYPES)
def test_every_report_has_the_work(kind: Any) -> None:
    declared = kind.declaration()
    assert "work" in declared.report_schema["properties"]
    if kind is not ExpireSnapshots:  # its jobs only read
        assert "work" in declared.result_schema["properties"]
    assert kind.type_name in registered()


def test_remove_orphans_and_restore(tmp_path: Path) -> None:
    table = delta(tmp_path / "t")
    plant(tmp_path / "t", "a", "bb", "k=a/ccc")
    run = Run(table, tmp_path / "work")
    plans = run.plan(quarantine=True)
    ctxs = _contexts(run)
    report = run.remove(plans, quarantine=True)
    assert work_of(report) == WorkDone(3, 1 + 2 + 7, 3, 1 + 2 + 7, 0, 3, 1 + 2 + 7)
    assert grows([work for ctx in ctxs for work in ctx.works])
    assert work_of(run.restore()) == WorkDone(3, 10, 3, 10, 0, 3, 10)
    assert ctxs[-1].works == [WorkDone(3, 10, 3, 10, 0, 3, 10)]


def test_a_dry_run_commits_nothing(tmp_path: Path) -> None:
    table = delta(tmp_path / "t")
    plant(tmp_path / "t", "a")
    run = Run(table, tmp_path / "work")
    assert work_of(run.run(dry_run=True)) == WorkDone()
    run.run(quarantine=True)
    assert work_of(run.restore(dry_run=True)) == WorkDone(1, 1, 1, 1)


def _contexts(run: Any) -> list[FakeContext]:
    """The contexts that a run makes from now on."""
    made: list[FakeContext] = []
    context = run.context

    def kept() -> FakeContext:
        made.append(context())
        return made[-1]

    run.context = kept
    return made


def test_purge(tmp_path: Path) -> None:
    purging = Purging(parquet(tmp_path / "t"), tmp_path / "work").plan()
    size = sum(one.bytes for one in purging.partitions)
    ctxs = _contexts(purging)
    report, _ = purging.run_jobs().complete()
    assert report.work == WorkDone(2, size, 2, size, 0, 2, size)
    assert [work for ctx in ctxs for work in ctx.works][-1] == WorkDone(2, size, 0, 0, 0, 2, size)


@pytest.fixture
def _allowed(tmp_path: Path) -> Iterator[None]:
    export_targets.configure([str(tmp_path / "out")])
    yield
    export_targets.configure(())


@pytest.mark.usefixtures("_allowed")
def test_export(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for n in range(3):
        pq.write_table(pa.table({"id": [n]}), tmp_path / "t" / f"{n}.parquet")
    run = ExportRun(TableRecord("t", "parquet", str(tmp_path / "t")), str(tmp_path / "out" / "t"), tmp_path / "work")
    ctxs = _contexts(run)
    report = run.run().report
    size = report["files"]["bytes"]
    assert work_of(report) == WorkDone(3, size, 3, size, 0, 3, size)
    works = [work for ctx in ctxs for work in ctx.works]
    assert ([work.files for work in works], grows(works)) == ([1, 2, 3], True)
    assert work_of(run.run(dry_run=True).report) == WorkDone()


def test_compact_reports_each_batch_and_a_cancelled_one_what_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for n in range(3):
        rows = pa.concat_tables(table_of(100 * day + 10 * n, 10, day=[f"d{day}"] * 10) for day in range(4))
        write_deltalake(bench.path, rows, mode="append", partition_by=["day"])
    argument, plans, _ = bench.plan(commit_every=2)
    ctxs = _contexts(bench)
    outcomes = bench.run(argument, plans[:3])
    files, size = [len(plan.files) for plan in plans], [plan.bytes for plan in plans]
    works = [WorkDone.from_json(row.result["work"]) for row in outcomes]
    assert WorkDone(0, size[0]) in ctxs[0].works, "it is copied, and not yet offered"
    assert grows(ctxs[0].works[: ctxs[0].works.index(works[0]) + 1])
    assert works[0] == WorkDone(files[0], size[0])
    assert works[1] == WorkDone(files[1], size[1], 0, 0, 1, sum(files[:2]), sum(size[:2]))
    summary = Summary("cancelled", 4, 3, 0, lambda: iter(outcomes), plan=lambda: iter(plans))
    report = Compact().complete_operation(argument, bench.record, summary, bench.context())
    done = sum(files[:2]), sum(size[:2])
    assert report.work == WorkDone(*done, sum(files), sum(size), 1, *done)


def test_expire_snapshots(tmp_path: Path) -> None:
    grown(tmp_path / "t")
    expiring = Expiring(record(tmp_path / "t"), tmp_path / "work").plan().run_jobs()
    ctxs = _contexts(expiring)
    report, message = expiring.complete()
    assert not message
    deleted = report.deleted.values()
    files, size = sum(one.files for one in deleted), sum(one.bytes for one in deleted)
    work = report.work
    assert (work.files, work.of_files, work.commits) == (files, files, 1)
    assert (work.committed_files, work.committed_bytes) == (files, size)
    assert ctxs[-1].works[-1] == work


def test_a_cancelled_expire_snapshots_has_done_nothing(tmp_path: Path) -> None:
    grown(tmp_path / "t")
    expiring = Expiring(record(tmp_path / "t"), tmp_path / "work").plan()
    summary = Summary("cancelled", 1, 0, 0, plan=lambda: iter(expiring.partitions))
    report = ExpireSnapshots().complete_operation({}, expiring.table, summary, expiring.context())
    assert (report.removed, report.work) == (0, WorkDone())
