"""Exports folders: copies their files, and then writes the manifest and the marker of each.

Many small folders are exported together, because to flush a disk takes as long for one folder as for all.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

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
from distop_behaviors.export.folder_copier import flush
from distop_behaviors.orphans.orphan_argument import SHOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.export.export_argument import ExportArgument
    from distop_behaviors.export.export_manifest import CopiedFile
    from distop_behaviors.export.folder_copier import FolderCopier

PAGE = 2_000
"""Files that are copied between two checkpoints at most."""
PAGE_BYTES = 1 << 30
"""Bytes of a page, if it has more than one file."""
GROUP_FOLDERS, GROUP_BYTES = 64, 128 << 20
"""Folders that are flushed together, and their bytes if there is more than one."""
_REMOVED_AT_ONCE = 1000


class FolderExports:
    """The exports of some folders, in groups whose files are flushed to the disk together."""

    def __init__(self, argument: ExportArgument, table: TableRecord, ctx: JobContext) -> None:
        self._argument = argument
        self._table = table
        self._ctx = ctx

    def run(self, jobs: Sequence[PartitionPlan]) -> Iterator[tuple[PartitionPlan, ExportResult | Exception]]:
        """Each job with its result or its error: JobFailed if files are missing, have changed or are refused.

        Raises the errors of planning, and StoreError.
        """
        place = str(jobs[0].values[PLACE])
        target = ExportTarget(self._argument.to, self._table, self._ctx, [place])
        if not self._argument.dry_run:
            target.read_owner()
        with FileCopier(place, target.place) as copier, ExitStack() as stack:
            begun: _Group | None = None
            clock = _BatchClock()
            for jobs_of_one in _groups(jobs):
                some = [
                    FolderExport(self._argument, self._table, self._ctx, target, copier, one) for one in jobs_of_one
                ]
                # Its copies are written while the former group is flushed.
                group = stack.enter_context(_Group(some, self._ctx, clock))
                if begun is not None:
                    yield from begun.finish()
                begun = group
            if begun is not None:
                yield from begun.finish()


class _BatchClock:
    """Divides the time of a batch among its groups, of which two overlap."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def lap(self) -> float:
        """The seconds since the last call."""
        since, self._since = self._since, time.monotonic()
        return self._since - since


class _Group:
    """Exports of folders. Each step is finished for all of them before the next one: a marker comes last.

    It is a context manager, in which the copies are begun.
    """

    def __init__(self, some: Sequence[FolderExport], ctx: JobContext, clock: _BatchClock) -> None:
        self._some = some
        self._ctx = ctx
        self._clock = clock
        self._stack = ExitStack()
        self._work = WorkDone()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._left = _each(self._some, lambda one: one.begin(stack, self._add))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def finish(self) -> Iterator[tuple[PartitionPlan, ExportResult | Exception]]:
        """Each job with its result or its error. Raises StoreError if a disk cannot be flushed."""
        self._ctx.status(f"exporting {plural(sum(len(one.job.files) for one in self._some), 'file')}")
        with self._stack:
            left = _each(self._left, FolderExport.finish_copies)
            left = _each(left, FolderExport.write_manifest)
            flush(one.copier for one in left if one.copier is not None)
            marked = [one for one in _each(left, FolderExport.mark) if one.marked]
            flush(one.copier for one in marked if one.copier is not None)
        seconds = self._clock.lap() / len(self._some)
        for one in self._some:
            one.result.seconds += seconds
            yield one.job, one.error or one.result

    def _add(self, more: WorkDone) -> None:
        self._work += more
        self._ctx.work_done(**self._work.to_json())


class FolderExport:
    """The export of one folder, in steps. ``error``: why it has failed; ``marked``: it has a marker now."""

    def __init__(
        self,
        argument: ExportArgument,
        table: TableRecord,
        ctx: JobContext,
        target: ExportTarget,
        files: FileCopier,
        job: PartitionPlan,
    ) -> None:
        self.job = job
        self.result = ExportResult()
        self.error: Exception | None = None
        self.copier: FolderCopier | None = None
        self.marked = False
        self._argument = argument
        self._table = table
        self._ctx = ctx
        self._target = target
        self._files = files
        self._report: Callable[[WorkDone], None] = lambda _: None
        self._former: FolderManifest | None = None
        self._known: dict[str, CopiedFile] = {}
        """Copies of the last export, by path."""
        self._trusted: Mapping[str, CopiedFile] = {}
        """Those that need not be examined."""
        self._pages: list[Sequence[PlannedFile]] = []
        self._copies: list[CopiedFile] = []
        self._next = 0
        """The first page that an earlier attempt has not finished."""
        self._tried: Iterator[Copy | str] = iter(())
        """The copies of this page, which are begun first."""

    def begin(self, stack: ExitStack, report: Callable[[WorkDone], None]) -> None:
        """Remove the markers, and begin to copy. ``stack`` closes the copier; ``report`` is told about each file.

        Raises InvalidArgument for an invalid manifest of an earlier export.
        """
        self._ctx.check_cancelled()
        self._report = report
        folder = folder_of(self.job)
        self._former = self._read_former(folder)
        if self._argument.dry_run:
            self.result = self._foreseen()
            return
        self._target.remove_markers(folder, [*self.job.values[SUCCESS], self._argument.success])
        if not self.job.files:
            return
        former = self._former
        self._known = {one.path: one for one in former.files} if former is not None else {}
        diff = former is not None and former.version == self._argument.diff_from
        self._trusted = self._known if diff else {}
        self.copier = stack.enter_context(self._files.folder(folder, self._ctx.check_cancelled))
        self._pages = list(in_pages(self.job.files, PAGE, PAGE_BYTES))
        self._next = self._finished_pages()
        self._tried = self._try(self._next)

    def finish_copies(self) -> None:
        """Wait for all copies. Raises JobFailed if some cannot be copied."""
        if self.copier is not None:
            self._copy_pages(self.copier)

    def write_manifest(self) -> None:
        """Write the manifest, and remove files of earlier exports if the argument says so. Raises JobFailed."""
        if self._argument.dry_run:
            return
        if self.copier is not None:
            data = self._manifest(self._copies, self._left({one.path for one in self._copies}))
            self.copier.put(FOLDER_MANIFEST, data)
        else:
            left, key = self._left(set()), in_folder(folder_of(self.job), FOLDER_MANIFEST)
            data = self._manifest([], left)
            if left:
                self._target.store.put(key, data)
            else:
                self._target.store.delete_many([key])
                data = b""
        self.result.manifest = export_manifest.digest(data) if data else ""

    def mark(self) -> None:
        """Write the marker, unless other folders are inside. Raises JobFailed if files could not be removed."""
        if self.copier is not None and not self.job.values[INNER]:
            self.copier.put(self._argument.success, b"")
            self.marked = True
        if self.result.failed_files:
            first = self.result.failed[0]
            raise JobFailed(
                f"{plural(self.result.failed_files, 'file')} could not be removed, such as {first.file}: {first.why}",
                self.result,
            )

    def _manifest(self, files: list[CopiedFile], left: list[CopiedFile]) -> bytes:
        self._ctx.check_cancelled()
        version = str(self.job.values[VERSION])
        return export_manifest.encoded(FolderManifest(table=self._table.name, version=version, files=files, left=left))

    def _read_former(self, folder: str) -> FolderManifest | None:
        """The manifest of the last export of this folder. Raises InvalidArgument for an invalid one."""
        found = export_manifest.read(self._target.store, in_folder(folder, FOLDER_MANIFEST), FolderManifest)
        return found if found is not None and found.table == self._table.name else None

    def _page_key(self, number: int) -> str:
        return f"{self._target.pages}/{self.job.partition}-{number}.json"

    def _finished_pages(self) -> int:
        """Take over the pages that an earlier attempt has finished; returns their number."""
        number = 0
        while number < len(self._pages) - 1:  # the last page is in the manifest
            page = export_manifest.read(self._target.store, self._page_key(number), CopiedPage)
            planned = [(self._files.key_of(path), size, stamp) for path, size, stamp in self._pages[number]]
            if page is None or [(one.path, one.bytes, one.planned_stamp) for one in page.files] != planned:
                break
            self._copies += page.files
            self.result = page.result
            number += 1
        return number

    def _copy_pages(self, copier: FolderCopier) -> None:
        """Copy all pages of files. Raises JobFailed if some cannot be copied."""
        for number in range(self._next, len(self._pages)):
            self._ctx.check_cancelled()
            some = self._pages[number]
            tried = self._tried if number == self._next else self._try(number)
            found = [
                copy
                for one, answer in zip(some, tried, strict=True)
                if (copy := self._counted(one, answer)) is not None
            ]
            if len(found) < len(some):
                first = self.result.failed[0]
                raise JobFailed(
                    f"{plural(self.result.failed_files, 'file')} could not be exported, such as {first.file}: "
                    f"{first.why}",
                    self.result,
                )
            copies = [one.file for one in found]
            self._copies += copies
            if number < len(self._pages) - 1:
                copier.flush()
                page = CopiedPage(files=copies, result=self.result)
                export_manifest.write(self._target.store, self._page_key(number), page)

    def _try(self, number: int) -> Iterator[Copy | str]:
        """Begin to copy a page: the copy of each file in turn, or the reason why it cannot be copied."""
        assert self.copier is not None
        some = self._pages[number]
        found: list[Copy | str | None] = [None] * len(some)
        if self._trusted:
            for n, (path, size, stamp) in enumerate(some):
                former = self._trusted.get(self._files.key_of(path))
                if former is not None and (former.bytes, former.planned_stamp) == (size, stamp):
                    found[n] = Copy(former, "unchanged", verified=False)
        wanted = [one for one, there in zip(some, found, strict=True) if there is None]
        copies = iter(self.copier.copy(wanted, self._known))
        return (there if there is not None else next(copies) for there in found)

    def _counted(self, planned: PlannedFile, tried: Copy | str) -> Copy | None:
        """Count a file in the result; returns its copy, None if there is none."""
        path, size, _ = planned
        if isinstance(tried, str):
            self.result.fail(path, tried)
            return None
        getattr(self.result, tried.how).add(size)
        if tried.how == "copied":
            self.result.add_transferred(read=size, written=size)
        work = WorkDone(1, size, committed_files=1, committed_bytes=size)
        self.result.work += work
        self._report(work)
        if tried.verified:
            self.result.verified.add(size)
        return tried

    def _left(self, current: set[str]) -> list[CopiedFile]:
        """Files of earlier exports that the version does not have, and that are not removed."""
        former = self._former
        every = [*former.files, *former.left] if former is not None else []
        gone = list({one.path: one for one in every if one.path not in current}.values())
        for one in gone:
            self.result.gone.add(one.bytes)
        self.result.sample = [one.path for one in gone[:SHOWN]]
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
        found = self._target.store.remove_listed([Listed(one.path, one.bytes, one.target_stamp) for one in gone])
        files = {one.path: one for one in gone}
        for key in (*found.removed, *found.missing):
            self.result.removed.add(files[key].bytes)
        for key in found.changed:
            self.result.fail(self._target.store.location_of(key), "it has changed since it was exported")
        for key, why in found.failed.items():
            self.result.fail(self._target.store.location_of(key), why)
        return [files[key] for key in (*found.changed, *found.failed)]

    def _foreseen(self) -> ExportResult:
        """What would be copied, by the manifest of the last export."""
        result, former = ExportResult(), self._former
        known = {one.path: (one.bytes, one.planned_stamp) for one in former.files} if former is not None else {}
        current = set()
        for path, size, stamp in self.job.files:
            key = self._files.key_of(path)
            current.add(key)
            (result.reused if known.get(key) == (size, stamp) else result.copied).add(size)
        every = [*former.files, *former.left] if former is not None else []
        gone = [one for one in every if one.path not in current]
        for one in gone:
            result.gone.add(one.bytes)
        result.sample = [one.path for one in gone[:SHOWN]]
        return result


def _groups(jobs: Sequence[PartitionPlan]) -> Iterator[Sequence[PartitionPlan]]:
    """The jobs in groups. A folder with more than the limits is a group of its own."""
    group: list[PartitionPlan] = []
    for job in jobs:
        more = [*group, job]
        files, size = sum(len(one.files) for one in more), sum(one.bytes for one in more)
        if group and (len(more) > GROUP_FOLDERS or files > PAGE or size > GROUP_BYTES):
            yield group
            more = [job]
        group = more
    yield group


def _each(some: Sequence[FolderExport], step: Callable[[FolderExport], None]) -> list[FolderExport]:
    """Those whose step did not fail."""
    for one in some:
        try:
            step(one)
        except Exception as error:
            one.error = error
    return [one for one in some if one.error is None]
