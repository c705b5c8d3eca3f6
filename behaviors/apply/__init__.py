"""``apply``: adds validated checks to the schema of a table.

See docs/reference/apply.md.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, JobFailed, OperationFailed, PartitionPlan, Planned, TableUnavailable
from distop.errors import InvalidArgument
from distop_behaviors.apply.apply_report import ApplyArgument, ApplyOutcome, ApplyReport, report_of, request_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, Summary, TableRecord
    from distop_behaviors.apply.apply_loop import Applying
    from distop_behaviors.apply.rewrite_publication import Narrowing

TABLE = "table"
"""The name of the job that changes only the schema."""


class Apply(Behavior):
    """Adds certified checks to the schema of a table, after validating newer files."""

    type_name = "apply"
    Arg = ApplyArgument
    Result = ApplyOutcome
    ApplyReport = ApplyReport
    instances = "one"
    needs_table = True
    resumable = True
    staged_output = "remove"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """One job for the schema; or one for each partition, to narrow a column.

        Raises InvalidArgument for what is known before a job runs: the schema of the table cannot be changed, the
        certificate belongs to another table, a check cannot be added to a schema, other users may change a folder on a
        disk, or partitions or the sort order depend on a narrowed column.
        """
        from distop_behaviors.apply.constraints import schema_changes
        from distop_behaviors.apply.schema_target import rules_of, target_of
        from distop_behaviors.apply.type_narrowing import columns_to_narrow
        from distop_behaviors.validate.certification import check_table

        rules = rules_of(table)
        certificate = request_of(arg, ctx).certificate
        check_table(certificate, table)
        rewritten = columns_to_narrow(schema_changes(certificate, rules).narrowed, certificate)
        target_of(table, ctx).check_folders(rewritten=bool(rewritten))
        if not rewritten:
            return Planned([PartitionPlan(0, TABLE)], certificate.version)
        planned = super().partitions(table, arg, ctx)
        from distop.tables.iceberg.metadata_file import read_metadata

        self._narrowing(arg, ctx).check(*read_metadata(planned.partitions[0].source))
        return planned

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """All jobs. Raises InvalidArgument if partitions of a rewrite are named: all files need the new type."""
        if not _rewrites(partitions[0]):
            return super().jobs(arg, partitions, names, ctx)
        if names is not None:
            raise InvalidArgument("apply changes the whole table: start it without naming partitions")
        return partitions

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Run ``Applying.run``, or ``Narrowing.stage``. Raises InvalidArgument if the argument was changed."""
        from distop_behaviors.apply.constraints import schema_changes
        from distop_behaviors.apply.schema_target import rules_of
        from distop_behaviors.apply.type_narrowing import columns_to_narrow

        if _rewrites(partition):
            return self._narrowing(arg, ctx).stage(partition)
        certificate = request_of(arg, ctx).certificate
        assert ctx.table is not None
        if columns_to_narrow(schema_changes(certificate, rules_of(ctx.table)).narrowed, certificate):
            raise InvalidArgument(
                f"the plan of {ctx.operation} rewrites no files, but its argument narrows a column: the argument was "
                "changed after planning; start a new operation"
            )
        return self._applying(arg, ctx).run()

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        """Revert an unconfirmed change of the schema, or remove staged files."""
        try:
            if _rewrites(partition):
                self._narrowing(arg, ctx).discard()
            elif not ctx.superseded:  # a newer attempt continues from the current schema
                self._applying(arg, ctx, stoppable=False).revert()
        except (TableUnavailable, InvalidArgument) as error:
            ctx.log.info("Nothing to revert: %s", error)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """The report, after publishing rewritten partitions. Raises OperationFailed with it if apply failed."""
        narrowed = any(map(_rewrites, itertools.islice(summary.partitions(), 1)))
        if narrowed and summary.verdict == "success":
            return self._published(arg, summary, ctx)
        for row in summary.outcomes():
            report = None
            if isinstance(row.result, dict):
                report = report_of(request_of(arg, ctx).certificate, ApplyOutcome.model_validate(row.result), TABLE)
            if row.success and not narrowed:
                return report
            if not row.success:
                raise OperationFailed(row.error, report)
        return None

    def _published(self, arg: Any, summary: Summary, ctx: JobContext) -> Any:
        publishing = self._narrowing(arg, ctx)
        try:
            outcome = publishing.publish(summary)
        except (JobFailed, InvalidArgument) as failed:
            certificate = request_of(arg, ctx).certificate
            raise OperationFailed(str(failed), report_of(certificate, publishing.outcome, TABLE)) from failed
        return report_of(request_of(arg, ctx).certificate, outcome, TABLE)

    @staticmethod
    def _applying(arg: Any, ctx: JobContext, *, stoppable: bool = True) -> Applying:
        from distop_behaviors.apply.apply_loop import Applying
        from distop_behaviors.apply.schema_target import target_of

        assert ctx.table is not None
        return Applying(request_of(arg, ctx), ctx.table, target_of(ctx.table, ctx, stoppable=stoppable), ctx)

    @staticmethod
    def _narrowing(arg: Any, ctx: JobContext) -> Narrowing:
        from distop_behaviors.apply.rewrite_publication import Narrowing
        from distop_behaviors.apply.schema_target import rewrite_target_of

        assert ctx.table is not None
        return Narrowing(request_of(arg, ctx), ctx.table, rewrite_target_of(ctx.table, ctx), ctx)


def _rewrites(partition: PartitionPlan) -> bool:
    """Whether the job rewrites the files of a partition; otherwise it changes only the schema."""
    return partition.name != TABLE
