"""Removes versions from the metadata, and then the files that nothing needs any more.

Each run decides anew: a run after a crash reads whether the versions are gone, and which files are needed now. So a
file that is deleted already is missing, and one that is needed again stays.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from pydantic import ValidationError

from distop.behavior import OperationFailed
from distop.errors import UnsafePath
from distop.protocol.texts import plural
from distop.storage.deletion import check_own
from distop.storage.normal_uris import normal
from distop.tables import expiration_of
from distop.tables.commits import Conflict
from distop.tables.expiration import KEPT, REMOVED
from distop.tables.reachability import DATA, DELETES
from distop_behaviors.expire.expire_argument import SHOWN, ExpireSnapshotsReport, ExpireSnapshotsResult
from distop_behaviors.expire.expire_plan import VERSIONS, decision_of, named_by, units_of
from distop_behaviors.expire.file_deletion import FileDeletion
from distop_behaviors.expire.file_lists import file_hash, key_hash, name_hash, read_expired, read_kept
from distop_behaviors.orphans.table_folder import TablePlace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.behavior import JobContext, OutcomeRow, PartitionPlan, Summary, TableRecord
    from distop.storage.deletion_scope import DeletionScope
    from distop.tables.expiration import Choice, Expiration, RetentionRule
    from distop.tables.reachability import TableFile
    from distop_behaviors.expire.expire_argument import ExpireSnapshotsArgument


class DeletableFiles:
    """Files that may be deleted unless something needs them, the leaves first. ``scope``: of the table."""

    def __init__(self, scope: DeletionScope, report: ExpireSnapshotsReport) -> None:
        self._scope = scope
        self._report = report
        self.files: dict[str, TableFile] = {}
        """By the key below the table's folder."""
        self._by_hash: dict[int, list[str]] = {}

    def add(self, file: TableFile) -> None:
        """Add a file; one outside of the table's folder is counted, and stays."""
        try:
            key = self._scope.key_of(file.path)
        except UnsafePath:
            self._report.elsewhere += 1
            return
        if key not in self.files:
            self.files[key] = file
            for number in (key_hash(key), name_hash(key)):
                self._by_hash.setdefault(number, []).append(key)

    def keep(self, hashes: Iterable[int]) -> int:
        """Remove the files with these hashes, because they are needed; returns their number."""
        before = len(self.files)
        for number in hashes:
            for key in self._by_hash.pop(number, ()):
                self.files.pop(key, None)
        return before - len(self.files)


class ExpireCompletion:
    """One run of the completion."""

    def __init__(self, argument: ExpireSnapshotsArgument, table: TableRecord, ctx: JobContext) -> None:
        self._argument = argument
        self._table = table
        self._ctx = ctx
        self._covered: set[str] = set()
        """The names of the units whose needed files the jobs have listed."""
        self._state = ""
        self._report = ExpireSnapshotsReport(dry_run=argument.dry_run)

    def run(self, summary: Summary) -> ExpireSnapshotsReport:
        """Remove versions and files. Raises OperationFailed with the report if a file could not be deleted."""
        began = monotonic()
        partitions = {partition.name: partition for partition in summary.partitions()}
        rule, choice = decision_of(partitions.values())
        expiration = self._open()
        report = self._report
        report.versions_before = len(expiration.versions())
        report.place = expiration.reachability.place
        present = {version.id for version in expiration.versions()} & set(choice.versions)
        if not self._argument.dry_run:
            self._ctx.status("removing old versions from the metadata")
            try:
                expiration.commit(choice, rule, self._ctx)
            except Conflict as error:
                text = f"other writers always committed first, so nothing was removed: {error}"
                raise OperationFailed(text) from error
            expiration = self._open()
        self._describe(expiration, choice, present)
        candidates = self._candidates(summary, partitions, choice)
        if self._argument.dry_run:
            for file in candidates.files.values():
                report.count(file.kind, file.size or 0)
        else:
            candidates.keep(self._needed(expiration, candidates, rule))
            self._delete(candidates, choice, rule)
        report.seconds = round(monotonic() - began, 3)
        if report.failed_files:
            first = report.failed[0]
            raise OperationFailed(
                f"{plural(report.failed_files, 'file')} could not be deleted, such as {first.file}: {first.why}; no "
                "version of the table has them, so remove-orphans deletes them later",
                report,
            )
        return report

    def _open(self) -> Expiration:
        found = expiration_of(self._table, self._ctx.check_cancelled, lambda: self._ctx.spark)
        self._state = found.reachability.state
        return found

    def _describe(self, after: Expiration, choice: Choice, present: set[str]) -> None:
        report, left = self._report, {version.id for version in after.versions()}
        gone = [one for one in choice.versions if self._argument.dry_run or one not in left]
        if not self._argument.dry_run:
            # An earlier run of this completion may have removed them.
            report.versions_before += len(gone) - len(present & set(gone))
        report.removed, report.sample = len(gone), gone[:SHOWN]
        report.reused = len(choice.versions) - len(gone)
        report.versions_after = report.versions_before - len(gone)
        refs = {name for version in after.versions() for name in version.refs}
        report.refs = [name for name in choice.refs if self._argument.dry_run or name not in refs]

    def _candidates(self, summary: Summary, partitions: dict[str, PartitionPlan], choice: Choice) -> DeletableFiles:
        found = DeletableFiles(TablePlace(self._report.place, self._ctx).scope, self._report)
        parts: list[TableFile] = []
        kept: list[tuple[OutcomeRow, PartitionPlan]] = []
        for row in summary.outcomes():
            if row.name.startswith(VERSIONS):
                continue
            partition = partitions[row.name]
            kept.append((row, partition))
            units, whose = units_of(partition)
            if whose == KEPT:
                continue
            own = {unit.name for unit in units}
            for file, needed in self._listed(row, partition):
                if not needed and file.path in own:
                    parts.append(file)
                elif not needed:
                    found.add(file)
        for file in (*parts, *choice.files):
            found.add(file)
        for row, partition in kept:
            found.keep(self._kept(row, partition))
            units, whose = units_of(partition)
            if whose != REMOVED:
                self._covered |= {unit.name for unit in units}
        return found

    def _listed(self, row: OutcomeRow, partition: PartitionPlan) -> Iterable[tuple[TableFile, bool]]:
        """The files of a job's list; read again from the metadata if the list is damaged or gone."""
        result = _result(row)
        try:
            if row.stage is not None and result is not None:
                check_own(row.stage)
                listed = read_expired(row.stage, result.expired) if result.expired is not None else iter(())
                return [(file, False) for file in listed]
        except (OSError, ValueError, UnsafePath) as error:
            self._ctx.log.warning("Reading the metadata of %s again: cannot read its list: %s", row.name, error)
        return named_by(partition, self._table, self._ctx)

    def _kept(self, row: OutcomeRow, partition: PartitionPlan) -> Iterable[int]:
        result = _result(row)
        try:
            if row.stage is not None and result is not None:
                check_own(row.stage)
                return read_kept(row.stage, result.kept) if result.kept is not None else ()
        except (OSError, ValueError, UnsafePath) as error:
            self._ctx.log.warning("Reading the metadata of %s again: cannot read its list: %s", row.name, error)
        place = normal(self._report.place)
        return [file_hash(place, file.path) for file, needed in named_by(partition, self._table, self._ctx) if needed]

    def _needed(self, expiration: Expiration, candidates: DeletableFiles, rule: RetentionRule) -> Iterable[int]:
        place = normal(self._report.place)
        data = any(file.kind in (DATA, DELETES) for file in candidates.files.values())
        return (file_hash(place, path) for path in expiration.needed(self._covered, rule, data=data))

    def _delete(self, candidates: DeletableFiles, choice: Choice, rule: RetentionRule) -> None:
        def look_again() -> set[str]:
            """The files that are still not needed; the metadata may have changed since the last page."""
            before = self._state
            now = self._open()
            if now.reachability.state != before:
                self._report.reached += candidates.keep(self._needed(now, candidates, rule))
            return set(candidates.files)

        report, rate = self._report, self._argument.max_per_second
        deletion = FileDeletion(report.place, report, self._ctx, rate=rate, commits=int(report.removed > 0))
        youngest = rule.now - choice.age  # both are frozen in the plan
        deletion.delete(dict(candidates.files), written_before=youngest, look_again=look_again)
        report.work = deletion.work


def _result(row: OutcomeRow) -> ExpireSnapshotsResult | None:
    try:
        return ExpireSnapshotsResult.model_validate(row.result)
    except ValidationError:
        return None
