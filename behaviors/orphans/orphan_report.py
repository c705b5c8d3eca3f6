"""The report of ``remove-orphans``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import WorkDone
from distop_behaviors.orphans.orphan_argument import OrphanListing, OrphansReport, OrphansResult
from distop_behaviors.orphans.orphan_plan import LISTING, PLACE
from distop_behaviors.orphans.table_folder import quarantine_path

if TYPE_CHECKING:
    from distop.behavior import JobContext, Summary
    from distop_behaviors.orphans.orphan_argument import OrphansArgument


def report_of(argument: OrphansArgument, summary: Summary, ctx: JobContext) -> OrphansReport:
    """The sums of the jobs' results, with what the listing has shown."""
    first = next(summary.partitions(), None)
    values = first.values if first is not None else {}
    listing, place = OrphanListing.model_validate(values.get(LISTING) or {}), str(values.get(PLACE) or "")
    report = OrphansReport(**listing.model_dump(), place=place, dry_run=argument.dry_run)
    if not argument.dry_run:
        planned = (listing.orphans, listing.quarantined)
        report.work = WorkDone(of_files=sum(one.files for one in planned), of_bytes=sum(one.bytes for one in planned))
    for row in summary.outcomes():
        if row.result is None:
            continue
        found = OrphansResult.model_validate(row.result)
        report.removed.add_all(found.removed)
        report.discarded.add_all(found.discarded)
        report.missing += found.missing
        report.changed += found.changed
        report.reached += found.reached
        report.seconds = round(report.seconds + found.seconds, 3)
        report.add_failed(found)
        report.work += found.work
    if argument.quarantine and report.removed.files:
        report.quarantine = f"{place}/{quarantine_path(ctx.space, ctx.operation)}"
    return report
