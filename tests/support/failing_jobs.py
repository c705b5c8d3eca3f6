"""``rough``: ``noop`` with jobs that raise an error, fail their batch, or crash their child process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pydantic import Field

from distop_behaviors.noop import Noop, NoopArg

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan

EXIT_CODE = 9
"""The exit code of a child that a job has crashed."""


class RoughArg(NoopArg):
    """The argument of ``noop``, and the names of partitions with further faults."""

    error: list[str] = Field(default_factory=list, description="Partitions that raise an unexpected error.")
    crash: list[str] = Field(default_factory=list, description="Partitions that end the worker process.")
    batch_error: list[str] = Field(default_factory=list, description="Partitions that fail the whole batch.")


class Rough(Noop):
    """Fails in the ways that its argument names."""

    type_name = "rough"
    Arg = RoughArg

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        super().start_or_resume_job(arg, partition, ctx)
        if partition.name in arg.crash:
            os._exit(EXIT_CODE)
        if partition.name in arg.error:
            raise RuntimeError(f"planned error of partition {partition.name}")
        if partition.name in arg.batch_error:
            raise RuntimeError(f"planned error of the batch of partition {partition.name}")

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        for partition in partitions:
            if partition.name in arg.batch_error:
                raise RuntimeError(f"planned error of the batch of partition {partition.name}")
            try:
                yield partition, self.start_or_resume_job(arg, partition, ctx)
            except Exception as error:
                yield partition, error
