"""Objects as files: links and other kinds of files, locks, scratch files, and what survives a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.errors import InvalidArgument, UnsafePath
from distop.storage import folder_store
from distop.storage.deletion import Place, opened_folder
from distop.storage.folder_store import FolderStore
from distop.storage.object_store import Listed
from distop.storage.opened_stores import open_store
from distop.storage.store_errors import ObjectChanged, ObjectExists, ObjectMissing, StoreError, TimedOut, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> FolderStore:
    root.mkdir()
    return FolderStore(Place(str(root)))


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_link_is_not_followed(store: FolderStore, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("content")
    (root / "link").symlink_to(secret)
    for call in (
        lambda: store.get("link", limit=100),
        lambda: store.head("link"),
        lambda: store.get_ranges("link", [(0, 1)]),
        lambda: store.copy_new("link", "copy"),
        lambda: list(store.list()),
        lambda: store.list_folder(),
    ):
        with pytest.raises(UnsafePath, match="link"):
            call()
    with pytest.raises(ObjectExists):
        store.put_new("link", b"new")
    with pytest.raises(ObjectChanged):
        store.replace_if("link", b"new", store.put_new("other", b""))
    assert secret.read_text() == "content"
    store.delete_many(["link"])
    assert secret.exists()
    assert files(root) == ["other"]


def test_a_linked_folder_is_not_entered(store: FolderStore, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_text("content")
    (root / "folder").symlink_to(other)
    for call in (
        lambda: store.get("folder/a", limit=100),
        lambda: store.put_new("folder/b", b""),
        lambda: store.put_new("folder/below/b", b""),
        lambda: store.delete_many(["folder/a"]),
        lambda: list(store.list("folder")),
    ):
        with pytest.raises(UnsafePath, match="symbolic link"):
            call()
    assert files(other) == ["a"]


def test_a_pipe_is_refused_without_waiting_for_its_writer(store: FolderStore, root: Path) -> None:
    os.mkfifo(root / "pipe")
    for call in (lambda: store.get("pipe", limit=1), lambda: store.head("pipe"), lambda: list(store.list())):
        with pytest.raises(UnsafePath, match="not a regular file"):
            call()


def test_a_file_appears_when_it_is_complete(store: FolderStore, root: Path) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(3):
            yield b"x" * 100_000
            assert [found.key for found in store.list()] == []
            with pytest.raises(ObjectMissing):
                store.head("a")

    store.put_large("a", pieces())
    assert files(root) == ["a"]
    assert stat.S_IMODE((root / "a").stat().st_mode) & 0o022 == 0


def test_a_file_that_a_killed_process_left_is_not_listed(store: FolderStore, root: Path) -> None:
    (root / ".distop-0123.tmp").write_bytes(b"half")
    store.put_new("a", b"")
    assert [found.key for found in store.list()] == ["a"]
    assert [found.key for found in store.list_folder().objects] == ["a"]


def test_an_error_of_the_writer_leaves_nothing(store: FolderStore, root: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x"
        raise OSError(errno.EIO, "the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        store.put_large("a/b", pieces())
    assert files(root) == []


def test_new_files_and_folders_are_flushed_to_the_disk(
    store: FolderStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    version = store.put_new("a/b/c", b"content")
    assert Path(flushed[0]).name.startswith(".distop-")
    assert {str(root / "a" / "b"), str(root / "a"), str(root)} <= set(flushed)
    flushed.clear()
    store.replace_if("a/b/c", b"newer", version)
    assert Path(flushed[0]).name.startswith(".distop-")
    assert flushed[1:] == [str(root / "a" / "b")]


def test_empty_folders_are_removed(store: FolderStore, root: Path) -> None:
    store.put_new("a/b/c", b"")
    store.put_new("a/d", b"")
    store.delete_many(["a/b/c"])
    assert files(root) == ["a", "a/d"]
    store.delete_many(["a/d"])
    assert files(root) == []
    assert root.is_dir()


def test_writers_and_removers_of_one_folder(store: FolderStore, root: Path) -> None:
    """The folder is removed whenever it is empty, also between its creation and the link of a new file."""

    def work(n: int) -> None:
        for k in range(30):
            store.put_new(f"deep/folder/{n}-{k}", b"")
            store.delete_many([f"deep/folder/{n}-{k}"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert files(root) == []


def test_a_locked_folder(store: FolderStore, root: Path) -> None:
    version = store.put_new("a", b"1")
    waiting = FolderStore(Place(str(root)), limit=0.2)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(TimedOut, match="another process holds the lock"):
            waiting.replace_if("a", b"2", version)
        with pytest.raises(TimedOut, match="another process holds the lock"):
            waiting.delete_many(["a"])
    finally:
        os.close(folder)
    waiting.replace_if("a", b"2", version)
    assert files(root) == ["a"]


def test_a_file_system_without_hard_links(store: FolderStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(Unsupported, match="no hard links"):
        store.put_new("a", b"")
    assert files(root) == []


def test_a_file_in_the_place_of_a_folder(store: FolderStore, root: Path) -> None:
    store.put_new("a", b"")
    with pytest.raises(StoreError, match="cannot create .*/a/b: Not a directory"):
        store.put_new("a/b", b"")
    with pytest.raises(ObjectMissing):
        store.get("a/b", limit=1)
    assert files(root) == ["a"]


def test_a_store_below_a_path() -> None:
    assert isinstance(open_store("/some/folder"), FolderStore)
    assert open_store("file:///some/folder").location == "/some/folder"
    with pytest.raises(InvalidArgument, match="absolute path"):
        open_store("some/folder")


def test_a_folder_is_opened_once_for_all_of_its_removed_files(
    store: FolderStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a/1", "a/2", "a/3", "b/1", "c"):
        store.put_new(key, key.encode())
    listed = [Listed(one.key, one.size, one.stamp) for one in store.list()]
    (root / "a" / "2").write_bytes(b"new")
    (root / "a" / "3").unlink()
    opened: list[str] = []

    @contextmanager
    def watched(place: Place) -> Iterator[int | None]:
        opened.append(place.location.removeprefix(str(root)))
        with opened_folder(place) as found:
            yield found

    monkeypatch.setattr(folder_store, "opened_folder", watched)
    found = store.remove_listed([*listed, Listed("gone/1", 1, 1), Listed("gone//1", 1, 1), Listed("/etc", 1, 1)])
    assert found.removed == ["a/1", "b/1", "c"]
    assert (found.changed, found.missing) == (["a/2"], ["a/3", "gone/1"])
    assert set(found.failed) == {"gone//1", "/etc"}
    assert opened == ["/a", "/b", "", "/gone", ""]
    assert [one.key for one in store.list()] == ["a/2"]
