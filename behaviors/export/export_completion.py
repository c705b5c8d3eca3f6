"""Completes an export: writes the markers of outer folders, and the root manifest last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import WorkDone
from distop.errors import InvalidArgument
from distop.tables import check_table, table_copy_of
from distop_behaviors.export import export_manifest
from distop_behaviors.export.export_argument import ExportReport, ExportResult
from distop_behaviors.export.export_manifest import ROOT_MANIFEST, ExportedFolder, RootManifest
from distop_behaviors.export.export_plan import INNER, PLACE, SOURCE, folder_of, registered_record
from distop_behaviors.export.export_target import ExportTarget
from distop_behaviors.orphans.orphan_argument import SHOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.behavior import JobContext, PartitionPlan, Summary, TableRecord
    from distop_behaviors.export.export_argument import ExportArgument

_COUNTS = ("copied", "reused", "unchanged", "verified", "gone", "removed")


def complete(argument: ExportArgument, table: TableRecord, summary: Summary, ctx: JobContext) -> ExportReport:
    """The report. If all jobs have succeeded, the export is complete, and its root manifest is written."""
    report = ExportReport(to=argument.to, version=summary.version, dry_run=argument.dry_run)
    report.partial = argument.prefixes is not None or not summary.whole
    jobs = list(summary.partitions())
    manifests = _add_results(report, summary)
    for job in jobs:
        for _, size, _ in job.files:
            report.files.add(size)
    report.folders = sum(bool(job.files) for job in jobs)
    if not argument.dry_run:
        report.work += WorkDone(of_files=report.files.files, of_bytes=report.files.bytes)
    if argument.dry_run or not jobs:
        return report
    target = ExportTarget(argument.to, table, ctx, [str(jobs[0].values[PLACE])])
    if summary.verdict == "success":
        _mark(argument, jobs, target, partial=report.partial)
        if argument.register_as is not None:
            _write_table(argument, table, summary.version, str(jobs[0].values[SOURCE]), target, ctx)
        export_manifest.write(target.store, ROOT_MANIFEST, _root(report, table, ctx.operation, jobs, manifests))
        report.complete = True
        if argument.register_as is not None:
            report.registered = _registered(argument, table, ctx)
    target.store.delete_folder(target.pages)
    return report


def _mark(argument: ExportArgument, jobs: Sequence[PartitionPlan], target: ExportTarget, *, partial: bool) -> None:
    """Write the markers of a whole export. Inner folders first: a marker says that everything below it is there."""
    if partial:
        return
    for folder in sorted((folder_of(job) for job in jobs if job.files and job.values[INNER]), reverse=True):
        if folder:
            target.mark(folder, argument.success)
    target.mark("", argument.success)


def _root(
    report: ExportReport, table: TableRecord, operation: str, jobs: Sequence[PartitionPlan], manifests: dict[int, str]
) -> RootManifest:
    """The root manifest."""
    folders = [
        ExportedFolder(
            path=folder_of(job), files=len(job.files), bytes=job.bytes, sha256=manifests.get(job.partition, "")
        )
        for job in jobs
        if job.files
    ]
    return RootManifest(
        table=table.name,
        version=report.version,
        operation=operation,
        partial=report.partial,
        files=report.files.files,
        bytes=report.files.bytes,
        folders=folders,
    )


def _registered(argument: ExportArgument, table: TableRecord, ctx: JobContext) -> str:
    """Register the new table; returns its name. Raises InvalidArgument."""
    record = registered_record(argument, table)
    if check_table(record) != record:
        raise InvalidArgument(f"the table at {argument.to} cannot be registered under this location")
    ctx.register_table(record)
    return record.name


def _write_table(
    argument: ExportArgument, table: TableRecord, version: str, source: str, target: ExportTarget, ctx: JobContext
) -> None:
    """Write the metadata of the table at the target, if its format has some."""
    if source:
        ctx.status("writing the metadata of the new table")
        copy = table_copy_of(table, ctx.check_cancelled, lambda: ctx.spark, version=version, source=source)
        assert copy is not None
        copy.write(target.place, ctx.check_cancelled)


def _add_results(report: ExportReport, summary: Summary) -> dict[int, str]:
    """Add the jobs' results to the report; returns the digests of their manifests."""
    manifests: dict[int, str] = {}
    for row in summary.outcomes():
        if row.result is None:
            continue
        found = ExportResult.model_validate(row.result)
        manifests[row.partition] = found.manifest
        for name in _COUNTS:
            getattr(report, name).add_all(getattr(found, name))
        report.seconds += found.seconds
        report.work += found.work
        report.add_transferred(read=found.bytes_read, written=found.bytes_written)
        report.add_failed(found)
        report.sample = [*report.sample, *found.sample][:SHOWN]
    return manifests
