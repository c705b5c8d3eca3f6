"""Checks that only this process's user and root can change or replace a folder.

A user who can write in a folder, or rename it, controls its content, such as a JVM's settings or etcd's data. So the
work directory, and the folder of ``distop dev``, are used only if

- the folder belongs to this user or to root, and neither its group nor others may write there; and
- each folder and link of its path belongs to this user or to root, and neither others nor a group may write in these
  folders, unless the folder is sticky (others cannot rename our files there, as in ``/tmp``) or the group is this
  user's private group.

Each folder is opened relative to its parent and checked after it is open, so that it cannot be replaced between check
and use. Hard links, because of which ``settings_file`` also rejects sticky folders, do not exist for folders.
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
"""Maximum number of followed links, like the kernel's."""


def changeable(found: os.stat_result, *, sticky: bool = False, private_group: bool = False) -> str:
    """Why other users can change a folder, a clause to follow "which"; "" if they cannot.

    ``sticky``: accept folders where others may write, but not replace our files. ``private_group``: accept the group
    that has this user as its only member.
    """
    if found.st_uid not in (0, os.geteuid()):
        return _other_owner(found)
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not writers or (sticky and found.st_mode & stat.S_ISVTX):
        return ""
    if private_group and writers == stat.S_IWGRP and _has_one_member(found.st_gid):
        return ""
    return f"is writable by its group or by others (mode {stat.S_IMODE(found.st_mode):04o})"


def make_own(folder: Path, option: str) -> None:
    """Create a folder (mode 0700) and its parents if they are missing.

    ``option``: the option that names the folder, for the error. Raises UnsafePath if other users can change or replace
    it, and OSError.
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
    """Open a path step by step, checking its links; yields the path without links, and a descriptor (``O_PATH``).

    Each component is opened before it is checked, so it cannot be exchanged in between. The last component is not
    checked. ``folders``: also check that other users cannot exchange anything in the folders later. ``make``: create
    missing folders, the last one with this mode.

    Raises the exception that ``unsafe`` creates from a path and a reason, if a link belongs to another user, or another
    user can replace a component; OSError if a component is missing.
    """
    if not hasattr(os, "O_PATH"):  # not Linux, so this is a client, which reads files that its own user names
        with _opened_unchecked(folder, make) as found:
            yield found
        return
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    # str, not Path, for speed: plans have thousands of files.
    names: list[str] = []
    links = 0
    rest = list(reversed(_names(str(folder if folder.is_absolute() else folder.absolute()))))
    here = os.open("/", flags)
    try:
        while rest:
            if folders and (why := changeable(os.fstat(here), sticky=True, private_group=True)):
                raise unsafe(_path(names), why)
            part = rest.pop()
            following = _opened_or_made(part, flags, here, 0o755 if rest and make is not None else make)
            if not stat.S_ISLNK(os.fstat(following).st_mode):
                os.close(here)
                here = following
                if part == "..":
                    names = names[:-1]
                else:
                    names.append(part)
                continue
            target = _link_target(following, _path([*names, part]), unsafe)
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            if target.startswith("/"):
                os.close(here)
                here, names = os.open("/", flags), []
            rest += reversed(_names(target))
        yield Path(_path(names)), here
    finally:
        os.close(here)


@contextmanager
def _opened_unchecked(folder: Path, make: int | None) -> Iterator[tuple[Path, int]]:
    if make is not None:
        folder.mkdir(make, parents=True, exist_ok=True)
    place = folder.resolve(strict=True)
    here = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield place, here
    finally:
        os.close(here)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _path(names: Sequence[str]) -> str:
    return "/" + "/".join(names)


def _opened_or_made(part: str, flags: int, folder: int, make: int | None) -> int:
    """Open a component of a path; ``make``: if it is missing, create a folder with this mode."""
    try:
        return _opened(part, flags, folder)
    except FileNotFoundError:
        if make is None:
            raise
        with suppress(FileExistsError):
            os.mkdir(part, make, dir_fd=folder)
        return _opened(part, flags, folder)


def _link_target(link: int, path: str, unsafe: Callable[[str, str], Exception]) -> str:
    """The target of an open link, which is closed. Raises the exception of ``unsafe`` for another user's link."""
    try:
        found = os.fstat(link)
        if found.st_uid not in (0, os.geteuid()):
            raise unsafe(f"the link {path}", _other_owner(found))
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def _opened(part: str, flags: int, folder: int) -> int:
    try:
        # Without O_DIRECTORY, O_PATH does not mount a file system that is mounted on demand (autofs).
        return os.open(part, flags | os.O_DIRECTORY, dir_fd=folder)
    except NotADirectoryError:
        return os.open(part, flags, dir_fd=folder)


def _unsafe(what: str, why: str, option: str) -> UnsafePath:
    return UnsafePath(
        f"{what} {why}, so other users could control what runs here: give {option} a folder that only this user and "
        "root can change or replace"
    )


def _other_owner(found: os.stat_result) -> str:
    return f"belongs to the user {found.st_uid}, but this process runs as {os.geteuid()}"


def _has_one_member(gid: int) -> bool:
    """Whether a group is this user's private group: it has the user's name and id, and no other known member."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if gid != user.pw_gid or group.gr_name != user.pw_name or set(group.gr_mem) - {user.pw_name}:
        return False
    return all(other.pw_uid == user.pw_uid for other in pwd.getpwall() if other.pw_gid == gid)
