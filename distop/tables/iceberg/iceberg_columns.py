"""Finds an Iceberg table's columns in its Parquet files by their ids, to read rows with Arrow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.errors import TableUnavailable
from distop.storage.files import for_arrow
from distop.tables.iceberg import manifest_facts
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.reading import footer_facts
from distop.tables.reading.arrow_rows import RequestedRows
from distop.tables.reading.arrow_types import Reading, SparkOnly, check_leaves, chosen_of, widens
from distop.tables.reading.file_facts import Unreadable, folded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.tables.reading.arrow_rows import Blocks
    from distop.tables.reading.file_facts import Chunk, PlannedFile, SparkType

_FIELD_ID = b"PARQUET:field_id"


class IcebergColumns:
    """The table's columns, which are found in files by their ids."""

    def __init__(self, source: str, schema: Mapping[str, SparkType]) -> None:
        """``schema``: the table's columns with Spark's types. Raises SparkOnly."""
        metadata, _ = read_metadata(source)
        self._fields = metadata.schema().fields
        self._schema = schema
        if [field.name for field in self._fields] != list(schema):
            raise SparkOnly("the table has columns that Spark does not read")
        if any(field.initial_default is not None for field in self._fields):
            raise SparkOnly("a column has a default for files that lack it")
        from pyiceberg.transforms import IdentityTransform

        own = {field.field_id: field.name for field in self._fields}
        by_value = {
            part.source_id
            for spec in metadata.specs().values()
            for part in spec.fields
            if isinstance(part.transform, IdentityTransform)
        }
        self.partitions = frozenset(own[i] for i in by_value if i in own)
        """Columns whose values are in the metadata, which Iceberg reads instead of the files' values."""

    def reading(self, found: Any) -> Reading:
        """The reading of a file with this Parquet schema. Raises SparkOnly."""
        arrow, types = found.to_arrow_schema(), footer_facts.columns_of(found)
        check_leaves(found, arrow)
        by_id = {i: field for field in arrow if (i := _id(field)) is not None}
        if len(by_id) < len(arrow):
            raise SparkOnly("a file has columns without ids")
        names: dict[str, str | None] = {}
        for field in self._fields:
            mine = by_id.get(field.field_id)
            names[field.name] = None if mine is None else mine.name
            if mine is None:
                continue
            if not widens(types[mine.name], self._schema[field.name]) or not _agree(mine.type, field.field_type):
                raise SparkOnly(f"the column {field.name!r} has another type in some file")
        return Reading(names, chosen_of(names, arrow))


def _id(field: Any) -> int | None:
    found = (field.metadata or {}).get(_FIELD_ID)
    return None if found is None else int(found)


def _agree(arrow: Any, iceberg: Any) -> bool:
    """Whether nested fields have the ids of the table's. Names and types are compared by ``widens``."""
    from pyiceberg import types

    if isinstance(iceberg, types.StructType):
        pairs = [(arrow.field(n), f.field_id, f.field_type) for n, f in enumerate(iceberg.fields)]
    elif isinstance(iceberg, types.ListType):
        pairs = [(arrow.value_field, iceberg.element_id, iceberg.element_type)]
    elif isinstance(iceberg, types.MapType):
        pairs = [
            (arrow.key_field, iceberg.key_id, iceberg.key_type),
            (arrow.item_field, iceberg.value_id, iceberg.value_type),
        ]
    else:
        return True
    return all(_id(field) == number and _agree(field.type, kind) for field, number, kind in pairs)


def wanted(
    source: str, blocks: Sequence[Blocks], columns: IcebergColumns, on_disk: Callable[[PlannedFile], PlannedFile]
) -> list[RequestedRows]:
    """The requests for these blocks of rows. Raises SparkOnly if a file may have deleted rows."""
    try:
        known = manifest_facts.snapshot_of(source, frozenset(folded(name) for name in columns.partitions))
    except (Unreadable, TableUnavailable) as e:
        raise SparkOnly(str(e)) from e
    found = []
    for one in blocks:
        path = one.file[0]
        facts = known.files.get(path)
        if facts is None or facts.deleted != 0:
            raise SparkOnly(f"rows of the file {path} may be deleted")
        try:
            disk = on_disk(one.file)
        except OSError as e:
            raise SparkOnly(str(e)) from e
        fixed: dict[str, tuple[str, int, Chunk]] = {}
        for name in columns.partitions:
            chunks = facts.chunks.get((name,))
            if chunks is None:
                raise SparkOnly(f"the metadata have no statistics of the column {name!r}")
            leaf = facts.leaves[(name,)]
            fixed[name] = leaf.kind, leaf.scale, chunks[0]
        found.append(RequestedRows(replace(one, file=disk), {}, fixed))
    return found


def names_in(path: str) -> dict[int, str]:
    """A file's names of its top-level columns, by their ids. Raises OSError and Arrow's errors."""
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        schema = pq.read_schema(file)
    return {i: field.name for field in schema if (i := _id(field)) is not None}
