"""Staged output that nothing names is removed, and no file of a table."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.errors import JobCancelled, TableUnavailable
from distop.protocol.records import TableRecord
from distop.storage.deletion import Place
from distop.storage.opened_stores import store_of
from distop.storage.places import Attempt, completion_stage, make_stage, make_table_data, stage_of, table_data
from distop.tables.reachability import DATA, TableFile
from distop.worker.child_side.stage_sweeping import StageSweeper, Swept

if TYPE_CHECKING:
    from collections.abc import Iterable

OP = "t/copy/3"
SPACE = "c0ffee"


class Layout:
    """Stages of operations on a table on a disk. Versions of the table name the files ``live``."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared = Place(str(home / "shared"), SPACE)
        self.table = TableRecord("t", "parquet", str(home / "t"))
        self.live: list[str] | None = []
        """None: the table cannot be read."""
        self.read = 0
        self.stopped = False
        (home / "t").mkdir()
        monkeypatch.setattr("distop.tables.reachability_of", lambda *_: self)

    def all_files(self, *, removed: bool) -> Iterable[TableFile]:
        assert removed, "also files of former versions count"
        self.read += 1
        if self.live is None:
            raise TableUnavailable("a manifest is missing")
        return [TableFile(path, DATA) for path in self.live]

    def check(self) -> None:
        if self.stopped:
            raise JobCancelled("stop")

    def sweeper(self, op: str = OP, table: TableRecord | None = None) -> StageSweeper:
        spark: Any = None
        return StageSweeper(
            op, self.shared, SPACE, table or self.table, check=self.check, spark=spark, log=logging.getLogger("tests")
        )

    def stage(self, partition: int, fence: int, op: str = OP, *, data: bool = False) -> Place:
        """A stage with three bytes, and with ``data`` four bytes in the table."""
        return self.filled(stage_of(self.shared, Attempt(op, partition, fence, "inc")), data=data)

    def filled(self, place: Place, *, data: bool) -> Place:
        make_stage(place)
        store_of(place).put_new("a/b.txt", b"abc")
        if data:
            make_table_data(place, self.data(place))
            store_of(self.data(place)).put_new("x.parquet", b"abcd")
        return place

    def data(self, place: Place) -> Place:
        return table_data(place, self.shared, SPACE, self.table.location)


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    return Layout(tmp_path, monkeypatch)


def exists(*places: Place) -> list[bool]:
    return [Path(place.location).exists() for place in places]


def test_F35_stages_of_dead_attempts_are_removed_with_their_files_in_the_table(layout: Layout) -> None:
    named = [layout.stage(0, 7, data=True), layout.stage(1, 9)]
    dead = [layout.stage(0, 5, data=True), layout.stage(0, 8), layout.stage(2, 6)]
    other = [layout.stage(0, 1, "t/copy/2"), layout.stage(0, 1, "t/copy/30"), layout.stage(0, 1, "t/other/3")]
    swept = layout.sweeper().remove_unnamed({0: (7, "inc"), 1: (9, "inc")})
    assert swept == Swept(3, 3 * 3 + 4)
    assert exists(*dead, layout.data(dead[0])) == [False] * 4
    assert exists(*named, layout.data(named[0]), *other) == [True] * 6
    assert layout.sweeper().remove_unnamed({0: (7, "inc"), 1: (9, "inc")}) == Swept()


def test_a_dead_attempt_that_has_committed_its_files_leaves_them_to_the_table(layout: Layout) -> None:
    """A job may commit to the table before its outcome is written, and then die."""
    dead = layout.stage(0, 5, data=True)
    layout.live = [f"{layout.data(dead).location}/x.parquet"]
    assert layout.sweeper().remove_unnamed({0: (7, "inc")}) == Swept(1, 3)
    assert exists(dead, layout.data(dead)) == [False, True]


def test_stages_of_an_ended_operation_are_removed_except_files_of_the_table(layout: Layout) -> None:
    published, unpublished = layout.stage(0, 7, data=True), layout.stage(1, 7, data=True)
    completion = layout.filled(completion_stage(layout.shared, OP), data=True)
    assert isinstance(layout.live, list)
    layout.live.append(f"file:{layout.data(published).location}/x.parquet")
    swept = layout.sweeper().remove_all()
    assert swept == Swept(3, 3 * 3 + 2 * 4)
    assert exists(published, unpublished, completion) == [False] * 3
    assert exists(*map(layout.data, (published, unpublished, completion))) == [True, False, False]
    assert layout.read == 1
    assert layout.sweeper().remove_all() == Swept()


@pytest.mark.parametrize("spelled", ["{}", "s3a://bucket/{}", "file:/x/{}"])
def test_files_of_the_table_stay_however_its_metadata_spell_them(layout: Layout, spelled: str) -> None:
    op = "my table/copy/a%25b/3"
    stage = layout.stage(0, 7, op, data=True)
    data = layout.data(stage)
    path = f"{data.path}/x.parquet"
    layout.live = [spelled.format(path).replace("%", "%25") if "bucket" in spelled else spelled.format(path)]
    layout.sweeper(op).remove_all()
    assert exists(stage, data) == [False, True]


def test_files_stay_if_the_table_cannot_be_read(layout: Layout, caplog: pytest.LogCaptureFixture) -> None:
    stage, layout.live = layout.stage(0, 7, data=True), None
    assert layout.sweeper().remove_all() == Swept()
    assert "a manifest is missing" in caplog.text
    assert exists(stage, layout.data(stage)) == [True, True]
    layout.live = []
    assert layout.sweeper().remove_all() == Swept(1, 7)
    assert not list(Path(layout.table.location, "data/distop-staged").rglob("t"))


def test_F35_what_a_late_process_writes_is_removed_with_the_history_record(layout: Layout) -> None:
    stage = layout.stage(0, 7, data=True)
    layout.sweeper().remove_all()
    late, kept = layout.data(stage), layout.data(layout.stage(1, 7))
    for data in (late, kept):
        store_of(data).put_new("y.parquet", b"12345")
    assert isinstance(layout.live, list)
    layout.live.append(f"{kept.location}/y.parquet")
    assert layout.sweeper().remove_all(late=True) == Swept(2, 3 + 5)
    assert exists(late, kept) == [False, True]


def test_a_stage_with_odd_files_is_removed_through_no_link(layout: Layout, tmp_path: Path) -> None:
    stage = layout.stage(0, 7)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    Path(stage.location, "link").symlink_to(tmp_path / "other")
    Path(stage.location, ".distop-x.tmp").touch()
    layout.stage(0, 8)
    Path(layout.stage(0, 9).location, "a", "b.txt").unlink()
    assert layout.sweeper().remove_all().stages == 3
    assert (tmp_path / "other" / "file").exists()
    assert not list((tmp_path / "shared").rglob("t"))


def test_a_sweep_stops_when_it_must(layout: Layout) -> None:
    layout.stage(0, 7)
    layout.stopped = True
    with pytest.raises(JobCancelled):
        layout.sweeper().remove_all()


def test_an_operation_without_stages_costs_one_listing(layout: Layout) -> None:
    assert layout.sweeper().remove_all() == Swept()
    assert layout.sweeper().remove_all(late=True) == Swept()
    assert layout.read == 0
