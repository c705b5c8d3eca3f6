"""Operation types whose jobs return results that are too large for etcd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from distop.behavior import Behavior, PartitionPlan, Planned

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord


class LargeArg(BaseModel):
    """``sizes``: the length of each job's result."""

    sizes: list[int] = Field(default_factory=list)


class LargeResult(BaseModel):
    """The result of a job."""

    text: str


class LargeReport(BaseModel):
    """The total length of all results."""

    length: int


class Large(Behavior):
    """Returns texts of the lengths in its argument; those too long for etcd go into files."""

    type_name = "large"
    Arg = LargeArg
    Result = LargeResult
    Report = LargeReport
    large_results = "file"

    def partitions(self, table: TableRecord, arg: LargeArg, ctx: JobContext) -> Planned:
        return Planned([PartitionPlan(n, f"p{n}") for n in range(len(arg.sizes))])

    def start_or_resume_job(self, arg: LargeArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        return LargeResult(text="x" * arg.sizes[partition.partition])

    def complete_operation(self, arg: LargeArg, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        return LargeReport(length=sum(len(row.result["text"]) for row in summary.outcomes() if row.success))


class Refusing(Large):
    """As :class:`Large`, but refuses results that are too large."""

    type_name = "refusing"
    large_results = "refuse"
