"""New and replaced files of an Iceberg table since a snapshot, on tables written without a JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.behavior import TableRecord
from distop.errors import JobCancelled, TableUnavailable
from distop.tables import plan_table
from distop.tables.iceberg.avro import ManifestIO
from distop.tables.iceberg.iceberg_changes import equality_ids, new_files, replaced_files
from distop.tables.iceberg.metadata_file import read_metadata
from tests.support.lake import Folder

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))


def grown(path: Path, version: str = "2") -> Any:
    """A table with three files, each appended by its own commit."""
    table = Folder(path).new(SCHEMA, **{"format-version": version})
    for n in range(3):
        table.append(pa.table({"id": [n]}))
    return table


def since(path: Path, snapshot: Any) -> list[str] | None:
    """The new files of the table, by their paths."""
    planned = plan_table(TableRecord("t", "iceberg", str(path)))
    found = new_files(*read_metadata(planned.partitions[0].source), str(snapshot))
    return None if found is None else [file[0] for file in found]


def files(path: Path) -> set[str]:
    planned = plan_table(TableRecord("t", "iceberg", str(path)))
    return {file[0] for partition in planned.partitions for file in partition.files}


@pytest.mark.parametrize("version", ["1", "2"])
def test_only_files_of_later_commits_are_new(tmp_path: Path, version: str) -> None:
    table = grown(tmp_path, version)
    snapshots = [s.snapshot_id for s in table.metadata.snapshots]
    counts = [len(since(tmp_path, snapshot) or ()) for snapshot in snapshots]
    assert counts == [2, 1, 0]
    assert set(since(tmp_path, snapshots[0]) or ()) < files(tmp_path)


def test_removed_files_are_ignored_and_their_replacements_are_new(tmp_path: Path) -> None:
    table = grown(tmp_path)
    before, former = files(tmp_path), table.metadata.current_snapshot_id
    table.overwrite(pa.table({"id": [7]}))
    now = files(tmp_path)
    assert len(now) == 1
    assert set(since(tmp_path, former) or ()) == now
    assert not now & before


def test_any_file_may_be_new_if_the_former_snapshot_is_missing(tmp_path: Path) -> None:
    table = grown(tmp_path)
    assert since(tmp_path, 12345) is None
    empty = Folder(tmp_path / "empty").new(SCHEMA)
    assert new_files(empty.metadata, ManifestIO(empty.io), "12345") == []
    snapshot = table.metadata.snapshots[0]
    for manifest in (tmp_path / "metadata").glob("*-m*.avro"):
        manifest.unlink()
    with pytest.raises(TableUnavailable, match="cannot read the manifests of "):
        new_files(table.metadata, ManifestIO(table.io), str(snapshot.snapshot_id))


@pytest.mark.parametrize("gone", ["snap-*", "*-m0"])
def test_any_file_may_be_new_if_the_former_snapshot_expired_after_the_metadata_were_read(
    gone: str, tmp_path: Path
) -> None:
    """Its list of manifests is gone, or a manifest that the current snapshot does not share."""
    table = grown(tmp_path)
    table.overwrite(pa.table({"id": [7]}))
    former, current = table.metadata.snapshots[2], table.metadata.current_snapshot()
    kept = {current.manifest_list, *(m.manifest_path for m in current.manifests(table.io))}
    assert new_files(table.metadata, ManifestIO(table.io), str(former.snapshot_id))
    for path in (tmp_path / "metadata").glob(f"{gone}.avro"):
        if str(path) not in kept:
            path.unlink()
    assert new_files(table.metadata, ManifestIO(table.io), str(former.snapshot_id)) is None


def test_files_that_are_gone_count_as_replaced_and_others_do_not(tmp_path: Path) -> None:
    table = grown(tmp_path)
    before, former = files(tmp_path), str(table.metadata.current_snapshot_id)
    assert replaced_files(table.metadata, ManifestIO(table.io), former) == frozenset()
    table.append(pa.table({"id": [7]}))
    assert replaced_files(table.metadata, ManifestIO(table.io), former) == frozenset()
    table.delete("id = 1")
    assert replaced_files(table.metadata, ManifestIO(table.io), former) == before - files(tmp_path)
    assert len(before - files(tmp_path)) == 1
    assert replaced_files(table.metadata, ManifestIO(table.io), "12345") is None
    assert equality_ids(table.metadata, ManifestIO(table.io)) == []


def test_unreadable_manifests_of_former_files_are_reported(tmp_path: Path) -> None:
    table = grown(tmp_path)
    former = str(table.metadata.snapshots[0].snapshot_id)
    for manifest in (tmp_path / "metadata").glob("*-m*.avro"):
        manifest.unlink()
    with pytest.raises(TableUnavailable, match="cannot read the manifests of "):
        replaced_files(table.metadata, ManifestIO(table.io), former)


def test_the_search_for_new_files_can_be_cancelled(tmp_path: Path) -> None:
    table = grown(tmp_path)

    def stop() -> None:
        raise JobCancelled("enough")

    with pytest.raises(JobCancelled):
        new_files(table.metadata, ManifestIO(table.io), str(table.metadata.snapshots[0].snapshot_id), stop)
