"""A job of ``compact``: it rewrites one group, offers the new files, and commits a batch if enough are offered."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from distop.behavior import JobFailed, WorkDone
from distop.errors import InvalidArgument
from distop.tables import data_folder_of, replacer_of
from distop.tables.commits import GroupStatus, Layout, RowsDiffer
from distop.tables.reading.file_facts import Gone, Unreadable
from distop_behaviors.compact.compact_argument import Amount, GroupResult, sizes_of
from distop_behaviors.compact.file_groups import outputs_of
from distop_behaviors.compact.group_committer import DONE, REASONS, GroupCommitter

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.behavior import JobContext, PartitionPlan
    from distop.storage.deletion import Place
    from distop.tables.commits import FileReplacer, Replacement
    from distop.tables.staged_files import StagedFiles
    from distop_behaviors.compact.compact_argument import CompactArgument


CHECK_EVERY = 30.0
"""Seconds between two checks whether other writers have changed the group that is being rewritten."""


class GroupChanged(Exception):
    """Another writer has changed the group while it was rewritten, so its new files could not be committed."""

    def __init__(self, status: GroupStatus) -> None:
        super().__init__(REASONS.get(status, ""))


class WatchingContext:
    """A job's context whose ``check_cancelled`` also raises GroupChanged, if the group can no longer be committed.

    A completion, which has no partition, reports the work of all groups: that of the rewritten one is left out.
    """

    def __init__(self, ctx: JobContext, status: Callable[[], GroupStatus]) -> None:
        self._ctx = ctx
        self._status = status
        self._next = monotonic() + CHECK_EVERY

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def work_done(self, **numbers: int) -> None:
        """As ``JobContext.work_done``, for a job."""
        if self._ctx.partition is not None:
            self._ctx.work_done(**numbers)

    def check_cancelled(self) -> None:
        """Raise JobCancelled if the job must stop, and from time to time GroupChanged."""
        self._ctx.check_cancelled()
        if monotonic() < self._next:
            return
        self._next = float("inf")  # reading the table calls this as well
        status = self._status()
        self._next = monotonic() + CHECK_EVERY
        if status is not GroupStatus.PENDING:
            raise GroupChanged(status)


class GroupRewrite:
    """Rewrites and commits groups, for a job or for the completion.

    ``name``: in commits: the attempt's stage, which has the fencing token of its claim, or ``completion.COMMITTER``.
    """

    def __init__(self, argument: CompactArgument, ctx: JobContext, name: str) -> None:
        if ctx.table is None:
            raise InvalidArgument("compact needs a table: start it on a registered table")
        self.argument = argument
        self.ctx = ctx
        self.replacer: FileReplacer = replacer_of(ctx.table, ctx, swap=argument.swap is not None)
        folder = data_folder_of(ctx.table, ctx.check_cancelled, lambda: ctx.spark)
        self.committer = GroupCommitter(ctx, self.replacer, require_shared_directory(ctx), folder, name)
        self._committed = WorkDone()

    def run(self, plan: PartitionPlan) -> GroupResult:
        """Rewrite the group, unless it is done or another writer has changed it.

        Raises JobFailed, TableUnavailable, and Spark's errors.
        """
        begun = monotonic()
        head = self.replacer.load()
        (status,) = self.replacer.group_statuses(head, [plan])
        known = self.committer.offered(plan.partition)
        if status is GroupStatus.COMMITTED:
            version = self.replacer.committed_versions(head, plan).get(plan.partition, "")
            return self._result("committed", plan, known[0][1] if known else None, version, begun, reused=True)
        if status is not GroupStatus.PENDING:
            return GroupResult(state="conflicted", reason=REASONS[status], before=self._before(plan))
        reused = bool(known)
        if known:
            replacement = known[0][1]
        else:
            stage = self.committer.new_stage(self.ctx.stage_place)
            try:
                replacement = self.rewrite_and_offer(plan, stage)
            except GroupChanged as error:
                return GroupResult(state="conflicted", reason=str(error), before=self._before(plan))
            except Gone:
                (status,) = self.replacer.group_statuses(self.replacer.load(), [plan])
                if status is GroupStatus.PENDING:
                    raise
                return GroupResult(state="conflicted", reason=REASONS.get(status, ""), before=self._before(plan))
        work = WorkDone(len(plan.files), plan.bytes)
        self.ctx.work_done(**work.to_json())
        done = self.commit_batch(plan)
        state = "staged" if done is None else "committed"
        result = self._result(state, plan, replacement, done or "", begun, reused=reused)
        result.work = work + self._committed
        if not reused:
            result.add_transferred(read=replacement.bytes, written=replacement.added_bytes)
        return result

    def rewrite_and_offer(self, plan: PartitionPlan, stage: StagedFiles) -> Replacement:
        """Rewrite a group into a stage and offer it.

        Raises JobFailed if the new files do not have the same rows, or a file cannot be read, and GroupChanged.
        """
        layout, table = layout_of(self.argument, plan.bytes), self.ctx.table
        assert table is not None

        def status() -> GroupStatus:
            return self.replacer.group_statuses(self.replacer.load(), [plan])[0]

        watching: Any = WatchingContext(self.ctx, status)
        try:
            replacer = replacer_of(table, watching, swap=self.argument.swap is not None)
            replacement = replacer.rewrite(plan, layout, stage)
        except RowsDiffer as error:
            raise JobFailed(f"cannot rewrite the group {plan.name}: {error}") from error
        except Gone:
            raise
        except Unreadable as error:
            raise JobFailed(f"cannot read the group {plan.name}: {error}") from error
        if stage.offer(replacement) is None:
            raise RuntimeError(f"the new files of {plan.name} were discarded before they were offered: trying again")
        return replacement

    def commit_batch(self, plan: PartitionPlan) -> str | None:
        """Commit a batch with this group if enough groups are offered; returns the version with the group, or None.

        Which groups are in a batch does not matter: a slow or failed group delays no other one. None also if another
        writer has changed the group: the completion rewrites it again.
        """
        size, group = self.argument.commit_every, plan.partition
        if size is None:
            return None
        numbers = sorted(self.committer.uncommitted(plan, size), key=lambda number: (number != group, number))
        # An offer may have been withdrawn since another job of this process has seen it.
        offered = {number: found[0][1] for number in numbers if (found := self.committer.offered(number))}
        if len(offered) < size:
            return None
        ended = self.committer.commit_batch(list(offered.values()), size)
        own = [offered[number] for number, (_, version) in ended.items() if version]
        if own:
            files, size_ = sum(one.files for one in own), sum(one.bytes for one in own)
            self._committed = WorkDone(commits=1, committed_files=files, committed_bytes=size_)
        status, version = ended.get(group, (GroupStatus.PENDING, ""))
        return version if status in DONE else None

    def _result(
        self,
        state: str,
        plan: PartitionPlan,
        replacement: Replacement | None,
        version: str,
        begun: float,
        *,
        reused: bool = False,
    ) -> GroupResult:
        before, after = self._before(plan), Amount()
        if replacement is not None:
            before.rows = replacement.rows + replacement.deleted_rows
            after = self.after(replacement)
        return GroupResult.model_validate(
            {
                "state": state,
                "version": version,
                "before": before,
                "after": after,
                "deleted_rows": replacement.deleted_rows if replacement is not None else 0,
                "record": replacement.record_digest if replacement is not None else "",
                "reused": reused,
                "seconds": round(monotonic() - begun, 3),
            }
        )

    def _before(self, plan: PartitionPlan) -> Amount:
        sizes = [file[1] for file in plan.files]
        return Amount(files=len(sizes), bytes=sum(sizes), sizes=sizes_of(sizes, self.argument.target_bytes))

    def before(self, plan: PartitionPlan, replacement: Replacement) -> Amount:
        """The amount of the replaced files."""
        found = self._before(plan)
        found.rows = replacement.rows + replacement.deleted_rows
        return found

    def after(self, replacement: Replacement) -> Amount:
        """The amount of the new files."""
        return Amount(
            files=replacement.added_files,
            bytes=replacement.added_bytes,
            rows=replacement.rows,
            sizes=sizes_of(list(replacement.sizes), self.argument.target_bytes),
        )


def layout_of(argument: CompactArgument, size: int) -> Layout:
    """How a group of this many bytes is written."""
    outputs = outputs_of(size, argument.target_bytes)
    return Layout(outputs, argument.target_bytes, tuple(argument.sort_by), argument.codec)


def require_shared_directory(ctx: JobContext) -> Place:
    """The shared directory. Raises InvalidArgument if there is none."""
    if ctx.shared is None:
        raise InvalidArgument("compact stages new files, which needs a shared directory: set --shared-dir")
    return ctx.shared
