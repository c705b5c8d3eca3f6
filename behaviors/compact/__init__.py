"""``compact``: rewrites small, large and partly deleted data files of a table into files of a target size.

See docs/reference/compact.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop_behaviors.compact.compact_argument import (
    Amount,
    CompactArgument,
    CompactReport,
    GroupResult,
    Groups,
    sizes_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.behavior import JobContext, Summary, TableRecord
    from distop.tables.commits import Candidate, FileReplacer

NOTHING, DRY_RUN = "@nothing", "@dry-run"
"""The names of the only job if there is nothing to rewrite, and of a dry run."""
WHOLE = "table"
"""The name before the number of a group in a table without partitions."""
_MARK = "#"
"""Between the name of a partition and the number of a group."""


class Compact(Behavior):
    """Rewrites small, large and partly deleted data files into files of a target size."""

    type_name = "compact"
    Arg = CompactArgument
    Result = GroupResult
    Report = CompactReport
    needs_table = True
    instances = "one"
    conflicts_with: ClassVar[Sequence[str]] = ("apply", "Compact_Table_Job")
    failure_policy = "collect_all"
    staged_output = "remove"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """The groups of files to rewrite, as ``partition#number``; a partition without groups has no files.

        Raises InvalidArgument if files of the table cannot be replaced, TableUnavailable if it cannot be reached.
        """
        from distop.tables import replacer_of
        from distop_behaviors.compact.file_groups import groups_of
        from distop_behaviors.compact.group_rewrite import layout_of, require_shared_directory

        argument = _argument(arg)
        require_shared_directory(ctx)
        replacer = replacer_of(table, ctx, swap=argument.swap is not None)
        if argument.swap is not None:
            _check_place(table, ctx)
        replacer.recover(change=not argument.dry_run)
        planned = super().partitions(table, arg, ctx)
        replacer.check(planned, layout_of(argument, argument.target_bytes))
        candidates = list(replacer.candidates(planned))
        condition = _condition(argument, replacer, planned, table)
        chosen = [one for one in candidates if condition is None or condition(one)]
        groups = groups_of(chosen, argument)
        found, like = [], planned.partitions[0]
        for partition in dict.fromkeys(one.partition for one in candidates):
            name, mine = partition or WHOLE, groups.get(partition, [])
            for group in mine:
                files = tuple(one.file for one in group.files)
                one = replace(like, name=f"{name}{_MARK}{group.number}", files=files, bytes=group.bytes, values={})
                found.append(one)
            if not mine:
                found.append(replace(like, name=name, files=(), bytes=0, values={}))
        if not found:
            found.append(replace(like, name=WHOLE, files=(), bytes=0, values={}))
        return Planned([replace(one, partition=n) for n, one in enumerate(found)], planned.version, planned.options)

    def jobs(
        self, arg: Any, partitions: Sequence[PartitionPlan], names: Sequence[str] | None, ctx: JobContext
    ) -> Sequence[PartitionPlan]:
        """One job for each group of the named partitions; one job without files if there is no group.

        ``names``: of partitions or of groups. Raises InvalidArgument for an unknown partition.
        """
        chosen = list(partitions)
        if names is not None:
            known = {_partition_of(one) for one in partitions}
            # The name of a partition of a folder may look like that of a group of another one: then both are meant.
            exact = {one.name for one in partitions} & set(names)
            rest = {name if name in known else _partition(name) for name in set(names) - (exact - known)}
            if unknown := sorted(rest - known - {NOTHING, DRY_RUN}):
                raise InvalidArgument(f"the table has no partition {unknown[0]!r}")
            chosen = [one for one in partitions if one.name in exact or _partition_of(one) in rest]
        groups = [one for one in chosen if one.files]
        if not groups:
            return [replace(partitions[0], partition=0, name=NOTHING, files=(), bytes=0)]
        if _argument(arg).dry_run:
            return [_dry_run(groups, _argument(arg))]
        return [replace(one, partition=n) for n, one in enumerate(groups)]

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Rewrite a group (``GroupRewrite.run``)."""
        from distop_behaviors.compact.group_rewrite import GroupRewrite

        if partition.name == NOTHING:
            return GroupResult(state="nothing")
        if partition.name == DRY_RUN:
            before = Amount.model_validate_json(str(partition.values["before"]))
            return GroupResult(state="planned", groups=int(str(partition.values["groups"])), before=before)
        return GroupRewrite(_argument(arg), ctx, ctx.stage_place.name).run(partition)

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        """Remove the new files of an attempt, unless it has offered them: then a commit may have them.

        What the attempt writes later is in a new stage, so it is not affected.
        """
        from distop_behaviors.compact.group_rewrite import GroupRewrite

        if partition.name in (NOTHING, DRY_RUN):
            return
        try:
            committer = GroupRewrite(_argument(arg), ctx, "").committer
            for stage in committer.of_attempt(ctx.stage_place):
                stage.discard(ctx.log)
        except (TableUnavailable, InvalidArgument, UnsafePath) as error:
            ctx.log.info("Nothing to remove: %s", error)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Commit the groups that are not committed yet, and report. Raises OperationFailed with the report."""
        from distop_behaviors.compact.completion import CompactCompletion

        first = next(summary.partitions(), None)
        if first is None:
            return None
        if first.name == NOTHING:
            return CompactReport(verdict="nothing to do", groups=Groups())
        if first.name == DRY_RUN:
            results = [GroupResult.model_validate(row.result) for row in summary.outcomes() if row.success]
            if not results:
                return None
            return CompactReport(verdict="planned", groups=Groups(planned=results[0].groups), before=results[0].before)
        return CompactCompletion(_argument(arg), ctx).run(summary)


class CompactTableJob(Compact):
    """Another name of ``compact``, for callers that know the job type ``Compact_Table_Job``."""

    type_name = "Compact_Table_Job"
    conflicts_with = ("apply", "compact")


def _argument(arg: Any) -> CompactArgument:
    return arg if isinstance(arg, CompactArgument) else CompactArgument.model_validate(arg)


def _check_place(table: TableRecord, ctx: JobContext) -> None:
    """Raises UnsafePath if old files of a table may not be deleted, because another table is in its folder."""
    from distop.storage.deletion_scope import DeletionScope
    from distop.tables import place_of
    from distop_behaviors.orphans.other_tables import folders_of_others

    place = place_of(table, ctx.check_cancelled, lambda: ctx.spark)
    DeletionScope(place, folders_of_others(table, ctx, with_same=False))


def _condition(
    argument: CompactArgument, replacer: FileReplacer, planned: Planned, table: TableRecord
) -> Callable[[Candidate], bool] | None:
    """Whether the condition of an argument holds for a file; None without one. Raises InvalidArgument."""
    from distop.tables.partition_condition import PartitionCondition

    if argument.where is None:
        return None
    condition = PartitionCondition(argument.where, replacer.partition_columns(planned), table.name)
    known: dict[str, bool] = {}

    def holds(one: Candidate) -> bool:
        if one.partition not in known:
            known[one.partition] = condition.holds(one.values)
        return known[one.partition]

    return holds


def _partition(name: str) -> str:
    """The partition of a group's name."""
    head, mark, number = name.rpartition(_MARK)
    return head if mark and number.isdigit() else name


def _partition_of(plan: PartitionPlan) -> str:
    """The partition of a planned group, or of a partition without groups."""
    return _partition(plan.name) if plan.files else plan.name


def _dry_run(groups: Sequence[PartitionPlan], argument: CompactArgument) -> PartitionPlan:
    sizes = [file[1] for one in groups for file in one.files]
    before = Amount(files=len(sizes), bytes=sum(sizes), sizes=sizes_of(sizes, argument.target_bytes))
    values = {"groups": str(len(groups)), "before": before.model_dump_json()}
    return replace(groups[0], partition=0, name=DRY_RUN, files=(), bytes=0, values=values)
