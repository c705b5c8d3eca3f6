"""Finds the key columns in one data file's schema, and reads them in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import ddl
from distop_behaviors.index.key_values import Unindexable, canonical, family_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import PlannedFile, SparkType

_BATCH = 1 << 20
"""Rows read at once."""


@frozen
class SourceFile:
    """A data file with its key columns.

    ``names`` and ``families``: of the key columns in this file; None for a missing column, which is NULL. ``columns``:
    all columns of the file, with their Spark types.
    """

    path: str
    rows: int
    names: tuple[str | None, ...]
    families: tuple[str | None, ...]
    columns: Mapping[str, SparkType]
    reader: Reader


@frozen
class Piece:
    """Consecutive rows of a file.

    ``first``: the index of the first row in the file. ``arrays``: the canonical values of the key columns; None for a
    missing column.
    """

    first: int
    rows: int
    arrays: tuple[Any, ...]


def open_file(
    file: PlannedFile, columns: Sequence[str], ids: Mapping[str, int | str] | None, reader: Reader
) -> SourceFile:
    """Open a file and find its key columns.

    ``ids``: the identities of the columns (``table_files.identities``). If they are types in a catalog, a file with
    another family is not indexed, because only Spark can convert its values.

    Raises Unreadable if the file differs from the plan or cannot be read, Unindexable if its columns cannot be indexed.
    """
    try:
        found = reader.open_file(file, columns, ids)
    except SparkOnly as e:
        raise Unindexable(str(e)) from None
    families: list[str | None] = []
    for column, name in zip(columns, found.names, strict=True):
        id_ = ids[column] if ids is not None else None
        try:
            families.append(None if name is None else family_of(found.columns[name]))
            if name is not None and reader.own_columns and isinstance(id_, str) and families[-1] != family_of(id_):
                raise Unindexable(f"it is {ddl(found.columns[name])} in the file, but {id_} in the catalog")
        except Unindexable as e:
            raise Unindexable(f"the column {column!r}: {e}") from None
    return SourceFile(file[0], found.rows, found.names, tuple(families), found.columns, reader)


def pieces(source: SourceFile) -> Iterator[Piece]:
    """All rows of the file in pieces.

    Raises Unreadable if the data cannot be read or its row count is wrong, Unindexable for values that an index cannot
    hold, and MemoryError.
    """
    wanted = [name for name in source.names if name is not None]
    for first, rows, batch in source.reader.batches(source.path, wanted, _BATCH):
        arrays = tuple(None for _ in source.names) if batch is None else tuple(_arrays(batch, source))
        yield Piece(first, rows, arrays)


def _arrays(batch: Any, source: SourceFile) -> Iterator[Any]:
    for name, family in zip(source.names, source.families, strict=True):
        if name is None or family is None:
            yield None
            continue
        # Arrow also returns fields of a struct whose path equals the name.
        places = batch.schema.get_all_field_indices(name)
        if len(places) != 1:
            raise Unindexable(f"it has {len(places)} columns {name!r}")
        try:
            yield canonical(batch.column(places[0]), family)
        except Unindexable as e:
            raise Unindexable(f"the column {name!r}: {e}") from None
