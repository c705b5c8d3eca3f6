"""``expire-snapshots``: removes old versions of a table, and then the files that only they had.

See docs/reference/expire-snapshots.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.errors import InvalidArgument
from distop_behaviors.expire.expire_argument import (
    ExpireSnapshotsArgument,
    ExpireSnapshotsReport,
    ExpireSnapshotsResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, Summary, TableRecord

__all__ = ["ExpireSnapshots"]


class ExpireSnapshots(Behavior):
    """Removes old versions of a table, and the files that only they had."""

    type_name = "expire-snapshots"
    Arg = ExpireSnapshotsArgument
    Result = ExpireSnapshotsResult
    Report = ExpireSnapshotsReport
    needs_table = True
    instances = "one"
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
            raise InvalidArgument("expire-snapshots works on a table: start it on a registered one")
        return ExpireCompletion(_argument(arg), table, ctx).run(summary) if summary.verdict == "success" else None


def _argument(arg: Any) -> ExpireSnapshotsArgument:
    return arg if isinstance(arg, ExpireSnapshotsArgument) else ExpireSnapshotsArgument.model_validate(arg or {})
