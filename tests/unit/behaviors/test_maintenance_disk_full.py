"""The maintenance operations on a full disk: nothing is lost, and the next attempt completes what failed.

Each write fails once: by the disk itself (a small file system, if the tests may mount one), by the limit of a file's
size, and by a flush that reports a full disk, also one after the change was made.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import DistopError
from distop.storage import export_targets
from distop.testing import MemoryProgress
from distop_behaviors.compact import Compact
from distop_behaviors.expire import ExpirePartitions, ExpireSnapshots
from distop_behaviors.export import Export
from distop_behaviors.orphans import RemoveOrphans
from tests.faults.maintained_tables import (
    CompactTables,
    ExpirePartitionsTables,
    ExpireSnapshotsTables,
    ExportTables,
    Maintained,
    RemoveOrphansTables,
)
from tests.support.context import FakeContext, complete, run_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from distop.behavior import Behavior, OutcomeRow, PartitionPlan, TableRecord

    Shortage = Callable[[], AbstractContextManager[Callable[[], bool]]]
    """A time in which writes fail; yields a function that tells whether one has failed."""

TYPES: dict[type[Maintained], type[Behavior]] = {
    CompactTables: Compact,
    ExpireSnapshotsTables: ExpireSnapshots,
    ExpirePartitionsTables: ExpirePartitions,
    RemoveOrphansTables: RemoveOrphans,
    ExportTables: Export,
}
PAGE = 4096


class Running:
    """An operation whose steps are repeated when they have failed, like on executors."""

    def __init__(self, tables: Maintained, name: str, work: Path, record: TableRecord) -> None:
        self._behavior = TYPES[type(tables)]()
        argument = {"to": tables.target(name)} if isinstance(tables, ExportTables) else dict(tables.argument)
        self._argument = self._behavior.Arg.model_validate({**argument, **_FAST.get(type(tables), {})})
        self._record, self._work = record, work
        self.ref = f"{name}/{self._behavior.type_name}/1"
        self._plans: list[PartitionPlan] | None = None
        self._rows: dict[int, OutcomeRow] = {}
        self._progress: dict[int, MemoryProgress] = {}
        self._fence = 0
        self._version = ""

    def _context(self, plan: PartitionPlan | None = None) -> FakeContext:
        ctx = FakeContext(self._work, self._record)
        ctx.operation, ctx.fence, ctx.partition = self.ref, self._fence, plan
        ctx.progress = MemoryProgress() if plan is None else self._progress.setdefault(plan.partition, MemoryProgress())
        return ctx

    def step_on(self) -> Any:
        """Run whatever is left to do; returns the report."""
        self._fence += 1
        if self._plans is None:
            planned = self._behavior.partitions(self._record, self._argument, self._context())
            self._plans = list(self._behavior.jobs(self._argument, planned.partitions, None, self._context()))
            self._version = planned.version
        for plan in self._plans:
            if plan.partition not in self._rows:
                if self._fence > 1:
                    self._clean_up(plan)
                (row,) = run_jobs(self._behavior, self._argument, [plan], self._context(plan))
                if not row.success:
                    raise OSError(row.error)  # a failed job ends the operation: its next one has to succeed
                self._rows[plan.partition] = row
        rows = [self._rows[plan.partition] for plan in self._plans]
        ran = complete(
            self._behavior, self._argument, self._record, rows, self._plans, self._context(), version=self._version
        )
        if ran.message:
            raise OSError(ran.message)
        return ran.report

    def _clean_up(self, plan: PartitionPlan) -> None:
        former = self._context(plan)
        former.fence -= 1
        self._behavior.cancel_job_and_cleanup(self._argument, plan, former)


_FAST: dict[type[Maintained], dict[str, Any]] = {RemoveOrphansTables: {"max_per_second": None}}


@contextmanager
def full_file_system(disk: Path, free: int) -> Iterator[Callable[[], bool]]:
    """Fill the file system of a folder, but for so many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * PAGE)
            except OSError:
                break
        file.truncate(max(0, file.tell() - free))
    try:
        yield lambda: True
    finally:
        filler.unlink()


@contextmanager
def small_files(limit: int) -> Iterator[Callable[[], bool]]:
    """Limit the size of each file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield lambda: True
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def failing_flush(number: int) -> Iterator[Callable[[], bool]]:
    """Let the flush of this number fail: of a file, or of the folder that has just got it."""
    original, calls = os.fsync, [0]

    def fsync(file: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield lambda: calls[0] >= number


class Tables:
    """Makes tables of a kind, on which operations run without etcd."""

    def __init__(self, kind: type[Maintained], folder: Path) -> None:
        self.records: dict[str, TableRecord] = {}
        client = SimpleNamespace(add_table=lambda record: self.records.update({record.name: record}))
        faults = SimpleNamespace(set_faults=lambda *_: None)
        self.tables = kind(SimpleNamespace(client=client), folder, faults, str(folder / "tables"))  # type: ignore[arg-type]
        export_targets.configure([str(folder / "tables" / "out")])

    def check(self, name: str, shortage: AbstractContextManager[Callable[[], bool]], work: Path) -> bool:
        """Run an operation during a shortage, and afterwards again; returns whether a write has failed."""
        self.tables.create(name)
        running = Running(self.tables, name, work, self.records[name])
        report = None
        with shortage as has_failed:
            with suppress(OSError, DistopError):
                report = running.step_on()
            failed = has_failed()
        self.tables.assert_neighbour(name)
        if not isinstance(self.tables, ExpirePartitionsTables):
            assert self.tables.read(name) == self.tables.rows[name]
        if report is None:
            report = running.step_on()
        self.tables.assert_done(name, SimpleNamespace(ref=running.ref), report)  # type: ignore[arg-type]
        return failed


@pytest.fixture(autouse=True)
def _no_targets() -> Iterator[None]:
    yield
    export_targets.configure(())


def name_of(kind: type[Maintained]) -> str:
    return kind.__name__.removesuffix("Tables")


@pytest.mark.rotating
@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_each_flush_fails_once(kind: type[Maintained], tmp_path: Path) -> None:
    made, number = Tables(kind, tmp_path), 1
    (tmp_path / "work").mkdir()
    while made.check(f"t{number}", failing_flush(number), tmp_path / "work"):
        number += 1
    assert number > (1 if kind is RemoveOrphansTables else 2)


@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_files_may_not_grow(kind: type[Maintained], tmp_path: Path) -> None:
    made = Tables(kind, tmp_path)
    (tmp_path / "work").mkdir()
    for limit in (0, 64, 600, 1200, PAGE):
        made.check(f"t{limit}", small_files(limit), tmp_path / "work")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("these tests may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_the_disk_is_full(kind: type[Maintained], disk: Path) -> None:
    made = Tables(kind, disk)
    (disk / "work").mkdir()
    for pages in (0, 1, 2, 3, 5, 8, 13):
        made.check(f"t{pages}", full_file_system(disk, pages * PAGE), disk / "work")
