"""Tables: what ``distop table add`` accepts, and how a table is split into partitions.

Each format is a module with the functions of :class:`Format`, loaded when a table of it is met: ``parquet`` (folders of
files), ``iceberg``, and ``spark`` (what Spark's catalog has). Another one (Delta) is a module beside them, its name in
``options.FORMATS``, its options in ``options``, and its place in :func:`_format`. Nothing else asks for a format by its
name: what a job needs to read the files stands in the plan (``PartitionPlan.source``, ``Planned.options``).

Nothing here imports PySpark, which a client has no need of. A format that asks Spark is given the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from distop.core.model import TableRecord
from distop.core.texts import shown
from distop.errors import InvalidArgument, TableUnavailable
from distop.storage_urls import check_paths, check_place
from distop.tables.options import FORMATS

if TYPE_CHECKING:
    from distop.core.plan import Planned

__all__ = [
    "FORMATS",
    "Spark",
    "check_reachable",
    "check_table",
    "check_within_limit",
    "folders_of",
    "of_catalog",
    "place_of",
    "plan_table",
]

LONGEST_LOOK = 300.0
"""Seconds for which a job waits for a table's location to show anything: a disk of a server that is away may hang."""

Spark = Callable[[], Any]
"""Gives the Spark session, which is made when it is first asked for."""


class Format(Protocol):
    """What a module of a format offers: the five functions below, for tables of its format."""

    def check_table(self, record: TableRecord) -> TableRecord: ...

    def plan_table(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> Planned: ...

    def check_reachable(self, table: TableRecord, spark: Spark) -> None: ...

    def place_of(self, table: TableRecord, check: Callable[[], None], spark: Spark) -> str: ...

    def folders_of(
        self, table: TableRecord, check: Callable[[], None], spark: Spark, *, elsewhere: bool
    ) -> tuple[str, ...]: ...


def check_table(record: TableRecord) -> TableRecord:
    """The record as it is to be stored: its location absolute, where it is a folder.

    Raises InvalidArgument, naming it, for an unknown format or option, for a location that cannot be opened, does not
    exist, or holds no table of the format, and for a catalog that does not have the table; not naming it, for a
    location that is not allowed (storage_urls). Of a table of Spark's catalog the record alone is judged: there may be
    no Spark here.
    """
    check_place("the location of a table", record.location)
    return _format(record).check_table(record)


async def check_within_limit(record: TableRecord) -> TableRecord:
    """:func:`check_table` with a time limit of ``time_limit.LIMIT`` seconds.

    A location may hang, block this process's signals, or abort the process that opens it. So a location that is not a
    local path is opened by a separate process.

    Raises InvalidArgument as :func:`check_table` does, and where the location does not answer.
    """
    from distop import time_limit
    from distop.tables.catalogs import PATIENCE

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
    return url or (record.format == "iceberg" and "catalog" in record.options)


def _no_spark() -> Any:
    raise InvalidArgument("tables of Spark's catalog are planned where there is a Spark: in an executor")


def plan_table(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> Planned:
    """Freeze the table's partitions with their files. ``check`` is called now and then, and raises where that is to
    stop.

    Raises InvalidArgument for what is no table of its format, or lies where data may not send anybody (storage_urls),
    TableUnavailable where it cannot be reached from here.
    """
    check_place("the location of a table", table.location)
    planned = _format(table).plan_table(table, check, spark)
    check_paths(path for partition in planned.partitions for path, _, _ in partition.files)
    return planned


def check_reachable(table: TableRecord, spark: Spark = _no_spark) -> None:
    """Raises TableUnavailable where nothing of the table can be seen from here, or its location hangs: then the thread
    that waits is abandoned. Not to be called where an event loop runs.
    """
    import asyncio

    from distop import time_limit

    check_place("the location of a table", table.location)
    try:
        asyncio.run(time_limit.in_thread(lambda: _format(table).check_reachable(table, spark), LONGEST_LOOK))
    except time_limit.TimeLimitExceeded:
        raise TableUnavailable(f"{shown(table.location)} has not answered for {LONGEST_LOOK:g} s") from None


def place_of(table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark) -> str:
    """The folder that is the table's own, where its data lies unless somebody has put it elsewhere: a path or a URL.
    Raises as planning does.
    """
    return _format(table).place_of(table, check, spark)


def folders_of(
    table: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark = _no_spark, *, elsewhere: bool = False
) -> tuple[str, ...]:
    """The folders that the files of a plan lie in; of an Iceberg table its metadata files, which name the others.
    ``elsewhere``: with those of partitions that the catalog has elsewhere. Raises as planning does.
    """
    return _format(table).folders_of(table, check, spark, elsewhere=elsewhere)


def of_catalog(table: TableRecord) -> bool:
    """Whether only a catalog knows where the table lies."""
    from distop.tables import iceberg

    return table.format == "spark" or (table.format == "iceberg" and iceberg.folder_of(table) is None)


def _format(record: TableRecord) -> Format:
    if record.format == "parquet":
        from distop.tables import parquet

        return parquet
    if record.format == "iceberg":
        from distop.tables import iceberg

        return iceberg
    if record.format == "spark":
        from distop.tables import spark

        return spark
    raise InvalidArgument(
        f"the format {shown(record.format)} of table {shown(record.name)} is not known (known: {', '.join(FORMATS)})"
    )
