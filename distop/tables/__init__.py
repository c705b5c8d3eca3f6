"""Tables: what ``distop table add`` accepts, how a table is split into partitions, and how their files are read.

A format (:mod:`distop.tables.formats`) plans tables, and has the :class:`~distop.tables.reader.Reader` of their files.
It is loaded when a table of it is met. Nothing else asks for a format by its name, or by what its plans have: what a
reader needs stands in the plan (``PartitionPlan.source``, ``Planned.options``), and only its format looks at it.

Nothing here imports PySpark, which a client has no need of. A format that asks Spark is given the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.protocol.texts import shown
from distop.storage.storage_urls import check_paths, check_place
from distop.tables.formats import OWN, format_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.protocol.plan import PartitionPlan, Pinned, Planned
    from distop.tables.formats import Changes
    from distop.tables.reader import Reader

__all__ = [
    "Spark",
    "changes_of",
    "check_reachable",
    "check_table",
    "check_within_limit",
    "folders_of",
    "has_source",
    "of_catalog",
    "place_of",
    "plan_table",
    "reader_of",
    "readers_of",
    "record_at",
    "registered_types",
]

LONGEST_LOOK = 300.0
"""Seconds for which a job waits for a table's location to show anything: a disk of a server that is away may hang."""

Spark = Callable[[], Any]
"""Gives the Spark session, which is made when it is first asked for."""


def check_table(record: TableRecord) -> TableRecord:
    """The record as it is to be stored: its location absolute, where it is a folder.

    Raises InvalidArgument, naming it, for an unknown format or option, for a location that cannot be opened, does not
    exist, or holds no table of the format, and for a catalog that does not have the table; not naming it, for a
    location that is not allowed (storage_urls). Of a table of Spark's catalog the record alone is judged: there may be
    no Spark here.
    """
    check_place("the location of a table", record.location)
    return format_of(record).check_table(record)


async def check_within_limit(record: TableRecord) -> TableRecord:
    """:func:`check_table` with a time limit of ``time_limit.LIMIT`` seconds.

    A location may hang, block this process's signals, or abort the process that opens it. So a location that is not a
    local path is opened by a separate process.

    Raises InvalidArgument as :func:`check_table` does, and where the location does not answer.
    """
    from distop.runtime import time_limit
    from distop.tables.iceberg.iceberg_catalogs import PATIENCE

    check_place("the location of a table", record.location)
    # A catalog has a time limit of its own, after which its error names it.
    limit = time_limit.LIMIT + (PATIENCE if "catalog" in record.options else 0.0)
    where = f"the location {shown(record.location)}"
    try:
        if _is_remote(record) and time_limit.runs_python():
            checked = await time_limit.in_process("distop.tables:check_json", record.to_json(), limit)
            return TableRecord.from_json(checked)
        return await time_limit.in_thread(lambda: check_table(record), limit)
    except time_limit.TimeLimitExceeded:
        raise InvalidArgument(
            f"{where} has not answered for {limit:g} s: check its address, the network, and the credentials "
            "that this machine has for it"
        ) from None
    except time_limit.Aborted as error:
        raise InvalidArgument(f"{where} cannot be opened: {error}") from None


def check_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """:func:`check_table` for a record as JSON."""
    return check_table(TableRecord.from_json(record)).to_json()


def _is_remote(record: TableRecord) -> bool:
    url = "://" in record.location and not record.location.lower().startswith("file://")
    return url or format_of(record).asks_server(record)


def _no_spark() -> Any:
    raise InvalidArgument("tables of Spark's catalog are planned where there is a Spark: in an executor")


def plan_table(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> Planned:
    """Freeze the table's partitions with their files. ``check`` is called now and then, and raises where that is to
    stop.

    Raises InvalidArgument for what is no table of its format, or lies where data may not send anybody (storage_urls),
    TableUnavailable where it cannot be reached from here.
    """
    check_place("the location of a table", table.location)
    planned = format_of(table).plan_table(table, check, spark)
    check_paths(path for partition in planned.partitions for path, _, _ in partition.files)
    return planned


def check_reachable(table: TableRecord, spark: Spark = _no_spark) -> None:
    """Raises TableUnavailable where nothing of the table can be seen from here, or its location hangs: then the thread
    that waits is abandoned. Not to be called where an event loop runs.
    """
    import asyncio

    from distop.runtime import time_limit

    check_place("the location of a table", table.location)
    try:
        asyncio.run(time_limit.in_thread(lambda: format_of(table).check_reachable(table, spark), LONGEST_LOOK))
    except time_limit.TimeLimitExceeded:
        raise TableUnavailable(f"{shown(table.location)} has not answered for {LONGEST_LOOK:g} s") from None


def place_of(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> str:
    """The folder that is the table's own, where its data lies unless somebody has put it elsewhere: a path or a URL.
    Raises as planning does.
    """
    return format_of(table).place_of(table, check, spark)


def folders_of(
    table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark, *, elsewhere: bool = False
) -> tuple[str, ...]:
    """The folders that the files of a plan lie in; of an Iceberg table its metadata files, which name the others.
    ``elsewhere``: with those of partitions that the catalog has elsewhere. Raises as planning does.
    """
    return format_of(table).folders_of(table, check, spark, elsewhere=elsewhere)


def of_catalog(table: TableRecord) -> bool:
    """Whether only a catalog knows where the table lies."""
    return format_of(table).of_catalog(table)


def has_source(table: TableRecord) -> bool:
    """Whether plans of the table may name what its files are read through (``PartitionPlan.source``)."""
    return format_of(table).has_source(table)


def registered_types(table: TableRecord) -> dict[str, str]:
    """The types of partition columns that a table was registered with."""
    return dict(table.options.get("partition_types") or {})


def changes_of(table: TableRecord) -> Changes:
    """How the schema of this table is changed. Raises InvalidArgument where there is none to change, or not so."""
    return format_of(table).changes(table)


def reader_of(table: TableRecord, plans: Sequence[PartitionPlan | Pinned]) -> Reader:
    """The reader of the files of these plans, which one planning has made. ``table``: with the options that it found.
    Raises InvalidArgument for plans that were made of several states of the table.
    """
    if len({plan.source for plan in plans}) > 1:
        raise InvalidArgument(f"partitions of {table.name!r} were planned of several states of it: start anew")
    return format_of(table).reader(table, plans)


def readers_of(table: TableRecord, plans: Sequence[PartitionPlan]) -> Iterator[tuple[Reader, list[PartitionPlan]]]:
    """The readers of plans that may be of several states of a table, each with its plans, in their order."""
    found: dict[str, list[PartitionPlan]] = {}
    for plan in plans:
        found.setdefault(plan.source, []).append(plan)
    for mine in found.values():
        yield reader_of(table, mine), mine


def record_at(text: str) -> TableRecord:
    """A record for the table in a folder, of the format that the folder shows. Raises as registering it would."""
    from distop.storage.location import Location

    location = Location.of(text)
    name = next((one for one in OWN if format_of(TableRecord("table", one, text)).lies_at(location)), "parquet")
    return TableRecord("table", name, location.text)
