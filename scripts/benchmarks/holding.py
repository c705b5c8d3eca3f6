"""An operation type for measurements: each job holds its claim until a file releases it, then writes its output."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.behavior import Behavior, PartitionPlan, Planned

if TYPE_CHECKING:
    from distop.behavior import JobContext, TableRecord

STEP = 0.02
"""Seconds between two checks for the file."""


class HoldingArg(BaseModel):
    """A job ends when ``folder`` contains a file ``go`` or ``go-<partition>``."""

    jobs: int
    folder: str


class Holding(Behavior):
    """Jobs that wait for a file."""

    type_name = "holding"
    Arg = HoldingArg
    staged_output = "keep"

    def partitions(self, table: TableRecord, arg: HoldingArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(n, str(n)) for n in range(arg.jobs)])

    def start_or_resume_job(self, arg: HoldingArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        folder = Path(arg.folder)
        while not ((folder / "go").exists() or (folder / f"go-{partition.name}").exists()):
            ctx.check_cancelled()
            time.sleep(STEP)
        file = Path(ctx.stage) / "output.txt"
        file.write_text(content(ctx.operation, partition.partition))
        return {"file": str(file)}


def content(operation: str, partition: int) -> str:
    """The output of one job."""
    return f"{operation} {partition}\n"
