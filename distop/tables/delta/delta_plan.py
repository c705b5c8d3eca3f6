"""Plans a version of a Delta table into partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.plan import MAX_PARTITIONS, PartitionPlan, Planned
from distop.tables.parquet.parquet_format import EMPTY, HIVE_NULL, escaped, in_groups, natural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.tables.delta.delta_log import DeltaSnapshot
    from distop.tables.delta.delta_schema import DeltaSchema
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.table_options import TableOptions


def plan(snapshot: DeltaSnapshot, options: TableOptions) -> Planned:
    """The partitions of a version: one for each value of the partition columns, or groups of files without these.

    A table without files is one partition without files: the log proves that it has no rows, and the partition's job
    still checks the columns. A file's time is 0: Delta never changes a file. Raises InvalidArgument for too many
    partitions.
    """
    found: dict[str, list[PlannedFile]] = {}
    unpartitioned: list[PlannedFile] = []
    for file in snapshot.files.values():
        planned = (file.path, file.size, 0)
        if snapshot.schema.partition_columns:
            found.setdefault(partition_name(snapshot.schema, file.values), []).append(planned)
        else:
            unpartitioned.append(planned)
    found |= in_groups(sorted(unpartitioned, key=_order), options)
    if not found:
        found[EMPTY] = []
    if len(found) > MAX_PARTITIONS:
        raise InvalidArgument(
            f"the table {snapshot.root!r} has {len(found)} partitions: at most a million are supported"
        )
    partitions = []
    for ordinal, name in enumerate(sorted(found, key=lambda name: (natural(name), name))):
        files = tuple(sorted(found[name], key=_order))
        partitions.append(PartitionPlan(ordinal, name, sum(f[1] for f in files), files, source=snapshot.source))
    return Planned(partitions, snapshot.id)


def _order(file: PlannedFile) -> tuple[object, str]:
    return natural(file[0]), file[0]


def partition_name(schema: DeltaSchema, values: Mapping[str, str | None]) -> str:
    """The name of the partition with these values: ``day=2013-01-31/region=eu``.

    An empty text is NULL, by Delta's rules.
    """
    parts = []
    for column in schema.partition_columns:
        value = values.get(schema.physical[column])
        text = escaped(value) if value else HIVE_NULL
        # A value equal to the text for NULL must get another name.
        parts.append(f"{escaped(column)}=%5F{text[1:]}" if value == HIVE_NULL else f"{escaped(column)}={text}")
    return "/".join(parts)
