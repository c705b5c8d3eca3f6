"""What an index build works on: the files that its index does not cover yet; and what it refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.behavior import Planned
from distop.errors import InvalidArgument
from distop.storage.files import TooLarge, open_regular
from distop.tables.reading.file_facts import Ambiguous, Unreadable, match, widened
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.index.key_values import Unindexable, family_of
from distop_behaviors.index.table_files import identities, ids_now, listed, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop_behaviors.index.index_argument import BuildArgument
    from distop_behaviors.index.index_folder import Generation
    from distop_behaviors.index.table_files import Listed

LIST_BYTES = 1 << 30
"""Of a list of files at most, decompressed."""
LOOKED_AT = 100
"""Files, evenly spread, in which the columns are looked for before anything is built."""


def plan(argument: BuildArgument, record: TableRecord, ctx: JobContext) -> Planned:
    """The partitions that have files to be indexed, with these files alone. Raises InvalidArgument for columns that the
    table does not have or that cannot be indexed, where no index can be written, and where there is another index of
    this name.
    """
    table = listed(record, ctx.check_cancelled, lambda: ctx.spark)
    check_columns(argument, table)
    folder = Folder(table.root, argument.name, ctx.space)
    folder.check_writable()
    known = covered(folder, base_of(argument, folder, table))
    partitions: list[PartitionPlan] = []
    for partition in table.partitions:
        files = tuple(f for f in partition.files if known.get(name_of(f[0], table.root)) != (f[1], f[2]))
        if files:
            size = sum(f[1] for f in files)
            partitions.append(replace(partition, partition=len(partitions), files=files, bytes=size))
    return Planned(partitions, table.version, table.options)


def base_of(argument: BuildArgument, folder: Folder, table: Listed) -> Generation | None:
    """The generation that is refreshed; None where all is built anew, as where parts of it are gone, or the columns'
    names are those of others now. Raises InvalidArgument where it is of something else, TableUnavailable.
    """
    current = folder.current()
    if current is None or argument.refresh == "full":
        return None
    if (current.kind, current.columns, current.options) != (argument.kind, tuple(argument.columns), options(argument)):
        raise InvalidArgument(
            f"the index {argument.name!r} is there, as a {current.kind} index of {', '.join(current.columns)} with "
            "other settings than asked for: drop it, or say refresh: full"
        )
    if not folder.is_whole(current) or current.ids != ids_now(table, current.columns):
        return None
    try:
        file_list(folder, current, ["file"])
    except (OSError, ValueError):  # Arrow's errors are ValueErrors, too
        return None
    return current


def options(argument: BuildArgument) -> dict[str, Any]:
    """What makes an index another one, besides its columns."""
    return {"distinct": argument.distinct, "bloom": argument.bloom} if argument.kind == "skip" else {}


def covered(folder: Folder, generation: Generation | None) -> dict[str, tuple[int, int]]:
    """The files of a generation, with size and time."""
    if generation is None or generation.files is None:
        return {}
    found = file_list(folder, generation, ["path", "size", "mtime_ns"])
    return {p: (s, m) for p, s, m in zip(*(column.to_pylist() for column in found.columns), strict=True)}


def file_list(folder: Folder, generation: Generation, columns: list[str] | None = None) -> pa.Table:
    """The files that a generation covers. Raises OSError and Arrow's errors where it is gone or damaged, TooLarge."""
    import pyarrow.parquet as pq

    assert generation.files is not None
    path = str(folder.data / generation.files.name)
    with open_regular(path, follow=False) as file:
        found = pq.ParquetFile(file, page_checksum_verification=True)
        groups = (found.metadata.row_group(n) for n in range(found.num_row_groups))
        if max(os.fstat(file.fileno()).st_size, sum(group.total_byte_size for group in groups)) > LIST_BYTES:
            raise TooLarge(f"the file {path} has more than {LIST_BYTES} bytes, the most that is read of such a file")
        return found.read(columns)


def check_columns(argument: BuildArgument, table: Listed) -> None:
    """Raises InvalidArgument for a column that the table does not have, or of which no index can be."""
    try:
        for column in argument.columns:
            if match(column, table.paths) is not None:
                raise InvalidArgument(
                    f"the column {column!r} is a partition column: its partitions tell which files have a value"
                )
        schema = table.columns() or _schema_of_some(table)
        for column in argument.columns:
            name = match(column, schema)
            if name is None:
                raise InvalidArgument(f"the table has no column {column!r} (it has: {', '.join(list(schema)[:50])})")
            try:
                family_of(schema[name])
            except Unindexable as e:
                raise InvalidArgument(f"the column {column!r} cannot be indexed: {e}") from None
        identities(table.reader, argument.columns)
    except (Ambiguous, Unreadable) as e:
        raise InvalidArgument(str(e)) from None


def _schema_of_some(table: Listed) -> Mapping[str, Any]:
    files = list(table.files.values())
    some = {files[n * (len(files) - 1) // max(1, LOOKED_AT - 1)] for n in range(LOOKED_AT)} if files else set()
    facts = table.reader.facts(sorted(some), frozenset(), lambda: None)
    good = [f for f in facts if not isinstance(f, Unreadable)]
    if not good and facts:
        raise InvalidArgument(f"none of the files looked at can be read: {facts[0]}")
    return widened(f.columns.items() for f in good)
