"""Decides which partitions have expired, and freezes the decision in a plan; completes the operation."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from distop.behavior import PartitionPlan, Planned, WorkDone
from distop.clock import time
from distop.errors import InvalidArgument
from distop.protocol.texts import plural
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.opened_stores import has_store, store_of
from distop.tables import partition_removal_of, place_of
from distop_behaviors.expire.expire_argument import SHOWN
from distop_behaviors.expire.expire_plan import check_place, time_by
from distop_behaviors.expire.partition_argument import ExpirePartitionsReport, ExpirePartitionsResult
from distop_behaviors.expire.partition_periods import end_of
from distop_behaviors.orphans.orphan_argument import FileCount
from distop_behaviors.orphans.table_folder import TablePlace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext, Summary, TableRecord
    from distop.tables.partition_removal import RemovedFiles
    from distop_behaviors.expire.partition_argument import ExpirePartitionsArgument

DECISION = "@decision"
"""The name of the job that only holds the decision."""
DELETES = "@deletes"
"""The value in the plan of a job that deletes its files."""
_REPORT = "report"


def plan(argument: ExpirePartitionsArgument, table: TableRecord, ctx: JobContext) -> Planned:
    """The expired partitions with their files. Raises InvalidArgument if they are too large a part of the table."""
    removal = partition_removal_of(table, ctx, ctx.check_cancelled)
    place = place_of(table, ctx.check_cancelled, lambda: ctx.spark)
    cutoff = datetime.fromtimestamp(_time_at(place), UTC) - timedelta(seconds=argument.older_than)
    zone, hold = ZoneInfo(argument.zone), set(argument.hold)
    report = ExpirePartitionsReport(dry_run=argument.dry_run, cutoff=cutoff.isoformat())
    if removal.deletes_files:
        check_place(place, table, ctx)
        report.deletes = True
    expired: list[PartitionPlan] = []
    unmatched = set(hold)
    all_bytes = 0
    for one in removal.partitions(argument.column):
        ctx.check_cancelled()
        report.partitions += 1
        all_bytes += one.plan.bytes
        end = end_of(one, argument.format, zone)
        names = {one.plan.name, *one.plan.name.split("/"), str(one.value), one.text}
        unmatched -= names
        if end is None:
            report.unknown += 1
        elif end <= cutoff:
            if not hold.isdisjoint(names):
                report.held += 1
            else:
                expired.append(one.plan)
    report.unpartitioned = removal.unpartitioned
    report.unmatched_hold = sorted(unmatched)[:SHOWN]
    if unmatched:
        ctx.log.warning("hold has %s that name no partition, such as %s", len(unmatched), report.unmatched_hold[0])
    report.removed, report.sample = len(expired), sorted(one.name for one in expired)[:SHOWN]
    size = sum(one.bytes for one in expired)
    _check_fraction(argument, report, size, all_bytes)
    first = PartitionPlan(0, DECISION, values={_REPORT: json.dumps(report.model_dump(mode="json"))})
    if removal.deletes_files and not argument.dry_run:
        folder = TablePlace(place, ctx)
        expired = [listed_in_store(one, folder) for one in expired]
    found = sorted(expired, key=lambda one: one.name)
    return Planned([first, *(replace(one, partition=n) for n, one in enumerate(found, 1))], removal.state)


def _time_at(place: str) -> float:
    """The time in seconds, by the clock of the place's store; in a store that distop does not open, by this node's."""
    folder = str(local_path(place) or place.rstrip("/"))
    return time_by(store_of(Place(folder))) if has_store(folder) else time.time()


def listed_in_store(partition: PartitionPlan, place: TablePlace) -> PartitionPlan:
    """The plan of a job that deletes these files, with the sizes and stamps by which their store removes them."""
    stored = {one.key: one for one in place.store.list(partition.name)}
    keys = [place.key_of(path) for path, _, _ in partition.files]
    found = [stored[key] for key in keys if key in stored]
    files = tuple((place.path_of(one.key), one.size, one.stamp) for one in found)
    return replace(partition, files=files, bytes=sum(one.size for one in found), values={DELETES: "true"})


def _check_fraction(
    argument: ExpirePartitionsArgument, report: ExpirePartitionsReport, size: int, all_bytes: int
) -> None:
    parts = {"partitions": (report.removed, report.partitions), "bytes": (size, all_bytes)}
    for what, (some, whole) in parts.items():
        if some > argument.max_fraction * whole:
            raise InvalidArgument(
                f"{plural(report.removed, 'partition')}, such as {report.sample[0]}, would be removed: that is "
                f"{some / whole:.0%} of the {what}, more than max_fraction, {argument.max_fraction:.0%}; nothing was "
                "removed. Check column, zone and older_than, or raise max_fraction"
            )


def complete(
    argument: ExpirePartitionsArgument, table: TableRecord, summary: Summary, ctx: JobContext
) -> ExpirePartitionsReport | None:
    """Remove the planned files of the expired partitions in one commit, and report.

    Jobs have deleted those of a folder. A cancelled or failed operation makes no commit.
    """
    began = monotonic()
    report = _completed(argument, table, summary, ctx)
    if report is not None:
        report.seconds = round(monotonic() - began, 3)
    return report


def _completed(
    argument: ExpirePartitionsArgument, table: TableRecord, summary: Summary, ctx: JobContext
) -> ExpirePartitionsReport | None:
    partitions = list(summary.partitions())
    if not partitions:
        return None  # nothing was planned
    frozen = next(one for one in partitions if one.name == DECISION).values[_REPORT]
    report = ExpirePartitionsReport.model_validate_json(str(frozen))
    files = {path: size for one in partitions for path, size, _ in one.files}
    report.files.files, report.files.bytes = len(files), sum(files.values())
    if argument.dry_run:
        return report
    report.work = WorkDone(of_files=len(files), of_bytes=report.files.bytes)
    if report.deletes:
        _add_deleted(report, summary)
    elif summary.verdict != "success":
        report.removed, report.sample, report.files = 0, [], FileCount()
    elif files:
        ctx.status(f"removing {plural(report.removed, 'partition')}")
        ctx.work_done(**report.work.to_json())
        planned = next(one for one in partitions if one.files)
        done = partition_removal_of(table, ctx, ctx.check_cancelled).remove(files, planned)
        _add_removed(report, partitions, files, done)
    return report


def _add_removed(
    report: ExpirePartitionsReport, partitions: Sequence[PartitionPlan], files: Mapping[str, int], done: RemovedFiles
) -> None:
    """Report what the commit has removed; others may have removed some or all of the planned files before."""
    names = sorted(one.name for one in partitions if any(path in done.paths for path, _, _ in one.files))
    size = sum(files[path] for path in done.paths)
    examined = WorkDone(len(files), report.files.bytes)
    report.removed, report.sample = len(names), names[:SHOWN]
    report.files = FileCount(files=len(done.paths), bytes=size)
    report.left, report.version = len(files) - len(done.paths), done.version
    committed = WorkDone(commits=int(bool(done.paths)), committed_files=len(done.paths), committed_bytes=size)
    report.work += examined + committed


def _add_deleted(report: ExpirePartitionsReport, summary: Summary) -> None:
    """Report what the jobs have deleted."""
    report.removed, report.sample, report.files = 0, [], FileCount()
    for row in summary.outcomes():
        if row.name == DECISION or row.result is None:
            continue
        found = ExpirePartitionsResult.model_validate(row.result)
        report.files.add_all(found.deleted)
        report.changed += found.changed
        report.add_failed(found)
        report.work += found.work
        if row.success and found.deleted.files:
            report.removed += 1
            report.sample = [*report.sample, row.name][:SHOWN]
