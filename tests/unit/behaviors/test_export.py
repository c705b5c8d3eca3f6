"""``export`` of tables in folders."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from distop import testing
from distop.behavior import TableRecord
from distop.errors import InvalidArgument, JobCancelled, UnsafePath
from distop.protocol import identity
from distop.storage import export_targets
from distop.storage.folder_copies import FolderCopies
from distop.storage.places import operation_path
from distop_behaviors.export import Export, file_copy, folder_export
from distop_behaviors.export.export_manifest import CopiedFile, CopiedPage
from tests.support.context import FakeContext
from tests.support.export_runs import ExportRun
from tests.support.table_files import LoggedFolder
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

DAYS = ("day=1", "day=2", "day=3")


@pytest.fixture(autouse=True)
def _allowed(tmp_path: Path) -> Iterator[None]:
    export_targets.configure([str(tmp_path / "out")])
    yield
    export_targets.configure(())


def parquet(folder: Path, files: int = 2) -> TableRecord:
    for day in DAYS:
        (folder / day).mkdir(parents=True)
        for n in range(files):
            pq.write_table(pa.table({"a": [n, len(day)]}), folder / day / f"{n}.parquet")
    return TableRecord("t", "parquet", str(folder))


def run_of(tmp_path: Path, files: int = 2) -> ExportRun:
    return ExportRun(parquet(tmp_path / "t", files), str(tmp_path / "out" / "t"), tmp_path / "work")


def data(contents: dict[str, bytes]) -> dict[str, bytes]:
    return {key: found for key, found in contents.items() if key.endswith(".parquet")}


def source(tmp_path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(tmp_path / "t")): one.read_bytes() for one in (tmp_path / "t").rglob("*.parquet")}


def counts(report: Any) -> dict[str, int]:
    return {name: report[name]["files"] for name in ("copied", "reused", "unchanged", "verified", "gone", "removed")}


NOTHING = {"copied": 0, "reused": 0, "unchanged": 0, "verified": 0, "gone": 0, "removed": 0}


def test_L5_a_table_is_copied_with_manifests_and_markers(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    ran = run.run()
    found = run.contents()
    assert data(found) == source(tmp_path)
    markers = {key for key, content in found.items() if key.endswith("_SUCCESS") and content == b""}
    assert markers == {"_SUCCESS", *(f"{day}/_SUCCESS" for day in DAYS)}
    root = json.loads(found["_EXPORT.json"])
    assert (root["table"], root["version"], root["partial"], root["files"]) == ("t", "", False, 6)
    for folder in root["folders"]:
        manifest = found[f"{folder['path']}/_MANIFEST.json"]
        assert hashlib.sha256(manifest).hexdigest() == folder["sha256"]
        for one in json.loads(manifest)["files"]:
            assert one["checksum"] == f"sha256:{hashlib.sha256(found[one['path']]).hexdigest()}"
            assert one["bytes"] == len(found[one["path"]])
    assert counts(ran.report) == {**NOTHING, "copied": 6, "verified": 6}
    assert ran.report["files"] == ran.report["copied"]
    assert ran.report["bytes_read"] == ran.report["bytes_written"] == ran.report["copied"]["bytes"]
    assert (ran.report["complete"], ran.report["partial"], ran.report["folders"]) == (True, False, 3)


def test_twice_equals_once(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    before = run.contents()
    stats = {key: Path(run.target, key).stat().st_ino for key in data(before)}
    ran = run.run()
    assert run.contents() == before
    assert {key: Path(run.target, key).stat().st_ino for key in stats} == stats
    assert counts(ran.report) == {**NOTHING, "reused": 6}
    assert (ran.report["bytes_read"], ran.report["bytes_written"]) == (0, 0)
    ran = run.run(diff_from="")
    assert counts(ran.report) == {**NOTHING, "unchanged": 6}
    assert run.contents() == before


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    planned = run.run(dry_run=True).report
    assert (counts(planned), planned["bytes_written"]) == ({**NOTHING, "copied": 6}, 0)
    assert not (tmp_path / "out").exists()
    run.run()
    before = run.contents()
    assert counts(run.run(dry_run=True).report) == {**NOTHING, "reused": 6}
    assert run.contents() == before


def test_L33_a_new_export_removes_markers_before_its_first_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    run.run()
    (tmp_path / "t" / "day=1" / "9.parquet").write_bytes((tmp_path / "t" / "day=1" / "0.parquet").read_bytes())
    seen: list[set[str]] = []
    copy = FolderCopies.copy

    def watched(self: FolderCopies, name: str, examine: Any) -> Any:
        seen.append({name for name in run.contents() if name.endswith(("_SUCCESS", "_EXPORT.json"))})
        return copy(self, name, examine)

    monkeypatch.setattr(FolderCopies, "copy", watched)
    plans, version = run.plan()
    done = [row for plan in plans for row in run.jobs([plan])]
    assert seen == [{"day=2/_SUCCESS", "day=3/_SUCCESS"}]
    ran = run.complete(done, plans, version)
    assert counts(ran.report) == {**NOTHING, "copied": 1, "verified": 1, "reused": 6}
    assert data(run.contents()) == source(tmp_path)


def test_L33_the_marker_of_a_folder_comes_after_those_inside_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    write_deltalake(folder, pa.table({"a": [1]}))
    write_deltalake(folder, pa.table({"a": [2]}), mode="append")
    found = sorted(one.name for one in folder.glob("*.parquet"))
    # Writers choose the folders of Delta's files freely.
    (folder / "x" / "y").mkdir(parents=True)
    (folder / found[1]).rename(folder / "x" / "y" / found[1])
    (folder / found[0]).rename(folder / "x" / found[0])
    for log in (folder / "_delta_log").glob("*.json"):
        text = log.read_text().replace(f'"path":"{found[1]}', f'"path":"x/y/{found[1]}')
        log.write_text(text.replace(f'"path":"{found[0]}', f'"path":"x/{found[0]}'))
    run = ExportRun(TableRecord("t", "delta", str(folder)), str(tmp_path / "out" / "t"), tmp_path / "work")
    plans, version = run.plan()
    assert [plan.name for plan in plans] == ["x", "x/y"]
    done = run.jobs(plans)
    assert {key for key in run.contents() if key.endswith("_SUCCESS")} == {"x/y/_SUCCESS"}
    run.complete(done, plans, version)
    assert {key for key in run.contents() if key.endswith("_SUCCESS")} == {"_SUCCESS", "x/_SUCCESS", "x/y/_SUCCESS"}


@pytest.mark.parametrize("pages", [1, 100])
def test_an_export_that_was_killed_reuses_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    monkeypatch.setattr(folder_export, "PAGE", pages)
    monkeypatch.setattr(file_copy, "DISK_FILES_AT_ONCE", 1)
    run = run_of(tmp_path, files=4)
    plans, version = run.plan()
    copy, left = FolderCopies.copy, 2

    class Killed(BaseException):
        pass

    def killed(self: FolderCopies, name: str, examine: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return copy(self, name, examine)

    ctx = run.context()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(FolderCopies, "copy", killed)
        run.jobs(plans[:1], ctx)
    assert len(data(run.contents())) == 2
    assert not any(key.endswith(("_SUCCESS", ".json")) for key in run.contents())
    done = [*run.jobs(plans[:1], ctx), *run.jobs(plans[1:])]
    ran = run.complete(done, plans, version)
    # The checkpoint counts copies of finished pages, which are not examined again.
    expected = {"copied": 12, "verified": 12} if pages == 1 else {"copied": 10, "reused": 2, "verified": 12}
    assert counts(ran.report) == {**NOTHING, **expected}
    assert data(run.contents()) == source(tmp_path)
    assert not (tmp_path / "out" / "t" / "_distop" / "export" / "pages").exists()


def test_the_names_in_a_manifest_are_those_of_earlier_releases(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    manifest = json.loads(run.contents()["day=1/_MANIFEST.json"])
    assert list(manifest) == ["v", "table", "version", "files", "left"]
    assert {*manifest["files"][0]} == {"path", "bytes", "checksum", "planned", "copied", "target"}


def test_a_checkpoint_that_does_not_fit_the_plan_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_export, "PAGE", 1)
    run = run_of(tmp_path)
    plans, version = run.plan()
    pages = tmp_path / "out" / "t" / "_distop" / "export" / "pages" / operation_path(run.operation)
    copy = CopiedFile(
        path="day=1/0.parquet", bytes=1, checksum="sha256:0", planned_stamp=1, source_stamp=1, target_stamp=1
    )
    pages.mkdir(parents=True)
    (pages / "0-0.json").write_text(CopiedPage(files=[copy]).model_dump_json())
    ran = run.complete(run.jobs(plans), plans, version)
    assert counts(ran.report) == {**NOTHING, "copied": 6, "verified": 6}
    assert data(run.contents()) == source(tmp_path)


def test_folders_are_flushed_together_before_their_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    plans, _ = run.plan()
    steps: list[str] = []
    put, flush = FolderCopies.put, FolderCopies.flush

    def watched_put(self: FolderCopies, name: str, data: bytes) -> None:
        put(self, name, data)
        steps.append(name)

    def watched_flush(self: FolderCopies) -> None:
        flush(self)
        steps.append("flush")

    monkeypatch.setattr(FolderCopies, "put", watched_put)
    monkeypatch.setattr(FolderCopies, "flush", watched_flush)
    monkeypatch.setattr(FolderCopies, "disk", 1)
    run.jobs(plans)
    assert steps == [*["_MANIFEST.json"] * 3, "flush", *["_SUCCESS"] * 3, "flush"]


def test_folders_of_two_disks_are_flushed_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    plans, _ = run.plan()
    flushed: list[int] = []
    monkeypatch.setattr(FolderCopies, "disk", property(id))
    monkeypatch.setattr(FolderCopies, "flush", lambda self: flushed.append(id(self)))
    run.jobs(plans)
    assert len(set(flushed)) == 3
    assert len(flushed) == 6


@pytest.mark.parametrize(("folders", "size"), [(1, 1 << 30), (2, 1 << 30), (64, 1)])
def test_folders_are_exported_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: int, size: int
) -> None:
    monkeypatch.setattr(folder_export, "GROUP_FOLDERS", folders)
    monkeypatch.setattr(folder_export, "GROUP_BYTES", size)
    run = run_of(tmp_path)
    began = time.monotonic()
    ran = run.run()
    assert 0 < ran.report["seconds"] <= time.monotonic() - began, "the times of folders that overlap are not added"
    assert counts(ran.report) == {**NOTHING, "copied": 6, "verified": 6}
    assert data(run.contents()) == source(tmp_path)
    assert {key for key in run.contents() if key.endswith("_SUCCESS")} == {
        "_SUCCESS",
        *(f"{day}/_SUCCESS" for day in DAYS),
    }


def test_lakeFS_2089_a_missing_source_fails_the_export(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    plans, version = run.plan()
    (tmp_path / "t" / "day=2" / "1.parquet").unlink()
    done = run.jobs(plans)
    assert [row.success for row in done] == [True, False, True]
    assert "day=2/1.parquet is missing" in done[1].error
    ran = run.complete(done, plans, version)
    assert (ran.report["complete"], ran.report["failed_files"]) == (False, 1)
    assert {key for key in run.contents() if key.endswith(("_SUCCESS", "_EXPORT.json"))} == {
        "day=1/_SUCCESS",
        "day=3/_SUCCESS",
    }


def test_a_changed_source_fails_the_export(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    plans, _ = run.plan()
    changed = tmp_path / "t" / "day=2" / "1.parquet"
    changed.write_bytes(changed.read_bytes())
    os.utime(changed, ns=(1, 1))
    done = run.jobs(plans)
    assert [row.success for row in done] == [True, False, True]
    assert "has changed since the operation was planned" in done[1].error


def test_a_replaced_file_is_copied_again(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    pq.write_table(pa.table({"a": [7, 8, 9]}), tmp_path / "t" / "day=2" / "1.parquet")
    ran = run.run(diff_from="")
    assert counts(ran.report) == {**NOTHING, "copied": 1, "verified": 1, "unchanged": 5}
    assert data(run.contents()) == source(tmp_path)


def test_a_damaged_copy_is_replaced(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    copy = tmp_path / "out" / "t" / "day=2" / "1.parquet"
    copy.write_bytes(bytes(len(copy.read_bytes())))
    ran = run.run()
    assert counts(ran.report) == {**NOTHING, "copied": 1, "verified": 1, "reused": 5}
    assert data(run.contents()) == source(tmp_path)


def test_a_copy_that_differs_is_an_error_and_not_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, piece, at: pwrite(file, bytes(len(piece)), at))
    with pytest.raises(OSError, match="differs from"):
        run.run()
    assert not any(key.endswith(("_SUCCESS", ".json")) for key in run.contents())


def test_files_that_are_gone_are_listed_and_only_removed_if_asked(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    (tmp_path / "t" / "day=2" / "1.parquet").unlink()
    for one in (tmp_path / "t" / "day=3").iterdir():
        one.unlink()
    for _ in range(2):
        ran = run.run()
        assert counts(ran.report) == {**NOTHING, "reused": 3, "gone": 3}
        assert ran.report["sample"] == ["day=2/1.parquet", "day=3/0.parquet", "day=3/1.parquet"]
        assert len(data(run.contents())) == 6
    root = json.loads(run.contents()["_EXPORT.json"])
    assert [one["path"] for one in root["folders"]] == ["day=1", "day=2"]
    ran = run.run(remove_gone=True)
    assert counts(ran.report) == {**NOTHING, "reused": 3, "gone": 3, "removed": 3}
    assert data(run.contents()) == source(tmp_path)
    assert not any(key.startswith("day=3/") for key in run.contents())
    assert counts(run.run(remove_gone=True).report) == {**NOTHING, "reused": 3}


def test_a_gone_file_that_somebody_has_replaced_stays(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    (tmp_path / "t" / "day=2" / "1.parquet").unlink()
    copy = tmp_path / "out" / "t" / "day=2" / "1.parquet"
    copy.write_bytes(b"of somebody")
    plans, _ = run.plan(remove_gone=True)
    done = run.jobs(plans, remove_gone=True)
    assert [row.success for row in done] == [True, False, True]
    assert copy.read_bytes() == b"of somebody"


def test_some_prefixes_are_exported_without_a_marker_of_the_whole(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    ran = run.run(prefixes=["day=1", "day=3/"])
    assert set(data(run.contents())) == {key for key in source(tmp_path) if not key.startswith("day=2")}
    assert (ran.report["complete"], ran.report["partial"]) == (True, True)
    assert "_SUCCESS" not in run.contents()
    with pytest.raises(InvalidArgument, match="no files in the folder 'day'"):
        run.plan(prefixes=["day"])
    with pytest.raises(InvalidArgument, match="of some folders of"):
        run.plan(diff_from="")


def test_another_name_of_the_marker_replaces_the_old_one(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    run.run(success="_DONE")
    names = {key.rpartition("/")[2] for key in run.contents()}
    assert "_DONE" in names
    assert "_SUCCESS" not in names


# ---------------------------------------------------------------------- refused targets


def test_no_target_is_allowed_by_default(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    export_targets.configure(())
    with pytest.raises(InvalidArgument, match="this executor allows none"):
        run.plan()


@pytest.mark.parametrize(
    "to", ["out", "outx/t", "t", "elsewhere", "out/../t", "out/./t", "s3://bucket/t", "s3://bucket", "", "hdfs:///x"]
)
def test_targets_elsewhere_are_refused(tmp_path: Path, to: str) -> None:
    if to == "out":
        export_targets.configure([str(tmp_path / "out" / "t")])
    run = run_of(tmp_path)
    run.target = to if "://" in to else f"{tmp_path}/{to}"
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises((InvalidArgument, UnsafePath), match="export|writes no files|has '..'"):
        run.plan()
    assert sorted(map(str, tmp_path.rglob("*"))) == before


@pytest.mark.parametrize("to", ["t", "t/x", "."])
def test_a_target_that_overlaps_the_table_is_refused(tmp_path: Path, to: str) -> None:
    export_targets.configure([str(tmp_path)])
    run = run_of(tmp_path)
    run.target = str(tmp_path / to)
    with pytest.raises(InvalidArgument, match="nothing is exported to"):
        run.plan()


def test_a_target_that_overlaps_another_table_is_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "out" / "t" / "other")
    run = run_of(tmp_path)
    run = ExportRun(run.table, run.target, tmp_path / "work", [TableRecord("o", "parquet", f"{run.target}/other")])
    with pytest.raises(InvalidArgument, match="inside it"):
        run.plan()


def test_a_link_in_the_target_is_not_followed(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "t").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath, match="symbolic link"):
        run.plan()
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (tmp_path / "out" / "t").mkdir(parents=True)
    (tmp_path / "out" / "t" / "of-somebody").write_text("x")
    with pytest.raises(InvalidArgument, match="no export has written"):
        run.plan()


def test_the_target_of_another_table_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.run()
    other = ExportRun(TableRecord("u", "parquet", run.table.location), run.target, tmp_path / "work")
    with pytest.raises(InvalidArgument, match="the table 't' is exported to"):
        other.plan()


def test_an_unknown_start_of_a_difference_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(InvalidArgument, match="no complete export"):
        run.plan(diff_from="7")
    run.run()
    with pytest.raises(InvalidArgument, match="not '?7"):
        run.plan(diff_from="7")


# ---------------------------------------------------------------------- versions


def test_a_version_of_iceberg_is_exported(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, BY_K)
    for k in "abc":
        table.append(rows(k))
    record = TableRecord("t", "iceberg", str(tmp_path / "t"))
    run = ExportRun(record, str(tmp_path / "out" / "t"), tmp_path / "work")
    ran = run.run()
    current = ran.report["version"]
    every = data(run.contents())
    assert len(every) == ran.report["files"]["files"] == 3
    assert {f"{tmp_path}/t/{key}" for key in every} == {str(one) for one in (tmp_path / "t").rglob("*.parquet")}
    with pytest.raises(InvalidArgument, match="no snapshot, branch or tag"):
        run.plan(version="17")
    assert run.plan(version="main")[1] == run.plan(version=current)[1] == current


def test_a_version_of_delta_is_exported(tmp_path: Path) -> None:
    for n in range(4):
        table = pa.table({"k": ["a", "b"], "v": [n, n]})
        write_deltalake(tmp_path / "t", table, mode="overwrite" if n % 2 else "append", partition_by=["k"])
    record = TableRecord("t", "delta", str(tmp_path / "t"))
    run = ExportRun(record, str(tmp_path / "out" / "t"), tmp_path / "work")
    ran = run.run(version="2")
    assert (ran.report["version"], ran.report["files"]["files"]) == ("2", 4)
    first = data(run.contents())
    ran = run.run(diff_from="2", remove_gone=True)
    assert (ran.report["version"], ran.report["files"]["files"]) == ("3", 2)
    assert counts(ran.report) == {**NOTHING, "copied": 2, "verified": 2, "gone": 4, "removed": 4}
    assert not set(data(run.contents())) & set(first)
    for version in ("9", "-1", "x"):
        with pytest.raises(InvalidArgument, match="no version"):
            run.plan(version=version)


def test_a_folder_has_no_versions(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no versions"):
        run_of(tmp_path).plan(version="1")


def test_a_cancelled_export_is_not_marked(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    plans, _ = run.plan()
    ctx: FakeContext = run.context()
    ctx.stopped = True
    with pytest.raises(JobCancelled):
        run.jobs(plans, ctx)
    assert run.contents() == {}


def test_L32_a_newer_request_replaces_the_waiting_one() -> None:
    declared = Export.declaration()
    waiting = json.dumps({"to": "s3://b/x", "version": "1", "diff_from": "0", "prefixes": ["a"]}).encode()
    newer = json.dumps({"to": "s3://b/x", "version": "2", "remove_gone": True}).encode()
    other = json.dumps({"to": "s3://b/y", "version": "2"}).encode()
    ids = {identity.computed_id(declared, "t", arg) for arg in (waiting, newer)}
    assert len(ids) == 1
    assert identity.computed_id(declared, "t", other) not in ids
    combined = Export.Arg.model_validate_json(identity.combined(declared, waiting, newer))
    assert combined == Export.Arg.model_validate_json(newer)


def test_an_export_follows_the_rules_of_an_executor(tmp_path: Path) -> None:
    table, arg = parquet(tmp_path / "t"), {"to": str(tmp_path / "out" / "t")}
    ran = testing.run_operation(Export, arg, table=table, folder=tmp_path / "run")
    assert (ran.state, ran.report["complete"], ran.report["copied"]["files"]) == ("success", True, 6)
    again = testing.run_operation(Export, arg, table=table, folder=tmp_path / "run", store=ran.store)
    assert (again.state, again.report["reused"]["files"]) == ("success", 6)
    refused = testing.run_operation(Export, {"to": str(tmp_path / "x")}, table=table, folder=tmp_path / "run2")
    assert refused.state == "failed"
    assert not (tmp_path / "x").exists()
