"""``expire-snapshots`` removes old versions of a table and their files, ``expire-partitions`` partitions by value.

See docs/reference/expire-snapshots.md and docs/reference/expire-partitions.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, OperationFailed, PartitionPlan, Planned
from distop.errors import InvalidArgument
from distop_behaviors.expire.expire_argument import (
    ExpireSnapshotsArgument,
    ExpireSnapshotsReport,
    ExpireSnapshotsResult,
)
from distop_behaviors.expire.partition_argument import (
    ExpirePartitionsArgument,
    ExpirePartitionsReport,
    ExpirePartitionsResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, Summary, TableRecord

__all__ = ["ExpirePartitions", "ExpireSnapshots"]

NO_TABLE = "versions and partitions belong to a table: start it on a registered one"


class ExpireSnapshots(Behavior):
    """Removes old versions of a table, and the files that only they had."""

    type_name = "expire-snapshots"
    Arg = ExpireSnapshotsArgument
    Result = ExpireSnapshotsResult
    Report = ExpireSnapshotsReport
    needs_table = True
    instances = "one"
    conflicts_with = ("compact", "Compact_Table_Job")
    """After a rollback, a compaction commits files again that this one takes for those of removed versions."""
    staged_output = "remove"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """One job for each group of parts of the metadata. Freezes the time and the versions to remove.

        Raises InvalidArgument if the table has no versions that could be removed, another table is registered inside
        its folder, or ``gc.enabled`` is false; TableUnavailable.
        """
        from distop_behaviors.expire.expire_plan import plan

        return plan(_argument(arg), table, ctx)

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """All jobs. Raises InvalidArgument if some are named: a file may be needed by a part that others read."""
        if names is not None:
            raise InvalidArgument("expire-snapshots reads the whole metadata: start it without naming partitions")
        return partitions

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Read parts of the metadata, and write the files that they name into the stage of this attempt."""
        from distop_behaviors.expire.expire_plan import read_units

        return read_units(partition, ctx)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Remove the versions from the metadata, then the files. A cancelled or failed operation changes nothing."""
        from distop_behaviors.expire.expire_completion import ExpireCompletion

        if table is None:
            raise InvalidArgument(NO_TABLE)
        if summary.verdict != "success":
            return ExpireSnapshotsReport(dry_run=_argument(arg).dry_run)
        return ExpireCompletion(_argument(arg), table, ctx).run(summary)


class ExpirePartitions(Behavior):
    """Removes partitions whose period ended long ago, by their values, never by the times of files."""

    type_name = "expire-partitions"
    Arg = ExpirePartitionsArgument
    Result = ExpirePartitionsResult
    Report = ExpirePartitionsReport
    needs_table = True
    instances = "one"
    conflicts_with = ("apply", "compact", "Compact_Table_Job")
    failure_policy = "collect_all"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """The expired partitions. Freezes the time, and the files to remove.

        Raises InvalidArgument for a column that does not partition the table, if too large a part would be removed, and
        for a table of Spark's catalog; TableUnavailable.
        """
        from distop_behaviors.expire.partition_decision import plan

        return plan(ExpirePartitionsArgument.model_validate(arg, from_attributes=True), table, ctx)

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """All jobs. Raises InvalidArgument if some are named: `hold` keeps partitions."""
        if names is not None:
            raise InvalidArgument("expire-partitions chooses partitions by value: keep some with 'hold'")
        return partitions

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Delete the files of a partition of a folder; of other formats nothing, as the completion makes one commit.

        Raises JobFailed if some cannot be deleted.
        """
        from distop_behaviors.expire.partition_decision import DELETES
        from distop_behaviors.expire.partition_deletion import delete_files

        if DELETES not in partition.values:
            return ExpirePartitionsResult()
        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        return delete_files(ctx.table, partition, ctx)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Remove the partitions in one commit, and report. A cancelled or failed operation makes no commit."""
        from distop.tables.commits import Conflict
        from distop_behaviors.expire.partition_decision import complete

        if table is None:
            raise InvalidArgument(NO_TABLE)
        argument = ExpirePartitionsArgument.model_validate(arg, from_attributes=True)
        try:
            return complete(argument, table, summary, ctx)
        except Conflict as error:
            text = f"other writers always committed first, so nothing was removed: {error}"
            raise OperationFailed(text) from error


def _argument(arg: Any) -> ExpireSnapshotsArgument:
    return arg if isinstance(arg, ExpireSnapshotsArgument) else ExpireSnapshotsArgument.model_validate(arg or {})
