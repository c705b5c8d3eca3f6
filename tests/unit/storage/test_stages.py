"""The stage of an attempt is created by that attempt, in folders that no other user may change."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distop.behavior import PartitionPlan
from distop.errors import UnsafePath
from distop.protocol.records import TableRecord
from distop.storage import places
from distop.storage.deletion import Place
from distop.storage.opened_stores import memory_store, store_of
from distop.storage.places import Attempt, shared_of, stage_of
from distop.tables import reader_of
from distop.testing import MemoryProgress
from distop.worker.child_side.job_context import ChildContext, JobScope
from distop_behaviors.apply import file_rewrite
from distop_behaviors.apply.apply_report import CertifiedArgument
from distop_behaviors.apply.staged_files import StageFolders
from distop_behaviors.index.index_argument import BuildArgument
from distop_behaviors.index.segments import SegmentWriter
from distop_behaviors.validate.certificate import Certificate, Certified

OP, STRANGER = "t/build-index/i/1", 4711
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")


def context(table: Path, shared: str = "", again: bool = False, number: int = 1) -> ChildContext:
    env: Any = SimpleNamespace(shared_dir=shared, space="c0ffee", log=logging.getLogger("tests.stages"))
    record = TableRecord("t", "parquet", str(table), {})
    plan = PartitionPlan(0, "p")
    made = ChildContext(env, JobScope(OP, record, run=number, partition=plan, fence=7, incarnation="inc"))
    made.again = again
    return made


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "t"
    folder.mkdir(mode=0o755)
    return folder


def test_a_stage_is_created_once_and_private(table: Path) -> None:
    ctx = context(table)
    stage = Path(ctx.stage)
    assert (stage.stat().st_mode & 0o777, stage.parent.stat().st_mode & 0o022) == (0o700, 0)
    (stage / "rows").touch()
    assert ctx.stage == str(stage)
    assert [path.name for path in stage.iterdir()] == ["rows"]


@pytest.mark.parametrize("plant", ["folder", "file", "link"])
def test_hole_3_a_stage_that_exists_before_its_attempt_is_an_error(table: Path, plant: str) -> None:
    ctx = context(table)
    planted = Path(ctx.stage_place.location)
    planted.parent.mkdir(parents=True)
    if plant == "folder":
        planted.mkdir()
    elif plant == "file":
        planted.touch()
    else:
        planted.symlink_to(table)
    for _ in range(2):
        with pytest.raises(FileExistsError, match="exists already, but only its attempt"):
            _ = ctx.stage


def test_hole_3_a_prefix_with_objects_before_its_attempt_is_an_error(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = memory_store()
    monkeypatch.setattr(places, "store_of", lambda place: store)
    ctx = context(table, shared="s3://bucket")
    store.put_new("journal.jsonl", b"")
    with pytest.raises(FileExistsError, match="exists already, but only its attempt"):
        _ = ctx.stage
    store.delete_many(["journal.jsonl"])
    assert ctx.stage == ctx.stage_place.location


@pytest.mark.parametrize(("again", "number"), [(True, 1), (False, 0)])
def test_a_stage_is_found_again_by_its_attempt_and_its_cleanup(table: Path, again: bool, number: int) -> None:
    """In another process, after the child was replaced, or on another node that cleans up."""
    stage = Path(context(table).stage)
    (stage / "rows").touch()
    assert context(table, again=again, number=number).stage == str(stage)
    assert (stage / "rows").exists()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("where", ["", "_distop", "_distop/c0ffee", "_distop/c0ffee/stage"])
@needs_root
def test_hole_3_no_stage_where_another_user_owns_a_folder(table: Path, where: str, again: bool) -> None:
    (table / where).mkdir(parents=True, exist_ok=True)
    os.chown(table / where, STRANGER, STRANGER)
    with pytest.raises(UnsafePath, match=f"{table / where}, which belongs to the user {STRANGER}.*--shared-dir"):
        _ = context(table, again=again).stage


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("where", ["", "_distop", "_distop/c0ffee"])
def test_hole_3_no_stage_where_others_may_write(table: Path, where: str, mode: int) -> None:
    (table / where).mkdir(parents=True, exist_ok=True)
    (table / where).chmod(mode)
    if mode == 0o1777 and not where:  # its entries belong to their creators
        assert Path(context(table).stage).is_dir()
        return
    with pytest.raises(UnsafePath, match=f"{table / where}, which is writable .*--shared-dir"):
        _ = context(table).stage


@pytest.mark.parametrize("shared", ["", "shared"])
def test_hole_3_no_stage_where_others_may_replace_the_uppermost_folder(table: Path, shared: str) -> None:
    above = table.parent
    above.chmod(0o757)
    with pytest.raises(UnsafePath, match=f"nothing is staged below {above}, which is writable"):
        _ = context(table, shared=str(above / shared) if shared else "").stage
    above.chmod(0o1777)
    assert Path(context(table, shared=str(above / shared) if shared else "").stage).is_dir()


def test_hole_3_a_shared_directory_that_others_may_write_is_refused(table: Path, tmp_path: Path) -> None:
    table.chmod(0o777)
    shared = tmp_path / "shared"
    assert context(table, shared=str(shared)).stage.startswith(f"{shared}/")
    shared.chmod(0o770)
    with pytest.raises(UnsafePath, match=f"{shared}, which is writable"):
        _ = context(table, shared=str(shared)).stage


def test_hole_3_folders_are_writable_by_their_owner_only_for_any_umask(table: Path) -> None:
    former = os.umask(0)
    try:
        ctx = context(table)
        assert Path(ctx.stage).is_dir()
        store_of(ctx.stage_place).put_new("a/b", b"")
        store_of(ctx.stage_place).put_large("a/c", [b""])
    finally:
        os.umask(former)
    assert [path for path in (table / "_distop").rglob("*") if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("plant", ["a file", "a link"])
def test_hole_3_a_new_file_replaces_no_file_and_follows_no_link(tmp_path: Path, plant: str) -> None:
    victim, planted = tmp_path / "victim", tmp_path / "new"
    victim.write_text("precious")
    if plant == "a file":
        planted.hardlink_to(victim)
    else:
        planted.symlink_to(victim)
    with pytest.raises(FileExistsError):
        store_of(Place(str(tmp_path))).put_new("new", b"")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["journal/000000.json", "000000.parquet"])
def test_hole_3_a_link_in_a_stage_is_not_written_through(tmp_path: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "a.parquet")
    found = (tmp_path / "a.parquet").stat()
    victim, stage = tmp_path / "victim", tmp_path / "stage"
    victim.write_text("precious")
    (stage / name).parent.mkdir(parents=True)
    (stage / name).symlink_to(victim)
    files = [(str(tmp_path / "a.parquet"), found.st_size, found.st_mtime_ns)]
    reader = reader_of(TableRecord("t", "parquet", str(tmp_path)), [PartitionPlan(0, "all", files=tuple(files))])
    result = SegmentWriter(BuildArgument(name="i", columns=["a"]), files, Place(str(stage)), reader).run(
        MemoryProgress()
    )
    assert (result.files, result.rows) == (1, 2)
    assert victim.read_text() == "precious"
    assert not (stage / name).is_symlink()


@pytest.mark.parametrize("where", ["data", "place"])
def test_hole_3_narrowing_writes_into_no_folder_that_it_has_not_created(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iceberg would continue from metadata that it finds there."""
    from distop_behaviors.apply import rewrite_publication

    table = tmp_path / "t"
    shared = shared_of("", "c0ffee", TableRecord("t", "iceberg", str(table), {}))
    assert shared is not None
    table.mkdir()
    written: list[str] = []
    ctx: Any = context(table)
    stage = StageFolders.of(stage_of(shared, Attempt(OP, 0, 7, "inc")), shared, "c0ffee", str(table))
    planted = Path(stage.data.location if where == "data" else stage.place.location)
    planted.mkdir(parents=True)
    raw = {
        "format-version": 2,
        "location": str(table),
        "current-schema-id": 0,
        "schemas": [{"schema-id": 0, "fields": []}],
    }
    monkeypatch.setattr(file_rewrite, "session_of", lambda _: SimpleNamespace(_jvm=None))
    monkeypatch.setattr(file_rewrite.iceberg_jar, "check_installed", lambda _: None)
    monkeypatch.setattr(file_rewrite, "raw_metadata", lambda *_: raw)
    monkeypatch.setattr(file_rewrite, "new_schema", lambda *_: {})
    monkeypatch.setattr(file_rewrite, "staging_metadata", lambda *_: {})
    monkeypatch.setattr(file_rewrite, "_write", lambda *_: written.append("rows"))
    monkeypatch.setattr(file_rewrite, "check_opened", lambda *_: None)
    monkeypatch.setattr(rewrite_publication, "check_table", lambda *_: None)
    nothing = SimpleNamespace(current_snapshot=lambda: None)
    monkeypatch.setattr(rewrite_publication, "read_metadata", lambda _: (nothing, None))
    monkeypatch.setattr(rewrite_publication, "new_files", lambda *_: [])
    monkeypatch.setattr(rewrite_publication.type_narrowing, "new_ids", lambda *_: {})
    monkeypatch.setattr(ChildContext, "spark", None)
    monkeypatch.setattr(ctx, "status", lambda _: None)
    certificate = Certificate.issue(
        table="t", format="iceberg", location=str(table), operation="t/validate/1", time="now", version="1",
        checks=[Certified(name="k", check={"not_null": "k"})],
    )  # fmt: skip
    record, target = TableRecord("t", "iceberg", str(table)), cast("Any", None)
    rewrite = rewrite_publication.Narrowing(CertifiedArgument(certificate, 10.0), record, target, ctx)
    with pytest.raises(FileExistsError, match="exists already, but only its attempt"):
        rewrite.stage(PartitionPlan(0, "p", files=(("/t/a.parquet", 1, 1),), source="/t/m.json"))
    assert written == []
