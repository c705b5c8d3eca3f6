"""Adds facts from footers of a Delta table's data files where the log has no statistics, or not enough.

A footer's columns are found as Delta finds them: by the names in files, or with column mapping by id, by their ids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.tables.reading import parquet_footers
from distop.tables.reading.file_facts import Ambiguous, Chunk, FileFacts, Unreadable, folded, follow
from distop.tables.reading.table_leaves import in_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.tables.delta.delta_schema import DeltaField, DeltaSchema
    from distop.tables.reading.file_facts import Path


def read_footers(
    paths: Sequence[str], schema: DeltaSchema, wanted: Mapping[Path, DeltaField], check: Callable[[], None]
) -> list[FileFacts | Unreadable]:
    """The facts in the footers of files, with the files' columns. ``check`` is called regularly, and raises to stop."""
    found: frozenset[str | int]
    if schema.mode == "id":
        found = frozenset(field.id for field in wanted.values() if field.id is not None)
    else:
        found = frozenset(folded(field.physical[0]) for field in wanted.values())
    return parquet_footers.read_all([(path, 0, 0) for path in paths], found, check, immutable=True)


def with_footer(
    facts: FileFacts, footer: FileFacts, schema: DeltaSchema, wanted: Mapping[Path, DeltaField]
) -> FileFacts | None:
    """The facts with the statistics of the footer, in the table's names and types; None if it cannot be used.

    Partition columns keep the statistics of ``facts``: the log has their values, and Delta reads those.
    """
    if footer.live_rows is None or (schema.mode == "id" and not footer.ids):
        return None
    rows = footer.live_rows
    leaves, chunks = dict(facts.leaves), {}
    for path, field in wanted.items():
        if path[0] in schema.partition_columns:
            if path in facts.chunks:
                chunks[path] = facts.chunks[path]
            continue
        try:
            theirs = footer.ids.get(field.id or 0) if schema.mode == "id" else follow(field.physical, footer.columns)
        except Ambiguous:
            continue
        if theirs is None and len(path) == 1 and not field.defaulted:
            chunks[path] = (Chunk(rows, rows),)
        elif theirs is not None and theirs in footer.leaves:
            leaves[path] = in_table(footer.leaves[theirs], field.leaf)
            chunks[path] = footer.chunks[theirs]
    return replace(facts, rows=rows, leaves=leaves, chunks=chunks)
