"""Manifests whose records claim more than they hold, which pyiceberg's decoder trusts."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.avro.file import AvroFile
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import plan_table
from distop.tables.iceberg import avro, avro_records, iceberg_changes, manifest_facts
from distop.tables.iceberg.avro import Damaged
from distop.tables.iceberg.avro_records import RecordFile
from distop.tables.iceberg.metadata_file import read_metadata
from distop.tables.reading.file_facts import Unreadable
from tests.support.lake import Folder
from tests.unit.tables.iceberg.test_avro import MARK, file_of, number, text

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))
LISTS = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "n", "type": "long", "field-id": 1},
        {"name": "l", "type": {"type": "array", "items": "long", "element-id": 3}, "field-id": 2},
    ],
}


class Bytes:
    """The bytes of a file, as pyiceberg opens one."""

    location = "/a/b.avro"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self, seekable: bool = True) -> Any:
        return io.BytesIO(self._data)


def records(*blocks: tuple[int, bytes]) -> list[tuple[int, int]]:
    """The number of each record, and the length of its list."""
    given: Any = Bytes(file_of(*blocks, schema=json.dumps(LISTS)))
    with RecordFile[Any](given) as found:
        return [(record[0], len(record[1])) for record in found]


def record(n: int, *offsets: int) -> bytes:
    return number(n) + (number(len(offsets)) + b"".join(map(number, offsets)) if offsets else b"") + number(0)


def table_of(path: Path) -> Any:
    table = Folder(path).new(SCHEMA)
    table.append(pa.table({"id": [1]}))
    return table


def on_disk(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def manifest_of(table: Any) -> Path:
    (found,) = table.metadata.current_snapshot().manifests(table.io)
    return on_disk(found.manifest_path)


def encoded(schema: Any, value: Any, instead: dict[str, bytes]) -> bytes:
    """A value encoded by its Avro schema; ``instead`` has raw bytes for fields of these names."""
    if isinstance(schema, list):
        return number(0) if value is None else number(1) + encoded(schema[1], value, instead)
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(kind, dict | list):
        return encoded(kind, value, instead)
    if kind == "record":
        return b"".join(
            instead[f["name"]] if f["name"] in instead else encoded(f["type"], value.get(f["name"]), instead)
            for f in schema["fields"]
        )
    if kind in ("int", "long"):
        return number(value)
    assert kind == "string"
    return text(value.encode())


def with_field(table: Any, name: str, content: bytes, entries: int = 1, before: int = 0) -> Path:
    """Replace the manifest of a table by one whose entries have this raw content in one field.

    ``before``: number of entries without it before them in the same block.
    """
    path = manifest_of(table)
    with AvroFile[Any](table.io.new_input(str(path))) as reader:
        header = reader.header.meta
    (planned,) = plan_table(TableRecord("t", "iceberg", str(path.parent.parent))).partitions
    entry = {
        "status": 1,
        "data_file": {
            "content": 0,
            "file_path": planned.files[0][0],
            "file_format": "PARQUET",
            "partition": {},
            "record_count": 1,
            "file_size_in_bytes": planned.files[0][1],
        },
    }
    schema = json.loads(header["avro.schema"])
    body = encoded(schema, entry, {}) * before + encoded(schema, entry, {name: number(1) + content}) * entries
    meta = number(2) + text(b"avro.schema") + text(json.dumps(schema).encode())
    meta += text(b"avro.codec") + text(b"deflate") + number(0)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(body) + packer.flush()
    path.write_bytes(b"Obj\x01" + meta + MARK + number(before + entries) + text(block) + MARK)
    return path


def readings(table: Any) -> list[Callable[[], Any]]:
    root = on_disk(table.location())

    def differences() -> Any:
        metadata, files = read_metadata(str(on_disk(table.metadata_location)))
        with files.watched():
            return list(iceberg_changes.entries(metadata.current_snapshot().manifests(files), files, lambda: None))

    return [
        lambda: plan_table(TableRecord("t", "iceberg", str(root))),
        lambda: manifest_facts.snapshot_of(table.metadata_location, frozenset({"id"})),
        differences,
    ]


@pytest.mark.parametrize("size", [1, 64, 1_000, 5_000])
def test_records_of_any_number_and_size_are_read(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(avro_records, "RECORD_BYTES", 5_020)
    given = [record(n, *(m % 200 for m in range(n * 7 % size))) for n in range(300)]
    expected = [(n, n * 7 % size) for n in range(300)]
    assert records((300, b"".join(given))) == expected
    assert records(*((1, one) for one in given)) == expected


def test_hole_9_a_list_longer_than_its_data_is_damaged() -> None:
    """The decoder read on in the memory behind the manifest, until the process crashed."""
    for count in (3, 100, 1 << 27, 1 << 62, -1, -(1 << 27)):
        for end in (b"", b"\xff" * 2, number(1 << 60)):
            with pytest.raises(Damaged, match=r"/a/b.avro is damaged"):
                records((1, number(1) + number(count) + number(7) + end))
    with pytest.raises(Damaged, match="damaged"):
        records((1, record(1, 2, 3)[:-1]))
    with pytest.raises(Damaged, match="damaged"):
        records((1, record(1, 2, 3) + b"\0"))
    with pytest.raises(Damaged, match="damaged"):
        records((1, number(1)[:-1] + b"\x80"))


EMPTY = {"type": "record", "name": "e", "fields": []}


@pytest.mark.parametrize(
    "items", ["null", EMPTY, {"type": "record", "name": "f", "fields": [{**LISTS["fields"][0], "type": "null"}]}]
)  # type: ignore[index,dict-item]
def test_hole_9_a_list_of_items_without_bytes_is_not_read(items: Any) -> None:
    """It filled the memory, whatever the size of the manifest."""
    schema = {
        **LISTS,
        "fields": [{"name": "l", "type": {"type": "array", "items": items, "element-id": 3}, "field-id": 2}],
    }
    given: Any = Bytes(file_of((1, number(1 << 40) + number(0)), schema=json.dumps(schema)))
    with (
        pytest.raises(Damaged, match=r"/a/b.avro is damaged: it has a list of values without bytes"),
        RecordFile[Any](given),
    ):
        pass


CRASH = """
import sys
from distop.protocol.records import TableRecord
from distop.tables import plan_table
try:
    plan_table(TableRecord("t", "iceberg", sys.argv[1]))
except Exception as error:
    print(type(error).__name__)
"""


def test_hole_9_a_manifest_that_claims_a_long_list_crashes_no_process(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    with_field(table, "split_offsets", number(100_000_000) + number(7))
    ran = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, timeout=100, check=False)
    assert (ran.returncode, ran.stdout.decode().strip()) == (0, TableUnavailable.__name__)


def test_hole_9_a_bound_of_a_manifest_exposes_no_memory(tmp_path: Path) -> None:
    """Memory behind the manifest became the bound of a column."""
    table = table_of(tmp_path)
    with_field(table, "lower_bounds", number(1) + number(1) + number(1 << 20) + b"abc")
    for read in readings(table):
        with pytest.raises((TableUnavailable, Unreadable, Damaged), match="damaged"):
            read()


@pytest.mark.parametrize("before", [0, 3_000])
def test_hole_9_an_entry_of_a_manifest_is_bounded(tmp_path: Path, before: int) -> None:
    """A list of 130 million numbers, 260 kB when it is compressed, took 6 GB."""
    table = table_of(tmp_path)
    most = avro_records.RECORD_BYTES
    path = with_field(table, "split_offsets", number(most) + number(7) * most + number(0), before=before)
    assert path.stat().st_size < 200_000
    for read in readings(table):
        with pytest.raises(InvalidArgument, match=rf"{path.name} has an entry of more than {most} decompressed bytes"):
            read()


def test_hole_9_the_lists_of_all_entries_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java keeps them: 250 entries of a million numbers each, 280 kB when they are compressed, take 2 GB there."""
    table = table_of(tmp_path)
    path = with_field(table, "split_offsets", number(500) + number(7) * 500 + number(0), entries=3)
    monkeypatch.setattr(avro, "NUMBERS", 1_499)
    for read in readings(table)[::2]:
        with pytest.raises(InvalidArgument, match=rf"{path.name} have more than 1499 numbers"):
            read()
    monkeypatch.setattr(avro, "NUMBERS", 1_500)
    for read in readings(table):
        read()


def test_hole_9_planning_keeps_no_lists_of_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries of a manifest were in memory at once."""
    table = table_of(tmp_path)
    with_field(table, "split_offsets", number(500) + number(7) * 500 + number(0), entries=200)
    alive = most = 0

    class Counted(avro_records._Records):
        def __next__(self) -> Any:
            nonlocal alive, most
            found = super().__next__()
            alive += 1
            most = max(most, alive)
            weakref.finalize(found, gone)
            return found

    def gone() -> None:
        nonlocal alive
        alive -= 1

    monkeypatch.setattr(avro_records, "_Records", Counted)
    (planned,) = plan_table(TableRecord("t", "iceberg", str(tmp_path))).partitions
    assert len(planned.files) == 200
    assert most <= 3


@pytest.mark.parametrize("cached", [1 << 16, 0])
def test_files_of_one_schema_are_read_with_the_schemas_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    monkeypatch.setattr(avro_records, "CACHED_SCHEMA", cached)
    fields = [{"name": name, "type": "long", "field-id": n} for n, name in enumerate("abc")]

    def read(names: str, *values: int) -> list[tuple[int, ...]]:
        written = json.dumps({"type": "record", "name": "r", "fields": fields})
        given: Any = Bytes(file_of((1, b"".join(map(number, values))), schema=written))
        wanted = Schema(*(NestedField("abc".index(name), name, LongType(), required=True) for name in names))
        with RecordFile[Any](given, wanted) as found:
            return [tuple(record[n] for n in range(len(names))) for record in found]

    for _ in range(20):
        assert read("c", 1, 2, 3) == [(3,)]
        assert read("ba", 4, 5, 6) == [(5, 4)]
        assert read("abc", 7, 8, 9) == [(7, 8, 9)]
