"""Runs index operations in one thread, job by job, with the stages of each attempt and instances of operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import JobCancelled, OutcomeRow, Summary, TableRecord
from distop.testing import MemoryProgress
from distop_behaviors.index import BuildIndex, DropIndex
from distop_behaviors.index.index_folder import Folder
from tests.support.context import FakeContext, sweep_stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from distop.behavior import Behavior, PartitionPlan
    from distop_behaviors.index.index_argument import BuildReport


def root_of(folder: Folder) -> Path:
    """The folder of an index on a disk."""
    return Path(folder.location)


def data_of(folder: Folder) -> Path:
    """The folder with the data files of an index on a disk."""
    return root_of(folder) / "data"


class Attempt(FakeContext):
    """The context of one attempt: its stage has its fence, and its checkpoints are kept for later attempts."""

    def __init__(
        self,
        indexes: Indexes,
        operation: str,
        partition: PartitionPlan | None = None,
        fence: int = 1,
        table: TableRecord | None = None,
    ) -> None:
        super().__init__(indexes.shared, table or indexes.record, indexes.spark, partition)
        self.space = indexes.space
        self.operation = operation
        self.fence = fence
        self.stop_after = -1
        """Number of checks for cancellation before the attempt is cancelled; -1: never."""

    @property
    def cancelled(self) -> bool:
        self.stop_after -= 1
        return self.stopped or self.stop_after == -1


class Operation:
    """One operation: planned by the constructor, then run job by job."""

    def __init__(self, indexes: Indexes, behavior: Behavior, arg: dict[str, Any]) -> None:
        self.indexes = indexes
        self.behavior = behavior
        self.arg = behavior.Arg.model_validate(arg)
        indexes.instances += 1
        self.name = f"t/{behavior.type_name}/{arg['name']}/{indexes.instances}"
        self.planned = behavior.partitions(indexes.record, self.arg, Attempt(indexes, self.name))
        self.table = indexes.record.extended(self.planned.options)
        self.progress: dict[int, MemoryProgress] = {}
        self.outcomes: dict[int, OutcomeRow] = {}

    def attempt(self, partition: PartitionPlan, fence: int = 1) -> Attempt:
        """The context of an attempt at a job, with the checkpoints of earlier attempts."""
        made = Attempt(self.indexes, self.name, partition, fence, self.table)
        made.progress = self.progress.setdefault(partition.partition, MemoryProgress())
        return made

    def run(self, partition: PartitionPlan, ctx: Attempt | None = None) -> Any:
        """Run the job and store its outcome; returns its result."""
        ctx = ctx or self.attempt(partition)
        result = self.behavior.start_or_resume_job(self.arg, partition, ctx)
        stored = json.loads(result.model_dump_json())
        stage = ctx.stage_place
        self.outcomes[partition.partition] = OutcomeRow(partition.partition, partition.name, True, stored, "", stage)
        return result

    def run_all(self) -> Operation:
        for partition in self.planned.partitions:
            if partition.partition not in self.outcomes:
                self.run(partition)
        return self

    def complete(self, verdict: Any = "success") -> Any:
        """Complete the operation; returns its report."""
        rows = [self.outcomes[n] for n in sorted(self.outcomes)]
        summary = Summary(verdict, len(self.planned.partitions), len(rows), 0, lambda: iter(rows), self.planned.version)
        ctx = Attempt(self.indexes, self.name, table=self.table)
        report = self.behavior.complete_operation(self.arg, self.table, summary, ctx)
        sweep_stages(self.behavior, ctx)
        return report


class Indexes:
    """The indexes of one table."""

    def __init__(self, location: Path, shared: Path, **options: Any) -> None:
        self.record = TableRecord("t", "parquet", str(location), options)
        self.shared = shared
        self.spark: SparkSession | None = None
        """Needed only by code that uses Spark's catalog."""
        self.instances = 0
        self.space = "c0ffee"

    def plan(self, name: str = "i", **arg: Any) -> Operation:
        """A planned build whose jobs have not run."""
        return Operation(self, BuildIndex(), {"name": name, **arg})

    def build(self, name: str = "i", **arg: Any) -> BuildReport:
        """Run a whole build; returns its report."""
        report: BuildReport = self.plan(name, **arg).run_all().complete()
        return report

    def drop(self, name: str = "i") -> bool:
        return bool(Operation(self, DropIndex(), {"name": name}).run_all().complete()["dropped"])

    def folder(self, name: str = "i") -> Folder:
        return Folder(self.record.location, name, self.space)

    def staged_files(self) -> list[Path]:
        """The files that are left in stages."""
        return [p for p in (self.shared / "stage").rglob("*") if p.is_file()]

    def orphan_files(self, name: str = "i") -> list[str]:
        """Files in the index's folder and in stages that no generation references, and missing referenced files."""
        folder = self.folder(name)
        referenced = {n.name for number in folder._numbers() for n in folder._read(number).named()}
        data = [path.name for path in data_of(folder).iterdir()] if data_of(folder).exists() else []
        names = [path.name for path in root_of(folder).iterdir()] if root_of(folder).exists() else []
        others = [name for name in names if name not in ("data", "generations")]
        return sorted({*data} ^ referenced) + others + [str(path) for path in self.staged_files()]


def is_cancelled(run: Callable[[], object]) -> bool:
    """Run it; returns whether it ended with JobCancelled."""
    try:
        run()
    except JobCancelled:
        return True
    return False
