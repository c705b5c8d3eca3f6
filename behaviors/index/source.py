"""The key columns of one data file: found in its schema, and read batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.core.frozen import frozen
from distop.files import for_arrow
from distop.tables.reading import footers
from distop.tables.reading.facts import Ambiguous, Unreadable, ddl, match
from distop_behaviors.index.values import Unindexable, canonical, family_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distop.tables.reading.facts import SparkType
    from distop.tables.reading.footers import PlannedFile

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


@frozen
class Piece:
    """Neighbouring rows. ``first``: the index in the file of the first of them; ``arrays``: the values
    of the key columns, canonical, None for a column that the file does not have.
    """

    first: int
    rows: int
    arrays: tuple[Any, ...]


def open_file(file: PlannedFile, columns: Sequence[str], ids: Mapping[str, int | str] | None = None) -> Source:
    """What the footer says. ``ids``: of an Iceberg table, the field id of each key column (what a file without it holds
    cannot be told); of one of Spark's catalog its type: what Spark makes of a file of another family is for Spark to
    say. Raises Unreadable where the file is not as planned or is no readable Parquet file, Unindexable where an index
    cannot be of its columns.
    """
    (facts,) = footers.read_all([file], frozenset())
    if isinstance(facts, Unreadable):
        raise facts
    names: list[str | None] = []
    families: list[str | None] = []
    by_id: Mapping[int | None, str] | None = None
    for column in columns:
        id_ = ids[column] if ids is not None else None
        if isinstance(id_, int):
            by_id = _field_ids(file[0]) if by_id is None else by_id
            name = by_id.get(id_)
            if name is None:
                raise Unindexable(f"it does not have the column {column!r}")
        else:
            name = _name(column, facts.columns)
        names.append(name)
        try:
            families.append(None if name is None else family_of(facts.columns[name]))
            if name is not None and isinstance(id_, str) and families[-1] != family_of(id_):
                raise Unindexable(f"it is {ddl(facts.columns[name])} here, and {id_} in the catalog")
        except Unindexable as e:
            raise Unindexable(f"the column {column!r}: {e}") from None
    return Source(file[0], facts.rows, tuple(names), tuple(families), facts.columns)


def _name(column: str, columns: Mapping[str, Any]) -> str | None:
    try:
        return match(column, columns)
    except Ambiguous as e:
        raise Unindexable(str(e)) from None


def _field_ids(path: str) -> dict[int | None, str]:
    import pyarrow.parquet as pq

    found: dict[int | None, str] = {}
    with for_arrow(path) as file:
        schema = pq.read_schema(file)
    for field in schema:
        text = (field.metadata or {}).get(b"PARQUET:field_id")
        if text is not None:
            found[int(text)] = field.name
    return found


def pieces(source: Source) -> Iterator[Piece]:
    """All rows of the file. Raises Unreadable where its data cannot be read or has not as many rows as its footer
    says, Unindexable for values that an index cannot hold, MemoryError as it is.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = [name for name in source.names if name is not None]
    try:
        with for_arrow(source.path) as opened, pq.ParquetFile(opened, coerce_int96_timestamp_unit="us") as file:
            first = end = 0
            for group in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                end += rows
                if not wanted:
                    yield Piece(first, rows, tuple(None for _ in source.names))
                    first = end
                    continue
                for batch in file.iter_batches(_BATCH, [group], wanted, use_threads=False):
                    yield Piece(first, batch.num_rows, tuple(_arrays(batch, source)))
                    first += batch.num_rows
                if first != end:
                    raise Unreadable(
                        f"the file {source.path} cannot be read: a row group has {rows + first - end} rows, and "
                        f"{rows} by its footer"
                    )
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OSError, ValueError) as e:
        reason = str(e).strip().split("\n")[0]
        raise Unreadable(f"the file {source.path} cannot be read: {reason}") from e


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
