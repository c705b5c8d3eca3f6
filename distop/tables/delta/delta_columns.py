"""Finds a Delta table's columns in its Parquet files, to read rows with Arrow exactly as Delta's reader would.

Columns are found by their names in files, or with column mapping by id, by the ids of the files' fields.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.storage.files import for_arrow
from distop.tables.delta import file_statistics
from distop.tables.reading import arrow_rows, footer_facts
from distop.tables.reading.arrow_rows import RequestedRows
from distop.tables.reading.arrow_types import Reading, SparkOnly, arrow_type, check_leaves, chosen_of, widens
from distop.tables.reading.file_facts import folded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

    from distop.tables.delta.delta_log import AddedFile, DeltaSnapshot
    from distop.tables.delta.delta_schema import DeltaSchema
    from distop.tables.reading.arrow_rows import Blocks
    from distop.tables.reading.file_facts import PlannedFile, SparkType

_FIELD_ID = b"PARQUET:field_id"


def names_in(schema: DeltaSchema, arrow: Any) -> dict[str, str | None]:
    """The file's names of the table's columns; None if the file lacks one. Raises SparkOnly if a name is ambiguous."""
    found: dict[str | int, list[str]] = {}
    for field in arrow:
        key = _field_id(field) if schema.mode == "id" else folded(field.name)
        found.setdefault(key, []).append(field.name)
    if schema.mode == "id" and len(arrow) and -1 in found:
        raise SparkOnly("a file has columns without ids")
    names: dict[str, str | None] = {}
    for column in schema.columns:
        number = schema.mapped_id(column)
        mine = found.get(folded(schema.physical[column]) if schema.mode != "id" or number is None else number, [])
        if len(mine) > 1:
            raise SparkOnly(f"a file has several columns for {column!r}")
        names[column] = mine[0] if mine else None
    return names


def _field_id(field: Any) -> int:
    return int((field.metadata or {}).get(_FIELD_ID, -1))


def names_of_file(path: str, schema: DeltaSchema) -> dict[str, str | None]:
    """:func:`names_in` for a file. Raises OSError, Arrow's errors, and SparkOnly."""
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        return names_in(schema, pq.read_schema(file))


def rows_at(
    snapshot: DeltaSnapshot,
    added: Sequence[AddedFile],
    blocks: Sequence[Blocks],
    columns: Mapping[str, SparkType],
    most: int,
    on_disk: Callable[[PlannedFile], PlannedFile],
) -> pa.Table:
    """The rows of these blocks, which are of the files ``added``, with these columns. Raises SparkOnly."""
    import pyarrow as pa

    schema = snapshot.schema
    own = {name: kind for name, kind in columns.items() if name not in schema.partition_columns}
    if why := next(filter(None, map(schema.spark_only, columns)), ""):
        raise SparkOnly(why)
    wanted = []
    for file, one in zip(added, blocks, strict=True):
        if file.vector is not None:
            raise SparkOnly(f"rows of the file {file.path} are deleted")
        try:
            disk = on_disk(one.file)
        except OSError as error:
            raise SparkOnly(str(error)) from error
        if disk[1] != file.size:
            raise SparkOnly(f"the file {file.path} does not have the size in the log")
        values = {name: _text(snapshot, file, name) for name in columns if name in schema.partition_columns}
        wanted.append(RequestedRows(replace(one, file=disk), values))

    table = arrow_rows.rows_of(wanted, own, partial(_reading, schema, own), most)
    try:
        found = [table.column(name).cast(arrow_type(kind)) for name, kind in columns.items()]
    except pa.ArrowException as error:
        raise SparkOnly(str(error)) from error
    return pa.table(found, names=list(columns))


def _reading(schema: DeltaSchema, columns: Mapping[str, SparkType], found: Any) -> Reading:
    """How a file's columns are read, by its Parquet schema ``found``. Raises SparkOnly."""
    arrow, types = found.to_arrow_schema(), footer_facts.columns_of(found)
    check_leaves(found, arrow)
    every = names_in(schema, arrow)
    names = {name: every[name] for name in columns}
    for name, mine in names.items():
        if mine is None and schema.defaulted(name):
            raise SparkOnly(f"a file lacks the column {name!r}, which has a default")
        if mine is not None and not widens(types[mine], columns[name]):
            raise SparkOnly(f"the column {name!r} has another type in some file")
    return Reading(names, chosen_of(names, arrow))


def _text(snapshot: DeltaSnapshot, file: AddedFile, column: str) -> str | None:
    """The text of a partition column's value. Raises SparkOnly if Delta may read another value from it."""
    schema = snapshot.schema
    text = file.values.get(schema.physical[column])
    (field,) = schema.fields(frozenset({folded(column)})).values()
    if text is not None and file_statistics.of_partition(field, text, 1) is None:
        raise SparkOnly(f"the text {text!r} of the partition column {column!r} may be another value in Spark")
    return text
