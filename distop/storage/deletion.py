"""Opens, creates and removes folders on a disk: below tables, shared directories, stages and indexes.

:mod:`distop.storage.folder_store` writes files in folders that are opened here. No other module removes or writes files
there.

A :class:`Place` is derived from an operation, a partition and an attempt, or from an index, but never from a result, a
plan or a file. A removed or written file has a path below its place. On a disk every folder is opened relative to its
parent, and symbolic links are rejected, so that the path cannot be redirected between check and use.

An attempt creates its own stage (:func:`make_new`) in folders that only the executor's user and root may change: the
stage's name is predictable, and files that others put there must not be used.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distop.errors import UnsafePath
from distop.protocol.frozen import frozen
from distop.storage.files import local_path
from distop.storage.folder_ownership import changeable, walked

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRIES = 1000
"""Maximum repetitions while another process removes files from a folder, or the folder."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_MODE = 0o755
"""Mode of new folders, before the umask: other users may never write there."""
_UNSAFE_FOLDER = ("nothing is staged", "give the executors a --shared-dir that only their user can change or replace")
_UNSAFE_LINK = (
    "nothing is read, removed or written",
    "give the folder that the link leads to, or let root own the link",
)
"""Parts of the error for a folder or link of another user: what is not done there, and what to do about it."""


def components(path: str) -> list[str]:
    """The components of a relative path. Raises UnsafePath for an absolute path, empty names, ``.`` and ``..``."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise UnsafePath(f"{path!r} is not a path below a folder: it is empty or absolute, or has '.', '..' or '//'")
    return parts


@frozen
class Place:
    """A folder that belongs to one operation, index or cluster.

    ``anchor``: a configured folder or URL, in which links are followed; ``path``: the path below it, without links.
    ``own``: write there only if nobody but the executor's user and root may change the anchor and the folders below it.
    """

    anchor: str
    path: str = ""
    own: bool = field(default=False, repr=False, compare=False)

    @property
    def location(self) -> str:
        """The place's path or URL."""
        anchor = self.anchor.rstrip("/") or self.anchor
        return f"{anchor}/{self.path}" if self.path else anchor

    @property
    def parent(self) -> Place:
        """The parent place. Raises UnsafePath for an anchor."""
        components(self.path)
        return Place(self.anchor, self.path.rpartition("/")[0], self.own)

    @property
    def name(self) -> str:
        """The place's name in :attr:`parent`."""
        return self.path.rpartition("/")[2]

    def below(self, path: str) -> Place:
        """A place in this one. Raises UnsafePath."""
        components(path)
        return Place(self.anchor, f"{self.path}/{path}" if self.path else path, self.own)


def delete(place: Place, path: str) -> bool:
    """Remove a file, a link (never its target), or a folder with its content; returns whether anything was removed.

    ``path``: below the place. Raises UnsafePath if it leads out of its place or through a link, and OSError.
    """
    parts = components(path)
    if place.path:
        parts = [*components(place.path), *parts]
    with _opened(place.anchor, parts[:-1]) as folder:
        return folder is not None and _delete_local(folder, parts[-1])


def names(place: Place) -> list[str]:
    """The names in a place; empty if it is not a folder. Raises UnsafePath, and OSError."""
    with _opened(place.anchor, components(place.path) if place.path else []) as folder:
        return [] if folder is None else os.listdir(folder)  # noqa: PTH208 -- of a descriptor


def check_unlinked(place: Place) -> None:
    """Raises UnsafePath if the path of a place has a link, and OSError. The place need not exist."""
    if local_path(place.anchor) is not None:
        with _opened(place.anchor, components(place.path) if place.path else []):
            pass


def make_new(place: Place, mode: int = 0o700) -> None:
    """Create a folder and its parents. Raises FileExistsError if something exists already, UnsafePath, and OSError."""
    taken = f"{place.location} exists already, but only its attempt may create it: remove it; its content is not used"
    for left in reversed(range(_TRIES)):
        with made_folder(place.parent) as folder:
            try:
                os.mkdir(place.name, mode, dir_fd=folder)
                return
            except FileExistsError:
                raise FileExistsError(taken) from None
            except FileNotFoundError:
                # Another process has removed the parent, which was empty.
                if not left:
                    raise


def check_own(place: Place, text: tuple[str, str] = _UNSAFE_FOLDER, *, missing: bool = False) -> None:
    """Raises UnsafePath if a place on a disk is not a folder, or other users may change or replace it, and OSError.

    ``text``: for the error, what is not done there, and what to do about it. ``missing``: accept a missing folder.
    """
    if local_path(place.anchor) is not None:
        with _opened(place.anchor, components(place.path) if place.path else [], own=text) as folder:
            if folder is None and not missing:
                raise UnsafePath(f"{place.location} is not a folder")


@contextmanager
def made_folder(place: Place) -> Iterator[int]:
    """Create a place's folder and its parents on a disk, without following links; yields a descriptor of it.

    Raises UnsafePath, and OSError.
    """
    parts = components(place.path) if place.path else []
    with _opened(place.anchor, parts, make=True, own=_UNSAFE_FOLDER if place.own else None) as opened:
        if opened is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place.location)
        yield opened


@contextmanager
def opened_folder(place: Place) -> Iterator[int | None]:
    """Open a place's folder on a disk, without following links; yields a descriptor, or None if there is none.

    Raises UnsafePath, and OSError.
    """
    with _opened(place.anchor, components(place.path) if place.path else []) as opened:
        yield opened


# ---------------------------------------------------------------------- on a disk


@contextmanager
def _opened(
    anchor: str, parts: list[str], *, make: bool = False, own: tuple[str, str] | None = None
) -> Iterator[int | None]:
    """Open the folder at the end of a path; yields None if it does not exist. ``make``: create missing folders.

    ``own``: the error's text (``check_own``) if other users may change a folder; None to accept such folders. Raises
    UnsafePath, also for a link below the anchor, and for another user's link in the anchor's path.
    """
    path = (local_path(anchor) if anchor else None) or Path("/")
    unsafe = partial(_unsafe, own or _UNSAFE_LINK)
    with ExitStack() as stack:
        try:
            walk = walked(path, unsafe, folders=own is not None, make=_FOLDER_MODE if make else None)
            place, found = stack.enter_context(walk)
            if place == Path("/"):
                raise UnsafePath(
                    f"nothing is removed or written below {anchor or '/'!r}: a table or a shared directory is never "
                    "the root"
                )
            folder = os.open(".", _FOLDER, dir_fd=found)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        stack.callback(os.close, folder)
        if own:
            _check_own(folder, str(path), own, sticky=True)
        for n, part in enumerate(parts, 1):
            whole = "/".join((str(path), *parts[:n]))
            inner = _opened_below(folder, part, whole, make=make)
            if inner is None:
                yield None
                return
            folder = inner
            stack.callback(os.close, folder)
            if own:
                _check_own(folder, whole, own)
        yield folder


def _opened_below(folder: int, name: str, path: str, *, make: bool) -> int | None:
    """Open a folder in an open folder; None if it is missing or not a folder. Raises UnsafePath for a link."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, _FOLDER_MODE, dir_fd=folder)
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        if stat.S_ISLNK(_mode(folder, name) or 0):
            raise UnsafePath(f"{path} is a symbolic link, which is not followed: put a folder there") from None
        return None


def _check_own(folder: int, path: str, text: tuple[str, str], *, sticky: bool = False) -> None:
    """Raises UnsafePath for an open folder that other users may change.

    ``sticky``: accept a sticky folder, since the folders below it are checked as well.
    """
    if why := changeable(os.fstat(folder), sticky=sticky):
        raise _unsafe(text, path, why)


def _unsafe(text: tuple[str, str], what: str, why: str) -> UnsafePath:
    return UnsafePath(f"{text[0]} below {what}, which {why}: {text[1]}")


def _mode(folder: int, name: str) -> int | None:
    """The mode of an entry of a folder, without following a link; None if it does not exist."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _delete_local(folder: int, name: str) -> bool:
    removed = False
    for left in reversed(range(_TRIES)):
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                os.unlink(name, dir_fd=folder)
            else:
                removed = True
                shutil.rmtree(name, dir_fd=folder)
            return True
        except FileNotFoundError:
            # The path is gone, or another process removes files in the folder.
            if _mode(folder, name) is None:
                return removed
            if not left:
                raise
    raise AssertionError("the last try returns or raises")
