"""Exports one folder: copies its files page by page, and then writes its manifest and its marker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.behavior import JobFailed, WorkDone
from distop.clock import time
from distop.protocol.texts import plural
from distop.storage.object_store import Listed
from distop_behaviors.export import export_manifest
from distop_behaviors.export.export_argument import ExportResult
from distop_behaviors.export.export_manifest import FOLDER_MANIFEST, CopiedPage, FolderManifest, in_folder
from distop_behaviors.export.export_plan import INNER, PLACE, SUCCESS, VERSION, folder_of
from distop_behaviors.export.export_target import ExportTarget
from distop_behaviors.export.file_copy import Copy, FileCopier, in_pages
from distop_behaviors.orphans.orphan_argument import SHOWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.export.export_argument import ExportArgument
    from distop_behaviors.export.export_manifest import CopiedFile
    from distop_behaviors.export.folder_copier import FolderCopier

PAGE = 2_000
"""Files that are copied between two checkpoints at most."""
PAGE_BYTES = 1 << 30
"""Bytes of a page, if it has more than one file."""
_REMOVED_AT_ONCE = 1000


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
        if job.files:
            with self._copier.folder(folder, self._ctx.check_cancelled) as copier:
                files = self._copied(copier, job, former, int(saved.get("page", 0)))
                data = self._manifest(job, files, self._left(former, {one.path for one in files}))
                copier.put(FOLDER_MANIFEST, data)
                if job.values[INNER]:
                    copier.flush()
                else:
                    copier.mark(self._argument.success)
        else:
            left, key = self._left(former, set()), in_folder(folder, FOLDER_MANIFEST)
            data = self._manifest(job, [], left)
            if left:
                self._target.store.put(key, data)
            else:
                self._target.store.delete_many([key])
                data = b""
        self._result.manifest = export_manifest.digest(data) if data else ""
        self._result.seconds += time.monotonic() - started
        if self._result.failed_files:
            first = self._result.failed[0]
            raise JobFailed(
                f"{plural(self._result.failed_files, 'file')} could not be removed, such as {first.file}: {first.why}",
                self._result,
            )
        return self._result

    def _manifest(self, job: PartitionPlan, files: list[CopiedFile], left: list[CopiedFile]) -> bytes:
        self._ctx.check_cancelled()
        version = str(job.values[VERSION])
        return export_manifest.encoded(FolderManifest(table=self._table.name, version=version, files=files, left=left))

    def _former(self, folder: str) -> FolderManifest | None:
        """The manifest of the last export of this folder. Raises InvalidArgument for an invalid one."""
        found = export_manifest.read(self._target.store, in_folder(folder, FOLDER_MANIFEST), FolderManifest)
        return found if found is not None and found.table == self._table.name else None

    def _copied(
        self, copier: FolderCopier, job: PartitionPlan, former: FolderManifest | None, start: int
    ) -> list[CopiedFile]:
        """Copy all files. Raises JobFailed if some cannot be copied."""
        known = {one.path: one for one in former.files} if former is not None else {}
        trusted = known if former is not None and former.version == self._argument.diff_from else {}
        files: list[CopiedFile] = []
        for number, some in enumerate(in_pages(job.files, PAGE, PAGE_BYTES)):
            self._ctx.check_cancelled()
            key = f"{self._target.pages}/{job.partition}-{number}.json"
            page = export_manifest.read(self._target.store, key, CopiedPage) if number < start else None
            if page is not None:
                files += page.files
                continue
            tried = self._tried(copier, some, known, trusted)
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
            if len(files) < len(job.files):
                copier.flush()
                export_manifest.write(self._target.store, key, CopiedPage(files=[one.file for one in found]))
                saved = {"page": number + 1, "result": self._result.model_dump(mode="json")}
                self._ctx.progress.save(saved, force=True)
        return files

    def _tried(
        self,
        copier: FolderCopier,
        some: Sequence[PlannedFile],
        known: Mapping[str, CopiedFile],
        trusted: Mapping[str, CopiedFile],
    ) -> Iterator[Copy | str]:
        """The copy of each file of a page in turn, or the reason why it cannot be copied."""
        found: list[Copy | str | None] = [None] * len(some)
        if trusted:
            for n, (path, size, stamp) in enumerate(some):
                former = trusted.get(self._copier.key_of(path))
                if former is not None and (former.bytes, former.planned) == (size, stamp):
                    found[n] = Copy(former, "unchanged", verified=False)
        copies = iter(copier.copy([one for one, there in zip(some, found, strict=True) if there is None], known))
        for there in found:
            yield there if there is not None else next(copies)

    def _counted(self, planned: PlannedFile, tried: Copy | str) -> Copy | None:
        """Count a file in the result; returns its copy, None if there is none."""
        path, size, _ = planned
        if isinstance(tried, str):
            self._result.fail(path, tried)
            return None
        getattr(self._result, tried.how).add(size)
        if tried.how == "copied":
            self._result.add_transferred(read=size, written=size)
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
