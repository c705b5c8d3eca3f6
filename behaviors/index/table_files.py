"""The files of a table as they are now, whatever its format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.behavior import TableRecord
from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen
from distop.storage.files import local_path
from distop.storage.location import Location
from distop.tables import Spark, place_of, plan_table, reader_of, record_at
from distop.tables.reading.file_facts import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.behavior import PartitionPlan
    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import PlannedFile, SparkType


@frozen
class Listed:
    """A listing. ``files``: what an index calls each, and the file; ``reader``: of all of them; ``paths``: the columns
    of partitions that are in no file, with their types; ``options``: what planning found.
    """

    root: str
    version: str
    partitions: Sequence[PartitionPlan]
    files: Mapping[str, PlannedFile]
    reader: Reader
    paths: Mapping[str, str]
    options: Mapping[str, Any]

    def columns(self) -> Mapping[str, SparkType] | None:
        """The table's columns, where its metadata or its catalog tell them; None where its files do. Raises
        TableUnavailable.
        """
        return self.reader.columns()


def root_of(record: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark | None = None) -> str:
    """The folder beside whose data the index lies. Raises InvalidArgument where that is not a local path, and as
    planning does.
    """
    place = place_of(record, check, spark) if spark is not None else place_of(record, check)
    location = Location.of(str(local_path(place) or place))
    if location.filesystem is not None:
        raise InvalidArgument(
            f"the table at {place!r} cannot have an index yet: it takes a local path, or a file system that all nodes "
            "have mounted under it"
        )
    return location.root


def listed(record: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark | None = None) -> Listed:
    """The table as it is now. ``spark`` gives the session, which tables of Spark's catalog need. Raises InvalidArgument
    and TableUnavailable, as planning does.
    """
    root = root_of(record, check, spark)
    planned = plan_table(record, check, spark) if spark is not None else plan_table(record, check)
    files = {name_of(f[0], root): f for p in planned.partitions for f in p.files}
    reader = reader_of(record.extended(planned.options), planned.partitions)
    return Listed(root, planned.version, planned.partitions, files, reader, reader.partition_columns(), planned.options)


def name_of(path: str, root: str) -> str:
    """What an index calls a file: its path below the table, else the whole path."""
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else path


def escaped(name: str) -> str:
    """A file's name as it is told: bytes that are not UTF-8 are spelled out. Any other name is as it was."""
    return name.encode(errors="backslashreplace").decode()


def identities(reader: Reader, columns: Sequence[str]) -> Mapping[str, int | str] | None:
    """What the columns are told by from others that have their names some day; None where nothing does. Raises
    InvalidArgument for a column that the table does not have or that cannot be indexed, TableUnavailable where its
    metadata are gone.
    """
    found: dict[str, int | str] = {}
    for column in columns:
        try:
            own = reader.identities([column])
        except Unreadable as why:
            raise InvalidArgument(f"the column {column!r} cannot be indexed: {why}") from None
        if own is None:
            return None
        found |= own
    return found


def ids_now(table: Listed, columns: Sequence[str]) -> Mapping[str, int | str] | None:
    """As :func:`identities`, but empty where the table does not have all of the columns any more: what was indexed is
    theirs no longer. Raises TableUnavailable.
    """
    try:
        return identities(table.reader, columns)
    except InvalidArgument:
        return {}


def record_of(table: Any) -> TableRecord:
    """The record of a table that a lookup is given: itself, or one made for a location."""
    return table if isinstance(table, TableRecord) else record_at(str(table))
