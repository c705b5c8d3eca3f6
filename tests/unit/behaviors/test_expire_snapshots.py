"""expire-snapshots removes old versions, and exactly the files that nothing else reaches."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.table import StaticTable, Table
from pyiceberg.table.metadata import TableMetadataUtil

from distop import clock, testing
from distop.behavior import OutcomeRow, PartitionPlan
from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.storage.folder_store import FolderStore
from distop.tables import reachability_of
from distop.tables.commits import CommitUnknown, Conflict
from distop.tables.iceberg.folder_publisher import FolderPublisher
from distop.tables.iceberg.iceberg_catalogs import CatalogTable
from distop_behaviors.expire import ExpireSnapshots
from distop_behaviors.expire.expire_argument import ExpireSnapshotsArgument, ExpireSnapshotsReport
from tests.support.context import FakeContext, complete, run_jobs
from tests.support.icebergrest import COMMIT_FAULTS, WAREHOUSE, RestCatalogServer, configure, sql_catalog
from tests.support.orphan_runs import snapshot
from tests.support.table_files import LoggedFolder, on_disk, with_statistics
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA, record, rows

NOW = {"older_than": 0, "allow_recent": True}


class Expiring:
    """One operation, in steps that a test can interrupt or repeat."""

    def __init__(self, table: TableRecord, work: Path, **arg: Any) -> None:
        self.table, self.work = table, work
        self.behavior = ExpireSnapshots()
        self.argument = ExpireSnapshotsArgument.model_validate({**NOW, **arg})
        self.partitions: list[PartitionPlan] = []
        self.outcomes: list[OutcomeRow] = []

    def context(self) -> FakeContext:
        context = FakeContext(self.work, self.table)
        context.operation = "t/expire-snapshots/1"
        return context

    def plan(self) -> Expiring:
        planned = self.behavior.partitions(self.table, self.argument, self.context()).partitions
        self.partitions = [PartitionPlan.from_json(json.loads(json.dumps(one.to_json()))) for one in planned]
        return self

    def run_jobs(self) -> Expiring:
        self.outcomes = run_jobs(self.behavior, self.argument, self.partitions, self.context())
        return self

    def complete(self) -> tuple[ExpireSnapshotsReport, str]:
        ran = complete(
            self.behavior, self.argument, self.table, self.outcomes, self.partitions, self.context(), version=""
        )
        return ExpireSnapshotsReport.model_validate(ran.report), ran.message


def expire(table: TableRecord, work: Path, **arg: Any) -> ExpireSnapshotsReport:
    report, message = Expiring(table, work, **arg).plan().run_jobs().complete()
    assert not message
    return report


def reached(table: TableRecord) -> set[str]:
    return {file.path.removeprefix("file://") for file in reachability_of(table).all_files()}


def scan(path: Path) -> list[Any]:
    """The rows of the current snapshot, read by pyiceberg from the metadata on the disk."""
    version = (path / "metadata" / "version-hint.text").read_text()
    found = StaticTable.from_metadata(str(path / "metadata" / f"v{version}.metadata.json"))
    return sorted(found.scan().to_arrow()["id"].to_pylist())


def own(path: Path) -> set[str]:
    """All files of a table's folder but distop's own, and old metadata files, which the log names."""
    return {found for found in on_disk(path) if "/_distop/" not in found}


def grown(path: Path) -> Table:
    """A table with rewritten and removed files: five snapshots, of which two have files that the last one lacks."""
    table = LoggedFolder(path).new(SCHEMA, BY_K)
    table.append(rows("a", "b"))
    table.append(rows("c"))
    table.overwrite(rows("d", "e"))
    table.delete("k = 'd'")
    return table


def test_files_of_expired_snapshots_are_deleted_and_all_others_stay(tmp_path: Path) -> None:
    table = grown(tmp_path / "t")
    neighbour = grown(tmp_path / "t2")
    before, others, expected = own(tmp_path / "t"), own(tmp_path / "t2"), scan(tmp_path / "t")
    report = expire(record(tmp_path / "t"), tmp_path / "work")
    after = own(tmp_path / "t")
    assert after == reached(record(tmp_path / "t"))
    assert after - before == {reachability_of(record(tmp_path / "t")).source}
    assert scan(tmp_path / "t") == expected
    assert own(tmp_path / "t2") == others
    assert (report.versions_before, report.versions_after) == (len(table.metadata.snapshots), 1)
    assert report.removed == report.versions_before - 1
    assert sum(found.files for found in report.deleted.values()) == len(before - after)
    assert report.deleted["data"].bytes > 0
    assert (report.missing, report.recent, report.failed_files, report.elsewhere) == (0, 0, 0, 0)
    assert neighbour.metadata.snapshots


def test_twice_equals_once_and_a_second_completion_deletes_nothing_more(tmp_path: Path) -> None:
    grown(tmp_path / "t")
    expire(record(tmp_path / "t"), tmp_path / "work")
    after = own(tmp_path / "t")
    again = expire(record(tmp_path / "t"), tmp_path / "work")
    assert own(tmp_path / "t") == after
    assert (again.removed, again.deleted) == (0, {})


def test_a_dry_run_reports_what_a_run_deletes(tmp_path: Path) -> None:
    grown(tmp_path / "t")
    before = own(tmp_path / "t")
    planned = expire(record(tmp_path / "t"), tmp_path / "work", dry_run=True)
    assert own(tmp_path / "t") == before
    done = expire(record(tmp_path / "t"), tmp_path / "work")
    assert {kind: found.files for kind, found in planned.deleted.items()} == {
        kind: found.files for kind, found in done.deleted.items()
    }
    assert (planned.removed, planned.versions_after) == (done.removed, done.versions_after)


def test_amoro_1959_files_of_branches_and_tags_stay(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, BY_K)
    table.append(rows("a", "b"))
    table.manage_snapshots().create_tag(table.metadata.current_snapshot_id or 0, "kept").commit()
    table.overwrite(rows("c"))
    table.manage_snapshots().create_branch(table.metadata.current_snapshot_id or 0, "side").commit()
    table.append(rows("d"), branch="side")
    table.overwrite(rows("e"))
    tag, side = (table.metadata.refs[name].snapshot_id for name in ("kept", "side"))
    wanted = {
        file.path
        for version in (tag, side)
        for unit in reachability_of(record(tmp_path / "t")).units({str(version)})
        for file in reachability_of(record(tmp_path / "t")).files(unit)
    }
    expire(record(tmp_path / "t"), tmp_path / "work")
    left = reachability_of(record(tmp_path / "t"))
    assert {ref for version in left.versions() for ref in version.refs} == {"main", "kept", "side"}
    assert wanted <= own(tmp_path / "t") == reached(record(tmp_path / "t"))


def test_iceberg_go_1842_statistics_of_remaining_snapshots_stay(tmp_path: Path) -> None:
    table = grown(tmp_path / "t")
    ids = [snapshot.snapshot_id for snapshot in table.metadata.snapshots]
    first = with_statistics(table, ids[0])
    last = with_statistics(table, ids[-1])
    ran = expire(record(tmp_path / "t"), tmp_path / "work")
    assert ran.deleted["statistics"].files == 2
    assert not set(first) & own(tmp_path / "t")
    assert set(last) <= own(tmp_path / "t") == reached(record(tmp_path / "t"))


def test_the_newest_snapshots_and_limits_of_branches_are_kept(tmp_path: Path) -> None:
    table = grown(tmp_path / "t")
    count = len(table.metadata.snapshots)
    assert expire(record(tmp_path / "t"), tmp_path / "work", retain_last=3).removed == count - 3
    assert expire(record(tmp_path / "t"), tmp_path / "work", older_than="1h").removed == 0


def test_a_tag_beyond_its_age_is_removed_only_if_asked(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA)
    table.append(rows("a"))
    table.manage_snapshots().create_tag(table.metadata.current_snapshot_id or 0, "old", max_ref_age_ms=1).commit()
    table.overwrite(rows("b"))
    kept = expire(record(tmp_path / "t"), tmp_path / "work", refs="keep")
    assert kept.refs == []
    assert "old" in {ref for version in reachability_of(record(tmp_path / "t")).versions() for ref in version.refs}
    removed = expire(record(tmp_path / "t"), tmp_path / "work")
    assert (removed.refs, removed.versions_after) == (["old"], 1)
    assert own(tmp_path / "t") == reached(record(tmp_path / "t"))


@pytest.mark.parametrize("kind", ["sql", "rest"])
def test_tables_of_catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    catalog = sql_catalog(tmp_path / "lake")
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA)
    table.append(rows("a", "b"))
    table.overwrite(rows("c"))
    expected = table.scan().to_arrow().to_pylist()
    place = tmp_path / "lake" / "warehouse"
    with RestCatalogServer(tmp_path / "lake") as server:
        if kind == "sql":
            options = configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
        else:
            options = configure(monkeypatch, type="rest", uri=server.uri, warehouse=WAREHOUSE)
        own_record = TableRecord("t", "iceberg", "db.t", options)
        assert expire(own_record, tmp_path / "work").versions_after == 1
        assert own(place) == reached(own_record)
    assert catalog.load_table("db.t").scan().to_arrow().to_pylist() == expected
    assert [entry.snapshot_id for entry in catalog.load_table("db.t").metadata.snapshot_log] == [
        table.metadata.current_snapshot_id
    ]
    catalog.close()


def test_a_tag_that_is_set_at_the_moment_of_the_commit_keeps_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyiceberg would remove the snapshot, and the tag with it: its commit compares only the main branch."""
    catalog = sql_catalog(tmp_path / "lake")
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA)
    for key in "abc":
        table.append(rows(key))
    first, middle, last = (one.snapshot_id for one in table.metadata.snapshots)
    options = configure(monkeypatch, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
    commit, tagged = CatalogTable.commit, list[int]()

    def late(self: CatalogTable, *args: Any, **options: Any) -> str:
        if not tagged:
            tagged.append(first)
            catalog.load_table("db.t").manage_snapshots().create_tag(first, "late").commit()
        return commit(self, *args, **options)

    monkeypatch.setattr(CatalogTable, "commit", late)
    report = expire(TableRecord("t", "iceberg", "db.t", options), tmp_path / "work")
    now = catalog.load_table("db.t")
    assert (report.removed, report.reused, report.sample) == (1, 1, [str(middle)])
    assert now.metadata.refs["late"].snapshot_id == first
    assert {one.snapshot_id for one in now.metadata.snapshots} == {first, last}
    # With a gap, the log would show the first snapshot as current until the last one.
    assert [entry.snapshot_id for entry in now.metadata.snapshot_log] == [last]
    assert len(now.scan(snapshot_id=first).to_arrow()) == 1
    catalog.close()


@pytest.mark.parametrize("fault", COMMIT_FAULTS)
def test_the_answers_of_a_rest_catalog_are_settled_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """ClickHouse#115390: files of a commit whose answer was lost were removed as those of a failed commit."""
    with RestCatalogServer(tmp_path / "lake") as rest:
        rest.tables.create_namespace("db")
        table = rest.tables.create_table("db.t", SCHEMA, partition_spec=BY_K)
        for key in "abc":
            table.overwrite(rows(key))
        folder = Path(table.metadata.location.removeprefix("file://"))
        beside = folder.with_name("t-old")
        shutil.copytree(folder, beside)
        others, expected = snapshot(beside), sorted(table.scan().to_arrow()["id"].to_pylist())
        options = configure(monkeypatch, type="rest", uri=rest.uri, warehouse=WAREHOUSE)
        record = TableRecord("t", "iceberg", "db.t", options)
        rest.on_commit = COMMIT_FAULTS[fault]()
        report = expire(record, tmp_path / "work")
        now = rest.tables.load_table("db.t")
        assert (report.versions_after, len(now.metadata.snapshots)) == (1, 1)
        assert sorted(now.scan().to_arrow()["id"].to_pylist()) == expected
        data = {one for one in own(folder) if one.endswith(".parquet")}
        assert data == {one for one in reached(record) if one.endswith(".parquet")}
        assert snapshot(beside) == others


class Interrupted(Exception):
    """The process is killed here."""


@pytest.mark.parametrize("error", [CommitUnknown("no answer"), Conflict("another writer")])
@pytest.mark.parametrize("lands", [False, True])
def test_an_unknown_commit_is_settled_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, lands: bool
) -> None:
    grown(tmp_path / "t")
    commit, failed = FolderPublisher.commit, list[str]()

    def lose_answer(self: FolderPublisher, head: Any, text: str) -> None:
        if not failed:
            failed.append(head.source)
            if lands:
                commit(self, head, text)
            raise error
        commit(self, head, text)

    monkeypatch.setattr(FolderPublisher, "commit", lose_answer)
    ran = expire(record(tmp_path / "t"), tmp_path / "work")
    assert failed
    assert ran.versions_after == 1
    assert own(tmp_path / "t") == reached(record(tmp_path / "t"))
    names = sorted(path.name for path in (tmp_path / "t" / "metadata").glob("v*.metadata.json"))
    log = json.loads(Path(reachability_of(record(tmp_path / "t")).source).read_text())["metadata-log"]
    assert len(names) == len(log) + 1


@pytest.mark.parametrize("deleted", [0, 1, 4])
def test_a_killed_completion_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: int) -> None:
    grown(tmp_path / "t")
    remove = FolderStore.remove_listed

    def killed(self: FolderStore, objects: Any) -> Any:
        remove(self, objects[:deleted])
        raise Interrupted

    table, expected = record(tmp_path / "t"), scan(tmp_path / "t")
    operation = Expiring(table, tmp_path / "work").plan().run_jobs()
    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "remove_listed", killed)
        with pytest.raises(Interrupted):
            operation.complete()
    again, message = operation.complete()
    assert not message
    assert again.missing == deleted
    assert again.removed == again.versions_before - 1
    assert own(tmp_path / "t") == reached(table)
    assert scan(tmp_path / "t") == expected


def test_a_snapshot_that_gets_a_tag_after_planning_stays_with_its_files(tmp_path: Path) -> None:
    table = grown(tmp_path / "t")
    first = table.metadata.snapshots[0].snapshot_id
    operation = Expiring(record(tmp_path / "t"), tmp_path / "work").plan().run_jobs()
    table.manage_snapshots().create_tag(first, "late").commit()
    report, _ = operation.complete()
    assert (report.reused, report.versions_after) == (1, 2)
    assert own(tmp_path / "t") == reached(record(tmp_path / "t"))
    assert "late" in {ref for version in reachability_of(record(tmp_path / "t")).versions() for ref in version.refs}


@pytest.mark.parametrize("moment", ["planned", "read", "committed"])
def test_files_that_a_writer_commits_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The writer adds an old file again, which only an expired snapshot had."""
    table = LoggedFolder(tmp_path / "t").new(SCHEMA)
    table.append(rows("a", "b"))
    old = table.inspect.files()["file_path"].to_pylist()
    table.overwrite(rows("c"))
    operation = Expiring(record(tmp_path / "t"), tmp_path / "work").plan()

    def write() -> None:
        reopened(tmp_path / "t").add_files(old, check_duplicate_files=False)

    if moment == "planned":
        write()
    operation.run_jobs()
    if moment == "read":
        write()
    if moment == "committed":
        commit = FolderPublisher.commit

        def then_write(self: FolderPublisher, head: Any, text: str) -> None:
            commit(self, head, text)
            write()

        monkeypatch.setattr(FolderPublisher, "commit", then_write)
    report, _ = operation.complete()
    assert set(old) <= own(tmp_path / "t") == reached(record(tmp_path / "t"))
    assert scan(tmp_path / "t") == [0, 0, 1]
    assert report.failed_files == 0


def test_iceberg_8255_a_file_that_was_deleted_and_added_again_stays(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA)
    table.append(rows("a", "b"))
    old = table.inspect.files()["file_path"].to_pylist()
    table.delete("id >= 0")
    table.append(rows("c"))
    table.add_files(old, check_duplicate_files=False)
    report = expire(record(tmp_path / "t"), tmp_path / "work")
    assert report.versions_after == 1
    assert set(old) <= own(tmp_path / "t") == reached(record(tmp_path / "t"))
    assert scan(tmp_path / "t") == [0, 0, 1]


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_lost_list_of_a_job_is_read_again_from_the_metadata(tmp_path: Path, damage: str) -> None:
    grown(tmp_path / "t")
    operation = Expiring(record(tmp_path / "t"), tmp_path / "work").plan().run_jobs()
    lists = [path for path in (tmp_path / "work" / "stage").rglob("*") if path.name in ("expired", "kept")]
    assert len(lists) == 2
    for path in lists:
        path.unlink() if damage == "missing" else path.write_bytes(b"x")
    report, _ = operation.complete()
    assert report.deleted["data"].files
    assert own(tmp_path / "t") == reached(record(tmp_path / "t"))


def test_files_that_are_younger_than_the_expired_snapshots_stay(tmp_path: Path) -> None:
    """A file whose path an old snapshot names was written later, for example by a copy of the table."""
    table = grown(tmp_path / "t")
    aged(table, 30 * 86400)
    before = own(tmp_path / "t")
    report = expire(record(tmp_path / "t"), tmp_path / "work", older_than="5d")
    assert report.removed
    assert report.recent
    assert not report.deleted
    assert before <= own(tmp_path / "t")


def test_the_age_of_files_does_not_depend_on_when_they_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation was paused for a day between its plan and its completion; the files are 12 h too young."""
    aged(grown(tmp_path / "t"), 43_200)
    before = own(tmp_path / "t")
    operation = Expiring(record(tmp_path / "t"), tmp_path / "work", older_than="2h").plan().run_jobs()
    now, nodes = FolderStore.time, clock.time.time
    monkeypatch.setattr(FolderStore, "time", lambda self, folder: now(self, folder) + 86_400)
    monkeypatch.setattr(clock.time, "time", staticmethod(lambda: nodes() + 86_400))
    report, message = operation.complete()
    assert not message
    assert report.removed
    assert report.recent
    assert not report.deleted
    assert before <= own(tmp_path / "t")


def test_files_outside_of_the_table_s_folder_are_never_deleted(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA)
    outside = tmp_path / "elsewhere" / "x.parquet"
    outside.parent.mkdir()
    pq.write_table(rows("a"), outside)
    table.add_files([str(outside)])
    table.overwrite(rows("b"))
    report = expire(record(tmp_path / "t"), tmp_path / "work")
    assert report.elsewhere == 1
    assert outside.exists()


def test_a_file_that_cannot_be_deleted_fails_the_operation_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may delete everything, so the refusal of the disk is simulated."""
    grown(tmp_path / "t")
    head = FolderStore.head

    def denied(self: FolderStore, key: str) -> Any:
        if key.startswith("data/"):
            raise PermissionError(13, "Permission denied")
        return head(self, key)

    operation = Expiring(record(tmp_path / "t"), tmp_path / "work").plan().run_jobs()
    monkeypatch.setattr(FolderStore, "head", denied)
    report, message = operation.complete()
    assert "could not be deleted, such as data/" in message
    assert report.failed_files == len(report.failed) > 0
    assert "data" not in report.deleted


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1h"):
        ExpireSnapshotsArgument(older_than=60)
    protected = LoggedFolder(tmp_path / "g").new(SCHEMA, **{"gc.enabled": "false"})
    protected.append(rows("a"))
    with pytest.raises(InvalidArgument, match=r"gc\.enabled=false"):
        Expiring(record(tmp_path / "g"), tmp_path / "work").plan()
    (tmp_path / "p").mkdir()
    pq.write_table(rows("a"), tmp_path / "p" / "x.parquet")
    with pytest.raises(InvalidArgument, match="only Iceberg tables"):
        Expiring(TableRecord("t", "parquet", str(tmp_path / "p")), tmp_path / "work").plan()
    with pytest.raises(InvalidArgument, match="without naming partitions"):
        ExpireSnapshots().jobs(None, (), ["versions"], FakeContext(tmp_path))


def test_a_short_limit_of_the_table_needs_allow_recent(tmp_path: Path) -> None:
    """It removes versions that running readers use, as a short older_than does."""
    limits: tuple[tuple[str, dict[str, str], int | None], ...] = (
        ("property", {"history.expire.max-snapshot-age-ms": "1"}, None),
        ("branch", {}, 1),
    )
    for name, properties, of_branch in limits:
        table = LoggedFolder(tmp_path / name).new(SCHEMA, **properties)
        table.append(rows("a"))
        current = table.metadata.current_snapshot_id or 0
        if of_branch is not None:
            table.manage_snapshots().create_branch(current, "side", max_snapshot_age_ms=of_branch).commit()
        table.overwrite(rows("c"))
        before = own(tmp_path / name)
        with pytest.raises(InvalidArgument, match=r"max-snapshot-age-ms .*lets versions expire after 0\.001 s"):
            Expiring(record(tmp_path / name), tmp_path / "work", older_than=None, allow_recent=False).plan()
        assert own(tmp_path / name) == before
        Expiring(record(tmp_path / name), tmp_path / "work", older_than=None, allow_recent=True).plan()
    given = Expiring(record(tmp_path / "property"), tmp_path / "work", older_than="5d", allow_recent=False).plan()
    assert given.partitions
    short = delta(tmp_path / "d", **{"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    with pytest.raises(InvalidArgument, match="deletedFileRetentionDuration .*lets versions expire after 0 s"):
        Expiring(short, tmp_path / "work", older_than=None, allow_recent=False).plan()


def test_an_executor_runs_it_and_refuses_a_folder_with_another_table(tmp_path: Path) -> None:
    grown(tmp_path / "t")
    inner = grown(tmp_path / "t" / "inner")
    table, other = record(tmp_path / "t"), TableRecord("other", "iceberg", str(tmp_path / "t" / "inner"))
    refused = testing.run_operation(ExpireSnapshots, NOW, table=table, tables=[other], folder=tmp_path / "work")
    assert refused.state == "failed"
    assert "is inside" in str(refused.errors)
    assert inner.metadata.snapshots
    done = testing.run_operation(ExpireSnapshots, NOW, table=table, folder=tmp_path / "again")
    assert (done.state, list(done.errors)) == ("success", [])
    assert done.report["versions_after"] == 1
    assert not [path for path in on_disk(tmp_path / "again") if path.endswith(("expired", "kept"))]


def aged(table: Table, seconds: int) -> None:
    """Let all snapshots be this much older."""
    text = json.loads(table.metadata.model_dump_json())
    for one in (*text["snapshots"], *text["snapshot-log"]):
        one["timestamp-ms"] -= seconds * 1000
    catalog: Any = table.catalog
    catalog.write(TableMetadataUtil.parse_raw(json.dumps(text)))


def reopened(path: Path) -> Table:
    """The current state of the table, to write to."""
    folder = LoggedFolder(path)
    folder.version = int((path / "metadata" / "version-hint.text").read_text())
    source = str(path / "metadata" / f"v{folder.version}.metadata.json")
    return Table(("t",), TableMetadataUtil.parse_raw(Path(source).read_text()), source, folder.io, folder)


# ------------------------------------------------------------------- Delta


def delta(path: Path, **configuration: str) -> TableRecord:
    for n in range(4):
        mode: Any = "append" if n < 2 else "overwrite"
        write_deltalake(path, rows("a", "b"), mode=mode, configuration=configuration or None, partition_by=["k"])
    return TableRecord("t", "delta", str(path))


def active(path: Path) -> set[str]:
    return {uri.removeprefix("file://") for uri in DeltaTable(path).file_uris()}


def data(path: Path) -> set[str]:
    return {found for found in on_disk(path) if found.endswith(".parquet") and "/_" not in found}


def test_removed_files_of_a_delta_table_are_deleted_after_the_retention_time(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", **{"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    before, expected = data(tmp_path / "t"), active(tmp_path / "t")
    vacuumed = set(DeltaTable(tmp_path / "t").vacuum(0, dry_run=True, enforce_retention_duration=False))
    report = expire(table, tmp_path / "work")
    assert data(tmp_path / "t") == expected
    assert before - expected == {f"{tmp_path}/t/{name}" for name in vacuumed}
    assert report.deleted["data"].files == len(vacuumed)
    assert (report.removed, report.versions_before, report.versions_after) == (0, 4, 4)


def test_a_wrong_clock_of_the_planning_node_makes_nothing_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files were written long ago and removed just now: only the time of their removal keeps them."""
    iceberg, removed = record(tmp_path / "i"), delta(tmp_path / "d")
    grown(tmp_path / "i")
    for path in (*on_disk(tmp_path / "i"), *on_disk(tmp_path / "d")):
        os.utime(path, (1e9, 1e9))
    before = own(tmp_path / "i"), own(tmp_path / "d")
    true = clock.time.time
    monkeypatch.setattr(clock.time, "time", staticmethod(lambda: true() + 30 * 86400))
    for table, name in ((iceberg, "i"), (removed, "d")):
        report = expire(table, tmp_path / "work" / name, older_than=8 * 86400)
        assert (report.removed, report.deleted) == (0, {})
    assert (own(tmp_path / "i"), own(tmp_path / "d")) == before


@pytest.mark.parametrize("kept", [None, "interval 7 days"])
def test_removed_files_of_a_delta_table_stay_for_the_retention_time(tmp_path: Path, kept: str | None) -> None:
    table = delta(tmp_path / "t", **({"delta.deletedFileRetentionDuration": kept} if kept else {}))
    before = data(tmp_path / "t")
    with pytest.raises(InvalidArgument, match="keeps removed files for 168 h"):
        Expiring(table, tmp_path / "work").plan()
    assert expire(table, tmp_path / "work", older_than="7d").deleted == {}
    assert data(tmp_path / "t") == before


def test_a_restored_version_of_a_delta_table_keeps_its_files(tmp_path: Path) -> None:
    table = delta(tmp_path / "t", **{"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    operation = Expiring(table, tmp_path / "work").plan().run_jobs()
    DeltaTable(tmp_path / "t").restore(1)
    report, _ = operation.complete()
    assert active(tmp_path / "t") <= data(tmp_path / "t")
    assert report.deleted["data"].files
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().num_rows == 4
