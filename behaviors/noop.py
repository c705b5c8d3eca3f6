"""``noop``: an operation that does nothing, for trying out, measuring and testing distop itself."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from distop.behavior import Behavior, JobCancelled, JobFailed, PartitionPlan, Planned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, TableRecord

EXIT_CODE = 9
"""The exit code of a job that is told to crash."""
STEP = 0.02
"""Seconds between two looks at ``ctx.cancelled`` while a job sleeps."""


class NoopArg(BaseModel):
    """What the jobs shall do; names are partition names, ``"0"`` … ``"<jobs - 1>"`` on a table."""

    model_config = ConfigDict(extra="forbid")

    jobs: int = Field(1, ge=0, le=1_000_000, description="How many jobs, on whatever table.")
    sleep: float = Field(0, ge=0, description="Seconds that each job takes.")
    fail: list[str] = Field(default_factory=list, description="Partitions whose verdict is failure.")
    error: list[str] = Field(default_factory=list, description="Partitions that meet an unexpected error.")
    crash: list[str] = Field(default_factory=list, description="Partitions that kill the worker process.")
    batch_error: list[str] = Field(default_factory=list, description="Partitions that break the batch they are in.")
    stubborn: list[str] = Field(default_factory=list, description="Partitions that do not stop when told to.")


class Noop(Behavior):
    """Does nothing, for as long as it is told to."""

    type_name = "noop"
    Arg = NoopArg
    failure_policy = "collect_all"

    def partitions(self, table: TableRecord, arg: NoopArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(i, str(i)) for i in range(arg.jobs)])

    def start_or_resume_job(self, arg: NoopArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        if partition.name in arg.batch_error:
            raise RuntimeError(f"partition {partition.name} was told to break")
        self._one(arg, partition, ctx)

    def run_batch(
        self, arg: NoopArg, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        breaking = set(arg.batch_error)
        plain = not (arg.sleep or arg.fail or arg.error or arg.crash)
        for partition in partitions:
            if partition.name in breaking:
                raise RuntimeError(f"partition {partition.name} was told to break")
            try:
                if not plain:
                    self._one(arg, partition, ctx)
                yield partition, None
            except Exception as error:
                yield partition, error

    def _one(self, arg: NoopArg, partition: PartitionPlan, ctx: JobContext) -> None:
        if arg.sleep:
            self._sleep(arg, partition, ctx)
        if partition.name in arg.crash:
            os._exit(EXIT_CODE)
        if partition.name in arg.fail:
            raise JobFailed(f"partition {partition.name} was told to fail")
        if partition.name in arg.error:
            raise RuntimeError(f"partition {partition.name} was told to meet an error")

    @staticmethod
    def _sleep(arg: NoopArg, partition: PartitionPlan, ctx: JobContext) -> None:
        end = time.monotonic() + arg.sleep
        listens = partition.name not in arg.stubborn
        while (left := end - time.monotonic()) > 0:
            if listens and ctx.is_cancelled(partition):
                raise JobCancelled(f"partition {partition.name} was told to stop")
            time.sleep(min(STEP, left))
