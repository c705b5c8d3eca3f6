"""``export``: copies the data files of one version of a table to another place.

See docs/reference/export.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.errors import InvalidArgument
from distop_behaviors.export.export_argument import ExportArgument, ExportReport, ExportResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.behavior import JobContext, Summary, TableRecord

__all__ = ["Export"]

NO_TABLE = "an export copies a table: start it on a registered table"


class Export(Behavior):
    """Copies the data files of one version of a table to another place, and verifies them."""

    type_name = "export"
    Arg = ExportArgument
    Result = ExportResult
    Report = ExportReport
    needs_table = True
    instances = "one"
    conflicts_with = (
        "expire-snapshots",
        "expire-partitions",
        "remove-orphans",
        "purge",
        "compact",
        "Compact_Table_Job",
    )
    """Types that delete files of the table: `compact` does with `swap`. A start does not compare arguments."""
    failure_policy = "collect_all"
    id_fields = ("to",)
    combine: ClassVar[Mapping[str, Literal["last"]]] = dict.fromkeys(
        ("version", "diff_from", "prefixes", "success", "remove_gone", "register", "dry_run"), "last"
    )

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """One job for each folder of the version's files.

        Raises InvalidArgument for a target that is not allowed, an unknown version, and files that cannot be exported;
        and the errors of planning.
        """
        from distop_behaviors.export.export_plan import plan

        return plan(ExportArgument.model_validate(arg, from_attributes=True), table, ctx)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Copy and verify the planned files of a folder. Raises JobFailed if some are missing or have changed."""
        ((_, result),) = self.run_batch(arg, [partition], ctx)
        if isinstance(result, Exception):
            raise result
        return result

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        """Export folders, many of them together. Each partition with its result, or with its job's exception."""
        from distop_behaviors.export.folder_export import FolderExports

        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        return FolderExports(ExportArgument.model_validate(arg, from_attributes=True), ctx.table, ctx).run(partitions)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Write the remaining markers and the root manifest if all folders are exported, and return the report."""
        from distop_behaviors.export.export_completion import complete

        if table is None:
            raise InvalidArgument(NO_TABLE)
        return complete(ExportArgument.model_validate(arg, from_attributes=True), table, summary, ctx)
