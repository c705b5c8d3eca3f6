"""``validate``: checks that a table's data allows a schema change.

See docs/reference/validate.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, JobFailed, OperationFailed, is_wide
from distop.errors import InvalidArgument
from distop_behaviors.validate import table_checks
from distop_behaviors.validate.partition_result import Answer
from distop_behaviors.validate.validate_argument import Argument
from distop_behaviors.validate.validate_report import ValidateReport, combine, sentence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan, Planned, Summary, TableRecord
    from distop_behaviors.validate.partition_result import Result


NO_TABLE = "validate needs a table: start it on a registered table, because @cluster has no rows"


class Validate(Behavior):
    """Checks every row of a table: nulls, ranges, types, sets, expressions, keys."""

    type_name = "validate"
    Arg = Argument
    Result = Answer
    ValidateReport = ValidateReport
    failure_policy = "collect_all"
    needs_table = True
    reports_only = True

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """All partitions; with ``since``, only the files that its certificate does not cover."""
        argument = _argument(arg)
        if argument.since is None:
            return super().partitions(table, arg, ctx)
        from distop_behaviors.validate.certificate import certificate_of
        from distop_behaviors.validate.certification import check_same_checks, check_table, plan_new_files

        since = certificate_of(argument.since, table.name, ctx)
        check_table(since, table)
        check_same_checks(since, argument)
        return plan_new_files(since, super().partitions(table, arg, ctx), table, ctx)

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """One job for each partition, and one for the checks of the whole table."""
        return table_checks.jobs(_argument(arg), partitions, names, ctx)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """The result of a partition. Raises JobFailed with it if a check is violated or has an error."""
        for _, outcome in self.run_batch(arg, [partition], ctx):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        raise AssertionError("a batch of one partition has returned no outcome")

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        """Each partition with its result, or with JobFailed.

        Raises InvalidArgument if there is no table, and unexpected errors, for all remaining partitions.
        """
        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        argument = _argument(arg)
        names = argument.names()
        for plan, result in _results(argument, partitions, ctx):
            if isinstance(result, Exception):
                yield plan, result
            elif result.verdict in ("violated", "error"):
                yield plan, JobFailed(sentence(names, result.checks), Answer(result))
            else:
                yield plan, Answer(result)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """The report. Raises OperationFailed with it unless all checks are valid."""
        argument = _argument(arg)
        if table is None and summary.verdict != "cancelled":
            raise OperationFailed(NO_TABLE)

        by_executors = True

        def results() -> Iterator[tuple[str, Result | str]]:
            nonlocal by_executors
            for row in summary.outcomes():
                by_executors = by_executors and row.by_executor
                known = isinstance(row.result, dict) and "checks" in row.result
                yield (
                    row.name,
                    Answer.model_validate(row.result).root if known else row.error or "the job returned no result",
                )

        report = combine(argument, results(), complete=summary.verdict != "cancelled")
        if report.verdict == "valid" and table is not None:
            from distop_behaviors.validate.certification import certify

            certify(argument, report, table, summary, ctx, by_executors=by_executors)
        if report.verdict == "valid" or summary.verdict == "cancelled":
            return report
        raise OperationFailed(sentence([check.name for check in report.checks], report.checks), report)


def _results(
    argument: Argument, partitions: Sequence[PartitionPlan], ctx: JobContext
) -> Iterator[tuple[PartitionPlan, Result | Exception]]:
    from distop_behaviors.validate.batch import PartitionBatch
    from distop_behaviors.validate.key_job import KeyChecks

    narrow = [plan for plan in partitions if not is_wide(plan.name)]
    rows = table_checks.row_checks_only(argument)
    if rows is not None and narrow:
        for plan, result in PartitionBatch(rows, ctx).run(narrow):
            yield (
                plan,
                result
                if isinstance(result, Exception)
                else table_checks.in_argument_order(argument, result, wide=False),
            )
    for plan in partitions:
        if is_wide(plan.name):
            found = KeyChecks(argument, plan, ctx).run()
            yield (
                plan,
                found if isinstance(found, Exception) else table_checks.in_argument_order(argument, found, wide=True),
            )


def _argument(arg: Any) -> Argument:
    return arg if isinstance(arg, Argument) else Argument.model_validate(arg)
