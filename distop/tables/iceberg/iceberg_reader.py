"""The reader of an Iceberg snapshot: facts come from manifests and footers, rows from Iceberg's Spark reader.

Columns are found by their ids, deletes are applied, and files never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.texts import did_you_mean
from distop.tables.iceberg import footer_fallback, iceberg_columns, iceberg_fields, iceberg_rows, manifest_facts
from distop.tables.iceberg.iceberg_version import IcebergVersion
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.iceberg.snapshot_checks import check_opened
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
    from distop.tables.iceberg.manifest_facts import IcebergSnapshot
    from distop.tables.reading.arrow_rows import Blocks
    from distop.tables.reading.file_facts import PlannedFile, SparkType


class IcebergReader(Reader):
    """Reads an Iceberg snapshot. ``source``: the metadata file of the plans."""

    precise_facts_from = "footers"
    counted_by = MANIFEST
    own_columns = False

    def __init__(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned], source: str) -> None:
        super().__init__(table, plans)
        self._source = source
        self._snapshot: IcebergSnapshot | None = None
        """The snapshot that :meth:`facts` has read."""

    # ------------------------------------------------------------------ the table

    def columns(self) -> Mapping[str, SparkType]:
        return iceberg_fields.columns_of(read_metadata(self._source)[0].schema())

    def identities(self, columns: Sequence[str]) -> Mapping[str, int | str]:
        """The columns' field ids.

        Raises InvalidArgument for an unknown column, and Unreadable for a UUID, which is a text in Spark only.
        """
        from pyiceberg.types import UUIDType

        own = {field.name: field for field in read_metadata(self._source)[0].schema().fields}
        found: dict[str, int | str] = {}
        for column in columns:
            name = match(column, own)
            if name is None:
                raise InvalidArgument(f"the table has no column {column!r}{did_you_mean(column, own)}")
            if isinstance(own[name].field_type, UUIDType):
                raise Unreadable("its type is uuid, which is a text in Spark only")
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
        return [_facts(self._snapshot, file) for file in files]

    def precise_facts(
        self, files: Sequence[FileFacts], wanted: frozenset[str], check: Callable[[], None]
    ) -> dict[str, FileFacts]:
        if self._snapshot is None:
            return {}
        return footer_fallback.with_footers(files, self._snapshot.fields, check)

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
        return iceberg_rows.read_staged(session, staged or self.stage(session, files), files)

    def stage(self, session: SparkSession, files: Sequence[PlannedFile]) -> str:
        return iceberg_rows.stage(session, self._source, files)

    def file_column(self, frame: DataFrame) -> Column:
        return _column(iceberg_rows.FILE)

    def position_column(self, frame: DataFrame) -> Column:
        return _column(iceberg_rows.POSITION)

    def count_rows(self, session: SparkSession, files: Sequence[PlannedFile]) -> RowCounts:
        return iceberg_rows.count_rows(session, self._source, files)

    # ------------------------------------------------------------------ errors

    def changed(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
        """Empty: Iceberg never changes files."""
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
        """The file with its local path, size and stamp: plans have no times, and may have URLs."""
        path = iceberg_fields.local_path(file[0]) or file[0]
        return path, *parquet_footers.size_and_stamp(path)

    def check_same(self, file: PlannedFile) -> None:
        parquet_footers.check_unchanged(*file)

    def open_file(
        self, file: PlannedFile, columns: Sequence[str], identities: Mapping[str, int | str] | None
    ) -> FileColumns:
        """Open a file for columns that are found by their ids.

        Raises SparkOnly for a column that the file lacks: its values may be a default, or in the metadata.
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
        own = iceberg_columns.IcebergColumns(self._source, columns)
        wanted = iceberg_columns.wanted(self._source, blocks, own, self.on_disk)
        return arrow_rows.rows_of(wanted, columns, own.reading, most)


def _facts(snapshot: IcebergSnapshot, file: PlannedFile) -> FileFacts | Unreadable:
    try:
        return snapshot.of(file)
    except Unreadable as error:
        return error


def _column(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.col(name)
