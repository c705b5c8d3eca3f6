"""The additional job for checks of the whole table (unique, references).

Its name starts with ``@``, unlike partitions' names, and it has the files of all partitions. So it is claimed, retried,
cancelled and reported like any other job. If a start names partitions, it checks only their rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.behavior import WIDE, over, pinned, select
from distop.errors import InvalidArgument
from distop_behaviors.validate.partition_result import CheckResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, PartitionPlan, Pinned
    from distop_behaviors.validate.partition_result import Result
    from distop_behaviors.validate.validate_argument import Argument

TABLE = f"{WIDE}table"
"""The name of the job over all partitions of the table."""
CHOSEN = f"{WIDE}chosen"
"""The name of the job over the partitions that a start named."""


def jobs(
    argument: Argument, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
) -> Sequence[PartitionPlan]:
    """The jobs for the partitions that a start or rerun names: one for each, and last the one of the whole table.

    If all checks are about the whole table, there is only the last one. Raises InvalidArgument for unknown names;
    TableUnavailable and InvalidArgument if a referenced table cannot be planned.
    """
    if not any(check.wide for check in argument.checks):
        return select(partitions, names)
    named = None if names is None else [name for name in names if name != TABLE]
    if named is not None and CHOSEN in named:
        raise InvalidArgument(
            f"the job {CHOSEN!r} cannot be rerun: it covers the partitions that its start named; start a new operation "
            "with their names"
        )
    chosen = select(partitions, named)
    whole = names is None or TABLE in names or len(chosen) == len(partitions)
    alone = all(check.wide for check in argument.checks)
    job = over(TABLE if whole else CHOSEN, partitions if whole else chosen)
    return [*(() if alone else chosen), replace(job, beside=_others(argument, ctx))]


def _others(argument: Argument, ctx: JobContext) -> tuple[Pinned, ...]:
    """The referenced tables, each once, with new plans."""
    from distop.tables import plan_table

    names = dict.fromkeys(check.references.table for check in argument.checks if check.references is not None)
    found = []
    for name in names:
        ctx.check_cancelled()
        record = ctx.other_table(name)
        found.append(pinned(record, plan_table(record, ctx.check_cancelled, lambda: ctx.spark)))
    return tuple(found)


def row_checks_only(argument: Argument) -> Argument | None:
    """The argument with only the checks that each partition decides for itself. None if there are none."""
    checks = [check for check in argument.checks if not check.wide]
    if len(checks) == len(argument.checks):
        return argument
    return argument.model_copy(update={"checks": checks}) if checks else None


def in_argument_order(argument: Argument, result: Result, *, wide: bool) -> Result:
    """The result of some checks (``wide`` or not), with a default result for each other check of the argument."""
    if len(result.checks) == len(argument.checks):
        return result
    found = iter(result.checks)
    checks = [next(found) if check.wide == wide else CheckResult() for check in argument.checks]
    return replace(result, checks=checks)
