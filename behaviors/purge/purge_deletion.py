"""Deletes planned files of a table in pages, after its entry in a catalog is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from distop.behavior import JobFailed, WorkDone
from distop.clock import time
from distop.errors import UnsafePath
from distop.protocol.texts import plural, shown
from distop.storage.deletion_scope import OWN
from distop.storage.object_store import Listed, Removed
from distop.tables import catalog_entry_of, recorded_place_of
from distop.tables.catalog_entry import CatalogEntryState, EntryChanged, drop_planned
from distop_behaviors.orphans.deletion_pages import pages, wait_until
from distop_behaviors.orphans.table_folder import TablePlace
from distop_behaviors.purge.file_digest import added_up, digest_of
from distop_behaviors.purge.purge_argument import PurgeResult
from distop_behaviors.purge.purge_plan import ENTRY, INDEXES, LEAVES, TIME, kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop_behaviors.purge.purge_argument import PurgeArgument

PAGE = 1000
_AT_ONCE = 4
"""Parts of a page of leaves that are deleted at the same time; each has all files of its folders."""
_LEAST = 100
"""Files of a page that has parts."""


def delete_job(argument: PurgeArgument, table: TableRecord, partition: PartitionPlan, ctx: JobContext) -> PurgeResult:
    """Delete the files of a job, if they are leaves. Raises JobFailed if some cannot be deleted."""
    if kind_of(partition) not in LEAVES:
        return PurgeResult()
    try:
        place = drop_entry_and_wait_for_grace(argument, table, partition.values, ctx)
    except EntryChanged as error:
        raise JobFailed(changed_since(table, error), PurgeResult()) from error
    ctx.status(f"deleting {plural(len(partition.files), 'file')}")
    result = PurgeResult()
    delete_planned(argument, place, partition, result, ctx)
    if why := failure_of(result):
        raise JobFailed(why, result)
    return result


def drop_entry_and_wait_for_grace(
    argument: PurgeArgument, table: TableRecord, values: Mapping[str, Any], ctx: JobContext
) -> TablePlace:
    """Remove the table's entry from its catalog, and wait for the end of the grace; returns the table's own folder.

    After that, files there may be deleted. ``values``: of a partition of the plan. Raises EntryChanged
    if the table was changed since the plan, and the errors of planning.
    """
    place = TablePlace(recorded_place_of(table), ctx)
    if ENTRY in values and (entry := catalog_entry_of(table, ctx.check_cancelled)) is not None:
        ctx.status("removing the table from its catalog")
        drop_planned(entry, CatalogEntryState(*values[ENTRY]))
    _wait_for_grace(argument, place, values, ctx)
    return place


def changed_since(table: TableRecord, error: EntryChanged) -> str:
    """The text of a failure: the table was changed since the plan."""
    return (
        f"the table {shown(table.location)} was changed in its catalog since the plan, so it stays there and no file "
        f"is deleted: {error}. Stop its writers, register it and start the purge again"
    )


def delete_planned(
    argument: PurgeArgument,
    place: TablePlace,
    partition: PartitionPlan,
    result: PurgeResult,
    ctx: JobContext,
    before: WorkDone | None = None,
) -> None:
    """Delete the files of a job, and add what became of them to ``result``. Raises the store's errors.

    ``before``: the work that is reported together with that of this job.
    """
    for files in pages(partition.files, PAGE, argument.max_per_second, ctx):
        page = [Listed(_key_of(path, place), size, stamp) for path, size, stamp in files]
        found = _remove(place, page, at_once=_AT_ONCE if kind_of(partition) in LEAVES and len(page) >= _LEAST else 1)
        sizes = {one.key: one.size for one in page}
        # A missing file was listed in planning: an earlier attempt has deleted it.
        gone = [*found.removed, *found.missing]
        for key in gone:
            result.deleted.add(sizes[key])
        result.digest = added_up([result.digest, digest_of((key, sizes[key]) for key in gone)])
        result.work = WorkDone(
            result.work.files + len(page),
            result.work.bytes + sum(sizes.values()),
            committed_files=result.deleted.files,
            committed_bytes=result.deleted.bytes,
        )
        ctx.work_done(**((before or WorkDone()) + result.work).to_json())
        result.changed += len(found.changed)
        for key in found.changed:
            result.fail(place.path_of(key), "it was replaced since it was listed")
        for key, why in found.failed.items():
            result.fail(place.path_of(key), why)


def _remove(place: TablePlace, page: Sequence[Listed], *, at_once: int) -> Removed:
    """Remove files of a page, of different folders at the same time. Raises the store's errors."""
    parts: list[list[Listed]] = []
    for one in page:
        folder = one.key.rpartition("/")[0]
        if not parts or (len(parts[-1]) * at_once >= len(page) and folder != parts[-1][-1].key.rpartition("/")[0]):
            parts.append([])
        parts[-1].append(one)
    if len(parts) == 1:
        return place.store.remove_listed(page)
    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(place.store.remove_listed, parts))
    return Removed(
        [key for one in found for key in one.removed],
        [key for one in found for key in one.missing],
        [key for one in found for key in one.changed],
        {key: why for one in found for key, why in one.failed.items()},
    )


def failure_of(result: PurgeResult) -> str:
    """A sentence about the files that could not be deleted; "": there are none."""
    if not result.failed_files:
        return ""
    first = result.failed[0]
    return f"{plural(result.failed_files, 'file')} could not be deleted, such as {first.file}: {first.why}"


def _key_of(path: str, place: TablePlace) -> str:
    """The key of a planned file. Raises UnsafePath for one that is neither the table's nor of one of its indexes."""
    start = f"{place.place}/"
    if path.startswith(f"{start}{INDEXES}"):
        key = path[len(start) :]
        place.scope.check(key.removeprefix(f"{OWN}/"))
        return key
    key = place.key_of(path)
    if not key:
        raise UnsafePath(f"{shown(path)} is not a file of the table: it is not deleted")
    return key


def _wait_for_grace(argument: PurgeArgument, place: TablePlace, values: Mapping[str, Any], ctx: JobContext) -> None:
    """Wait until the grace is over, by the store's clock."""
    if not argument.grace:
        return
    until = float(values[TIME]) + argument.grace
    while (left := until - place.store.time(OWN)) > 0:
        ctx.status(f"waiting for the end of the grace, {left:.0f} s")
        wait_until(time.monotonic() + left, ctx)
