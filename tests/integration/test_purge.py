"""``purge`` on real daemons: the registration goes with the plan, and the rest goes on without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
