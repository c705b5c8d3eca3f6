"""``noop``: an operation that does nothing, for trying out and measuring distop itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from distop.behavior import Behavior, JobCancelled, JobFailed, PartitionPlan, Planned
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, TableRecord

LONGEST_SLEEP = 3600
"""Seconds that a job may take: it holds a slot for nothing."""
STEP = 0.02
"""Seconds between two looks at ``ctx.cancelled`` while a job sleeps."""


_CHECKED_EVERY = 10_000
"""Jobs between two looks at whether planning is to stop."""


class NoopArg(BaseModel):
    """What the jobs shall do. Names are those of partitions: ``"0"`` … ``"<jobs - 1>"`` on a table, ``"all"`` on
    @cluster."""

    model_config = ConfigDict(extra="forbid")

    jobs: int = Field(1, ge=0, le=1_000_000, description="How many jobs, on whatever table; on @cluster there is one.")
    sleep: float = Field(0, ge=0, le=LONGEST_SLEEP, description="Seconds that each job takes, at most an hour.")
    fail: list[str] = Field(default_factory=list, description="Partitions whose verdict is failure.")


class Noop(Behavior):
    """Does nothing, for as long as it is told to."""

    type_name = "noop"
    Arg = NoopArg
    failure_policy = "collect_all"

    def partitions(self, table: TableRecord, arg: NoopArg, ctx: JobContext) -> Planned:
        partitions = []
        for number in range(arg.jobs):
            if number % _CHECKED_EVERY == 0:
                ctx.check_cancelled()
            partitions.append(PartitionPlan(number, str(number)))
        return Planned(partitions)

    def start_or_resume_job(self, arg: NoopArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Raises InvalidArgument for what @cluster does not have."""
        if ctx.table is None:
            _check_cluster(arg, partition)
        if arg.sleep:
            self._sleep(arg, partition, ctx)
        if partition.name in arg.fail:
            raise JobFailed(f"partition {partition.name} was told to fail")

    def run_batch(
        self, arg: NoopArg, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        """Every partition with None, or with what its job raises."""
        plain = ctx.table is not None and not (arg.sleep or arg.fail)
        for partition in partitions:
            try:
                if not plain:
                    self.start_or_resume_job(arg, partition, ctx)
                yield partition, None
            except Exception as error:
                yield partition, error

    @staticmethod
    def _sleep(arg: NoopArg, partition: PartitionPlan, ctx: JobContext) -> None:
        end = time.monotonic() + arg.sleep
        while (left := end - time.monotonic()) > 0:
            if ctx.is_cancelled(partition):
                raise JobCancelled(f"partition {partition.name} was told to stop")
            time.sleep(min(STEP, left))


def _check_cluster(arg: NoopArg, partition: PartitionPlan) -> None:
    if arg.jobs != 1:
        raise InvalidArgument(f"an operation on @cluster has one job: leave out jobs ({arg.jobs} here)")
    if unknown := [name for name in arg.fail if name != partition.name]:
        raise InvalidArgument(f"@cluster has one partition, {partition.name!r}: fail names {unknown[0]!r}")
