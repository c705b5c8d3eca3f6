"""Finds and reads the settings file: that of ``--config``, or ``./distop.toml`` if only trusted users can write it.

The file has servers, credentials and, in ``spark-conf``, code. So a file in the current folder is used only if it
belongs to this process's user or to root, and no other user can write the file or its folder.
"""

from __future__ import annotations

import os
import stat
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "distop.toml"
_LINKS = 40
"""Maximum number of followed links, like the kernel's."""


@frozen
class SettingsFile:
    """The settings file. ``path`` "": no file is used. ``ignored``: why the file of the current folder is ignored."""

    path: str = ""
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    ignored: str = ""

    @property
    def text(self) -> str:
        """A text for people about the used file."""
        return self.ignored or (f"settings file: {self.path}" if self.path else f"no settings file (./{NAME})")


NO_FILE = SettingsFile()


class _Untrusted(Exception):
    """Another user may have written the file; the message says which and where."""


def find(explicit: str = "", folder: Path | None = None) -> SettingsFile:
    """Find and read the file. ``explicit``: the given path (/dev/null: no file). ``folder``: the current folder.

    Raises InvalidArgument if the explicit file does not exist, or a file cannot be read or is not TOML.
    """
    if explicit == os.devnull:
        return NO_FILE
    if explicit:
        path = Path(explicit)
        try:
            return _parsed(path, path.read_bytes())
        except OSError as error:
            raise _unreadable(path, error) from None
    path = (folder or Path()) / NAME
    try:
        data = _trusted(path)
    except FileNotFoundError:
        return NO_FILE
    except _Untrusted as error:
        return SettingsFile(
            ignored=f"{path.absolute()} is ignored: {error}. Name it with --config {path} if you trust it"
        )
    except OSError as error:
        raise _unreadable(path, error) from None
    return _parsed(path, data)


def read_trusted(path: Path, what: str) -> bytes:
    """The content of a file that only trusted users can write. Raises InvalidArgument; ``what``: names it."""
    try:
        return _trusted(path)
    except _Untrusted as error:
        raise InvalidArgument(f"{what} {path} is refused: {error}") from None
    except OSError as error:
        raise InvalidArgument(f"cannot read {what} {path}: {error.strerror or type(error).__name__}") from None


def _unreadable(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"cannot read the settings file {path}: {error.strerror or type(error).__name__}")


def _parsed(path: Path, data: bytes) -> SettingsFile:
    import tomllib

    try:
        values = tomllib.loads(data.decode())
    except UnicodeDecodeError:
        raise InvalidArgument(f"cannot read the settings file {path}: it is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{path} is not valid TOML: {error}") from None
    return SettingsFile(str(path.absolute()), values)


def _trusted(path: Path) -> bytes:
    """The content of the file. Raises OSError, and _Untrusted.

    The opened file is checked, and the folder of each link in its path: a user who can write there could redirect the
    name to another file of ours.
    """
    # O_NONBLOCK: opening a named pipe must not block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        opened = os.fstat(descriptor)
        if not stat.S_ISREG(opened.st_mode):
            raise _Untrusted("it is not a regular file")
        _check(opened, "it")
        place = path.absolute()
        for _ in range(_LINKS):
            # Resolve the folder's own links: the name is in the folder that they lead to.
            place = Path(os.path.realpath(place.parent)) / place.name
            _check_folder(place.parent)
            found = place.lstat()
            if not stat.S_ISLNK(found.st_mode):
                break
            _check_owner(found, f"the link {place}")
            place = place.parent / place.readlink()
        if (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
            raise _Untrusted("it was replaced while it was read")
        return file.read()


def _check(found: os.stat_result, what: str) -> None:
    _check_owner(found, what)
    # Reject also sticky folders: others cannot replace our files there, but they can create a hard link to one of our
    # files under this name before our own file exists.
    for bit, who in ((stat.S_IWGRP, "the group"), (stat.S_IWOTH, "everybody")):
        if found.st_mode & bit:
            raise _Untrusted(f"{what} can be written by {who}")


def _check_folder(folder: Path) -> None:
    what, found = f"its folder {folder}", folder.stat()
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        # Nobody writes through a mount that is read-only. Kubernetes mounts secrets so, in folders that all may write.
        _check_owner(found, what)
    else:
        _check(found, what)


def _check_owner(found: os.stat_result, what: str) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise _Untrusted(f"{what} belongs to another user (uid {found.st_uid})")
