"""``build-index``, ``drop-index`` and ``lookup``: find the files with a key.

See docs/reference/build-index.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import Behavior, PartitionPlan, Planned
from distop.errors import InvalidArgument
from distop.protocol.records import OperationRef
from distop.storage.places import remove_place_or_log
from distop_behaviors.index.index_argument import BuildArgument, BuildReport, BuildResult, DropArgument, DropReport

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord
    from distop.storage.deletion import Place
    from distop_behaviors.index.key_lookup import lookup

__all__ = ["BuildIndex", "DropIndex", "lookup"]

NO_TABLE = "an index belongs to a table: start it on a registered table, because @cluster has no rows"

AFTER = "generation"
"""The value in a drop's plan with the newest generation at that time."""
BUILDS = "builds"
"""The value in a drop's plan with the last build that had written files."""


def __getattr__(name: str) -> Any:
    """``lookup``, imported on first use: a process that only declares the behaviors must not load pyarrow."""
    if name == "lookup":
        from distop_behaviors.index import key_lookup

        return key_lookup.lookup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class BuildIndex(Behavior):
    """Builds or refreshes an index of a table, which finds rows by key."""

    type_name = "build-index"
    Arg = BuildArgument
    Result = BuildResult
    Report = BuildReport
    needs_table = True
    object_field = "name"
    instances = "one"
    conflicts_with = ("drop-index",)
    can_fail = False
    resumable = True
    staged_output = "remove"

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """The partitions with files that are not indexed yet, with only these files.

        Raises InvalidArgument for errors that no retry can resolve, TableUnavailable if this node cannot reach the
        table.
        """
        from distop_behaviors.index.build_plan import plan

        return plan(_argument(arg, ctx), table, ctx)

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Write the partition's segments into the stage of this attempt.

        Raises OSError if the stage cannot be written, TableUnavailable if this node cannot reach the table.
        """
        from distop_behaviors.index.segments import SegmentWriter
        from distop_behaviors.index.table_files import identities

        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        argument = _argument(arg, ctx)
        ctx.status(f"indexing {partition.name}")
        reader = ctx.reader(partition)
        job = SegmentWriter(
            argument,
            partition.files,
            _stage_place(ctx),
            reader,
            ids=identities(reader, argument.columns),
            check=ctx.check_cancelled,
            reachable=ctx.check_reachable,
        )
        return job.run(ctx.progress)

    def cancel_job_and_cleanup(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> None:
        """Remove the stage of the attempt. No other attempt needs it."""
        remove_place_or_log(ctx.stage_place, ctx.log)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """Merge and publish the segments of the jobs.

        A cancelled operation publishes nothing.
        """
        from distop_behaviors.index.generation_build import Completion

        if table is None:
            raise InvalidArgument(NO_TABLE)
        if summary.verdict != "success":
            return None
        return Completion(_argument(arg, ctx), table, ctx).run(summary)


class DropIndex(Behavior):
    """Removes an index of a table."""

    type_name = "drop-index"
    Arg = DropArgument
    Result = DropReport
    Report = DropReport
    needs_table = True
    object_field = "name"
    instances = "one"
    conflicts_with = ("build-index",)
    can_fail = False

    def partitions(self, table: TableRecord, arg: Any, ctx: JobContext) -> Planned:
        """One job. Raises InvalidArgument and TableUnavailable if the location cannot have an index."""
        from distop_behaviors.index.index_folder import Folder

        folder = Folder(_root(table, ctx), _name(arg), ctx.space)
        folder.check_unlinked()
        newest = folder.newest()
        values = {AFTER: str(newest.number if newest is not None else 0), BUILDS: str(folder.last_build())}
        return Planned([PartitionPlan(0, "index", values=values)])

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        """Remove the index, its generations first. Raises OSError if a file cannot be removed."""
        from distop_behaviors.index.index_folder import Folder

        if ctx.table is None:
            raise InvalidArgument(NO_TABLE)
        name = _name(arg)
        after, builds = int(partition.values[AFTER] or 0), int(partition.values[BUILDS] or 0)
        _check_name(name, OperationRef.parse(ctx.operation))
        dropped = Folder(_root(ctx.table, ctx), name, ctx.space).drop(ctx.operation, after, builds)
        return DropReport(name=name, dropped=dropped)

    def complete_operation(self, arg: Any, table: TableRecord | None, summary: Summary, ctx: JobContext) -> Any:
        """The result of the job."""
        return next((row.result for row in summary.outcomes() if row.success), None)


def _stage_place(ctx: JobContext) -> Place:
    """The stage of the attempt, created if missing."""
    _ = ctx.stage
    return ctx.stage_place


def _root(table: TableRecord, ctx: JobContext) -> str:
    from distop_behaviors.index.table_files import root_of

    return root_of(table, ctx.check_cancelled, lambda: ctx.spark)


def _name(arg: Any) -> str:
    return (arg if isinstance(arg, DropArgument) else DropArgument.model_validate(arg)).name


def _argument(arg: Any, ctx: JobContext) -> BuildArgument:
    """The argument as a model. Raises InvalidArgument if it names another index than the operation."""
    argument = arg if isinstance(arg, BuildArgument) else BuildArgument.model_validate(arg)
    _check_name(argument.name, OperationRef.parse(ctx.operation))
    return argument


def _check_name(name: str, ref: OperationRef) -> None:
    if ref.object != name:
        raise InvalidArgument(
            f"the operation {ref} belongs to the index {ref.object!r}, but its argument names {name!r}"
        )
