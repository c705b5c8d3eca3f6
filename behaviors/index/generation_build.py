"""Merges the segments of an index build into a new generation, after all jobs have ended.

Completion may run twice, even at the same time (by an old and a new coordinator). Each run writes files with unique
names, or with the same content, and only one run publishes (:mod:`distop_behaviors.index.index_folder`).
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from distop.behavior import Progress
from distop.errors import UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.texts import plural
from distop.storage.deletion import check_own
from distop.storage.opened_stores import store_of
from distop.storage.places import make_stage, remove_place_or_log
from distop.storage.store_errors import UnknownWrite
from distop.tables.reading.file_facts import widened
from distop_behaviors.index import file_summaries, postings
from distop_behaviors.index.build_plan import base_of, build_options
from distop_behaviors.index.covered_files import covered_files, file_list, list_schema, unchanged
from distop_behaviors.index.generation import Generation, Named
from distop_behaviors.index.index_argument import SHOWN, BuildReport, BuildResult, NotIndexed
from distop_behaviors.index.index_folder import Folder, Superseded, digest_of, write_parquet
from distop_behaviors.index.segments import SegmentWriter, compatible, journal_of, line_groups, merge_families
from distop_behaviors.index.table_files import current_table, escaped, ids_now, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from distop.behavior import JobContext, Summary, TableRecord
    from distop.storage.deletion import Place
    from distop.storage.object_store import ObjectStore
    from distop_behaviors.index.index_argument import BuildArgument
    from distop_behaviors.index.segments import FileEntry, Line

CATCH_UP_BYTES = 1 << 30
"""Maximum bytes of new files that completion indexes itself. The next refresh indexes more."""
LEVELS = 8
"""Number of small levels of postings at which they are merged."""
DEAD = 0.3
"""Share of postings of removed files at which all levels are merged without them."""


class _Nothing(Progress):
    """No checkpoint, for a job that runs within completion."""

    def load(self) -> Any:
        return None

    def save(self, value: Any, *, force: bool = False) -> bool:
        return False


@frozen
class _Segment:
    """A group of lines of a stage's journal, with the number of each of its files in the generation."""

    stage: Place
    lines: Sequence[Line]
    numbers: Mapping[int, int]

    @property
    def store(self) -> ObjectStore:
        """The store with the segments, which were checked when they were collected."""
        return store_of(self.stage)


class Completion:
    """Creates and publishes a generation from the segments of the jobs."""

    def __init__(self, argument: BuildArgument, record: TableRecord, ctx: JobContext) -> None:
        self._argument = argument
        self._record = record
        self._ctx = ctx
        self._instance = int(ctx.operation.rpartition("/")[2])
        self._table = current_table(record, ctx.check_cancelled, lambda: ctx.spark)
        self._folder = Folder(self._table.root, argument.name, ctx.space)
        self._newest = self._folder.newest()
        self._base = base_of(argument, self._folder, self._table)
        self._ids = ids_now(self._table, argument.columns)
        self._build = ""
        self._next = self._base.next_file if self._base is not None else 0
        self._families: tuple[str | None, ...] = (None,) * len(argument.columns)
        if self._base is not None:
            self._families = self._base.families
        self._entries: dict[int, FileEntry] = {}
        self._segments: list[_Segment] = []
        self._schemas: list[Any] = [self._base.schema] if self._base is not None else []
        self._refused: dict[str, tuple[int, int | str, str]] = {}
        """Files that are not indexed: size, time, and the reason."""

    def run(self, summary: Summary) -> BuildReport:
        """Publish the generation, unless it is already published or nothing is new.

        Raises OSError, after removing its files, and InvalidArgument if a job had another argument. The files stay if
        it is unknown whether the generation was published.
        """
        self._build = _build(summary)
        if self._newest is not None and self._is_own(self._newest):
            return BuildReport.model_validate(self._newest.report)
        scratch = self._folder.scratch(self._instance)
        try:
            self._collect(self._journals(summary))
            self._catch_up(scratch)
            return self._publish()
        except UnknownWrite:
            raise
        except OSError:
            self._folder.sweep(self._instance, own=True)
            raise
        finally:
            remove_place_or_log(scratch, self._ctx.log)
            self._folder.sweep(self._instance)

    def _is_own(self, generation: Generation) -> bool:
        """Whether another attempt of this completion has published the generation."""
        return (generation.operation, generation.build) == (self._ctx.operation, self._build)

    def _journals(self, summary: Summary) -> Iterator[tuple[Place, BuildResult]]:
        """The stage and the result of each successful job."""
        for row in summary.outcomes():
            if not row.success:
                continue
            try:
                result = BuildResult.model_validate(row.result)
            except ValidationError as error:
                self._ctx.log.warning("Indexing partition %s again: its job's result is not valid: %s", row.name, error)
                continue
            if row.stage is None:
                self._ctx.log.warning("Indexing partition %s again: no executor has run its job", row.name)
                continue
            try:
                # The stage's name comes from an outcome, so another user may have created the stage.
                check_own(row.stage)
            except (OSError, UnsafePath) as error:
                self._ctx.log.warning("Indexing partition %s again: its stage is not valid: %s", row.name, error)
                continue
            yield row.stage, result

    def _collect(self, found: Iterable[tuple[Place, BuildResult]]) -> None:
        for stage, result in found:
            self._ctx.check_cancelled()
            try:
                header, lines = journal_of(stage, result.bytes, result.digest)
            except (OSError, UnsafePath) as e:
                self._ctx.log.warning("Indexing the files of a job again: cannot read its journal: %s", e)
                continue
            header.check(self._argument, stage)
            if header.ids != self._ids:
                self._ctx.log.warning("Indexing the files of %s again: the table's columns changed", stage.location)
                continue
            for group in line_groups(lines):
                self._take(stage, group)

    def _take(self, stage: Place, lines: Sequence[Line]) -> None:
        """Number the files of these lines, if all their segments are intact."""
        for line in lines:
            if line.segment and not _whole(stage, line):
                self._ctx.log.warning("Indexing the files of segment %s again: it is damaged or gone", line.segment)
                return
        numbers: dict[int, int] = {}
        for entry in lines[-1].files:
            name = name_of(entry.file[0], self._table.root)
            why = entry.why
            if not why and not compatible(entry.families, self._families):
                why = (
                    f"its columns are {_text(entry.families)}, but the columns of the index are {_text(self._families)}"
                )
            if why:
                self._refused[name] = (entry.file[1], entry.file[2], why)
                continue
            self._families = merge_families(self._families, entry.families)
            numbers[entry.number] = self._next
            self._entries[self._next] = entry
            self._next += 1
        self._schemas += [lines[-1].schemas[n] for n in sorted({e.schema for e in lines[-1].files if not e.why})]
        self._segments.append(_Segment(stage, lines, numbers))

    def _catch_up(self, scratch: Place) -> None:
        """Index files that are new since planning, and files whose segments were lost."""
        known = covered_files(self._folder, self._base)
        known |= {name_of(e.file[0], self._table.root): (e.file[1], e.file[2]) for e in self._entries.values()}
        known |= {name: (size, time_ns) for name, (size, time_ns, _) in self._refused.items()}
        new = [f for name, f in self._table.files.items() if known.get(name) != (f[1], f[2])]
        if not new or self._ids == {} or sum(f[1] for f in new) > CATCH_UP_BYTES:
            return
        self._ctx.log.info("Indexing %s, new since planning or with a lost segment", plural(len(new), "file"))
        make_stage(scratch)
        reader = self._table.reader
        # The files may be of a cached plan whose files were not checked.
        reader.check_allowed(new)
        check, reachable = self._ctx.check_cancelled, self._ctx.check_reachable
        job = SegmentWriter(self._argument, new, scratch, reader, ids=self._ids, check=check, reachable=reachable)
        self._collect([(scratch, job.run(_Nothing()))])

    def _publish(self) -> BuildReport:
        base, folder = self._base, self._folder
        old = file_list(folder, base) if base is not None and base.files is not None else None
        here = {name: (f[1], f[2]) for name, f in self._table.files.items()}
        names = {n: name_of(e.file[0], self._table.root) for n, e in self._entries.items()}
        added = [n for n, e in self._entries.items() if here.get(names[n]) == (e.file[1], e.file[2])]
        again = {names[n] for n in added}
        kept = old
        if old is not None:
            kept = old.filter(unchanged(old, here, again))
        removed = 0 if old is None or kept is None else old.num_rows - kept.num_rows
        if base is not None and not added and not removed:
            return self._report(base.number, kept, 0, 0, list(base.named()))
        table = self._files(kept, added, names)
        runs = self._runs(old, kept, table) if self._argument.kind == "posting" else []
        files = self._name(self._folder.own(f"{self._instance}-files-{uuid.uuid4().hex}.parquet"), table)
        number = self._newest.number + 1 if self._newest is not None else 1
        report = self._report(number, table, len(added), removed, [files, *runs])
        generation = self._generation(number, files, runs, report)
        self._ctx.check_cancelled()
        if not folder.is_whole(generation):
            raise OSError(f"cannot publish the index {self._argument.name!r}: some of its new files are gone")
        try:
            folder.publish(generation)
        except Superseded:
            newest = folder.newest()
            if newest is None or not self._is_own(newest):
                raise
            return BuildReport.model_validate(newest.report)
        return report

    def _generation(self, number: int, files: Named, runs: Sequence[Named], report: BuildReport) -> Generation:
        return Generation(
            number,
            self._ctx.operation,
            self._build,
            kind=self._argument.kind,
            columns=tuple(self._argument.columns),
            ids=self._ids,
            options=build_options(self._argument),
            families=self._families,
            schema=tuple(widened(self._schemas).items()),
            table_version=self._table.version,
            published=time.time(),
            files=files,
            runs=tuple(runs),
            next_file=self._next,
            report=report.model_dump(mode="json"),
        )

    def _name(self, name: str, table: pa.Table) -> Named:
        size, digest = self._folder.add(name, lambda file: write_parquet(table, file, file_summaries.GROUP_ROWS))
        return Named(name, size, digest, table.num_rows)

    def _files(self, kept: pa.Table | None, added: Sequence[int], names: Mapping[int, str]) -> pa.Table:
        import pyarrow as pa

        rows = [
            {
                "file": n,
                "path": names[n],
                "size": self._entries[n].file[1],
                "stamp": json.dumps(self._entries[n].file[2]),
                "rows": self._entries[n].rows,
                "null_keys": self._entries[n].nulls,
            }
            for n in added
        ]
        table = pa.Table.from_pylist(rows, list_schema())
        if self._argument.kind == "skip":
            table = table.drop_columns(["null_keys"])
            for field, column in self._summaries(added):
                table = table.append_column(field, column)
        if kept is None:
            return table
        return pa.concat_tables([file_summaries.fitted(kept, table.schema), table])

    def _summaries(self, added: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """The summary columns of these files, in this order, without the file numbers."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = file_summaries.schema_of(self._argument.columns, self._families)
        parts = [schema.empty_table()]
        for segment in self._segments:
            for line in segment.lines:
                if line.segment:
                    with segment.store.open(line.segment) as opened:
                        part = pq.read_table(opened.file, page_checksum_verification=True)
                    mapped = [segment.numbers.get(n, -1) for n in part.column("file").to_pylist()]
                    part = file_summaries.fitted(part, schema)
                    parts.append(part.set_column(0, schema.field(0), pa.array(mapped, pa.int32())))
        whole = pa.concat_tables(parts)
        found = whole.column("file").to_numpy()
        places = {int(n): i for i, n in enumerate(found)}
        picked = whole.take(np.array([places[n] for n in added], np.int64))
        for field in list(schema)[1:]:
            yield field, picked.column(field.name)

    def _runs(self, old: pa.Table | None, kept: pa.Table | None, table: pa.Table) -> list[Named]:
        """The runs of the generation: unchanged ones, and new ones from merged levels and segments."""
        import numpy as np

        runs = list(self._base.runs) if self._base is not None else []
        again = _levels_to_merge(runs, old, kept)
        live = np.full(self._next, -1, np.int32)
        numbers: Any = table.column("file").to_numpy()
        live[numbers] = numbers
        inputs = [
            postings.Input(
                self._folder.store, self._folder.key_of(run.name), run.digest, run.rows, (run.low, run.high), live
            )
            for run in runs
            if run.level in again
        ]
        for segment in self._segments:
            last = max((e.number for e in segment.lines[-1].files), default=-1)
            mapping = np.full(last + 1, -1, np.int32)
            for number, n in segment.numbers.items():
                mapping[number] = n
            inputs += [
                postings.Input(segment.store, line.segment, line.digest, line.rows, line.sample, mapping)
                for line in segment.lines
                if line.segment and line.rows
            ]
        stay = [run for run in runs if run.level not in again]
        first = max((run.level for run in runs), default=-1) + 1
        for level, group in enumerate(postings.levels_of(inputs), first):
            name = self._folder.own(f"{self._instance}-{level:04}-{_digest(group)}")
            made = postings.merge(group, self._folder, name, self._ctx.check_cancelled)
            stay += [Named(r.name, r.size, r.digest, r.rows, r.low, r.high, level) for r in made]
        return stay

    def _report(
        self, number: int, table: pa.Table | None, added: int, removed: int, named: Sequence[Named]
    ) -> BuildReport:
        import pyarrow.compute as pc

        here = {name: (f[1], f[2]) for name, f in self._table.files.items()}
        known = set(table.column("path").to_pylist()) if table is not None else set()
        open_ = [name for name in here if name not in known]
        reasons = {name: why for name, (_, _, why) in self._refused.items() if name in here}
        return BuildReport(
            name=self._argument.name,
            kind=self._argument.kind,
            columns=self._argument.columns,
            generation=number,
            table_version=self._table.version,
            files=table.num_rows if table is not None else 0,
            rows=(pc.sum(table.column("rows")).as_py() or 0) if table is not None else 0,
            indexed=added,
            removed=removed,
            not_indexed_files=len(open_),
            not_indexed=[
                NotIndexed(file=escaped(name), why=reasons.get(name, "it was added while the index was built"))
                for name in sorted(open_)[:SHOWN]
            ],
            bytes=sum(one.size for one in named),
        )


def _levels_to_merge(runs: Sequence[Named], old: pa.Table | None, kept: pa.Table | None) -> set[int]:
    """The levels to merge: to remove postings of removed files, or to have fewer levels."""
    import pyarrow.compute as pc

    sizes: dict[int, int] = {}
    for run in runs:
        sizes[run.level] = sizes.get(run.level, 0) + run.rows
    if old is not None and kept is not None:
        live = pc.sum(kept.column("rows")).as_py() or 0
        if sum(sizes.values()) > 0 and live < (1 - DEAD) * sum(sizes.values()):
            return set(sizes)
    small = {level for level, rows in sizes.items() if rows < postings.LEVEL_ROWS // 2}
    return small if len(small) >= LEVELS else set()


def _whole(stage: Place, line: Line) -> bool:
    """Whether the line's segment is a file of the stage and has the digest of the journal."""
    try:
        return digest_of(store_of(stage), line.segment) == line.digest
    except (OSError, UnsafePath):
        return False


def _text(families: Sequence[str | None]) -> str:
    return ", ".join(family or "missing" for family in families)


def _digest(inputs: Sequence[postings.Input]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in inputs:
        digest.update(f"{one.digest}\n".encode())
        digest.update(one.mapping.tobytes())
    return digest.hexdigest()


def _build(summary: Summary) -> str:
    """An id of this build: equal for all attempts, and different from builds in other etcds or namespaces."""
    digest = hashlib.blake2b(summary.version.encode(), digest_size=16)
    for row in summary.outcomes():
        if row.success and row.stage is not None and isinstance(row.result, dict):
            digest.update(f"\n{row.stage.path} {row.result.get('digest')}".encode())
    return digest.hexdigest()
