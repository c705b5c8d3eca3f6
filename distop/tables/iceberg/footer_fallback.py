"""Adds facts from footers of an Iceberg table's data files where the manifests were not enough.

A footer's columns are found by the ids that Iceberg writes. A file without ids was not written by Iceberg, and only
Iceberg's reader knows its columns: nothing is taken from its footer. The same holds for a file that pyarrow cannot
read: the scan reports whether it is missing or damaged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.tables.iceberg.iceberg_fields import local_path
from distop.tables.reading import parquet_footers
from distop.tables.reading.file_facts import Chunk, FileFacts, Unreadable
from distop.tables.reading.table_leaves import in_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.tables.iceberg.iceberg_fields import IcebergField
    from distop.tables.reading.file_facts import Path


def with_footers(
    files: Sequence[FileFacts], wanted: Mapping[Path, IcebergField], check: Callable[[], None] = lambda: None
) -> dict[str, FileFacts]:
    """The facts with those of the footers as ``precise``, by path; without files whose footers cannot be used.

    ``check`` is called regularly, and raises to stop.
    """
    ids = frozenset(field.id for field in wanted.values())
    planned = [(local_path(facts.path) or facts.path, 0, 0) for facts in files]
    found = parquet_footers.read_all(planned, ids, check, immutable=True)
    return {
        facts.path: replace(facts, precise=_in_table(facts, footer, wanted))
        for facts, footer in zip(files, found, strict=True)
        if not isinstance(footer, Unreadable) and footer.ids and footer.live_rows == facts.rows
    }


def _in_table(facts: FileFacts, footer: FileFacts, wanted: Mapping[Path, IcebergField]) -> FileFacts:
    """The footer's statistics with the table's names and types."""
    leaves, chunks = dict(facts.leaves), {}
    for path, field in wanted.items():
        known = facts.chunks.get(path, ())
        theirs = footer.ids.get(field.id)
        if any(chunk.tight for chunk in known):
            # The partition's value, which Iceberg reads instead of the file's.
            chunks[path] = known
        elif theirs is None and len(path) == 1 and not field.defaulted:
            chunks[path] = (Chunk(footer.rows or 0, footer.rows),)
        elif theirs is not None and theirs in footer.leaves:
            leaves[path] = in_table(footer.leaves[theirs], field.leaf)
            chunks[path] = footer.chunks[theirs]
    return replace(facts, leaves=leaves, chunks=chunks)
