"""The reader of Parquet files: of folders, and of tables of Spark's catalog, which declares their columns.

Facts come from footers, and Spark's own data source reads the rows.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.plan import PartitionPlan
from distop.protocol.texts import did_you_mean
from distop.tables.parquet import footer_probe, page_headers, parquet_rows
from distop.tables.parquet.parquet_format import partition_values
from distop.tables.reader import FileColumns, Reader
from distop.tables.reading import arrow_rows, parquet_footers, spark_paths
from distop.tables.reading.arrow_types import SparkOnly, by_name
from distop.tables.reading.file_facts import Ambiguous, Unreadable, ddl, match, problem
from distop.tables.reading.row_counts import FOOTER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.protocol.plan import Pinned
    from distop.protocol.records import TableRecord
    from distop.tables.reading.arrow_rows import Blocks
    from distop.tables.reading.file_facts import FileFacts, PlannedFile, SparkType


class ParquetReader(Reader):
    """Reads Parquet files.

    ``declared``: the columns of a catalog's table, by name; None for a folder. ``types``: types of partition columns;
    for a folder, a missing one is text.
    """

    facts_from = "footers"
    counted_by = FOOTER

    def __init__(
        self,
        table: TableRecord,
        plans: Sequence[PartitionPlan | Pinned],
        types: Mapping[str, str],
        declared: Mapping[str, SparkType] | None = None,
    ) -> None:
        super().__init__(table, plans)
        self._types = types
        self._columns = declared
        self._values: dict[str, Mapping[str, str | None]] = {}
        """The values of partition columns by a partition's name."""

    # ------------------------------------------------------------------ the table

    def columns(self) -> Mapping[str, SparkType] | None:
        return self._columns

    @cached_property
    def _partition_columns(self) -> Mapping[str, str]:
        if self._columns is not None:
            return self._types
        first = next((plan for plan in self.plans if plan.files), None)
        if first is None:
            return {}
        own = first.values if isinstance(first, PartitionPlan) else {}
        return {name: self._types.get(name, "string") for name in own or self.values(first.files[0][0])}

    def partition_columns(self) -> Mapping[str, str]:
        return self._partition_columns

    @property
    def moves(self) -> bool:
        return self._columns is not None

    @cached_property
    def _planned(self) -> Mapping[str, PartitionPlan]:
        """Each file's partition."""
        return {file[0]: plan for plan in self.plans if isinstance(plan, PartitionPlan) for file in plan.files}

    @cached_property
    def _folders(self) -> Mapping[str, str]:
        return {folder: name for plan in self.plans for folder, name in plan.folders.items()}

    def values(self, path: str) -> Mapping[str, str | None]:
        plan = self._planned.get(path)
        if plan is not None and plan.values:
            return plan.values
        name = self.partition_of(path)
        if name not in self._values:
            self._values[name] = partition_values(name) or {}
        return self._values[name]

    def partition_of(self, path: str) -> str:
        """The name of a file's partition: its folder below the table's location, or for a catalog's table the plan's.

        "" for a file that is not below the location.
        """
        if self._columns is not None:
            place = path.rpartition("/")[0]
            parts = place.rsplit("/", len(self._types))[1:] if self._types else []
            return self._folders.get(place) or "/".join(parts)
        if not path.startswith(self.table.location):
            return ""
        return path[len(self.table.location) :].lstrip("/").rpartition("/")[0]

    def identities(self, columns: Sequence[str]) -> Mapping[str, int | str] | None:
        """The columns' types in the catalog; None for a folder."""
        return None if self._columns is None else {column: _kind(column, self._columns) for column in columns}

    # ------------------------------------------------------------------ facts

    def facts(
        self, files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None], *, again: bool = False
    ) -> list[FileFacts | Unreadable]:
        crashing = footer_probe.crashing_footers(files, wanted, check) if again else {}
        read = iter(parquet_footers.read_all([f for f in files if f[0] not in crashing], wanted, check))
        found = [crashing[f[0]] if f[0] in crashing else next(read) for f in files]
        if any(isinstance(one, Unreadable) for one in found):
            parquet_footers.check_store(found)
        return found

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
        of_path = self.partition_columns() if partition_columns is None else partition_columns
        own = self.all_columns(files, lambda: None) if columns is None else columns
        values = None
        if of_path and self._columns is not None:
            values = {f[0]: tuple(self.values(f[0])[name] for name in of_path) for f in files}
        return parquet_rows.read(session, parquet_rows.RowRequest(files, own, of_path, self.table.location, values))

    def file_column(self, frame: DataFrame) -> Column:
        return parquet_rows.file_column(frame)

    def position_column(self, frame: DataFrame) -> Column:
        return parquet_rows.position_column(frame)

    def counting_column(self, frame: DataFrame) -> Column:
        from pyspark.sql import functions as F

        # For _metadata.file_path, Spark would create a struct per row, before the filter.
        return F.input_file_name()

    def planned_path(self, name: str) -> str:
        return spark_paths.plain_path(name)

    # ------------------------------------------------------------------ errors

    def changed(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
        return parquet_footers.changed(files, check)

    def broken_file(self, error: Exception, files: Sequence[PlannedFile]) -> str | None:
        return spark_paths.broken_file(error, files)

    def check_data(self, path: str, columns: Collection[str], check: Callable[[], None]) -> None:
        """Raises Unreadable if a page header contradicts the footer, and OSError."""
        parquet_footers.read_with_timeout(path, partial(page_headers.check, path, columns), check)

    # ------------------------------------------------------------------ without Spark

    def check_same(self, file: PlannedFile) -> None:
        parquet_footers.check_unchanged(*file)

    def open_file(
        self, file: PlannedFile, columns: Sequence[str], identities: Mapping[str, int | str] | None
    ) -> FileColumns:
        facts = arrow_rows.facts_of(file)
        try:
            names = tuple(match(column, facts.columns) for column in columns)
        except Ambiguous as error:
            raise SparkOnly(str(error)) from None
        return FileColumns(facts.rows or 0, facts.columns, names)

    def batches(self, path: str, names: Sequence[str], size: int) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
        return arrow_rows.batches(path, names, size)

    def rows_at(self, blocks: Sequence[Blocks], columns: Mapping[str, SparkType], most: int) -> pa.Table:
        wanted = [
            arrow_rows.RequestedRows(
                one, arrow_rows.in_folder(self.values(one.file[0]), self._planned[one.file[0]].name)
            )
            for one in blocks
        ]
        return arrow_rows.rows_of(wanted, columns, partial(by_name, schema=columns), most)


def _kind(column: str, known: Mapping[str, SparkType]) -> str:
    name = match(column, known)
    if name is None:
        raise InvalidArgument(f"the table has no column {column!r}{did_you_mean(column, known)}")
    if (why := problem(known[name])) is not None:
        raise Unreadable(why)
    return ddl(known[name])
