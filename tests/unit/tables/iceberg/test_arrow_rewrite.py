"""Which files of an Iceberg table are copied with Arrow, and which are left to Spark."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BooleanType,
    DateType,
    DecimalType,
    FixedType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from distop.protocol.plan import PartitionPlan
from distop.tables.commits import Layout
from distop.tables.iceberg import arrow_rewrite
from distop.tables.iceberg.iceberg_fields import columns_of
from distop.tables.reading import arrow_copy
from distop.tables.reading.arrow_types import SparkOnly
from distop.tables.reading.file_facts import Gone

if TYPE_CHECKING:
    from pathlib import Path

POINT = StructType(NestedField(11, "x", LongType()), NestedField(12, "y", LongType()))
FIELDS = (
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "c", StringType()),
    NestedField(3, "price", DecimalType(9, 2)),
    NestedField(4, "at", TimestamptzType()),
    NestedField(5, "day", DateType()),
    NestedField(6, "flag", BooleanType()),
    NestedField(7, "point", POINT),
    NestedField(8, "tags", ListType(13, StringType(), element_required=False)),
)


def stored(path: Path, *fields: NestedField) -> str:
    """An empty Parquet file with these fields."""
    pq.write_table(schema_to_pyarrow(Schema(*fields)).empty_table(), path, store_schema=False)
    return str(path)


def check(path: str, *fields: NestedField) -> pa.Schema:
    """Check a file for a table with these fields."""
    schema = Schema(*fields)
    kinds = columns_of(schema)
    found = arrow_copy.common_schema([path], kinds, [frozenset(kinds)])
    arrow_rewrite.check_stored(schema, found)
    return found


def renumbered(one: NestedField, **change: Any) -> NestedField:
    return NestedField(**{"field_id": one.field_id, "name": one.name, "field_type": one.field_type, **change})


def test_files_with_the_fields_of_the_table_are_copied_with_their_ids(tmp_path: Path) -> None:
    found = check(stored(tmp_path / "a.parquet", *FIELDS), *FIELDS)
    assert [int(field.metadata[b"PARQUET:field_id"]) for field in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [int(f.metadata[b"PARQUET:field_id"]) for f in found.field("point").type] == [11, 12]
    assert all(field.nullable for field in found), "a NULL in a required column must stay a NULL"


def test_a_column_of_the_file_that_the_table_no_longer_has_is_not_copied(tmp_path: Path) -> None:
    assert "c" not in check(stored(tmp_path / "a.parquet", *FIELDS), *(one for one in FIELDS if one.name != "c")).names


@pytest.mark.parametrize(
    "now",
    [
        (*FIELDS, NestedField(20, "new", LongType())),
        (FIELDS[0], renumbered(FIELDS[1], field_id=21), *FIELDS[2:]),
        (FIELDS[0], renumbered(FIELDS[1], name="renamed"), *FIELDS[2:]),
        (*FIELDS[:2], renumbered(FIELDS[2], field_type=DecimalType(12, 2)), *FIELDS[3:]),
        (
            *FIELDS[:6],
            renumbered(FIELDS[6], field_type=StructType(*POINT.fields, NestedField(22, "z", LongType()))),
            FIELDS[7],
        ),
        (
            *FIELDS[:6],
            renumbered(FIELDS[6], field_type=StructType(POINT.fields[0], renumbered(POINT.fields[1], field_id=23))),
            FIELDS[7],
        ),
    ],
    ids=["added", "dropped and added again", "renamed", "wider type", "added inside", "other id inside"],
)
def test_a_changed_schema_is_left_to_spark(tmp_path: Path, now: tuple[NestedField, ...]) -> None:
    with pytest.raises(SparkOnly):
        check(stored(tmp_path / "a.parquet", *FIELDS), *now)


@pytest.mark.parametrize("kind", [TimeType(), UUIDType(), FixedType(4)], ids=str)
def test_a_type_that_spark_stores_in_another_way_is_left_to_spark(tmp_path: Path, kind: Any) -> None:
    fields = (FIELDS[0], NestedField(30, "other", kind))
    with pytest.raises(SparkOnly):
        check(stored(tmp_path / "a.parquet", *fields), *fields)


def test_a_file_without_ids_is_left_to_spark(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), tmp_path / "a.parquet", store_schema=False)
    with pytest.raises(SparkOnly):
        check(str(tmp_path / "a.parquet"), FIELDS[0])


class _Metadata:
    """What a decision needs of a table's metadata."""

    def __init__(self, version: int = 2, **properties: str) -> None:
        self.format_version = version
        self.properties = {name.replace("_", "-"): value for name, value in properties.items()}


@pytest.mark.parametrize(
    ("metadata", "sort_by"),
    [
        (_Metadata(3), ()),
        (_Metadata(2), ("id",)),
        (_Metadata(2, **{"write.parquet.row-group-size-bytes": "1000000"}), ()),
        (_Metadata(2, **{"write.parquet.bloom-filter-enabled.column.id": "true"}), ()),
        (_Metadata(2, **{"write.parquet.compression-codec": "lz4"}), ()),
    ],
    ids=["row ids", "sorted", "row groups", "bloom filters", "lz4"],
)
def test_what_only_icebergs_writer_does_is_left_to_spark(metadata: Any, sort_by: tuple[str, ...]) -> None:
    with pytest.raises(SparkOnly):
        arrow_rewrite.codec_of(metadata, Layout(1, 1 << 20, sort_by))


@pytest.mark.parametrize(
    ("given", "wanted", "expected"),
    [("", None, "zstd"), ("SNAPPY", None, "snappy"), ("uncompressed", None, "none"), ("lz4", "gzip", "gzip")],
)
def test_new_files_are_compressed_as_the_table_or_the_argument_says(
    given: str, wanted: str | None, expected: str
) -> None:
    metadata = _Metadata(2, **({"write.parquet.compression-codec": given} if given else {}))
    assert arrow_rewrite.codec_of(metadata, Layout(1, 1 << 20, codec=wanted)) == expected


@pytest.mark.parametrize(("values", "expected"), [([1.5, None, math.inf], False), ([1.5, math.nan], True)])
def test_values_that_are_no_numbers_are_found(tmp_path: Path, values: list[float | None], expected: bool) -> None:
    table = pa.table({"id": list(range(len(values))), "x": values})
    pq.write_table(table.slice(0, 1), tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet")
    paths = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    assert arrow_rewrite.has_nan(paths, table.schema, lambda: None) is expected


def test_files_that_are_no_parquet_files_are_left_to_spark_and_missing_ones_are_gone(tmp_path: Path) -> None:
    none: Any = None
    metadata: Any = type("Planned", (), {"schema": lambda _: Schema(*FIELDS)})()
    (tmp_path / "a.orc").write_bytes(b"ORC" * 100)
    for name, expected in (("a.orc", SparkOnly), ("b.parquet", Gone)):
        plan = PartitionPlan(0, "a#0", 300, ((str(tmp_path / name), 300, 0),))
        with pytest.raises(expected):
            arrow_rewrite.copied(plan, metadata, "zstd", 1, none, none)
