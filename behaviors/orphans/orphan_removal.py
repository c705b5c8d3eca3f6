"""Removes the orphans of one job, page by page, each after a second look at the table and at the files.

A page is written into the job's checkpoint before it is removed. So after a crash the removed files of that page count
as removed by this operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import JobFailed, WorkDone
from distop.clock import time
from distop.protocol.texts import plural
from distop.storage.deletion_scope import OWN
from distop.storage.normal_uris import spelling
from distop.storage.object_store import Listed
from distop.tables import place_of
from distop_behaviors.orphans.deletion_pages import pages
from distop_behaviors.orphans.orphan_argument import OrphansResult
from distop_behaviors.orphans.orphan_plan import QUARANTINED
from distop_behaviors.orphans.table_folder import TableFolder, TablePlace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop.storage.object_store import Removed
    from distop_behaviors.orphans.orphan_argument import OrphansArgument

PAGE = 1000


class OrphanRemoval:
    """The removal of the files of one job."""

    def __init__(self, argument: OrphansArgument, table: TableRecord, ctx: JobContext) -> None:
        self._argument = argument
        self._table = table
        self._ctx = ctx
        self._place: TablePlace

    def run(self, partition: PartitionPlan) -> OrphansResult:
        """Remove the planned files. Raises JobFailed if some cannot be removed, and the errors of planning."""
        ctx, argument = self._ctx, self._argument
        saved = ctx.progress.load() or {}
        start, self._result = saved.get("page", 0), OrphansResult.model_validate(saved.get("result") or {})
        began = time.monotonic() - self._result.seconds
        self._resumed = start if saved else -1
        ctx.status(f"removing {plural(len(partition.files), 'orphan file')}")
        self._discards = partition.name.startswith(QUARANTINED)
        if self._discards:
            self._open_quarantine(partition)
        else:
            self._look(partition)
        for number, page in enumerate(pages(self._files, PAGE, argument.max_per_second, ctx, first=start), start):
            ctx.progress.save({"page": number, "result": self._result.model_dump(mode="json")}, force=True)
            self._count(number, page, self._remove(page))
            self._report_work(page)
            self._result.seconds = round(time.monotonic() - began, 3)
        if self._result.failed_files:
            first = self._result.failed[0]
            raise JobFailed(
                f"{plural(self._result.failed_files, 'file')} could not be removed, such as {first.file}: {first.why}",
                self._result,
            )
        return self._result

    def _look(self, partition: PartitionPlan) -> None:
        """Open the table, and read what its metadata name now: the plan is not trusted."""
        self._place = self._folder = TableFolder(self._table, self._ctx)
        before = self._folder.store.time(OWN) - self._argument.older_than
        self._files = [Listed(self._folder.key_of(path), size, stamp, before) for path, size, stamp in partition.files]
        forms = [spelling(one.key) for one in self._files]
        only = {*forms, *(form.rpartition("/")[2] for form in forms)}
        self._needed = self._folder.needed(keep_unknown=self._argument.prefix_mismatch == "keep", only=only)

    def _open_quarantine(self, partition: PartitionPlan) -> None:
        """Open the table's folder for files of the quarantine, which no metadata name."""
        place = place_of(self._table, self._ctx.check_cancelled, lambda: self._ctx.spark)
        folder = self._place = TablePlace(place, self._ctx)
        before = folder.store.time(OWN) - (self._argument.discard_quarantine or 0.0)
        self._files = [
            Listed(folder.quarantined_key_of(path), size, stamp, before) for path, size, stamp in partition.files
        ]

    def _remove(self, page: Sequence[Listed]) -> tuple[Removed, int]:
        """Look at the table again, and remove files of a page; returns how many its metadata name."""
        if self._discards:
            return self._place.store.remove_listed(page), 0
        now = self._folder.changed()
        if now is not None:
            self._folder.add_new(self._needed, now)
        some = [one for one in page if not self._needed.why(one.key)]
        if not self._argument.quarantine:
            return self._folder.store.remove_listed(some), len(page) - len(some)
        where = self._folder.quarantine_of(self._ctx.operation)
        moves = {one: f"{where}/{one.key}" for one in some}
        return self._folder.store.move_listed(moves), len(page) - len(some)

    def _count(self, number: int, page: Sequence[Listed], answer: tuple[Removed, int]) -> None:
        found, reached = answer
        sizes = {one.key: one.size for one in page}
        gone = list(found.removed)
        if number == self._resumed:
            gone += found.missing  # the earlier attempt has removed them
        else:
            self._result.missing += len(found.missing)
        count = self._result.discarded if self._discards else self._result.removed
        for key in gone:
            count.add(sizes[key])
        self._result.changed += len(found.changed)
        self._result.reached += reached
        for key, why in found.failed.items():
            self._result.fail(self._place.path_of(key), why)

    def _report_work(self, page: Sequence[Listed]) -> None:
        removed, discarded, before = self._result.removed, self._result.discarded, self._result.work
        self._result.work = WorkDone(
            before.files + len(page),
            before.bytes + sum(one.size for one in page),
            committed_files=removed.files + discarded.files,
            committed_bytes=removed.bytes + discarded.bytes,
        )
        self._ctx.work_done(**self._result.work.to_json())
