"""One job of an index build: writes the segments of a partition's files, and a journal of them, into its stage.

A segment has the postings or summaries of consecutive files. Small files share a segment, because creating a file takes
longer than writing a few thousand rows; a large file may have several segments. The journal gets a line, which is a
file of its own, when a segment is closed, and the checkpoint has the valid length of the journal in bytes. A further
attempt copies the segments of the checkpoint into its own stage, so that the cleanup of the earlier attempt cannot
remove them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.frozen import frozen
from distop.storage import deletion
from distop.storage.opened_stores import store_of
from distop.storage.store_check import publishing_store
from distop.storage.store_errors import ObjectExists, StoreError, StoreUnavailable, unavailable
from distop.tables.reading import store_refusals
from distop.tables.reading.file_facts import Unreadable
from distop_behaviors.index import file_summaries, postings
from distop_behaviors.index.index_argument import BuildResult
from distop_behaviors.index.key_columns import open_file, pieces
from distop_behaviors.index.key_values import Unindexable
from distop_behaviors.index.table_files import escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.behavior import Progress
    from distop.storage.deletion import Place
    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import PlannedFile
    from distop_behaviors.index.index_argument import BuildArgument

log = logging.getLogger("distop.index")

SEGMENT_ROWS = 1 << 20
"""Rows after which a segment is closed, at the end of a file."""
SEGMENT_FILES = 256
"""Files after which a segment is closed: at most this many are indexed again after a crash."""
JOURNAL = "journal"
"""The folder in a stage with a file for each line of the journal."""
SEGMENT_BYTES = 1 << 31
"""Maximum bytes of a segment."""
_AT_ONCE = 8
"""Lines of a journal that are read at the same time."""
_SEGMENT = re.compile(r"\d{6,}\.parquet")
_LINE = re.compile(rf"{JOURNAL}/(\d{{6,}})\.json")
_ATTEMPT = re.compile(r"\d+-[^/]+")
"""The name of an attempt's stage, in the folder of its job."""


@frozen
class FileEntry:
    """A processed file of the plan.

    ``number``: its index in the job's list of files. ``why``: the reason if it is not indexed. Otherwise ``nulls`` is
    the number of rows with a NULL in their key, and ``schema`` the index of its schema in the line's schemas.
    """

    number: int
    file: PlannedFile
    rows: int = 0
    families: Sequence[str | None] = ()
    nulls: int = 0
    schema: int = 0
    why: str = ""


@frozen
class Header:
    """The first line of the journal: the argument of the build, and the ids of its columns (BuildResult).

    The operation's outcome and argument in etcd have them too, but these may have been changed since.
    """

    argument: Mapping[str, Any]
    ids: Mapping[str, int | str] | None

    def to_json(self) -> str:
        ids = None if self.ids is None else dict(self.ids)
        return json.dumps({"argument": self.argument, "ids": ids}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Header:
        data = json.loads(text)
        return cls(data["argument"], data["ids"])

    def check(self, argument: BuildArgument, stage: Place) -> None:
        """Raises InvalidArgument if the journal of ``stage`` was written for another argument."""
        if self.argument != argument.model_dump(mode="json"):
            raise InvalidArgument(
                f"{stage.location} was written for other columns or settings than the operation's argument has: the "
                "argument was changed after planning; start a new operation"
            )


@frozen
class Line:
    """A line of the journal: the files that are complete with it, and its segment, if it has one."""

    files: Sequence[FileEntry]
    schemas: Sequence[Sequence[tuple[str, Any]]]
    segment: str = ""
    """The name of the segment in the stage, or ""."""
    digest: str = ""
    rows: int = 0
    sample: Sequence[int] = ()

    def to_json(self) -> str:
        files = [[f.number, f.file, f.rows, f.families, f.nulls, f.schema, f.why] for f in self.files]
        data = [files, self.schemas, self.segment, self.digest, self.rows, list(self.sample)]
        return json.dumps(data, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Line:
        files, schemas, *rest = json.loads(text)
        if rest[0] and not _SEGMENT.fullmatch(rest[0]):
            raise UnsafePath(f"{rest[0]!r} is not the name of a segment")
        return cls([FileEntry(number, tuple(file), *other) for number, file, *other in files], schemas, *rest)


@frozen
class _SavedWork:
    """The lines of the journal of an attempt up to its checkpoint, in groups (:func:`line_groups`)."""

    stage: Place
    groups: Sequence[Sequence[Line]]


class SegmentWriter:
    """Writes the segments of some files.

    ``check`` is called between files, and raises if the job must stop. ``reachable`` raises if this node sees nothing
    of the table, so that a missing file proves nothing.
    """

    def __init__(
        self,
        argument: BuildArgument,
        files: Sequence[PlannedFile],
        stage: Place,
        reader: Reader,
        *,
        ids: Mapping[str, int | str] | None = None,
        check: Callable[[], None] = lambda: None,
        reachable: Callable[[], None] = lambda: None,
    ) -> None:
        self._argument = argument
        self._files = files
        self._place = stage
        self._store = publishing_store(stage)
        self._reader = reader
        self._ids = ids
        self._check = check
        self._reachable = reachable
        self._writer = (
            postings.Postings()
            if argument.kind == "posting"
            else file_summaries.Summaries(argument.columns, argument.distinct, argument.bloom)
        )
        self._done: list[FileEntry] = []
        self._open_rows = 0
        self._nothing: tuple[str | None, ...] = (None,) * len(argument.columns)
        self._families: tuple[str | None, ...] = self._nothing
        self._schemas: list[tuple[tuple[str, Any], ...]] = []
        self._probed = False
        """Whether a file was indexed, or the causes of the first refusals were compared."""
        self._refusals: list[str | None] = []
        """The causes for which the store has refused the first files."""
        self._bytes = self._lines = 0
        self._digest = hashlib.blake2b(digest_size=16)
        """The digest of the journal."""
        self._totals = [0, 0]
        """The numbers of indexed files and of their rows."""

    def run(self, progress: Progress) -> BuildResult:
        """Index the files that no earlier attempt has indexed.

        Raises OSError if the stage cannot be written.
        """
        former = self._saved_work(progress.load())
        own = former is not None and former.stage == self._place
        if not own:
            # An earlier process may have run the same attempt.
            self._store.delete_folder(JOURNAL)
        self._append(0, Header(self._argument.model_dump(mode="json"), self._ids).to_json(), written=own)
        return self._index_files(progress, 0 if former is None else self._resume(former))

    def _index_files(self, progress: Progress, after: int) -> BuildResult:
        """Index the files from the index ``after`` on."""
        if after:
            # The segments are in this stage, so an earlier stage is no longer needed.
            progress.save({"stage": self._place.name, "bytes": self._bytes}, force=True)
        for number in range(after, len(self._files)):
            self._check()
            self._index_file(number)
            if self._open_rows >= SEGMENT_ROWS or len(self._done) >= SEGMENT_FILES:
                self._close()
                progress.save({"stage": self._place.name, "bytes": self._bytes})
        if self._done:
            self._close()
        return BuildResult(
            bytes=self._bytes,
            digest=self._digest.hexdigest(),
            files=self._totals[0],
            rows=self._totals[1],
            ids=None if self._ids is None else dict(self._ids),
        )

    def _index_file(self, number: int) -> None:
        """Index a file, or record why it is left out. Raises TableUnavailable, StoreError and OSError."""
        if escaped(self._files[number][0]) != self._files[number][0]:
            self._done.append(FileEntry(number, self._files[number], why="its path is not UTF-8"))
            return
        try:
            file = self._reader.on_disk(self._files[number])
            source = open_file(file, self._argument.columns, self._ids, self._reader)
            if not compatible(source.families, self._families):
                self._close()
            nulls = 0
            if isinstance(self._writer, postings.Postings):
                nulls = self._writer.add(number, source, pieces(source), self._flush)
            else:
                self._writer.add(number, source, pieces(source))
            self._reader.check_same(file)
        except (Unreadable, Unindexable, FileNotFoundError) as e:
            if not isinstance(e, Unindexable):
                self._check_store(e)
                self._reachable()
            self._done.append(FileEntry(number, self._files[number], why=str(e)))
            return
        self._probed = True
        self._families = merge_families(self._families, source.families)
        columns = tuple(source.columns.items())
        if columns not in self._schemas:
            self._schemas.append(columns)
        place = self._schemas.index(columns)
        self._done.append(FileEntry(number, self._files[number], source.rows, source.families, nulls, place))
        self._open_rows += source.rows

    def _check_store(self, error: Exception) -> None:
        """Raises TableUnavailable if the store cannot answer now, or refuses the first files for one cause.

        Such an error is not of the file, which must not be left out of the index. A single refused file is left out.
        """
        cause = error.__cause__
        if isinstance(cause, StoreUnavailable):
            raise unavailable(str(error), cause) from error
        if self._probed:
            return
        refusal = store_refusals.cause_of_python_error(cause) if isinstance(cause, StoreError) else None
        self._refusals.append(refusal)
        if len(self._refusals) < min(store_refusals.PROBED, len(self._files)):
            return
        self._probed = True
        if refusal is not None and len(self._refusals) > 1 and set(self._refusals) == {refusal}:
            raise store_refusals.error_of_cause(refusal, f"cannot index any file: {refusal} ({error})") from error

    def _flush(self) -> None:
        """Close a segment within a file. The file is complete with a later segment."""
        self._write(Line([], [], *self._segment()))

    def _close(self) -> None:
        line = Line(self._done, self._schemas, *self._segment())
        self._write(line)
        self._count(line)
        self._done, self._schemas, self._open_rows = [], [], 0
        self._families = self._nothing

    def _segment(self) -> tuple[str, str, int, list[int]]:
        if not self._writer.rows:
            return "", "", 0, []
        table = self._writer.table()
        sample: list[int] = []
        file = BytesIO()
        if isinstance(self._writer, postings.Postings):
            postings.write(table, file, 1)
            sample = postings.sample_of(table)
        else:
            file_summaries.write(table, file)
        name, data = f"{self._lines:06}.parquet", file.getvalue()
        self._new(name, data)
        return name, _digest(data), table.num_rows, sample

    def _new(self, key: str, data: bytes) -> None:
        """Write a new file of the stage. It replaces one of an earlier process that has run this attempt."""

        try:
            self._store.put_large(key, [data])
        except ObjectExists:
            self._store.delete_many([key])
            self._store.put_large(key, [data])

    def _write(self, line: Line, *, written: bool = False) -> None:
        self._lines += 1
        self._append(self._lines, line.to_json(), written=written)

    def _append(self, number: int, line: str, *, written: bool = False) -> None:
        """Append a line to the journal. ``written``: this stage has it already."""
        text = line.encode()
        if not written:
            self._new(f"{JOURNAL}/{number:06}.json", text)
        self._digest.update(text)
        self._bytes += len(text)

    def _count(self, line: Line) -> None:
        self._totals[0] += sum(1 for entry in line.files if not entry.why)
        self._totals[1] += sum(entry.rows for entry in line.files)

    def _saved_work(self, checkpoint: Any) -> _SavedWork | None:
        """The work of an earlier attempt, or of this one before it was interrupted; None: it cannot be used.

        Raises InvalidArgument if it was done for another argument, StoreUnavailable.
        """
        if not checkpoint:
            return None
        try:
            former = self._former(checkpoint["stage"])
            deletion.check_own(former)
            header, found = journal_of(former, checkpoint["bytes"])
            header.check(self._argument, former)
            if header.ids != self._ids:
                raise OSError(f"the columns of the table were replaced since {former.location} was written")
        except StoreUnavailable:
            raise  # it says nothing about the checkpoint
        except (OSError, UnsafePath, LookupError, TypeError, ValueError) as e:
            log.warning("Cannot use the checkpoint; indexing its files again: %s", e)
            return None
        return _SavedWork(former, list(line_groups(found)))

    def _resume(self, former: _SavedWork) -> int:
        """Take over the segments of saved work; returns the index of the first file that is not indexed yet.

        A missing segment and all later ones are written again. Raises StoreUnavailable.
        """
        after, own = 0, former.stage == self._place
        try:
            for lines in former.groups:
                ours = [
                    replace(line, segment=self._take_over(former.stage, line.segment, line.digest, self._lines + n))
                    for n, line in enumerate(lines)
                ]
                for line in ours:
                    self._write(line, written=own)
                    self._count(line)
                after = lines[-1].files[-1].number + 1
        except StoreUnavailable:
            raise
        except (OSError, UnsafePath, LookupError, TypeError, ValueError) as e:
            log.warning("Cannot use the rest of the checkpoint; indexing its files again: %s", e)
        return after

    def _former(self, name: str) -> Place:
        """The stage of an attempt of this job. Raises UnsafePath for a wrong name."""
        if not _ATTEMPT.fullmatch(name):
            raise UnsafePath(f"{name!r} is not the name of an attempt")
        return self._place.parent.below(name)

    def _take_over(self, former: Place, name: str, digest: str, number: int) -> str:
        """Copy a segment of an earlier attempt into this stage; returns its new name.

        Raises UnsafePath if it is not a file of that stage, OSError if it is missing or does not have the digest.
        """
        if not name:
            return ""
        store = store_of(former)
        if former == self._place:
            store.head(name)
            return name
        data = store.get(name, limit=SEGMENT_BYTES).data
        if _digest(data) != digest:
            raise OSError(f"the segment {store.location_of(name)} is damaged")
        self._new(f"{number:06}.parquet", data)
        return f"{number:06}.parquet"


def line_groups(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """The lines in groups: the segments within a file belong to the line that completes the file."""
    group: list[Line] = []
    for line in lines:
        group.append(line)
        if line.files:
            yield group
            group = []


def compatible(some: Sequence[str | None], others: Sequence[str | None]) -> bool:
    """Whether one index can have files of both families. A missing column (None) fits any family."""
    return all(a is None or b is None or a == b for a, b in zip(some, others, strict=True))


def merge_families(some: Sequence[str | None], others: Sequence[str | None]) -> tuple[str | None, ...]:
    """The families of both files, which must agree."""
    return tuple(a or b for a, b in zip(some, others, strict=True))


def journal_of(stage: Place, size: int, digest: str = "") -> tuple[Header, list[Line]]:
    """The header and the lines in the first ``size`` bytes of a stage's journal.

    Raises OSError if it is gone, shorter, or does not have the digest, UnsafePath if it is not a file of that stage.
    """
    store, journal = store_of(stage), stage.below(JOURNAL).location
    found = {int(match[1]): one for one in store.list(JOURNAL) if (match := _LINE.fullmatch(one.key))}
    wanted, left = [], size
    for number in sorted(found):
        if left > 0:
            wanted.append(found[number])
            left -= found[number].size
    if left:
        raise OSError(f"the journal {journal} is damaged")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        data = b"".join(pool.map(lambda one: store.get(one.key, limit=one.size).data, wanted))
    if len(data) != size or (digest and _digest(data) != digest):
        raise OSError(f"the journal {journal} is damaged")
    header, *lines = data.splitlines() or [b""]
    try:
        first = Header.from_json(header)
    except (ValueError, LookupError, TypeError) as error:
        raise OSError(f"the journal {journal} is damaged: {error}") from error
    return first, [Line.from_json(line) for line in lines]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
