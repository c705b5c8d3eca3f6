"""The interface :class:`Reader`, through which behaviors read the files of tables of all formats.

A reader handles files and rows, independent of behaviors. A format (:mod:`distop.tables.formats`) provides it for the
files of a plan; later commits are not visible. No module here imports PySpark: the session is a parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from distop.protocol.frozen import frozen
from distop.tables.reading.file_facts import Unreadable, ddl, may_match, problem, quote, widened

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from distop.protocol.plan import PartitionPlan, Pinned
    from distop.protocol.records import TableRecord
    from distop.tables.reading.arrow_rows import Blocks
    from distop.tables.reading.file_facts import FileFacts, PlannedFile, SparkType
    from distop.tables.reading.row_counts import CountedBy
    from distop.tables.table_version import TableVersion


@frozen
class RowCounts:
    """Row counts of files by path, from a query: live rows and deleted rows."""

    kept: Mapping[str, int]
    deleted: Mapping[str, int]


@frozen
class FileColumns:
    """A file as Arrow reads it: number of rows, columns with Spark's types, and its names of the requested columns.

    A name is None if the file lacks the column, which then is NULL.
    """

    rows: int
    columns: Mapping[str, SparkType]
    names: tuple[str | None, ...]


class Reader(ABC):
    """Reads the planned files of a table. ``plans``: the plans of these files, from one planning.

    All formats implement the methods up to "without Spark". A format without the later ones raises SparkOnly.
    """

    facts_from: ClassVar[str] = ""
    """The part of each file that :meth:`facts` reads, for people: ``footers``. "" if it takes no noticeable time."""
    precise_facts_from: ClassVar[str] = ""
    """The same for :meth:`precise_facts`. "" if there are none."""
    counted_by: ClassVar[CountedBy | None] = None
    """The source of a file's number of rows; None: unknown."""
    counts_deleted_rows: ClassVar[bool] = False
    """Whether Spark's counter of the rows that a scan has read includes deleted rows."""
    own_columns: ClassVar[bool] = True
    """Whether facts, and rows without ``columns``, have the files' own columns, which are matched by name.

    False: they have the table's columns, whatever names the files have.
    """

    def __init__(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> None:
        self.table = table
        self.plans = plans

    # ------------------------------------------------------------------ the table

    def columns(self) -> Mapping[str, SparkType] | None:
        """The table's columns except :meth:`partition_columns`; None if only its files define columns.

        Raises TableUnavailable and InvalidArgument if they cannot be read.
        """
        return None

    @property
    def declared(self) -> Mapping[str, SparkType] | None:
        """The columns that a catalog declares for files with their own columns; None without such a catalog.

        Raises the errors of :meth:`columns`.
        """
        return self.columns() if self.own_columns else None

    def partition_columns(self) -> Mapping[str, str]:
        """The partition columns with their types. Files lack them; each partition has one value of each, as text."""
        return {}

    def values(self, path: str) -> Mapping[str, str | None]:
        """The values of the partition columns in a file."""
        return {}

    def partition_of(self, path: str) -> str:
        """The name of a file's partition; "" if its path does not show it."""
        return ""

    @property
    def moves(self) -> bool:
        """Whether a file may be moved to another partition later, because only a catalog has its partition."""
        return False

    def identities(self, columns: Sequence[str]) -> Mapping[str, int | str] | None:
        """Ids that distinguish columns from later columns of the same names; None if there are no ids.

        Raises InvalidArgument for an unknown column, Unreadable for a column whose values in the files differ from
        Spark's, and TableUnavailable.
        """
        return None

    @property
    def version(self) -> TableVersion | None:
        """The planned state of the table, for formats with versions; None if only the list of files identifies a state.

        Raises InvalidArgument and TableUnavailable if it cannot be read.
        """
        return None

    # ------------------------------------------------------------------ facts

    @abstractmethod
    def facts(
        self, files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None], *, again: bool = False
    ) -> list[FileFacts | Unreadable]:
        """The facts of each file that need no scan, in order, or why it cannot be read.

        ``wanted``: the top-level columns (``file_facts.folded``) whose statistics are needed. ``again``: an earlier
        call may have crashed the process. Without files: one entry without rows, if the table's columns are known.
        ``check`` is called regularly, and raises to stop. Raises TableUnavailable if the store refuses all files.
        """

    def precise_facts(
        self, files: Sequence[FileFacts], wanted: frozenset[str], check: Callable[[], None]
    ) -> dict[str, FileFacts]:
        """Further facts of files, by path, that take longer to read; files without further facts are left out.

        ``wanted`` and ``check``: see :meth:`facts`, which must be called before.
        """
        return {}

    # ------------------------------------------------------------------ rows

    @abstractmethod
    def rows(
        self,
        session: SparkSession,
        files: Sequence[PlannedFile],
        columns: Mapping[str, SparkType] | None = None,
        partition_columns: Mapping[str, str] | None = None,
        *,
        staged: str = "",
    ) -> DataFrame:
        """The table's rows in these files (at least one file), without deleted rows.

        ``columns``: the needed columns with their types (the frame may have more); None: all. ``partition_columns``:
        likewise. ``staged``: the result of :meth:`stage` for these files, if it was called.

        Raises Unreadable if a file cannot be read with these columns, Gone if planned files or metadata no longer
        exist, FatalError if this Spark cannot read the format, and Spark's errors.
        """

    def all_rows(self, session: SparkSession, files: Sequence[PlannedFile]) -> DataFrame:
        """:meth:`rows` with all columns; without files, a frame without rows."""
        if files:
            return self.rows(session, files)
        kinds = {**self.all_columns(files, lambda: None), **self.partition_columns()}
        return session.createDataFrame([], ", ".join(f"{quote(name)} {ddl(kind)}" for name, kind in kinds.items()))

    def all_columns(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, SparkType]:
        """All columns of these files that Spark can read, except partition columns. Raises Unreadable."""
        found = self.columns()
        if found is None:
            facts = self.facts(files, frozenset(), check)
            if why := next((one for one in facts if isinstance(one, Unreadable)), None):
                raise why
            found = widened(one.columns.items() for one in facts if not isinstance(one, Unreadable))
        partitions = self.partition_columns()
        return {n: kind for n, kind in found.items() if problem(kind) is None and not may_match(n, partitions)}

    def stage(self, session: SparkSession, files: Sequence[PlannedFile]) -> str:
        """Prepare and check the input of a frame of :meth:`rows`.

        Call it before each query of a cached frame, which is valid as long as this returns the same text.
        """
        return ""

    @abstractmethod
    def file_column(self, frame: DataFrame) -> Column:
        """The column with the path of a row's file, in Spark's form (:meth:`planned_path`)."""

    @abstractmethod
    def position_column(self, frame: DataFrame) -> Column:
        """The column with the position of a row in its file, from 0; the same in each query."""

    def counting_column(self, frame: DataFrame) -> Column:
        """A possibly cheaper column than :meth:`file_column`, only for grouping rows by file."""
        return self.file_column(frame)

    def planned_path(self, name: str) -> str:
        """A file's planned path for a value of :meth:`file_column`."""
        return name

    def count_rows(self, session: SparkSession, files: Sequence[PlannedFile]) -> RowCounts:
        """Count live and deleted rows with a query, for files whose facts lack the number of deleted rows.

        Raises the errors of :meth:`rows`.
        """
        raise NotImplementedError(f"the facts of {type(self).__name__} have the number of deleted rows")

    # ------------------------------------------------------------------ errors

    @abstractmethod
    def changed(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
        """The errors of files that have changed since the planning, by path, in order.

        Empty for a format that never changes files. Raises TableUnavailable if a file cannot be reached.
        """

    def not_present(
        self, session: SparkSession, files: Sequence[PlannedFile], check: Callable[[], None]
    ) -> dict[str, Unreadable]:
        """Like :meth:`changed`, after an error: also the files that are gone, for each format."""
        return self.changed(files, check)

    def broken_file(self, error: Exception, files: Sequence[PlannedFile]) -> str | None:
        """The file that Spark could not read according to its error; None if the error does not say so."""
        return None

    def check_data(self, path: str, columns: Collection[str], check: Callable[[], None]) -> None:
        """Raises Unreadable if the data of a file may crash a JVM that reads these columns, and OSError.

        To be called for files that may have crashed a JVM.
        """

    def check_allowed(self, files: Sequence[PlannedFile]) -> None:
        """Raises InvalidArgument if a file of an older or cached plan may not belong to the table."""

    # ------------------------------------------------------------------ without Spark

    def on_disk(self, file: PlannedFile) -> PlannedFile:
        """The file with its current size and time. Raises OSError."""
        return file

    def check_same(self, file: PlannedFile) -> None:
        """Raises Unreadable if a file (:meth:`on_disk`) has changed."""
        raise _only_spark(self)

    def open_file(
        self, file: PlannedFile, columns: Sequence[str], identities: Mapping[str, int | str] | None
    ) -> FileColumns:
        """Open a file (:meth:`on_disk`) for these columns, which had these ``identities``.

        Raises Unreadable if it cannot be read, and SparkOnly if its content of a column is uncertain.
        """
        raise _only_spark(self)

    def batches(self, path: str, names: Sequence[str], size: int) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
        """All rows of a file (:meth:`on_disk`) in order, ignoring deletes, in batches of at most ``size`` rows.

        Each batch: the position of its first row, its number of rows, and the columns by the file's own ``names`` (None
        if there are none). Raises Unreadable.
        """
        raise _only_spark(self)

    def rows_at(self, blocks: Sequence[Blocks], columns: Mapping[str, SparkType], most: int) -> pa.Table:
        """The rows at these positions, exactly as Spark would read them.

        They have these columns in Arrow's types for Spark's, then the partition columns as texts. Raises SparkOnly if
        that is uncertain, rows may be deleted, or more than ``most`` bytes would have to be decoded.
        """
        raise _only_spark(self)


def _only_spark(reader: Reader) -> Exception:
    from distop.tables.reading.arrow_types import SparkOnly

    return SparkOnly(f"only Spark can read files of the format {reader.table.format}")
