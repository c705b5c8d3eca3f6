"""``purge`` on real daemons: the registration goes with the plan, and the rest goes on without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from distop.errors import Incompatible, NotFound
from distop.protocol.records import TableRecord
from tests.support.contract import dump

if TYPE_CHECKING:
    from tests.support.daemons import Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.rotating]

FILES = 400
LIMIT = 60


@pytest.fixture
def table(group: Daemons, tmp_path: Path) -> TableRecord:
    """A registered folder of Parquet files."""
    record = TableRecord("lake", "parquet", str(tmp_path / "lake"))
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table({"v": [1]}), tmp_path / "lake" / "0000.parquet")
    for n in range(1, FILES):
        (tmp_path / "lake" / f"{n:04}.parquet").hardlink_to(tmp_path / "lake" / "0000.parquet")
    group.client.remove_table("t")  # its folder is that of all files of the test
    group.client.add_table(record)
    return record


def count(table: TableRecord) -> int:
    return len(list(Path(table.location).glob("*.parquet")))


def test_polaris_269_the_purge_of_a_killed_executor_ends(group: Daemons, table: TableRecord) -> None:
    """Its registration is gone, so its jobs use the record that its plan removed."""
    (killed,) = group.start("a")
    op = group.client.start_operation("purge", "lake", {"max_per_second": 100})
    group.eventually(lambda: count(table) < FILES, "some files deleted", "a")
    killed.kill()
    assert count(table) > 0
    assert "lake" not in {one.name for one in group.client.tables()}
    with pytest.raises(NotFound):
        group.client.start_operation("noop", "lake")
    group.start("b")
    report = op.wait(LIMIT).raise_for_state().report
    assert (report["deleted"]["data"]["files"], report["complete"]) == (FILES, True)
    assert report["deleted_digest"] == report["digest"]
    assert count(table) == 0
    group.eventually(lambda: not dump(group.endpoint, "distOpRemovedTable."), "the copy of the record is gone", "b")
    (removed,) = [one for one in group.client.actions() if one["action"] == "remove_table" and one["name"] == "lake"]
    assert removed["by"] == op.ref


COMMITS = 250


@pytest.fixture
def log(group: Daemons, tmp_path: Path) -> Path:
    """The log of a registered Delta table of one file, with as many commits as take a while to delete."""
    folder = tmp_path / "lake"
    write_deltalake(folder, pa.table({"v": [1]}))
    log = folder / "_delta_log"
    for n in range(1, COMMITS):
        (log / f"{n:020}.json").write_text('{"commitInfo":{}}\n')
    group.client.remove_table("t")
    group.client.add_table(TableRecord("lake", "delta", str(folder)))
    return log


@pytest.mark.parametrize("point", ["after the plan", "in the completion"])
def test_polaris_774_a_purge_that_is_killed_at_a_commit_point_ends(group: Daemons, log: Path, point: str) -> None:
    """Its registration is gone with the plan; its metadata are the last files."""
    (killed,) = group.start("a")
    argument = {"grace": 5, "max_per_second": 100} if point == "after the plan" else {"max_per_second": 100}
    op = group.client.start_operation("purge", "lake", argument)
    if point == "after the plan":
        group.eventually(lambda: not group.client.tables(), "its registration is gone", "a")
        assert list(log.parent.glob("*.parquet"))
    else:
        group.eventually(lambda: len(list(log.iterdir())) < COMMITS, "some commits deleted", "a")
        assert not list(log.parent.glob("*.parquet")), "leaves go first"
    killed.kill()
    assert list(log.iterdir())
    group.start("b")
    report = op.wait(LIMIT).raise_for_state().report
    assert (report["deleted"]["log"]["files"], report["complete"]) == (COMMITS, True)
    assert report["deleted_digest"] == report["digest"]
    assert not list(log.iterdir())


def test_two_executors_on_one_job_delete_each_file_once_and_nothing_else(
    group: Daemons, table: TableRecord, tmp_path: Path
) -> None:
    """The first one is suspended, like a machine that sleeps, and continues when another one has taken its job over."""
    (tmp_path / "beside").write_bytes(b"not of the table")
    (tmp_path / "lake" / "_beside").write_bytes(b"not of the table")
    (first,) = group.start("a")
    op = group.client.start_operation("purge", "lake", {"max_per_second": 100})
    group.eventually(lambda: count(table) < FILES, "some files deleted", "a")
    first.suspend()
    group.start("b")
    group.eventually(lambda: count(table) == 0, "the other one has deleted the rest", "b")
    first.wake()
    report = op.wait(LIMIT).raise_for_state().report
    assert (report["deleted"]["data"]["files"], report["complete"]) == (FILES, True)
    assert report["deleted_digest"] == report["digest"]
    assert (tmp_path / "beside").read_bytes() == (tmp_path / "lake" / "_beside").read_bytes() == b"not of the table"


def test_a_cancelled_purge_is_started_again_after_a_registration(group: Daemons, table: TableRecord) -> None:
    group.start("a")
    op = group.client.start_operation("Drop_Table_Purge_Job", "lake", {"max_per_second": 50})
    group.eventually(lambda: count(table) < FILES, "some files deleted", "a")
    op.cancel()
    ended = op.wait(LIMIT)
    assert ended.state == "cancelled"
    left = count(table)
    assert 0 < left < FILES
    group.client.add_table(table)
    dry = group.client.start_operation("purge", "lake", {"dry_run": True}).wait(LIMIT).raise_for_state()
    assert dry.report["planned"]["data"]["files"] == left
    assert "lake" in {one.name for one in group.client.tables()}
    report = group.client.start_operation("purge", "lake").wait(LIMIT).raise_for_state().report
    assert (report["deleted"]["data"]["files"], report["complete"]) == (left, True)


def test_a_table_that_was_registered_again_since_the_start_stays(group: Daemons, table: TableRecord) -> None:
    (first,) = group.start("a")
    first.kill()
    op = group.client.start_operation("purge", "lake")
    group.client.add_table(TableRecord("lake", "parquet", table.location, {"group_files": 7}), replace=True)
    group.client.add_table(table, replace=True)
    group.start("b")
    ended = op.wait(LIMIT)
    assert ended.state == "failed"
    assert "changed or removed since" in str(ended.record)
    assert count(table) == FILES
    assert "lake" in {one.name for one in group.client.tables()}


def test_nothing_else_runs_beside_it(group: Daemons, table: TableRecord) -> None:
    group.start("a")
    op = group.client.start_operation("purge", "lake", {"grace": 3600})
    group.eventually(lambda: "lake" not in {one.name for one in group.client.tables()}, "it is planned", "a")
    group.client.add_table(table)
    with pytest.raises(Incompatible, match="exclude each other"):
        group.client.start_operation("noop", "lake")
    assert count(table) == FILES
    op.cancel()
    assert op.wait(LIMIT).state == "cancelled"
    assert count(table) == FILES
    assert group.client.start_operation("noop", "lake").wait(LIMIT).state == "success"
