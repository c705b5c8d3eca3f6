"""``export`` with ``register``: the copies are a table of Iceberg or Delta at the target."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import Operation, Snapshot, SnapshotLogEntry, Summary
from pyiceberg.typedef import Record

from distop import testing
from distop.behavior import TableRecord
from distop.errors import InvalidArgument
from distop.storage import export_targets
from distop.storage.folder_store import FolderStore
from distop.storage.location import Location
from distop.tables import plan_table, table_copy_of
from distop.tables.delta.delta_log import current_snapshot
from distop.tables.iceberg.metadata_file import current_metadata_file
from distop_behaviors.export import Export
from tests.support.delta_logs import DeltaLog, features, metadata, vector
from tests.support.evolving_tables import evolve
from tests.support.export_runs import ExportRun
from tests.support.table_files import LoggedFolder
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

REGISTER = {"register": {"name": "copy"}}
PATH_ID, POS_ID = 2_147_483_546, 2_147_483_545


@pytest.fixture(autouse=True)
def _allowed(tmp_path: Path) -> Iterator[None]:
    export_targets.configure([str(tmp_path / "out")])
    yield
    export_targets.configure(())


def run_of(tmp_path: Path, form: str, tables: tuple[TableRecord, ...] = ()) -> ExportRun:
    record = TableRecord("t", form, str(tmp_path / "t"))
    return ExportRun(record, str(tmp_path / "out" / "t"), tmp_path / "work", tables)


def registered(run: ExportRun, form: str) -> TableRecord:
    return TableRecord("copy", form, run.target)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def of_the_table(folder: Path) -> dict[str, bytes]:
    """The files without the manifests of the export, which have the inodes of copies."""
    found = everything(folder)
    return {name: data for name, data in found.items() if not name.endswith(("_MANIFEST.json", "_EXPORT.json"))}


def of_iceberg(folder: Path, snapshot: int | None = None) -> Counter[str]:
    table = StaticTable.from_metadata(current_metadata_file(Location.of(str(folder))))
    return Counter(map(repr, table.scan(snapshot_id=snapshot).to_arrow().to_pylist()))


def of_delta(folder: Path, version: int | None = None) -> Counter[str]:
    return Counter(map(repr, DeltaTable(folder, version=version).to_pyarrow_table().to_pylist()))


def without(folder: Path) -> Path:
    """The folder, after the tests have made its name unusable, so that nothing reads the original."""
    return folder.rename(folder.with_name("moved-away"))


# ---------------------------------------------------------------------- Iceberg


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 150))])
def test_an_evolved_table_keeps_its_rows(tmp_path: Path, seed: int, version: int) -> None:
    evolve(seed, tmp_path / "t", version=version)
    before, expected = everything(tmp_path / "t"), of_iceberg(tmp_path / "t")
    run = run_of(tmp_path, "iceberg")
    ran = run.run(**REGISTER)
    assert (ran.report["complete"], ran.report["registered"]) == (True, "copy")
    assert run.registrations == [registered(run, "iceberg")]
    assert everything(tmp_path / "t") == before
    without(tmp_path / "t")
    assert of_iceberg(tmp_path / "out" / "t") == expected
    planned = plan_table(registered(run, "iceberg"))
    assert planned.version == ran.report["version"]


def test_ids_and_properties_are_kept_and_history_is_not(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, BY_K, **{"a": "b", "write.data.path": str(tmp_path / "elsewhere")})
    table.metadata.properties.pop("write.data.path")
    for k in "abc":
        table.append(rows(k))
    run = run_of(tmp_path, "iceberg")
    run.run(**REGISTER)
    made = StaticTable.from_metadata(current_metadata_file(Location.of(run.target))).metadata
    assert (made.location, len(made.snapshots), made.metadata_log) == (run.target, 1, [])
    assert made.current_snapshot_id == table.metadata.current_snapshot_id
    assert made.last_sequence_number == table.metadata.last_sequence_number
    assert made.schema() == table.metadata.schema()
    assert made.partition_specs == table.metadata.partition_specs
    assert made.properties["a"] == "b"
    assert "write.data.path" not in made.properties
    assert made.table_uuid != table.metadata.table_uuid


def test_a_version_of_iceberg_is_registered(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, BY_K)
    for k in "abc":
        table.append(rows(k))
    second = table.metadata.snapshots[1].snapshot_id
    table.update_schema().add_column("more", SCHEMA.find_type("id")).commit()
    expected = of_iceberg(tmp_path / "t", second)
    run = run_of(tmp_path, "iceberg")
    run.run(version=str(second), **REGISTER)
    assert of_iceberg(tmp_path / "out" / "t") == expected
    assert sum(expected.values()) == 2


class _DeleteManifest(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def delete_positions(table: Table, number: int, positions: dict[str, list[int]], *, bounds: bool) -> None:
    """Commit a file of position deletes, as merge-on-read writers do."""
    folder, snapshot = Path(table.metadata.location), table.metadata.current_snapshot()
    assert snapshot is not None
    pairs = sorted((path, pos) for path, found in positions.items() for pos in found)
    schema = pa.schema(
        [
            pa.field("file_path", pa.string(), nullable=False, metadata={"PARQUET:field_id": str(PATH_ID)}),
            pa.field("pos", pa.int64(), nullable=False, metadata={"PARQUET:field_id": str(POS_ID)}),
        ]
    )
    path = folder / "data" / f"deletes-{number}.parquet"
    pq.write_table(pa.table([[one for one, _ in pairs], [pos for _, pos in pairs]], schema=schema), path)
    limits = {PATH_ID: pairs[0][0].encode()}, {PATH_ID: pairs[-1][0].encode()}
    file = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=str(path),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(pairs),
        file_size_in_bytes=path.stat().st_size,
        lower_bounds=limits[0] if bounds else None,
        upper_bounds=limits[1] if bounds else None,
        split_offsets=[4],
        column_sizes={PATH_ID: 5},
    )
    file.spec_id = 0
    new, sequence = snapshot.snapshot_id + 1, table.metadata.last_sequence_number + 1
    where = folder / "metadata" / f"deletes-{number}.avro"
    entry = ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, snapshot_id=new, data_file=file)
    with _DeleteManifest(table.spec(), table.schema(), table.io.new_output(str(where)), new, "deflate") as writer:
        writer.add_entry(entry)
    listed = folder / "metadata" / f"snap-{new}.avro"
    with write_manifest_list(2, table.io.new_output(str(listed)), new, None, sequence, "deflate") as lists:
        lists.add_manifests([writer.to_manifest_file(), *snapshot.manifests(table.io)])
    made = Snapshot(
        snapshot_id=new,
        sequence_number=sequence,
        timestamp_ms=snapshot.timestamp_ms + 1,
        manifest_list=str(listed),
        summary=Summary(Operation.DELETE),
        schema_id=table.schema().schema_id,
    )
    log = SnapshotLogEntry(snapshot_id=new, timestamp_ms=made.timestamp_ms)
    changed = {
        "snapshots": [*table.metadata.snapshots, made],
        "refs": {"main": SnapshotRef(snapshot_id=new, snapshot_ref_type="branch")},
        "current_snapshot_id": new,
        "last_sequence_number": sequence,
        "last_updated_ms": made.timestamp_ms,
        "snapshot_log": [*table.metadata.snapshot_log, log],
    }
    text = table.metadata.model_copy(update=changed).model_dump_json()
    table.metadata = TableMetadataUtil.parse_raw(text)
    table.metadata_location = table.catalog.write(table.metadata)  # type: ignore[attr-defined]


@pytest.mark.parametrize("bounds", [True, False])
def test_position_deletes_name_the_copies(tmp_path: Path, bounds: bool) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, **{"format-version": "2"})
    for _ in range(2):
        table.append(rows(*"abcdef"))
    files = [str(one["file_path"]) for one in table.inspect.files().to_pylist()]
    delete_positions(table, 1, {files[0]: [0, 3]}, bounds=bounds)
    table.append(rows(*"xyz"))
    delete_positions(table, 2, {files[0]: [1], files[1]: [5]}, bounds=bounds)
    expected = of_iceberg(tmp_path / "t")
    assert sum(expected.values()) == 11
    plain = run_of(tmp_path, "iceberg")
    with pytest.raises(InvalidArgument, match="with 'register' they are exported"):
        plain.plan()
    run = run_of(tmp_path, "iceberg")
    run.run(**REGISTER)
    without(tmp_path / "t")
    assert of_iceberg(tmp_path / "out" / "t") == expected
    found = pq.read_table(tmp_path / "out" / "t" / "data" / "deletes-2.parquet")
    assert all(Path(str(path)).is_file() for path in found["file_path"].to_pylist())
    assert found.schema.field("file_path").metadata == {b"PARQUET:field_id": str(PATH_ID).encode()}


def test_a_newer_version_replaces_the_registered_one(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, BY_K)
    table.append(rows("a"))
    run = run_of(tmp_path, "iceberg")
    run.run(**REGISTER)
    first = everything(tmp_path / "out" / "t")
    run = run_of(tmp_path, "iceberg", (registered(run, "iceberg"),))
    ran = run.run(**REGISTER)
    assert everything(tmp_path / "out" / "t") == first
    assert ran.report["reused"]["files"] == 1
    table.overwrite(rows("b", "c"))
    run.run(**REGISTER)
    assert of_iceberg(tmp_path / "out" / "t") == of_iceberg(tmp_path / "t")
    assert (tmp_path / "out" / "t" / "metadata" / "version-hint.text").read_text() == "2"


def test_a_table_that_others_have_changed_is_not_overwritten(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, BY_K)
    table.append(rows("a"))
    run = run_of(tmp_path, "iceberg")
    run.run(**REGISTER)
    there = LoggedFolder(tmp_path / "out" / "t")
    there.version = 1
    source = str(tmp_path / "out" / "t" / "metadata" / "v1.metadata.json")
    Table(("copy",), StaticTable.from_metadata(source).metadata, source, there.io, there).append(rows("z"))
    before = everything(tmp_path / "out" / "t" / "metadata")
    table.append(rows("b"))
    run = run_of(tmp_path, "iceberg", (registered(run, "iceberg"),))
    with pytest.raises(InvalidArgument, match="has been changed since it was exported"):
        run.run(**REGISTER)
    after = everything(tmp_path / "out" / "t" / "metadata")
    assert {name: after[name] for name in before} == before


def test_format_version_3_is_refused(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, **{"format-version": "2"})
    table.append(rows("a"))
    newest = Path(table.metadata_location)
    text = newest.read_text().replace('"format-version":2', '"format-version":3,"next-row-id":0')
    newest.write_text(text)
    with pytest.raises(InvalidArgument, match="row ids belong to the original files"):
        run_of(tmp_path, "iceberg").plan(**REGISTER)


# ---------------------------------------------------------------------- Delta


@pytest.mark.parametrize("partitions", [[], ["k"]])
def test_versions_of_delta_are_registered_one_after_the_other(tmp_path: Path, partitions: list[str]) -> None:
    for n in range(4):
        table = pa.table({"k": ["a/b", "ü %"], "v": [n, n]})
        write_deltalake(
            tmp_path / "t", table, mode="overwrite" if n == 2 else "append", partition_by=partitions or None
        )
    before, tables = everything(tmp_path / "t"), tuple[TableRecord, ...]()
    for version in ("1", "1", "3"):
        run = run_of(tmp_path, "delta", tables)
        ran = run.run(version=version, **REGISTER)
        tables = (registered(run, "delta"),)
        assert run.registrations == list(tables)
        assert (ran.report["version"], ran.report["registered"]) == (version, "copy")
        assert of_delta(tmp_path / "out" / "t") == of_delta(tmp_path / "t", int(version))
    assert everything(tmp_path / "t") == before
    log = tmp_path / "out" / "t" / "_delta_log"
    assert sorted(one.name for one in log.iterdir()) == [f"{n:020}.json" for n in range(2)]
    without(tmp_path / "t")
    assert of_delta(tmp_path / "out" / "t") == of_delta(tmp_path / "moved-away")
    write_deltalake(tmp_path / "out" / "t", pa.table({"k": ["z"], "v": [9]}), mode="append")
    (tmp_path / "moved-away").rename(tmp_path / "t")
    with pytest.raises(InvalidArgument, match="has been changed since it was exported"):
        run.run(**REGISTER)


def test_files_of_deletion_vectors_are_copied_with_the_log(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t")
    log.create(features("deletionVectors"))
    (tmp_path / "t" / "ab").mkdir()
    text = "ab" + "0" * 20
    (tmp_path / "t" / "ab" / "deletion_vector_00000000-0000-0000-0000-000000000000.bin").write_bytes(b"x" * 50)
    log.commit(log.add("a.parquet", deletionVector=vector(text)), log.add("b.parquet"))
    run = run_of(tmp_path, "delta")
    with pytest.raises(InvalidArgument, match="with 'register' they are exported"):
        run.plan()
    run.run(**REGISTER)
    here, there = (current_snapshot(Location.of(str(tmp_path / one))) for one in ("t", "out/t"))
    assert [one.vector_id for one in here.files.values()] == [one.vector_id for one in there.files.values()]
    assert any(one.vector for one in there.files.values())
    assert (
        tmp_path / "out" / "t" / "ab" / "deletion_vector_00000000-0000-0000-0000-000000000000.bin"
    ).read_bytes() == b"x" * 50


def test_row_tracking_is_refused(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path / "t")
    protocol = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["rowTracking"]}}
    log.commit(protocol, {"metaData": metadata()})
    with pytest.raises(InvalidArgument, match="rowTracking"):
        run_of(tmp_path, "delta").plan(**REGISTER)


# ---------------------------------------------------------------------- all formats


@pytest.mark.parametrize("form", ["iceberg", "delta"])
def test_a_kill_at_any_write_of_the_completion_changes_nothing(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "iceberg":
        table = LoggedFolder(tmp_path / "t").new(SCHEMA, **{"format-version": "2"})
        table.append(rows(*"abc"))
        [file] = table.inspect.files().to_pylist()
        delete_positions(table, 1, {file["file_path"]: [1]}, bounds=True)
    else:
        write_deltalake(tmp_path / "t", pa.table({"a": [1]}))
    run = run_of(tmp_path, form)
    run.run(**REGISTER)
    expected = of_the_table(tmp_path / "out" / "t")

    class Killed(BaseException):
        pass

    for steps in range(1, 50):
        shutil.rmtree(tmp_path / "out" / "t")
        run = run_of(tmp_path, form)
        plans, version = run.plan(**REGISTER)
        done = run.jobs(plans, **REGISTER)
        left = steps

        def killed(work: Any) -> Any:
            def wrapped(*args: Any, **more: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return work(*args, **more)

            return wrapped

        ended = False
        with monkeypatch.context() as patch:
            for name in ("put_new", "put_large", "replace_if"):
                patch.setattr(FolderStore, name, killed(getattr(FolderStore, name)))
            try:
                run.complete(done, plans, version, **REGISTER)
                ended = True
            except Killed:
                assert "_EXPORT.json" not in run.contents()
        run.complete(done, plans, version, **REGISTER)
        assert of_the_table(tmp_path / "out" / "t") == expected
        if ended:
            break
    assert steps > 3


def test_a_folder_of_parquet_files_is_registered(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t" / "0.parquet")
    run = run_of(tmp_path, "parquet")
    run.run(**REGISTER)
    assert run.registrations == [registered(run, "parquet")]
    assert [len(one.files) for one in plan_table(registered(run, "parquet")).partitions] == [1]


def test_a_table_that_only_a_catalog_knows_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="only its catalog knows its columns"):
        table_copy_of(TableRecord("t", "spark", "db.t"))


def test_taken_names_and_partial_tables_are_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"a": [1]}))
    other = TableRecord("copy", "parquet", str(tmp_path / "other"))
    with pytest.raises(InvalidArgument, match="register the export under another name"):
        run_of(tmp_path, "delta", (other,)).plan(**REGISTER)
    with pytest.raises(InvalidArgument, match="register the export under another name"):
        run_of(tmp_path, "delta").plan(register={"name": "t"})
    for more in ({"prefixes": ["a"]}, {"remove_gone": True}):
        with pytest.raises(ValueError, match="the table needs all its files"):
            Export.Arg.model_validate({"to": "/x", **more, **REGISTER})


def test_an_executor_registers_the_table(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"a": [1, 2]}))
    table, arg = TableRecord("t", "delta", str(tmp_path / "t")), {"to": str(tmp_path / "out" / "t"), **REGISTER}
    for _ in range(2):
        ran = testing.run_operation(Export, arg, table=table, folder=tmp_path / "run")
        assert (ran.state, ran.report["registered"]) == ("success", "copy")
    assert of_delta(tmp_path / "out" / "t") == of_delta(tmp_path / "t")
