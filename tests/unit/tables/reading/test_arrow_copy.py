"""Which Parquet files are copied without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.tables.reading.arrow_copy import common_schema, compare, copy
from distop.tables.reading.arrow_types import SparkOnly

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"l": [{"s": "é"}, None]}, {"l": None}, {"l": [{"s": None}]}]
KINDS = {"l": ("array", ("struct", (("s", "string"),)))}


def written(path: Path, text: pa.DataType, element: str) -> str:
    """A file with a list of structs, by a writer with these names and types in memory."""
    kind = pa.list_(pa.field(element, pa.struct([("s", text)])))
    pq.write_table(pa.Table.from_pylist(ROWS, pa.schema([("l", kind)])), path, use_compliant_nested_type=False)
    return str(path)


def test_files_whose_nested_types_differ_only_in_memory_are_copied(tmp_path: Path) -> None:
    kinds = ((pa.string(), "item"), (pa.large_string(), "element"), (pa.large_string(), "item"))
    paths = [written(tmp_path / f"{n}.parquet", text, element) for n, (text, element) in enumerate(kinds)]
    schema = common_schema(paths, KINDS, [frozenset({"l"})] * 3)
    (done,) = copy(paths, schema, tmp_path, 1, "zstd", lambda: None, lambda n: f"new-{n}.parquet")
    new = str(tmp_path / done.name)
    assert compare(paths, [new], schema, lambda: None) == 9
    assert pq.read_table(new).to_pylist() == ROWS * 3


def test_files_whose_nested_types_differ_need_spark(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{n}.parquet", kind, "item") for n, kind in enumerate((pa.string(), pa.binary()))]
    with pytest.raises(SparkOnly, match="has another type of 'l'"):
        common_schema(paths, KINDS, [frozenset({"l"})] * 2)
