"""The files of a table as they are now, whatever its format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.behavior import PartitionPlan, TableRecord
from distop.core.frozen import frozen
from distop.errors import InvalidArgument
from distop.tables import Spark, place_of, plan_table
from distop.tables.iceberg import read_metadata
from distop.tables.location import Location
from distop.tables.reading import fields
from distop.tables.reading.facts import Ambiguous, ddl, match, of_json, problem, widest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.tables.reading.facts import SparkType
    from distop.tables.reading.footers import PlannedFile


_PLANNED = ("columns", "partition_types")
"""The options that planning finds of a table of Spark's catalog."""


@frozen
class Listed:
    """A listing. ``record``: with what planning found; ``files``: what an index calls each, and the file; ``source``:
    as of a plan; ``paths``: the columns of partitions that are in no file, with their types.
    """

    record: TableRecord
    root: str
    version: str
    partitions: Sequence[PartitionPlan]
    files: Mapping[str, PlannedFile]
    source: str
    paths: Mapping[str, str]
    options: Mapping[str, Any]

    @property
    def of_catalog(self) -> bool:
        """Its columns, and the values of its partitions, are those that Spark's catalog has."""
        return declared(self.record) is not None

    def columns(self) -> Mapping[str, SparkType] | None:
        """The table's columns, where its metadata or its catalog tell them; None where its files do. Raises
        TableUnavailable.
        """
        if self.source:
            return fields.columns_of(read_metadata(self.source)[0].schema())
        return declared(self.record)

    def values(self) -> Mapping[str, tuple[str | None, ...]] | None:
        """The values of ``paths`` by file, where the folders' names do not have them."""
        if not self.of_catalog or not self.paths:
            return None
        return {f[0]: tuple(p.values[name] for name in self.paths) for p in self.partitions for f in p.files}


def declared(record: TableRecord) -> Mapping[str, SparkType] | None:
    """The columns that Spark's catalog has, but those of partitions; None of other tables. ``record``: with what
    planning found.
    """
    columns = record.options.get("columns")
    return None if columns is None else {name: of_json(kind) for name, kind in columns.items()}


def root_of(record: TableRecord, check: Callable[[], None] = lambda: None, spark: Spark | None = None) -> str:
    """The folder beside whose data the index lies. Raises InvalidArgument where that is not a local path, and as
    planning does.
    """
    place = place_of(record, check, spark) if spark is not None else place_of(record, check)
    location = Location.of(fields.local_path(place) or place)
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
    if declared(record) is not None:  # as it is registered: it is planned anew
        record = replace(record, options={n: v for n, v in record.options.items() if n not in _PLANNED})
    root = root_of(record, check, spark)
    planned = plan_table(record, check, spark) if spark is not None else plan_table(record, check)
    source = planned.partitions[0].source if planned.partitions else ""
    files = {name_of(f[0], root): f for p in planned.partitions for f in p.files}
    found = record.extended(planned.options)
    types = found.options.get("partition_types") or {}
    names = types if declared(found) is not None else [n for p in planned.partitions[:1] for n in p.values]
    paths = {} if source else {name: types.get(name, "string") for name in names}
    return Listed(found, root, planned.version, planned.partitions, files, source, paths, planned.options)


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


def column_ids(record: TableRecord, source: str, columns: Sequence[str]) -> Mapping[str, int | str] | None:
    """What the columns are told by from others that have their names some day: of an Iceberg table the ids by which
    its data files have them, of one of Spark's catalog their types; None for folders. ``record``: with what planning
    found. Raises InvalidArgument for a column that the table does not have or that cannot be indexed, TableUnavailable
    where its metadata are gone.
    """
    if not source:
        known = declared(record)
        return None if known is None else {column: _kind(column, known) for column in columns}
    from pyiceberg.types import UUIDType

    metadata, _ = read_metadata(source)
    own = {field.name: field for field in metadata.schema().fields}
    found: dict[str, int | str] = {}
    for column in columns:
        name = match(column, own)
        if name is None:
            raise InvalidArgument(f"the table has no column {column!r}")
        if isinstance(own[name].field_type, UUIDType):
            raise InvalidArgument(f"the column {column!r} cannot be indexed: it is a uuid, and text only in Spark")
        found[column] = own[name].field_id
    return found


def _kind(column: str, known: Mapping[str, SparkType]) -> str:
    name = match(column, known)
    if name is None:
        raise InvalidArgument(f"the table has no column {column!r}")
    if (why := problem(known[name])) is not None:
        raise InvalidArgument(f"the column {column!r} cannot be indexed: {why}")
    return ddl(known[name])


def ids_now(table: Listed, columns: Sequence[str]) -> Mapping[str, int | str] | None:
    """As :func:`column_ids`, but empty where the table does not have all of the columns any more: what was indexed is
    theirs no longer. Raises TableUnavailable.
    """
    try:
        return column_ids(table.record, table.source, columns)
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
