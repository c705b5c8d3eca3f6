"""An operation type whose jobs give results that are too large for etcd, and that counts them in its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from distop.behavior import Behavior, PartitionPlan, Planned

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord


class LargeArg(BaseModel):
    """``sizes``: how long the text is that each job gives."""

    sizes: list[int] = Field(default_factory=list)


class LargeResult(BaseModel):
    """What a job gives."""

    text: str


class LargeReport(BaseModel):
    """How long all texts are together."""

    length: int


class Large(Behavior):
    """Gives texts of the lengths that it is told, in files where they are too long for etcd."""

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
    """The same, and refuses what is too large."""

    type_name = "refusing"
    large_results = "refuse"
