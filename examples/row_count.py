"""An example behavior: counts the rows of each partition and of the table."""

from typing import Any

from pydantic import BaseModel

from distop.behavior import Behavior, JobContext, JobFailed, PartitionPlan, Summary, TableRecord


class Arg(BaseModel):
    at_least: int = 0


class Count(BaseModel):
    rows: int


class RowCount(Behavior):
    """Counts rows. The job of a partition with fewer than ``at_least`` rows fails."""

    type_name = "row_count"
    Arg = Arg
    Result = Count
    Report = Count
    failure_policy = "collect_all"
    reports_only = True

    def start_or_resume_job(self, arg: Arg, partition: PartitionPlan, ctx: JobContext) -> Count:
        ctx.status(f"counting {partition.name}")
        rows = ctx.rows(partition).count()
        if rows < arg.at_least:
            raise JobFailed(f"{partition.name} has {rows} rows, fewer than {arg.at_least}", Count(rows=rows))
        return Count(rows=rows)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Count:
        return Count(rows=sum(outcome.result["rows"] for outcome in summary.outcomes() if outcome.success))
