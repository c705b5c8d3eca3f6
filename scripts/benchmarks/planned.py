"""An operation type for measurements: all that ``validate`` is but its work. It plans its table, has a job for each
partition, each of which answers as much as one of validate's, and makes a report of the answers; it looks at no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.behavior import Behavior

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord


class PlannedArg(BaseModel):
    """``checks``: so many are answered for."""

    checks: int


class Planned(Behavior):
    """What coordination costs an operation on a table."""

    type_name = "planned"
    Arg = PlannedArg
    failure_policy = "collect_all"
    needs_table = True
    reports_only = True

    def start_or_resume_job(self, arg: PlannedArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        """As validate answers for a file whose statistics decide everything."""
        return {"verdict": "valid", "rows": 20, "checks": [{"verdict": "valid", "files_statistics": 1}] * arg.checks}

    def run_batch(
        self, arg: PlannedArg, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        """Each partition with its answer."""
        for partition in partitions:
            yield partition, self.start_or_resume_job(arg, partition, ctx)

    def complete_operation(self, arg: PlannedArg, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """All rows."""
        return {"rows": sum(outcome.result["rows"] for outcome in summary.outcomes())}
