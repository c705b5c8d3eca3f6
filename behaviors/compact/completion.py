"""The completion of ``compact``: it commits the last groups, rewrites those with conflicts again, and reports."""

from __future__ import annotations

import itertools
import uuid
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from distop.behavior import JobFailed, OperationFailed, WorkDone
from distop.errors import UnsafePath
from distop.protocol.texts import plural
from distop.storage import places
from distop.tables.commits import COMPLETION, GroupStatus
from distop.tables.reading.file_facts import Unreadable
from distop.tables.staged_files import stages_below
from distop_behaviors.compact.compact_argument import (
    SHOWN,
    Amount,
    CompactReport,
    GroupResult,
    Groups,
    LeftOut,
    added,
)
from distop_behaviors.compact.group_committer import DONE, REASONS
from distop_behaviors.compact.group_rewrite import GroupChanged, GroupRewrite, require_shared_directory
from distop_behaviors.transferred_bytes import TransferredBytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.behavior import JobContext, PartitionPlan, Summary
    from distop.tables.commits import Replacement
    from distop_behaviors.compact.compact_argument import CompactArgument

T = TypeVar("T")

REDO = 3
"""Maximum number of further attempts at a group that other writers have changed."""
COMMITTER = COMPLETION
"""The name of a completion in commits and stages."""


class CompactCompletion:
    """The completion of one operation. It may run again after a crash: the table says which groups are committed."""

    def __init__(self, argument: CompactArgument, ctx: JobContext) -> None:
        self._argument = argument
        self._ctx = ctx
        self._rewrite = GroupRewrite(argument, ctx, COMMITTER)
        self._committer = self._rewrite.committer
        self._replacer = self._rewrite.replacer
        self._begun = monotonic()
        self._committed: dict[int, str] = {}
        self._redone: dict[int, Replacement] = {}
        self._left_out: dict[int, str] = {}
        self._conflicted: set[int] = set()
        self._transferred = TransferredBytes()

    def run(self, summary: Summary) -> CompactReport:
        """Commit what is staged, and return the report.

        Raises OperationFailed with the report if a job has failed, or if no group at all was committed.
        """
        plans = {plan.partition: plan for plan in summary.partitions()}
        failed = {row.partition: row.error for row in summary.outcomes() if not row.success}
        self._load_committed(plans)
        self._ctx.work_done(**self._work(plans).to_json())
        if summary.verdict != "cancelled":
            try:
                self._commit_offered(plans)
                self._redo([plan for number, plan in plans.items() if self._is_open(number, failed)])
            except JobFailed as error:
                report = self._report(summary, plans, failed)
                raise OperationFailed(str(error), self._judged(report, "failed")) from error
        report = self._report(summary, plans, failed)
        report.left_bytes = self._sweep()
        if summary.verdict == "cancelled":
            return self._judged(report, "cancelled")
        groups = report.groups
        if groups.failed:
            first = next(iter(failed.values()))
            raise OperationFailed(
                f"{groups.failed} of {plural(groups.planned, 'group')} failed, {groups.committed} were committed: "
                f"{first}",
                self._judged(report, "failed"),
            )
        if not groups.committed:
            reason = report.left_out[0].reason if report.left_out else "no group could be committed"
            raise OperationFailed(f"nothing was committed: {reason}", self._judged(report, "failed"))
        return self._judged(report, "compacted" if groups.committed == groups.planned else "partial")

    @staticmethod
    def _judged(report: CompactReport, verdict: str) -> CompactReport:
        return report.model_copy(update={"verdict": verdict})

    # ------------------------------------------------------------------ commits

    def _load_committed(self, plans: dict[int, PartitionPlan]) -> None:
        head = self._replacer.load()
        first = next(iter(plans.values()))
        self._committed = {**self._committed, **self._replacer.committed_versions(head, first)}

    def _is_open(self, number: int, failed: dict[int, str]) -> bool:
        return number not in self._committed and number not in failed

    def _commit_offered(self, plans: dict[int, PartitionPlan]) -> None:
        """Commit the offered groups that are not committed, also those of failed jobs."""
        offered = self._committer.all_offered()
        rest = [(number, offered[number]) for number in plans if number in offered and number not in self._committed]
        size = self._argument.commit_every or max(len(rest), 1)
        for batch in _batches(rest, size):
            # The attempts at one group have equal rows: the first whose files are all there is as good as any other.
            attempts = {number: [replacement for _, replacement in found] for number, found in batch}
            while attempts:
                ended = self._committer.commit([found.pop() for found in attempts.values()])
                for number, (status, version) in ended.items():
                    self._note(number, status, version)
                attempts = {n: found for n, found in attempts.items() if ended[n][0] is GroupStatus.LOST and found}
            self._ctx.work_done(**self._work(plans).to_json())
        if rest:
            self._load_committed(plans)

    def _note(self, number: int, status: GroupStatus, version: str) -> None:
        if status in DONE:
            self._committed[number] = version or self._committed.get(number, "")
            self._left_out.pop(number, None)
        else:
            self._conflicted.add(number)
            self._left_out[number] = REASONS.get(status, "the new files are not committed")

    def _redo(self, plans: Sequence[PartitionPlan]) -> None:
        """Rewrite groups that other writers have changed, one after the other, with the files that are left."""
        for plan in plans:
            self._conflicted.add(plan.partition)
            for _ in range(REDO):
                self._ctx.check_cancelled()
                if self._redone_once(plan):
                    break

    def _redone_once(self, plan: PartitionPlan) -> bool:
        """Rewrite the rest of a group once; returns whether nothing is left to do for it.

        A group whose commit somebody has rolled back stays as it is.
        """
        head = self._replacer.load()
        (status,) = self._replacer.group_statuses(head, [plan])
        if status in (GroupStatus.COMMITTED, GroupStatus.ROLLED_BACK):
            self._note(plan.partition, status, self._replacer.committed_versions(head, plan).get(plan.partition, ""))
            return True
        again = self._replacer.replan_remaining(head, plan)
        if again is None:
            self._left_out[plan.partition] = "other writers have removed or rewritten the files of the group"
            return True
        place = places.staging(require_shared_directory(self._ctx)).below(
            f"{places.STAGE}/{places.operation_path(self._ctx.operation)}/{COMMITTER}/{uuid.uuid4().hex}"
        )
        stage = self._committer.stage_at(place)
        stage.begin()
        try:
            replacement = self._rewrite.rewrite_and_offer(again, stage)
        except (JobFailed, Unreadable, GroupChanged) as error:
            stage.discard(self._ctx.log)
            self._left_out[plan.partition] = str(error)
            return False
        self._transferred.add_transferred(read=replacement.bytes, written=replacement.added_bytes)
        status, version = self._committer.commit([replacement])[plan.partition]
        self._note(plan.partition, status, version)
        if status is GroupStatus.COMMITTED:
            self._redone[plan.partition] = replacement
        return status in (GroupStatus.COMMITTED, GroupStatus.ROLLED_BACK)

    # ------------------------------------------------------------------ the end

    def _sweep(self) -> int:
        """Remove stages, and files that are in no commit and cannot come into one; returns the bytes of other files."""
        log, left = self._ctx.log, 0
        try:
            stages = [self._committer.stage_at(place) for place in stages_below(self._committer.stages)]
            offered = self._committer.all_offered(withdrawn=True).values()
            found = [replacement for pairs in offered for _, replacement in pairs]
            for stage in stages:
                stage.discard(log)
            kept, unneeded = self._divided(found)
            for replacement in unneeded:
                replacement.stage.withdraw()
            # The first look decides what to withdraw, and only the second one what to remove: see StagedFiles.
            again, removable = self._divided(unneeded) if unneeded else ([], [])
            left += sum(one.added_bytes for one in (*kept, *again))
            left += sum(one.added_bytes for one in removable if not one.stage.remove_withdrawn(log))
            for stage in stages:
                stage.forget(log)
        except (OSError, UnsafePath) as error:
            log.warning("Cannot remove the stages of %s: %s", self._ctx.operation, error)
        return left

    def _divided(self, replacements: Sequence[Replacement]) -> tuple[list[Replacement], list[Replacement]]:
        """Replacements that are not committed: those whose files must stay, and the others.

        Files of a pending replacement stay: a paused process could still commit them. So do files that were perhaps
        committed: the commit may be expired, or the table may have been set back since.
        """
        if self._replacer.withdrawable:
            return [], list(replacements)
        head = self._replacer.load()
        statuses, needed = self._replacer.statuses(head, replacements), self._replacer.may_have(head, replacements)
        kept, others = [], []
        for one, status, may_have in zip(replacements, statuses, needed, strict=True):
            if status is GroupStatus.PENDING or (status in REASONS and may_have):
                kept.append(one)
            elif status in REASONS:
                others.append(one)
        return kept, others

    def _report(self, summary: Summary, plans: dict[int, PartitionPlan], failed: dict[int, str]) -> CompactReport:
        results = {
            row.partition: GroupResult.model_validate(row.result)
            for row in summary.outcomes()
            if row.success and isinstance(row.result, dict)
        }
        groups, reasons = self._ends(plans, failed, cancelled=summary.verdict == "cancelled")
        versions = sorted(set(self._committed.values()), key=lambda text: (len(text), text))
        report = CompactReport(
            verdict="partial",
            groups=groups,
            commits=len(versions),
            versions=versions[:SHOWN],
            before=Amount(rows=0),
            after=Amount(rows=0),
            left_out=[LeftOut(group=plans[n].name, reason=why) for n, why in itertools.islice(reasons.items(), SHOWN)],
            work=self._work(plans),
        )
        self._add_amounts(report, plans, results)
        for one in (*results.values(), self._transferred):
            report.add_transferred(read=one.bytes_read, written=one.bytes_written)
        seconds = sum(result.seconds for result in results.values())
        report.seconds = round(seconds + monotonic() - self._begun, 3)
        return report

    def _ends(
        self, plans: dict[int, PartitionPlan], failed: dict[int, str], *, cancelled: bool
    ) -> tuple[Groups, dict[int, str]]:
        """How many groups have ended how, and why each of the others is not committed."""
        committed = [number for number in plans if number in self._committed]
        lost = {number: error for number, error in failed.items() if number not in self._committed}
        rest = [number for number in plans if number not in self._committed and number not in lost]
        for number in rest:
            default = "the operation was cancelled" if cancelled else "the group was not committed"
            self._left_out.setdefault(number, default)
        groups = Groups(
            planned=len(plans),
            committed=len(committed),
            conflicted=0 if cancelled else len(rest),
            unfinished=len(rest) if cancelled else 0,
            failed=len(lost),
            redone=len(self._redone),
        )
        return groups, {n: lost.get(n) or self._left_out[n] for n in (*lost, *rest) if n in plans}

    def _add_amounts(
        self, report: CompactReport, plans: dict[int, PartitionPlan], results: dict[int, GroupResult]
    ) -> None:
        """Add the old and the new files of the committed groups to the report."""
        records = self._records()
        for number in self._committed:
            plan = plans.get(number)
            if plan is None:
                continue
            replacement = self._redone.get(number) or records.get(number)
            if replacement is not None:
                report.before = added(report.before, self._rewrite.before(plan, replacement))
                report.after = added(report.after, self._rewrite.after(replacement))
                report.deleted_rows += replacement.deleted_rows
            elif number in results:
                report.before = added(report.before, results[number].before)
                report.after = added(report.after, results[number].after)
                report.deleted_rows += results[number].deleted_rows

    def _work(self, plans: dict[int, PartitionPlan]) -> WorkDone:
        """The planned files of all groups, and of those that are committed."""
        done = [plan for number, plan in plans.items() if number in self._committed]
        files, size = sum(len(plan.files) for plan in done), sum(plan.bytes for plan in done)
        return WorkDone(
            files,
            size,
            sum(len(plan.files) for plan in plans.values()),
            sum(plan.bytes for plan in plans.values()),
            len(set(self._committed.values())),
            files,
            size,
        )

    def _records(self) -> dict[int, Replacement]:
        """The replacements that are committed, as far as their stages still exist."""
        found = [replacement for pairs in self._committer.all_offered().values() for _, replacement in pairs]
        statuses = self._replacer.statuses(self._replacer.load(), found)
        return {one.group: one for one, status in zip(found, statuses, strict=True) if status is GroupStatus.COMMITTED}


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch
