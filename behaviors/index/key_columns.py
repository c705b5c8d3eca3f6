"""The key columns of one data file: found in its schema, and read batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.tables.reading.arrow_types import Unfaithful
from distop.tables.reading.file_facts import ddl
from distop_behaviors.index.key_values import Unindexable, canonical, family_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.tables.reader import Reader
    from distop.tables.reading.file_facts import PlannedFile, SparkType

_BATCH = 1 << 20
"""Rows read at once."""


@frozen
class Source:
    """A data file as the index is to see it. ``names``: its names of the key columns, None for one that it does not
    have, which is NULL there; ``families`` likewise; ``columns``: all of its columns, by Spark's types.
    """

    path: str
    rows: int
    names: tuple[str | None, ...]
    families: tuple[str | None, ...]
    columns: Mapping[str, SparkType]
    reader: Reader


@frozen
class Piece:
    """Neighbouring rows. ``first``: the index in the file of the first of them; ``arrays``: the values
    of the key columns, canonical, None for a column that the file does not have.
    """

    first: int
    rows: int
    arrays: tuple[Any, ...]


def open_file(file: PlannedFile, columns: Sequence[str], ids: Mapping[str, int | str] | None, reader: Reader) -> Source:
    """What a file has of these columns. ``ids``: what tells them from others (``table_files.identities``); where these
    are types, what Spark makes of a file of another family is for Spark to say. Raises Unreadable where the file is not
    as planned or cannot be read, Unindexable where an index cannot be of its columns.
    """
    try:
        found = reader.open_file(file, columns, ids)
    except Unfaithful as e:
        raise Unindexable(str(e)) from None
    families: list[str | None] = []
    for column, name in zip(columns, found.names, strict=True):
        id_ = ids[column] if ids is not None else None
        try:
            families.append(None if name is None else family_of(found.columns[name]))
            if name is not None and isinstance(id_, str) and families[-1] != family_of(id_):
                raise Unindexable(f"it is {ddl(found.columns[name])} here, and {id_} in the catalog")
        except Unindexable as e:
            raise Unindexable(f"the column {column!r}: {e}") from None
    return Source(file[0], found.rows, found.names, tuple(families), found.columns, reader)


def pieces(source: Source) -> Iterator[Piece]:
    """All rows of the file. Raises Unreadable where its data cannot be read or has not as many rows as it says,
    Unindexable for values that an index cannot hold, MemoryError as it is.
    """
    wanted = [name for name in source.names if name is not None]
    for first, rows, batch in source.reader.batches(source.path, wanted, _BATCH):
        arrays = tuple(None for _ in source.names) if batch is None else tuple(_arrays(batch, source))
        yield Piece(first, rows, arrays)


def _arrays(batch: Any, source: Source) -> Iterator[Any]:
    for name, family in zip(source.names, source.families, strict=True):
        if name is None or family is None:
            yield None
            continue
        # Asked for by name, Arrow also gives the fields of a struct whose path is spelled alike.
        places = batch.schema.get_all_field_indices(name)
        if len(places) != 1:
            raise Unindexable(f"it has {len(places)} columns {name!r}")
        try:
            yield canonical(batch.column(places[0]), family)
        except Unindexable as e:
            raise Unindexable(f"the column {name!r}: {e}") from None
