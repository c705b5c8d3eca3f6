"""``remove-orphans`` and ``restore``: files in a table's folder that its metadata do not name.

See docs/reference/remove-orphans.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.errors import InvalidArgument
from distop_behaviors.orphans.orphan_argument import (
    FileCount,
    OrphansArgument,
    OrphansReport,
    OrphansResult,
    RestoreArgument,
    RestoreReport,
)

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord

__all__ = ["RemoveOrphans", "Restore"]

QUARANTINED = "quarantined"
"""The number and the bytes of the files in a plan of `restore`."""
_CONFLICTS = ("apply", "compact", "Compact_Table_Job", "expire-partitions", "expire-snapshots", "export")
"""Types that write, remove or copy files of the table."""
NO_TABLE = "orphans belong to a table: start it on a registered table"


class RemoveOrphans(Behavior):
    """Removes files in a table's folder that its metadata do not name."""

    type_name = "remove-orphans"
    Arg = OrphansArgument
    Result = OrphansResult
    Report = OrphansReport
    needs_table = True
    instances = "one"
    conflicts_with = (*_CONFLICTS, "restore")
    failure_policy = "collect_all"
    resumable = True

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """The orphans, which the plan holds before the first one is removed.

        Raises InvalidArgument if they cannot be told from needed files, TableUnavailable if this node cannot reach the
        table.
        """
        from distop_behaviors.orphans.orphan_plan import plan

        return plan(OrphansArgument.model_validate(arg, from_attributes=True), table, ctx)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Remove the planned files, except those that the table needs now.

        Raises JobFailed if some cannot be removed.
        """
        from distop_behaviors.orphans.orphan_removal import OrphanRemoval

        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        if not partition.files:
            return OrphansResult()
        return OrphanRemoval(OrphansArgument.model_validate(arg, from_attributes=True), ctx.table, ctx).run(partition)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """The sums of the jobs' results, with what the listing has shown."""
        from distop_behaviors.orphans.orphan_report import report_of

        return report_of(OrphansArgument.model_validate(arg, from_attributes=True), summary, ctx)


class Restore(Behavior):
    """Moves the files that a `remove-orphans` has quarantined back into the table's folder."""

    type_name = "restore"
    Arg = RestoreArgument
    Result = RestoreReport
    Report = RestoreReport
    needs_table = True
    instances = "one"
    conflicts_with = (*_CONFLICTS, "remove-orphans")
    resumable = True

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """One job. Raises InvalidArgument if there is nothing to restore, and TableUnavailable."""
        from distop_behaviors.orphans.restoration import Restoration

        found = Restoration(RestoreArgument.model_validate(arg, from_attributes=True), table, ctx).quarantined()
        return Planned([PartitionPlan(0, "restore", values={QUARANTINED: found.model_dump_json()})])

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Move the files back. Raises JobFailed if some cannot be moved."""
        from distop_behaviors.orphans.restoration import Restoration

        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        planned = FileCount.model_validate_json(str(partition.values.get(QUARANTINED, "{}")))
        return Restoration(RestoreArgument.model_validate(arg, from_attributes=True), ctx.table, ctx).run(planned)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """The result of the job."""
        return next((row.result for row in summary.outcomes() if row.result is not None), None)
