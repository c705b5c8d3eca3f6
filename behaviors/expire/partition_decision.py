"""Decides which partitions have expired, and freezes the decision in a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from distop.behavior import PartitionPlan, Planned
from distop.clock import time
from distop.errors import InvalidArgument
from distop.protocol.texts import plural
from distop.tables import partition_removal_of
from distop_behaviors.expire.expire_argument import SHOWN
from distop_behaviors.expire.partition_argument import ExpirePartitionsReport
from distop_behaviors.expire.partition_periods import end_of

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary, TableRecord
    from distop_behaviors.expire.partition_argument import ExpirePartitionsArgument

DECISION = "@decision"
"""The name of the job that only holds the decision."""
_REPORT = "report"


def plan(argument: ExpirePartitionsArgument, table: TableRecord, ctx: JobContext) -> Planned:
    """The expired partitions with their files. Raises InvalidArgument if they are too large a part of the table."""
    removal = partition_removal_of(table, ctx, ctx.check_cancelled)
    cutoff = datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=argument.older_than)
    zone, hold = ZoneInfo(argument.zone), set(argument.hold)
    report = ExpirePartitionsReport(dry_run=argument.dry_run, cutoff=cutoff.isoformat())
    expired: list[PartitionPlan] = []
    all_bytes = 0
    for one in removal.partitions(argument.column):
        ctx.check_cancelled()
        report.partitions += 1
        all_bytes += one.plan.bytes
        end = end_of(one, argument.format, zone)
        if end is None:
            report.unknown += 1
        elif end <= cutoff:
            if not hold.isdisjoint((one.plan.name, *one.plan.name.split("/"), str(one.value), one.text)):
                report.held += 1
            else:
                expired.append(one.plan)
    report.unpartitioned = removal.unpartitioned
    report.removed, report.sample = len(expired), sorted(one.name for one in expired)[:SHOWN]
    size = sum(one.bytes for one in expired)
    _check_fraction(argument, report, size, all_bytes)
    first = PartitionPlan(0, DECISION, values={_REPORT: json.dumps(report.model_dump(mode="json"))})
    found = sorted(expired, key=lambda one: one.name)
    return Planned([first, *(replace(one, partition=n) for n, one in enumerate(found, 1))], removal.state)


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


def complete(argument: ExpirePartitionsArgument, table: TableRecord, summary: Summary, ctx: JobContext) -> object:
    """Remove the planned files of the expired partitions in one commit."""
    partitions = list(summary.partitions())
    frozen = next(one for one in partitions if one.name == DECISION).values[_REPORT]
    report = ExpirePartitionsReport.model_validate_json(str(frozen))
    files = {path: size for one in partitions for path, size, _ in one.files}
    report.files.files, report.files.bytes = len(files), sum(files.values())
    if argument.dry_run or not files:
        return report
    ctx.status(f"removing {plural(report.removed, 'partition')}")
    done = partition_removal_of(table, ctx, ctx.check_cancelled).remove(files)
    report.left, report.version = done.left, done.version
    report.files.files = done.files
    return report
