"""The work directory and the folder of ``distop dev``: used only if no other user can change them."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.cli.dev import Dev
from distop.daemon.process import locked, stable_id
from distop.errors import InvalidArgument
from distop.storage.files import write_whole
from distop.store.embedded import EmbeddedEtcd
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import Callable

STRANGER = 54321
EACH_USE = pytest.mark.parametrize("use", ["executor", "dev", "etcd"])


def take(use: str, folder: Path) -> None:
    """Begin to use a folder as the executor, ``distop dev`` or its etcd does."""
    with contextlib.ExitStack() as stack:
        if use == "executor":
            stack.enter_context(locked(folder))
        elif use == "dev":
            stack.enter_context(Dev(folder, None, [], [])._locked())
        else:
            EmbeddedEtcd(folder)._prepare_folder()


def refusal(use: str, folder: Path) -> str:
    with pytest.raises(InvalidArgument) as caught:
        take(use, folder)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def give_away(path: Path) -> None:
    need(os.geteuid() == 0, "root, to give a file to another user: run the tests as root")
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


@EACH_USE
def test_a_missing_folder_is_created_private_for_any_umask(use: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        take(use, tmp_path / "a" / "b" / "c")
        take(use, tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / way).stat().st_mode) for way in ("a", "a/b", "a/b/c")]
    assert modes == [0o755, 0o755, 0o700]


@EACH_USE
@pytest.mark.parametrize("mode", [0o770, 0o775, 0o707, 0o777, 0o1777, 0o2775])
def test_a_folder_that_others_can_write_is_refused(use: str, mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    folder.chmod(mode)
    reason = refusal(use, folder)
    assert f"{folder} is writable by its group or by others (mode {mode:04o}), so other users could control" in reason
    assert list(folder.iterdir()) == [], "nothing was written there"


@EACH_USE
def test_a_folder_of_another_user_is_refused(use: str, tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir(0o700)
    give_away(folder)
    assert f"{folder} belongs to the user {STRANGER}" in refusal(use, folder)
    assert list(folder.iterdir()) == []


@EACH_USE
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
def test_an_existing_folder_keeps_its_mode(use: str, mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    folder.chmod(mode)
    take(use, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode


@EACH_USE
def test_a_folder_that_others_cannot_replace_is_used(use: str, tmp_path: Path) -> None:
    """As in /tmp: in a sticky folder only the owner of an entry can rename or remove it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert f"{shared} is writable by its group or by others (mode 0777)" in refusal(use, shared / "w")
    assert list(shared.iterdir()) == []
    shared.chmod(0o1777)
    take(use, shared / "w")
    give_away(shared)
    assert f"{shared} belongs to the user {STRANGER}" in refusal(use, shared / "w")


@EACH_USE
def test_another_users_folder_in_a_shared_folder_is_rejected(use: str, tmp_path: Path) -> None:
    """A planted ``.distop`` in /tmp: a folder, or a link to one of this user."""
    shared, ours = tmp_path / "shared", tmp_path / "ours"
    shared.mkdir()
    shared.chmod(0o1777)
    ours.mkdir(0o700)
    (shared / "link").symlink_to(ours)
    take(use, shared / "link")
    took = sorted(path.name for path in ours.iterdir())
    give_away(shared / "link")
    assert f"the link {shared / 'link'} belongs to the user {STRANGER}" in refusal(use, shared / "link")
    assert refusal(use, shared / "link" / "below")
    assert sorted(path.name for path in ours.iterdir()) == took
    (shared / "folder").mkdir()
    give_away(shared / "folder")
    assert f"{shared / 'folder'} belongs to the user {STRANGER}" in refusal(use, shared / "folder" / "below")
    assert list((shared / "folder").iterdir()) == []


@EACH_USE
def test_the_folders_on_the_path_of_a_link_are_checked(use: str, tmp_path: Path) -> None:
    (tmp_path / "open" / "inner").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    for name, target in (("absolute", tmp_path / "open" / "inner"), ("relative", Path("../open/inner"))):
        link = tmp_path / "here" / name
        link.symlink_to(target)
        (tmp_path / "open").chmod(0o755)
        take(use, link / "w")
        (tmp_path / "open").chmod(0o777)
        assert f"{tmp_path}/open is writable" in refusal(use, link / "w")
        assert f"{tmp_path}/open is writable" in refusal(use, tmp_path / "here" / ".." / "open" / "inner")


def test_a_cycle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert refusal("executor", tmp_path / "a").endswith(": Too many levels of symbolic links")


@pytest.mark.parametrize(
    ("gid", "name", "members", "others", "fine"),
    [
        (STRANGER, "ann", [], [], True),
        (STRANGER, "ann", ["ann"], [], True),
        (STRANGER, "ann", ["ann", "bob"], [], False),
        (STRANGER, "ann", [], ["bob"], False),
        (STRANGER, "users", [], [], False),
        (STRANGER + 1, "ann", [], [], False),
    ],
)
def test_a_group_with_a_single_user_may_write_above_the_folder(
    gid: int, name: str, members: list[str], others: list[str], fine: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """A home under the umask 0002, and a volume of Kubernetes with the ``fsGroup`` of its pod's user."""
    need(os.geteuid() == 0, "root, to give a folder to a group: run the tests as root")

    def user(name: str, uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", uid, STRANGER, "", "/", "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user("ann", uid))
    monkeypatch.setattr(pwd, "getpwall", lambda: [user("ann", os.geteuid()), *(user(one, 7) for one in others)])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))
    volume = tmp_path / "volume"
    volume.mkdir()
    os.chown(volume, 0, gid)
    volume.chmod(0o2775)
    if fine:
        take("executor", volume / "work")
        take("executor", volume / "work")
        assert stat.S_IMODE((volume / "work").stat().st_mode) & 0o777 == 0o700
    else:
        assert f"{volume} is writable by its group" in refusal("executor", volume / "work")
    assert f"{volume} is writable by its group" in refusal("executor", volume), "the folder itself must be private"


def test_an_unknown_group_may_not_write(tmp_path: Path) -> None:
    need(os.geteuid() == 0, "root, to give a folder to a group: run the tests as root")
    os.chown(tmp_path, 0, STRANGER)
    tmp_path.chmod(0o770)
    assert f"{tmp_path} is writable by its group" in refusal("executor", tmp_path / "w")


# ---------------------------------------------------------------------- files in the folder


def _log(folder: Path) -> None:
    etcd = EmbeddedEtcd(folder, binary="/bin/false")
    etcd._prepare_folder()
    etcd._launch()
    etcd.kill()


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("lock", lambda folder: take("executor", folder)),
        ("lock", lambda folder: take("dev", folder)),
        ("etcd.log", _log),
        ("executor-id", lambda folder: stable_id(folder, None)),
        ("executor-id.new", lambda folder: stable_id(folder, None)),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_place_of_a_file_is_not_followed(
    name: str, act: Callable[[Path], None], there: bool, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    if there:
        outside.write_text("of somebody else")
    folder = tmp_path / "w"
    folder.mkdir(0o700)
    (folder / name).symlink_to(outside)
    with pytest.raises(InvalidArgument, match="symbolic link"):
        act(folder)
    assert outside.exists() is there
    assert not there or outside.read_text() == "of somebody else"


def test_an_atomic_write_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "f.new").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic link"):
        write_whole(tmp_path / "f", b"x")
    assert not (tmp_path / "outside").exists()
