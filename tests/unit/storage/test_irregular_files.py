"""Pipes, devices and links in place of files of a table are refused without waiting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from distop.errors import InvalidArgument
from distop.protocol.records import TableRecord
from distop.storage.files import read
from distop.storage.location import Location
from distop.tables import check_table, plan_table
from distop.tables.iceberg import manifest_facts
from distop.tables.iceberg.metadata_file import current_metadata_file
from distop.tables.parquet import page_headers
from distop.tables.reading import parquet_footers, parquet_tail
from distop.tables.reading.file_facts import Unreadable
from tests.support.lake import Folder

pytestmark = pytest.mark.timeout(20)

ROWS = pa.table({"id": [1, 2, 3]})


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


IRREGULAR: Any = pytest.mark.parametrize("irregular", [to_pipe, to_device])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Folder(tmp_path / "t").new(Schema(NestedField(1, "id", LongType(), required=False))).append(ROWS)
    return tmp_path / "t"


def refused(folder: Path, match: str) -> None:
    for ask in (check_table, plan_table):
        with pytest.raises(InvalidArgument, match=match):
            ask(TableRecord("t", "iceberg", str(folder)))


@IRREGULAR
def test_a_version_hint_that_is_not_a_regular_file_is_refused(folder: Path, irregular: Any) -> None:
    irregular(folder / "metadata" / "version-hint.text")
    refused(folder, "version-hint.text is (not a regular file|a symbolic link, which is not followed)")


def test_the_error_of_a_version_hint_does_not_show_its_content(folder: Path, tmp_path: Path) -> None:
    hint = folder / "metadata" / "version-hint.text"
    hint.write_text("8675309")
    with pytest.raises(InvalidArgument, match="it has no file for the version in version-hint.text") as error:
        plan_table(TableRecord("t", "iceberg", str(folder)))
    assert "8675309" not in str(error.value)
    hint.rename(tmp_path / "pin")
    hint.symlink_to(tmp_path / "pin")
    refused(folder, "version-hint.text is a symbolic link, which is not followed")


@IRREGULAR
def test_metadata_that_are_not_a_regular_file_are_refused(folder: Path, irregular: Any) -> None:
    source = current_metadata_file(Location.of(str(folder)))
    irregular(Path(source))
    refused(folder, "v2.metadata.json.* is (not a regular file: it is a pipe|a symbolic link)")
    with pytest.raises((Unreadable, InvalidArgument), match="is (not a regular file|a symbolic link)"):
        manifest_facts.snapshot_of(source, frozenset())


@IRREGULAR
def test_a_manifest_that_is_not_a_regular_file_is_refused(folder: Path, irregular: Any) -> None:
    for path in (folder / "metadata").glob("*.avro"):
        irregular(path)
    with pytest.raises(Exception, match="is not a regular file|lies outside of its table"):
        plan_table(TableRecord("t", "iceberg", str(folder)))


@IRREGULAR
def test_a_data_file_of_a_snapshot_that_is_not_a_regular_file_is_refused(folder: Path, irregular: Any) -> None:
    planned = plan_table(TableRecord("t", "iceberg", str(folder)))
    snapshot = manifest_facts.snapshot_of(planned.partitions[0].source, frozenset())
    irregular(Path(planned.partitions[0].files[0][0].removeprefix("file://")))
    with pytest.raises(Unreadable, match="is not a regular file"):
        snapshot.of(planned.partitions[0].files[0])


@IRREGULAR
@pytest.mark.parametrize("name", ["b.parquet", "b"])
def test_a_parquet_table_with_an_irregular_file_is_refused(tmp_path: Path, irregular: Any, name: str) -> None:
    pq.write_table(ROWS, tmp_path / "a.parquet")
    (tmp_path / name).touch()
    irregular(tmp_path / name)
    for ask in (check_table, plan_table):
        with pytest.raises(InvalidArgument, match=r"is not a regular file|lies outside of its table"):
            ask(TableRecord("t", "parquet", str(tmp_path)))


@IRREGULAR
def test_nothing_is_read_of_an_irregular_file(tmp_path: Path, irregular: Any) -> None:
    path = tmp_path / "a.parquet"
    path.touch()
    irregular(path)
    for ask in (parquet_tail.read, lambda path: read(path, 9), lambda path: page_headers.check(path, ["id"])):
        with pytest.raises(OSError, match="is not a regular file"):
            ask(str(path))
    with pytest.raises(Unreadable, match="is not a regular file"):
        parquet_footers.check_unchanged(str(path), 0, path.stat().st_mtime_ns)


def test_a_folder_that_is_mounted_on_demand_is_mounted_by_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``O_PATH`` alone Linux opens the empty mount point."""
    for name in ("mounted", "empty"):
        (tmp_path / name).mkdir()
    pq.write_table(ROWS, tmp_path / "mounted" / "a.parquet")
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if path == "demand":
            path = "mounted" if flags & os.O_DIRECTORY else "empty"
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    assert read(str(tmp_path / "demand" / "a.parquet"), 1 << 20).startswith(b"PAR1")
