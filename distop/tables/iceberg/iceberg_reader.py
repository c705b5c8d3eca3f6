"""The reader of an Iceberg snapshot: manifests tell what is in its files, and Iceberg's own source reads them.

Columns are found by their ids, deletes are applied, and no file is ever changed once it is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.texts import did_you_mean
from distop.tables.iceberg import footer_fallback, iceberg_columns, iceberg_fields, iceberg_rows, manifest_facts
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.iceberg.snapshot_checks import check_opened
from distop.tables.iceberg.iceberg_version import IcebergVersion
from distop.tables.reader import FileColumns, Reader, RowCounts
from distop.tables.reading import arrow_rows, parquet_footers
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import FileFacts, Unreadable, match
from distop.tables.reading.row_counts import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.protocol.plan import PartitionPlan, Pinned
    from distop.protocol.records import TableRecord
    from distop.tables.iceberg.manifest_facts import Snapshot
    from distop.tables.reading.arrow_rows import Blocks
    from distop.tables.reading.file_facts import PlannedFile, SparkType


class IcebergReader(Reader):
    """``source``: the metadata file that the plans were made of."""

    closer_facts_from = "footers"
    counted_by = MANIFEST
    own_columns = False

    def __init__(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned], source: str) -> None:
        super().__init__(table, plans)
        self._source = source
        self._snapshot: Snapshot | None = None
        """What :meth:`facts` has read."""

    # ------------------------------------------------------------------ the table

    def columns(self) -> Mapping[str, SparkType]:
        return iceberg_fields.columns_of(read_metadata(self._source)[0].schema())

    def identities(self, columns: Sequence[str]) -> Mapping[str, int | str]:
        """The ids by which data files have them."""
        from pyiceberg.types import UUIDType

        own = {field.name: field for field in read_metadata(self._source)[0].schema().fields}
        found: dict[str, int | str] = {}
        for column in columns:
            name = match(column, own)
            if name is None:
                raise InvalidArgument(f"the table has no column {column!r}{did_you_mean(column, own)}")
            if isinstance(own[name].field_type, UUIDType):
                raise Unreadable("it is a uuid, and text only in Spark")
            found[column] = own[name].field_id
        return found

    @property
    def version(self) -> IcebergVersion:
        return IcebergVersion.of(self._source)

    # ------------------------------------------------------------------ facts

    def facts(
        self, files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None], *, again: bool = False
    ) -> list[FileFacts | Unreadable]:
        try:
            self._snapshot = manifest_facts.snapshot_of(self._source, wanted, check)
        except Unreadable as error:
            return [error] * max(len(files), 1)
        if not files:
            return [FileFacts(self._source, 0, self._snapshot.columns)]
        return [_of(self._snapshot, file) for file in files]

    def closer_facts(
        self, files: Sequence[FileFacts], wanted: frozenset[str], check: Callable[[], None]
    ) -> dict[str, FileFacts]:
        if self._snapshot is None:
            return {}
        return footer_fallback.look(files, self._snapshot.fields, check)

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
        """All columns of the table: a query reads those that it needs."""
        return iceberg_rows.read_staged(session, staged or self.stage(session, files), files)

    def stage(self, session: SparkSession, files: Sequence[PlannedFile]) -> str:
        return iceberg_rows.stage(session, self._source, files)

    def file_column(self, frame: DataFrame) -> Column:
        return _column(iceberg_rows.FILE)

    def position_column(self, frame: DataFrame) -> Column:
        return _column(iceberg_rows.POSITION)

    def count_rows(self, session: SparkSession, files: Sequence[PlannedFile]) -> RowCounts:
        return iceberg_rows.count_rows(session, self._source, files)

    # ------------------------------------------------------------------ trouble

    def changed(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
        """None: Iceberg changes no file that it has written."""
        return {}

    def not_present(
        self, session: SparkSession, files: Sequence[PlannedFile], check: Callable[[], None]
    ) -> dict[str, Unreadable]:
        found: dict[str, Unreadable] = {}
        for file in files:
            check()
            try:
                iceberg_rows.check_exists(session, self._source, file)
            except Unreadable as error:
                found[file[0]] = error
        return found

    def check_allowed(self, files: Sequence[PlannedFile]) -> None:
        check_opened(self._source, (path for path, _, _ in files), ())

    # ------------------------------------------------------------------ without Spark

    def on_disk(self, file: PlannedFile) -> PlannedFile:
        """A plan has no times of files, and may spell their paths as URLs."""
        path = iceberg_fields.local_path(file[0]) or file[0]
        found = Path(path).stat()
        return path, found.st_size, found.st_mtime_ns

    def check_same(self, file: PlannedFile) -> None:
        parquet_footers.check_unchanged(*file)

    def open_file(
        self, file: PlannedFile, columns: Sequence[str], identities: Mapping[str, int | str] | None
    ) -> FileColumns:
        """By the ids of the columns. What a file has of one that it does not have cannot be told: it may be a default,
        or stand in the metadata.
        """
        facts = arrow_rows.facts_of(file)
        by_id = iceberg_columns.names_in(file[0])
        found = {column: by_id.get(int((identities or {})[column])) for column in columns}
        if missing := next((column for column, name in found.items() if name is None), None):
            raise SparkOnly(f"it does not have the column {missing!r}")
        return FileColumns(facts.rows or 0, facts.columns, tuple(found.values()))

    def batches(self, path: str, names: Sequence[str], size: int) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
        return arrow_rows.batches(path, names, size)

    def rows_at(self, blocks: Sequence[Blocks], columns: Mapping[str, SparkType], most: int) -> pa.Table:
        own = iceberg_columns.Columns(self._source, columns)
        wanted = iceberg_columns.wanted(self._source, blocks, own, self.on_disk)
        return arrow_rows.rows_of(wanted, columns, own.reading, most)


def _of(snapshot: Snapshot, file: PlannedFile) -> FileFacts | Unreadable:
    try:
        return snapshot.of(file)
    except Unreadable as error:
        return error


def _column(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col(name)
