"""Operation types that leave something behind on their way: checkpoints, files under fixed names, what follows them.

Each attempt of a job writes its rows into a segment of its own, in its stage; a checkpoint names the segments so far,
with the rows of each that count. So what the last one names is all rows once, or something was lost or doubled.
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
    """``held``: a folder that holds a file of each job from its start until its end or its cleanup. ``forced``: each
    checkpoint is saved, else as the rate limit lets it. ``then``: a success is followed by an operation that has this
    for its argument. ``does``: ``fail`` or ``error``, in the middle.
    """

    held: str
    forced: bool = True
    object: str = ""
    then: str = ""


class StepWriting(Behavior):
    """Goes on from its checkpoints, and cleans up."""

    type_name = "stepwriting"
    Arg = StepArg
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
        # Another process that goes on within the same attempt must not touch what a checkpoint names already.
        file = Path(ctx.stage) / f"rows-{done}-{os.getpid()}.txt"
        segments.append([str(file), 0])
        with file.open("w") as out:
            for row in range(done, arg.rows):
                ctx.check_cancelled()
                if row == arg.rows // 2:
                    _stumble(arg.does.get(partition.name, ""))
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
    """Runs one at a time for each object, starts over, and fails where an executor is lost."""

    type_name = "lone"
    object_field = "object"
    instances = "one"
    lost = "fail"
    resumable = False


class FollowingArg(BaseModel):
    """``of``: what it follows."""

    model_config = ConfigDict(extra="forbid")

    of: str


class Following(Behavior):
    """Is there, once."""

    type_name = "following"
    Arg = FollowingArg

    def partitions(self, table: TableRecord, arg: FollowingArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "all")])

    def start_or_resume_job(self, arg: FollowingArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        return {"of": arg.of}


def _left(arg: StepArg, partition: PartitionPlan, ctx: JobContext) -> tuple[Path, Path]:
    """What a job leaves until it is cleaned up: in a place of all attempts, and in the node's private directory."""
    return Path(arg.held) / partition.name, ctx.work_dir / f"local-{partition.name}"


def _stumble(action: str) -> None:
    if action == "fail":
        raise JobFailed("the answer is no")
    if action == "error":
        raise RuntimeError("told to break in the middle")
