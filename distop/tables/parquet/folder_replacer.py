"""Replaces data files of a folder of Parquet files, which has no commits: by :mod:`distop.tables.parquet.folder_swap`.

Columns keep how they are stored: a group whose files store a column in different ways, or that Spark would store in
another way, is refused by the column's name. A file without a column that others have gets NULL for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import did_you_mean, plural
from distop.runtime.java import active
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.deletion_scope import OWN, DeletionScope
from distop.storage.files import for_arrow, local_path
from distop.storage.location import root_of
from distop.storage.object_store import LARGEST
from distop.storage.opened_stores import has_store, store_of
from distop.storage.places import make_stage, operation_path
from distop.storage.stage_manifest import flush
from distop.storage.store_errors import unavailable
from distop.tables.commits import Candidate, Conflict, FileReplacer, GroupStatus, Head, Replacement, RowsDiffer
from distop.tables.parquet import parquet_rows
from distop.tables.parquet.folder_swap import (
    BACK,
    FORWARD,
    FolderSwaps,
    SwapEntry,
    SwappedFile,
    SwapState,
    names_of,
    sha256_of,
)
from distop.tables.parquet.parquet_reader import ParquetReader
from distop.tables.reading import arrow_copy, footer_facts, parquet_footers, spark_copy, staged_copy
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import Gone, Unreadable, folded, quote
from distop.tables.reading.spark_paths import spark_path
from distop.tables.staged_files import FOLDER
from distop.tables.table_options import check_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.protocol.plan import PartitionPlan, Planned
    from distop.protocol.records import TableRecord
    from distop.storage.object_store import StoredObject
    from distop.tables.commits import Layout, Marks, ReplacementContext
    from distop.tables.parquet.folder_swap import Finished
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.staged_files import StagedFiles

_UNSAFE = (
    "the files of the table are not replaced, because others could change the new ones",
    "let only the executors' user and root change or replace the table's folder",
)
_SPACE = 8
"""Digits of an identity that are of the namespace."""


class FolderReplacer(FileReplacer):
    """Replaces files of one folder."""

    withdrawable = True

    def __init__(self, table: TableRecord, ctx: ReplacementContext) -> None:
        """Raises InvalidArgument for a location without a store, and UnsafePath for a root."""
        self._table = table
        self._ctx = ctx
        self._root = root_of(table.location)
        if not has_store(self._root):
            raise InvalidArgument(
                f"the files of the table {table.name!r} are not replaced, because {self._root} is neither on a disk "
                "nor in an object store, where distop can move files"
            )
        DeletionScope(self._root)
        self._swaps = FolderSwaps(self._root, ctx.check_cancelled)

    @property
    def _identity(self) -> str:
        """Of this operation: digests of its namespace and its name."""
        return _digest(self._ctx.space)[:_SPACE] + _digest(self._ctx.operation)

    # ------------------------------------------------------------------ planning

    def recover(self, *, change: bool) -> None:
        if not change:
            if self._swaps.state().unfinished is not None:
                raise InvalidArgument(
                    f"an interrupted compaction has not finished replacing files of the table {self._table.name!r}: "
                    "start compact without dry_run, which finishes it"
                )
            return
        deletion.check_own(Place(self._root, OWN), _UNSAFE, missing=True)
        self._swaps.settle()
        mine = self._identity
        self._swaps.forget(lambda one: one.identity != mine and one.identity[:_SPACE] == mine[:_SPACE])
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove what other operations of this type have staged. Errors are logged.

        One of them runs at a time, so they have ended, or never run again. A paused process of one that still commits
        finds its files missing, and takes its entry back.
        """
        kind, _, own = operation_path(self._ctx.operation).rpartition("/")
        folder, store = f"{FOLDER}/{self._ctx.space}/{kind}", store_of(Place(self._root, OWN))
        try:
            for number in store.list_folder(folder).folders:
                if number != own:
                    store.delete_folder(f"{folder}/{number}")
        except (OSError, InvalidArgument) as error:
            self._ctx.log.warning(
                "Cannot remove staged files in %s; retrying at the next compact: %s", store.location_of(folder), error
            )

    def check(self, planned: Planned, layout: Layout) -> None:
        deletion.check_own(Place(self._root, OWN), _UNSAFE, missing=True)
        if local_path(self._root) is None and 2 * layout.target_bytes > LARGEST:
            raise InvalidArgument(f"target_bytes must be at most {LARGEST // 2} for a folder in an object store")
        known: dict[str, None] = {}
        for file in _examples(planned):
            known |= dict.fromkeys(_arrow_schema(file[0]).names)
        known |= dict.fromkeys(self.partition_columns(planned))
        for name in layout.sort_by:
            if name not in known:
                raise InvalidArgument(f"sort_by names {name!r}{did_you_mean(name, known)}")

    def partition_columns(self, planned: Planned) -> Mapping[str, str]:
        types = check_options(self._table.options).partition_types
        return ParquetReader(self._table, planned.partitions, types).partition_columns()

    def candidates(self, planned: Planned) -> Iterator[Candidate]:
        for partition in planned.partitions:
            values = {name: None if text is None else str(text) for name, text in (partition.values or {}).items()}
            for file in partition.files:
                yield Candidate(file, partition.name if values else "", values=values)

    # ------------------------------------------------------------------ writing

    def rewrite(self, plan: PartitionPlan, layout: Layout, stage: StagedFiles) -> Replacement:
        folder, names = self._names(plan.files)
        paths = [path for path, _, _ in plan.files]
        old = self._unchanged(plan, folder, names)
        schema = _common_schema(paths)
        rows = sum(arrow_copy.rows_in(path) for path in paths)
        deletion.check_unlinked(stage.data)
        # All readers of the table must be able to read its data files.
        make_stage(stage.data, 0o755)
        deletion.check_own(stage.data, _UNSAFE)
        self._ctx.status(f"rewriting {plural(len(paths), 'file')}")
        try:
            digests = self._copied(plan.files, schema, layout, stage)
        except SparkOnly as why:
            _check_kept(schema, str(why))
            digests = self._written_by_spark(plan.files, schema, layout, stage)
        store, written = store_of(stage.data), 0
        added: list[SwappedFile] = []
        for name, sha256 in digests.items():
            flush(stage.data, name)
            found = store.head(name)
            written += arrow_copy.rows_in(f"{stage.data.location}/{name}")
            added.append(SwappedFile(name, found.size, found.stamp, sha256))
        if written != rows:
            raise RowsDiffer(f"{plural(written, 'row')} were written, but the footers of these files have {rows}")
        if self._unchanged(plan, folder, names) != old:
            raise Gone(f"a file of the group {plan.name} was replaced while it was read")
        sizes = tuple(one.size for one in added)
        return Replacement(
            plan.partition,
            len(paths),
            plan.bytes,
            rows,
            0,
            len(added),
            sum(sizes),
            sizes,
            {
                "folder": folder,
                "removed": [list(one) for one in old],
                "added": [list(one) for one in added],
            },
            stage,
        )

    def _names(self, files: Sequence[PlannedFile]) -> tuple[str, list[str]]:
        """The folder of a group's files below the table's, and their names. Raises UnsafePath if they are elsewhere."""
        scope, folders, names = DeletionScope(self._root), set(), []
        for path, _, _ in files:
            if not path.startswith(f"{self._root}/"):
                raise UnsafePath(f"the file {path} is not in the table's folder {self._root}")
            key = path[len(self._root) + 1 :]
            scope.check(key)
            folder, _, name = key.rpartition("/")
            folders.add(folder)
            names.append(name)
        if len(folders) != 1:
            raise UnsafePath(f"the files of one group are in several folders: {sorted(folders)[:2]}")
        return folders.pop(), names

    def _unchanged(self, plan: PartitionPlan, folder: str, names: Sequence[str]) -> list[SwappedFile]:
        """The files of a group as the store has them. Raises Gone if one is not as planned."""
        before = self._files_in(folder)
        if wrong := self._changed(plan, {name: (one.size, one.stamp) for name, one in before.items()}):
            raise Gone(f"the file {min(wrong)} is gone or has changed since the operation was planned")
        if missing := next((name for name in names if name not in before), None):
            raise Gone(f"the file {missing} is gone since the operation was planned")
        return [SwappedFile(name, before[name].size, before[name].stamp) for name in names]

    def _changed(self, plan: PartitionPlan, found: Mapping[str, tuple[int, int | str]]) -> set[str]:
        """The planned files that are not as planned. ``found``: size and stamp of the files in their folder."""
        if local_path(self._root) is not None:  # the stamps of a plan are times of change
            return set(parquet_footers.changed(plan.files, self._ctx.check_cancelled))
        return {path for path, size, stamp in plan.files if found.get(path.rpartition("/")[2]) != (size, stamp)}

    def _files_in(self, folder: str) -> dict[str, StoredObject]:
        try:
            return self._swaps.files_in(folder)
        except UnsafePath:
            raise
        except OSError as error:
            raise unavailable(f"the folder {folder!r} of {self._root!r} cannot be listed: {error}", error) from error

    def _copied(self, files: Sequence[PlannedFile], schema: Any, layout: Layout, stage: StagedFiles) -> dict[str, str]:
        """Copy the files with Arrow; returns the new ones with SHA-256. Raises SparkOnly, RowsDiffer, and OSError."""
        if layout.sort_by:
            raise SparkOnly("rows are sorted")
        paths, size = [file[0] for file in files], sum(file[1] for file in files)
        names = [frozenset(_arrow_schema(path).names) for path in paths]
        common = arrow_copy.common_schema(paths, dict.fromkeys(schema.names), names)
        found: dict[str, str] = {}
        codec = layout.codec or arrow_copy.codec_of(paths[0])
        staged_copy.copied(
            *(paths, common, stage, layout.outputs, codec, self._ctx),
            size=size,
            written=found.__setitem__,
            empty=True,
        )
        return found

    def _written_by_spark(
        self, files: Sequence[PlannedFile], schema: Any, layout: Layout, stage: StagedFiles
    ) -> dict[str, str]:
        """Write the files with Spark; returns the new ones with SHA-256. Raises RowsDiffer, and Spark's errors."""
        from pyspark.sql import functions as F

        session = spark_copy.session_of(self._ctx.spark)
        kinds = _spark_types([path for path, _, _ in files])

        def read(some: Sequence[PlannedFile]) -> Any:
            frame = parquet_rows.read(session, parquet_rows.RowRequest(some, kinds, {}, self._root))
            return frame.select(*(F.col(quote(name)) for name in schema.names))

        spark_copy.read_in_pieces(session, sum(size for _, size, _ in files), layout.outputs)
        frame = spark_copy.arranged(read(files), layout.outputs, [one for one in layout.sort_by if one in kinds])
        frame, observation = spark_copy.observed(frame, kinds)
        codec = layout.codec or arrow_copy.codec_of(files[0][0])
        writing = frame.write.mode("append").option("compression", codec)
        writing = writing.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        with active(session):
            writing.parquet(spark_path(stage.data.location))
        listing = store_of(stage.data).list_folder()
        stage.remove([found.key for found in listing.objects if found.key.endswith(".crc")])
        new = [found for found in listing.objects if found.key.endswith(".parquet")]
        for one in new:
            written = _arrow_schema(f"{stage.data.location}/{one.key}")
            for field in schema:
                if _shape(written.field(field.name).type) != _shape(field.type):
                    raise RowsDiffer(
                        f"Spark stored {field.name!r} as {written.field(field.name).type}, not {field.type}"
                    )
        found_rows = spark_copy.checksum(
            read([(f"{stage.data.location}/{one.key}", one.size, 0) for one in new]), kinds
        )
        wanted = spark_copy.seen(observation)
        if found_rows != wanted:
            raise RowsDiffer(
                f"the checksum of the new files is {found_rows}, but the rows that were read have {wanted}"
            )
        return {one.key: sha256_of(store_of(stage.data), one.key) for one in new}

    # ------------------------------------------------------------------ replacing

    def load(self) -> Head:
        """The state after an unfinished entry was finished, whoever has made it."""
        try:
            state = self._swaps.settle()
        except InvalidArgument:
            raise
        except OSError as error:
            raise unavailable(f"cannot finish the replacement of files of {self._root!r}: {error}", error) from error
        return Head("", {}, _FolderState(self, state))

    def statuses(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[GroupStatus]:
        return [self._status(head.base, one) for one in replacements]

    def _status(self, state: _FolderState, one: Replacement) -> GroupStatus:
        mine = state.of_group(self._identity, one.group)
        ways = {found.way for found in mine if found.digest == one.digest}
        if FORWARD in ways:
            return GroupStatus.COMMITTED
        if BACK in ways:
            return GroupStatus.SWAP_REVERTED
        found = state.files_in(str(one.detail["folder"]))
        removed = names_of(one.detail["removed"])
        if all(old.name in found and found[old.name] == (old.size, old.stamp) for old in removed):
            return GroupStatus.PENDING
        return GroupStatus.REPLACED if any(done.way == FORWARD for done in mine) else GroupStatus.REMOVED

    def group_statuses(self, head: Head, plans: Sequence[PartitionPlan]) -> Sequence[GroupStatus]:
        state: _FolderState = head.base
        statuses = []
        for plan in plans:
            if not self._changed(plan, state.files_in(self._names(plan.files)[0])):
                statuses.append(GroupStatus.PENDING)
            elif any(one.way == FORWARD for one in state.of_group(self._identity, plan.partition)):
                statuses.append(GroupStatus.COMMITTED)
            else:
                statuses.append(GroupStatus.REMOVED)
        return statuses

    def may_have(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[bool]:
        return [False] * len(replacements)  # new files are part of the table only after they have left the stage

    def committed_versions(self, head: Head, plan: PartitionPlan) -> Mapping[int, str]:
        state: _FolderState = head.base
        return {
            one.group: str(one.number)
            for one in sorted(state.finished)
            if one.way == FORWARD and one.identity == self._identity
        }

    def replan_remaining(self, head: Head, plan: PartitionPlan) -> PartitionPlan | None:
        state: _FolderState = head.base
        wrong = self._changed(plan, state.files_in(self._names(plan.files)[0]))
        files = tuple(file for file in plan.files if file[0] not in wrong)
        if len(files) < min(2, len(plan.files)):
            return None
        return replace(plan, files=files, bytes=sum(file[1] for file in files))

    def commit(self, head: Head, replacements: Sequence[Replacement], marks: Marks) -> str:
        """Replace one group after the other: so readers find few rows twice at a time."""
        state: _FolderState = head.base
        number, back = state.top, 0
        for one in replacements:
            number += 1
            entry = SwapEntry(
                operation=marks.operation,
                identity=self._identity,
                fence=marks.fence,
                group=one.group,
                digest=one.digest,
                folder=str(one.detail["folder"]),
                source=self._source(one.stage),
                removed=names_of(one.detail["removed"]),
                added=names_of(one.detail["added"]),
            )
            back += self._swaps.swap(number, entry) == BACK
        if back:
            raise Conflict(f"{plural(back, 'group')} could not be replaced")
        return str(number)

    def _source(self, stage: StagedFiles) -> str:
        """The folder of a stage's files below the table's folder. Raises UnsafePath if it is elsewhere."""
        if stage.data.anchor != staged_below(self._root):
            raise UnsafePath(f"the staged files {stage.data.location} are not in the folder {staged_below(self._root)}")
        return f"{OWN}/{stage.data.path}"


class _FolderState:
    """The finished entries of a moment, and the folders as they were found later."""

    def __init__(self, replacer: FolderReplacer, state: SwapState) -> None:
        self._replacer = replacer
        self._folders: dict[str, dict[str, tuple[int, int | str]]] = {}
        self.top = state.top
        self.finished = state.finished

    def of_group(self, identity: str, group: int) -> list[Finished]:
        return [one for one in self.finished if (one.identity, one.group) == (identity, group)]

    def files_in(self, folder: str) -> Mapping[str, tuple[int, int | str]]:
        if folder not in self._folders:
            found = self._replacer._files_in(folder)
            self._folders[folder] = {name: (one.size, one.stamp) for name, one in found.items()}
        return self._folders[folder]


def staged_below(root: str) -> str:
    """The folder below which new files of a table are staged: hidden from readers."""
    return f"{root}/{OWN}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def _examples(planned: Planned) -> list[PlannedFile]:
    """The first and the last file of a plan."""
    files = [file for one in (planned.partitions[0], planned.partitions[-1]) for file in (one.files[0], one.files[-1])]
    return list(dict.fromkeys(files))


def _arrow_schema(path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with for_arrow(path) as file:
            return pq.read_metadata(file).schema.to_arrow_schema()
    except (pa.ArrowException, ValueError) as error:
        raise Unreadable(f"the file {path} cannot be read: {error}") from error


def _common_schema(paths: Sequence[str]) -> Any:
    """The columns of all files. Raises Unreadable if they store a column differently, or spell its name differently."""
    import pyarrow as pa

    found: dict[str, tuple[Any, str]] = {}
    for path in paths:
        for field in _arrow_schema(path):
            mine = arrow_copy.plain(field)
            known, first = found.setdefault(folded(field.name), (mine, path))
            if known.name != mine.name:
                raise Unreadable(f"the column {known.name!r} of {first} is called {mine.name!r} in {path}")
            if _shape(known.type) != _shape(mine.type):
                raise Unreadable(
                    f"the column {mine.name!r} is stored as {known.type} in {first}, but as {mine.type} in {path}"
                )
    return pa.schema([field for field, _ in found.values()])


def _spark_types(paths: Sequence[str]) -> dict[str, Any]:
    """Spark's types of the columns of all files, which store them alike. Raises Unreadable."""
    import pyarrow.parquet as pq

    found: dict[str, Any] = {}
    for path in paths:
        with for_arrow(path) as file:
            for name, kind in footer_facts.columns_of(pq.read_metadata(file).schema).items():
                found.setdefault(name, kind)
    return found


def _check_kept(schema: Any, why: str) -> None:
    """Raises Unreadable if Spark would store a column in another way."""
    for field in schema:
        if not _is_kept(field.type):
            raise Unreadable(
                f"the column {field.name!r} is stored as {field.type}, which Spark would store in another way; Spark "
                f"is needed because {why}"
            )


def _shape(kind: Any) -> Any:
    """A type without what does not matter to readers: which parts may be NULL, and names of elements."""
    import pyarrow.types as t

    if t.is_struct(kind):
        return tuple((kind.field(n).name, _shape(kind.field(n).type)) for n in range(kind.num_fields))
    if t.is_map(kind):
        return "map", _shape(kind.key_type), _shape(kind.item_type)
    return ("list", _shape(kind.value_type)) if t.is_list(kind) else str(kind)


def _is_kept(kind: Any) -> bool:
    import pyarrow.types as t

    if t.is_nested(kind):
        if t.is_map(kind):
            return _is_kept(kind.key_type) and _is_kept(kind.item_type)
        plain = t.is_struct(kind) or t.is_list(kind)
        return plain and all(_is_kept(kind.field(n).type) for n in range(kind.num_fields))
    if t.is_timestamp(kind):
        return kind.unit == "us" and kind.tz in (None, "UTC")
    if t.is_floating(kind):
        return not t.is_float16(kind)
    plain = t.is_boolean(kind) or t.is_signed_integer(kind) or t.is_string(kind) or t.is_binary(kind)
    return bool(plain or t.is_date32(kind) or t.is_decimal128(kind))
