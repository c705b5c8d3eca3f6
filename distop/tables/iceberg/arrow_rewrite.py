"""Copies data files of an Iceberg table without deletes into new files with Arrow, instead of by a query of Spark.

Columns are compared by name, field id and type. Whatever Arrow might store in another way is left to Spark (SparkOnly).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.storage.files import for_arrow
from distop.tables.iceberg.iceberg_fields import columns_of
from distop.tables.iceberg.java_tables import ROW_LINEAGE
from distop.tables.iceberg.table_properties import for_writing
from distop.tables.reading import arrow_copy, staged_copy
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import Gone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from distop.protocol.plan import PartitionPlan
    from distop.tables.commits import Layout, ReplacementContext
    from distop.tables.staged_files import StagedFiles

_PARQUET, _CODEC = "write.parquet.", "write.parquet.compression-codec"
_DEFAULT_CODEC = "zstd"
_CODECS = {"zstd": "zstd", "gzip": "gzip", "snappy": "snappy", "uncompressed": "none"}


def codec_of(metadata: Any, layout: Layout) -> str:
    """The compression of new files. Raises SparkOnly if the table or the layout asks for what Arrow does not do.

    ``metadata``: of the planned snapshot, pyiceberg's.
    """
    if layout.sort_by:
        raise SparkOnly("rows are sorted")
    if metadata.format_version >= ROW_LINEAGE:
        raise SparkOnly("new files would need the ids of the rows")
    given = {name: value for name, value in for_writing(metadata.properties).items() if name.startswith(_PARQUET)}
    codec = given.pop(_CODEC, _DEFAULT_CODEC).lower()
    if given:
        raise SparkOnly(f"the table sets {min(given)}")
    if layout.codec is None and codec not in _CODECS:
        raise SparkOnly(f"the table sets the codec {codec}")
    return layout.codec or _CODECS[codec]


def copied(
    plan: PartitionPlan, metadata: Any, codec: str, outputs: int, stage: StagedFiles, ctx: ReplacementContext
) -> list[str]:
    """Copy the planned files, none of which has deletes, into a stage; returns the names of the new files.

    Raises SparkOnly, with nothing left in the stage, Gone if a file no longer exists, RowsDiffer, and OSError.
    """
    import pyarrow as pa

    schema, paths = metadata.schema(), [path for path, _, _ in plan.files]
    kinds = columns_of(schema)
    try:
        found = arrow_copy.common_schema(paths, kinds, [frozenset(kinds)] * len(paths))
    except pa.ArrowException as error:
        raise SparkOnly(f"a file is damaged, or no Parquet file: {error}") from error
    except FileNotFoundError as error:
        raise Gone(f"a file of the group {plan.name} no longer exists: {error}") from error
    check_stored(schema, found)
    size = sum(size for _, size, _ in plan.files)
    names = staged_copy.copied(paths, found, stage, outputs, codec, ctx, size=size)
    if has_nan([f"{stage.data.location}/{name}" for name in names], found, ctx.check_cancelled):
        stage.remove(names)
        raise SparkOnly("footers do not count values that are no numbers, and Iceberg then takes them for numbers")
    return names


def has_nan(paths: Sequence[str], schema: pa.Schema, check: Callable[[], None]) -> bool:
    """Whether a column of floats in these files has a NaN. Raises OSError and Arrow's errors."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import pyarrow.types as t

    floats = [field.name for field in schema if t.is_floating(field.type)]
    for path in paths if floats else ():
        with for_arrow(path) as opened, pq.ParquetFile(opened) as file:
            for batch in file.iter_batches(columns=floats):
                check()
                if any(pc.any(pc.is_nan(column)).as_py() for column in batch.columns):
                    return True
    return False


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
