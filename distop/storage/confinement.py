# ruff: noqa: PTH100, PTH115, PTH116 -- os.path takes a million paths fast
"""Checks that files belong to a table: that they are below its own folder, also after links are followed.

Links and metadata are not trusted: the writer of one table could name files of another. Iceberg's ``add_files`` adds
files in other folders, so data files of Iceberg tables must be in the table's folder only in an executor that is
restricted to some tables.
"""

from __future__ import annotations

import os
import re
import stat
from collections import OrderedDict
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.files import NotRegular, check_regular, local_path
from distop.storage.folder_ownership import walked
from distop.storage.storage_urls import LONGEST_PATH, check_paths

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOCATIONS = "DISTOP_TABLE_LOCATIONS"
"""The environment variable with folders and URLs where any table may have files: ``/warehouse,s3://bucket/old``."""

_METADATA = ("metadata", "_delta_log")
"""The folders below a table that have its metadata: of Iceberg, and of Delta."""
_NAMES = r"(?:/(?!\.{0,2}(?:/|\Z))[^/\0]+)"
_FORM = re.compile(rf"(?:file:(?://)?)?{_NAMES}+|(?!file:)[A-Za-z][A-Za-z0-9+.-]*://[^/\0]*{_NAMES}*")
"""An absolute path or a URL, without ``.``, ``..`` and empty names."""
_SPECIAL = frozenset("?#%\0")
"""Characters for which a name is checked even if its folder was checked before."""
_IN_AUTHORITY = 2
"""Number of slashes before the bucket or the host of a URL."""
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "wasbs": "wasb"}
_some_tables_only = False
_CACHED_COPIES = 256
_DEEP = 100
"""Maximum depth of folders that are resolved recursively."""
_resolved_paths: ContextVar[dict[str, str] | None] = ContextVar("_resolved_paths", default=None)
_copies: OrderedDict[str, str] = OrderedDict()
"""The folders of tables by metadata files that this process has written outside of them."""


def confine(some_tables_only: bool) -> None:
    """Set whether this process is restricted to some tables."""
    global _some_tables_only
    _some_tables_only = some_tables_only


def table_of(source: str) -> str:
    """The folder of the Iceberg or Delta table with this metadata file.

    It is derived from the file's path, which the table's record or its catalog has; not from the ``location`` in the
    file, which the table's writer chooses.
    """
    if source in _copies:
        return _copies[source]
    folder, _, _ = source.rpartition("/")
    table, _, name = folder.rpartition("/")
    return (table if name in _METADATA else folder) or "/"


def own_folder(source: str, location: str) -> str:
    """The folder of an Iceberg table of a catalog, for writing or removing there.

    ``location``: from the content of the metadata file ``source``. Raises InvalidArgument if it is another folder.
    """
    folder = table_of(source)
    if normal_form(folder) != normal_form(location):
        raise InvalidArgument(
            f"the metadata file {shown(source)} gives the table's location as {shown(location)}, which is not the "
            "folder of its metadata: nothing is written or removed in either. Set the location to that folder, or let "
            "the metadata be written below the location"
        )
    return folder


def check_folder(folder: str, pinned: str) -> None:
    """Raises InvalidArgument if a catalog's table is not in the folder of its record (``pinned``; "": any folder)."""
    if pinned and normal_form(folder) != normal_form(pinned):
        raise InvalidArgument(
            f"the catalog has the table at {shown(folder)}, but the option 'folder' of its record is {shown(pinned)}: "
            "the table has moved; register it again if the new folder is correct"
        )


def note_copy(source: str, path: str) -> None:
    """Note that this process has written the table's metadata of ``source`` to another path."""
    _copies[path] = table_of(source)
    while len(_copies) > _CACHED_COPIES:
        _copies.popitem(last=False)


def check_loadable(path: str) -> None:
    """Raises InvalidArgument for a metadata file, or a table's folder, with a ``#`` in its path.

    Iceberg's ``HadoopTables`` takes the text after it as the name of a metadata table, and so loads another file than
    Python.
    """
    if "#" in path:
        raise InvalidArgument(
            f"the path {shown(path)} of an Iceberg table has a '#', which Iceberg reads as another path: rename it"
        )


def check_metadata(source: str) -> None:
    """Raises InvalidArgument if a metadata file or its folder is a link, and for a ``#`` in the path.

    By a link in the table's folder, another table's metadata would be read and changed.
    """
    check_form(source)
    check_loadable(source)
    local = _local(source)
    if local is None or source in _copies:
        return
    folder = _local(table_of(source)) or "/"
    if resolved(local) != resolved(folder).rstrip("/") + local[len(folder.rstrip("/")) :]:
        raise InvalidArgument(
            f"the metadata file {shown(source)} is a symbolic link, or lies behind one in its table's folder, which is "
            "not followed"
        )


def resolved(location: str) -> str:
    """A path on a disk, with its links followed; unchanged if it cannot be opened.

    Raises InvalidArgument for a link that belongs neither to this process's user nor to root: its owner could redirect
    it to another table.
    """
    known = _resolved_paths.get()
    if known is None:
        return _resolved(location)
    if location not in known:
        folder, _, name = location.rpartition("/")
        # If the folder is resolved, only a link still needs to be followed.
        below = folder and name not in ("", ".", "..") and location.count("/") < _DEEP
        found = f"{resolved(folder).rstrip('/')}/{name}" if below else ""
        known[location] = found if below and not _may_be_link(found) else _resolved(location)
    return known[location]


def _resolved(location: str) -> str:
    try:
        with walked(Path(location), partial(_another_users, location), folders=False) as (place, _):
            return str(place)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return os.path.abspath(location)
    except OSError as error:
        raise InvalidArgument(f"the path {shown(location)} cannot be resolved: {error.strerror}") from None


@contextmanager
def resolve_once() -> Iterator[None]:
    """In this block, each path is resolved only once by this thread, for checks of many files before they are read."""
    if _resolved_paths.get() is not None:
        yield
        return
    token = _resolved_paths.set({})
    try:
        yield
    finally:
        _resolved_paths.reset(token)


def _another_users(location: str, what: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what}, on the way to {shown(location)}, {why}: its owner could redirect it to another table; name the "
        "folder that it leads to, or let root own the link"
    )


def check_form(path: str) -> None:
    """Raises InvalidArgument for a path that its readers may resolve to different files.

    Hadoop removes ``..`` from the text, whereas Python follows links first; and some readers decode ``%`` escapes.
    """
    invalid = not _FORM.fullmatch(path)
    if invalid or ("%" in path and not {".", ".."}.isdisjoint(unquote(path).split("/"))) or "%00" in path:
        raise InvalidArgument(
            f"the path of a file, {shown(path)}, is refused, because its readers may resolve it differently: write an "
            "absolute path or a URL without '.', '..' and empty names"
        )


class TableFiles:
    """The files that may belong to the table at a location. ``others``: further locations with files of the table."""

    def __init__(self, location: str, *others: str) -> None:
        """Raises InvalidArgument if the location is behind another user's link; such other locations are ignored."""
        self._location = location
        local = _local(location)
        self._own = None if local is None else f"{os.path.abspath(local).rstrip('/')}/"
        listed = (one.strip() for one in os.environ.get(LOCATIONS, "").split(","))
        # A path below the table's folder must still be there after links are followed.
        further = [*(one for one in others if not self._is_below(one)), *(one for one in listed if one)]
        self._folders = [] if local is None else [f"{resolved(local).rstrip('/')}/"]
        for found in filter(None, map(_local, further)):
            with suppress(InvalidArgument):
                self._folders.append(f"{resolved(found).rstrip('/')}/")
        self._urls = [f"{_plain(one).rstrip('/')}/" for one in (location, *further) if _local(one) is None]
        self._resolved: dict[str, str] = {}
        self._known: set[str] = set()

    def check(self, paths: Iterable[str], *, deletes: bool = False, below: bool = False) -> None:
        """Raises InvalidArgument for a path in metadata or a plan that is not allowed, or may not belong to this table.

        ``deletes``: the paths are delete files, which must be in the table's folder, and regular files if they are on a
        disk, so that errors of their reader cannot quote other files. ``below``: all paths must be below the table's
        folder or its listed locations, in every executor.
        """
        for path in paths:
            folder, _, name = path.rpartition("/")
            special = name in ("", ".", "..") or len(path) > LONGEST_PATH or not _SPECIAL.isdisjoint(name)
            if special or folder not in self._known:
                check_paths((path,))
                check_form(path)
                if folder.count("/") > _IN_AUTHORITY:  # the name is not part of a bucket's or a host's
                    self._known.add(folder)
            local = _local(path)
            if local is None:
                if (below or _some_tables_only) and not self._has_url(path):
                    raise self._outside(path)
                continue
            strict = deletes or below or _some_tables_only or (self._own is not None and local.startswith(self._own))
            if strict and not self._has(local):
                raise self._outside(path)
            if deletes:
                try:
                    check_regular(path, os.stat(local).st_mode)
                except NotRegular as error:
                    raise InvalidArgument(str(error)) from None
                except OSError:
                    continue  # its reader reports that it is gone

    def forget_resolved(self) -> None:
        """Forget resolved folders: one may have become a link since the last check."""
        self._resolved.clear()

    def resolved_stat(self, path: str) -> os.stat_result:
        """The stat result of a path, with its links followed.

        Raises InvalidArgument for a link that leads out of the table's folder or belongs to another user, and OSError.
        """
        with walked(Path(path), partial(_another_users, path), folders=False) as (place, opened):
            if not self._allows(str(place)):
                raise self._outside(path)
            return os.fstat(opened)

    def check_open(self, descriptor: int, path: str) -> None:
        """Raises InvalidArgument if an open file, or folder, is outside of the table's folder."""
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        except FileNotFoundError:  # not Linux, so not an executor
            found = os.path.realpath(path)
        except OSError:  # its path is too long
            raise self._outside(path) from None
        if not self._allows(found):
            raise self._outside(path)

    def check_partition(self, folder: str) -> None:
        """Raises InvalidArgument if a partition's folder is below the table's folder, but a link leads out of it."""
        local = _local(folder) or ""
        if self._is_below(folder) and not self._has(local):
            raise self._outside(local)

    def _is_below(self, location: str) -> bool:
        local = _local(location)
        return self._own is not None and local is not None and f"{os.path.abspath(local)}/".startswith(self._own)

    def _has(self, local: str) -> bool:
        folder, name = os.path.split(local)
        if folder not in self._resolved:
            self._resolved[folder] = resolved(folder)
        found = f"{self._resolved[folder].rstrip('/')}/{name}"
        if name in ("", ".", "..") or _may_be_link(found):
            found = resolved(local)
        return self._allows(found)

    def _allows(self, found: str) -> bool:
        """Whether a path without links is in a folder of the table."""
        return any(f"{found}/".startswith(allowed) for allowed in self._folders)

    def _has_url(self, path: str) -> bool:
        url = f"{_plain(path)}/"
        return any(url.startswith(allowed) for allowed in self._urls)

    def _outside(self, path: str) -> InvalidArgument:
        return InvalidArgument(
            f"the file {shown(path)} lies outside of its table {shown(self._location)}: move it there, or, if all "
            f"tables may use its folder, list that in the executors' environment, as {LOCATIONS}"
        )


def _may_be_link(path: str) -> bool:
    """Whether a path is a link, or cannot be examined."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _local(location: str) -> str | None:
    """The local path of a location with or without the scheme ``file``; None for other URLs."""
    if location.startswith("/") and "//" not in location and "/." not in location and not location.endswith("/"):
        return location  # a shortcut with the same result: there are thousands of planned files
    path = local_path(location)
    return None if path is None else str(path)


def normal_form(location: str) -> str:
    """A path or URL in a form that is equal for equivalent schemes.

    Links are not followed, because the table's writer may change them.
    """
    local = _local(location)
    return local.rstrip("/") if local is not None else _plain(location).rstrip("/")


def _plain(url: str) -> str:
    """The URL with the main one of equivalent schemes."""
    scheme, _, rest = url.partition("://")
    return f"{_ALIASES.get(scheme.lower(), scheme.lower())}://{rest}"
