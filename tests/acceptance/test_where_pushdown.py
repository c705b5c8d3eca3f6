"""Which conditions of ``where`` Spark pushes down to the file reader, by format, and that no row is lost by it.

A reader skips rows by the statistics, dictionaries and pages of a file. For floats and times that would be wrong.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyiceberg.catalog import Catalog

from distop.behavior import TableRecord
from distop.tables import plan_table, reader_of
from distop.tables.reading.file_facts import FileFacts
from distop_behaviors.reading.check_session import session_of
from distop_behaviors.validate import Validate
from distop_behaviors.validate.scan import FileGroup, relation
from distop_behaviors.validate.violation_columns import where_condition, where_true
from tests.support import delta, lake
from tests.support.context import run_operation
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.support.context import FakeContext

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240), pytest.mark.rotating]

FORMATS = ("parquet", "iceberg", "delta")
ROWS = 100
START = datetime(2020, 1, 1, tzinfo=UTC)
TYPES = {
    "i": pa.int32(),
    "s": pa.string(),
    "d": pa.date32(),
    "m": pa.decimal128(9, 2),
    "b": pa.bool_(),
    "f": pa.float32(),
    "g": pa.float64(),
    "t": pa.timestamp("us", "UTC"),
    "n": pa.timestamp("us"),
    "safe": pa.struct([("a", pa.int32())]),
    "mixed": pa.struct([("a", pa.int32()), ("g", pa.float64())]),
}
PUSHED = {
    "i > 30": "GreaterThan(i,30)",
    "i in (1, 2)": "In(i, [1,2])",
    "s = 'v7'": "EqualTo(s,v7)",
    "s is null": "IsNull(s)",
    "d >= date'2020-02-01'": "GreaterThanOrEqual(d,2020-02-01)",
    "m < 5": "LessThan(m,5.00)",
    "b": "EqualTo(b,true)",
    "safe.a = 7": "EqualTo(safe.a,7)",
    "i > 30 and s is not null": "GreaterThan(i,30)",
    "i % 2 = 0": "[IsNotNull(i)]",
}
"""Condition → a filter that Spark pushes down for it."""
KEPT = (
    "f > 1",
    "g > 1",
    "g is null",
    "t > timestamp'2020-01-01 00:01:00Z'",
    "n > timestamp_ntz'2020-01-01 00:01:00'",
    "mixed.g > 1",
    "mixed.a = 7",
    "i > 30 and g > 1",
    "i > 30 or t is null",
)
"""Conditions that Spark evaluates for each row."""


def rows() -> pa.Table:
    """Rows with NULLs, a NaN, and zeros of both signs."""
    numbers = range(ROWS)
    times = [START + timedelta(seconds=n, microseconds=n) for n in numbers]
    floats = [float("nan") if n == 5 else -0.0 if n == 6 else n / 8 for n in numbers]
    columns: dict[str, list[Any]] = {
        "i": list(numbers),
        "s": [None if n % 9 == 0 else f"v{n}" for n in numbers],
        "d": [date(2020, 1, 1) + timedelta(n) for n in numbers],
        "m": [Decimal(n) / 4 for n in numbers],
        "b": [n % 2 == 0 for n in numbers],
        "f": floats,
        "g": floats,
        "t": times,
        "n": [time.replace(tzinfo=None) for time in times],
        "safe": [{"a": n} for n in numbers],
        "mixed": [{"a": n, "g": n / 8} for n in numbers],
    }
    return pa.table({name: pa.array(columns[name], kind) for name, kind in TYPES.items()})


@pytest.fixture(scope="module")
def frames(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, DataFrame]:
    """The same rows as tables of the formats, as ``validate`` reads them."""
    need(delta.jars(), delta.MAVEN)
    need(lake.jar(), lake.MAVEN)
    root, data = tmp_path_factory.mktemp("pushdown"), rows()
    (root / "parquet").mkdir()
    pq.write_table(data, root / "parquet" / "a.parquet", row_group_size=25)
    lake.Folder(root / "iceberg").new(Catalog._convert_schema_if_needed(data.schema)).append(data)
    write_deltalake(root / "delta", data)
    return {name: _read(spark, TableRecord(name, name, str(root / name))) for name in FORMATS}


def _read(spark: SparkSession, record: TableRecord) -> DataFrame:
    planned = plan_table(record).partitions
    reader, files = reader_of(record, planned), [file for partition in planned for file in partition.files]
    (facts,) = reader.facts(files, frozenset(TYPES), lambda: None)
    assert isinstance(facts, FileFacts)
    return relation(session_of(spark), FileGroup(tuple(files), facts.columns, reader))


def pushed(frame: DataFrame) -> str:
    """The filters that the file reader gets, from the physical plan."""
    leaves = frame._jdf.queryExecution().sparkPlan().collectLeaves()
    assert leaves.size() == 1
    leaf = leaves.apply(0)
    if leaf.getClass().getSimpleName() == "FileSourceScanExec":
        return str(leaf.metadata().apply("PushedFilters"))
    return str(leaf.scan().description())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("condition", [*PUSHED, *KEPT])
def test_only_conditions_that_lose_no_row_are_pushed_down(
    name: str, condition: str, frames: Mapping[str, DataFrame]
) -> None:
    frame = frames[name]
    chosen = where_true(frame, where_condition(frame.sparkSession, condition))
    found = pushed(chosen)
    if name == "iceberg":
        # Its reader gets the planned files, and no filter.
        assert "filters" not in found.lower(), found
    elif condition in PUSHED:
        assert PUSHED[condition] in found
    else:
        assert found == "[]"
    # Without a filter in the plan.
    by_row = frame.selectExpr("i", f"({condition}) as chosen").collect()
    assert sorted(row.i for row in chosen.collect()) == [row.i for row in by_row if row.chosen]


def test_rows_are_not_confused_if_pages_are_skipped_and_rows_deleted(
    spark: SparkSession, tmp_path: Path, context: Callable[[TableRecord], FakeContext]
) -> None:
    """Deleted rows are found by their positions, also behind pages that the reader skips."""
    need(delta.jars(), delta.MAVEN)
    made = delta.DeltaLake(delta.writing_session(spark), tmp_path)
    properties = {"delta.enableDeletionVectors": "true", "delta.enableTypeWidening": "true"}
    record = made.create("t", "id int, c int", **properties)
    made.sql("insert into {t} select cast(id as int), cast(id % 10 as int) from range(0, 100000, 1, 1)", "t")
    made.sql("delete from {t} where id % 7 = 3", "t")
    made.sql("alter table {t} alter column id type bigint", "t")
    left = [n for n in range(100_000) if n % 7 != 3]
    for where, chosen in {
        "id between 70000 and 70100": [n for n in left if 70_000 <= n <= 70_100],
        "id > 99990": [n for n in left if n > 99_990],
        "id < 3000000000": left,
        "id > 3000000000": [],
    }.items():
        for statistics in ("auto", "never"):
            argument = {"checks": [{"check": "c <> 4"}], "where": where, "statistics": statistics}
            report = run_operation(Validate(), record, argument, context).report
            found = report["rows"], report["checks"][0]["violations"]
            assert found == (len(chosen), sum(n % 10 == 4 for n in chosen)), (where, statistics)
