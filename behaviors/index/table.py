"""The files of a table as they are now, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import PartitionPlan, TableRecord
from distop.core.frozen import frozen
from distop.errors import InvalidArgument
from distop.tables import plan_table
from distop.tables.iceberg import read_metadata
from distop.tables.location import Location
from distop_behaviors.reading import fields
from distop_behaviors.reading.facts import Ambiguous, match, widest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop_behaviors.reading.facts import SparkType
    from distop_behaviors.reading.footers import PlannedFile


@frozen
class Listed:
    """A listing. ``files``: what an index calls each, and the file; ``source``: as of a plan; ``paths``: the columns
    that stand in the folders' names, with their types.
    """

    record: TableRecord
    root: str
    version: str
    partitions: Sequence[PartitionPlan]
    files: Mapping[str, PlannedFile]
    source: str
    paths: Mapping[str, str]

    def columns(self) -> Mapping[str, SparkType] | None:
        """The table's columns, where its metadata tell them; None where its files do. Raises TableUnavailable."""
        return fields.columns_of(read_metadata(self.source)[0].schema()) if self.source else None


def root_of(record: TableRecord) -> str:
    """The folder beside whose data the index lies. Raises InvalidArgument where that is not a local path."""
    if record.format == "spark" or record.options.get("catalog") is not None:
        raise InvalidArgument(
            f"the table {record.name!r} cannot have an index yet: its name in a catalog is all that is known of it, "
            "and an index lies in its table's folder"
        )
    location = Location.of(record.location)
    if location.filesystem is not None:
        raise InvalidArgument(
            f"the table at {record.location!r} cannot have an index yet: it takes a local path, or a file system that "
            "all nodes have mounted under it"
        )
    return location.root


def listed(record: TableRecord, check: Callable[[], None] = lambda: None) -> Listed:
    """The table as it is now. Raises InvalidArgument and TableUnavailable, as planning does."""
    root = root_of(record)
    planned = plan_table(record, check)
    source = planned.partitions[0].source if planned.partitions else ""
    files = {name_of(f[0], root): f for p in planned.partitions for f in p.files}
    types = record.options.get("partition_types") or {}
    paths = {name: types.get(name, "string") for p in planned.partitions[:1] for name in (() if p.source else p.values)}
    return Listed(record, root, planned.version, planned.partitions, files, source, paths)


def name_of(path: str, root: str) -> str:
    """What an index calls a file: its path below the table, else the whole path."""
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else path


def escaped(name: str) -> str:
    """A file's name as it is told: bytes that are not UTF-8 are spelled out. Any other name is as it was."""
    return name.encode(errors="backslashreplace").decode()


def on_disk(file: PlannedFile, source: str) -> PlannedFile:
    """The file as the file system has it. A plan through metadata gives no times, and may spell paths as URLs. Raises
    OSError.
    """
    if not source:
        return file
    path = fields.local_path(file[0]) or file[0]
    found = Path(path).stat()
    return path, found.st_size, found.st_mtime_ns


def field_ids(source: str, columns: Sequence[str]) -> Mapping[str, int] | None:
    """By which ids a data file of an Iceberg table has its columns; None for other tables. Raises InvalidArgument for a
    column that the table does not have or that cannot be indexed, TableUnavailable where its metadata are gone.
    """
    if not source:
        return None
    from pyiceberg.types import UUIDType

    metadata, _ = read_metadata(source)
    own = {field.name: field for field in metadata.schema().fields}
    found: dict[str, int] = {}
    for column in columns:
        name = match(column, own)
        if name is None:
            raise InvalidArgument(f"the table has no column {column!r}")
        if isinstance(own[name].field_type, UUIDType):
            raise InvalidArgument(f"the column {column!r} cannot be indexed: it is a uuid, and text only in Spark")
        found[column] = own[name].field_id
    return found


def ids_now(source: str, columns: Sequence[str]) -> Mapping[str, int] | None:
    """As :func:`field_ids`, but empty where the table does not have all of the columns any more: what was indexed is
    theirs no longer. Raises TableUnavailable.
    """
    try:
        return field_ids(source, columns)
    except InvalidArgument:
        return {}


def record_of(table: Any) -> TableRecord:
    """The record of a table that a lookup is given: itself, or one made for a location."""
    if isinstance(table, TableRecord):
        return table
    location = Location.of(str(table))
    has_metadata = any(name.endswith(".metadata.json") for name in location.names_in("metadata"))
    return TableRecord("table", "iceberg" if has_metadata else "parquet", location.text)


def widened(schemas: Iterable[Iterable[tuple[str, SparkType]]]) -> dict[str, SparkType]:
    """All columns of some files, in the order in which they come up. Where types do not go together the first stays,
    and Spark says what is wrong when it reads the others.
    """
    found: dict[str, SparkType] = {}
    for schema in schemas:
        for name, kind in schema:
            try:
                mine = match(name, found)
            except Ambiguous:
                mine = name if name in found else None
            if mine is None:
                found[name] = kind
            elif found[mine] != kind:
                found[mine] = widest(found[mine], kind) or found[mine]
    return found
