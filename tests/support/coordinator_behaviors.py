"""Operation types for tests of the coordinator: failing plannings and completions, and a type that runs alone."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.behavior import Behavior, PartitionPlan, Planned, WorkDone
from distop.errors import InvalidArgument, TableBusy
from distop.protocol.behavior_declaration import Retry

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord

ENTRY_POINTS = """\
[distop.behaviors]
stumbling = tests.support.coordinator_behaviors:Stumbling
reporting = tests.support.coordinator_behaviors:Reporting
alone = tests.support.coordinator_behaviors:Alone
working = tests.support.coordinator_behaviors:Working
"""
NO_PLAN, NO_REPORT = "no listing today", "no report today"
BUSY = "cannot list s3://lake/t: status 503 SlowDown"


def check_store(action: str) -> None:
    """Raises the error of a busy store for the action ``busy FILE``, until this file exists."""
    word, _, file = action.partition(" ")
    if word == "busy" and not Path(file).exists():
        raise TableBusy(BUSY)


class StumblingArg(BaseModel):
    """``diary``: a file to which all calls are logged. ``plan``, ``complete``: their actions.

    The action ``node`` fails on nodes whose environment has STUMBLES; ``busy FILE`` meets a busy store.
    """

    diary: str
    plan: str = ""
    complete: str = ""
    gate: str = ""


class Stumbling(Behavior):
    """An operation with one job that cannot fail; its argument chooses what planning and completion do."""

    type_name = "stumbling"
    Arg = StumblingArg
    can_fail = False
    retry = Retry(attempts=2, initial=0.05, maximum=0.1)

    def partitions(self, table: TableRecord, arg: StumblingArg, ctx: JobContext) -> Planned:
        write(arg.diary, "plan")
        check_store(arg.plan)
        while arg.plan == "hang":
            time.sleep(0.02)
        while arg.plan == "wait":
            ctx.check_cancelled()
            time.sleep(0.02)
        if arg.plan == "wrong":
            raise InvalidArgument("the location is wrong")
        if arg.plan == "error" or (arg.plan == "node" and "STUMBLES" in os.environ):
            raise RuntimeError(NO_PLAN)
        return Planned([PartitionPlan(0, "only")])

    def start_or_resume_job(self, arg: StumblingArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        return None

    def complete_operation(
        self, arg: StumblingArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> dict[str, Any]:
        write(arg.diary, "complete")
        check_store(arg.complete)
        if arg.complete == "error" or (arg.complete == "node" and "STUMBLES" in os.environ):
            raise RuntimeError(NO_REPORT)
        if arg.complete.startswith("until "):
            wait_for(arg.complete.removeprefix("until "), ctx)
        while arg.complete == "hang" and summary.verdict != "cancelled":
            time.sleep(0.02)
        if arg.complete == "wrong":
            raise InvalidArgument("the report is wrong")
        if arg.complete == "follow":
            ctx.start_operation("alone", "t", {"gate": arg.gate})
        return {}


class Reporting(Stumbling):
    """The same, with a completion that only makes a report, unless the environment has EFFECTS.

    Its job waits for the file ``gate``, if given.
    """

    type_name = "reporting"
    reports_only = "EFFECTS" not in os.environ

    def start_or_resume_job(self, arg: StumblingArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        wait_for(arg.gate, ctx)


class Tripping(Stumbling):
    """The same, with more attempts and longer pauses between them."""

    type_name = "tripping"
    retry = Retry(attempts=4, initial=0.5, maximum=2.0)


class AloneArg(BaseModel):
    """``gate``: the job ends when this file exists."""

    gate: str


class Alone(Behavior):
    """Of this type only one operation runs at a time; its job waits for a file."""

    type_name = "alone"
    Arg = AloneArg
    instances = "one"

    def partitions(self, table: TableRecord, arg: AloneArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(0, "only")])

    def start_or_resume_job(self, arg: AloneArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        wait_for(arg.gate, ctx)


class WorkingArg(BaseModel):
    """``job``, ``complete``: the second job and the completion report half of their work until this file exists."""

    job: str
    complete: str


class WorkingResult(BaseModel):
    """``work``: that of the job, or of the operation."""

    work: WorkDone = WorkDone()


class Working(Behavior):
    """Two jobs of ten files each, which commit what they do; they and the completion report their work."""

    type_name = "working"
    Arg = WorkingArg
    Result = WorkingResult
    Report = WorkingResult

    def partitions(self, table: TableRecord, arg: WorkingArg, ctx: JobContext) -> Planned:
        files = tuple((f"{table.location}/{n}", 10, 0) for n in range(10))
        return Planned([PartitionPlan(n, f"p{n}", 100, files) for n in range(2)])

    def start_or_resume_job(self, arg: WorkingArg, partition: PartitionPlan, ctx: JobContext) -> WorkingResult:
        if partition.partition:
            ctx.work_done(files=5, bytes=50, commits=1, committed_files=5, committed_bytes=50)
            wait_for(arg.job, ctx)
        return WorkingResult(work=WorkDone(10, 100, commits=1, committed_files=10, committed_bytes=100))

    def complete_operation(
        self, arg: WorkingArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> WorkingResult:
        found = [row.result["work"] for row in summary.outcomes() if row.result is not None]
        if summary.verdict == "success":
            ctx.work_done(files=3, of_files=6)
            wait_for(arg.complete, ctx)
        return WorkingResult(work=sum(map(WorkDone.from_json, found), WorkDone()))


def wait_for(gate: str, ctx: JobContext) -> None:
    while gate and not Path(gate).exists():
        ctx.check_cancelled()
        time.sleep(0.02)


def write(diary: str, line: str) -> None:
    with Path(diary).open("a") as file:
        file.write(f"{line}\n")
