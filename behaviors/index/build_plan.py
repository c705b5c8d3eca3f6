"""Plans an index build: finds the files that the index does not cover yet, and checks the argument."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.behavior import Planned
from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import did_you_mean, plural
from distop.tables.reading.file_facts import Ambiguous, Unreadable, match, widened
from distop_behaviors.index.covered_files import covered_files, file_list
from distop_behaviors.index.index_folder import Folder
from distop_behaviors.index.key_values import Unindexable, family_of
from distop_behaviors.index.table_files import current_table, identities, ids_now, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.behavior import JobContext, PartitionPlan, TableRecord
    from distop_behaviors.index.generation import Generation
    from distop_behaviors.index.index_argument import BuildArgument
    from distop_behaviors.index.table_files import CurrentTable

CHECKED_FILES = 100
"""Number of files, evenly spread, whose schemas are read to check the columns before a build."""


def plan(argument: BuildArgument, record: TableRecord, ctx: JobContext) -> Planned:
    """The partitions with files that are not indexed yet, with only these files.

    Raises InvalidArgument if the table does not have the columns, if they cannot be indexed, if the index cannot be
    written, or if another index has this name.
    """
    table = current_table(record, ctx.check_cancelled, lambda: ctx.spark)
    check_columns(argument, table)
    folder = Folder(table.root, argument.name, ctx.space)
    folder.check_writable()
    known = covered_files(folder, base_of(argument, folder, table))
    partitions: list[PartitionPlan] = []
    for partition in table.partitions:
        files = tuple(f for f in partition.files if known.get(name_of(f[0], table.root)) != (f[1], f[2]))
        if files:
            size = sum(f[1] for f in files)
            partitions.append(replace(partition, partition=len(partitions), files=files, bytes=size))
    return Planned(partitions, table.version, table.options)


def base_of(argument: BuildArgument, folder: Folder, table: CurrentTable) -> Generation | None:
    """The generation to refresh; None for a full build: on request, or if its files are missing or columns replaced.

    Raises InvalidArgument if it has other columns or settings, and TableUnavailable.
    """
    current = folder.current()
    if current is None or argument.refresh == "full":
        return None
    if (current.kind, current.columns, current.options) != (
        argument.kind,
        tuple(argument.columns),
        build_options(argument),
    ):
        raise InvalidArgument(
            f"the index {argument.name!r} already exists as a {current.kind} index of {', '.join(current.columns)} "
            "with other columns or settings: drop it, or use 'refresh': 'full'"
        )
    if not folder.is_whole(current) or current.ids != ids_now(table, current.columns):
        return None
    try:
        file_list(folder, current, ["file"])
    except (OSError, ValueError, UnsafePath):  # Arrow's errors are ValueErrors, too
        return None
    return current


def build_options(argument: BuildArgument) -> dict[str, Any]:
    """The settings of an index, other than its kind and columns."""
    return {"distinct": argument.distinct, "bloom": argument.bloom} if argument.kind == "skip" else {}


def check_columns(argument: BuildArgument, table: CurrentTable) -> None:
    """Raises InvalidArgument for a column that the table does not have or that cannot be indexed."""
    try:
        for column in argument.columns:
            if match(column, table.paths) is not None:
                raise InvalidArgument(
                    f"the column {column!r} is a partition column and needs no index: a filter on it skips partitions"
                )
        schema = table.columns() or _schema_of_some(table)
        for column in argument.columns:
            name = match(column, schema)
            if name is None:
                hint = did_you_mean(column, schema, "its columns")
                raise InvalidArgument(f"the table has no column {column!r}{hint}")
            try:
                family_of(schema[name])
            except Unindexable as e:
                raise InvalidArgument(f"the column {column!r} cannot be indexed: {e}") from None
        identities(table.reader, argument.columns)
    except (Ambiguous, Unreadable) as e:
        raise InvalidArgument(str(e)) from None


def _schema_of_some(table: CurrentTable) -> Mapping[str, Any]:
    files = list(table.files.values())
    some = {files[n * (len(files) - 1) // max(1, CHECKED_FILES - 1)] for n in range(CHECKED_FILES)} if files else set()
    facts = table.reader.facts(sorted(some), frozenset(), lambda: None)
    good = [f for f in facts if not isinstance(f, Unreadable)]
    if not good and facts:
        raise InvalidArgument(f"none of {plural(len(facts), 'file')} can be read, such as: {facts[0]}")
    return widened(f.columns.items() for f in good)
