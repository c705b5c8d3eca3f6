"""Deletes planned files of a table in pages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from distop.behavior import JobFailed, WorkDone
from distop.clock import time
from distop.errors import UnsafePath
from distop.protocol.texts import plural, shown
from distop.storage.deletion_scope import OWN
from distop.storage.object_store import Listed
from distop.tables import place_of
from distop_behaviors.orphans.table_folder import TablePlace
from distop_behaviors.purge.file_digest import added_up, digest_of
from distop_behaviors.purge.purge_argument import PurgeResult
from distop_behaviors.purge.purge_plan import INDEXES, LEAVES, TIME, kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop_behaviors.purge.purge_argument import PurgeArgument

PAGE = 1000
_STEP = 0.5
"""Seconds between two checks whether to stop while a rate limit or the grace is kept."""


def delete_job(argument: PurgeArgument, table: TableRecord, partition: PartitionPlan, ctx: JobContext) -> PurgeResult:
    """Delete the files of a job, if they are leaves. Raises JobFailed if some cannot be deleted."""
    if kind_of(partition) not in LEAVES:
        return PurgeResult()
    place = TablePlace(place_of(table, ctx.check_cancelled, lambda: ctx.spark), ctx)
    _wait_for_grace(argument, place, partition.values, ctx)
    ctx.status(f"deleting {plural(len(partition.files), 'file')}")
    result = PurgeResult()
    delete_planned(argument, place, partition, result, ctx)
    if why := failure_of(result):
        raise JobFailed(why, result)
    return result


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
    size = PAGE if argument.max_per_second is None else max(1, min(PAGE, int(argument.max_per_second)))
    for at in range(0, len(partition.files), size):
        ctx.check_cancelled()
        started = time.monotonic()
        page = [Listed(_key_of(path, place), bytes_, stamp) for path, bytes_, stamp in partition.files[at : at + size]]
        found = place.store.remove_listed(page)
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
        if argument.max_per_second is not None:
            _wait_until(started + len(page) / argument.max_per_second, ctx)


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


def _wait_for_grace(argument: PurgeArgument, place: TablePlace, values: Mapping[str, object], ctx: JobContext) -> None:
    """Wait until the grace is over, by the store's clock."""
    if not argument.grace:
        return
    until = float(str(values[TIME])) + argument.grace
    while (left := until - place.store.time(OWN)) > 0:
        ctx.status(f"waiting for the end of the grace, {left:.0f} s")
        _wait_until(time.monotonic() + left, ctx)


def _wait_until(until: float, ctx: JobContext) -> None:
    while (left := until - time.monotonic()) > 0:
        ctx.check_cancelled()
        threading.Event().wait(min(_STEP, left))
