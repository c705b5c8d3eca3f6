"""The reader of a version of a Delta table: facts come from the log and footers, rows from Delta's Spark reader.

Columns are the table's, whatever their names in a file; deleted rows are left out, and files never change.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.texts import did_you_mean
from distop.storage.confinement import TableFiles
from distop.storage.files import local_path
from distop.tables.delta import delta_columns, delta_rows, file_statistics, footer_fallback
from distop.tables.delta.data_files import check_length
from distop.tables.delta.delta_log import snapshot_of
from distop.tables.delta.delta_version import DeltaVersion
from distop.tables.delta.table_paths import parse_source
from distop.tables.reader import FileColumns, Reader
from distop.tables.reading import arrow_rows, parquet_footers, spark_paths
from distop.tables.reading.arrow_types import SparkOnly, widens
from distop.tables.reading.file_facts import FileFacts, Gone, Unreadable, ddl, match, problem
from distop.tables.reading.row_counts import LOG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.protocol.plan import PartitionPlan, Pinned
    from distop.protocol.records import TableRecord
    from distop.tables.delta.delta_log import AddedFile, DeltaSnapshot
    from distop.tables.delta.delta_schema import DeltaField
    from distop.tables.reading.arrow_rows import Blocks
    from distop.tables.reading.file_facts import Path as LeafPath
    from distop.tables.reading.file_facts import PlannedFile, SparkType


class DeltaReader(Reader):
    """Reads a version of a Delta table. ``source``: its commit file, which the plans have."""

    precise_facts_from = "footers"
    counted_by = LOG
    counts_deleted_rows = True
    own_columns = False

    def __init__(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned], source: str) -> None:
        super().__init__(table, plans)
        self._source = source
        self._wanted: Mapping[LeafPath, DeltaField] = {}
        """The fields that :meth:`facts` has read."""

    def _snapshot(self, check: Callable[[], None] = lambda: None) -> DeltaSnapshot:
        return snapshot_of(self._source, check)

    def _known(self) -> DeltaSnapshot:
        """The planned version. Raises InvalidArgument, also if the log no longer has it, and TableUnavailable."""
        try:
            return self._snapshot()
        except Gone as error:
            raise InvalidArgument(str(error)) from error

    # ------------------------------------------------------------------ the table

    def columns(self) -> Mapping[str, SparkType]:
        return self._known().schema.columns

    def identities(self, columns: Sequence[str]) -> Mapping[str, int | str]:
        """The table's id with the columns' ids by column mapping, and their types: another type needs another index.

        Raises Unreadable also for a partition column, which files lack, and for texts with a length.
        """
        snapshot = self._known()
        schema, found = snapshot.schema, dict[str, int | str]()
        for column in columns:
            name = match(column, schema.columns)
            if name is None:
                raise InvalidArgument(f"the table has no column {column!r}{did_you_mean(column, schema.columns)}")
            kind = schema.columns[name]
            if (why := problem(kind)) is not None:
                raise Unreadable(why)
            if name in schema.partition_columns:
                raise Unreadable("it is a partition column, which needs no index: a filter on it skips files")
            if why := schema.spark_only(name):
                raise Unreadable(why)
            number = schema.mapped_id(name)
            found[column] = " ".join(map(str, filter(None, (snapshot.table_id, number, ddl(kind)))))
        return found

    @property
    def version(self) -> DeltaVersion:
        return DeltaVersion(self._known())

    # ------------------------------------------------------------------ facts

    def facts(
        self, files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None], *, again: bool = False
    ) -> list[FileFacts | Unreadable]:
        try:
            snapshot = self._snapshot(check)
        except Unreadable as error:
            return [error] * max(len(files), 1)
        self._wanted = snapshot.schema.fields(wanted)
        if not files:
            return [FileFacts(self._source, 0, snapshot.schema.columns)]
        found: list[FileFacts | Unreadable] = []
        for file in files:
            check()
            found.append(self._facts(snapshot, file))
        # The log need not have statistics.
        uncounted = [n for n, facts in enumerate(found) if isinstance(facts, FileFacts) and facts.rows is None]
        for n, footer in zip(uncounted, self._footers(snapshot, [files[n][0] for n in uncounted], check), strict=True):
            facts = found[n]
            assert isinstance(facts, FileFacts)
            found[n] = self._counted(snapshot, facts, footer)
        return found

    def _facts(self, snapshot: DeltaSnapshot, file: PlannedFile) -> FileFacts | Unreadable:
        try:
            added = self._added(snapshot, file)
            check_length(added.path, added.size, local_only=True)
            return file_statistics.facts_of(added, snapshot.schema, self._wanted)
        except Unreadable as error:
            return error

    def _counted(
        self, snapshot: DeltaSnapshot, facts: FileFacts, footer: FileFacts | Unreadable
    ) -> FileFacts | Unreadable:
        """The facts of a file whose number of rows only its footer has."""
        if isinstance(footer, Unreadable):
            return footer
        vector = snapshot.files[facts.path].vector
        deleted = vector.rows if vector is not None else 0
        if footer.live_rows is None or deleted > footer.live_rows:
            return replace(facts, contradiction=footer.contradiction or "the log deletes more rows than it has")
        wanted = self._wanted
        known = {
            path: (chunk,)
            for path, field in wanted.items()
            if path[0] in snapshot.schema.partition_columns
            and (
                chunk := file_statistics.of_partition(
                    field, snapshot.files[facts.path].values.get(field.physical[0]), footer.live_rows
                )
            )
            is not None
        }
        facts = replace(facts, rows=footer.live_rows, deleted=deleted, chunks=known)
        return footer_fallback.with_footer(facts, footer, snapshot.schema, wanted) or facts

    def _footers(
        self, snapshot: DeltaSnapshot, paths: Sequence[str], check: Callable[[], None]
    ) -> Sequence[FileFacts | Unreadable]:
        return footer_fallback.read_footers(paths, snapshot.schema, self._wanted, check) if paths else ()

    def precise_facts(
        self, files: Sequence[FileFacts], wanted: frozenset[str], check: Callable[[], None]
    ) -> dict[str, FileFacts]:
        snapshot = self._known()
        found: dict[str, FileFacts] = {}
        for facts, footer in zip(files, self._footers(snapshot, [f.path for f in files], check), strict=True):
            if isinstance(footer, Unreadable) or footer.live_rows != facts.rows:
                continue  # the scan reports it
            precise = footer_fallback.with_footer(facts, footer, snapshot.schema, self._wanted)
            if precise is not None:
                found[facts.path] = replace(facts, precise=precise)
        return found

    @staticmethod
    def _added(snapshot: DeltaSnapshot, file: PlannedFile) -> AddedFile:
        added = snapshot.files.get(file[0])
        if added is None or added.size != file[1]:
            raise Unreadable(f"the file {file[0]} is not in version {snapshot.version} of {snapshot.root}")
        return added

    # ------------------------------------------------------------------ rows

    def rows(
        self,
        session: SparkSession,
        files: Sequence[PlannedFile],
        columns: Mapping[str, SparkType] | None = None,
        partition_columns: Mapping[str, str] | None = None,
        *,
        staged: str = "",
    ) -> DataFrame:
        """The rows with all columns of the table: Spark reads only those that a query needs."""
        snapshot, added = self._files_of(files)
        return delta_rows.read(session, snapshot, added)

    def _files_of(self, files: Sequence[PlannedFile]) -> tuple[DeltaSnapshot, list[AddedFile]]:
        """The version and these files of it, whose deletion vectors exist. Raises Unreadable."""
        snapshot = self._snapshot()
        added = [self._added(snapshot, file) for file in files]
        for one in added:
            if one.vector is not None:
                one.vector.check()
        return snapshot, added

    def stage(self, session: SparkSession, files: Sequence[PlannedFile]) -> str:
        """A digest of what Delta's reader gets besides the files: a file keeps its path if rows in it are deleted."""
        snapshot, added = self._files_of(files)
        schema = (snapshot.table_id, snapshot.schema.text, snapshot.schema.mode, sorted(snapshot.features))
        digest = hashlib.blake2b(repr(schema).encode("utf-8", "surrogatepass"), digest_size=16)
        for one in added:
            digest.update(repr((sorted(one.values.items()), one.vector)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def file_column(self, frame: DataFrame) -> Column:
        return frame.metadataColumn("_metadata")["file_path"]

    def position_column(self, frame: DataFrame) -> Column:
        return frame.metadataColumn("_metadata")["row_index"]

    def counting_column(self, frame: DataFrame) -> Column:
        from pyspark.sql import functions as F

        # For _metadata.file_path, Spark would create a struct per row, before the filter.
        return F.input_file_name()

    def planned_path(self, name: str) -> str:
        return spark_paths.plain_path(name)

    # ------------------------------------------------------------------ errors

    def changed(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
        """Empty: Delta never changes files."""
        return {}

    def not_present(
        self, session: SparkSession, files: Sequence[PlannedFile], check: Callable[[], None]
    ) -> dict[str, Unreadable]:
        found: dict[str, Unreadable] = {}
        try:
            snapshot = self._snapshot(check)
        except Unreadable as error:
            return {file[0]: error for file in files}
        for file in files:
            check()
            try:
                added = self._added(snapshot, file)
                check_length(added.path, added.size)
                if added.vector is not None:
                    added.vector.check()
            except Unreadable as error:
                found[file[0]] = error
        return found

    def broken_file(self, error: Exception, files: Sequence[PlannedFile]) -> str | None:
        return spark_paths.broken_file(error, files)

    # ------------------------------------------------------------------ without Spark

    def on_disk(self, file: PlannedFile) -> PlannedFile:
        """The file with its local path, size and stamp: plans have no times, and may have URLs."""
        path = str(local_path(file[0]) or file[0])
        return path, *parquet_footers.size_and_stamp(path)

    def check_same(self, file: PlannedFile) -> None:
        parquet_footers.check_unchanged(*file)

    def open_file(
        self, file: PlannedFile, columns: Sequence[str], identities: Mapping[str, int | str] | None
    ) -> FileColumns:
        """Open a file.

        Raises SparkOnly for a column that has another type in the file, or that the file lacks but may have a default.
        """
        schema = self._known().schema
        facts = arrow_rows.facts_of(file)
        known = delta_columns.names_of_file(file[0], schema)
        names: list[str | None] = []
        for column in columns:
            own = match(column, schema.columns) or column
            mine = known.get(own)
            if mine is None and (own not in known or schema.defaulted(own)):
                raise SparkOnly(f"it does not have the column {column!r}")
            if mine is not None and not widens(facts.columns[mine], schema.columns[own]):
                raise SparkOnly(f"the column {column!r} has the type {ddl(facts.columns[mine])} in it")
            names.append(mine)
        return FileColumns(facts.rows or 0, facts.columns, tuple(names))

    def batches(self, path: str, names: Sequence[str], size: int) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
        return arrow_rows.batches(path, names, size)

    def rows_at(self, blocks: Sequence[Blocks], columns: Mapping[str, SparkType], most: int) -> pa.Table:
        try:
            snapshot = self._known()
            added = [self._added(snapshot, one.file) for one in blocks]
        except (Unreadable, TableUnavailable) as error:
            raise SparkOnly(str(error)) from error
        return delta_columns.rows_at(snapshot, added, blocks, columns, most, self.on_disk)

    def check_allowed(self, files: Sequence[PlannedFile]) -> None:
        TableFiles(parse_source(self._source)[0]).check((path for path, _, _ in files), below=True)
