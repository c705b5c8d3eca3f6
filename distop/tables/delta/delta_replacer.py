"""Replaces data files of a Delta table: ``remove`` and ``add`` actions that change no data, in one commit.

Rows that deletion vectors delete are left out of the new files. The commit compares each removed file with its deletion
vector, and the schema: so rows that another writer has deleted meanwhile never come back.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from distop.errors import FatalError, InvalidArgument, UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean, plural
from distop.runtime.java import active
from distop.runtime.lru_cache import LruCache
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.files import for_arrow
from distop.storage.location import root_of
from distop.storage.opened_stores import store_of
from distop.storage.places import make_stage
from distop.tables.commits import Candidate, FileReplacer, GroupStatus, Marks, Replacement, RowsDiffer, StagedFileLost
from distop.tables.delta import delta_columns, delta_rows, metadata_commit
from distop.tables.delta.delta_log import AddedFile, commit, file_key, snapshot_of
from distop.tables.delta.delta_plan import partition_name
from distop.tables.delta.delta_reader import DeltaReader
from distop.tables.delta.log_files import LogFiles
from distop.tables.delta.log_publisher import LogPublisher
from distop.tables.delta.table_paths import parse_source
from distop.tables.delta.written_statistics import written_file
from distop.tables.reading import arrow_copy, footer_facts, spark_copy, staged_copy
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import Gone, Unreadable, problem
from distop.tables.reading.file_facts import quote as quoted
from distop.tables.reading.parquet_footers import size_and_stamp
from distop.tables.reading.spark_paths import spark_path
from distop.tables.staged_files import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import Column

    from distop.protocol.plan import PartitionPlan, Planned
    from distop.protocol.records import TableRecord
    from distop.tables.commits import Head, Layout, ReplacementContext
    from distop.tables.delta.delta_log import DeltaSnapshot
    from distop.tables.delta.delta_schema import DeltaSchema
    from distop.tables.staged_files import StagedFiles

_OPERATION = "distop compact"
"""The name of the operation in the table's history."""
_REFUSED = {
    "rowTracking": "each file needs row ids, which a rewrite would have to keep",
    "clustering": "a rewrite would lose the clustering",
}
"""Writer features of tables whose files are not replaced, with the reasons."""
_COMMITS = 10_000
_SAFE = "/=-_.~"
_UNSAFE = (
    "the files of the table are not replaced, because others could change the new ones",
    "let only the executors' user and root change or replace the table's folder",
)


@frozen
class _Done:
    """A group in a commit of an operation. ``digest``: of its new files; ``removed``: all files that it removes."""

    digest: str
    version: str
    removed: frozenset[tuple[str, str]]


_commits: LruCache[dict[int, _Done]] = LruCache(_COMMITS)
"""The groups that commits have replaced, by table, version and operation."""


class DeltaReplacer(FileReplacer):
    """Replaces files of a Delta table in a folder."""

    def __init__(self, table: TableRecord, ctx: ReplacementContext) -> None:
        self._table = table
        self._ctx = ctx
        self._root = root_of(table.location)
        self._publisher = LogPublisher(table, ctx)

    # ------------------------------------------------------------------ planning

    def check(self, planned: Planned, layout: Layout) -> None:
        self._publisher.check_folders(rewritten=True)
        deletion.check_own(Place(self._root, FOLDER), _UNSAFE, missing=True)
        snapshot = snapshot_of(planned.partitions[0].source, self._ctx.check_cancelled)
        self._check_features(snapshot)
        schema = snapshot.schema
        for name, kind in schema.columns.items():
            if why := problem(kind):
                raise InvalidArgument(f"the files of the Delta table {self._root!r} are not replaced: {name!r}: {why}")
        for name in layout.sort_by:
            if name not in schema.columns:
                raise InvalidArgument(f"sort_by names {name!r}{did_you_mean(name, schema.columns)}")

    def _check_features(self, snapshot: DeltaSnapshot) -> None:
        """Raises InvalidArgument if the table's writer features do not allow to replace its files."""
        metadata_commit.check_writable(snapshot, advice="use OPTIMIZE instead")
        features = snapshot.protocol.get("writerFeatures") or ()
        if found := next((name for name in _REFUSED if name in features), None):
            raise InvalidArgument(
                f"the files of the Delta table {self._root!r} are not replaced, because it has the feature {found}: "
                f"{_REFUSED[found]}; use OPTIMIZE instead"
            )

    def partition_columns(self, planned: Planned) -> Mapping[str, str]:
        schema = snapshot_of(planned.partitions[0].source, self._ctx.check_cancelled).schema
        return {name: str(schema.columns[name]) for name in schema.partition_columns}

    def candidates(self, planned: Planned) -> Iterator[Candidate]:
        snapshot = snapshot_of(planned.partitions[0].source, self._ctx.check_cancelled)
        schema = snapshot.schema
        for partition in planned.partitions:
            for file in partition.files:
                added = snapshot.files[file[0]]
                name = partition_name(schema, added.values) if schema.partition_columns else ""
                # By Delta's rules, an empty text is NULL.
                values = {one: added.values.get(schema.physical[one]) or None for one in schema.partition_columns}
                vector = added.vector
                yield Candidate(file, name, int(vector is not None), vector.rows if vector is not None else 0, values)

    # ------------------------------------------------------------------ writing

    def rewrite(self, plan: PartitionPlan, layout: Layout, stage: StagedFiles) -> Replacement:
        snapshot = snapshot_of(plan.source, self._ctx.check_cancelled)
        added = [_of(snapshot, path, size) for path, size, _ in plan.files]
        values = _common_values(added)
        rows, deleted = self._expected(plan)
        deletion.check_unlinked(stage.data)
        # All readers of the table must be able to read its data files.
        make_stage(stage.data, 0o755)
        deletion.check_own(stage.data, _UNSAFE)
        self._ctx.status(f"rewriting {plural(len(added), 'file')}")
        try:
            names = self._copied(snapshot, added, layout, stage)
        except SparkOnly:
            names = self._written_by_spark(snapshot, added, layout, stage, rows)
        actions, sizes, written = [], [], 0
        for name in names:
            path = f"{stage.data.location}/{name}"
            count, statistics = written_file(path, snapshot.schema)
            if not count:
                stage.remove([name])
                continue
            written += count
            size = int(size_and_stamp(path)[0])
            sizes.append(size)
            relative = path.removeprefix(f"{self._root}/")
            actions.append(
                {
                    "path": quote(relative, safe=_SAFE, errors="surrogateescape"),
                    "partitionValues": values,
                    "size": size,
                    "modificationTime": int(time.time() * 1000),
                    "dataChange": False,
                    "stats": statistics,
                }
            )
        if written != rows:
            raise RowsDiffer(f"{plural(written, 'row')} were written, but the log has {rows} in these files")
        return Replacement(
            plan.partition,
            len(added),
            sum(file.size for file in added),
            written,
            deleted,
            len(actions),
            sum(sizes),
            tuple(sizes),
            {
                "table": snapshot.table_id,
                "read": snapshot.version,
                "schema": _schema_digest(snapshot),
                "removed": [list(file.key) for file in added],
                "added": actions,
            },
            stage,
        )

    def _expected(self, plan: PartitionPlan) -> tuple[int, int]:
        """The number of rows that are not deleted in the planned files, and of deleted ones."""
        reader = DeltaReader(self._table, [plan], plan.source)
        rows = deleted = 0
        for one in reader.facts(plan.files, frozenset(), self._ctx.check_cancelled):
            if isinstance(one, Unreadable):
                raise one
            if one.rows is None or one.contradiction:
                raise Unreadable(one.contradiction or f"the number of rows of {one.path} is unknown")
            rows += one.rows - (one.deleted or 0)
            deleted += one.deleted or 0
        return rows, deleted

    def _copied(
        self, snapshot: DeltaSnapshot, added: Sequence[AddedFile], layout: Layout, stage: StagedFiles
    ) -> list[str]:
        """Copy the files with Arrow; returns the names of the new ones. Raises SparkOnly, RowsDiffer, and OSError."""
        if layout.sort_by or any(file.vector is not None for file in added):
            raise SparkOnly("rows are sorted or deleted")
        paths = [file.path for file in added]
        own = snapshot.schema
        kinds = {own.physical[name]: kind for name, kind in own.columns.items() if name not in own.partition_columns}
        names = [_names_in(path, own) for path in paths]
        schema = arrow_copy.common_schema(paths, kinds, names)
        codec = layout.codec or arrow_copy.codec_of(paths[0])
        size = sum(file.size for file in added)
        return staged_copy.copied(paths, schema, stage, layout.outputs, codec, self._ctx, size=size)

    def _written_by_spark(
        self, snapshot: DeltaSnapshot, added: Sequence[AddedFile], layout: Layout, stage: StagedFiles, rows: int
    ) -> list[str]:
        """Write the files with Spark; returns the names of the new ones. Raises RowsDiffer, and Spark's errors.

        ``rows``: the number of rows that are not deleted.
        """
        from pyspark.sql import functions as F

        for file in added:
            if file.vector is not None:
                file.vector.check()
        session, schema = spark_copy.session_of(self._ctx.spark), snapshot.schema
        own = {name: kind for name, kind in schema.columns.items() if name not in schema.partition_columns}
        total = sum(file.size for file in added)
        spark_copy.read_in_pieces(session, total, layout.outputs)
        frame = delta_rows.read(session, snapshot, added).select(*(F.col(quoted(name)) for name in own))
        frame = spark_copy.arranged(frame, layout.outputs, [name for name in layout.sort_by if name in own])
        frame, observation = spark_copy.observed(frame, own)
        columns = [_as_stored(F.col(quoted(name)), schema, name) for name in own]
        writing = (
            frame.select(*columns)
            .write.mode("append")
            .option("compression", layout.codec or arrow_copy.codec_of(added[0].path))
        )
        most = int(rows * spark_copy.LARGEST * layout.target_bytes / max(total, 1))
        writing = writing.option("maxRecordsPerFile", max(most, 1))
        writing = writing.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        with active(session):
            writing.parquet(spark_path(stage.data.location))
        listing = store_of(stage.data).list_folder()
        with suppress(OSError):
            stage.remove([found.key for found in listing.objects if found.key.endswith(".crc")])
        names = [found.key for found in listing.objects if found.key.endswith(".parquet")]
        copies = [_as_added(f"{stage.data.location}/{name}", added[0]) for name in names]
        wanted = spark_copy.seen(observation)
        if copies:
            back = delta_rows.read(session, snapshot, copies).select(*(F.col(quoted(name)) for name in own))
            found_rows = spark_copy.checksum(back, own)
            if found_rows != wanted:
                raise RowsDiffer(
                    f"the checksum of the new files is {found_rows}, but the rows that were read have {wanted}"
                )
        return names

    # ------------------------------------------------------------------ committing

    def load(self) -> Head:
        return self._publisher.load()

    def statuses(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[GroupStatus]:
        found = []
        for one in replacements:
            detail = one.detail
            keys = [(str(path), str(vector)) for path, vector in detail["removed"]]
            same = detail["table"] == head.base.table_id and detail["schema"] == _schema_digest(head.base)
            found.append(self._status(head.base, keys, int(detail["read"]), one.group, one.digest, same=same))
        return found

    def group_statuses(self, head: Head, plans: Sequence[PartitionPlan]) -> Sequence[GroupStatus]:
        found = []
        for plan in plans:
            read = parse_source(plan.source)[1]
            # The planned version may be cleaned up, but then the files' paths still show whether they are there.
            try:
                snapshot = snapshot_of(plan.source, self._ctx.check_cancelled)
                keys = [_of(snapshot, path, size).key for path, size, _ in plan.files]
                same = snapshot.table_id == head.base.table_id and _schema_digest(snapshot) == _schema_digest(head.base)
            except Gone:
                now = head.base.files
                keys = [now[path].key if path in now else (path, "") for path, _, _ in plan.files]
                same = True
            found.append(self._status(head.base, keys, read, plan.partition, "", same=same))
        return found

    def _status(
        self,
        snapshot: DeltaSnapshot,
        keys: Sequence[tuple[str, str]],
        read: int,
        group: int,
        digest: str,
        *,
        same: bool,
    ) -> GroupStatus:
        """``digest``: of the new files, "" for a group of a plan."""
        since, complete = self._since(snapshot, read)
        done = since.get(group)
        if done is not None:
            if done.removed & _identities(snapshot):
                return GroupStatus.ROLLED_BACK
            return GroupStatus.COMMITTED if digest in ("", done.digest) else GroupStatus.REPLACED
        live = {file.key for file in snapshot.files.values()}
        if live.issuperset(keys):
            if not same:
                return GroupStatus.EVOLVED
            # A commit that the log no longer has may have had these new files, and VACUUM may delete them.
            return GroupStatus.PENDING if complete or not digest else GroupStatus.DIVERGED
        paths = {path for path, _ in live}
        return GroupStatus.DELETED if paths.issuperset(path for path, _ in keys) else GroupStatus.REMOVED

    def committed_versions(self, head: Head, plan: PartitionPlan) -> Mapping[int, str]:
        since, _ = self._since(head.base, parse_source(plan.source)[1])
        live = _identities(head.base)
        return {group: done.version for group, done in since.items() if not done.removed & live}

    def _since(self, snapshot: DeltaSnapshot, read: int) -> tuple[dict[int, _Done], bool]:
        """The groups that this operation's commits after a version have replaced.

        False: the log no longer has all commits after that version; then the files tell whether they were replaced.
        """
        found: dict[int, _Done] = {}
        complete = True
        for number in range(read + 1, snapshot.version + 1):
            marks = self._marks_at(snapshot, number)
            if marks is None:
                complete = False
            else:
                found |= marks
        return found, complete

    def _marks_at(self, snapshot: DeltaSnapshot, number: int) -> dict[int, _Done] | None:
        """The groups that a commit of this operation has replaced; None if the log no longer has the commit."""
        operation = self._ctx.operation

        def read() -> dict[int, _Done]:
            self._ctx.check_cancelled()
            return _done_by(commit(LogFiles(self._root), number), operation, str(number))

        try:
            return _commits.get((self._root, snapshot.table_id, number, operation), read)
        except Gone:
            return None

    def may_have(self, head: Head, replacements: Sequence[Replacement]) -> Sequence[bool]:
        snapshot: DeltaSnapshot = head.base
        found = []
        for one in replacements:
            numbers = range(int(one.detail["read"]) + 1, snapshot.version + 1)
            commits = (self._marks_at(snapshot, number) for number in numbers)
            found.append(
                any(
                    known is None or ((done := known.get(one.group)) is not None and done.digest == one.digest)
                    for known in commits
                )
            )
        return found

    def replan_remaining(self, head: Head, plan: PartitionPlan) -> PartitionPlan | None:
        from dataclasses import replace

        snapshot: DeltaSnapshot = head.base
        files = tuple(file for file in plan.files if file[0] in snapshot.files)
        deletes = any(snapshot.files[path].vector is not None for path, _, _ in files)
        if len(files) < 2 and not deletes:
            return None
        return replace(plan, files=files, bytes=sum(file[1] for file in files), source=snapshot.source)

    def commit(self, head: Head, replacements: Sequence[Replacement], marks: Marks) -> str:
        snapshot: DeltaSnapshot = head.base
        self._check_features(snapshot)  # the table may have got one since the files were planned
        now = int(time.time() * 1000)
        by_key = {file.key: file for file in snapshot.files.values()}
        actions: list[dict[str, Any]] = []
        for one in replacements:
            for path, vector in one.detail["removed"]:
                file = by_key[str(path), str(vector)]
                actions.append({"remove": metadata_commit.remove_action(file, now, data_change=False)})
        for one in replacements:
            for add in one.detail["added"]:
                self._check_staged(add, one)
                actions.append({"add": add})
        info = self._publisher.info(snapshot, _OPERATION, marks.texts(replacements))
        info["operationMetrics"] = {
            "numRemovedFiles": str(sum(one.files for one in replacements)),
            "numRemovedBytes": str(sum(one.bytes for one in replacements)),
            "numAddedFiles": str(sum(one.added_files for one in replacements)),
            "numAddedBytes": str(sum(one.added_bytes for one in replacements)),
        }
        done = {
            "appId": f"distop/{self._ctx.operation}/{min(one.group for one in replacements)}",
            "version": 1,
            "lastUpdated": now,
        }
        self._publisher.commit(snapshot, metadata_commit.actions_text(info, [{"txn": done}, *actions]))
        return str(snapshot.version + 1)

    def _check_staged(self, add: Mapping[str, Any], replacement: Replacement) -> None:
        """Raises UnsafePath if a new file is not in its stage, StagedFileLost if it is missing or has another size."""
        stage = replacement.stage
        path = f"{self._root}/{unquote(str(add['path']), errors='surrogateescape')}"
        folder, _, name = path.rpartition("/")
        if folder != stage.data.location or name in ("", ".", ".."):
            raise UnsafePath(f"the record of a stage has the file {path}, which is not in {stage.data.location}")
        try:
            if size_and_stamp(path)[0] == add["size"]:
                return
        except FileNotFoundError:
            pass
        raise StagedFileLost(replacement.group, f"the new file {path} is missing or was changed before its commit")


def _of(snapshot: DeltaSnapshot, path: str, size: int) -> AddedFile:
    found = snapshot.files.get(path)
    if found is None or found.size != size:
        raise Unreadable(f"the file {path} is not in version {snapshot.version} of {snapshot.root}")
    return found


def _common_values(added: Sequence[AddedFile]) -> dict[str, str | None]:
    """The partition values of all these files. Raises FatalError if they differ: a group is of one partition."""
    found = {name: value or None for name, value in added[0].values.items()}
    if any({name: value or None for name, value in file.values.items()} != found for file in added):
        raise FatalError(f"the files {added[0].path} and others of one group are of different partitions")
    return found


def _names_in(path: str, schema: DeltaSchema) -> frozenset[str]:
    """The table's columns that a file has, which are named alike.

    Raises SparkOnly if a type or a name differs from the table's, or a missing column may have another value than NULL.
    """
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        metadata = pq.read_metadata(file)
    types = footer_facts.columns_of(metadata.schema)
    found = delta_columns.names_in(schema, metadata.schema.to_arrow_schema())
    names = []
    for column, kind in schema.columns.items():
        if column in schema.partition_columns:
            continue
        mine = found[column]
        if mine is None and schema.mode == "none" and not schema.defaulted(column):
            continue  # NULL
        if mine is None or mine != schema.physical[column] or types.get(mine) != kind or schema.spark_only(column):
            raise SparkOnly(f"the column {column!r} of the file {path} is not stored as in new files")
        names.append(mine)
    return frozenset(names)


def _as_stored(column: Column, schema: DeltaSchema, name: str) -> Column:
    """A column as Spark writes it into files: with the names and ids of column mapping."""
    from pyspark.sql.types import StructField

    if schema.mode == "none":
        return column
    field = StructField.fromJson(schema.stored_field(name))
    if isinstance(schema.columns[name], tuple):
        column = column.cast(field.dataType)  # by position, also inside of structs
    return column.alias(field.name, metadata=field.metadata)


def _as_added(path: str, like: AddedFile) -> AddedFile:
    return AddedFile(path, int(size_and_stamp(path)[0]), 0, like.values, None)


def _schema_digest(snapshot: DeltaSnapshot) -> str:
    """A digest of what determines how rows are written."""
    schema = snapshot.schema
    text = repr((schema.text, list(schema.partition_columns), schema.mode, sorted(snapshot.features)))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _done_by(actions: Iterator[Mapping[str, Any]], operation: str, version: str) -> dict[int, _Done]:
    """The groups that a commit has replaced; none for a commit of another operation."""
    groups: dict[int, str] = {}
    removed = set()
    for action in actions:
        info = action.get("commitInfo")
        parameters = info.get("operationParameters") if isinstance(info, dict) else None
        if isinstance(parameters, dict):
            groups = Marks.groups_in(parameters, operation)
            if not groups:
                return {}
        if isinstance(gone := action.get("remove"), dict):
            removed.add(file_key(gone))
    files = frozenset(removed)
    return {group: _Done(digest, version, files) for group, digest in groups.items()}


def _identities(snapshot: DeltaSnapshot) -> frozenset[tuple[str, str]]:
    """The files of a version, each as :func:`file_key` has it."""
    return frozenset((unquote(file.encoded), file.vector_id) for file in snapshot.files.values())
