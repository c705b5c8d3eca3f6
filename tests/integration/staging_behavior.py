"""Operation types whose jobs stage a file each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.storage.stage_manifest import StagedOutput

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord

JOBS = 3


class StagingArg(BaseModel):
    """``go``: jobs end when this file exists, after they have written their files."""

    go: str


class StagingResult(BaseModel):
    """The result of a job."""

    output: StagedOutput


class StagingReport(BaseModel):
    """The lines of all staged files."""

    lines: int


class Staging(Behavior):
    """Stages a file in each job; completion reads them."""

    type_name = "staging"
    Arg = StagingArg
    Result = StagingResult
    Report = StagingReport
    staged_output = "remove"

    def partitions(self, table: TableRecord, arg: StagingArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(n, f"p{n}") for n in range(JOBS)])

    def start_or_resume_job(self, arg: StagingArg, partition: PartitionPlan, ctx: JobContext) -> StagingResult:
        (Path(ctx.stage) / "lines.txt").write_text(f"{partition.name}\n{ctx.attempt}\n")
        while not Path(arg.go).exists():
            ctx.check_cancelled()
            time.sleep(0.01)
        return StagingResult(output=ctx.manifest({"lines.txt": 2}))

    def complete_operation(
        self, arg: StagingArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> StagingReport:
        lines = 0
        for row in summary.outcomes():
            if row.success:
                staged = ctx.staged(row, StagingResult.model_validate(row.result).output)
                lines += sum(staged.read(file, limit=1 << 20).count(b"\n") for file in staged.files)
        return StagingReport(lines=lines)


class KeptStaging(Staging):
    """As :class:`Staging`, but users read the staged files."""

    type_name = "kept-staging"
    staged_output = "keep"
