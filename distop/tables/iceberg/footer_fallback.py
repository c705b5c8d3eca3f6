"""The footers of an Iceberg table's data files, where its manifests have left something open.

A footer's columns are found by the ids that Iceberg writes. A file without ids came from elsewhere: which of its
columns is which is then known to Iceberg's reader alone, and nothing is taken from its footer. So it is with a file
that pyarrow cannot read: whether it is there and whole is told by whoever scans it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distop.tables.iceberg.iceberg_fields import in_table, local_path
from distop.tables.reading import parquet_footers
from distop.tables.reading.file_facts import Chunk, FileFacts, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.tables.iceberg.iceberg_fields import Field, Path


def look(
    files: Sequence[FileFacts], wanted: Mapping[Path, Field], check: Callable[[], None] = lambda: None
) -> dict[str, FileFacts]:
    """The files with what their footers say, by path; those of which nothing can be told are left out. ``check`` is
    called now and then, and raises where the reading is to stop.
    """
    ids = frozenset(field.id for field in wanted.values())
    planned = [(local_path(facts.path) or facts.path, 0, 0) for facts in files]
    found = parquet_footers.read_all(planned, ids, check, immutable=True)
    return {
        facts.path: replace(facts, closer=_in_table(facts, footer, wanted))
        for facts, footer in zip(files, found, strict=True)
        if not isinstance(footer, Unreadable) and footer.ids and footer.left == facts.rows
    }


def _in_table(facts: FileFacts, footer: FileFacts, wanted: Mapping[Path, Field]) -> FileFacts:
    """The footer's statistics under the table's names, as values of its types."""
    leaves, chunks = dict(facts.leaves), {}
    for path, field in wanted.items():
        known = facts.chunks.get(path, ())
        theirs = footer.ids.get(field.id)
        if any(chunk.tight for chunk in known):
            # A value of the partition, which Iceberg reads instead of the file's.
            chunks[path] = known
        elif theirs is None and len(path) == 1 and not field.defaulted:
            chunks[path] = (Chunk(footer.rows or 0, footer.rows),)
        elif theirs is not None and theirs in footer.leaves:
            leaves[path] = in_table(footer.leaves[theirs], field)
            chunks[path] = footer.chunks[theirs]
    return replace(facts, leaves=leaves, chunks=chunks)
