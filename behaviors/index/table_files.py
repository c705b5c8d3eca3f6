"""The current files of a table of any format."""

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
class CurrentTable:
    """The current state of a table.

    ``files``: by the name that an index uses. ``reader``: reads all of them. ``paths``: the partition columns that are
    only in paths, with their types. ``options``: options that planning has determined.
    """

    root: str
    version: str
    partitions: Sequence[PartitionPlan]
    files: Mapping[str, PlannedFile]
    reader: Reader
    paths: Mapping[str, str]
    options: Mapping[str, Any]

    def columns(self) -> Mapping[str, SparkType] | None:
        """The columns from the table's metadata or catalog; None if only its files have them.

        Raises TableUnavailable.
        """
        return self.reader.columns()


def root_of(record: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark | None = None) -> str:
    """The table's folder, a path or URL, which also has its indexes. Raises the errors of planning."""
    place = place_of(record, check, spark) if spark is not None else place_of(record, check)
    location = Location.of(str(local_path(place) or place))
    return location.root if location.filesystem is None else location.text


def current_table(
    record: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark | None = None
) -> CurrentTable:
    """The current state of the table. Raises the errors of planning: InvalidArgument and TableUnavailable.

    ``spark``: returns the session, for tables of Spark's catalog.
    """
    root = root_of(record, check, spark)
    planned = plan_table(record, check, spark) if spark is not None else plan_table(record, check)
    files = {name_of(f[0], root): f for p in planned.partitions for f in p.files}
    reader = reader_of(record.extended(planned.options), planned.partitions)
    return CurrentTable(
        root, planned.version, planned.partitions, files, reader, reader.partition_columns(), planned.options
    )


def name_of(path: str, root: str) -> str:
    """The name of a file in an index: its path below the table, or the whole path if it is elsewhere."""
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else path


def escaped(name: str) -> str:
    """A file's name for reports: bytes that are not UTF-8 are escaped. Other names are unchanged."""
    return name.encode(errors="backslashreplace").decode()


def identities(reader: Reader, columns: Sequence[str]) -> Mapping[str, int | str] | None:
    """The identities of columns, which change if a column is replaced by another of its name.

    None if the format has none. Raises InvalidArgument for a column that the table does not have or that cannot be
    indexed, TableUnavailable if the table's metadata is gone.
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


def ids_now(table: CurrentTable, columns: Sequence[str]) -> Mapping[str, int | str] | None:
    """Like :func:`identities`, but empty if the table no longer has all columns. Raises TableUnavailable."""
    try:
        return identities(table.reader, columns)
    except InvalidArgument:
        return {}


def record_of(table: Any) -> TableRecord:
    """The record of a table: the argument itself, or a new record for a location."""
    return table if isinstance(table, TableRecord) else record_at(str(table))
