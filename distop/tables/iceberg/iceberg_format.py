"""The format of Apache Iceberg tables, which are planned from their metadata, without a JVM.

A table is given by its folder, whose newest metadata file is found like by Iceberg's own file-system tables; or by its
name in a catalog, which has its metadata file. The plan has that file, which fixes snapshot and schema, independent of
later commits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.storage.confinement import check_folder, own_folder, table_of
from distop.storage.location import Location, root_of
from distop.tables.formats import Changes, Format
from distop.tables.iceberg import iceberg_catalogs
from distop.tables.iceberg.metadata_file import METADATA, current_metadata_file, read_metadata
from distop.tables.iceberg.snapshot_plan import plan_metadata
from distop.tables.table_options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from distop.protocol.plan import PartitionPlan, Pinned, Planned
    from distop.protocol.records import TableRecord
    from distop.tables.catalog_entry import CatalogEntry
    from distop.tables.commits import CommitContext, FileReplacer, ReplacementContext
    from distop.tables.expiration import Expiration
    from distop.tables.formats import Spark
    from distop.tables.partition_removal import PartitionRemoval
    from distop.tables.pinned_files import PinnedFiles
    from distop.tables.reachability import Reachability
    from distop.tables.reader import Reader
    from distop.tables.statistics import TableStatistics
    from distop.tables.table_copy import TableCopy
    from distop.tables.table_options import TableOptions


class IcebergFormat(Format):
    """Iceberg tables, by their folder or by their name in a catalog."""

    def check_table(self, record: TableRecord) -> TableRecord:
        """Check a record; returns the record to store.

        Raises InvalidArgument, with the name, for an unknown option, a location that cannot be opened, does not exist
        or has no Iceberg table, a folder whose current metadata only a catalog knows, and a catalog that cannot be
        reached from here or does not have the table.
        """
        options = check_options(record.options, "iceberg")
        try:
            read_metadata(_current(record, options, lambda: None))
            folder = _folder(record, options)
            if folder is None:
                return record
            location = Location.of(folder)
        except TableUnavailable as error:
            raise InvalidArgument(str(error)) from error
        return replace(record, location=location.text) if options.catalog is None else record

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        """Plan the current snapshot, with :func:`plan_metadata` of the current metadata file.

        Raises InvalidArgument if that file cannot be determined, TableUnavailable if the table, its metadata or its
        manifests cannot be read.
        """
        options = check_options(table.options, "iceberg")
        return plan_metadata(_current(table, options, check), table, options, check)

    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        """The reader for plans of one metadata file. Raises InvalidArgument for a plan without a metadata file."""
        from distop.tables.iceberg.iceberg_reader import IcebergReader

        source = plans[0].source if plans else ""
        if not source:
            raise InvalidArgument(f"the plan of {table.name!r} has no metadata file, so it is not a plan of this table")
        return IcebergReader(table, plans, source)

    def statistics(
        self, table: TableRecord, names: Collection[str], small_bytes: int, check: Callable[[], None]
    ) -> TableStatistics:
        """The statistics of the current metadata file (``table_statistics``)."""
        from distop.tables.iceberg.table_statistics import statistics

        options = check_options(table.options, "iceberg")
        return statistics(_current(table, options, check), names, small_bytes, check)

    def check_reachable(self, table: TableRecord, spark: Spark) -> None:
        """Raises TableUnavailable if there is no table at the location: it was dropped, or its disk is missing.

        A table that its catalog no longer has is not unavailable: the job reports what it finds.
        """
        options = check_options(table.options, "iceberg")
        try:
            source = _current(table, options, lambda: None)
        except (InvalidArgument, TableUnavailable) as error:
            if _folder(table, options) is None:
                if isinstance(error, InvalidArgument):
                    return
                raise
            raise TableUnavailable(
                f"there is no Iceberg table at {table.location!r}: it was dropped, or its disk is not mounted here"
            ) from error
        if _folder(table, options) is None:
            read_metadata(source)

    def place_of(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        """The table's folder; for a table of a catalog, from its metadata. Raises the errors of planning."""
        folder = self.folder_of(table)
        if folder is not None:
            return folder
        with iceberg_catalogs.opened(table, check) as found:
            return own_folder(found.source, str(found.metadata.location))

    def folders_of(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool
    ) -> tuple[str, ...]:
        """The table's folder, or that of the catalog's metadata file.

        Of a table that was dropped from its catalog, it is the option ``folder``, so that its plan can still be used.
        """
        folder = self.folder_of(table)
        if folder is not None:
            return (root_of(folder),)
        try:
            with iceberg_catalogs.opened(table, check) as found:
                return (table_of(found.source),)
        except iceberg_catalogs.NoTable:
            if pinned := self.recorded_place(table):
                return (root_of(pinned),)
            raise

    def folder_of(self, table: TableRecord) -> str | None:
        """The table's folder; None if only its catalog knows it. Raises InvalidArgument for an invalid record."""
        return _folder(table, check_options(table.options, "iceberg"))

    def of_catalog(self, table: TableRecord) -> bool:
        return self.folder_of(table) is None

    def catalog_entry(self, table: TableRecord, check: Callable[[], None]) -> CatalogEntry | None:
        """The entry in a catalog that has one: the folder of a catalog of type ``hadoop`` is the entry."""
        from distop.tables.iceberg.iceberg_entry import IcebergEntry

        return IcebergEntry(table, check) if self.of_catalog(table) else None

    def recorded_place(self, table: TableRecord) -> str:
        return self.folder_of(table) or check_options(table.options, "iceberg").folder

    def asks_server(self, record: TableRecord) -> bool:
        return "catalog" in record.options

    def has_source(self, table: TableRecord) -> bool:
        return True

    def lies_at(self, location: Location) -> bool:
        return any(name.endswith(".metadata.json") for name in location.names_in(METADATA))

    def reachability(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, source: str = ""
    ) -> Reachability:
        """All snapshots of the current metadata file, or of ``source``. Raises InvalidArgument and TableUnavailable."""
        from distop.tables.iceberg.iceberg_reachability import IcebergReachability

        options = check_options(table.options, "iceberg")
        found = source or _current(table, options, check)
        return IcebergReachability.of(found, check, hint=_folder(table, options) is not None)

    def pinned_files(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, version: str = ""
    ) -> PinnedFiles:
        """The data files of a snapshot. ``version``: its id, or the name of a branch or a tag; "": of the main branch.

        Raises InvalidArgument for an unknown version, and the errors of :meth:`reachability`.
        """
        from distop.tables.iceberg.iceberg_reachability import snapshot_files

        return snapshot_files(self.reachability(table, check, spark), table.name, version)

    def table_copy(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, version: str = "", source: str = ""
    ) -> TableCopy:
        from distop.tables.iceberg.iceberg_copy import IcebergCopy
        from distop.tables.iceberg.iceberg_reachability import IcebergReachability

        options = check_options(table.options, "iceberg")
        found = IcebergReachability.of(source or _current(table, options, check), check, hint=False)
        return IcebergCopy(found, table.name, version, check)

    def expiration(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Expiration:
        """The snapshots of the current metadata file. Also raises InvalidArgument if ``gc.enabled`` is false."""
        from distop.tables.iceberg.iceberg_expiration import IcebergExpiration
        from distop.tables.iceberg.iceberg_reachability import IcebergReachability

        options = check_options(table.options, "iceberg")
        by_catalog = _folder(table, options) is None
        found = IcebergReachability.of(_current(table, options, check), check, hint=not by_catalog)
        return IcebergExpiration(table, found, check, by_catalog=by_catalog)

    def replacer(self, table: TableRecord, ctx: ReplacementContext) -> FileReplacer:
        from distop.tables.iceberg.iceberg_replacer import IcebergReplacer

        return IcebergReplacer(table, ctx, by_catalog=self.changes(table).by_catalog)

    def data_folder(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        from distop.tables.iceberg.iceberg_fields import local_path

        place = self.place_of(table, check, spark).rstrip("/")
        return f"{local_path(place) or place}/data"

    def partition_removal(
        self, table: TableRecord, context: CommitContext, check: Callable[[], None]
    ) -> PartitionRemoval:
        """The current snapshot. Raises InvalidArgument and TableUnavailable."""
        from distop.tables.iceberg.iceberg_partition_removal import IcebergPartitionRemoval

        by_catalog = _folder(table, check_options(table.options, "iceberg")) is None
        return IcebergPartitionRemoval(table, context, check, by_catalog=by_catalog)

    def changes(self, table: TableRecord) -> Changes:
        return Changes(check_options(table.options, "iceberg").catalog)


def _folder(table: TableRecord, options: TableOptions) -> str | None:
    """The table's folder; None if only its catalog knows it."""
    if options.catalog is None:
        return table.location
    name = iceberg_catalogs.identifier(table)
    warehouse = options.catalog.warehouse()
    if warehouse is None:
        return None
    folder = "/".join((warehouse, *name))
    check_folder(folder, options.folder)
    return folder


def _current(table: TableRecord, options: TableOptions, check: Callable[[], None]) -> str:
    """The current metadata file. Raises InvalidArgument and TableUnavailable."""
    folder = _folder(table, options)
    if folder is not None:
        return current_metadata_file(Location.of(folder))
    with iceberg_catalogs.opened(table, check) as found:
        return found.source


FORMAT = IcebergFormat()
