"""The example of docs/how-to/write-a-behavior.md is a real file of under 40 lines, and does what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from distop.behavior import TableRecord
from distop.behavior_source import BehaviorSource
from distop.testing import run_operation
from tests.support.tables import write_partitions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from distop.behavior import Behavior

pytestmark = pytest.mark.rotating

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "row_count.py"


@pytest.fixture(scope="module")
def row_count() -> type[Behavior]:
    return BehaviorSource.parse(f"{EXAMPLE}:RowCount").load()


def test_it_has_under_forty_lines_and_stands_in_the_documents() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 40
    assert text in (ROOT / "docs/how-to/write-a-behavior.md").read_text()


@pytest.mark.spark
def test_it_counts(row_count: type[Behavior], tmp_path: Path, spark: SparkSession) -> None:
    data = pa.table({"x": [1, 2, 3], "p": [1, 1, 2]})
    table = TableRecord("t", "parquet", str(write_partitions(data, tmp_path / "table", ["p"])))
    ran = run_operation(row_count, {"at_least": 2}, table=table, spark=spark)
    assert (ran.state, ran.report) == ("failed", {"rows": 2})
    assert ran.job("p=1").result == {"rows": 2}
    assert (ran.job("p=2").success, ran.job("p=2").error) == (False, "p=2 has 1 rows")


def test_its_declaration_can_be_published(row_count: type[Behavior]) -> None:
    declared = row_count.declaration()
    assert (declared.type_name, declared.completes, declared.batch) == ("row_count", True, False)
    assert declared.arg_schema["properties"]["at_least"]["type"] == "integer"
