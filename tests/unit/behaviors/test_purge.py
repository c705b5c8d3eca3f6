"""``purge`` removes the registration and all files that a table reaches, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pydantic import ValidationError

from distop import testing
from distop.behavior import OutcomeRow, PartitionPlan, TableRecord
from distop.errors import InvalidArgument
from distop.protocol.keys import Keys
from distop.storage.folder_store import FolderStore
from distop.storage.object_store import Removed
from distop.tables import check_table
from distop.tables.reachability import MANIFEST
from distop_behaviors.purge import DropTablePurgeJob, Purge, purge_deletion, purge_plan
from distop_behaviors.purge.file_digest import NOTHING, added_up, digest_of
from distop_behaviors.purge.purge_argument import PurgeReport
from distop_behaviors.purge.purge_plan import kind_of
from tests.support.context import FakeContext, complete, run_jobs
from tests.support.orphan_runs import snapshot
from tests.support.table_files import LoggedFolder, on_disk, with_statistics
from tests.unit.tables.delta.test_deletion_vectors import with_vector
from tests.unit.tables.iceberg.test_tables_iceberg import BY_K, SCHEMA, rows

if TYPE_CHECKING:
    from collections.abc import Iterable


def iceberg(folder: Path, **properties: str) -> TableRecord:
    table = LoggedFolder(folder).new(SCHEMA, BY_K, **properties)
    for k in "abc":
        table.append(rows(k))
    table.delete("k = 'b'")
    with_statistics(table, table.metadata.current_snapshot_id or 0)
    return TableRecord("t", "iceberg", str(folder))


def delta(folder: Path) -> TableRecord:
    for n in range(12):
        data = pa.table({"k": ["a", "b"], "v": [n, n]})
        write_deltalake(folder, data, mode="overwrite" if n % 2 else "append", partition_by=["k"])
    return TableRecord("t", "delta", str(folder))


def parquet(folder: Path) -> TableRecord:
    for k in "ab":
        (folder / f"k={k}").mkdir(parents=True)
        pq.write_table(pa.table({"v": [1, 2]}), folder / f"k={k}" / "x.parquet")
    return TableRecord("t", "parquet", str(folder))


MAKE = {"iceberg": iceberg, "delta": delta, "parquet": parquet}


class Purging:
    """One operation, in steps that a test can interrupt or repeat. ``tables``: other registered tables."""

    def __init__(self, table: TableRecord, work: Path, tables: Iterable[TableRecord] = (), **arg: Any) -> None:
        self.table, self.work, self.tables = table, work, {one.name: one for one in tables}
        self.behavior = Purge()
        self.argument = Purge.Arg.model_validate(arg)
        self.partitions: list[PartitionPlan] = []
        self.outcomes: list[OutcomeRow] = []

    def context(self) -> FakeContext:
        context = FakeContext(self.work, self.table)
        context.operation = "t/purge/1"
        context.tables = self.tables
        return context

    def plan(self) -> Purging:
        planned = self.behavior.partitions(self.table, self.argument, self.context())
        assert planned.removes_table is not self.argument.dry_run
        self.partitions = [PartitionPlan.from_json(json.loads(json.dumps(one.to_json()))) for one in planned.partitions]
        return self

    def run_jobs(self) -> Purging:
        self.outcomes = run_jobs(self.behavior, self.argument, self.partitions, self.context())
        return self

    def complete(self) -> tuple[PurgeReport, str]:
        ran = complete(
            self.behavior, self.argument, self.table, self.outcomes, self.partitions, self.context(), version=""
        )
        return PurgeReport.model_validate(ran.report), ran.message


def purge(table: TableRecord, work: Path, **arg: Any) -> PurgeReport:
    report, message = Purging(table, work, **arg).plan().run_jobs().complete()
    assert not message
    return report


def files(found: dict[str, Any]) -> int:
    return sum(one.files for one in found.values())


def left(folder: Path) -> set[str]:
    return {path for path in on_disk(folder) if "/_distop/stage" not in path}


@pytest.mark.parametrize("make", MAKE)
def test_all_files_that_the_table_reaches_are_deleted_and_no_other(tmp_path: Path, make: str) -> None:
    table = MAKE[make](tmp_path / "t")
    MAKE[make](tmp_path / "t2")
    (tmp_path / "t" / "_distop" / "index" / "i" / "data").mkdir(parents=True)
    (tmp_path / "t" / "_distop" / "index" / "i" / "data" / "x.parquet").write_bytes(b"index")
    (tmp_path / "t" / "_orphan").write_bytes(b"not of the table")
    (tmp_path / "work" / "certificates" / "t").mkdir(parents=True)
    (tmp_path / "work" / "certificates" / "t" / "v1.json").write_bytes(b"{}")
    (tmp_path / "work" / "certificates" / "t2").mkdir(parents=True)
    (tmp_path / "work" / "certificates" / "t2" / "v1.json").write_bytes(b"{}")
    before = on_disk(tmp_path / "t")
    others = {path: data for path, data in snapshot(tmp_path).items() if "/t/" not in path}
    report = purge(table, tmp_path / "work")
    assert on_disk(tmp_path / "t") == {str(tmp_path / "t" / "_orphan")}
    assert {path: data for path, data in snapshot(tmp_path).items() if "/t/" not in path} == others
    assert files(report.deleted) == files(report.planned) == len(before) - 1
    assert (report.deleted, report.deleted_digest) == (report.planned, report.digest)
    assert (report.left.files, report.missing, report.certificates, report.complete) == (1, 0, 1, True)
    assert report.deleted["index"].files == 1
    assert report.place == str(tmp_path / "t")


def test_polaris_4891_delete_files_and_their_manifests_are_deleted(tmp_path: Path) -> None:
    """DROP TABLE PURGE left delete manifests and position deletes, because it read them as manifests of data."""
    with_vector(tmp_path / "t", 4, 40)
    (tmp_path / "t" / "data" / "dv.puffin").write_bytes(b"PFA1")
    report = purge(TableRecord("t", "iceberg", str(tmp_path / "t")), tmp_path / "work")
    assert (report.deleted["deletes"].files, report.deleted["manifest"].files) == (1, 2)
    assert {Path(path).name for path in on_disk(tmp_path / "t")} == {"v1.metadata.json"}, "no metadata file names it"


def test_roots_are_deleted_last(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    plan = Purging(table, tmp_path / "work").plan()
    kinds = [kind_of(one) for one in plan.partitions[1:]]
    assert list(dict.fromkeys(kinds)) == ["data", "statistics", "manifest", "manifest-list", "metadata"]
    paths = [path for one in plan.partitions for path, _, _ in one.files]
    assert sorted(paths) == sorted(on_disk(tmp_path / "t"))
    metadata = [Path(path).name for path in paths if path.endswith((".metadata.json", ".text"))]
    assert metadata[-2:] == ["version-hint.text", max(metadata[:-2] + metadata[-1:], key=_number)]
    assert len(plan.partitions[-1].files) == 1, "a page is not deleted in order"


def _number(name: str) -> int:
    return int(name.removeprefix("v").partition(".")[0]) if name.startswith("v") and name[1].isdigit() else -1


def test_polaris_269_a_purge_that_is_killed_anywhere_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of DROP TABLE PURGE were lost with the server, after it had deleted the metadata that named the files.

    Each page of deletions is interrupted in turn, before and after it; the next attempt continues.
    """
    remove = FolderStore.remove_listed
    folder = tmp_path / "t"
    table = iceberg(folder)
    shutil.copytree(folder, tmp_path / "copy")
    expected = on_disk(folder)
    for after in (False, True):
        for strike in range(6):
            shutil.copytree(tmp_path / "copy", folder, dirs_exist_ok=True)
            run = Purging(table, tmp_path / "work").plan()
            pages = 0

            def struck(self: FolderStore, objects: Any, *, strike: int = strike, after: bool = after) -> Removed:
                nonlocal pages
                pages += 1
                if pages - 1 == strike and not after:
                    raise KeyboardInterrupt
                found = remove(self, objects)
                if pages - 1 == strike:
                    raise KeyboardInterrupt
                return found

            monkeypatch.setattr(FolderStore, "remove_listed", struck)
            interrupted = 0
            for step in (run.run_jobs, run.complete):
                try:
                    done = step()
                except KeyboardInterrupt:
                    interrupted += 1
                    done = step()
            report, message = done  # type: ignore[misc]
            assert (message, report.complete, report.deleted_digest) == ("", True, report.digest)
            assert files(report.deleted) == len(expected)
            assert on_disk(folder) == set()
            assert interrupted == (strike < pages - 1)


def test_polaris_774_two_purges_at_once_delete_each_file_once_and_both_end(tmp_path: Path) -> None:
    """There was no guard that two instances did not run one task. Here both find the same files gone."""
    table = iceberg(tmp_path / "t")
    one, two = (Purging(table, tmp_path / "work").plan() for _ in range(2))
    one.run_jobs()
    two.run_jobs()
    for run in (one, two):
        report, message = run.complete()
        assert (message, report.complete, report.deleted_digest) == ("", True, report.digest)
    assert on_disk(tmp_path / "t") == set()


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    before = snapshot(tmp_path / "t")
    report = purge(table, tmp_path / "work", dry_run=True)
    assert snapshot(tmp_path / "t") == before
    assert (report.dry_run, report.complete, report.deleted, report.deleted_digest) == (True, False, {}, NOTHING)
    assert files(report.planned) == len(before)


def test_an_operation_removes_the_registration_with_its_plan(tmp_path: Path) -> None:
    table, keys = iceberg(tmp_path / "t"), Keys()
    dry = testing.run_operation(Purge, {"dry_run": True}, table=table)
    assert dry.state == "success"
    assert dry.store.get(keys.table("t")) is not None
    run = testing.run_operation(Purge, {}, table=table)
    assert (run.state, run.report["complete"]) == ("success", True)
    assert run.store.get(keys.table("t")) is None
    assert on_disk(tmp_path / "t") == set()


def refusal(run: Purging) -> str:
    before = snapshot(Path(run.table.location))
    with pytest.raises(InvalidArgument) as refused:
        run.plan()
    assert snapshot(Path(run.table.location)) == before
    return str(refused.value)


def test_a_table_under_another_name_too_or_around_another_one_is_refused(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    for other, why in (
        (TableRecord("u", "iceberg", str(tmp_path / "t")), "is equal to"),
        (TableRecord("u", "parquet", str(tmp_path / "t" / "below")), "is inside"),
        (TableRecord("u", "parquet", str(tmp_path)), "is around"),
    ):
        Path(other.location).mkdir(exist_ok=True)
        assert why in refusal(Purging(table, tmp_path / "work", [table, other]))


def test_a_table_inside_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    delta(tmp_path / "t" / "k=a" / "inner")
    assert "inside the table's folder" in refusal(Purging(table, tmp_path / "work"))


def test_gc_enabled_false_is_refused(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t", **{"gc.enabled": "false"})
    assert "gc.enabled is false" in refusal(Purging(table, tmp_path / "work"))


def test_a_link_in_the_folder_is_refused(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"x")
    (tmp_path / "t" / "link").symlink_to(tmp_path / "elsewhere")
    assert "link" in refusal(Purging(table, tmp_path / "work"))
    assert (tmp_path / "elsewhere" / "x").exists()


def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    table = LoggedFolder(tmp_path / "t").new(SCHEMA, BY_K)
    table.append(rows("a"))
    outside = tmp_path / "outside.parquet"
    pq.write_table(pa.table({"id": pa.array([1], pa.int32()), "k": ["a"]}), outside)
    data = next((tmp_path / "t").rglob("*.parquet"))
    outside.write_bytes(data.read_bytes())
    table.add_files([str(outside)])
    why = refusal(Purging(TableRecord("t", "iceberg", str(tmp_path / "t")), tmp_path / "work"))
    assert "outside" in why
    assert outside.exists()


def test_a_plan_deletes_no_file_outside_of_the_table(tmp_path: Path) -> None:
    """A plan is below the operation's root, where submitters write."""
    run = Purging(iceberg(tmp_path / "t"), tmp_path / "work").plan()
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    for path in (
        str(secret),
        f"{tmp_path}/t/../secret",
        f"{tmp_path}/t/_distop/index/../../../secret",
        f"{tmp_path}/t/_distop/stage/x",
        f"{tmp_path}/t/_distop/index/%2e%2e/%2e%2e/x",
    ):
        forged = PartitionPlan(1, "data-000001", files=((path, 1, secret.stat().st_mtime_ns),))
        with pytest.raises(InvalidArgument):
            run.behavior.start_or_resume_job(run.argument, forged, run.context())
    assert secret.exists()


def test_missing_files_are_counted_and_denied_ones_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = iceberg(tmp_path / "t")
    gone, kept, *_ = sorted((tmp_path / "t" / "data").rglob("*.parquet"))
    gone.unlink()
    run = Purging(table, tmp_path / "work").plan()
    unlink = os.unlink

    def denied(path: Any, *more: Any, **others: Any) -> None:
        if Path(path).name == kept.name:
            raise PermissionError(13, "Permission denied", path)
        unlink(path, *more, **others)

    with monkeypatch.context() as patched:
        patched.setattr("distop.storage.folder_store.os.unlink", denied)
        run.run_jobs()
    report, _ = run.complete()
    assert (report.missing, report.failed_files, report.complete) == (1, 1, False)
    assert report.failed[0].file == str(kept)
    assert "denied" in report.failed[0].why.lower()
    assert report.deleted_digest != report.digest
    assert (tmp_path / "t" / "metadata").exists()
    assert {path for path in left(tmp_path / "t") if "/metadata/" not in path} == {str(kept)}
    again = purge(table, tmp_path / "work")
    assert again.complete
    assert again.missing == report.deleted["data"].files + 1


def test_a_certificate_that_cannot_be_deleted_fails_the_purge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = iceberg(tmp_path / "t")
    certificates = tmp_path / "work" / "certificates" / "t"
    certificates.mkdir(parents=True)
    for name in ("kept.json", "gone.json"):
        (certificates / name).write_bytes(b"{}")
    unlink = os.unlink

    def denied(path: Any, *more: Any, **others: Any) -> None:
        if Path(path).name == "kept.json":
            raise PermissionError(13, "Permission denied", path)
        unlink(path, *more, **others)

    run = Purging(table, tmp_path / "work").plan().run_jobs()
    with monkeypatch.context() as patched:
        patched.setattr("distop.storage.folder_store.os.unlink", denied)
        report, message = run.complete()
    assert "register the table and start the purge again" in message
    assert (report.complete, report.certificates, report.failed_files) == (False, 1, 1)
    assert report.failed[0].file == str(certificates / "kept.json")
    assert "denied" in report.failed[0].why.lower()
    assert (tmp_path / "t" / "metadata").exists(), "a new purge needs the metadata"
    again = purge(table, tmp_path / "work")
    assert (again.complete, again.certificates) == (True, 1)
    assert not list(certificates.iterdir())


def test_a_purge_goes_on_where_metadata_are_missing_only_if_that_is_accepted(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    run = Purging(table, tmp_path / "work").plan()
    for one in run.partitions:
        for path, _, _ in one.files if kind_of(one) == MANIFEST else ():
            Path(path).unlink()
    assert "incomplete" in refusal(Purging(table, tmp_path / "work"))
    report = purge(table, tmp_path / "work", incomplete="accept")
    assert report.complete
    assert not [path for path in left(tmp_path / "t") if "/metadata/" in path]


def test_all_versions_are_read_although_a_file_of_one_is_missing(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    planned = {path for one in Purging(table, tmp_path / "work").plan().partitions for path, _, _ in one.files}
    newest = max((tmp_path / "t" / "metadata").glob("v*.json"), key=lambda path: _number(path.name))
    first = json.loads(newest.read_text())["snapshots"][0]["manifest-list"]  # later snapshots have its files, too
    Path(first).unlink()
    run = Purging(table, tmp_path / "work", incomplete="accept").plan()
    assert planned - {path for one in run.partitions for path, _, _ in one.files} == {first}


@pytest.mark.parametrize(
    "make",
    ["iceberg", *(pytest.param(one, marks=pytest.mark.rotating) for one in ("delta", "delta with a checkpoint"))],
)
def test_polaris_774_a_new_purge_ends_one_whose_record_is_lost(
    tmp_path: Path, make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before each file in turn, the table can be registered and purged again without further arguments."""
    table = MAKE[make.split()[0]](tmp_path / "copy")
    if "checkpoint" in make:
        deltalake.DeltaTable(tmp_path / "copy").create_checkpoint()
        write_deltalake(tmp_path / "copy", pa.table({"k": ["a"], "v": [1]}), mode="append", partition_by=["k"])
        write_deltalake(tmp_path / "copy", pa.table({"k": ["a"], "v": [2]}), mode="append", partition_by=["k"])
    elif make == "delta":
        for one in (*(tmp_path / "copy").rglob("*.checkpoint.parquet"), *(tmp_path / "copy").rglob("_last_checkpoint")):
            one.unlink()
    folder = tmp_path / "t"
    if make == "iceberg":
        table = iceberg(folder)
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(folder, tmp_path / "copy")
        shutil.rmtree(folder)
    table = TableRecord("t", table.format, str(folder))
    unlink, count = os.unlink, len(on_disk(tmp_path / "copy"))
    for strike in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "copy", folder)
        run = Purging(table, tmp_path / "work").plan()
        names = {Path(path).name for one in run.partitions for path, _, _ in one.files}
        done = 0

        def struck(path: Any, *more: Any, strike: int = strike, names: set[str] = names, **others: Any) -> None:
            nonlocal done
            if Path(path).name in names:
                if done == strike:
                    raise KeyboardInterrupt
                done += 1
            unlink(path, *more, **others)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("distop.storage.folder_store.os.unlink", struck)
            run.run_jobs()
            run.complete()
        assert len(left(folder)) == count - strike
        again = folder
        if table.format == "delta":  # no snapshot of this folder is cached
            again = folder.rename(tmp_path / f"again{strike}")
        record = TableRecord("t", table.format, str(again))
        report = purge(check_table(record), tmp_path / "work")
        assert report.complete
        assert files(report.deleted) == count - strike
        assert left(again) == set()


@pytest.mark.parametrize("make", MAKE)
def test_the_grace_ends_before_the_first_deletion(tmp_path: Path, make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Purging(MAKE[make](tmp_path / "t"), tmp_path / "work", grace="1h").plan()
    before = on_disk(tmp_path / "t")
    started = float(run.partitions[0].values["time"])
    clock = iter([started + 1, started + 3_599])
    waits: list[set[str]] = []
    monkeypatch.setattr(FolderStore, "time", lambda self, folder: next(clock, started + 3_600))
    monkeypatch.setattr(purge_deletion, "wait_until", lambda until, ctx: waits.append(on_disk(tmp_path / "t")))
    report, message = run.run_jobs().complete()
    assert (message, report.complete) == ("", True)
    assert waits == [before, before]


def test_a_file_that_stays_is_not_new_although_its_time_is_later_than_the_plan(tmp_path: Path) -> None:
    """The clock of an object store may tell only seconds, and a copied file has any time."""
    table = iceberg(tmp_path / "t")
    (tmp_path / "t" / "orphan").write_bytes(b"not of the table")
    os.utime(tmp_path / "t" / "orphan", (4e9, 4e9))
    run = Purging(table, tmp_path / "work").plan().run_jobs()
    report, message = run.complete()
    assert (message, report.complete, report.added) == ("", True, 0)
    assert on_disk(tmp_path / "t") == {str(tmp_path / "t" / "orphan")}


def test_a_file_that_stays_and_was_replaced_since_the_plan_is_new(tmp_path: Path) -> None:
    run = Purging(iceberg(tmp_path / "t"), tmp_path / "work")
    (tmp_path / "t" / "orphan").write_bytes(b"not of the table")
    os.utime(tmp_path / "t" / "orphan", (4e9, 4e9))
    run.plan().run_jobs()
    (tmp_path / "t" / "orphan").write_bytes(b"maybe of the table")
    os.utime(tmp_path / "t" / "orphan", (5e9, 5e9))
    report, message = run.complete()
    assert "came after the plan" in message
    assert (report.complete, report.added) == (False, 1)


def test_a_table_without_a_version_hint_lacks_nothing(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    (tmp_path / "t" / "metadata" / "version-hint.text").unlink()
    report = purge(table, tmp_path / "work")
    assert (report.complete, report.missing) == (True, 0)


def test_writers_during_the_planning_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = iceberg(tmp_path / "t")
    monkeypatch.setattr(purge_plan, "MOST_LATE", 2)
    for n in range(3):
        (tmp_path / "t" / f"new{n}").write_bytes(b"x")
        os.utime(tmp_path / "t" / f"new{n}", (4e9, 4e9))
    assert "stop its writers" in refusal(Purging(table, tmp_path / "work"))


def test_a_file_that_a_writer_adds_after_the_plan_keeps_the_metadata(tmp_path: Path) -> None:
    folder = LoggedFolder(tmp_path / "t")
    writer = folder.new(SCHEMA, BY_K)
    writer.append(rows("a"))
    table = TableRecord("t", "iceberg", str(tmp_path / "t"))
    run = Purging(table, tmp_path / "work").plan()
    writer.append(rows("b"))
    report, message = run.run_jobs().complete()
    assert "came after the plan" in message
    assert (report.complete, report.added > 0) == (False, True)
    assert purge(table, tmp_path / "work").complete
    assert on_disk(tmp_path / "t") == set()


def test_a_cancelled_or_failed_operation_keeps_the_metadata_and_reports(tmp_path: Path) -> None:
    table = iceberg(tmp_path / "t")
    run = Purging(table, tmp_path / "work").plan().run_jobs()
    run.outcomes[1] = OutcomeRow(1, run.outcomes[1].name, False, None, "lost")
    report, message = run.complete()
    assert (message, report.complete, report.deleted) == ("", False, {})
    assert [path for path in left(tmp_path / "t") if path.endswith(".metadata.json")]


def test_the_digest_does_not_depend_on_order_or_parts() -> None:
    some = [("a", 1), ("b/c", 2), ("d", 3)]
    assert digest_of(some) == digest_of(reversed(some)) == added_up([digest_of(some[:1]), "", digest_of(some[1:])])
    assert digest_of(some) != digest_of([("a", 1), ("b/c", 2), ("d", 4)])
    assert digest_of([]) == added_up([]) == NOTHING


def test_the_grace_is_limited_and_the_alias_is_the_same_type() -> None:
    assert Purge.Arg.model_validate({"grace": "1d"}).grace == 86_400
    with pytest.raises(ValidationError):
        Purge.Arg.model_validate({"grace": "2d"})
    alias, own = DropTablePurgeJob.declaration(), Purge.declaration()
    assert (alias.arg_schema, alias.removes_table) == (own.arg_schema, True)
    assert own.conflicts_with == alias.conflicts_with == ("*",)


def test_large_pages_are_deleted_in_parts_and_their_results_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, parts = parquet(tmp_path / "t"), list[list[str]]()
    for n in range(300):
        (tmp_path / "t" / f"k={n // 30}").mkdir(exist_ok=True)
        (tmp_path / "t" / f"k={n // 30}" / f"{n}.parquet").write_bytes(b"x")
    run = Purging(table, tmp_path / "work").plan()
    gone, replaced = tmp_path / "t" / "k=3" / "99.parquet", tmp_path / "t" / "k=9" / "299.parquet"
    gone.unlink()
    replaced.write_bytes(b"other content")
    remove = FolderStore.remove_listed

    def noted(self: FolderStore, objects: Any) -> Removed:
        parts.append([one.key for one in objects])
        return remove(self, objects)

    monkeypatch.setattr(FolderStore, "remove_listed", noted)
    report, _ = run.run_jobs().complete()
    assert (files(report.deleted), report.changed, report.failed_files, report.complete) == (301, 1, 1, False)
    assert on_disk(tmp_path / "t") == {str(replaced)}
    assert sum(map(len, parts)) == 302
    assert 1 < len(parts) <= 4
    folders = [{key.partition("/")[0] for key in part} for part in parts]
    assert sum(map(len, folders)) == len(set().union(*folders)), "no two parts wait for the lock of one folder"
