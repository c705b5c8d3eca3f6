"""Table formats: the interface :class:`Format`, and the registry that finds a format by its name.

distop's own formats are listed here; others are entry points of the group ``distop.formats``, each an instance of
:class:`Format` under the format's name. A table record has only a format's name, so that it cannot choose code. An
entry point cannot replace a format that is listed here.

The behavior ``apply`` changes a table's schema by a swap of the table's metadata: a new file in the table's folder, or
a commit to its catalog. :class:`Changes` says which of them a format uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UsageError
from distop.protocol.frozen import frozen
from distop.protocol.texts import did_you_mean, shown
from distop.runtime.lru_cache import LruCache

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from distop.protocol.plan import PartitionPlan, Pinned, Planned
    from distop.protocol.records import TableRecord
    from distop.storage.location import Location
    from distop.tables.catalog_entry import CatalogEntry
    from distop.tables.commits import CommitContext, FileReplacer, ReplacementContext
    from distop.tables.expiration import Expiration
    from distop.tables.iceberg.iceberg_catalogs import Catalog
    from distop.tables.partition_removal import PartitionRemoval
    from distop.tables.pinned_files import PinnedFiles
    from distop.tables.reachability import Reachability
    from distop.tables.reader import Reader
    from distop.tables.statistics import TableStatistics
    from distop.tables.table_copy import TableCopy

    Spark = Callable[[], Any]
    """Returns the Spark session, which is started on the first call."""

ENTRY_POINTS = "distop.formats"
OWN = {
    "parquet": "distop.tables.parquet.parquet_format",
    "iceberg": "distop.tables.iceberg.iceberg_format",
    "delta": "distop.tables.delta.delta_format",
    "spark": "distop.tables.spark.spark_format",
}
"""The modules of distop's own formats, each with its ``FORMAT``."""

_installed: LruCache[Format] = LruCache(16)
"""Formats of entry points; cached because the lookup reads the metadata of all installed packages."""


class Format(ABC):
    """One format: the planner of its tables, and the reader of their files."""

    @abstractmethod
    def check_table(self, record: TableRecord) -> TableRecord:
        """Check a record; returns the record to store.

        Raises InvalidArgument, with the name, for an unknown option, and for a location without such a table.
        """

    @abstractmethod
    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        """Plan a table: its current partitions with their files.

        ``check`` is called regularly, and raises to stop. Raises InvalidArgument if there is no table of the format,
        TableUnavailable if it cannot be reached.
        """

    @abstractmethod
    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        """The reader of the files of plans from one planning, which may be empty.

        ``table``: with the options of the plan. Raises InvalidArgument for plans of another format.
        """

    def statistics(
        self, table: TableRecord, names: Collection[str], small_bytes: int, check: Callable[[], None]
    ) -> TableStatistics:
        """The table's version, and these statistics (``tables.statistics``), from metadata alone, without a JVM.

        Without names only the version is read, which policies do often. ``small_bytes``: the size below which a file is
        small. ``check`` is called regularly, and raises to stop. Raises InvalidArgument if there is no table of the
        format, or if the format has no statistics; TableUnavailable if it cannot be reached.
        """
        raise InvalidArgument(
            f"the format {table.format} of table {table.name!r} has no statistics: policies with a condition or the "
            "trigger `version` need a table of Iceberg, Delta or Parquet files"
        )

    def check_reachable(self, table: TableRecord, spark: Spark) -> None:
        """Raises TableUnavailable if nothing of the table can be read from here."""
        from distop.storage.location import Location

        Location.of(table.location).check()

    def place_of(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        """The table's own folder, a path or a URL. Raises the errors of planning."""
        return table.location

    def folders_of(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool
    ) -> tuple[str, ...]:
        """The folders of a plan's files, or of the files that name them. Raises the errors of planning.

        ``elsewhere``: also the folders of partitions that a catalog has in other locations.
        """
        from distop.storage.location import root_of

        return (root_of(table.location),)

    def of_catalog(self, table: TableRecord) -> bool:
        """Whether only a catalog knows the table's location."""
        return False

    def asks_server(self, record: TableRecord) -> bool:
        """Whether the check of a record sends requests to a server other than the one of its location."""
        return False

    def has_source(self, table: TableRecord) -> bool:
        """Whether plans of the table may have a source: a file through which its files are read."""
        return False

    def lies_at(self, location: Location) -> bool:
        """Whether a folder is certainly a table of this format, by more than its data files."""
        return False

    def reachability(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, source: str = ""
    ) -> Reachability:
        """The files that the table's metadata reach, of the current state.

        ``source``: of an earlier one (``Reachability.source``). Raises the errors of planning, and InvalidArgument if
        the format cannot tell.
        """
        raise InvalidArgument(
            f"the format {table.format} of the table {table.name!r} does not list the files that its metadata reach: "
            "only parquet, iceberg, delta and spark tables do"
        )

    def expiration(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Expiration:
        """The current state, for the removal of old versions. Raises the errors of :meth:`reachability`."""
        raise InvalidArgument(
            f"the table {table.name!r} has no old versions that could be removed through the format {table.format}: "
            "only Iceberg tables, registered by their folder or with the option 'catalog', and Delta tables do"
        )

    def partition_removal(
        self, table: TableRecord, context: CommitContext, check: Callable[[], None]
    ) -> PartitionRemoval:
        """The current state, for the removal of whole partitions. Raises the errors of planning."""
        raise InvalidArgument(
            f"partitions of the table {table.name!r} cannot be removed through the format {table.format}: only Iceberg "
            "tables, registered by their folder or with the option 'catalog', Delta tables and folders of Parquet "
            "files have partitions that can be removed"
        )

    def changes(self, table: TableRecord) -> Changes:
        """How the table's schema can be changed. Raises InvalidArgument if it cannot be changed."""
        raise InvalidArgument(
            f"the table {table.name!r} is a folder of {table.format} files, which has no schema: only Iceberg and "
            "Delta tables have a schema to change"
        )

    def replacer(self, table: TableRecord, ctx: ReplacementContext) -> FileReplacer:
        """How data files of the table are replaced by others with the same rows, in one step.

        Raises InvalidArgument if they cannot be replaced.
        """
        raise InvalidArgument(
            f"the files of the table {table.name!r} cannot be replaced in one step, because it is a folder of "
            f"{table.format} files: only the files of Iceberg and Delta tables can"
        )

    def swapper(self, table: TableRecord, ctx: ReplacementContext) -> FileReplacer:
        """How data files of a table without commits are replaced in several steps (``"swap": "hive"``).

        Raises InvalidArgument if the format replaces them in one step, or not at all.
        """
        raise InvalidArgument(
            f"the files of the table {table.name!r} are not replaced by a swap, because its format is {table.format}: "
            "only those of a folder of Parquet files are; omit swap"
        )

    def pinned_files(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, version: str = ""
    ) -> PinnedFiles:
        """The data files of a version of the table: of the current one, or of ``version``.

        The default is for formats without versions. Raises the errors of planning, and InvalidArgument for an unknown
        version.
        """
        from distop.tables.pinned_files import PinnedFiles

        if version:
            raise InvalidArgument(
                f"the table {table.name!r} has no versions, because it is of the format {table.format}: only Iceberg "
                "and Delta tables have"
            )
        planned = self.plan_table(table, check, spark)
        files = [file for partition in planned.partitions for file in partition.files]
        return PinnedFiles(self.place_of(table, check, spark), "", files)

    def catalog_entry(self, table: TableRecord, check: Callable[[], None]) -> CatalogEntry | None:
        """The table's entry in its catalog, which can be removed; None for a table that is known by its folder.

        ``check`` is called while waiting for the catalog, and raises to stop. Raises InvalidArgument if the entry
        cannot be removed, and the errors of planning.
        """
        if not self.of_catalog(table):
            return None
        raise InvalidArgument(
            f"distop does not drop the table {table.name!r} through the format {table.format}, because its catalog may "
            "delete files without a list of them: use DROP TABLE there, or register an Iceberg table with the option "
            "'catalog'"
        )

    def recorded_place(self, table: TableRecord) -> str:
        """The table's own folder if its record has it, "" otherwise. Raises InvalidArgument and TableUnavailable."""
        return "" if self.of_catalog(table) else table.location

    def table_copy(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, version: str = "", source: str = ""
    ) -> TableCopy | None:
        """A version of the table to be copied with its metadata; None if a table is its files, without metadata.

        ``source``: of an earlier one (``TableCopy.origin``). Raises the errors of :meth:`pinned_files`, and
        InvalidArgument if the version cannot be copied.
        """
        if self.of_catalog(table):
            raise InvalidArgument(
                f"the table {table.name!r} cannot be registered at another place: only its catalog knows its columns "
                f"and partitions, and the format {table.format} creates no table in it"
            )
        return None

    def data_folder(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        """The folder of the table's data, below which new files are staged. Raises the errors of planning."""
        return self.place_of(table, check, spark)


def names() -> tuple[str, ...]:
    """The names of the available formats, distop's own first."""
    found = {entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)}
    return (*OWN, *sorted(found - OWN.keys()))


def format_of(record: TableRecord) -> Format:
    """The format of a table. Raises InvalidArgument for an unknown name, UsageError for an invalid entry point."""
    module = OWN.get(record.format)
    if module is not None:
        own: Format = import_module(module).FORMAT
        return own
    return _installed.get((record.format,), lambda: _loaded(record))


def _loaded(record: TableRecord) -> Format:
    found = next(iter(metadata.entry_points(group=ENTRY_POINTS, name=record.format)), None)
    if found is None:
        raise InvalidArgument(
            f"the format {shown(record.format)} of table {shown(record.name)} is not known"
            f"{did_you_mean(record.format, names(), 'known')}"
        )
    made = found.load()
    if not isinstance(made, Format):
        raise UsageError(f"the entry point {found.name!r} of {ENTRY_POINTS} is {found.value!r}, which is not a Format")
    return made


@frozen
class Changes:
    """The way to change a table's schema. ``catalog``: the table's registered catalog; None: a table in a folder.

    ``delta``: a Delta table, whose schema is changed by a commit in its log.
    """

    catalog: Catalog | None
    delta: bool = False

    @property
    def by_catalog(self) -> bool:
        """Whether to commit to the catalog. Otherwise a commit is a file in the table's folder; the first one wins.

        Raises TableUnavailable if the catalog is not configured here.
        """
        return self.catalog is not None and self.catalog.warehouse() is None
