"""The example of docs/how-to/write-a-behavior.md is a real file of under 40 lines, and does what the page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from distop.behavior import TableRecord
from tests.support.context import run_operation
from tests.support.tables import write_partitions

if TYPE_CHECKING:
    from distop.behavior import Behavior

pytestmark = pytest.mark.rotating

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "row_count.py"


@pytest.fixture(scope="module")
def row_count() -> Behavior:
    spec = importlib.util.spec_from_file_location("row_count", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    behavior: Behavior = module.RowCount()
    return behavior


def test_it_has_under_forty_lines_and_stands_in_the_documents() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 40
    assert text in (ROOT / "docs/how-to/write-a-behavior.md").read_text()


@pytest.mark.spark
def test_it_counts(row_count: Behavior, tmp_path: Path, context: Any) -> None:
    data = pa.table({"x": [1, 2, 3], "p": [1, 1, 2]})
    table = TableRecord("t", "parquet", str(write_partitions(data, tmp_path / "table", ["p"])))
    ran = run_operation(row_count, table, {"at_least": 2}, context)
    assert ran.report == {"rows": 2}
    assert ran.by_name["p=1"].result == {"rows": 2}
    assert (ran.by_name["p=2"].success, ran.by_name["p=2"].error) == (False, "p=2 has 1 rows")


def test_its_declaration_can_be_published(row_count: Behavior) -> None:
    declared = row_count.declaration()
    assert (declared.type_name, declared.completes, declared.batch) == ("row_count", True, False)
    assert declared.arg_schema["properties"]["at_least"]["type"] == "integer"
