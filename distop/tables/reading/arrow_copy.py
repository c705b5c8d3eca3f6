"""Copies the rows of Parquet files into fewer or more files with Arrow, without a JVM, and compares the copy.

Only files of one schema whose types Arrow and Spark store alike are copied (SparkOnly). The rows keep their order, so
the comparison reads input and output side by side.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.storage.files import for_arrow
from distop.tables.reading.arrow_types import SparkOnly, arrow_type, check_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from distop.tables.reading.file_facts import SparkType

_BATCH_ROWS = 65_536
_GROUP_BYTES = 64 << 20
"""Bytes in memory from which a row group is written."""
_CODEC = "snappy"
_CODECS = ("snappy", "zstd", "gzip", "none", "lz4")
_LEVELS = {"zstd": 3}
"""The levels of Spark, Iceberg and Delta, where Arrow's differ."""
_LEGACY = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_VERSION = b"org.apache.spark.version"
_FIELD_ID = b"PARQUET:field_id"
_ELEMENT = "element"
"""The name of a list's elements in new files, as in Parquet's specification."""


@frozen
class Copied:
    """A written file."""

    name: str
    size: int
    rows: int


def common_schema(paths: Sequence[str], kinds: Mapping[str, SparkType], names: Sequence[frozenset[str]]) -> pa.Schema:
    """The schema of the columns ``kinds``, for files that all store them alike. ``names``: those that each file has.

    Raises SparkOnly if the files differ, or if Arrow would not store their values as they are, and OSError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, pa.Field] = {}
    stamps: set[bytes | None] = set()
    for path, own in zip(paths, names, strict=True):
        with for_arrow(path) as file:
            metadata = pq.read_metadata(file)
        arrow = metadata.schema.to_arrow_schema()
        check_leaves(metadata.schema, arrow)
        if len(set(arrow.names)) < len(arrow.names) or any("." in name for name in arrow.names):
            raise SparkOnly(f"the file {path} has columns with equal names or with a dot")
        stored = {**(arrow.metadata or {}), **(metadata.metadata or {})}
        if any(key in stored for key in _LEGACY):
            raise SparkOnly(f"the file {path} has times of an old calendar")
        stamps.add(stored.get(_VERSION))
        for name in own:
            if name not in arrow.names:
                raise SparkOnly(f"the file {path} has no column {name!r}")
            mine = plain(arrow.field(name))
            if not found.setdefault(name, mine).equals(mine, check_metadata=True):
                raise SparkOnly(f"the file {path} has another type of {name!r} than other files")
    fields = [found.get(name) or pa.field(name, arrow_type(kind)) for name, kind in kinds.items()]
    if not fields:
        raise SparkOnly("the files have no columns")
    for field in fields:
        _check_type(field.type, inner=False)
    if len(stamps) > 1 and any(_has_times(field.type) for field in fields):
        raise SparkOnly("the files were written by different engines, whose calendars may differ")
    stamp = next(iter(stamps))
    return pa.schema(fields, metadata={_VERSION: stamp} if stamp is not None and len(stamps) == 1 else None)


def plain(field: Any) -> Any:
    """A column that may be NULL, with its id, and the types of Arrow that new files have (:func:`_plain_type`)."""
    import pyarrow as pa

    return pa.field(field.name, _plain_type(field.type), metadata=_ids(field))


def _plain_type(kind: Any) -> Any:
    """The type without what differs only in memory or in names of elements, which some writers keep in their files."""
    import pyarrow as pa
    import pyarrow.types as t

    if t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_large_binary(kind) or t.is_binary_view(kind):
        return pa.binary()
    if t.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        return pa.struct([pa.field(f.name, _plain_type(f.type), f.nullable, _ids(f)) for f in fields])
    if t.is_list(kind) or t.is_large_list(kind):
        inner = kind.value_field
        return pa.list_(pa.field(_ELEMENT, _plain_type(inner.type), inner.nullable, _ids(inner)))
    return kind


def _ids(field: Any) -> dict[bytes, bytes] | None:
    number = (field.metadata or {}).get(_FIELD_ID)
    return {_FIELD_ID: number} if number is not None else None


def copy(
    paths: Sequence[str],
    schema: pa.Schema,
    folder: Path,
    outputs: int,
    codec: str,
    check: Callable[[], None],
    name_of: Callable[[int], str],
    copying: Callable[[int, int], None] = lambda rows, of: None,
) -> list[Copied]:
    """Write the rows of these files, in order, into at most ``outputs`` files of about equal size.

    ``check`` is called regularly, and raises to stop; ``copying`` with the number of copied rows and of all rows.
    Raises OSError and Arrow's errors.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    total = sum(rows_in(path) for path in paths)
    done: list[Copied] = []
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        path = folder
        held: list[pa.RecordBatch] = []
        held_bytes = held_rows = in_file = copied = 0

        def flush() -> None:
            nonlocal held_bytes, held_rows, in_file
            if held and writer is not None:
                writer.write_table(pa.Table.from_batches(held, schema), row_group_size=max(held_rows, 1))
                in_file += held_rows
                held.clear()
                held_bytes = held_rows = 0

        def close() -> None:
            nonlocal writer, in_file
            flush()
            if writer is not None:
                writer.close()
                done.append(Copied(path.name, path.stat().st_size, in_file))
                writer, in_file = None, 0

        for batch in _batches(paths, schema):
            check()
            at = 0
            while at < batch.num_rows:
                limit = -(-total * (len(done) + 1) // outputs)  # the row at which this file ends
                if writer is None:
                    path = folder / name_of(len(done))
                    writer = stack.enter_context(_writer(pq, path, schema, codec))
                part = batch.slice(at, min(batch.num_rows - at, max(limit - copied, 1)))
                held.append(part)
                held_rows += part.num_rows
                held_bytes += part.nbytes
                copied += part.num_rows
                at += part.num_rows
                if held_bytes >= _GROUP_BYTES:
                    flush()
                if copied >= limit:
                    close()
            copying(copied, total)
        close()
    return done


def compare(paths: Sequence[str], copies: Sequence[str], schema: pa.Schema, check: Callable[[], None]) -> int:
    """The number of rows of these files, which the copies have in the same order. Raises ValueError if they differ."""
    rows = 0
    left, right = _batches(paths, schema), _batches(copies, schema)
    mine: pa.RecordBatch | None = None
    other: pa.RecordBatch | None = None
    while True:
        check()
        if mine is None or not mine.num_rows:
            mine = next(left, None)
        if other is None or not other.num_rows:
            other = next(right, None)
        if mine is None or other is None:
            if mine is not other:
                raise ValueError(f"the new files have {'fewer' if other is None else 'more'} than {rows} rows")
            return rows
        count = min(mine.num_rows, other.num_rows)
        if not _equal(mine.slice(0, count), other.slice(0, count)):
            raise ValueError(f"the new files differ from their source near row {rows}")
        mine, other = mine.slice(count), other.slice(count)
        rows += count


def write_empty(path: Path, schema: pa.Schema, codec: str) -> None:
    """Write a file without rows."""
    import pyarrow.parquet as pq

    with _writer(pq, path, schema, codec):
        pass


def codec_of(path: str) -> str:
    """The compression of a file: with another one, copies of it would have other sizes."""
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        metadata = pq.read_metadata(file)
    if not metadata.num_row_groups or not metadata.row_group(0).num_columns:
        return _CODEC
    found = str(metadata.row_group(0).column(0).compression).lower()
    return {"uncompressed": "none", "lz4_raw": "lz4"}.get(found, found if found in _CODECS else _CODEC)


def rows_in(path: str) -> int:
    """The number of rows in the footer of a file. Raises OSError and Arrow's errors."""
    import pyarrow.parquet as pq

    with for_arrow(path) as file:
        return int(pq.read_metadata(file).num_rows)


def _batches(paths: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of files as batches with exactly this schema. A column that a file lacks is NULL."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in paths:
        with for_arrow(path) as opened, pq.ParquetFile(opened) as file:
            present = set(file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH_ROWS, columns=[name for name in schema.names if name in present]):
                if batch.num_rows:
                    arrays = [_column(batch, field) for field in schema]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(batch: pa.RecordBatch, field: Any) -> Any:
    import pyarrow as pa

    at = batch.schema.get_field_index(field.name)
    if at < 0:
        return pa.nulls(batch.num_rows, field.type)
    found = batch.column(at)
    return found if found.type.equals(field.type) else found.cast(field.type)


def _equal(mine: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    return all(_bits(a).equals(_bits(b)) for a, b in zip(mine.columns, other.columns, strict=True))


def _bits(array: pa.Array) -> pa.Array:
    """Floats as numbers of their bits, since NaN differs from itself."""
    import pyarrow as pa
    import pyarrow.types as t

    if t.is_float64(array.type):
        return array.view(pa.int64())
    return array.view(pa.int32()) if t.is_float32(array.type) else array


def _writer(pq: Any, path: Path, schema: pa.Schema, codec: str) -> Any:
    return pq.ParquetWriter(
        path,
        schema,
        compression=codec,
        compression_level=_LEVELS.get(codec),
        store_schema=False,
        store_decimal_as_integer=True,
        use_deprecated_int96_timestamps=False,
    )


def _has_times(kind: Any) -> bool:
    import pyarrow.types as t

    if t.is_nested(kind):
        return any(_has_times(kind.field(n).type) for n in range(kind.num_fields))
    return bool(t.is_date(kind) or t.is_timestamp(kind))


def _check_type(kind: Any, *, inner: bool) -> None:
    """Raises SparkOnly for a type that Arrow would not store as it is, or whose values cannot be compared by bits."""
    import pyarrow.types as t

    if t.is_struct(kind) or t.is_list(kind):
        for n in range(kind.num_fields):
            _check_type(kind.field(n).type, inner=True)
        return
    plain = (
        t.is_boolean(kind)
        or t.is_signed_integer(kind)
        or t.is_string(kind)
        or t.is_binary(kind)
        or t.is_date32(kind)
        or t.is_decimal128(kind)
        or (t.is_timestamp(kind) and kind.unit == "us" and kind.tz in (None, "UTC"))
        or (t.is_floating(kind) and not t.is_float16(kind) and not inner)
    )
    if not plain:
        raise SparkOnly(f"values of the type {kind} are not copied without Spark")
