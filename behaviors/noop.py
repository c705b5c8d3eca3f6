"""``noop``: an operation that does nothing, for trying out and measuring distop."""

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
"""Maximum seconds of a job: a sleeping job holds a slot of its executor."""
STEP = 0.02
"""Seconds between two checks of ``ctx.cancelled`` while a job sleeps."""


_CHECKED_EVERY = 10_000
"""Jobs between two checks whether planning must stop."""


class NoopArg(BaseModel):
    """How many jobs there are, how long they take, and which of them fail.

    Jobs have the names of their partitions: ``"0"`` … ``"<jobs - 1>"`` on a table, ``"all"`` on @cluster.
    """

    model_config = ConfigDict(extra="forbid")

    jobs: int = Field(1, ge=0, le=1_000_000, description="Number of jobs on a table; on @cluster there is one job.")
    sleep: float = Field(0, ge=0, le=LONGEST_SLEEP, description="Seconds that each job takes, at most an hour.")
    fail: list[str] = Field(default_factory=list, description="Names of the partitions whose jobs fail.")


class Noop(Behavior):
    """Does nothing, for a given number of seconds."""

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
        """Sleep, or fail. Raises InvalidArgument if the argument does not fit @cluster."""
        if ctx.table is None:
            _check_cluster(arg, partition)
        if arg.sleep:
            self._sleep(arg, partition, ctx)
        if partition.name in arg.fail:
            raise JobFailed(f"partition {partition.name} fails as the argument demands")

    def run_batch(
        self, arg: NoopArg, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        """Each partition with the result None, or with the exception of its job."""
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
                raise JobCancelled(f"partition {partition.name} was asked to stop")
            time.sleep(min(STEP, left))


def _check_cluster(arg: NoopArg, partition: PartitionPlan) -> None:
    if arg.jobs != 1:
        raise InvalidArgument(f"jobs is {arg.jobs}, but an operation on @cluster has one job: leave jobs out")
    if unknown := [name for name in arg.fail if name != partition.name]:
        raise InvalidArgument(f"'fail' has {unknown[0]!r}, but @cluster has only the partition {partition.name!r}")
