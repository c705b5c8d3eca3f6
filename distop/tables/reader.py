"""What a format knows of the files of its tables: :class:`Reader`. Behaviors read tables of all formats through it.

A reader speaks of files and rows, and of no behavior. It comes with its format (:mod:`distop.tables.formats`), for the
files of a plan: what has been committed since is not seen. Nothing here imports PySpark: the session is a parameter.
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
    """Rows of each file by path, as a query has counted them: those that the table has, and deleted ones."""

    kept: Mapping[str, int]
    deleted: Mapping[str, int]


@frozen
class FileColumns:
    """A file as Arrow reads it: its rows, its columns by Spark's types, and what it calls the columns that were asked
    for (None: it does not have one, which is NULL in it).
    """

    rows: int
    columns: Mapping[str, SparkType]
    names: tuple[str | None, ...]


class Reader(ABC):
    """Reads files of a table as they were planned. ``plans``: whose files these are, planned at one time.

    The methods before the line are for all formats. Those after it read files without Spark: a format that does not
    offer them raises Unfaithful.
    """

    facts_from: ClassVar[str] = ""
    """What :meth:`facts` reads of each file, for people: ``footers``. "" where it takes no time to speak of."""
    closer_facts_from: ClassVar[str] = ""
    """Likewise of :meth:`closer_facts`. "" where there is nothing closer."""
    counted_by: ClassVar[CountedBy | None] = None
    """What says how many rows a file has; None: nothing does."""
    own_columns: ClassVar[bool] = True
    """Facts, and rows without ``columns``, have the columns that the files have themselves, which are found by name.
    False: they have the table's, whatever a file calls them.
    """

    def __init__(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> None:
        self.table = table
        self.plans = plans

    # ------------------------------------------------------------------ the table

    def columns(self) -> Mapping[str, SparkType] | None:
        """The table's columns, but those of :meth:`partition_columns`; None where its files alone have them. Raises
        TableUnavailable and InvalidArgument where what has them cannot be read.
        """
        return None

    @property
    def declared(self) -> Mapping[str, SparkType] | None:
        """The columns that a catalog declares of files that have columns of their own; None where there is no such
        catalog. Raises as :meth:`columns` does.
        """
        return self.columns() if self.own_columns else None

    def partition_columns(self) -> Mapping[str, str]:
        """The columns that no file has: each partition has one value of them, as text. With their types."""
        return {}

    def values(self, path: str) -> Mapping[str, str | None]:
        """The values of the partition columns in a file."""
        return {}

    def partition_of(self, path: str) -> str:
        """The name of the partition that a file is in; "" where its place does not tell."""
        return ""

    @property
    def moves(self) -> bool:
        """The same file may be in another partition some day: only a catalog knows which one it is in."""
        return False

    def identities(self, columns: Sequence[str]) -> Mapping[str, int | str] | None:
        """What tells these columns from others that have their names some day; None where nothing does. Raises
        InvalidArgument for a column that the table does not have, Unreadable for one whose values stand otherwise in
        the files than Spark has them, and TableUnavailable.
        """
        return None

    @property
    def version(self) -> TableVersion | None:
        """The state of the table that was planned, of a format that keeps its states; None where a list of files is all
        that tells one from another. Raises InvalidArgument and TableUnavailable where it cannot be read any more.
        """
        return None

    # ------------------------------------------------------------------ facts

    @abstractmethod
    def facts(
        self, files: Sequence[PlannedFile], wanted: frozenset[str], check: Callable[[], None], *, again: bool = False
    ) -> list[FileFacts | Unreadable]:
        """What is known of each file without a scan, in order, or why it cannot be read. ``wanted``: the top-level
        columns (``facts.folded``) of which statistics are needed. ``again``: an earlier look may have crashed the
        process. Of no files: one entry without rows, where the table is known to have columns all the same.

        ``check`` is called now and then, and raises where the reading is to stop. Raises TableUnavailable where the
        store refuses all of them.
        """

    def closer_facts(
        self, files: Sequence[FileFacts], wanted: frozenset[str], check: Callable[[], None]
    ) -> dict[str, FileFacts]:
        """More about these files, by path, that takes longer to find out; those of which there is no more are left out.
        ``wanted`` and ``check`` as for :meth:`facts`, which was called before.
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
        """The rows that the table has in these files (not none), without deleted ones. ``columns``: which of them, with
        the types that they are to have, and at least these; None: all that there are. ``partition_columns`` likewise.
        ``staged``: what :meth:`stage` gave for these files, where it was called.

        Raises Unreadable where one of the files cannot be read so, Gone where what was planned is gone, FatalError
        where this Spark cannot read the format, and what Spark raises.
        """

    def all_rows(self, session: SparkSession, files: Sequence[PlannedFile]) -> DataFrame:
        """:meth:`rows` with all columns; of no files, a frame without rows."""
        if files:
            return self.rows(session, files)
        kinds = {**self.all_columns(files, lambda: None), **self.partition_columns()}
        return session.createDataFrame([], ", ".join(f"{quote(name)} {ddl(kind)}" for name, kind in kinds.items()))

    def all_columns(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, SparkType]:
        """The columns of these files together that Spark reads, but those of partitions. Raises Unreadable."""
        found = self.columns()
        if found is None:
            facts = self.facts(files, frozenset(), check)
            if why := next((one for one in facts if isinstance(one, Unreadable)), None):
                raise why
            found = widened(one.columns.items() for one in facts if not isinstance(one, Unreadable))
        partitions = self.partition_columns()
        return {n: kind for n, kind in found.items() if problem(kind) is None and not may_match(n, partitions)}

    def stage(self, session: SparkSession, files: Sequence[PlannedFile]) -> str:
        """Have ready, and checked, what a frame of :meth:`rows` of these files reads. To be called before each query of
        a frame that is kept, which is good as long as this gives the same text.
        """
        return ""

    @abstractmethod
    def file_column(self, frame: DataFrame) -> Column:
        """The path of a row's file as Spark has it (:meth:`planned_path`), in a frame of :meth:`rows`."""

    @abstractmethod
    def position_column(self, frame: DataFrame) -> Column:
        """The position of a row in its file, from 0; the same at each reading."""

    def counting_column(self, frame: DataFrame) -> Column:
        """The same as :meth:`file_column` where rows are grouped by it, and nothing else: it may cost less."""
        return self.file_column(frame)

    def planned_path(self, name: str) -> str:
        """A file's planned path, of what :meth:`file_column` names it."""
        return name

    def count_rows(self, session: SparkSession, files: Sequence[PlannedFile]) -> RowCounts:
        """Rows and deleted rows of files whose facts do not tell how many are deleted, by a query of its own. Raises as
        :meth:`rows` does.
        """
        raise NotImplementedError(f"{type(self).__name__} knows what is deleted")

    # ------------------------------------------------------------------ trouble

    @abstractmethod
    def changed(self, files: Sequence[PlannedFile], check: Callable[[], None]) -> dict[str, Unreadable]:
        """What is wrong with those of the files that are not as they were planned, by path and in their order: none,
        where the format never changes a file. Raises TableUnavailable where a file does not answer.
        """

    def not_present(
        self, session: SparkSession, files: Sequence[PlannedFile], check: Callable[[], None]
    ) -> dict[str, Unreadable]:
        """The same after an error: also those of the files that are gone, whatever the format is."""
        return self.changed(files, check)

    def broken_file(self, error: Exception, files: Sequence[PlannedFile]) -> str | None:
        """Which of the files an error of Spark says that it could not read; None where it does not say so."""
        return None

    def check_data(self, path: str, columns: Collection[str], check: Callable[[], None]) -> None:
        """Raises Unreadable where the data of a file may crash the JVM that reads these columns, and OSError. For files
        that one may have died of.
        """

    def check_allowed(self, files: Sequence[PlannedFile]) -> None:
        """Raises InvalidArgument where one of the files may not belong to the table. For files that were planned a
        while ago, or by what was kept.
        """

    # ------------------------------------------------------------------ without Spark

    def on_disk(self, file: PlannedFile) -> PlannedFile:
        """The file as the file system has it, with size and time. Raises OSError."""
        return file

    def check_same(self, file: PlannedFile) -> None:
        """Raises Unreadable where a file (:meth:`on_disk`) is no longer the same."""
        raise _only_spark(self)

    def open_file(
        self, file: PlannedFile, columns: Sequence[str], identities: Mapping[str, int | str] | None
    ) -> FileColumns:
        """What a file (:meth:`on_disk`) has of these columns, which have had these ``identities``. Raises Unreadable
        where it cannot be read, and Unfaithful where it is not known what it has of one of them.
        """
        raise _only_spark(self)

    def batches(self, path: str, names: Sequence[str], size: int) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
        """All rows of a file (:meth:`on_disk`) in order, without deletes, in batches of ``size`` at most: the position
        of the first of them, how many they are, and these columns of it as it calls them (None, where none is asked
        for). Raises Unreadable.
        """
        raise _only_spark(self)

    def rows_at(self, blocks: Sequence[Blocks], columns: Mapping[str, SparkType], most: int) -> pa.Table:
        """The rows at these positions, with these columns in Arrow's types for Spark's, and then those of partitions as
        texts; exactly those that Spark would read. Raises Unfaithful where that is not known, rows may be deleted, or
        more than ``most`` bytes would have to be decoded.
        """
        raise _only_spark(self)


def _only_spark(reader: Reader) -> Exception:
    from distop.tables.reading.arrow_types import Unfaithful

    return Unfaithful(f"files of the format {reader.table.format} are read by Spark alone")
