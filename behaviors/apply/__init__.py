"""``apply``: makes what was validated part of a table's schema. See docs/behaviors.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, OperationFailed, PartitionPlan, Planned, TableUnavailable
from distop_behaviors.apply.report import Argument, Outcome, Report, report_of

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord
    from distop_behaviors.apply.applying import Applying

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
        """One job. Raises InvalidArgument for what can be told before anything is looked at: a table without a schema
        to change, a certificate of another, and a check that can become nothing.
        """
        from distop_behaviors.apply.constraints import wanted
        from distop_behaviors.apply.target import check_format
        from distop_behaviors.validate.certify import check_table

        certificate = arg.certificate
        check_format(table)
        check_table(certificate, table)
        wanted(certificate)
        return Planned([PartitionPlan(0, TABLE)], certificate.version)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """See Applying.run."""
        return self._applying(arg, ctx).run()

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        """Take back a change that nobody will confirm any more."""
        if ctx.superseded:
            return  # whoever has the job goes on from what stands in the table
        try:
            self._applying(arg, ctx).revert()
        except TableUnavailable as error:
            ctx.log.info("nothing is there to be taken back: %s", error)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """The report of the one job; raises OperationFailed with it unless the certificate was applied."""
        for row in summary.outcomes():
            known = isinstance(row.result, dict)
            report = report_of(arg.certificate, Outcome.model_validate(row.result), TABLE) if known else None
            if row.success:
                return report
            raise OperationFailed(row.error, report)
        return None

    @staticmethod
    def _applying(arg: Any, ctx: JobContext) -> Applying:
        from distop_behaviors.apply.applying import Applying
        from distop_behaviors.apply.target import target_of

        assert ctx.table is not None
        return Applying(arg, ctx.table, target_of(ctx.table, ctx), ctx)
