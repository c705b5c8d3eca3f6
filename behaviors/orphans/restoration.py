"""Moves quarantined files back to where they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import JobFailed, WorkDone
from distop.clock import time
from distop.errors import InvalidArgument
from distop.protocol.texts import plural, shown
from distop.storage.object_store import Listed
from distop.storage.store_errors import ObjectMissing
from distop.tables import place_of
from distop_behaviors.orphans.orphan_argument import FileCount, RestoreReport
from distop_behaviors.orphans.table_folder import TablePlace, operation_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.behavior import JobContext, TableRecord
    from distop_behaviors.orphans.orphan_argument import RestoreArgument

PAGE = 1000
SOURCE_TYPE = "remove-orphans"


class Restoration:
    """The restoration of the files of one operation."""

    def __init__(self, argument: RestoreArgument, table: TableRecord, ctx: JobContext) -> None:
        """Raises InvalidArgument if the operation is not one of this table, and the errors of planning."""
        self._argument = argument
        self._ctx = ctx
        self._operation = operation_of(argument.operation, table.name, SOURCE_TYPE)
        # The metadata are not read: a file that they need may be in the quarantine.
        self._folder = TablePlace(place_of(table, ctx.check_cancelled, lambda: ctx.spark), ctx)
        self._source = self._folder.quarantine_of(self._operation)

    def quarantined(self) -> FileCount:
        """The files to restore. Raises InvalidArgument if there are none."""
        found = self._counted()
        if not found.files:
            raise InvalidArgument(
                f"there are no quarantined files of {shown(self._operation)} in "
                f"{self._folder.path_of(self._source)}: it has moved none, or they were restored or deleted"
            )
        return found

    def run(self, planned: FileCount) -> RestoreReport:
        """Move the files back. Raises JobFailed if some cannot be moved, and the errors of planning.

        ``planned``: the files that were to be restored. Those that are gone now were restored by an earlier attempt.
        """
        ctx, report = self._ctx, RestoreReport(dry_run=self._argument.dry_run)
        began = time.monotonic()
        now = self._counted()
        report.restored.files = max(0, planned.files - now.files)
        report.restored.bytes = max(0, planned.bytes - now.bytes)
        of_files, of_bytes = now.files + report.restored.files, now.bytes + report.restored.bytes
        done = WorkDone(report.restored.files, report.restored.bytes)
        report.work = WorkDone(done.files, done.bytes, of_files, of_bytes, 0, done.files, done.bytes)
        for page in self._pages():
            ctx.check_cancelled()
            self._restore(page, report)
            done += WorkDone(len(page), sum(one.size for one in page))
            restored = report.restored if not self._argument.dry_run else FileCount()
            report.work = WorkDone(done.files, done.bytes, of_files, of_bytes, 0, restored.files, restored.bytes)
            ctx.work_done(**report.work.to_json())
        if not self._argument.dry_run and next(self._folder.store.list(self._source), None) is None:
            self._folder.store.delete_folder(self._source)  # empty folders of a disk
        report.seconds = round(time.monotonic() - began, 3)
        if report.failed_files:
            first = report.failed[0]
            raise JobFailed(
                f"{plural(report.failed_files, 'file')} could not be restored, such as {first.file}: {first.why}",
                report,
            )
        return report

    def _counted(self) -> FileCount:
        found = FileCount()
        for one in self._folder.store.list(self._source):
            found.add(one.size)
        return found

    def _pages(self) -> Iterator[list[Listed]]:
        page: list[Listed] = []
        for one in self._folder.store.list(self._source):
            page.append(Listed(one.key, one.size, one.stamp))
            if len(page) == PAGE:
                yield page
                page = []
        if page:
            yield page

    def _restore(self, page: list[Listed], report: RestoreReport) -> None:
        moves: dict[Listed, str] = {}
        for one in page:
            key = one.key[len(self._source) + 1 :]
            self._folder.scope.check(key)
            if self._exists(key):
                report.existing += 1
            elif self._argument.dry_run:
                report.restored.add(one.size)
            else:
                moves[one] = key
        if not moves:
            return
        found = self._folder.store.move_listed(moves)
        sizes = {one.key: one.size for one in page}
        for key in found.removed:
            report.restored.add(sizes[key])
        report.missing += len(found.missing) + len(found.changed)
        for key, why in found.failed.items():
            report.fail(self._folder.path_of(key), why)

    def _exists(self, key: str) -> bool:
        try:
            self._folder.store.head(key)
            return True
        except ObjectMissing:
            return False
