"""The next metadata file of an Iceberg table: other fields stay, and Iceberg's rules for a new schema hold."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidArgument
from distop.tables.iceberg.metadata_change import CODEC, changed_metadata, next_file
from distop.tables.iceberg.metadata_file import hinted_version, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from distop.tables.iceberg.metadata_file import MetadataFile

NOW = 1_800_000_000.5
FIELD = {"id": 4, "name": "a", "required": False, "type": "int", "doc": "inside"}
INNER = {"type": "struct", "fields": [FIELD]}
LIST = {
    "type": "list",
    "element-id": 6,
    "element": {"type": "struct", "fields": [{**FIELD, "id": 7}]},
    "element-required": False,
}
SCHEMA: dict[str, Any] = {
    "type": "struct",
    "schema-id": 3,
    "fields": [
        {"id": 1, "name": "id", "required": False, "type": "long", "of-tomorrow": [1.5]},
        {"id": 3, "name": "s", "required": False, "type": INNER},
        {"id": 5, "name": "l", "required": False, "type": LIST},
    ],
}
METADATA: dict[str, Any] = {
    "format-version": 2,
    "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
    "location": "/t",
    "last-sequence-number": 0,
    "last-updated-ms": 1_700_000_000_000,
    "last-column-id": 7,
    "schemas": [{"type": "struct", "schema-id": 8, "fields": []}, SCHEMA],
    "current-schema-id": 3,
    "partition-specs": [{"spec-id": 0, "fields": []}],
    "default-spec-id": 0,
    "last-partition-id": 999,
    "sort-orders": [{"order-id": 0, "fields": []}],
    "default-sort-order-id": 0,
    "properties": {"a": "1", "b": "2"},
    "of-tomorrow": {"x": 12345678901234567890},
}


def read(folder: Path, metadata: dict[str, Any], name: str = "v3.metadata.json") -> MetadataFile:
    path = folder / "metadata" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(metadata))
    return read_file(str(path))


def test_only_the_change_differs(tmp_path: Path) -> None:
    file = read(tmp_path, METADATA)
    made = json.loads(changed_metadata(file, {1: True, 4: True, 7: True}, {"a": None, "c": "ü"}, NOW))
    wanted = json.loads(json.dumps(SCHEMA)) | {"schema-id": 9}
    wanted["fields"][0]["required"] = wanted["fields"][1]["type"]["fields"][0]["required"] = True
    assert made == METADATA | {
        "schemas": [*METADATA["schemas"], wanted],
        "current-schema-id": 9,
        "properties": {"b": "2", "c": "ü"},
        "last-updated-ms": 1_800_000_000_500,
        "metadata-log": [{"timestamp-ms": 1_700_000_000_000, "metadata-file": f"file://{file.source}"}],
    }


def test_a_known_schema_gets_no_new_id(tmp_path: Path) -> None:
    changed = json.loads(changed_metadata(read(tmp_path, METADATA), {1: True}, {}, NOW))
    file = read(tmp_path, changed, "v4.metadata.json")
    back = json.loads(changed_metadata(file, {1: False}, {}, 0.0))
    assert (back["current-schema-id"], back["schemas"]) == (3, changed["schemas"])
    # The clock of this machine is behind.
    assert back["last-updated-ms"] == changed["last-updated-ms"]
    assert [entry["metadata-file"][-16:] for entry in back["metadata-log"]] == ["v3.metadata.json", "v4.metadata.json"]
    properties_only = json.loads(changed_metadata(file, {}, {"n": "1"}, NOW))
    assert (properties_only["current-schema-id"], len(properties_only["schemas"])) == (9, 3)


@pytest.mark.parametrize("start", ["", "file:", "file://"])
def test_the_log_spells_files_as_the_table_its_location(tmp_path: Path, start: str) -> None:
    file = read(tmp_path, METADATA | {"location": f"{start}{tmp_path}/"})
    (entry,) = json.loads(changed_metadata(file, {}, {}, NOW))["metadata-log"]
    assert entry["metadata-file"] == f"{start}{file.source}"


def test_format_version_1_keeps_its_single_schema(tmp_path: Path) -> None:
    old = {name: value for name, value in METADATA.items() if name not in ("schemas", "current-schema-id")}
    old |= {"format-version": 1, "schema": {n: v for n, v in SCHEMA.items() if n != "schema-id"}, "partition-spec": []}
    file = read(tmp_path, old)
    text = changed_metadata(file, {1: True}, {}, NOW)
    made = json.loads(text)
    assert (made["current-schema-id"], len(made["schemas"]), made["schema"]) == (1, 2, made["schemas"][1])
    assert read(tmp_path, made, "v4.metadata.json").content.schema().find_field(1).required


def test_the_next_file_is_named_and_compressed_as_the_table_asks() -> None:
    text = json.dumps({"properties": {}})
    assert next_file("/t/metadata/v9.gz.metadata.json", text) == ("v10.metadata.json", text.encode())
    text = json.dumps({"properties": {CODEC: "GZIP"}})
    name, data = next_file("s3://lake/t/metadata/v0.metadata.json", text)
    assert (name, gzip.decompress(data)) == ("v1.gz.metadata.json", text.encode())
    for properties, why in (
        ({CODEC: "zip"}, "the unknown value 'zip'"),
        ({"write.metadata.path": "/elsewhere"}, "has the property write.metadata.path"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            next_file("/t/metadata/v1.metadata.json", json.dumps({"properties": properties}))
    with pytest.raises(InvalidArgument, match="belongs to a catalog"):
        next_file("/t/metadata/00001-abc.metadata.json", "{}")


def test_a_version_hint_may_have_no_number() -> None:
    assert [hinted_version(text) for text in ("12\n", "3", "", "x")] == [12, 3, None, None]
