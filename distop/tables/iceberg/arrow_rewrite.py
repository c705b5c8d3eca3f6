"""Copies data files of an Iceberg table without deletes into new files with Arrow, instead of by a query of Spark.

Columns are compared by name, field id and type. Whatever Arrow might store in another way is left to Spark (SparkOnly).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.tables.iceberg.iceberg_fields import columns_of
from distop.tables.iceberg.java_tables import ROW_LINEAGE
from distop.tables.iceberg.table_properties import for_writing
from distop.tables.reading import arrow_copy, staged_copy
from distop.tables.reading.arrow_types import SparkOnly

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from distop.protocol.plan import PartitionPlan
    from distop.tables.commits import Layout, ReplacementContext
    from distop.tables.staged_files import StagedFiles

_PARQUET, _CODEC = "write.parquet.", "write.parquet.compression-codec"
_DEFAULT_CODEC = "zstd"
_CODECS = {"zstd": "zstd", "gzip": "gzip", "snappy": "snappy", "uncompressed": "none"}


def copied(
    plan: PartitionPlan, metadata: Any, layout: Layout, stage: StagedFiles, ctx: ReplacementContext
) -> list[str]:
    """Copy the planned files, none of which has deletes, into a stage; returns the names of the new files.

    ``metadata``: of the planned snapshot, pyiceberg's. Raises SparkOnly before anything is written, RowsDiffer, and
    OSError.
    """
    if layout.sort_by:
        raise SparkOnly("rows are sorted")
    if metadata.format_version >= ROW_LINEAGE:
        raise SparkOnly("new files would need the ids of the rows")
    codec = layout.codec or _codec_of(metadata.properties)
    schema, paths = metadata.schema(), [path for path, _, _ in plan.files]
    kinds = columns_of(schema)
    found = arrow_copy.common_schema(paths, kinds, [frozenset(kinds)] * len(paths))
    check_stored(schema, found)
    size = sum(size for _, size, _ in plan.files)
    return staged_copy.copied(paths, found, stage, layout.outputs, codec, ctx, size=size)


def check_stored(schema: Any, found: pa.Schema) -> None:
    """Raises SparkOnly unless files with these columns store exactly the fields of a table's schema (pyiceberg's)."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    try:
        wanted = schema_to_pyarrow(schema)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise SparkOnly(f"a type of the table is unknown to Arrow: {error}") from error
    for field in wanted:
        if not _is_same(arrow_copy.plain(field), found.field(field.name)):
            raise SparkOnly(f"the column {field.name!r} is not stored as in new files")


def _is_same(wanted: pa.Field, found: pa.Field) -> bool:
    """Whether two fields have equal names, ids and types, also inside; either may be required."""
    import pyarrow.types as t

    if wanted.name != found.name or wanted.metadata != found.metadata or not found.metadata:
        return False
    mine, other = wanted.type, found.type
    for is_kind in (t.is_struct, t.is_list):
        if is_kind(mine):
            fields = zip(*([kind.field(n) for n in range(kind.num_fields)] for kind in (mine, other)), strict=True)
            return is_kind(other) and mine.num_fields == other.num_fields and all(_is_same(*both) for both in fields)
    return bool(mine.equals(other))


def _codec_of(properties: Mapping[str, str]) -> str:
    """The compression of the table's new files. Raises SparkOnly if the table sets how else Parquet is written."""
    given = {name: value for name, value in for_writing(properties).items() if name.startswith(_PARQUET)}
    codec = given.pop(_CODEC, _DEFAULT_CODEC).lower()
    if given:
        raise SparkOnly(f"the table sets {min(given)}")
    if codec not in _CODECS:
        raise SparkOnly(f"the table sets the codec {codec}")
    return _CODECS[codec]
