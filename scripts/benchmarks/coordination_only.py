"""An operation type for measurements: the coordination of ``validate`` without its work.

It plans its table, has one job per partition with a result as large as that of validate, and makes a report of the
results. It reads no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from distop.behavior import Behavior

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord


class CoordinationOnlyArg(BaseModel):
    """``checks``: the number of checks in each job's result."""

    checks: int


class CoordinationOnly(Behavior):
    """An operation on a table whose time is all coordination."""

    type_name = "coordination-only"
    Arg = CoordinationOnlyArg
    failure_policy = "collect_all"
    needs_table = True
    reports_only = True

    def start_or_resume_job(self, arg: CoordinationOnlyArg, partition: PartitionPlan, ctx: JobContext) -> Any:
        """The result of validate for a file whose statistics decide all checks."""
        return {"verdict": "valid", "rows": 20, "checks": [{"verdict": "valid", "files_statistics": 1}] * arg.checks}

    def run_batch(
        self, arg: CoordinationOnlyArg, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        """Each partition with its result."""
        for partition in partitions:
            yield partition, self.start_or_resume_job(arg, partition, ctx)

    def complete_operation(
        self, arg: CoordinationOnlyArg, table: TableRecord | None, summary: Summary, ctx: JobContext
    ) -> Any:
        """The number of rows."""
        return {"rows": sum(outcome.result["rows"] for outcome in summary.outcomes())}
