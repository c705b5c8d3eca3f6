"""Checks of the whole table (unique, references): one job more, beside those of the partitions.

Its name begins with ``@``, as no partition's does, and it has the files of all partitions. So it is claimed, tried
again, cancelled and reported as any other job. Where a start names partitions, it is about their rows alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.behavior import WIDE, over, pinned, select
from distop.errors import InvalidArgument
from distop_behaviors.validate.validate_report import CheckResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, PartitionPlan, Pinned
    from distop_behaviors.validate.validate_argument import Argument
    from distop_behaviors.validate.validate_report import Result

TABLE = f"{WIDE}table"
"""The job over all partitions of the table."""
CHOSEN = f"{WIDE}chosen"
"""The one over those that a start named."""


def jobs(
    argument: Argument, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
) -> Sequence[PartitionPlan]:
    """The jobs of an operation, by the names that its start or rerun asks for: one for each partition, unless all
    checks are of the whole table, and last the one for these.

    Raises InvalidArgument for names that are none, TableUnavailable and InvalidArgument for another table that cannot
    be planned.
    """
    if not any(check.wide for check in argument.checks):
        return select(partitions, names)
    named = None if names is None else [name for name in names if name != TABLE]
    if named is not None and CHOSEN in named:
        raise InvalidArgument(
            f"the job {CHOSEN!r} was about the partitions that another start named: start it anew, with their names"
        )
    chosen = select(partitions, named)
    whole = names is None or TABLE in names or len(chosen) == len(partitions)
    alone = all(check.wide for check in argument.checks)
    job = over(TABLE if whole else CHOSEN, partitions if whole else chosen)
    return [*(() if alone else chosen), replace(job, beside=_others(argument, ctx))]


def _others(argument: Argument, ctx: JobContext) -> tuple[Pinned, ...]:
    """The tables that are referred to, each once, as they are now."""
    from distop.tables import plan_table

    names = dict.fromkeys(check.references.table for check in argument.checks if check.references is not None)
    found = []
    for name in names:
        ctx.check_cancelled()
        record = ctx.other_table(name)
        found.append(pinned(record, plan_table(record, ctx.check_cancelled, lambda: ctx.spark)))
    return tuple(found)


def of_rows(argument: Argument) -> Argument | None:
    """The argument with those checks alone that each partition decides for itself; None where there is none."""
    checks = [check for check in argument.checks if not check.wide]
    if len(checks) == len(argument.checks):
        return argument
    return argument.model_copy(update={"checks": checks}) if checks else None


def spread(argument: Argument, result: Result, *, wide: bool) -> Result:
    """A result of some checks (``wide``, or the others) with a place for each of the argument's."""
    if len(result.checks) == len(argument.checks):
        return result
    found = iter(result.checks)
    checks = [next(found) if check.wide == wide else CheckResult() for check in argument.checks]
    return replace(result, checks=checks)
