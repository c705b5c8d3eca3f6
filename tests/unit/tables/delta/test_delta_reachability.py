"""The files that a Delta log names: everything that any version in the log needs, and what it removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable, write_deltalake

from distop.errors import InvalidArgument, TableUnavailable
from distop.protocol.records import TableRecord
from distop.tables import reachability_of
from distop.tables.delta import delta_reachability
from distop.tables.delta.table_paths import vector_path
from distop.tables.reachability import CHECKPOINT, DATA, DELETES, LOG
from tests.support.delta_logs import DeltaLog, features, remove, vector
from tests.support.table_files import on_disk
from tests.unit.tables.delta.test_tables_delta import UUID_TEXT, record, rows

if TYPE_CHECKING:
    from pathlib import Path


def paths(table: TableRecord, *kinds: str) -> set[str]:
    found = [file.path for file in reachability_of(table).all_files() if not kinds or file.kind in kinds]
    assert len(set(found)) == len(found)
    return set(found)


def written(path: Path, versions: int = 5) -> DeltaTable:
    """A table that is appended to and overwritten."""
    for n in range(versions):
        write_deltalake(path, rows("a", "b"), mode="overwrite" if n % 2 else "append", partition_by=["k"])
    return DeltaTable(path)


@pytest.mark.parametrize("unit", [1, 2, 100])
def test_all_files_of_the_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    monkeypatch.setattr(delta_reachability, "UNIT_COMMITS", unit)
    written(tmp_path)
    assert paths(record(tmp_path)) == on_disk(tmp_path)
    found = reachability_of(record(tmp_path))
    assert len(list(found.units())) == -(-5 // unit)
    assert [version.id for version in found.versions()] == ["0", "1", "2", "3", "4"]
    assert found.place == str(tmp_path)
    assert found.kept_folders == (f"{tmp_path}/_delta_log",)


def test_after_a_cleanup_of_the_log_the_checkpoint_names_the_files(tmp_path: Path) -> None:
    """Commits before the first checkpoint are gone; their active and their removed files are still named."""
    table = written(tmp_path)
    table.create_checkpoint()
    for n in range(4):
        (tmp_path / "_delta_log" / f"{n:020}.json").unlink()
    write_deltalake(tmp_path, rows("c"), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    assert paths(record(tmp_path), DATA) == {p for p in on_disk(tmp_path) if "_delta_log" not in p}
    found = reachability_of(record(tmp_path))
    assert [version.id for version in found.versions()] == ["4", "5"]
    assert [unit.kind for unit in found.units()] == [CHECKPOINT, LOG]
    assert paths(record(tmp_path), CHECKPOINT, LOG) == on_disk(tmp_path / "_delta_log")


def test_deletion_vectors_and_change_data_are_named(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path).create(features("deletionVectors"))
    log.commit(log.add("a.parquet"))
    add = log.add("a.parquet", deletionVector=vector(f"ab{UUID_TEXT}"))
    change = {"cdc": {"path": "_change_data/c.parquet", "partitionValues": {}, "size": 9, "dataChange": False}}
    log.commit(remove("a.parquet"), add, change)
    assert paths(log.record, DELETES) == {vector_path(str(tmp_path), f"ab{UUID_TEXT}")}
    assert paths(log.record, DATA) == {f"{tmp_path}/a.parquet", f"{tmp_path}/_change_data/c.parquet"}


def test_a_file_of_the_past_is_named_until_the_log_forgets_it(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path).create()
    log.commit(log.add("a b.parquet"), log.add("part=1/c.parquet"))
    log.commit(remove("a b.parquet"))
    assert paths(log.record, DATA) == {f"{tmp_path}/a b.parquet", f"{tmp_path}/part=1/c.parquet"}


def test_an_earlier_version_is_opened_by_its_source(tmp_path: Path) -> None:
    written(tmp_path, 2)
    before = reachability_of(record(tmp_path))
    names = set(before.all_files())
    write_deltalake(tmp_path, rows("c"), mode="append")
    again = reachability_of(record(tmp_path), source=before.source)
    data = {file for file in again.all_files() if file.kind == DATA}
    assert data == {file for file in names if file.kind == DATA} < set(reachability_of(record(tmp_path)).all_files())


def test_a_commit_that_was_cleaned_up_meanwhile_makes_the_answer_unavailable(tmp_path: Path) -> None:
    written(tmp_path)
    found = reachability_of(record(tmp_path))
    units = list(found.units())
    (tmp_path / "_delta_log" / f"{2:020}.json").unlink()
    with pytest.raises(TableUnavailable, match="cleaned up"):
        list(found.files(units[0]))


@pytest.mark.parametrize(
    ("path", "match"), [("/etc/passwd", "only relative paths"), ("s3://b/x", "only relative"), ("../x", "refused")]
)
def test_a_file_outside_of_the_table_is_refused_also_if_it_was_removed(tmp_path: Path, path: str, match: str) -> None:
    log = DeltaLog(tmp_path / "t").create()
    log.commit(remove(path))
    with pytest.raises(InvalidArgument, match=match):
        list(reachability_of(log.record).all_files())


def test_tables_with_files_that_the_log_does_not_name_are_refused(tmp_path: Path) -> None:
    uniform = DeltaLog(tmp_path / "u").create(configuration={"delta.universalFormat.enabledFormats": "iceberg"})
    with pytest.raises(InvalidArgument, match="universalFormat"):
        reachability_of(uniform.record)
    unknown = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["icebergCompatV2"]}
    with pytest.raises(InvalidArgument, match="'icebergCompatV2'.*VACUUM"):
        reachability_of(DeltaLog(tmp_path / "w").create(unknown).record)
