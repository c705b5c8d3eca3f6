"""Deletes the files of an expired partition of a folder, exactly as planning has listed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import JobFailed, WorkDone
from distop.protocol.texts import plural
from distop.storage.object_store import Listed
from distop.tables import place_of
from distop_behaviors.expire.partition_argument import ExpirePartitionsResult
from distop_behaviors.orphans.table_folder import TablePlace

if TYPE_CHECKING:
    from distop.behavior import JobContext, PartitionPlan, TableRecord

PAGE = 1000


def delete_files(table: TableRecord, partition: PartitionPlan, ctx: JobContext) -> ExpirePartitionsResult:
    """Delete the planned files. Raises JobFailed if some cannot be deleted, UnsafePath for one outside of the table.

    The plan in etcd is the durable list. A file that was replaced since it was listed stays, and so do new files.
    """
    place = TablePlace(place_of(table, ctx.check_cancelled), ctx)
    result = ExpirePartitionsResult()
    ctx.status(f"deleting {plural(len(partition.files), 'file')} of {partition.name}")
    for at in range(0, len(partition.files), PAGE):
        ctx.check_cancelled()
        page = [Listed(place.key_of(path), size, stamp) for path, size, stamp in partition.files[at : at + PAGE]]
        found = place.store.remove_listed(page)
        sizes = {one.key: one.size for one in page}
        # A missing file was listed in planning: an earlier attempt has deleted it.
        for key in (*found.removed, *found.missing):
            result.deleted.add(sizes[key])
        result.changed += len(found.changed)
        for key, why in found.failed.items():
            result.fail(place.path_of(key), why)
        result.work = WorkDone(
            result.work.files + len(page),
            result.work.bytes + sum(sizes.values()),
            committed_files=result.deleted.files,
            committed_bytes=result.deleted.bytes,
        )
        ctx.work_done(**result.work.to_json())
    if result.failed_files:
        first = result.failed[0]
        raise JobFailed(
            f"{plural(result.failed_files, 'file')} could not be deleted, such as {first.file}: {first.why}", result
        )
    return result
