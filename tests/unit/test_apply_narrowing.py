"""What becomes of a schema, of what hangs on it, and of what was staged, without a JVM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import InvalidArgument
from distop_behaviors.apply import narrowing, rewriting
from distop_behaviors.apply.constraints import Narrowed, iceberg_type, wanted
from distop_behaviors.validate.certificate import Certificate, Certified, Column

if TYPE_CHECKING:
    from pathlib import Path

N = Narrowed("n_fits_int", "n", 2, "int", "int")
SCHEMA: dict[str, Any] = {
    "type": "struct",
    "schema-id": 3,
    "identifier-field-ids": [1],
    "fields": [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {"id": 2, "name": "n", "required": False, "type": "long", "doc": "how many"},
        {
            "id": 3,
            "name": "s",
            "required": False,
            "type": {"type": "struct", "fields": [{"id": 4, "name": "a", "required": False, "type": "long"}]},
        },
    ],
}


def certificate(*checks: dict[str, Any], **fields: Any) -> Certificate:
    made = [Certified(name=f"check{n}", check=check) for n, check in enumerate(checks)]
    columns = {"id": Column(id=1, type="long"), "n": Column(id=2, type="string")}
    told = {
        "table": "t", "format": "iceberg", "location": "/t", "operation": "t/validate/1", "time": "now", "version": "1",
        "checks": made, "columns": columns, **fields,
    }  # fmt: skip
    return Certificate.issue(**told)


def test_a_column_keeps_all_but_its_id_and_its_type() -> None:
    made = narrowing.new_schema(SCHEMA, [N], {2: 9}, [2, 4])
    assert made["fields"][1] == {"id": 9, "name": "n", "required": True, "type": "int", "doc": "how many"}
    assert (made["fields"][0], made["identifier-field-ids"]) == (SCHEMA["fields"][0], [1])
    assert made["fields"][2]["type"]["fields"][0]["required"]
    assert not made["fields"][2]["required"]
    assert not SCHEMA["fields"][2]["type"]["fields"][0]["required"], "the former schema was changed in place"


def test_a_name_mapping_finds_the_new_column() -> None:
    mapping = json.dumps([{"field-id": 1, "names": ["id"]}, {"field-id": 2, "names": ["n", "m"]}])
    made = json.loads(narrowing.mapped(mapping, {2: 9}) or "")
    assert made == [{"field-id": 1, "names": ["id"]}, {"field-id": 9, "names": ["n", "m"]}]
    assert narrowing.mapped(None, {2: 9}) is None


def test_a_scratch_table_writes_as_the_real_one_and_nowhere_else() -> None:
    properties = {
        "write.parquet.compression-codec": "zstd",
        "write.metadata.metrics.default": "full",
        "write.data.path": "/elsewhere",
        "write.object-storage.enabled": "true",
        "write.wap.enabled": "true",
        "write.metadata.path": "/elsewhere",
    }
    metadata = {
        "format-version": 1, "table-uuid": "u", "location": "/t", "last-column-id": 4, "schema": {},
        "schemas": [SCHEMA], "partition-spec": [], "partition-specs": [{"spec-id": 1, "fields": []}],
        "default-spec-id": 1,
        "properties": properties, "snapshots": [{"snapshot-id": 1}], "current-snapshot-id": 1, "refs": {"main": {}},
    }  # fmt: skip
    made = narrowing.scratch(metadata, narrowing.new_schema(SCHEMA, [N], {2: 9}), "file:///stage", "/t/data/distop-1")
    assert made["properties"] == {
        "write.parquet.compression-codec": "zstd",
        "write.metadata.metrics.default": "full",
        "write.data.path": "/t/data/distop-1",
    }
    assert (made["snapshots"], made["last-column-id"], made["partition-specs"]) == ([], 9, metadata["partition-specs"])
    assert "current-snapshot-id" not in made
    assert [field["required"] for field in made["schemas"][0]["fields"]] == [False] * 3


@pytest.mark.parametrize(
    ("spark", "iceberg"),
    [("bigint", "long"), ("decimal(9,2)", "decimal(9, 2)"), ("timestamp", "timestamptz"), ("smallint", None),
     ("timestamp_ntz", "timestamp"), ("varchar(3)", None)],
)  # fmt: skip
def test_types_have_icebergs_names(spark: str, iceberg: str | None) -> None:
    assert iceberg_type(spark) == iceberg


def test_what_a_certificate_wants_narrowed() -> None:
    fits = {"fits": {"column": "N", "type": "INTEGER"}}
    (found,) = wanted(certificate(fits)).narrowed
    assert found == Narrowed("check0", "n", 2, "int", "int")
    assert narrowing.needed([found], certificate(fits)) == [found]
    same = certificate({"fits": {"column": "n", "type": "string"}})
    assert narrowing.needed(wanted(same).narrowed, same) == []
    for other in ({"range": {"column": "n", "min": "5"}}, {"check": "`n` > id"}, {"length": {"column": "n", "max": 3}}):
        with pytest.raises(InvalidArgument, match="check1 looks at 'n' as the text that it is"):
            wanted(certificate(fits, other))
    assert wanted(certificate(fits, {"not_null": "n"}, {"check": "id > 0"})).required == {"check1": "n"}
    with pytest.raises(InvalidArgument, match="validate without where"):
        wanted(certificate(fits, where="id > 0"))


def staged(folder: Path, data: Path) -> None:
    metadata = folder / "table" / "metadata"
    metadata.mkdir(parents=True)
    told = {"properties": {"write.data.path": f"file://{data}"}}
    (metadata / "v1.metadata.json").write_text(json.dumps(told))
    data.mkdir(parents=True)
    (data / "a.parquet").touch()


def test_sweeping_removes_what_is_staged_and_no_file_of_the_table(tmp_path: Path) -> None:
    data = tmp_path / "t" / "data"
    for n in range(3):
        staged(tmp_path / "stage" / "1" / "00000" / f"{n}-inc", data / f"distop-{n}")
    staged(tmp_path / "stage" / "1" / "completion" / "x", data / "others")
    live = rewriting.live_files([f"file:{data}/distop-1/a.parquet", str(data / "b.parquet")])
    for _ in range(2):
        rewriting.sweep(str(tmp_path / "stage" / "1"), live)
        # A folder of another name was made by nobody here, whatever a stage says.
        assert {path.name for path in data.iterdir()} == {"distop-1", "others"}
        assert not (tmp_path / "stage" / "1").exists()


def test_a_stage_that_cannot_be_read_takes_nothing_along(tmp_path: Path) -> None:
    data = tmp_path / "t" / "data" / "distop-0"
    staged(tmp_path / "stage", data)
    (tmp_path / "stage" / "table" / "metadata" / "v1.metadata.json").write_text("{")
    rewriting.discard(str(tmp_path / "stage"), frozenset())
    assert data.exists()
    assert not (tmp_path / "stage").exists()
