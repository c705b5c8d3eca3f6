"""Folders that nobody but this process's user and root can change.

Whoever can write in a folder, or rename it, decides what is found there: settings of a JVM, or the data of an etcd. So
the work directory, and the folder of ``distop dev``, are used only if

- the folder belongs to this user or to root, and neither its group nor others may write there; and
- each folder and link on the way to it, from the root on, belongs to this user or to root, and others may not write in
  these folders, nor may a group, unless they are sticky (nobody renames what is ours there, as in ``/tmp``) or it is
  the group of this user alone.

Each is opened by the one that holds it, and judged once it is open, so that nobody can replace it between the look and
the use. Hard links, for which ``settings_file`` refuses sticky folders, too, are no danger here: folders have none.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from distop.errors import UnsafePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_LINKS = 40
"""Links that are followed, as the kernel does."""


def changeable(found: os.stat_result, *, sticky: bool = False, private_group: bool = False) -> str:
    """By whom else a folder can be changed, as what follows "which"; "" by nobody. ``sticky``: that others may write is
    fine where they cannot replace what is ours. ``private_group``: so is a group of this user alone.
    """
    if found.st_uid not in (0, os.geteuid()):
        return _stranger(found)
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not writers or (sticky and found.st_mode & stat.S_ISVTX):
        return ""
    if private_group and writers == stat.S_IWGRP and _has_one_member(found.st_gid):
        return ""
    return f"is writable by its group or by others (mode {stat.S_IMODE(found.st_mode):04o})"


def make_own(folder: Path, option: str) -> None:
    """Make a folder (mode 0700) and those above it, where they are missing. ``option``: what names the folder. Raises
    UnsafePath where somebody else can change or replace it, and OSError.
    """

    def unsafe(what: str, why: str) -> UnsafePath:
        return _unsafe(what, why, option)

    with walked(folder, unsafe, make=0o700) as (place, opened):
        found = os.fstat(opened)
        if not stat.S_ISDIR(found.st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
        if why := changeable(found):
            raise unsafe(str(place), why)


@contextmanager
def walked(
    folder: Path, unsafe: Callable[[str, str], Exception], *, folders: bool = True, make: int | None = None
) -> Iterator[tuple[Path, int]]:
    """A path without links, and a descriptor of what is there (``O_PATH``), after a look at all that is on the way.
    What was looked at is what is open: nobody can exchange anything in between. What is at its end is not judged.
    ``folders``: also the folders on the way are judged, so that nobody can exchange anything afterwards; else only the
    links. ``make``: what is missing is made, the last folder with this mode.

    Raises what ``unsafe`` makes of a path and a reason, where another user has put a link there, or can replace what is
    there; OSError where something is missing.
    """
    if not hasattr(os, "O_PATH"):  # no Linux, so a client, which reads what its user names
        if make is not None:
            folder.mkdir(make, parents=True, exist_ok=True)
        place = folder.resolve(strict=True)
        here = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield place, here
        finally:
            os.close(here)
        return
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    # Texts, and no paths: planned files are looked at by the thousand.
    names: list[str] = []
    links = 0
    rest = list(reversed(_names(str(folder if folder.is_absolute() else folder.absolute()))))
    here = os.open("/", flags)
    try:
        while rest:
            if folders and (why := changeable(os.fstat(here), sticky=True, private_group=True)):
                raise unsafe(_path(names), why)
            part = rest.pop()
            try:
                following = _opened(part, flags, here)
            except FileNotFoundError:
                if make is None:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(part, 0o755 if rest else make, dir_fd=here)
                following = _opened(part, flags, here)
            found = os.fstat(following)
            if not stat.S_ISLNK(found.st_mode):
                os.close(here)
                here = following
                if part == "..":
                    names = names[:-1]
                else:
                    names.append(part)
                continue
            try:
                if found.st_uid not in (0, os.geteuid()):
                    raise unsafe(f"the link {_path([*names, part])}", _stranger(found))
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
                target = os.readlink("", dir_fd=following)
            finally:
                os.close(following)
            if target.startswith("/"):
                os.close(here)
                here, names = os.open("/", flags), []
            rest += reversed(_names(target))
        yield Path(_path(names)), here
    finally:
        os.close(here)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _path(names: Sequence[str]) -> str:
    return "/" + "/".join(names)


def _opened(part: str, flags: int, folder: int) -> int:
    try:
        # With O_PATH alone, a file system that is mounted on demand (autofs) is not mounted.
        return os.open(part, flags | os.O_DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        return os.open(part, flags, dir_fd=folder)


def _unsafe(what: str, why: str, option: str) -> UnsafePath:
    return UnsafePath(
        f"{what} {why}: whoever else can change it decides what runs here; give {option} a folder that only this user "
        "and root can change or replace"
    )


def _stranger(found: os.stat_result) -> str:
    return f"belongs to the user {found.st_uid}, and this process runs as {os.geteuid()}"


def _has_one_member(gid: int) -> bool:
    """Whether a group is the one of this user alone: it has the user's name and number, and no other member that this
    machine knows of.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid != user.pw_gid or group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        return False
    return all(other.pw_uid == user.pw_uid for other in pwd.getpwall() if other.pw_gid == gid)
