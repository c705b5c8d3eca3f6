"""Links of other users are not followed: the owner of a table's folder cannot redirect it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.records import TableRecord
from distop.storage import deletion
from distop.storage.confinement import LOCATIONS, TableFiles, check_metadata
from distop.storage.deletion import Place, check_own, delete, names
from distop.storage.files import NotRegular, open_regular
from distop.storage.location import Location
from distop.storage.opened_stores import store_of
from distop.tables.parquet import parquet_format
from distop.tables.spark import spark_format
from distop.tables.spark.spark_catalog import CatalogPartition, Described
from tests.support.needs import need

if TYPE_CHECKING:
    from pathlib import Path

STRANGER = 4711
COLUMNS = [{"name": "who", "type": "string"}, {"name": "day", "type": "integer"}]


def given_away(path: Path) -> None:
    need(os.geteuid() == 0, "root, to give a file to another user: run the tests as root")
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two tables in a sticky folder, ``mine`` of another user."""
    folder = tmp_path / "tables"
    folder.mkdir()
    folder.chmod(0o1777)
    for name in ("mine", "other"):
        for part in ("", "metadata", "day=1", "_distop", "_distop/stage"):
            (folder / name / part).mkdir()
        (folder / name / "metadata" / "v1.json").write_text("{}")
        pq.write_table(pa.table({"who": [name]}), folder / name / "day=1" / "a.parquet")
    for part in ("", "metadata", "day=1", "day=1/a.parquet"):
        given_away(folder / "mine" / part)
    return folder


def turn(folder: Path, target: Path) -> None:
    """Replace a folder by a link, as its owner can."""
    folder.rename(folder.with_name("aside"))
    folder.symlink_to(target)
    given_away(folder)


def planned(location: Path) -> Any:
    record = TableRecord(name="mine", format="parquet", location=str(location))
    return parquet_format.FORMAT.plan_table(record, lambda: None, lambda: None)


@pytest.mark.parametrize("where", ["the folder", "a folder above it", "a file"])
def test_a_table_behind_a_link_of_another_user_is_not_read(tables: Path, where: str) -> None:
    mine, other = tables / "mine", tables / "other"
    if where == "a folder above it":
        for name in ("home", "away"):
            (tables / name).mkdir()
        mine, other = (found.rename(tables / name / "mine") for found, name in ((mine, "home"), (other, "away")))
    location = mine / "day=1" / "a.parquet" if where == "a file" else mine
    turned, target = {"the folder": (mine, other), "a folder above it": (mine.parent, other.parent)}.get(
        where, (location, other / "day=1" / "a.parquet")
    )
    if where != "a file":
        planned(location)
    turn(turned, target)
    refused = f"the link {turned}, on the way to .*, belongs to the user {STRANGER}"
    for read in (Location.of, TableFiles):
        with pytest.raises(InvalidArgument, match=refused):
            read(str(location))
    if where != "a file":
        with pytest.raises(InvalidArgument, match=refused):
            planned(location)
        with pytest.raises(InvalidArgument, match=refused):
            check_metadata(f"{location}/metadata/v1.metadata.json")


def test_a_listed_folder_that_another_user_replaced_by_a_link_is_refused(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = tables / "listed"
    listed.mkdir()
    monkeypatch.setenv(LOCATIONS, str(listed))
    table = TableFiles(str(tables / "mine"))
    table.check([f"{listed}/day=1/a.parquet"], below=True)
    turn(listed, tables / "other")
    with pytest.raises(InvalidArgument, match="belongs to the user 4711"):
        TableFiles(str(tables / "mine")).check([f"{listed}/day=1/a.parquet"], below=True)


def test_a_link_of_the_executors_user_or_of_root_is_followed(tables: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tables / "mine")
    TableFiles(str(link)).check([f"{link}/day=1/a.parquet"], below=True)
    assert planned(link).partitions


def test_hole_3_nothing_is_removed_read_or_written_behind_a_link_of_another_user(tables: Path) -> None:
    turn(tables / "mine", tables / "other")
    place = Place(str(tables / "mine"), "_distop")
    before = sorted(tables.rglob("*"))
    for act in (
        lambda: delete(place, "stage"),
        lambda: names(place),
        lambda: store_of(place).get("a", limit=1),
        lambda: store_of(place).put_new("a", b""),
        lambda: deletion.make_new(place.below("new")),
        lambda: store_of(Place(str(tables / "mine" / "new"))).put_new("a", b""),
    ):
        with pytest.raises(UnsafePath, match=f"below the link {tables}/mine, which belongs to the user {STRANGER}"):
            act()
    assert sorted(tables.rglob("*")) == before


@pytest.mark.parametrize("first", ["a folder", "a link"])
def test_hole_3_a_folder_of_another_user_is_refused_whenever_it_is_swapped_with_a_link(
    tables: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The folder, and the link to one of our folders, belong to another user: neither passes."""
    mine, aside, link = tables / "mine", tables / "aside", tables / "link"
    link.symlink_to(tables / "other")
    given_away(link)
    place = Place(str(mine), "metadata")
    calls, at = 0, 0

    def exchanged(now: str) -> None:
        if now == "a link" and not mine.is_symlink():
            mine.rename(aside)
            link.rename(mine)
        elif now == "a folder" and mine.is_symlink():
            mine.rename(link)
            aside.rename(mine)

    def hooked(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                exchanged("a link" if first == "a folder" else "a folder")
            return real(*args, **options)

        return call

    for name in ("open", "stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, hooked(getattr(os, name)))
    for at in range(1, 100):
        exchanged(first)
        calls = 0
        with pytest.raises(UnsafePath, match=f"{mine}, which belongs to the user {STRANGER}"):
            check_own(place)
        if calls < at:
            return
    raise AssertionError("the walk did not end")


def test_a_partition_of_a_catalogs_table_that_is_a_link_out_of_it_is_refused(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a link of ours: a path below the table must not lead out of it."""
    mine, elsewhere = tables / "mine", tables.parent / "elsewhere"
    (tables / "other" / "day=1").rename(elsewhere)
    (mine / "day=2").symlink_to(elsewhere)
    (mine / "day=3").symlink_to(mine / "day=1")
    located = {n: CatalogPartition({"day": str(n)}, str(mine / f"day={n}")) for n in (1, 2, 3)}
    located[4] = CatalogPartition({"day": "4"}, str(elsewhere))

    def plan(*days: int) -> Any:
        described = Described("parquet", str(mine), COLUMNS, ("day",), [located[n] for n in days])
        monkeypatch.setattr(spark_format.spark_catalog, "describe", lambda *_: described)
        return spark_format.FORMAT.plan_table(
            TableRecord(name="mine", format="spark", location="d.mine"), lambda: None, lambda: None
        )

    found = {p.name: [f[0] for f in p.files] for p in plan(1, 3, 4).partitions}
    assert found == {f"day={n}": [f"{located[n].location}/a.parquet"] for n in (1, 3, 4)}
    with pytest.raises(InvalidArgument, match="day=2.? lies outside of its table"):
        plan(1, 2)
    TableFiles(str(mine), *(one.location for one in located.values())).check(
        [one for files in found.values() for one in files], below=True
    )
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        TableFiles(str(mine), located[1].location, located[2].location).check([f"{mine}/day=2/a.parquet"], below=True)


@pytest.mark.parametrize("what", ["a file", "a folder"])
def test_a_link_of_another_user_in_the_folder_is_not_followed(tables: Path, what: str) -> None:
    """Regardless of its target: a link through /proc can lead anywhere."""
    link = tables / "mine" / ("day=2" if what == "a folder" else "day=1/b.parquet")
    link.symlink_to(tables / "mine" / ("day=1" if what == "a folder" else "day=1/a.parquet"))
    path = f"{link}/a.parquet" if what == "a folder" else str(link)
    TableFiles(str(tables / "mine")).check([path], below=True)
    assert len(list(Location.of(str(tables / "mine")).walk())) == 3
    given_away(link)
    with pytest.raises(InvalidArgument, match=f"the link {link}, on the way to .*, belongs to the user {STRANGER}"):
        TableFiles(str(tables / "mine")).check([path], below=True)
    with pytest.raises(InvalidArgument, match=f"the link {link}, on the way to .*, belongs to the user {STRANGER}"):
        list(Location.of(str(tables / "mine")).walk())


def test_links_are_checked_in_paths_of_any_length(tables: Path) -> None:
    """The kernel follows each folder, but Python's realpath ignores links in paths over 4,096 bytes."""
    mine, target, name = tables / "mine", tables / "other" / "day=1" / "a.parquet", "n" * 200
    here = os.open(mine, os.O_RDONLY)
    for n in range(26):
        if n == 16:
            os.symlink("/".join([name] * 10 + ["f"]), "l", dir_fd=here)
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.symlink(target, "f", dir_fd=here)
    os.close(here)
    link = mine / "day=1" / "b.parquet"
    link.symlink_to("/".join(["..", *[name] * 16, "l"]))
    assert link.read_bytes() == target.read_bytes()
    with pytest.raises(InvalidArgument, match="lies outside of its table"):
        TableFiles(str(mine)).check([str(link)], below=True)


def test_a_listing_shows_nothing_of_the_target_of_a_link_that_replaced_a_folder(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans contain names, sizes and times of files."""
    mine, real = tables / "mine", os.open

    def opened(path: Any, *args: Any, **options: Any) -> int:
        if path == str(mine / "day=1"):  # it was listed as a folder
            turn(mine / "day=1", tables / "other" / "day=1")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(InvalidArgument, match="day=1.? lies outside of its table"):
        list(Location.of(str(mine)).walk())


def test_a_location_swapped_with_a_link_does_not_show_whether_the_target_exists(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, aside, link = tables / "mine", tables / "aside", tables / "link"
    link.symlink_to(tables / "nothing")
    given_away(link)
    calls, at = 0, 0

    def hooked(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                mine.rename(aside)
                link.rename(mine)
            return real(*args, **options)

        return call

    for name in ("open", "stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, hooked(getattr(os, name)))
    for at in range(1, 200):
        calls = 0
        with suppress(InvalidArgument):  # not "does not exist"
            Location.of(str(mine))
        if calls < at:
            return
        mine.rename(link)
        aside.rename(mine)
    raise AssertionError("the walk did not end")


def test_a_location_swapped_with_a_link_shows_no_size_and_time_of_the_target(tables: Path) -> None:
    path, other = tables / "mine" / "day=1" / "a.parquet", tables / "other" / "day=1" / "a.parquet"
    location = Location.of(str(path))
    assert [entry.path for entry in location.walk()] == [str(path)]
    path.unlink()
    path.symlink_to(other)
    given_away(path)
    with pytest.raises(InvalidArgument, match=f"the link {path}, on the way to .*, belongs to the user {STRANGER}"):
        list(location.walk())


@pytest.mark.parametrize("follow", [True, False])
def test_no_file_is_opened_behind_a_link_of_another_user(tables: Path, follow: bool) -> None:
    """Opening a file includes this check."""
    turn(tables / "mine", tables / "other")
    with pytest.raises(NotRegular, match=f"the link {tables}/mine belongs to the user {STRANGER}"):
        open_regular(str(tables / "mine" / "day=1" / "a.parquet"), follow=follow)
    link = tables / "link"
    link.symlink_to(tables / "other" / "day=1" / "a.parquet")
    if follow:
        with open_regular(str(link)) as opened:
            assert opened.read(4) == b"PAR1"
    given_away(link)
    with pytest.raises(NotRegular, match="belongs to the user|is a symbolic link"):
        open_regular(str(link), follow=follow)
