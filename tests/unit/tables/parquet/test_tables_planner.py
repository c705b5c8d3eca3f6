"""The planner for Parquet folders: partitions, groups, versions, order, and refusals."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distop.errors import InvalidArgument, JobCancelled, TableUnavailable
from distop.protocol.records import TableRecord
from distop.storage.location import ListedFile, Location
from distop.tables import check_table, plan_table
from distop.tables.parquet.parquet_format import natural, partition_values, plan
from distop.tables.table_options import TableOptions


def put(root: Path, *names: str, data: bytes = b"PAR1....PAR1") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def record(root: Any, **options: Any) -> TableRecord:
    return TableRecord("t", "parquet", str(root), options)


def test_a_hundred_thousand_partitions_are_in_order_and_typed() -> None:
    entries = (ListedFile(f"k={n}", f"/t/k={n}/f.parquet", 1, n) for n in reversed(range(100_000)))
    planned = plan(entries, Location("/t", "/t"), TableOptions(partition_types={"k": "int"})).partitions
    assert [(p.partition, p.name, p.values) for p in planned[9:11]] == [
        (9, "k=9", {"k": "9"}),
        (10, "k=10", {"k": "10"}),
    ]
    assert planned[99_999].files == (("/t/k=99999/f.parquet", 1, 99_999),)


def test_partitions_at_any_depth_are_in_natural_order(tmp_path: Path) -> None:
    put(tmp_path, *(f"month={m}/day={d}/a.parquet" for m in (10, 2, 1) for d in (11, 2)))
    planned = plan_table(record(tmp_path))
    assert [p.name for p in planned.partitions] == [f"month={m}/day={d}" for m in (1, 2, 10) for d in (2, 11)]
    assert [p.partition for p in planned.partitions] == list(range(6))
    first = planned.partitions[0]
    path = tmp_path / "month=1/day=2/a.parquet"
    assert first.files == ((str(path), 12, path.stat().st_mtime_ns),)
    assert (first.bytes, first.values) == (12, {"month": "1", "day": "2"})


def test_partition_values_are_unescaped_texts() -> None:
    assert partition_values("d=01/t=a%3Ab") == {"d": "01", "t": "a:b"}
    assert partition_values("t=__HIVE_DEFAULT_PARTITION__") == {"t": None}
    assert partition_values("a=x=y") == {"a": "x=y"}
    assert partition_values("plain") is None
    assert partition_values("a=1/a=2") is None


def test_the_name_of_a_partition_is_the_name_of_its_folder(tmp_path: Path) -> None:
    put(tmp_path, "t=a%3Ab/x.parquet", "t=ü 😀/x.parquet")
    assert {p.name for p in plan_table(record(tmp_path)).partitions} == {"t=a%3Ab", "t=ü 😀"}


def test_natural_order_distinguishes_01_from_1() -> None:
    assert sorted(["d=10", "d=2", "d=01", "d=1"], key=lambda n: (natural(n), n)) == ["d=01", "d=1", "d=2", "d=10"]


def test_hidden_files_and_folders_are_ignored(tmp_path: Path) -> None:
    put(
        tmp_path,
        "p=1/a.parquet",
        "p=1/_SUCCESS",
        "p=1/.a.parquet.crc",
        "p=1/b.parquet._COPYING_",
        "_distop/x/y",
        "_SUCCESS",
        ".hidden/b",
    )
    planned = plan_table(record(tmp_path))
    assert [(p.name, len(p.files)) for p in planned.partitions] == [("p=1", 1)]


def test_the_files_of_a_folder_without_partitions_are_grouped(tmp_path: Path) -> None:
    put(tmp_path, *(f"part-{n}.parquet" for n in range(11)))
    planned = plan_table(record(tmp_path, group_bytes=30))
    assert [p.name for p in planned.partitions] == [f"files-{n:06}" for n in range(6)]
    files = [f[0].rpartition("/")[2] for p in planned.partitions for f in p.files]
    assert files == [f"part-{n}.parquet" for n in range(11)]
    assert [len(p.files) for p in plan_table(record(tmp_path, group_files=5)).partitions] == [5, 5, 1]


def test_one_file_is_a_table_too(tmp_path: Path) -> None:
    put(tmp_path, "x.parquet")
    assert len(plan_table(record(tmp_path / "x.parquet")).partitions) == 1
    assert check_table(record(tmp_path / "x.parquet")).location == str(tmp_path / "x.parquet")


def test_the_version_changes_with_the_files(tmp_path: Path) -> None:
    put(tmp_path, "p=1/a.parquet", "p=2/a.parquet")
    before = plan_table(record(tmp_path)).version
    assert plan_table(record(tmp_path)).version == before
    put(tmp_path, "p=2/a.parquet", data=b"PAR1 other PAR1")
    after = plan_table(record(tmp_path)).version
    assert after != before
    put(tmp_path, "p=3/a.parquet")
    assert plan_table(record(tmp_path)).version not in (before, after)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.parquet", "p=1/a.parquet"], "a.parquet and the folder p=1"),
        (["p=1/a.parquet", "q=1/a.parquet"], "other partition columns"),
        (["p=1/a.parquet", "p=2/q=1/a.parquet"], "other partition columns"),
        (["p=1/a.parquet", "sub/a.parquet"], "not made of column=value"),
    ],
)
def test_mixed_layouts_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    put(tmp_path, *names)
    with pytest.raises(InvalidArgument, match="mixed layout") as caught:
        plan_table(record(tmp_path))
    assert words in str(caught.value)


@pytest.mark.parametrize("location", ["/no/such/folder", "nosuchscheme://a/b", "", "file:///no/such/folder"])
def test_a_location_that_cannot_be_opened_is_named(location: str) -> None:
    with pytest.raises(InvalidArgument, match="location") as caught:
        check_table(TableRecord("t", "parquet", location))
    assert location in str(caught.value)


def test_an_empty_location_or_one_of_other_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no Parquet files"):
        check_table(record(tmp_path))
    put(tmp_path, "notes.txt", data=b"hello")
    with pytest.raises(InvalidArgument, match="notes.txt is not one"):
        check_table(record(tmp_path))


def test_a_file_of_another_format_is_rejected_by_name(tmp_path: Path) -> None:
    put(tmp_path, *(f"p={n}/a.parquet" for n in range(3)))
    check_table(record(tmp_path))
    put(tmp_path, "README.txt", data=b"read me")
    with pytest.raises(InvalidArgument, match=r"README.txt is not one: move it away"):
        check_table(record(tmp_path))
    (tmp_path / "README.txt").rename(tmp_path / "_README.txt")
    check_table(record(tmp_path))


def test_later_files_of_another_format_are_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "p=1/a.parquet", "p=2/a.PARQ", "p=2/000000_0")
    put(tmp_path, "README.txt", "p=2/a.parquet.bak", data=b"read me")
    planned = plan_table(record(tmp_path))
    assert [[f[0].rpartition("/")[2] for f in p.files] for p in planned.partitions] == [
        ["a.parquet"],
        ["000000_0", "a.PARQ"],
    ], "a file without a suffix counts as data"
    assert "2 files of" in caplog.text
    assert "README.txt" in caplog.text


def test_without_parquet_names_all_files_are_data(tmp_path: Path) -> None:
    put(tmp_path, "000000_0")
    put(tmp_path, "000001_0", data=b"cut")
    assert sum(len(p.files) for p in plan_table(record(tmp_path)).partitions) == 2


def test_files_are_recognized_by_their_first_bytes_too(tmp_path: Path) -> None:
    put(tmp_path, "000000_0")
    assert check_table(record(tmp_path)).location == str(tmp_path)


def test_locations_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "data set/p=1/a.parquet")
    monkeypatch.chdir(tmp_path)
    absolute = str(tmp_path / "data set")
    assert check_table(record("data set/")).location == absolute
    assert check_table(record((tmp_path / "data set").as_uri())).location == absolute


def test_an_unknown_format_or_option_is_named(tmp_path: Path) -> None:
    put(tmp_path, "p=1/a.parquet")
    with pytest.raises(InvalidArgument, match="'orc'"):
        check_table(TableRecord("t", "orc", str(tmp_path)))
    for options, words in (
        ({"gruop_files": 1}, "'gruop_files' is not known"),
        ({"group_files": 0}, "'group_files' must be"),
        ({"partition_types": {"p": "blob"}}, "'blob'"),
        ({"partition_types": "int"}, "must be an object"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check_table(record(tmp_path, **options))
        assert words in str(caught.value)
    with pytest.raises(InvalidArgument, match="is not a partition column"):
        plan_table(record(tmp_path, partition_types={"q": "int"}))


@pytest.mark.parametrize(
    "left", [(), ("_SUCCESS", ".keep", "_distop/t/plan.json", ".p=1/a.parquet"), ("p=1/_SUCCESS",)]
)
@pytest.mark.parametrize("options", [{}, {"partition_types": {"p": "int"}}])
def test_a_location_without_data_is_unavailable(tmp_path: Path, left: tuple[str, ...], options: dict[str, Any]) -> None:
    """Each check would hold for no rows, and the disk may be mounted on another node."""
    put(tmp_path, *left)
    (tmp_path / "p=2").mkdir()
    with pytest.raises(TableUnavailable) as caught:
        plan_table(record(tmp_path, **options))
    assert str(caught.value) == (
        f"the location {str(tmp_path)!r} is empty: its files were removed, or its disk is not mounted here"
    )


def test_empty_folders_beside_others_are_not_partitions(tmp_path: Path) -> None:
    put(tmp_path, "p=1/a.parquet", "p=2/_SUCCESS")
    (tmp_path / "p=3").mkdir()
    assert [p.name for p in plan_table(record(tmp_path)).partitions] == ["p=1"]


def test_a_location_that_is_gone_is_named_when_planned(tmp_path: Path) -> None:
    """Another node may see it, so it is no invalid argument, which would end the operation."""
    with pytest.raises(TableUnavailable, match="does not exist"):
        plan_table(record(tmp_path / "gone"))
    with pytest.raises(InvalidArgument, match="does not exist"):
        check_table(record(tmp_path / "gone"))


def test_a_file_removed_during_the_listing_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "p=1/a.parquet", "p=2/b.parquet", "p=3/c.parquet", "p=3/d.parquet")
    former = os.scandir

    def scandir(path: Any) -> Any:
        found = list(former(path))
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", former)
            listed = Path(f"/proc/self/fd/{path}").readlink()
            if listed == tmp_path:
                shutil.rmtree(tmp_path / "p=2")
            if listed.name == "p=3":
                (tmp_path / "p=3" / "c.parquet").unlink()
        return contextlib.nullcontext(found)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [[f[0] for f in p.files] for p in plan_table(record(tmp_path)).partitions] == [
        [str(tmp_path / "p=1/a.parquet")],
        [str(tmp_path / "p=3/d.parquet")],
    ]


def test_a_dangling_link_is_an_error(tmp_path: Path) -> None:
    put(tmp_path, "p=1/a.parquet")
    (tmp_path / "p=1" / "b.parquet").symlink_to(tmp_path / "not mounted" / "b.parquet")
    with pytest.raises(TableUnavailable, match="not mounted|b.parquet"):
        plan_table(record(tmp_path))


def test_a_listing_can_be_stopped(tmp_path: Path) -> None:
    put(tmp_path, "p=1/a.parquet")

    def stop() -> None:
        raise JobCancelled("the job was told to stop")

    with pytest.raises(JobCancelled):
        plan_table(record(tmp_path), stop)


def test_other_file_systems_are_listed_by_url(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from distop.storage.location import Location

    put(tmp_path, "p=1/a.parquet", "_distop/x.parquet")
    from pyarrow import fs

    remote = Location("mem://bucket/t", str(tmp_path), fs.LocalFileSystem())
    entries = list(remote.walk())
    assert [(e.folder, e.path, e.size) for e in entries] == [("p=1", "mem://bucket/t/p=1/a.parquet", 12)]
    assert remote.has_parquet_magic(entries[0])
    assert str(remote.empty_error()) == "the location 'mem://bucket/t' is empty"


def test_local_tables_are_planned_without_pyarrow(tmp_path: Path) -> None:
    put(tmp_path, "p=1/a.parquet")
    code = (
        "import sys\n"
        "from distop.protocol.records import TableRecord\n"
        "from distop.tables import check_table, plan_table\n"
        f"plan_table(check_table(TableRecord('t', 'parquet', {str(tmp_path)!r})))\n"
        "assert not {'pyarrow', 'pydantic', 'pyspark'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_types_of_missing_partition_columns_are_refused_when_the_table_is_added(tmp_path: Path) -> None:
    put(tmp_path / "parts", "day=1/a.parquet", "day=2/a.parquet")
    put(tmp_path / "flat", "a.parquet")
    assert check_table(record(tmp_path / "parts", partition_types={"day": "int"}))
    with pytest.raises(InvalidArgument, match="has 'dax', which is not a partition column of .* \\(it has: day\\)"):
        check_table(record(tmp_path / "parts", partition_types={"dax": "int"}))
    with pytest.raises(InvalidArgument, match="has 'day', which is not a partition column of .* \\(it has: none\\)"):
        check_table(record(tmp_path / "flat", partition_types={"day": "int"}))
