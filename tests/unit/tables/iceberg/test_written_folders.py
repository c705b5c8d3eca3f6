"""Folders to which Iceberg libraries write by path: no other user may change them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from distop.errors import UnsafePath
from distop.storage.folder_ownership import changeable
from distop.tables.iceberg.written_folders import check_data_folder, check_folder, check_metadata_folder

if TYPE_CHECKING:
    from pathlib import Path

STRANGER = 4711
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table in a folder of tables."""
    folder = tmp_path / "tables" / "t"
    for part in (tmp_path / "tables", folder, folder / "metadata", folder / "data"):
        part.mkdir(mode=0o755)
    (folder / "metadata" / "v1.metadata.json").touch()
    (folder / "metadata" / "distop-1").mkdir()
    return folder


def check(table: Path) -> None:
    check_metadata_folder(str(table))
    check_metadata_folder(f"file://{table}")
    check_data_folder(str(table))


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("where", ["..", "", "metadata", "data"])
def test_hole_3_nothing_is_written_by_paths_where_others_may_write(table: Path, where: str, mode: int) -> None:
    check(table)
    folder = (table / where).resolve()
    folder.chmod(mode)
    # Entries of a sticky folder belong to their creators; above the table a private group may write.
    if where == ".." and not changeable(folder.stat(), sticky=True, private_group=True):
        return
    if mode == 0o1777 and not where:
        check(table)
        return
    with pytest.raises(UnsafePath, match=f"the table is not changed.* below {folder}, which is writable by its group"):
        check(table)


@pytest.mark.parametrize("where", ["..", "", "metadata", "data"])
@needs_root
def test_hole_3_nothing_is_written_by_paths_where_another_user_owns_a_folder(table: Path, where: str) -> None:
    folder = (table / where).resolve()
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(UnsafePath, match=f" below {folder}, which belongs to the user {STRANGER}"):
        check(table)


@needs_root
def test_hole_3_nothing_is_written_behind_a_link_that_another_user_may_redirect(table: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(table)
    check(link)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UnsafePath, match=f"below the link {link}, which belongs to the user {STRANGER}"):
        check(link)


@pytest.mark.parametrize("name", [".v2.metadata.json.crc", "version-hint.text", "v2.metadata.json", "a-m0.avro"])
@pytest.mark.parametrize("plant", ["a folder", "a link", "a pipe"])
def test_hole_3_no_commit_if_a_file_name_is_taken_by_something_else_than_a_file(
    table: Path, plant: str, name: str
) -> None:
    """Hadoop empties such a folder, and writes through such a link."""
    planted = table / "metadata" / name
    if plant == "a folder":
        planted.mkdir()
    elif plant == "a link":
        planted.symlink_to(table / "data")
    else:
        os.mkfifo(planted)
    with pytest.raises(UnsafePath, match=f"{re.escape(str(planted))} is not a regular file"):
        check_metadata_folder(str(table))


def test_a_missing_data_folder_is_accepted_and_a_missing_metadata_folder_only_on_request(table: Path) -> None:
    (table / "data").rmdir()
    check_data_folder(str(table))
    gone = table / "gone"
    check_metadata_folder(str(gone), missing=True)
    with pytest.raises(UnsafePath, match="gone/metadata is not a folder"):
        check_metadata_folder(str(gone))


def test_an_object_store_has_no_links() -> None:
    check_metadata_folder("s3://bucket/t")
    check_data_folder("s3://bucket/t")


def test_hole_3_a_link_on_the_path_is_not_followed(table: Path, tmp_path: Path) -> None:
    from distop.storage.deletion import Place

    (table / "data" / "distop-staged").symlink_to(tmp_path)
    with pytest.raises(UnsafePath, match="distop-staged is a symbolic link"):
        check_folder(Place(str(table), "data/distop-staged"))
