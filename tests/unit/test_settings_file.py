"""The settings file of the current folder is used only if no other user can write it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop import settings_file
from distop.errors import InvalidArgument
from distop.settings_file import NO_FILE, find, read_trusted
from tests.support.command import distop_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.command import Ran

__all__ = ["distop_command"]

STRANGER = 4242


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a settings file of this user."""
    folder = tmp_path / "here"
    folder.mkdir(mode=0o755)
    write(folder / "distop.toml")
    return folder


def write(path: Path, text: str = 'namespace = "trusted"\n') -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def ignored(folder: Path) -> str:
    found = find(folder=folder)
    assert not found.values
    assert not found.path
    assert found.ignored.startswith(f"{folder}/distop.toml is ignored: ")
    assert found.ignored.endswith(f"Name it with --config {folder}/distop.toml if you trust it")
    return found.ignored


def owned_by_a_stranger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the owner as root; otherwise change the user that the process seems to have."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    else:
        monkeypatch.setattr(settings_file.os, "geteuid", lambda: STRANGER)


def test_the_users_own_file_is_used(folder: Path) -> None:
    found = find(folder=folder)
    assert dict(found.values) == {"namespace": "trusted"}
    assert (found.path, found.ignored) == (str(folder / "distop.toml"), "")
    (folder / "distop.toml").unlink()
    assert find(folder=folder) == NO_FILE


def test_the_file_of_another_user_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned_by_a_stranger(folder / "distop.toml", monkeypatch)
    assert "it belongs to another user (uid" in ignored(folder)


def test_a_file_in_a_folder_of_another_user_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away and keep the file")
    owned_by_a_stranger(folder, monkeypatch)
    assert f"its folder {folder} belongs to another user (uid {STRANGER})" in ignored(folder)


@pytest.mark.parametrize(("mode", "who"), [(0o664, "the group"), (0o646, "everybody"), (0o602, "everybody")])
def test_a_file_that_others_can_write_is_ignored(folder: Path, mode: int, who: str) -> None:
    (folder / "distop.toml").chmod(mode)
    assert f"it can be written by {who}" in ignored(folder)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_file_in_a_folder_that_others_can_write_is_ignored(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert f"its folder {folder} can be written by " in ignored(folder)


def test_a_read_only_mount_protects_its_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes mounts secrets and settings read-only, in folders of mode 1777."""
    data = folder / "..data"
    data.mkdir(mode=0o755)
    (folder / "distop.toml").rename(data / "distop.toml")
    (folder / "distop.toml").symlink_to("..data/distop.toml")
    folder.chmod(0o1777)
    with pytest.raises(InvalidArgument, match=r"its folder .* can be written by"):
        read_trusted(folder / "distop.toml", "the access file")
    flags = os.statvfs(folder).f_flag

    class ReadOnly:
        f_flag = flags | os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda path: ReadOnly)
    assert b"=" in read_trusted(folder / "distop.toml", "the access file")
    (data / "distop.toml").chmod(0o664)
    with pytest.raises(InvalidArgument, match="it can be written by the group"):
        read_trusted(folder / "distop.toml", "the access file")


def test_the_target_and_the_folders_of_links_are_checked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir(mode=0o755)
    target = write(own / "real.toml", 'namespace = "linked"\n')
    (folder / "distop.toml").unlink()
    (folder / "distop.toml").symlink_to("../own/real.toml")
    assert dict(find(folder=folder).values) == {"namespace": "linked"}
    target.chmod(0o666)
    assert "it can be written by the group" in ignored(folder)
    target.chmod(0o644)
    own.chmod(0o1777)
    assert f"its folder {own} can be written by the group" in ignored(folder)
    own.chmod(0o755)

    # A link to a link: a user who can replace the second one chooses the file.
    (shared / "middle").symlink_to(target)
    (folder / "distop.toml").unlink()
    (folder / "distop.toml").symlink_to(shared / "middle")
    assert find(folder=folder).path
    shared.chmod(0o777)
    assert f"its folder {shared} can be written by the group" in ignored(folder)
    shared.chmod(0o755)

    if os.geteuid() == 0:
        owned_by_a_stranger(folder / "distop.toml", monkeypatch)
        assert f"the link {folder}/distop.toml belongs to another user" in ignored(folder)


def test_a_fifo_is_ignored_without_blocking(folder: Path) -> None:
    (folder / "distop.toml").unlink()
    os.mkfifo(folder / "distop.toml")
    assert "it is not a regular file" in ignored(folder)


def test_a_file_named_explicitly_is_used_regardless_of_its_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "distop.toml"
    path.chmod(0o666)
    owned_by_a_stranger(path, monkeypatch)
    assert dict(find(str(path)).values) == {"namespace": "trusted"}
    with pytest.raises(InvalidArgument, match=r"cannot read the settings file .*/none.toml: No such file"):
        find(str(folder / "none.toml"))


def test_commands_report_the_settings_file(
    folder: Path, tmp_path: Path, distop_command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = ("--etcd", "127.0.0.1:1", "--connect-timeout", "0.2")
    monkeypatch.chdir(folder)

    def reported(*words: str) -> tuple[str, str]:
        ran = distop_command("doctor", *etcd, "--json", *words)
        (found,) = (check for check in ran.json["checks"] if check["name"] == "settings")
        return found["status"], found["text"]

    assert reported() == ("ok", f"settings file: {folder}/distop.toml")
    other = write(tmp_path / "other.toml")
    assert reported("--config", str(other)) == ("ok", f"settings file: {other}")
    monkeypatch.setenv("DISTOP_CONFIG", str(other))
    assert reported() == ("ok", f"settings file: {other}")
    assert f"settings file: {other}" in distop_command("ls", *etcd, "--debug").err
    monkeypatch.delenv("DISTOP_CONFIG")

    folder.chmod(0o777)
    status, text = reported()
    assert (status, "is ignored" in text) == ("warning", True)
    ran = distop_command("ls", *etcd)
    lines = [line for line in ran.err.splitlines() if "is ignored" in line]
    assert len(lines) == 1
    assert f"{folder}/distop.toml is ignored: its folder {folder} can be written by" in lines[0]
    assert (folder / "distop.toml").unlink() is None
    assert reported() == ("ok", "no settings file (./distop.toml)")
    assert distop_command("ls", "--config", "none.toml").code == 2


def test_hole_4_no_password_goes_to_the_server_of_an_untrusted_file(
    folder: Path, distop_command: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of another user named a server, a user, and a file to send as the password."""
    write(folder / "distop.toml", 'etcd = "127.0.0.9:9"\nuser = "me"\npassword-file = "/etc/passwd"\n')
    (folder / "distop.toml").chmod(0o666)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DISTOP_PASSWORD", "wasp-in-a-jar")
    monkeypatch.setenv("DISTOP_USER", "me")
    ran = distop_command("ls", "--connect-timeout", "0.2")
    assert "127.0.0.9" not in ran.err
    assert "127.0.0.1:2379" in ran.err


@pytest.mark.parametrize("start", [("-m", "distop.cli"), ("-c", "from distop.cli.main import main; main()")])
def test_hole_4_no_module_of_the_current_folder_is_imported(tmp_path: Path, start: tuple[str, str]) -> None:
    """With ``python -c`` the caller passes ``-P``; ``-m distop.cli`` needs no option."""
    for name in ("typer", "ctypes", "json", "grpc"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")
    words = [sys.executable, *(("-P",) if start[0] == "-c" else ()), *start, "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run(
        [*words, "--etcd", "127.0.0.1:1", "--connect-timeout", "0.2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not list(tmp_path.glob("imported-*")), ran.stderr
    assert json.loads(ran.stdout)["checks"]
