"""The format of Delta Lake tables, which are given by their folder and planned from their log, without a JVM.

The plan has the commit file of the newest version, which fixes files, deleted rows and schema, independent of later
commits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.texts import shown
from distop.storage.location import Location, root_of
from distop.tables.delta import delta_plan
from distop.tables.delta.delta_log import current_snapshot, current_version, snapshot_of
from distop.tables.delta.metadata_commit import configuration
from distop.tables.delta.table_paths import LOG, parse_source, source_of
from distop.tables.formats import Changes, Format
from distop.tables.pinned_files import PinnedFiles
from distop.tables.reading.file_facts import Gone
from distop.tables.table_options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from distop.protocol.plan import PartitionPlan, Pinned, Planned
    from distop.protocol.records import TableRecord
    from distop.tables.commits import CommitContext, FileReplacer, ReplacementContext
    from distop.tables.delta.delta_log import DeltaSnapshot
    from distop.tables.expiration import Expiration
    from distop.tables.formats import Spark
    from distop.tables.partition_removal import PartitionRemoval
    from distop.tables.reachability import Reachability
    from distop.tables.reader import Reader
    from distop.tables.statistics import TableStatistics
    from distop.tables.table_copy import TableCopy


class DeltaFormat(Format):
    """Delta tables, by their folder."""

    def check_table(self, record: TableRecord) -> TableRecord:
        """Check a record; returns the record to store.

        Raises InvalidArgument, with the name, for an unknown option, a location that cannot be opened, does not exist
        or has no Delta table, and for a table with a reader feature that is not known.
        """
        check_options(record.options, "delta")
        try:
            location = Location.of(record.location)
            current_snapshot(location)
        except TableUnavailable as error:
            raise InvalidArgument(str(error)) from error
        return replace(record, location=location.text)

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned:
        """Plan the newest version.

        Raises InvalidArgument if there is no Delta table, its log is invalid, or it uses an unknown reader feature;
        TableUnavailable if the log cannot be read.
        """
        options = check_options(table.options, "delta")
        return delta_plan.plan(current_snapshot(Location.of(table.location), check), options)

    def reader(self, table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
        """The reader for plans of one version. Raises InvalidArgument for a plan of another table."""
        from distop.tables.delta.delta_reader import DeltaReader

        source = plans[0].source if plans else ""
        if not source:
            raise InvalidArgument(f"the plan of {table.name!r} has no version, so it is not a plan of this table")
        if parse_source(source)[0] != root_of(table.location):
            raise InvalidArgument(f"the plan of {table.name!r} names the commit file of another table")
        return DeltaReader(table, plans, source)

    def statistics(
        self, table: TableRecord, names: Collection[str], small_bytes: int, check: Callable[[], None]
    ) -> TableStatistics:
        """The statistics of the newest version (``table_statistics``)."""
        from distop.tables.delta.table_statistics import statistics

        check_options(table.options, "delta")
        return statistics(Location.of(table.location), names, small_bytes, check)

    def check_reachable(self, table: TableRecord, spark: Spark) -> None:
        """Raises TableUnavailable if there is no table at the location: it was dropped, or its disk is missing."""
        try:
            current_version(Location.of(table.location))
        except InvalidArgument as error:
            raise TableUnavailable(
                f"there is no Delta table at {table.location!r}: it was dropped, or its disk is not mounted here"
            ) from error

    def has_source(self, table: TableRecord) -> bool:
        return True

    def lies_at(self, location: Location) -> bool:
        return bool(location.names_in(LOG))

    def reachability(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, source: str = ""
    ) -> Reachability:
        """All that the log names at its newest version, or at ``source``. Raises InvalidArgument and TableUnavailable.

        Also raises InvalidArgument for a table that may have files which its log does not name.
        """
        from distop.tables.delta.delta_reachability import DeltaReachability

        check_options(table.options, "delta")
        return DeltaReachability.of(source or current_snapshot(Location.of(table.location), check).source, check)

    def expiration(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Expiration:
        """The newest version, whose removed files can be deleted. Raises the errors of :meth:`reachability`."""
        from distop.tables.delta.delta_expiration import DeltaExpiration

        check_options(table.options, "delta")
        return DeltaExpiration(current_snapshot(Location.of(table.location), check), check)

    def partition_removal(
        self, table: TableRecord, context: CommitContext, check: Callable[[], None]
    ) -> PartitionRemoval:
        """The newest version. Raises InvalidArgument, also if its rows may not be deleted, and TableUnavailable."""
        from distop.tables.delta.delta_partition_removal import DeltaPartitionRemoval

        check_options(table.options, "delta")
        return DeltaPartitionRemoval(table, context)

    def pinned_files(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, version: str = ""
    ) -> PinnedFiles:
        """The data files of a version. ``version``: its number; "": the newest one.

        Raises InvalidArgument for a version that the log does not have, and the errors of planning.
        """
        check_options(table.options, "delta")
        snapshot = _snapshot(table, version, check)
        files = [(file.path, file.size, 0) for file in snapshot.files.values()]
        vectors = any(file.vector for file in snapshot.files.values())
        needs = "its version has deleted rows, which are in deletion vectors" if vectors else ""
        if configuration(snapshot).get("delta.columnMapping.mode", "none") != "none":
            needs = "its columns have other names in its files (column mapping)"
        return PinnedFiles(snapshot.root, str(snapshot.version), files, needs)

    def table_copy(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, version: str = "", source: str = ""
    ) -> TableCopy:
        from distop.tables.delta.delta_copy import DeltaCopy

        check_options(table.options, "delta")
        return DeltaCopy(snapshot_of(source, check) if source else _snapshot(table, version, check), check)

    def changes(self, table: TableRecord) -> Changes:
        return Changes(None, delta=True)

    def replacer(self, table: TableRecord, ctx: ReplacementContext) -> FileReplacer:
        from distop.tables.delta.delta_replacer import DeltaReplacer

        return DeltaReplacer(table, ctx)

    def data_folder(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str:
        return root_of(table.location)


def _snapshot(table: TableRecord, version: str, check: Callable[[], None]) -> DeltaSnapshot:
    """A version of the table by its number; "": the newest one. Raises InvalidArgument if there is no such version."""
    location = Location.of(table.location)
    newest = current_snapshot(location, check)
    if version in ("", str(newest.version)):
        return newest
    if version.isascii() and version.isdigit() and int(version) < newest.version:
        try:
            return snapshot_of(source_of(location.text, int(version)), check)
        except Gone as error:
            raise InvalidArgument(str(error)) from error
    raise InvalidArgument(
        f"the Delta table {table.name!r} has no version {shown(version)}: a version is a number up to {newest.version}"
    )


FORMAT = DeltaFormat()
