"""Tables: checks of table records, planning into partitions, and readers of their files.

A format (:mod:`distop.tables.formats`) plans tables and provides the :class:`~distop.tables.reader.Reader` of their
files. It is imported when a table of the format is used. Other code does not depend on a format's name or its plans:
what a reader needs is in the plan (``PartitionPlan.source``, ``Planned.options``), and only its format reads that.

No module here imports PySpark, which clients do not need. A format that needs Spark gets the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.protocol.texts import shown
from distop.storage import storage_options
from distop.storage.storage_urls import check_paths, check_place
from distop.tables.formats import OWN, format_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distop.protocol.plan import PartitionPlan, Pinned, Planned
    from distop.tables.catalog_entry import CatalogEntry
    from distop.tables.commits import CommitContext, FileReplacer, ReplacementContext
    from distop.tables.expiration import Expiration
    from distop.tables.formats import Changes
    from distop.tables.partition_removal import PartitionRemoval
    from distop.tables.pinned_files import PinnedFiles
    from distop.tables.reachability import Reachability
    from distop.tables.reader import Reader
    from distop.tables.statistics import TableStatistics
    from distop.tables.table_copy import TableCopy

__all__ = [
    "Spark",
    "catalog_entry_of",
    "changes_of",
    "check_reachable",
    "check_table",
    "check_within_limit",
    "data_folder_of",
    "expiration_of",
    "folders_of",
    "has_source",
    "of_catalog",
    "partition_removal_of",
    "pinned_files_of",
    "place_of",
    "plan_table",
    "reachability_of",
    "reader_of",
    "readers_of",
    "record_at",
    "recorded_place_of",
    "registered_types",
    "replacer_of",
    "statistics_of",
    "table_copy_of",
]

LOCATION_TIMEOUT = 300.0
"""Time-out in seconds for a table's location: a network disk whose server is down may hang."""

Spark = Callable[[], Any]
"""Returns the Spark session, which is started on the first call."""


def check_table(record: TableRecord) -> TableRecord:
    """Check a record; returns the record to store, with an absolute location if it is a folder.

    Raises InvalidArgument, with the name, for an unknown format or option, a location that cannot be opened, does not
    exist or has no table of the format, and for a catalog without the table; without the name, for a location that is
    not allowed (storage_urls). For a table of Spark's catalog only the record is checked: there may be no Spark here.
    """
    check_place("the location of a table", record.location)
    return format_of(record).check_table(record)


async def check_within_limit(record: TableRecord) -> TableRecord:
    """:func:`check_table` with a time limit of ``time_limit.LIMIT`` seconds.

    A location may hang, block this process's signals, or abort the process that opens it. So a location that is not a
    local path is opened by a separate process.

    Raises InvalidArgument like :func:`check_table`, and if the location does not answer.
    """
    from distop.runtime import time_limit
    from distop.tables.iceberg.iceberg_catalogs import ANSWER_TIMEOUT

    check_place("the location of a table", record.location)
    # A catalog has its own time limit; its error names the catalog.
    limit = time_limit.LIMIT + (ANSWER_TIMEOUT if "catalog" in record.options else 0.0)
    where = f"the location {shown(record.location)}"
    asked = {"table": record.to_json(), "storage": storage_options.as_given(storage_options.configuration())}
    try:
        if _is_remote(record) and time_limit.runs_python():
            checked = await time_limit.in_process("distop.tables:check_json", asked, limit)
            return TableRecord.from_json(checked)
        return await time_limit.in_thread(lambda: check_table(record), limit)
    except time_limit.TimeLimitExceeded:
        raise InvalidArgument(
            f"{where} did not answer within {limit:g} s: check its address, the network, and this machine's "
            "credentials for it"
        ) from None
    except time_limit.Aborted as error:
        raise InvalidArgument(f"cannot open {where}: {error}") from None


def check_json(asked: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`check_table` in a new process: of ``table``, with the configuration ``storage``, as JSON."""
    storage_options.configure(storage_options.read_settings(asked["storage"]))
    return check_table(TableRecord.from_json(asked["table"])).to_json()


def _is_remote(record: TableRecord) -> bool:
    url = "://" in record.location and not record.location.lower().startswith("file://")
    return url or format_of(record).asks_server(record)


def _no_spark() -> Any:
    raise InvalidArgument("planning a table of Spark's catalog needs Spark: only executors can do it")


def plan_table(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> Planned:
    """Plan a table: its current partitions with their files.

    ``check`` is called regularly, and raises to stop the planning. Raises InvalidArgument if the location has no table
    of the format, or is not allowed (storage_urls), TableUnavailable if it cannot be reached from here.
    """
    check_place("the location of a table", table.location)
    planned = format_of(table).plan_table(table, check, spark)
    check_paths(path for partition in planned.partitions for path, _, _ in partition.files)
    return planned


def statistics_of(
    table: TableRecord, names: Collection[str], small_bytes: int, check: Callable[[], None] = lambda: None
) -> TableStatistics:
    """The table's version, and these statistics (``Format.statistics``). Raises its errors."""
    check_place("the location of a table", table.location)
    return format_of(table).statistics(table, names, small_bytes, check)


def check_reachable(table: TableRecord, spark: Spark = _no_spark) -> None:
    """Raises TableUnavailable if nothing of the table can be read from here, or its location hangs.

    If it hangs, the waiting thread is abandoned. Do not call it in a thread with a running event loop.
    """
    import asyncio

    from distop.runtime import time_limit

    check_place("the location of a table", table.location)
    try:
        asyncio.run(time_limit.in_thread(lambda: format_of(table).check_reachable(table, spark), LOCATION_TIMEOUT))
    except time_limit.TimeLimitExceeded:
        raise TableUnavailable(f"{shown(table.location)} did not answer within {LOCATION_TIMEOUT:g} s") from None


def place_of(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> str:
    """The table's own folder, a path or a URL, which has its data by default. Raises the errors of planning."""
    return format_of(table).place_of(table, check, spark)


def folders_of(
    table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark, *, elsewhere: bool = False
) -> tuple[str, ...]:
    """The folders of a plan's files; for an Iceberg table, of its metadata files, which name the other files.

    ``elsewhere``: also the folders of partitions that the catalog has in other locations. Raises the errors of
    planning.
    """
    return format_of(table).folders_of(table, check, spark, elsewhere=elsewhere)


def of_catalog(table: TableRecord) -> bool:
    """Whether only a catalog knows the table's location."""
    return format_of(table).of_catalog(table)


def catalog_entry_of(table: TableRecord, check: Callable[[], None] = lambda: None) -> CatalogEntry | None:
    """The table's entry in its catalog; None for a table that is known by its folder.

    Raises InvalidArgument if the entry cannot be removed, and the errors of planning.
    """
    return format_of(table).catalog_entry(table, check)


def recorded_place_of(table: TableRecord) -> str:
    """The table's own folder if its record has it, "" otherwise. Raises InvalidArgument and TableUnavailable."""
    check_place("the location of a table", table.location)
    return format_of(table).recorded_place(table)


def has_source(table: TableRecord) -> bool:
    """Whether plans of the table may have a source: a file through which its files are read."""
    return format_of(table).has_source(table)


def registered_types(table: TableRecord) -> dict[str, str]:
    """The types of partition columns in a table's registration."""
    return dict(table.options.get("partition_types") or {})


def changes_of(table: TableRecord) -> Changes:
    """How the table's schema can be changed. Raises InvalidArgument if it cannot be changed."""
    return format_of(table).changes(table)


def reachability_of(
    table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark, *, source: str = ""
) -> Reachability:
    """The files that the table's metadata reach. ``source``: those of an earlier state (``Reachability.source``).

    Raises the errors of planning, and InvalidArgument if the table's format cannot tell.
    """
    check_place("the location of a table", table.location)
    return format_of(table).reachability(table, check, spark, source=source)


def expiration_of(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> Expiration:
    """The table's current state, for the removal of old versions. Raises the errors of :func:`reachability_of`."""
    check_place("the location of a table", table.location)
    return format_of(table).expiration(table, check, spark)


def replacer_of(table: TableRecord, ctx: ReplacementContext, *, swap: bool = False) -> FileReplacer:
    """How data files of the table are replaced by others with the same rows. Raises InvalidArgument if they cannot."""
    found = format_of(table)
    return found.swapper(table, ctx) if swap else found.replacer(table, ctx)


def pinned_files_of(
    table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark, *, version: str = ""
) -> PinnedFiles:
    """The data files of a version of the table: of the current one, or of ``version``.

    Raises the errors of planning, and InvalidArgument for an unknown version.
    """
    check_place("the location of a table", table.location)
    found = format_of(table).pinned_files(table, check, spark, version=version)
    check_paths(path for path, _, _ in found.files)
    return found


def table_copy_of(
    table: TableRecord,
    check: Callable[[], None] = lambda: None,
    spark: Spark = _no_spark,
    *,
    version: str = "",
    source: str = "",
) -> TableCopy | None:
    """A version of the table to be copied with its metadata; None if a table is its files, without metadata.

    ``source``: of an earlier one. Raises the errors of :func:`pinned_files_of`, and InvalidArgument if it cannot be
    copied.
    """
    check_place("the location of a table", table.location)
    found = format_of(table).table_copy(table, check, spark, version=version, source=source)
    if found is not None:
        check_paths(path for path, _, _ in found.pinned.files)
    return found


def data_folder_of(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> str:
    """The folder of the table's data, below which new files are staged. Raises the errors of planning."""
    return format_of(table).data_folder(table, check, spark)


def partition_removal_of(
    table: TableRecord, context: CommitContext, check: Callable[[], None] = lambda: None
) -> PartitionRemoval:
    """The table's current state, for the removal of whole partitions. Raises the errors of planning."""
    check_place("the location of a table", table.location)
    return format_of(table).partition_removal(table, context, check)


def reader_of(table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
    """The reader of the files of plans from one planning. ``table``: with the options of the plan.

    Raises InvalidArgument for plans of different states of the table.
    """
    if len({plan.source for plan in plans}) > 1:
        raise InvalidArgument(
            f"partitions of {table.name!r} were planned from different states of the table: start the operation again"
        )
    return format_of(table).reader(table, plans)


def readers_of(table: TableRecord, plans: Sequence[PartitionPlan]) -> Iterator[tuple[Reader, list[PartitionPlan]]]:
    """The readers of plans that may be from different states of a table, each with its plans in order."""
    found: dict[str, list[PartitionPlan]] = {}
    for plan in plans:
        found.setdefault(plan.source, []).append(plan)
    for mine in found.values():
        yield reader_of(table, mine), mine


def record_at(text: str) -> TableRecord:
    """A record for the table in a folder, with the format that the folder shows. Raises like a registration."""
    from distop.storage.location import Location

    location = Location.of(text)
    name = next((one for one in OWN if format_of(TableRecord("table", one, text)).lies_at(location)), "parquet")
    return TableRecord("table", name, location.text)
