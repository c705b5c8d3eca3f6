"""The files of a Parquet folder are those that its listing finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import reachability_of
from distop.tables.formats import Format
from distop.tables.reachability import DATA

if TYPE_CHECKING:
    from pathlib import Path


def test_the_listing_is_the_table(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"a": [1]}), tmp_path / f"day={day}" / "x.parquet")
    (tmp_path / "_SUCCESS").touch()
    found = reachability_of(TableRecord("t", "parquet", str(tmp_path)))
    assert [unit.name for unit in found.units()] == ["day=1", "day=2"]
    files = list(found.all_files())
    assert {file.path for file in files} == {f"{tmp_path}/day={day}/x.parquet" for day in (1, 2)}
    assert {file.kind for file in files} == {DATA}
    assert all(file.size for file in files)
    assert (found.place, found.source, found.versions()) == (str(tmp_path), "", ())


def test_an_empty_folder_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(TableUnavailable, match="is empty"):
        list(reachability_of(TableRecord("t", "parquet", str(tmp_path))).all_files())


def test_another_format_cannot_tell(tmp_path: Path) -> None:
    class Other(Format):
        def check_table(self, record: TableRecord) -> TableRecord:
            return record

        def plan_table(self, *_: Any) -> Any: ...

        def reader(self, *_: Any) -> Any: ...

    with pytest.raises(InvalidArgument, match="the format csv .* does not list the files"):
        Other().reachability(TableRecord("t", "csv", str(tmp_path)), lambda: None, lambda: None)
