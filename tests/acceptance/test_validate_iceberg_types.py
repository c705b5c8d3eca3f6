"""validate on Iceberg tables with columns whose types Spark lacks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.protocol.records import TableRecord
from distop.tables.iceberg import java_tables
from distop.tables.reading.file_facts import Unreadable
from distop_behaviors.validate import Validate
from tests.support.context import run_operation
from tests.support.lake import MAVEN, jar
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.context import FakeContext

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

UUIDS = [UUID(int=n).bytes for n in (1, 2)]
TYPES = {
    "time": pa.array([1, 2, None], pa.time64("us")),
    "timestamp_ns": pa.array([1, 2, None], pa.timestamp("ns")),
    "timestamptz_ns": pa.array([1, 2, None], pa.timestamp("ns", "UTC")),
    "uuid": pa.array([*UUIDS, None], pa.binary(16)),
}


def create(spark: SparkSession, folder: Path, name: str) -> TableRecord:
    """Create a table with ``id`` and a column ``x`` of this type, and commit a file with Iceberg's Java."""
    jvm: Any = spark._jvm
    iceberg, types = jvm.org.apache.iceberg, jvm.org.apache.iceberg.types.Types
    fields = jvm.java.util.ArrayList()
    fields.add(types.NestedField.optional(1, "id", types.LongType.get()))
    fields.add(types.NestedField.optional(2, "x", types.fromPrimitiveString(name)))
    properties = jvm.java.util.HashMap()
    properties.put("format-version", "3")
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    spec = iceberg.PartitionSpec.unpartitioned()
    table = iceberg.hadoop.HadoopTables(conf).create(iceberg.Schema(fields), spec, properties, str(folder))
    path = folder / "data" / "1.parquet"
    path.parent.mkdir()
    arrays = {"id": pa.array([1, 2, 3], pa.int64()), "x": TYPES[name]}
    schema = pa.schema(
        [pa.field(n, a.type, metadata={"PARQUET:field_id": str(i)}) for i, (n, a) in enumerate(arrays.items(), 1)]
    )
    pq.write_table(pa.table(arrays, schema), path)
    made = iceberg.DataFiles.builder(spec).withPath(str(path)).withFileSizeInBytes(path.stat().st_size)
    table.newAppend().appendFile(made.withRecordCount(3).withFormat("parquet").build()).commit()
    return TableRecord("t", "iceberg", str(folder))


def verdict_of(record: TableRecord, check: dict[str, Any], context: Any, **arg: Any) -> tuple[str, int, str | None]:
    (found,) = run_operation(Validate(), record, {"checks": [check], **arg}, context).report["checks"]
    return found["verdict"], found["violations"], found["error"]


def is_error(answer: tuple[str, int, str | None], sentence: str) -> bool:
    """Whether the answer is an error with this message."""
    return answer[:2] == ("error", 0) and re.search(sentence, answer[2] or "") is not None


@pytest.mark.parametrize("name", ["time", "timestamp_ns", pytest.param("timestamptz_ns", marks=pytest.mark.slow)])
def test_a_column_without_a_spark_type_does_not_prevent_checks_of_other_columns(
    name: str, spark: SparkSession, tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    """Its own checks are decided by statistics, or are errors that name the column."""
    need(jar(), MAVEN)
    record = create(spark, tmp_path / "t", name)
    for mode in ("auto", "only"):
        assert verdict_of(record, {"not_null": "x"}, context, statistics=mode) == ("violated", 1, None), mode
        assert verdict_of(record, {"not_null": "id"}, context, statistics=mode) == ("valid", 0, None), mode
        assert verdict_of(record, {"range": {"column": "id", "max": 3}}, context, statistics=mode) == (
            "valid",
            0,
            None,
        ), mode
    unread = f"the column 'x' of the file .*/1.parquet cannot be read: Iceberg does not read the type {name} in Spark"
    for check in ({"range": {"column": "x", "min": "2020-01-01"}}, {"unique": "x"}, {"check": "x IS NOT NULL"}):
        assert is_error(verdict_of(record, check, context), unread), check
    assert verdict_of(record, {"not_null": "id"}, context, statistics="never") == ("valid", 0, None)
    assert verdict_of(record, {"unique": "id"}, context) == ("valid", 0, None)
    assert verdict_of(record, {"check": "id > 1"}, context) == ("violated", 1, None)


@pytest.mark.parametrize("needed", ["partition", "delete"])
def test_a_column_without_a_spark_type_that_spark_needs_is_named(needed: str) -> None:
    fields = [{"id": 1, "name": "id", "type": "long"}, {"id": 2, "name": "x", "type": "time"}]
    nested = {"type": "struct", "fields": [{"id": 4, "name": "y", "type": "timestamp_ns"}]}
    schema = {"fields": [*fields, {"id": 3, "name": "s", "type": nested}]}
    java_tables.check_not_needed(schema, [1])
    assert java_tables.supported(schema) == {"fields": fields[:1]}
    column, number = ("x", 2) if needed == "partition" else ("s.y", 4)
    with pytest.raises(Unreadable, match=f"the table's column '{column}' has the type"):
        java_tables.check_not_needed(schema, [number])


@pytest.mark.parametrize("mode", ["auto", pytest.param("never", marks=pytest.mark.slow)])
def test_a_uuid_is_validated_as_text(
    mode: str, spark: SparkSession, tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    need(jar(), MAVEN)
    record = create(spark, tmp_path / "t", "uuid")
    first = str(UUID(bytes=UUIDS[0]))
    checks: list[tuple[dict[str, Any], tuple[str, int]]] = [
        ({"not_null": "x"}, ("violated", 1)),
        ({"range": {"column": "x", "max": first}}, ("violated", 1)),
        ({"in_set": {"column": "x", "values": [first]}}, ("violated", 1)),
        ({"length": {"column": "x", "min": 36, "max": 36}}, ("valid", 0)),
        ({"matches": {"column": "x", "pattern": "^0{8}-"}}, ("valid", 0)),
        ({"unique": "x"}, ("valid", 0)),
    ]
    arg = {"checks": [check for check, _ in checks], "statistics": mode}
    found = run_operation(Validate(), record, arg, context).report["checks"]
    assert [(c["verdict"], c["violations"]) for c in found] == [answer for _, answer in checks]
    assert verdict_of(record, {"not_null": "x"}, context, statistics="only") == ("violated", 1, None)
    assert verdict_of(record, {"length": {"column": "x", "max": 9}}, context, statistics="only") == ("unknown", 0, None)
