"""``apply``: makes what was validated part of a table's schema. See docs/reference/apply.md."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, JobFailed, OperationFailed, PartitionPlan, Planned, TableUnavailable
from distop.errors import InvalidArgument
from distop_behaviors.apply.apply_report import Argument, Outcome, Report, report_of, request_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, Summary, TableRecord
    from distop_behaviors.apply.apply_loop import Applying
    from distop_behaviors.apply.rewrite_publication import Narrowing

TABLE = "table"
"""The name of the one job."""


class Apply(Behavior):
    """Makes a certified promise part of a table's schema, after a look at what came since."""

    type_name = "apply"
    Arg = Argument
    Result = Outcome
    Report = Report
    instances = "one"
    needs_table = True
    resumable = True

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """One job; where a column is narrowed, one for each partition, which is written anew. Raises InvalidArgument
        for what can be told before anything is looked at: a table without a schema to change, a certificate of another,
        a check that can become nothing, a folder on a disk that others may change, and a column that something else is
        made of.
        """
        from distop.tables import changes_of
        from distop_behaviors.apply.constraints import wanted
        from distop_behaviors.apply.schema_target import target_of
        from distop_behaviors.apply.type_narrowing import needed
        from distop_behaviors.validate.certification import check_table

        changes_of(table)
        certificate = request_of(arg, ctx).certificate
        check_table(certificate, table)
        rewritten = needed(wanted(certificate).narrowed, certificate)
        target_of(table, ctx).check_folders(rewritten=bool(rewritten))
        if not rewritten:
            return Planned([PartitionPlan(0, TABLE)], certificate.version)
        planned = super().partitions(table, arg, ctx)
        from distop.tables.iceberg.iceberg_format import read_metadata

        self._narrowing(arg, ctx).check(*read_metadata(planned.partitions[0].source))
        return planned

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """All of them. Raises InvalidArgument where some of those that are written anew are asked for: a column has one
        type in all of the table.
        """
        if not _rewrites(partitions[0]):
            return super().jobs(arg, partitions, names, ctx)
        if names is not None:
            raise InvalidArgument("apply changes a table as a whole: start it again, without naming partitions")
        return partitions

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """See Applying.run, and Narrowing.stage. Raises InvalidArgument where the plan is not of this argument."""
        from distop_behaviors.apply.constraints import wanted
        from distop_behaviors.apply.type_narrowing import needed

        if _rewrites(partition):
            return self._narrowing(arg, ctx).stage(partition)
        certificate = request_of(arg, ctx).certificate
        if needed(wanted(certificate).narrowed, certificate):
            raise InvalidArgument(
                f"the plan of {ctx.operation} rewrites nothing, and its argument narrows a column: the argument was "
                "changed meanwhile; start the operation again"
            )
        return self._applying(arg, ctx).run()

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        """Take back a change that nobody will confirm any more, or remove what was staged for one."""
        try:
            if _rewrites(partition):
                self._narrowing(arg, ctx).discard()
            elif not ctx.superseded:  # whoever has the job goes on from what stands in the table
                self._applying(arg, ctx, stoppable=False).revert()
        except (TableUnavailable, InvalidArgument) as error:
            ctx.log.info("nothing is there to be taken back: %s", error)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """The report of the one job; where partitions were written anew, all of them are published first. Raises
        OperationFailed with it unless the certificate was applied.
        """
        narrowed = any(map(_rewrites, itertools.islice(summary.partitions(), 1)))
        if narrowed and summary.verdict == "success":
            return self._published(arg, summary, ctx)
        if narrowed:
            self._narrowing(arg, ctx).sweep()
        for row in summary.outcomes():
            report = None
            if isinstance(row.result, dict):
                report = report_of(request_of(arg, ctx).certificate, Outcome.model_validate(row.result), TABLE)
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
            publishing.sweep()
            certificate = request_of(arg, ctx).certificate
            raise OperationFailed(str(failed), report_of(certificate, publishing.outcome, TABLE)) from failed
        publishing.sweep()
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
        from distop_behaviors.apply.schema_target import target_of

        assert ctx.table is not None
        return Narrowing(request_of(arg, ctx), ctx.table, target_of(ctx.table, ctx), ctx)


def _rewrites(partition: PartitionPlan) -> bool:
    """Whether the job writes the files of a partition anew; otherwise it changes the schema alone."""
    return partition.name != TABLE
