"""``purge``: removes a table's registration, and then all files that the table reaches.

See docs/reference/purge.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.errors import InvalidArgument
from distop_behaviors.purge.purge_argument import PurgeArgument, PurgeReport, PurgeResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, Summary, TableRecord

__all__ = ["DropTablePurgeJob", "Purge"]

NO_TABLE = "a purge deletes the files of a table: start it on a registered one"


class Purge(Behavior):
    """Removes a table's registration, and then all files that the table reaches."""

    type_name = "purge"
    Arg = PurgeArgument
    Result = PurgeResult
    Report = PurgeReport
    needs_table = True
    removes_table = True
    instances = "one"
    failure_policy = "collect_all"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """All files that the table reaches, which the plan holds before the registration is removed.

        Raises InvalidArgument if files of the table must not be deleted, TableUnavailable if this node cannot reach
        the table or its metadata are incomplete.
        """
        from distop_behaviors.purge.purge_plan import plan

        return plan(_argument(arg), table, ctx)

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """All jobs. Raises InvalidArgument if some are named: a table is purged as a whole."""
        if names is not None:
            raise InvalidArgument("purge deletes the whole table: start it without naming partitions")
        return partitions

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Delete the data files of a job; files of the metadata are left to the completion.

        Raises JobFailed if some cannot be deleted.
        """
        from distop_behaviors.purge.purge_deletion import delete_job

        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        return delete_job(_argument(arg), ctx.table, partition, ctx)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Delete the metadata, the roots last, and report. A cancelled or failed operation keeps the metadata."""
        from distop_behaviors.purge.purge_completion import PurgeCompletion

        if table is None:
            raise InvalidArgument(NO_TABLE)
        return PurgeCompletion(_argument(arg), table, ctx).run(summary)


class DropTablePurgeJob(Purge):
    """Another name of ``purge``, for callers that know the job type ``Drop_Table_Purge_Job``."""

    type_name = "Drop_Table_Purge_Job"


def _argument(arg: Any) -> PurgeArgument:
    return arg if isinstance(arg, PurgeArgument) else PurgeArgument.model_validate(arg)
