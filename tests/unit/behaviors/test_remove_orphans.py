"""``remove-orphans`` and ``restore`` on tables of Iceberg and Delta in folders."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pydantic import ValidationError

from distop.behavior import PartitionPlan, TableRecord
from distop.errors import InvalidArgument, UnsafePath
from distop.storage.folder_store import FolderStore
from distop.storage.opened_stores import open_store
from distop.storage.store_errors import StoreError
from distop_behaviors.orphans import RemoveOrphans, Restore, orphan_removal, restoration
from tests.support.icebergrest import configure, sql_catalog
from tests.support.lake import Folder
from tests.support.orphan_runs import Run, snapshot, wait_until_older
from tests.support.table_files import LoggedFolder
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyiceberg.catalog.sql import SqlCatalog


def iceberg(folder: Path, *, properties: dict[str, str] | None = None) -> TableRecord:
    table = LoggedFolder(folder).new(SCHEMA, BY_K, **(properties or {}))
    for k in "abc":
        table.append(rows(k))
    return TableRecord("t", "iceberg", str(folder))


def delta(folder: Path) -> TableRecord:
    for n in range(4):
        data = pa.table({"k": ["a", "b"], "v": [n, n]})
        write_deltalake(folder, data, mode="overwrite" if n % 2 else "append", partition_by=["k"])
    return TableRecord("t", "delta", str(folder))


MAKE = {"iceberg": iceberg, "delta": delta}


def plant(folder: Path, *names: str) -> list[str]:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    wait_until_older(str(folder))
    return [str(folder / name) for name in names]


ORPHANS = ("k=a/left.parquet", "data/k=z/left.parquet", "left", "k=a/.left.parquet.crc")
KEPT = ("_distop/index/i/data/x", "_distop/stage/x", "_temporary/0/x", ".hidden", "k=a/.lone.crc")


@pytest.mark.parametrize("make", MAKE)
def test_only_files_that_the_metadata_do_not_name_are_removed(tmp_path: Path, make: str) -> None:
    table = MAKE[make](tmp_path / "t")
    before = snapshot(tmp_path)
    planted = plant(tmp_path / "t", *KEPT)
    kept = snapshot(tmp_path)
    removed = plant(tmp_path / "t", *ORPHANS)
    report = Run(table, tmp_path / "work").run()
    assert snapshot(tmp_path) == kept
    assert set(kept) == {*before, *planted}
    assert report["removed"] == report["orphans"] == {"files": 4, "bytes": sum(map(len, ORPHANS))}
    assert report["kept"] == {"distop's own": 2, "hidden": 3, "needed": len(before)}
    assert sorted(f"{tmp_path}/t/{one}" for one in report["sample"]) == sorted(removed)
    assert report["place"] == str(tmp_path / "t")
    again = Run(table, tmp_path / "work").run()
    assert (again["removed"]["files"], snapshot(tmp_path)) == (0, kept)


def test_a_dry_run_changes_nothing_and_plans_no_removal(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    before = snapshot(tmp_path)
    run = Run(table, tmp_path / "work")
    assert [plan.name for plan in run.plan(dry_run=True)] == ["listing"]
    report = run.run(dry_run=True)
    assert (report["orphans"]["files"], report["removed"]["files"], report["dry_run"]) == (4, 0, True)
    assert snapshot(tmp_path) == before


def test_iceberg_4194_files_of_a_running_writer_are_kept(tmp_path: Path) -> None:
    """Orphan removal with a short age deleted files that a long job committed later: the table became unreadable.

    The age is that of the store. A file that is moved or copied into the folder with an old time is young as well.
    """
    table = iceberg(tmp_path / "t")
    moved = tmp_path / "moved"
    moved.write_bytes(b"x")
    os.utime(moved, (1, 1))
    moved.rename(tmp_path / "t" / "moved.parquet")
    plant(tmp_path / "t", *ORPHANS)
    before = snapshot(tmp_path)
    report = Run(table, tmp_path / "work").run(older_than="1h", allow_recent=False)
    assert (report["orphans"]["files"], report["kept"]["too young"]) == (0, 4)
    assert snapshot(tmp_path) == before
    with pytest.raises(ValidationError, match="at least 1h"):
        RemoveOrphans.Arg.model_validate({"older_than": "59m"})


def test_a_file_that_is_committed_after_the_list_is_kept(tmp_path: Path) -> None:
    """The second look is that of the removal: a file of the list may be in a later commit."""
    folder = tmp_path / "t"
    catalog = LoggedFolder(folder)
    table = catalog.new(SCHEMA, BY_K)
    table.append(rows("a"))
    with_late = table.metadata
    table.append(rows("b"))
    later = table.metadata
    # The files of the second append are there, but no metadata name them yet.
    for path in (folder / "metadata").glob("v3*"):
        path.unlink()
    (folder / "metadata" / "version-hint.text").write_text("2")
    wait_until_older(str(folder))
    before = snapshot(folder)
    plant(folder, "left")

    def commit() -> None:
        assert later != with_late
        catalog.version = 2
        catalog.write(later)

    report = Run(TableRecord("t", "iceberg", str(folder)), tmp_path / "work").run(between=commit)
    assert (report["orphans"]["files"], report["reached"], report["removed"]["files"]) == (4, 3, 1)
    assert before.items() <= {**snapshot(folder), **{k: v for k, v in before.items() if "version-hint" in k}}.items()


@pytest.mark.parametrize("how", ["replaced", "gone", "link", "folder is a link"])
def test_a_file_that_changes_after_the_list_is_not_removed(tmp_path: Path, how: str) -> None:
    table = iceberg(tmp_path / "t")
    [path] = plant(tmp_path / "t", "k=z/left")
    other = tmp_path / "other"
    other.mkdir()
    (other / "left").write_bytes(b"k=z/left")
    run = Run(table, tmp_path / "work")

    def change() -> None:
        Path(path).unlink()
        if how == "replaced":
            Path(path).write_bytes(b"K=Z/LEFT")
        elif how == "link":
            Path(path).symlink_to(other / "left")
        elif how == "folder is a link":
            Path(path).parent.rmdir()
            Path(path).parent.symlink_to(other)

    plans = run.plan()
    change()
    before = snapshot(tmp_path)
    report = run.remove(plans)
    assert snapshot(tmp_path) == before
    found = (report["removed"]["files"], report["missing"], report["changed"], report["failed_files"])
    assert found == {"gone": (0, 1, 0, 0), "folder is a link": (0, 0, 0, 1)}.get(how, (0, 0, 1, 0))


def test_a_file_that_may_not_be_removed_is_a_failure_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    unlink = os.unlink

    def refusing(path: Any, **where: Any) -> None:
        if path == "left":
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **where)

    monkeypatch.setattr(os, "unlink", refusing)
    report = Run(table, tmp_path / "work").run()
    assert (report["removed"]["files"], report["missing"], report["failed_files"]) == (3, 0, 1)
    assert report["failed"] == [
        {"file": f"{tmp_path}/t/left", "why": f"cannot remove {tmp_path}/t/left: Operation not permitted"}
    ]


@pytest.mark.parametrize("make", MAKE)
def test_quarantined_files_are_moved_back(tmp_path: Path, make: str) -> None:
    table = MAKE[make](tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    before = snapshot(tmp_path)
    run = Run(table, tmp_path / "work")
    report = run.run(quarantine=True)
    where = f"{tmp_path}/t/_distop/quarantine/c0ffee/t/remove-orphans/1"
    assert (report["removed"]["files"], report["quarantine"]) == (4, where)
    moved = {f"{where}/{name}": name.encode() for name in ORPHANS}
    kept = {path: data for path, data in before.items() if path not in {f"{tmp_path}/t/{name}" for name in ORPHANS}}
    assert snapshot(tmp_path) == {**kept, **moved}
    assert run.restore(dry_run=True)["restored"]["files"] == 4
    assert snapshot(tmp_path) == {**kept, **moved}
    assert run.restore()["restored"] == report["removed"]
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "t/_distop/quarantine").exists()
    with pytest.raises(InvalidArgument, match="there are no quarantined files"):
        run.restore()


def test_reports_have_the_seconds_of_all_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = delta(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    ticks, pages = itertools.count(), itertools.count()
    for module in (orphan_removal, restoration):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    monkeypatch.setattr(orphan_removal, "PAGE", 2)
    run = Run(table, tmp_path / "work")
    _, plan = run.plan(quarantine=True)
    ctx = run.context()
    ctx.partition = plan
    argument = RemoveOrphans.Arg.model_validate({"older_than": 0, "allow_recent": True, "quarantine": True})
    move = FolderStore.move_listed

    def killed(self: FolderStore, objects: Any) -> Any:
        if next(pages) == 1:
            raise Killed
        return move(self, objects)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(FolderStore, "move_listed", killed)
        RemoveOrphans().start_or_resume_job(argument, plan, ctx)
    result = RemoveOrphans().start_or_resume_job(argument, plan, ctx)
    assert result.seconds == 2, "one for each page"
    assert run.restore()["seconds"] == 1


@pytest.mark.parametrize("moved", [0, 1, 4])
def test_a_restoration_that_was_killed_reports_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    table = MAKE["iceberg"](tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    before, run = snapshot(tmp_path), Run(table, tmp_path / "work")
    run.run(quarantine=True)
    argument, ctx = Restore.Arg.model_validate({"operation": run.operation}), run.context()
    [plan] = Restore().partitions(table, argument, ctx).partitions
    move = FolderStore.move_listed

    def killed(self: FolderStore, objects: Any) -> Any:
        move(self, dict(list(objects.items())[:moved]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "move_listed", killed)
        with pytest.raises(KeyboardInterrupt):
            Restore().start_or_resume_job(argument, plan, ctx)
    report = Restore().start_or_resume_job(argument, plan, run.context())
    assert (report.restored.files, report.existing, report.missing) == (4, 0, 0)
    assert report.restored.bytes == sum(map(len, ORPHANS))
    assert snapshot(tmp_path) == before


def test_old_files_of_the_quarantine_are_discarded(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    before = snapshot(tmp_path)
    plant(tmp_path / "t", *ORPHANS)
    run = Run(table, tmp_path / "work")
    run.run(quarantine=True)
    [foreign] = plant(tmp_path / "t", "_distop/quarantine/another/t/remove-orphans/1/x")
    moved = snapshot(tmp_path)
    assert run.run(discard_quarantine="1h")["discarded"]["files"] == 0
    assert run.run(discard_quarantine=0, dry_run=True)["quarantined"]["files"] == 4
    assert snapshot(tmp_path) == moved
    report = run.run(discard_quarantine=0)
    assert (report["discarded"], report["removed"]["files"]) == (report["quarantined"], 0)
    assert report["discarded"]["files"] == 4
    assert snapshot(tmp_path) == {**before, foreign: moved[foreign]}


def test_a_forged_plan_discards_nothing_outside_of_the_quarantine(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", "_distop/index/x", "left")
    run = Run(table, tmp_path / "work")
    before = snapshot(tmp_path)
    place = f"{tmp_path}/t/_distop/quarantine/c0ffee"
    for path in ("/../../index/x", "/", "", "/a/../b", "/_distop/x", "2/x"):
        with pytest.raises(UnsafePath):
            plan = PartitionPlan(1, "quarantined-000001", 0, ((place + path, 1, 1),))
            run.remove([plan], discard_quarantine=0)
    assert snapshot(tmp_path) == before


def test_a_restored_file_replaces_no_other_file(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", "left", "other")
    run = Run(table, tmp_path / "work")
    run.run(quarantine=True)
    (tmp_path / "t/left").write_bytes(b"new")
    report = run.restore()
    assert (report["restored"]["files"], report["existing"]) == (1, 1)
    assert (tmp_path / "t/left").read_bytes() == b"new"
    assert (tmp_path / "t/_distop/quarantine/c0ffee/t/remove-orphans/1/left").read_bytes() == b"left"


def test_a_table_without_its_metadata_is_restored(tmp_path: Path) -> None:
    """The files of a restoration may be those that the table needs."""
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", "left")
    run = Run(table, tmp_path / "work")
    run.run(quarantine=True)
    for path in (tmp_path / "t/metadata").iterdir():
        path.rename(tmp_path / "t/_distop/quarantine/c0ffee/t/remove-orphans/1" / path.name)
    assert run.restore()["restored"]["files"] > 1


@pytest.mark.parametrize(
    "operation", ["u/remove-orphans/1", "t/apply/1", "t/remove-orphans/x", "../t/remove-orphans/1"]
)
def test_a_restoration_of_anything_else_is_refused(tmp_path: Path, operation: str) -> None:
    table = iceberg(tmp_path / "t")
    with pytest.raises(InvalidArgument):
        Run(table, tmp_path / "work").restore(operation=operation)


# ---- refusals


def refused(run: Run, text: str, **arg: Any) -> None:
    """Planning is refused with this text, and changes nothing."""
    before = snapshot(Path(run.table.location).parent)
    with pytest.raises(InvalidArgument, match=text):
        run.plan(**arg)
    assert snapshot(Path(run.table.location).parent) == before


def test_a_folder_of_parquet_files_has_no_orphans(tmp_path: Path) -> None:
    plant(tmp_path / "t", "a.parquet")
    table = TableRecord("t", "parquet", str(tmp_path / "t"))
    refused(Run(table, tmp_path / "work"), "only Iceberg and Delta tables have orphans")


OTHERS: dict[str, Callable[[Path], TableRecord]] = {
    "inside": lambda root: TableRecord("u", "parquet", str(root / "t/inner")),
    "inside, as a URL": lambda root: TableRecord("u", "parquet", f"file://{root}/t//inner/"),
    "around": lambda root: TableRecord("u", "parquet", str(root)),
    "the same folder": lambda root: TableRecord("u", "delta", str(root / "t")),
    "behind a link": lambda root: TableRecord("u", "parquet", str(root / "link")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_nessie_12363_a_folder_with_files_of_another_table_is_refused(tmp_path: Path, other: str) -> None:
    """Two contents had one base location. The sweep of the older one deleted all live files of the newer one."""
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS, "inner/k=1/a.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "t/inner")
    refused(Run(table, tmp_path / "work", [OTHERS[other](tmp_path)]), "another table's folder")


@pytest.fixture
def in_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SqlCatalog, TableRecord, Path]]:
    """A catalog, and a table in it with its folder."""
    catalog = sql_catalog(tmp_path)
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA)
    for k in "ab":
        table.append(rows(k))
    options = configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/catalog.db")
    folder = Path(table.location().removeprefix("file://"))
    yield catalog, TableRecord("t", "iceberg", "db.t", options), folder
    catalog.close()


def test_orphans_of_a_table_of_a_catalog_are_removed_and_restored(
    in_catalog: tuple[SqlCatalog, TableRecord, Path], tmp_path: Path
) -> None:
    catalog, table, folder = in_catalog
    before = snapshot(folder)
    plant(folder, *ORPHANS)
    other = catalog.create_table("db.other", SCHEMA)
    other.append(rows("c"))
    run = Run(table, tmp_path / "work", [TableRecord("other", "iceberg", "db.other", table.options)])
    assert run.run(quarantine=True)["removed"]["files"] == len(ORPHANS)
    assert run.restore()["restored"]["files"] == len(ORPHANS)
    wait_until_older(str(folder))
    assert run.run()["removed"]["files"] == len(ORPHANS)
    assert snapshot(folder) == before
    assert catalog.load_table("db.t").scan().to_arrow().num_rows == 2


def test_nessie_12363_a_table_with_two_names_in_a_catalog_is_refused(
    in_catalog: tuple[SqlCatalog, TableRecord, Path], tmp_path: Path
) -> None:
    catalog, table, folder = in_catalog
    catalog.register_table("db.u", catalog.load_table("db.t").metadata_location)
    plant(folder, *ORPHANS)
    before = snapshot(folder)
    run = Run(table, tmp_path / "work", [TableRecord("u", "iceberg", "db.u", table.options)])
    with pytest.raises(InvalidArgument, match="another table's folder"):
        run.plan()
    catalog.drop_table("db.u")
    with pytest.raises(InvalidArgument, match="it is not known where the registered table 'u' has its files"):
        run.plan()
    assert snapshot(folder) == before


def test_a_table_that_moves_after_the_list_loses_nothing(
    in_catalog: tuple[SqlCatalog, TableRecord, Path], tmp_path: Path
) -> None:
    catalog, table, folder = in_catalog
    plant(folder, *ORPHANS)
    run = Run(table, tmp_path / "work")
    plans = run.plan()
    catalog.drop_table("db.t")
    catalog.create_table("db.t", SCHEMA, location=f"{tmp_path}/warehouse/elsewhere")
    before = snapshot(tmp_path / "warehouse")
    with pytest.raises(UnsafePath, match="is not a file below the table's folder"):
        run.remove(plans)
    assert snapshot(tmp_path / "warehouse") == before


def test_nessie_12363_metadata_of_another_table_of_the_same_location_are_refused(tmp_path: Path) -> None:
    """It need not be registered: a catalog may have two tables at one location."""
    table = iceberg(tmp_path / "t")
    other = iceberg(tmp_path / "u")
    plant(tmp_path / "t", *ORPHANS)
    theirs = tmp_path / "t/metadata/00003-5f0a1c9e.metadata.json"
    shutil.copy(max(Path(other.location).glob("metadata/v*.metadata.json")), theirs)
    wait_until_older(table.location)
    refused(Run(table, tmp_path / "work"), "belongs to another table")
    theirs.write_bytes(theirs.read_bytes()[:-100])  # its writer was killed
    wait_until_older(table.location)
    assert Run(table, tmp_path / "work").run()["removed"]["files"] == len(ORPHANS) + 1


def test_old_metadata_of_the_table_itself_are_orphans(tmp_path: Path) -> None:
    table = Folder(tmp_path / "t").new(SCHEMA, BY_K)
    for k in "abc":
        table.append(rows(k))
    (tmp_path / "t/metadata/v1.gz.metadata.json").write_bytes(
        gzip.compress((tmp_path / "t/metadata/v1.metadata.json").read_bytes())
    )
    wait_until_older(str(tmp_path / "t"))
    report = Run(TableRecord("t", "iceberg", str(tmp_path / "t")), tmp_path / "work").run()
    assert report["sample"] == [f"metadata/v{n}.metadata.json" for n in ("1.gz", 1, 2, 3)]
    assert report["removed"]["files"] == 4


def test_nessie_12363_files_of_another_history_of_the_table_are_kept(tmp_path: Path) -> None:
    """Two catalogs have the same table, and both commit: each does not know the other one's files."""
    folder = tmp_path / "t"
    catalog = LoggedFolder(folder)
    table = catalog.new(SCHEMA, BY_K)
    table.append(rows("a"))
    fork = table.metadata, table.metadata_location
    table.append(rows("b"))
    table.append(rows("c"))
    theirs = {str(path) for path in folder.rglob("*") if path.is_file()}
    kept = folder / "metadata/00001-theirs.metadata.json"
    (folder / "metadata/v4.metadata.json").rename(kept)
    (folder / "metadata/v3.metadata.json").unlink()
    table.metadata, table.metadata_location = fork
    catalog.version = 2
    table.append(rows("d"))
    plant(folder, *ORPHANS)
    kept_files = snapshot(folder)
    report = Run(TableRecord("t", "iceberg", str(folder)), tmp_path / "work").run()
    assert report["removed"]["files"] == len(ORPHANS)
    assert report["kept"]["needed by a metadata file that the table does not know"] > 4
    left = snapshot(folder)
    assert set(left) == set(kept_files) - {f"{folder}/{name}" for name in ORPHANS}
    assert len(theirs & set(left)) == len(theirs) - 1  # without the file that was renamed


def test_other_registered_tables_beside_the_folder_and_other_names_of_the_table_do_not_matter(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    plant(tmp_path / "t2", "a.parquet")
    others = [
        TableRecord("u", "parquet", str(tmp_path / "t2")),
        TableRecord("same", table.format, table.location),
        TableRecord("v", "parquet", "s3://bucket/t"),
    ]
    assert Run(table, tmp_path / "work", others).run()["removed"]["files"] == 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("inner/metadata/v1.metadata.json", "an Iceberg table in 'inner'"),
        ("data/k=1/metadata/00000-a.metadata.json.gz", "an Iceberg table in 'data/k=1'"),
        ("inner/_delta_log/00000000000000000000.json", "a Delta table in 'inner'"),
        ("_delta_log/00000000000000000000.json", "a Delta table in '.'"),
        (".hoodie/hoodie.properties", "a Hudi table in '.'"),
    ],
)
def test_a_folder_with_a_table_that_is_not_registered_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS, name)
    refused(Run(table, tmp_path / "work"), kind)


def test_the_iceberg_metadata_of_a_delta_table_are_no_orphans(tmp_path: Path) -> None:
    table = delta(tmp_path / "t")
    plant(tmp_path / "t", "metadata/v1.metadata.json")
    refused(Run(table, tmp_path / "work"), "an Iceberg table in '.'")


def test_a_link_in_the_folder_is_refused(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    (tmp_path / "t/k=l").symlink_to(tmp_path)
    refused(Run(table, tmp_path / "work"), "is not a regular file")


def test_files_at_another_prefix_are_an_error_or_keep_files_of_their_names(tmp_path: Path) -> None:
    """In iceberg#4194 a cluster was known by two names, and each file of the table looked like an orphan."""
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS, "data/moved.parquet")
    renamed(tmp_path / "t", "hdfs://nn2/lake/data/moved.parquet")
    refused(Run(table, tmp_path / "work"), "at hdfs://nn2, but its folder is at file://")
    report = Run(table, tmp_path / "work").run(prefix_mismatch="keep")
    assert (report["removed"]["files"], report["elsewhere"]) == (4, 1)
    assert report["kept"]["named like a needed file elsewhere"] == 1
    assert (tmp_path / "t/data/moved.parquet").exists()


def renamed(folder: Path, path: str) -> None:
    """Let the newest metadata name one more metadata file, at this path."""
    newest = max((folder / "metadata").glob("v*.metadata.json"), key=lambda one: one.stat().st_mtime_ns)
    content = json.loads(newest.read_text())
    content["metadata-log"] = [*content.get("metadata-log", ()), {"metadata-file": path, "timestamp-ms": 1}]
    newest.write_text(json.dumps(content))
    wait_until_older(str(folder))


def test_a_table_behind_a_link_is_compared_by_its_real_path(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    removed = plant(tmp_path / "t", *ORPHANS)
    kept = {path: data for path, data in snapshot(tmp_path).items() if path not in removed}
    (tmp_path / "link").symlink_to(tmp_path / "t")
    renamed(tmp_path / "t", str(tmp_path / "link/metadata/v1.metadata.json"))
    kept = {path: data for path, data in snapshot(tmp_path).items() if path not in removed}
    assert Run(table, tmp_path / "work").run()["elsewhere"] == 0
    assert snapshot(tmp_path) == kept


def test_a_table_whose_catalog_keeps_other_versions_is_refused(tmp_path: Path) -> None:
    """Nessie sets gc.enabled=false, because files are needed by other branches of the catalog."""
    table = iceberg(tmp_path / "t", properties={"gc.enabled": "False"})
    plant(tmp_path / "t", *ORPHANS)
    refused(Run(table, tmp_path / "work"), "gc.enabled is false")


def test_a_damaged_manifest_is_no_reason_to_remove_files(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    manifest = next((tmp_path / "t/metadata").glob("*-m0.avro"))
    manifest.write_bytes(manifest.read_bytes()[:-9])
    before = snapshot(tmp_path)
    with pytest.raises(Exception, match="cannot read"):
        Run(table, tmp_path / "work").plan()
    assert snapshot(tmp_path) == before


def test_a_forged_plan_removes_no_needed_file_and_nothing_elsewhere(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "u", "a")
    run = Run(table, tmp_path / "work")
    before = snapshot(tmp_path)
    listed = open_store(str(tmp_path / "t")).list()
    own = tuple((f"{tmp_path}/t/{one.key}", one.size, one.stamp) for one in listed)
    report = run.remove([PartitionPlan(0, "orphans-000001", 0, own)])
    assert (report["removed"]["files"], report["reached"]) == (0, len(own))
    for path in (f"{tmp_path}/u/a", f"{tmp_path}/t/../u/a", f"{tmp_path}/t", f"{tmp_path}/t/_distop/x", "s3://b/t/a"):
        with pytest.raises(UnsafePath):
            run.remove([PartitionPlan(0, "orphans-000001", 0, ((path, 1, 1),))])
    assert snapshot(tmp_path) == before


# ---- crashes


class Killed(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("at", range(7))
def test_a_removal_that_is_killed_is_completed_with_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, quarantine: bool
) -> None:
    """Killed before and after each removed file, with pages of two files."""
    table = iceberg(tmp_path / "t")
    kept = snapshot(tmp_path)
    plant(tmp_path / "t", *ORPHANS)
    monkeypatch.setattr(orphan_removal, "PAGE", 2)
    run = Run(table, tmp_path / "work")
    _, plan = run.plan(quarantine=quarantine)
    calls = 0
    unlink = os.unlink

    def killing(path: Any, **where: Any) -> None:
        nonlocal calls
        if not str(path).startswith(".distop-"):
            calls += 1
            if calls == at // 2 + 1 and at % 2 == 0:
                raise Killed
        unlink(path, **where)
        if not str(path).startswith(".distop-") and calls == at // 2 + 1:
            raise Killed

    ctx = run.context()
    ctx.partition = plan
    argument = RemoveOrphans.Arg.model_validate({"older_than": 0, "allow_recent": True, "quarantine": quarantine})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "unlink", killing)
        RemoveOrphans().start_or_resume_job(argument, plan, ctx)
    result = RemoveOrphans().start_or_resume_job(argument, plan, ctx)
    assert (result.removed.files, result.missing, result.changed, result.failed_files) == (4, 0, 0, 0)
    left = {path: data for path, data in snapshot(tmp_path).items() if "/_distop/" not in path}
    assert left == kept
    if quarantine:
        assert run.restore()["restored"]["files"] == 4


def test_a_store_error_is_no_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = iceberg(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    run = Run(table, tmp_path / "work")
    plans = run.plan()

    def failing(*_: Any) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(FolderStore, "remove_listed", failing)
    with pytest.raises(StoreError):
        run.remove(plans)


def test_no_orphan_is_one_that_delta_s_own_vacuum_keeps(tmp_path: Path) -> None:
    """Delta's vacuum deletes more: files that only older versions need."""
    table = delta(tmp_path / "t")
    plant(tmp_path / "t", *ORPHANS)
    own = DeltaTable(tmp_path / "t")
    theirs = own.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=True, full=True)
    ours = set(Run(table, tmp_path / "work").run(dry_run=True)["sample"])
    assert ours - {one for one in ours if "/." in one} <= set(theirs)
    Run(table, tmp_path / "work").run()
    for version in range(4):
        assert (
            DeltaTable(tmp_path / "t", version=version).to_pyarrow_table().num_rows == {0: 2, 1: 2, 2: 4, 3: 2}[version]
        )
