"""The tables of ``scripts/bench maintenance``: each copy is a table of its own, with equal rows."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from benchmarks.maintained_tables import Copies, orphans
from pyiceberg.table import StaticTable

if TYPE_CHECKING:
    from pathlib import Path


def test_a_copy_of_an_iceberg_table_does_not_read_the_original(tmp_path: Path) -> None:
    original = orphans(tmp_path / "t000000", 3)
    rows = _read(original)
    first, second = (copies := Copies(original)).new(), copies.new()
    shutil.rmtree(original)
    shutil.rmtree(first)
    assert _read(second) == rows
    assert len(rows) == 10_000


def _read(location: Path) -> list[tuple[int, int]]:
    version = (location / "metadata" / "version-hint.text").read_text()
    table = StaticTable.from_metadata(str(location / "metadata" / f"v{version}.metadata.json"))
    found = table.scan().to_arrow()
    return sorted(zip(found["part"].to_pylist(), found["k"].to_pylist(), strict=True))
