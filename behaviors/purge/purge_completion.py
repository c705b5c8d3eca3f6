"""Completes ``purge``: deletes the metadata, the roots last, and makes the receipt.

A run after a crash counts the planned files that are gone as deleted.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Literal

from distop.behavior import OperationFailed, WorkDone
from distop.protocol.records import OperationRef
from distop.protocol.texts import plural
from distop.storage.deletion_scope import OWN
from distop.storage.object_store import Listed
from distop.storage.opened_stores import store_of
from distop.storage.places import folder
from distop.tables import catalog_entry_of
from distop.tables.catalog_entry import CatalogEntryState, EntryChanged
from distop_behaviors.orphans.orphan_argument import FileCount
from distop_behaviors.purge.file_digest import NOTHING, added_up, fingerprint
from distop_behaviors.purge.purge_argument import PurgeManifest, PurgeReport, PurgeResult
from distop_behaviors.purge.purge_deletion import (
    changed_since,
    delete_planned,
    drop_entry_and_wait_for_grace,
    failure_of,
)
from distop_behaviors.purge.purge_plan import ENTRY, LATE_FINGERPRINTS, LEAVES, MANIFEST_JOB, TIME, kind_of

if TYPE_CHECKING:
    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord
    from distop_behaviors.orphans.table_folder import TablePlace
    from distop_behaviors.purge.purge_argument import PurgeArgument

CERTIFICATES = "certificates"
"""The folder in the shared directory with the lists of certified files, by table."""
_AGAIN = "register the table and start the purge again"


class PurgeCompletion:
    """One run of the completion."""

    def __init__(self, argument: PurgeArgument, table: TableRecord, ctx: JobContext) -> None:
        self._argument = argument
        self._table = table
        self._ctx = ctx

    def run(self, summary: Summary) -> PurgeReport | None:
        """Delete the metadata if all jobs have succeeded. Raises OperationFailed with the report if files are left."""
        began = monotonic()
        partitions = list(summary.partitions())
        if not partitions:
            return None  # nothing was planned, so the table is still registered
        manifest = PurgeManifest.model_validate_json(str(partitions[0].values[MANIFEST_JOB]))
        self._report = report = PurgeReport(**manifest.model_dump(), dry_run=self._argument.dry_run)
        report.deleted_digest = NOTHING
        if not self._argument.dry_run:
            planned = manifest.planned.values()
            report.work = WorkDone(
                of_files=sum(one.files for one in planned), of_bytes=sum(one.bytes for one in planned)
            )
        kinds = {one.name: kind_of(one) for one in partitions}
        for row in summary.outcomes():
            if row.result is not None and row.name != MANIFEST_JOB:
                self._add(kinds[row.name], PurgeResult.model_validate(row.result))
        if self._argument.dry_run:
            return report
        if summary.verdict == "success":
            self._delete_rest(partitions)
            report.complete = True
        elif ENTRY in partitions[0].values:
            report.catalog = self._found_in_catalog(CatalogEntryState(*partitions[0].values[ENTRY]))
        report.seconds = round(monotonic() - began, 3)
        return report

    def _add(self, kind: str, found: PurgeResult) -> None:
        report = self._report
        if found.deleted.files:
            report.deleted.setdefault(kind, FileCount()).add_all(found.deleted)
        report.deleted_digest = added_up([report.deleted_digest, found.digest])
        report.work += found.work
        report.changed += found.changed
        report.add_failed(found)

    def _found_in_catalog(self, planned: CatalogEntryState) -> Literal["dropped", "kept"]:
        entry = catalog_entry_of(self._table, self._ctx.check_cancelled)
        found = entry.find() if entry is not None else None
        return "kept" if found is not None and found.identity == planned.identity else "dropped"

    def _delete_rest(self, partitions: list[PartitionPlan]) -> None:
        """Delete the lists of certified files, then the metadata. Raises OperationFailed if some are left."""
        ctx, values = self._ctx, partitions[0].values
        try:
            place = drop_entry_and_wait_for_grace(self._argument, self._table, values, ctx)
        except EntryChanged as error:
            self._report.catalog = "kept"
            raise OperationFailed(changed_since(self._table, error), self._report) from error
        self._report.catalog = "dropped" if ENTRY in values else ""
        self._check_new(place, partitions)
        # While the metadata stay, a new purge can delete the lists.
        self._delete_certificates()
        ctx.status("deleting the table's metadata")
        for partition in partitions:
            if partition.name == MANIFEST_JOB or kind_of(partition) in LEAVES:
                continue
            result = PurgeResult()
            delete_planned(self._argument, place, partition, result, ctx, self._report.work)
            self._add(kind_of(partition), result)
            if why := failure_of(result):
                # The files after these lead to them, so they stay.
                raise OperationFailed(f"{why}; when that is repaired, {_AGAIN}", self._report)

    def _check_new(self, place: TablePlace, partitions: list[PartitionPlan]) -> None:
        """Raises OperationFailed if files were written since planning: metadata may reach them, so all of it stays."""
        planned = {path for partition in partitions for path, _, _ in partition.files}
        since, known = float(partitions[0].values[TIME]), set(partitions[0].values[LATE_FINGERPRINTS])
        new = [
            place.path_of(one.key)
            for one in place.store.list()
            if one.modified >= since
            and one.key.partition("/")[0] != OWN
            and place.path_of(one.key) not in planned
            and fingerprint(one) not in known
        ]
        self._report.added = len(new)
        if new:
            raise OperationFailed(
                f"{plural(len(new), 'file')} in the table's folder, such as {new[0]}, came after the plan, so the "
                f"metadata stay: stop the writers, {_AGAIN}",
                self._report,
            )

    def _delete_certificates(self) -> None:
        """Delete the lists of files of the table's certificates. Raises OperationFailed if some are left."""
        shared = self._ctx.shared  # the folder of this namespace
        if shared is None:
            return
        store = store_of(shared)
        where = f"{CERTIFICATES}/{folder(OperationRef.parse(self._ctx.operation).table)}"
        lists = [Listed(one.key, one.size, one.stamp) for one in store.list(where)]
        found, result = store.remove_listed(lists), PurgeResult()
        self._report.certificates = len(found.removed)
        for key in found.changed:
            result.fail(store.location_of(key), "it was replaced since it was listed")
        for key, why in found.failed.items():
            result.fail(store.location_of(key), why)
        self._report.add_failed(result)
        if why := failure_of(result):
            raise OperationFailed(f"{why}; when that is repaired, {_AGAIN}", self._report)
