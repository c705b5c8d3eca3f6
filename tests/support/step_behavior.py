"""A resumable operation type for tests: each job runs steps, and saves a checkpoint after the output of each step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from distop.behavior import JobContext, TableRecord


class StepsArg(BaseModel):
    """``folder``: for outputs, the diary and the files that release jobs.

    A job waits before each step of ``hold`` until the file ``go-<name>-<step>`` exists or the job is cancelled.
    """

    model_config = ConfigDict(extra="forbid")

    names: list[str]
    folder: str
    steps: int = 5
    hold: list[int] = Field(default_factory=list)
    forced: bool = True
    """Save all checkpoints; otherwise the rate limit may skip some."""
    broken: list[int] = Field(default_factory=list)
    """Steps whose checkpoint is too large."""
    kills: dict[str, int] = Field(default_factory=dict)
    """Partition → the step at which its job kills its daemon."""


class Steps(Behavior):
    """Writes a line of output per step."""

    type_name = "steps"
    Arg = StepsArg
    resumable = True
    failure_policy = "collect_all"

    def partitions(self, table: TableRecord, arg: StepsArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(n, name) for n, name in enumerate(arg.names)])

    def start_or_resume_job(self, arg: StepsArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        done = ctx.progress.load() or 0
        log_line(arg, f"start {partition.name} at {done} attempt {ctx.attempt}")
        (ctx.work_dir / f"local-{partition.name}").touch()
        for step in range(done + 1, arg.steps + 1):
            while step in arg.hold and not Path(arg.folder, f"go-{partition.name}-{step}").exists():
                ctx.check_cancelled()
                time.sleep(0.005)
            if arg.kills.get(partition.name) == step:
                os.kill(daemon_of_this_child(), signal.SIGKILL)
                time.sleep(60)
            with output(arg, partition).open("a") as file:
                file.write(f"{step}\n")
            try:
                ctx.progress.save("x" * 70_000 if step in arg.broken else step, force=arg.forced)
            except InvalidArgument:
                log_line(arg, f"not saved {partition.name} {step}")
            log_line(arg, f"step {partition.name} {step}")
        return output(arg, partition).read_text().split()

    def cancel_job_and_cleanup(self, arg: StepsArg, partition: PartitionPlan, ctx: JobContext) -> None:
        log_line(arg, f"{'clean-local' if ctx.superseded else 'clean'} {partition.name}")
        if not ctx.superseded:
            output(arg, partition).unlink(missing_ok=True)
        (ctx.work_dir / f"local-{partition.name}").unlink(missing_ok=True)


class Restarting(Steps):
    """The same, but its jobs restart from the beginning."""

    type_name = "restarting"
    resumable = False


def output(arg: StepsArg, partition: PartitionPlan) -> Path:
    return Path(arg.folder, f"out-{partition.name}")


def log_line(arg: StepsArg, line: str) -> None:
    with Path(arg.folder, "diary.txt").open("a") as file:
        file.write(line + "\n")


def daemon_of_this_child() -> int:
    """The process id of the daemon: the parent of the guardian, which is the parent of this process."""
    guardian = os.getppid()
    return int(Path(f"/proc/{guardian}/stat").read_text().rpartition(")")[2].split()[1])
