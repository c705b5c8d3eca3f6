"""Exports one folder: copies its files page by page, and then writes its manifest and its marker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from distop.behavior import JobFailed, WorkDone
from distop.clock import time
from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import plural
from distop.storage.object_store import Listed
from distop.storage.store_errors import Denied, ObjectMissing, Unsupported
from distop_behaviors.export import export_manifest
from distop_behaviors.export.export_argument import ExportResult
from distop_behaviors.export.export_manifest import FOLDER_MANIFEST, CopiedPage, FolderManifest, in_folder
from distop_behaviors.export.export_plan import INNER, PLACE, SUCCESS, VERSION, folder_of
from distop_behaviors.export.export_target import ExportTarget
from distop_behaviors.export.file_copy import Copy, FileCopier, SourceChanged
from distop_behaviors.orphans.orphan_argument import SHOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.export.export_argument import ExportArgument
    from distop_behaviors.export.export_manifest import CopiedFile

PAGE = 200
"""Files that are copied between two checkpoints."""
FILES_AT_ONCE = 8
_REMOVED_AT_ONCE = 1000
_OF_FILE = (SourceChanged, UnsafePath, InvalidArgument, Denied, Unsupported, ObjectMissing)
"""Errors of one file that no retry helps."""


class FolderExport:
    """The export of one folder."""

    def __init__(self, argument: ExportArgument, table: TableRecord, ctx: JobContext) -> None:
        self._argument = argument
        self._table = table
        self._ctx = ctx

    def run(self, job: PartitionPlan) -> ExportResult:
        """Raises JobFailed if files are missing, have changed or are refused, and the errors of planning."""
        started = time.monotonic()
        folder, place = folder_of(job), str(job.values[PLACE])
        self._target = ExportTarget(self._argument.to, self._table, self._ctx, [place])
        self._copier = FileCopier(place, self._target.place)
        former = self._former(folder)
        if self._argument.dry_run:
            return self._foreseen(job, former)
        self._target.check_free()
        saved = self._ctx.progress.load() or {}
        self._result = ExportResult.model_validate(saved.get("result") or {})
        self._target.open_folder(folder, [*job.values[SUCCESS], self._argument.success])
        self._ctx.status(f"exporting {plural(len(job.files), 'file')}")
        files = self._copied(job, former, int(saved.get("page", 0)))
        left = self._left(former, {one.path for one in files})
        manifest = FolderManifest(table=self._table.name, version=str(job.values[VERSION]), files=files, left=left)
        self._result.seconds += time.monotonic() - started
        self._ctx.check_cancelled()
        key = in_folder(folder, FOLDER_MANIFEST)
        if files or left:
            self._result.manifest = export_manifest.write(self._target.store, key, manifest)
        else:
            self._target.store.delete_many([key])
        if files and not job.values[INNER]:
            self._target.mark(folder, self._argument.success)
        if self._result.failed_files:
            first = self._result.failed[0]
            raise JobFailed(
                f"{plural(self._result.failed_files, 'file')} could not be removed, such as {first.file}: {first.why}",
                self._result,
            )
        return self._result

    def _former(self, folder: str) -> FolderManifest | None:
        """The manifest of the last export of this folder. Raises InvalidArgument for an invalid one."""
        found = export_manifest.read(self._target.store, in_folder(folder, FOLDER_MANIFEST), FolderManifest)
        return found if found is not None and found.table == self._table.name else None

    def _copied(self, job: PartitionPlan, former: FolderManifest | None, start: int) -> list[CopiedFile]:
        """Copy all files. Raises JobFailed if some cannot be copied."""
        known = {one.path: one for one in former.files} if former is not None else {}
        trusted = former is not None and former.version == self._argument.diff_from
        files: list[CopiedFile] = []
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            for number, at in enumerate(range(0, len(job.files), PAGE)):
                self._ctx.check_cancelled()
                key = f"{self._target.pages}/{job.partition}-{number}.json"
                page = export_manifest.read(self._target.store, key, CopiedPage) if number < start else None
                if page is not None:
                    files += page.files
                    continue
                some = job.files[at : at + PAGE]
                tried = pool.map(lambda one: self._one(one, known, trusted=trusted), some)
                found = [
                    copy
                    for one, answer in zip(some, tried, strict=True)
                    if (copy := self._counted(one, answer)) is not None
                ]
                if len(found) < len(some):
                    first = self._result.failed[0]
                    raise JobFailed(
                        f"{plural(self._result.failed_files, 'file')} could not be exported, such as {first.file}: "
                        f"{first.why}",
                        self._result,
                    )
                files += [one.file for one in found]
                if at + PAGE < len(job.files):
                    export_manifest.write(self._target.store, key, CopiedPage(files=[one.file for one in found]))
                    saved = {"page": number + 1, "result": self._result.model_dump(mode="json")}
                    self._ctx.progress.save(saved, force=True)
        return files

    def _one(self, planned: PlannedFile, known: Mapping[str, CopiedFile], *, trusted: bool) -> Copy | str:
        """Copy a file; returns the reason if it cannot be copied."""
        path, size, stamp = planned
        former = known.get(self._copier.key_of(path))
        if trusted and former is not None and (former.bytes, former.planned) == (size, stamp):
            return Copy(former, "unchanged", verified=False)
        self._ctx.check_cancelled()
        try:
            return self._copier.copy(planned, former)
        except _OF_FILE as error:
            return str(error)

    def _counted(self, planned: PlannedFile, tried: Copy | str) -> Copy | None:
        """Count a file in the result; returns its copy, None if there is none."""
        path, size, _ = planned
        if isinstance(tried, str):
            self._result.fail(path, tried)
            return None
        getattr(self._result, tried.how).add(size)
        self._result.work += WorkDone(1, size, committed_files=1, committed_bytes=size)
        self._ctx.work_done(**self._result.work.to_json())
        if tried.verified:
            self._result.verified.add(size)
        return tried

    def _left(self, former: FolderManifest | None, current: set[str]) -> list[CopiedFile]:
        """Files of earlier exports that the version does not have, and that are not removed."""
        every = [*former.files, *former.left] if former is not None else []
        gone = list({one.path: one for one in every if one.path not in current}.values())
        for one in gone:
            self._result.gone.add(one.bytes)
        self._result.sample = [one.path for one in gone[:SHOWN]]
        if not self._argument.remove_gone:
            return gone
        left: list[CopiedFile] = []
        for at in range(0, len(gone), _REMOVED_AT_ONCE):
            left += self._removed(gone[at : at + _REMOVED_AT_ONCE])
        return left

    def _removed(self, gone: Sequence[CopiedFile]) -> list[CopiedFile]:
        """Remove files; returns those that are still there."""
        self._ctx.check_cancelled()
        for one in gone:
            self._target.scope.check(one.path)
        found = self._target.store.remove_listed([Listed(one.path, one.bytes, one.target) for one in gone])
        files = {one.path: one for one in gone}
        for key in (*found.removed, *found.missing):
            self._result.removed.add(files[key].bytes)
        for key in found.changed:
            self._result.fail(self._target.store.location_of(key), "it has changed since it was exported")
        for key, why in found.failed.items():
            self._result.fail(self._target.store.location_of(key), why)
        return [files[key] for key in (*found.changed, *found.failed)]

    def _foreseen(self, job: PartitionPlan, former: FolderManifest | None) -> ExportResult:
        """What would be copied, by the manifest of the last export."""
        result = ExportResult()
        known = {one.path: (one.bytes, one.planned) for one in former.files} if former is not None else {}
        current = set()
        for path, size, stamp in job.files:
            key = self._copier.key_of(path)
            current.add(key)
            (result.reused if known.get(key) == (size, stamp) else result.copied).add(size)
        every = [*former.files, *former.left] if former is not None else []
        gone = [one for one in every if one.path not in current]
        for one in gone:
            result.gone.add(one.bytes)
        result.sample = [one.path for one in gone[:SHOWN]]
        return result
