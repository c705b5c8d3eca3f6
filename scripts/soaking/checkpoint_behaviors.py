"""Operation types with checkpoints, output that needs a cleanup, and follow-up operations.

Each attempt of a job writes its rows into its own segment, in its stage. A checkpoint names the segments so far, with
the number of valid rows of each. If the last one names each row once, no row was lost or duplicated.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from distop.behavior import Behavior, JobFailed, PartitionPlan, Planned
from distop.protocol.behavior_declaration import Retry
from tests.support.writing import WritingArg, note

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord


class StepArg(WritingArg):
    """The argument of these types.

    ``held``: a folder with a file of each job, from its start to its end or cleanup. ``forced``: each checkpoint is
    saved; else the rate limit applies. ``then``: the argument of the follow-up operation after a success. ``does``:
    ``fail`` or ``error`` in the middle of a job.
    """

    held: str
    forced: bool = True
    object: str = ""
    then: str = ""


class StepWriting(Behavior):
    """Resumes from its checkpoints, and cleans up."""

    type_name = "stepwriting"
    Arg = StepArg
    staged_output = "keep"
    resumable = True
    failure_policy = "collect_all"
    retry = Retry(attempts=5, initial=0.1, maximum=1.0)

    def partitions(self, table: TableRecord, arg: StepArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(n, f"p={n}") for n in range(arg.jobs)])

    def start_or_resume_job(self, arg: StepArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        segments = [list(segment) for segment in ctx.progress.load() or ()] if self.resumable else []
        done = sum(count for _, count in segments)
        note(arg.journal, partition.partition, ctx.attempt, f"from {done}")
        for left in _left(arg, partition, ctx):
            left.touch()
        # Another process of the same attempt must not change a segment that a checkpoint names.
        file = Path(ctx.stage) / f"rows-{done}-{os.getpid()}.txt"
        segments.append([str(file), 0])
        with file.open("w") as out:
            for row in range(done, arg.rows):
                ctx.check_cancelled()
                if row == arg.rows // 2:
                    _raise_requested_error(arg.does.get(partition.name, ""))
                note(arg.journal, partition.partition, ctx.attempt, "row")
                out.write(f"{partition.name} {row}\n")
                out.flush()
                segments[-1][1] += 1
                if self.resumable and ctx.progress.save(segments, force=arg.forced):
                    note(arg.journal, partition.partition, ctx.attempt, f"saved {row + 1}")
                time.sleep(arg.pause)
        for left in _left(arg, partition, ctx):
            left.unlink(missing_ok=True)
        return {"segments": segments, "rows": arg.rows}

    def cancel_job_and_cleanup(self, arg: StepArg, partition: PartitionPlan, ctx: JobContext) -> None:
        everywhere, here = _left(arg, partition, ctx)
        if not ctx.superseded:
            everywhere.unlink(missing_ok=True)
        here.unlink(missing_ok=True)

    def complete_operation(self, arg: StepArg, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        if arg.then and summary.verdict == "success" and table is not None:
            ctx.start_operation("following", table.name, FollowingArg(of=arg.then))
        return {"rows": sum(row.result["rows"] for row in summary.outcomes() if row.success)}


class Lone(StepWriting):
    """One runs at a time for each object. Its jobs start over, and fail if their executor is lost."""

    type_name = "lone"
    object_field = "object"
    instances = "one"
    lost = "fail"
    resumable = False


class FollowingArg(BaseModel):
    """``of``: the name of the operation before."""

    model_config = ConfigDict(extra="forbid")

    of: str


class Following(Behavior):
    """A follow-up operation of one job."""

    type_name = "following"
    Arg = FollowingArg

    def partitions(self, table: TableRecord, arg: FollowingArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "all")])

    def start_or_resume_job(self, arg: FollowingArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        return {"of": arg.of}


def _left(arg: StepArg, partition: PartitionPlan, ctx: JobContext) -> tuple[Path, Path]:
    """The files that a job's cleanup removes: one common to all attempts, one in the node's private directory."""
    return Path(arg.held) / partition.name, ctx.work_dir / f"local-{partition.name}"


def _raise_requested_error(action: str) -> None:
    if action == "fail":
        raise JobFailed("the verdict is negative")
    if action == "error":
        raise RuntimeError("requested error in the middle of the job")
