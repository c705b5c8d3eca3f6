"""Copies of files between folders of a disk."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from distop.errors import UnsafePath
from distop.storage import folder_copies
from distop.storage.deletion import Place
from distop.storage.folder_copies import FolderCopies
from distop.storage.store_errors import ObjectChanged, ObjectExists, ObjectMissing, StoreError

if TYPE_CHECKING:
    from pathlib import Path


def copies(tmp_path: Path) -> FolderCopies:
    (tmp_path / "from").mkdir(exist_ok=True)
    return FolderCopies(Place(str(tmp_path / "from")), Place(str(tmp_path), "to/inner"))


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
@pytest.mark.parametrize("old", [False, True])
def test_a_copy_has_the_content_and_nothing_else_is_left(
    tmp_path: Path, size: int, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:  # a system without these calls
        monkeypatch.setattr(folder_copies.ctypes, "CDLL", lambda *_, **__: object())
    data = os.urandom(size)
    with copies(tmp_path) as one:
        (tmp_path / "from" / "a").write_bytes(data)
        found = one.copy("a", lambda _: None)
        assert (found.size, found.sha256) == (size, hashlib.sha256(data).hexdigest())
        one.put("b", b"1")
        one.put("b", b"2")
        one.flush()
        assert one.names() == {"a", "b"}
    to = tmp_path / "to" / "inner"
    assert {path.name: path.read_bytes() for path in to.iterdir()} == {"a": data, "b": b"2"}
    assert (to / "a").stat().st_mode & 0o7022 == 0


@pytest.mark.parametrize("old", [False, True])
def test_a_file_that_exists_is_not_replaced(tmp_path: Path, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if old:
        monkeypatch.setattr(folder_copies.ctypes, "CDLL", lambda *_, **__: object())
    with copies(tmp_path) as one:
        (tmp_path / "from" / "a").write_bytes(b"new")
        (tmp_path / "to" / "inner" / "a").write_bytes(b"old")
        with pytest.raises(ObjectExists):
            one.copy("a", lambda _: None)
    assert [path.read_bytes() for path in (tmp_path / "to" / "inner").iterdir()] == [b"old"]


def test_a_source_that_is_missing_or_odd_is_refused(tmp_path: Path) -> None:
    with copies(tmp_path) as one:
        with pytest.raises(ObjectMissing):
            one.copy("a", lambda _: None)
        (tmp_path / "from" / "link").symlink_to(tmp_path / "from")
        os.mkfifo(tmp_path / "from" / "pipe")
        (tmp_path / "from" / "folder").mkdir()
        for name in ("link", "pipe", "folder"):
            with pytest.raises(UnsafePath, match="not a regular file"):
                one.copy(name, lambda _: None)
        with pytest.raises(UnsafePath):
            one.copy("..", lambda _: None)
    with (
        FolderCopies(Place(str(tmp_path / "nowhere")), Place(str(tmp_path), "to")) as one,
        pytest.raises(ObjectMissing),
    ):
        one.copy("a", lambda _: None)


def test_a_source_that_changes_meanwhile_gives_no_copy(tmp_path: Path) -> None:
    with copies(tmp_path) as one:
        (tmp_path / "from" / "a").write_bytes(b"1234")

        def appended(_: os.stat_result) -> None:
            with (tmp_path / "from" / "a").open("ab") as file:
                file.write(b"5")

        with pytest.raises(ObjectChanged):
            one.copy("a", appended)
        assert one.names() == set()


def test_a_copy_that_reads_back_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    with copies(tmp_path) as one:
        (tmp_path / "from" / "a").write_bytes(b"1234")
        monkeypatch.setattr(os, "pwrite", lambda file, piece, at: pwrite(file, bytes(len(piece)), at))
        with pytest.raises(StoreError, match="differs"):
            one.copy("a", lambda _: None)
        assert one.names() == set()


def test_a_folder_that_is_removed_because_it_is_empty_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, left = folder_copies.made_folder, 3

    def removed(place: Place) -> object:
        opened = made(place)
        enter = opened.__enter__

        class Opened:
            def __enter__(self) -> int:
                nonlocal left
                found = enter()
                left -= 1
                if left > 0:
                    (tmp_path / "to" / "inner").rmdir()
                return found

            def __exit__(self, *raised: object) -> None:
                opened.__exit__(None, None, None)

        return Opened()

    monkeypatch.setattr(folder_copies, "made_folder", removed)
    with copies(tmp_path) as one:
        one.put("a", b"1")
    assert left == 0
    assert (tmp_path / "to" / "inner" / "a").read_bytes() == b"1"
