"""Narrowing of column types: schema, name mapping, properties and stages, without a JVM."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.behavior import OutcomeRow, PartitionPlan, Summary, TableRecord
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.deletion import Place
from distop.storage.opened_stores import store_of
from distop.storage.places import TABLE_MARKER, Attempt, stage_of
from distop.storage.stage_manifest import write_manifest
from distop.tables.iceberg import staging_table
from distop.tables.iceberg.table_properties import for_reading, for_writing
from distop_behaviors.apply import Apply, file_rewrite, staged_files, type_narrowing
from distop_behaviors.apply.apply_report import CertifiedArgument, Staged
from distop_behaviors.apply.constraints import ICEBERG, PREFIX, Narrowed, iceberg_type, schema_changes
from distop_behaviors.apply.rewrite_publication import Narrowing
from distop_behaviors.apply.staged_files import StageFolders
from distop_behaviors.validate.certificate import Certificate, Certified, Column
from tests.support.context import FakeContext, sweep_stages
from tests.support.lake import Folder as Lake

LOG = logging.getLogger("tests.narrowing")
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
    contents = {
        "table": "t", "format": "iceberg", "location": "/t", "operation": "t/validate/1", "time": "now", "version": "1",
        "checks": made, "columns": columns, **fields,
    }  # fmt: skip
    return Certificate.issue(**contents)


def test_a_narrowed_column_keeps_all_but_its_id_and_type() -> None:
    made = type_narrowing.new_schema(SCHEMA, [N], {2: 9}, [2, 4])
    assert made["fields"][1] == {"id": 9, "name": "n", "required": True, "type": "int", "doc": "how many"}
    assert (made["fields"][0], made["identifier-field-ids"]) == (SCHEMA["fields"][0], [1])
    assert made["fields"][2]["type"]["fields"][0]["required"]
    assert not made["fields"][2]["required"]
    assert not SCHEMA["fields"][2]["type"]["fields"][0]["required"], "the former schema was changed in place"


def test_a_name_mapping_finds_the_new_column() -> None:
    mapping = json.dumps([{"field-id": 1, "names": ["id"]}, {"field-id": 2, "names": ["n", "m"]}])
    made = json.loads(type_narrowing.new_name_mapping(mapping, {2: 9}) or "")
    assert made == [{"field-id": 1, "names": ["id"]}, {"field-id": 9, "names": ["n", "m"]}]
    assert type_narrowing.new_name_mapping(None, {2: 9}) is None


def test_a_staging_table_writes_like_the_real_one_and_only_into_its_stage() -> None:
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
    made = staging_table.staging_metadata(
        metadata, type_narrowing.new_schema(SCHEMA, [N], {2: 9}), "file:///stage", "/t/data/distop-1"
    )
    assert made["properties"] == {
        "write.parquet.compression-codec": "zstd",
        "write.metadata.metrics.default": "full",
        "write.data.path": "/t/data/distop-1",
    }
    assert (made["snapshots"], made["last-column-id"], made["partition-specs"]) == ([], 9, metadata["partition-specs"])
    assert "current-snapshot-id" not in made
    assert [field["required"] for field in made["schemas"][0]["fields"]] == [False] * 3


@pytest.mark.parametrize(("location", "allowed"), [
    ("/lake/t", True), ("file:///lake/t", True), ("s3://lake/t", True), ("s3a://lake/t", True), ("gs://lake/t", False),
    ("hdfs://host/t", False),
])  # fmt: skip
def test_tables_on_a_disk_and_in_s3_are_rewritten(location: str, allowed: bool) -> None:
    if allowed:
        type_narrowing.check_rewritable(location)
    else:
        with pytest.raises(InvalidArgument, match=f"which works in S3 and on local paths .* is at {location}"):
            type_narrowing.check_rewritable(location)


def test_staged_files_have_the_scheme_of_their_table() -> None:
    data = Place("s3://lake/t", "data/distop-staged/x")
    assert file_rewrite.data_url("s3a://lake/t", data) == "s3a://lake/t/data/distop-staged/x"
    assert file_rewrite.data_url("/t", Place("/t", "data/x")) == "file:///t/data/x"
    live = staged_files.live_folders(["s3a://lake/t/data/distop-staged/x/a.parquet"])
    assert live == {"s3://lake/t/data/distop-staged/x"}


HOSTILE = {
    "fs.file.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
    "fs.file.impl.disable.cache": "true",
    "net.topology.script.file.name": "/t/script.sh",
    "write.location-provider.impl": "org.example.Provider",
    "write.parquet.fs.file.impl": "org.example.FileSystem",
    "write.parquet.compression-codec": "org.example.Codec",
    "write.parquet.row-group-size-bytes": "9223372036854775807",
    "write.parquet.bloom-filter-max-bytes": "2147483647",
    "write.metadata.metrics.column.a\nfs.file.impl": "full",
    "parquet.crypto.factory.class": "org.example.Factory",
    "encryption.key-id": "k",
    "write.object-storage.enabled": "true",
    "read.parquet.vectorization.batch-size": "2147483647",
}
"""Properties that would choose code, hosts, paths or memory in Hadoop's configuration or in Iceberg."""


def test_hole_2_properties_of_a_table_choose_no_code_of_readers_and_writers() -> None:
    mapping = {"schema.name-mapping.default": "[]"}
    asked = {
        "write.parquet.compression-codec": "ZSTD",
        "write.parquet.row-group-size-bytes": "268435456",
        "write.target-file-size-bytes": "134217728",
    }
    assert for_writing(HOSTILE) == {}
    assert for_writing(HOSTILE | mapping | asked) == asked
    assert for_reading(HOSTILE | mapping | asked) == mapping


@pytest.mark.parametrize(
    ("spark", "iceberg"),
    [("bigint", "long"), ("decimal(9,2)", "decimal(9, 2)"), ("timestamp", "timestamptz"), ("smallint", None),
     ("timestamp_ntz", "timestamp"), ("varchar(3)", None)],
)  # fmt: skip
def test_spark_types_map_to_iceberg_types(spark: str, iceberg: str | None) -> None:
    assert iceberg_type(spark) == iceberg


def test_fits_checks_become_narrowed_columns() -> None:
    fits = {"fits": {"column": "N", "type": "INTEGER"}}
    (found,) = schema_changes(certificate(fits), ICEBERG).narrowed
    assert found == Narrowed("check0", "n", 2, "int", "int")
    assert type_narrowing.columns_to_narrow([found], certificate(fits)) == [found]
    same = certificate({"fits": {"column": "n", "type": "string"}})
    assert type_narrowing.columns_to_narrow(schema_changes(same, ICEBERG).narrowed, same) == []
    for other in ({"range": {"column": "n", "min": "5"}}, {"check": "`n` > id"}, {"length": {"column": "n", "max": 3}}):
        with pytest.raises(InvalidArgument, match="check1 checks 'n' as text"):
            schema_changes(certificate(fits, other), ICEBERG)
    assert schema_changes(certificate(fits, {"not_null": "n"}, {"check": "id > 0"}), ICEBERG).required == {
        "check1": "n"
    }
    with pytest.raises(InvalidArgument, match="validate without 'where'"):
        schema_changes(certificate(fits, where="id > 0"), ICEBERG)


OPERATION = "t/apply/2"


class Layout:
    """Stages of operations on one table, with a data file each."""

    def __init__(self, home: Path) -> None:
        self.shared = Place(str(home / "shared"), "c0ffee")
        self.table = home / "t"
        self.data = self.table / "data"

    def stage(self, op: str = OPERATION, fence: int = 1) -> StageFolders:
        return StageFolders.of(
            stage_of(self.shared, Attempt(op, 0, fence, "inc")), self.shared, "c0ffee", str(self.table)
        )

    def write(self, stage: StageFolders, content: str = "{}") -> StageFolders:
        """Write the files of an attempt: its metadata and one data file."""
        metadata = Path(stage.table) / "metadata"
        metadata.mkdir(parents=True)
        (metadata / "v1.metadata.json").write_text(content)
        (Path(stage.place.location) / TABLE_MARKER).touch()
        Path(stage.data.location).mkdir(parents=True)
        (Path(stage.data.location) / "a.parquet").touch()
        return stage


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def test_stages_are_in_the_shared_directory_and_data_below_the_table(layout: Layout) -> None:
    attempt, table = Attempt(OPERATION, 0, 1, "inc"), str(layout.table)
    remote = Place("s3://lake/shared", "c0ffee")
    stage = StageFolders.of(stage_of(remote, attempt), remote, "c0ffee", table)
    assert stage.place.location == "s3://lake/shared/c0ffee/stage/t/apply/2/000000/1-inc"
    assert stage.data.location == f"{table}/data/distop-staged/c0ffee/t/apply/2/000000/1-inc"
    assert stage.place.own, "only in folders that no other user may change"
    with pytest.raises(UnsafePath, match="is not a stage in"):
        StageFolders.of(stage_of(Place("s3://other", "c0ffee"), attempt), remote, "c0ffee", table)


def test_discarding_removes_a_stage_and_no_file_of_the_table(layout: Layout) -> None:
    stages = [layout.write(layout.stage(fence=n)) for n in range(3)]
    live = staged_files.live_folders([f"file:{stages[1].data.location}/a.parquet", str(layout.data / "b.parquet")])
    for _ in range(2):
        for stage in stages:
            staged_files.discard(stage, live, LOG)
            assert not Path(stage.place.location).exists()
    assert [Path(stage.data.location).exists() for stage in stages] == [False, True, False]


def test_the_content_of_a_stage_does_not_choose_the_folder_to_remove(layout: Layout) -> None:
    """Its metadata named the folder that was removed."""
    foreign = layout.data / "distop-0"
    foreign.mkdir(parents=True)
    (foreign / "a.parquet").touch()
    metadata = json.dumps({"properties": {"write.data.path": f"file://{foreign}"}})
    stage = layout.write(layout.stage(), metadata)
    staged_files.discard(stage, frozenset(), LOG)
    assert (foreign / "a.parquet").exists()
    assert not Path(stage.data.location).exists()


def test_data_without_a_stage_is_not_removed(layout: Layout) -> None:
    """In a cleanup after the end of the operation, files of a former snapshot stay, too."""
    stage = layout.write(layout.stage())
    shutil.rmtree(stage.place.location)
    staged_files.discard(stage, frozenset(), LOG)
    assert (Path(stage.data.location) / "a.parquet").exists()


@pytest.mark.parametrize("where", ["shared", "table"])
def test_nothing_is_discarded_through_a_link(layout: Layout, where: str, tmp_path: Path) -> None:
    stage = layout.write(layout.stage())
    linked = Path(stage.place.location if where == "shared" else stage.data.location).parent
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    staged_files.discard(stage, frozenset(), LOG)
    assert list((tmp_path / "elsewhere").iterdir())


def test_only_files_of_a_stage_are_published(layout: Layout, tmp_path: Path) -> None:
    stage = layout.write(layout.stage())
    stage.check_file(f"file:{stage.data.location}/a.parquet")
    other = layout.write(layout.stage("t/apply/1"))
    (tmp_path / "secret").touch()
    (Path(stage.data.location) / "link.parquet").symlink_to(tmp_path / "secret")
    for path in (
        str(tmp_path / "secret"),
        f"{other.data.location}/a.parquet",
        f"{stage.data.location}/../1-inc-other/a.parquet",
        f"{stage.data.location}/../../../../../../../secret",
        f"{stage.data.location}/link.parquet",
        f"{stage.data.location}x/a.parquet",
    ):
        with pytest.raises(UnsafePath):
            stage.check_file(path)


def test_the_result_of_a_job_does_not_choose_where_files_are_read() -> None:
    for field in ("folder", "metadata", "data"):
        with pytest.raises(ValidationError):
            Staged.model_validate({"files": 1, "rows": 1, "bytes": 1, field: "/etc"})


def narrowing(layout: Layout, op: str) -> Narrowing:
    """The completion of an operation."""
    table = TableRecord("t", "iceberg", str(layout.table))
    ctx = FakeContext(layout.table.parent, table)
    ctx.operation, ctx.shared, ctx.space = op, layout.shared, "c0ffee"
    checks = ({"fits": {"column": "n", "type": "int"}}, {"check": "id > 0"})
    request = CertifiedArgument(certificate(*checks), 10.0)
    target: Any = None
    return Narrowing(request, table, target, ctx)


def test_executors_remove_stages_of_this_and_earlier_operations(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apply swept all folders beside the folder that a result named. No version of the table names a file."""
    monkeypatch.setattr("distop.tables.reachability_of", lambda *_: SimpleNamespace(all_files=lambda removed: ()))
    gone = [layout.write(layout.stage(f"t/apply/{n}")) for n in (1, 2)]
    kept = [layout.write(layout.stage(op)) for op in ("t/apply/3", "u/apply/1", "t/other/1")]
    other = Place(layout.shared.anchor, "c0ffee-two")
    staged = stage_of(other, Attempt(OPERATION, 0, 1, "inc"))
    kept.append(layout.write(StageFolders.of(staged, other, "c0ffee-two", str(layout.table))))
    for _ in range(2):
        sweep_stages(Apply(), narrowing(layout, OPERATION)._ctx)
        assert not any(Path(place.location).exists() for stage in gone for place in (stage.place, stage.data))
        assert all(Path(place.location).exists() for stage in kept for place in (stage.place, stage.data))


def test_the_completion_rewrites_files_that_no_executor_has_staged(layout: Layout) -> None:
    """A job returned by ``return_job`` has any result: rows would be lost, or others published."""
    stages = [layout.write(layout.stage(fence=n)) for n in range(1, 5)]
    mine, metadata = narrowing(layout, OPERATION), SimpleNamespace(current_schema_id=1, last_column_id=4)
    ids = type_narrowing.new_ids(metadata, mine._narrowed)
    made_for = staged_files.purpose_of(mine._certificate.digest, mine._narrowed)
    given = {"files": 1, "rows": 2, "bytes": 3}
    results = []
    for n, stage in enumerate(stages):
        contents = staged_files.contents_of([f"/t/{n}"], 1, 4, ids)
        contents |= {"staged": given, "snapshot": "7", "made_for": made_for}
        store_of(stage.place).put(staged_files.CONTENTS, json.dumps(contents).encode())
        output = write_manifest(stage.place, {staged_files.CONTENTS: None}, data=stage.data, in_table={"a.parquet": 2})
        results.append({"staged": {**given, "output": output.model_dump()}})
    (Path(stages[1].data.location) / "a.parquet").write_text("cut")
    store_of(stages[2].place).put(staged_files.CONTENTS, b"{}")
    rows = [
        OutcomeRow(0, "a", True, results[0], "", stages[0].place),
        OutcomeRow(1, "changed data", True, results[1], "", stages[1].place),
        OutcomeRow(2, "changed contents", True, results[2], "", stages[2].place),
        OutcomeRow(3, "another manifest", True, results[0], "", stages[3].place),
        OutcomeRow(4, "no manifest", True, {"staged": given}, "", stages[3].place),
        OutcomeRow(5, "no stage", True, results[0], ""),
        OutcomeRow(6, "nothing", True, {"staged": {"files": 0, "rows": 0, "bytes": 0}}, ""),
        OutcomeRow(7, "odd", True, {"staged": {"files": 1, "folder": "/etc"}}, "", stages[0].place),
        OutcomeRow(8, "none", True, None, "", stages[0].place),
        OutcomeRow(9, "list", True, [1], "", stages[0].place),
    ]
    plans = [PartitionPlan(n, row.name, files=((f"/t/{n}", 1, 1),)) for n, row in enumerate(rows)]
    summary = Summary("success", 10, 10, 0, lambda: iter(rows), plan=lambda: iter(plans))
    (unit,) = mine._units(summary, metadata)
    assert (unit.files, unit.snapshot, unit.staged.rows) == (frozenset({"/t/0"}), "7", 2)


@pytest.mark.parametrize("where", ["", "stage", "stage/t/apply/7/000000/1-inc"])
def test_hole_2_a_stage_that_another_user_may_have_written_is_not_read(layout: Layout, where: str) -> None:
    """Its name comes from an outcome, which a submitter may write."""
    stage, ids = layout.write(layout.stage("t/apply/7")), {1: 5}
    contents = staged_files.contents_of(["/t/0"], 1, 4, ids)
    contents |= {"staged": {"files": 1, "rows": 2, "bytes": 3}, "snapshot": "7", "made_for": "it"}
    store_of(stage.place).put(staged_files.CONTENTS, json.dumps(contents).encode())
    assert staged_files.staged_data(stage, ["/t/0"], 1, 4, ids, "it") is not None
    others = Path(layout.shared.location) / where
    others.chmod(0o777)
    assert staged_files.staged_data(stage, ["/t/0"], 1, 4, ids, "it") is None
    with pytest.raises(UnsafePath, match=f"below {others}, which is writable"):
        stage.metadata()


@pytest.mark.parametrize(
    "end", ["", " -- a comment", " -- a comment\\", " -- one\n-- two", " /* a comment */", " OR s = '--'"]
)
@pytest.mark.parametrize("null_is", ["pass", "fail"])
def test_a_bracket_closes_after_the_comment_of_a_condition(end: str, null_is: str) -> None:
    """A comment ends with its line. A backslash at the line's end makes the next line part of it."""
    made = certificate({"check": f"n > 0{end}"}, where=f"id > 0{end}", null_is=null_is)
    sql = json.loads(schema_changes(made, ICEBERG).properties[f"{PREFIX}check0"])["sql"]
    code = re.sub(r"--(?:\\\n|[^\n])*|/\*.*?\*/", "", re.sub(r"'[^']*'", "''", sql))
    assert code.count("(") == code.count(")") >= 3, sql
    assert code.index("IS NOT TRUE") > code.index(")"), sql
    assert f"id > 0{end}" in sql
    assert f"n > 0{end}" in sql


def test_a_condition_that_ends_in_a_comment_is_bracketed() -> None:
    (sql,) = (
        json.loads(text)["sql"]
        for text in schema_changes(certificate({"check": "n > 0 -- why"}), ICEBERG).properties.values()
    )
    assert sql == "(n > 0 -- why\n\n)"


def test_a_condition_without_a_comment_keeps_its_line() -> None:
    made = certificate({"check": "n > 0"}, where="id > 0", null_is="fail")
    sql = json.loads(schema_changes(made, ICEBERG).properties[f"{PREFIX}check0"])["sql"]
    assert sql == "((id > 0) IS NOT TRUE) OR ((n > 0) IS TRUE)"


def test_hole_1_no_rows_of_a_file_that_became_a_link_are_rewritten(tmp_path: Path) -> None:
    """The completion writes rows that were not validated, by a plan that may be cached."""
    table = Lake(tmp_path / "t").new(Schema(NestedField(1, "k", LongType())))
    table.append(pa.table({"k": [1, 2]}))
    (path,) = (tmp_path / "t" / "data").rglob("*.parquet")
    files = [(str(path), path.stat().st_size, 0)]
    other = path.rename(tmp_path / "other.parquet")
    path.symlink_to(other)
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        file_rewrite.stage(None, table.metadata_location, files, [], {}, None, "")  # type: ignore[arg-type]


def test_hole_1_a_revert_changes_only_properties_that_apply_sets(layout: Layout) -> None:
    """A forged mark names any property; pyiceberg runs code by some of them."""
    applying, own = narrowing(layout, "t/apply/1"), f"{PREFIX}check1"
    forged = {"write.py-location-provider.impl": "runpy.run_path", "write.metadata.path": "/x", own: {"a": 1}}
    assert applying._old_properties({"properties": forged}) == {}
    honest = {own: None, "schema.name-mapping.default": "[]"}
    assert applying._old_properties({"properties": honest}) == honest


@pytest.mark.parametrize("start", ["", "file:", "file://"])
def test_the_fields_of_a_new_file_are_read_however_its_path_is_spelled(tmp_path: Path, start: str) -> None:
    """Java writes paths on a disk with the scheme."""
    schema = pa.schema([pa.field("n", pa.int64(), metadata={"PARQUET:field_id": "7"})])
    pq.write_table(pa.table({"n": [1]}, schema), tmp_path / "a.parquet")
    assert file_rewrite.has_fields(f"{start}{tmp_path}/a.parquet", [7])
    assert not file_rewrite.has_fields(f"{start}{tmp_path}/a.parquet", [7, 8])
