"""``rough``: ``noop`` with jobs that break themselves, their batch, or the child that they run in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pydantic import Field

from distop_behaviors.noop import Noop, NoopArg

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan

EXIT_CODE = 9
"""The exit code of a job that is told to crash."""


class RoughArg(NoopArg):
    """What else goes wrong, by partition names."""

    error: list[str] = Field(default_factory=list, description="Partitions that meet an unexpected error.")
    crash: list[str] = Field(default_factory=list, description="Partitions that kill the worker process.")
    batch_error: list[str] = Field(default_factory=list, description="Partitions that break the batch they are in.")


class Rough(Noop):
    """Breaks where it is told to."""

    type_name = "rough"
    Arg = RoughArg

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        super().start_or_resume_job(arg, partition, ctx)
        if partition.name in arg.crash:
            os._exit(EXIT_CODE)
        if partition.name in arg.error:
            raise RuntimeError(f"partition {partition.name} was told to meet an error")
        if partition.name in arg.batch_error:
            raise RuntimeError(f"partition {partition.name} was told to break")

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        for partition in partitions:
            if partition.name in arg.batch_error:
                raise RuntimeError(f"partition {partition.name} was told to break")
            try:
                yield partition, self.start_or_resume_job(arg, partition, ctx)
            except Exception as error:
                yield partition, error
