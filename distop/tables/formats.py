"""The formats of tables: what each offers (:class:`Format`), and how one is found by its name.

A format is code, and so it is chosen by what is installed: those of distop are listed here, and others come as entry
points of the group ``distop.formats``, each an instance of :class:`Format` under the format's name. A table's record
names one of them, and nothing in it is imported. What is listed here cannot be replaced by an entry point.

A format whose tables have a schema of their own offers to ``apply`` how that is changed: by a swap of the table's
metadata. Who performs it, a new file in the table's own folder or a commit
to its catalog, is what :class:`Changes` tells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, UsageError
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.runtime.lru_cache import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.plan import PartitionPlan, Pinned, Planned
    from distop.protocol.records import TableRecord
    from distop.storage.location import Location
    from distop.tables.iceberg.iceberg_catalogs import Catalog
    from distop.tables.reader import Reader

    Spark = Callable[[], Any]
    """Gives the Spark session, which is made when it is first asked for."""

ENTRY_POINTS = "distop.formats"
OWN = {
    "parquet": "distop.tables.parquet.parquet_format",
    "iceberg": "distop.tables.iceberg.iceberg_format",
    "spark": "distop.tables.spark.spark_format",
}
"""The modules of distop's own formats, each with its ``FORMAT``."""

_installed: Kept[Format] = Kept(16)
"""Those of entry points: looking for one reads what is installed."""


class Format(ABC):
    """One format: the planner of its tables, and the reader of their files."""

    @abstractmethod
    def check_table(self, record: TableRecord) -> TableRecord:
        """The record as it is to be stored. Raises InvalidArgument, naming it, for an unknown option, and for a
        location that holds no such table.
        """

    @abstractmethod
    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        """The table's partitions with their files, frozen. ``check`` is called now and then, and raises where that is
        to stop. Raises InvalidArgument for what is no table of the format, TableUnavailable where it cannot be reached.
        """

    @abstractmethod
    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        """The reader of the files of these plans, which were made at once; of none, where there was nothing to be
        planned. ``table``: with the options that planning found. Raises InvalidArgument for plans that are not the
        format's.
        """

    def check_reachable(self, table: TableRecord, spark: Spark) -> None:
        """Raises TableUnavailable where nothing of the table can be seen from here."""
        from distop.storage.location import Location

        Location.of(table.location).check()

    def place_of(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        """The folder that is the table's own: a path or a URL. Raises as planning does."""
        return table.location

    def folders_of(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool
    ) -> tuple[str, ...]:
        """The folders that the files of a plan lie in, or what names these files; ``elsewhere``: with those of
        partitions that a catalog has elsewhere. Raises as planning does.
        """
        from distop.storage.location import root_of

        return (root_of(table.location),)

    def of_catalog(self, table: TableRecord) -> bool:
        """Whether only a catalog knows where the table lies."""
        return False

    def asks_server(self, record: TableRecord) -> bool:
        """Whether checking the record asks a server other than the one of its location."""
        return False

    def has_source(self, table: TableRecord) -> bool:
        """Whether plans of the table may name what its files are read through (``PartitionPlan.source``)."""
        return False

    def lies_at(self, location: Location) -> bool:
        """Whether a folder shows that it is a table of this format, more surely than by the files in it."""
        return False

    def changes(self, table: TableRecord) -> Changes:
        """How the schema of this table is changed. Raises InvalidArgument where there is none to change, or not so."""
        raise InvalidArgument(
            f"the table {table.name!r} is a folder of {table.format} files, which has no schema to change: Iceberg "
            "tables alone have one"
        )


def names() -> tuple[str, ...]:
    """The formats that there are here, distop's own first."""
    found = {entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)}
    return (*OWN, *sorted(found - OWN.keys()))


def format_of(record: TableRecord) -> Format:
    """The format of a table. Raises InvalidArgument where none of this name is installed, UsageError where what is
    installed is none.
    """
    module = OWN.get(record.format)
    if module is not None:
        own: Format = import_module(module).FORMAT
        return own
    return _installed.get((record.format,), lambda: _loaded(record))


def _loaded(record: TableRecord) -> Format:
    found = next(iter(metadata.entry_points(group=ENTRY_POINTS, name=record.format)), None)
    if found is None:
        raise InvalidArgument(
            f"the format {shown(record.format)} of table {shown(record.name)} is not known (known: "
            f"{', '.join(names())})"
        )
    made = found.load()
    if not isinstance(made, Format):
        raise UsageError(f"the entry point {found.name!r} of {ENTRY_POINTS} is {found.value!r}, which is no Format")
    return made


@frozen
class Changes:
    """``catalog``: the one that the table was registered with; None: its folder is all there is."""

    catalog: Catalog | None

    @property
    def by_catalog(self) -> bool:
        """Commits are made to the catalog; otherwise they are files in the table's folder, the first of which wins.
        Raises TableUnavailable where the catalog is not configured here.
        """
        return self.catalog is not None and self.catalog.warehouse() is None
