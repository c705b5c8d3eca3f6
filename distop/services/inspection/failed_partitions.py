"""Lists the failed partitions of an operation by name, in pages, while it runs and after its end."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from distop.errors import Compacted, NotFound
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import from_ranges, loads
from distop.protocol.record_reading import read
from distop.protocol.records import History
from distop.protocol.txn import Get
from distop.services.inspection.outcomes import job_results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.services.operation_results import OperationStatus
    from distop.store.client import EtcdClient

_JOBS_READ = 100
"""Jobs in one read: each has an outcome of up to 64 KiB."""


@frozen
class FailedPartition:
    """A partition whose job failed.

    ``partition``: its ordinal in the plan. ``executor``, ``attempt`` and ``finished`` (RFC 3339): of the last attempt;
    "" and 0 if etcd has compacted them.
    """

    partition: int
    name: str
    error: str = ""
    executor: str = ""
    attempt: int = 0
    finished: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        return {name: getattr(self, name) for name in ("partition", "name", "error", "executor", "attempt", "finished")}


@frozen
class FailedPage:
    """One page of failed partitions, in the order of the plan.

    ``failed`` and ``total``: the number of failed and of all partitions of the operation; None if unknown. ``after``:
    the ordinal after which the next page starts; None on the last page.
    """

    op: str
    failed: int | None
    total: int | None
    partitions: tuple[FailedPartition, ...]
    after: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields for ``--json``."""
        return {
            "op": self.op,
            "failed": self.failed,
            "total": self.total,
            "partitions": [one.to_json() for one in self.partitions],
            "after": self.after,
        }


async def failed_partitions(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, status: OperationStatus, limit: int, after: int = -1
) -> FailedPage:
    """The first ``limit`` failed partitions with an ordinal above ``after``.

    ``status``: a status of the operation that was read before. Raises UnreadableRecord; NotFound if the operation has
    ended, and neither its outcomes nor its rerun record exist any more.
    """
    total = status.jobs.get("total")
    while True:
        now, (history,) = await etcd.read_at(Get(keys.history(ref)))
        revision = history.kv.mod_revision - 1 if history.kv is not None else now
        try:
            found = await _from_outcomes(etcd, keys, ref, revision, _places(status, total or 0, after), limit + 1)
            break
        except Compacted:
            if history.kv is not None:
                rest = await _from_rerun_record(etcd, keys, ref, history.kv)
                found = [one for one in rest if one.partition > after]
                break
    listed = tuple(found[:limit])
    failed = status.jobs.get("failed") if status.exact else None
    return FailedPage(str(ref), failed, total, listed, listed[-1].partition if len(found) > limit else None)


def _places(status: OperationStatus, total: int, after: int) -> Iterator[tuple[int, int]]:
    """Ranges of ordinals to read: around the failed ones, if the status names all of them; else the whole plan."""
    all_named = status.exact and not status.failed_truncated and (status.failed or not status.jobs.get("failed"))
    named = from_ranges(status.failed) if all_named else None
    first = after + 1
    while first < total:
        if named is not None:
            place = bisect_left(named, first)
            if place == len(named):
                return
            first = named[place]
        yield first, min(first + _JOBS_READ, total)
        first += _JOBS_READ


async def _from_outcomes(
    etcd: EtcdClient, keys: Keys, ref: OperationRef, revision: int, places: Iterator[tuple[int, int]], most: int
) -> list[FailedPartition]:
    """At most ``most`` failed partitions at ``revision``. Raises Compacted, UnreadableRecord."""
    found: list[FailedPartition] = []
    for first, end in places:
        jobs = (await etcd.list(*keys.jobs_between(ref, first, end), revision=revision)).kvs
        for job, _ in job_results(jobs, str(ref)):
            if not job.success:
                found.append(
                    FailedPartition(job.partition, job.name, job.error, job.executor, job.attempt, job.finished)
                )
        if len(found) >= most:
            return found[:most]
    return found


async def _from_rerun_record(etcd: EtcdClient, keys: Keys, ref: OperationRef, kv: KeyValue) -> list[FailedPartition]:
    """The failed partitions in the rerun record, with the few errors of the history record. Raises NotFound."""
    history = read(History.decode, kv)
    if not history.failed:
        return []
    rows = (await etcd.read(Get(keys.history_chunk(ref, 0))))[0].kv
    if rows is None:
        raise NotFound(
            f"the failed partitions of {ref} cannot be listed: etcd has compacted its outcomes, and they were too many "
            "to be kept by name. The field `failed` of `distop show --json` has their ordinals"
        )
    errors = {error.get("partition"): str(error.get("text") or "") for error in history.errors}
    return [
        FailedPartition(row["partition"], row["name"], errors.get(row["name"], ""))
        for row in read(loads, rows)
        if row.get("failed")
    ]
