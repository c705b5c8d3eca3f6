"""Forged lists of manifests: manifests of other tables, duplicates, and too many entries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.avro.file import AvroFile
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.tables import plan_table
from distop.tables.iceberg import avro, manifest_facts, manifest_list
from distop.tables.iceberg.iceberg_changes import equality_ids, new_files
from distop.tables.iceberg.metadata_file import read_metadata
from tests.support.lake import Folder
from tests.unit.tables.iceberg.test_avro import file_of
from tests.unit.tables.iceberg.test_avro_records import encoded, on_disk

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))


def table_of(path: Path, commits: int = 1) -> Any:
    table = Folder(path).new(SCHEMA)
    for n in range(commits):
        table.append(pa.table({"id": [n]}))
    return table


def planned(root: Path) -> list[str]:
    return [file[0] for part in plan_table(TableRecord("t", "iceberg", str(root))).partitions for file in part.files]


def rewrite(table: Any, *entries: dict[str, Any]) -> None:
    """Replace the list of manifests of a table: copies of its first entry with these fields."""
    path = on_disk(table.metadata.current_snapshot().manifest_list)
    with AvroFile[Any](table.io.new_input(str(path))) as reader:
        schema = json.loads(reader.header.meta["avro.schema"])
        first = next(iter(reader))
    names = [field["name"] for field in schema["fields"]]
    row = {name: first[n] for n, name in enumerate(names)} | {"partitions": None}
    path.write_bytes(file_of(*((1, encoded(schema, row | entry, {})) for entry in entries), schema=json.dumps(schema)))


def manifest_of(table: Any) -> str:
    """The path of the first manifest, read without filling a cache."""
    path = on_disk(table.metadata.current_snapshot().manifest_list)
    with AvroFile[Any](table.io.new_input(str(path))) as reader:
        return str(next(iter(reader))[0])


def readings(table: Any) -> list[Callable[[], Any]]:
    root = on_disk(table.location())
    first = str(table.metadata.snapshots[0].snapshot_id)

    def metadata() -> tuple[Any, Any]:
        return read_metadata(str(on_disk(table.metadata_location)))

    return [
        lambda: planned(root),
        lambda: manifest_facts.snapshot_of(table.metadata_location, frozenset({"id"})),
        lambda: new_files(*metadata(), first),
        lambda: equality_ids(*metadata()),
    ]


def test_hole_9_a_list_that_names_a_manifest_of_another_table_does_not_affect_that_table(tmp_path: Path) -> None:
    """pyiceberg caches it by the manifest's path for all tables: the other table had no files."""
    mine, victim = table_of(tmp_path / "mine"), table_of(tmp_path / "victim")
    rewrite(mine, {"manifest_path": manifest_of(victim), "content": 1})
    with pytest.raises(InvalidArgument, match="outside"):
        planned(tmp_path / "mine")
    assert len(planned(tmp_path / "victim")) == 1
    found = manifest_facts.snapshot_of(victim.metadata_location, frozenset({"id"}))
    assert len(found.files) == 1


def test_hole_9_a_list_that_names_a_manifest_twice_is_refused(tmp_path: Path) -> None:
    """A list that named one manifest of 240 kB a thousand times was read for hours."""
    table = table_of(tmp_path, commits=2)
    path = str(on_disk(manifest_of(table)))
    for again in (path, f"file://{path}", f"file:{path}"):
        rewrite(table, {"manifest_path": path}, {"manifest_path": again})
        for read in readings(table):
            with pytest.raises(InvalidArgument, match=f"has the manifest {re.escape(again)} twice"):
                read()


def test_hole_9_manifests_of_a_snapshot_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has an entry for each manifest, and each of these has one."""
    table = table_of(tmp_path, commits=4)
    monkeypatch.setattr(manifest_list, "MANIFESTS", 3)
    for read in readings(table):
        with pytest.raises(InvalidArgument, match="more than 3 manifests"):
            read()
    monkeypatch.undo()
    monkeypatch.setattr(avro, "ENTRIES", 7)
    for read in readings(table)[:2]:
        with pytest.raises(InvalidArgument, match="more than 7 entries"):
            read()
    monkeypatch.undo()
    monkeypatch.setattr(avro, "TOTAL_BYTES", 1_000)
    for read in readings(table)[:2]:
        with pytest.raises(InvalidArgument, match="or 1000 decompressed bytes"):
            read()
    monkeypatch.undo()
    for read in readings(table):
        read()


def test_manifests_of_a_million_files_pass() -> None:
    """With statistics of a hundred columns, each file removed once, and read twice."""
    assert avro.ENTRIES >= 2 * 2 * 1_000_000
    assert avro.TOTAL_BYTES >= 2 * 1_000_000 * 100 * 54
