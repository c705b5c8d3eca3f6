# ruff: noqa: PTH100, PTH115, PTH116 -- os.path takes a million paths fast
"""Which files may belong to a table: those below its own folder, wherever a link or its metadata lead.

Links and metadata are data: who writes one table could name the files of another. Iceberg's ``add_files`` names files
elsewhere, so a data file of Iceberg is held to the table's folder only in an executor that serves some tables alone.
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
"""The environment variable with folders and URLs that any table may have files below: ``/warehouse,s3://bucket/old``."""

_METADATA = "metadata"
_NAMES = r"(?:/(?!\.{0,2}(?:/|\Z))[^/\0]+)"
_FORM = re.compile(rf"(?:file:(?://)?)?{_NAMES}+|(?!file:)[A-Za-z][A-Za-z0-9+.-]*://[^/\0]*{_NAMES}*")
"""A path from the root on, or a URL, in which every name stands for itself."""
_ODD = frozenset("?#%\0")
"""What a name is looked at for, of which the folder is known."""
_IN_AUTHORITY = 2
"""Slashes up to the end of the bucket or the host of a URL."""
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs", "wasbs": "wasb"}
_some_tables_only = False
_KEPT_COPIES = 256
_DEEP = 100
"""Folders, one in the other, that are looked at one after the other."""
_looked: ContextVar[dict[str, str] | None] = ContextVar("_looked", default=None)
_copies: OrderedDict[str, str] = OrderedDict()
"""The tables of metadata files that this process has written elsewhere."""


def confine(some_tables_only: bool) -> None:
    """Say whether this process serves some tables alone."""
    global _some_tables_only
    _some_tables_only = some_tables_only


def table_of(source: str) -> str:
    """The folder of the Iceberg table whose metadata file this is. The path of the file is what the table's record or
    its catalog says; the ``location`` inside the file is not asked, since who writes the table chooses it.
    """
    if source in _copies:
        return _copies[source]
    folder, _, _ = source.rpartition("/")
    return folder.removesuffix(f"/{_METADATA}") or "/"


def own_folder(source: str, location: str) -> str:
    """The folder of an Iceberg table that a catalog knows, for what writes or removes there. ``location``: what the
    metadata file ``source`` says of itself. Raises InvalidArgument where that is another folder.
    """
    folder = table_of(source)
    if _place(folder) != _place(location):
        raise InvalidArgument(
            f"the metadata file {shown(source)} says that its table lies at {shown(location)}, which is not the folder "
            "of its metadata: nothing is written or removed in either. Set its location to that folder, or have its "
            "metadata written below its location"
        )
    return folder


def check_folder(folder: str, pinned: str) -> None:
    """Raises InvalidArgument where a catalog has a table in another folder than its record says. ``pinned``: what that
    says; "" for nothing, so that any folder is allowed.
    """
    if pinned and _place(folder) != _place(pinned):
        raise InvalidArgument(
            f"the catalog has the table at {shown(folder)}, and not at {shown(pinned)}, the option 'folder' of its "
            "record: the table has moved; register it anew if it is to lie there"
        )


def copied(source: str, path: str) -> None:
    """Note that this process has written the metadata of ``source`` to another path: they are of the same table."""
    _copies[path] = table_of(source)
    while len(_copies) > _KEPT_COPIES:
        _copies.popitem(last=False)


def check_loadable(path: str) -> None:
    """Raises InvalidArgument for a metadata file, or a table's folder, with a ``#`` in its path: Iceberg's
    ``HadoopTables`` takes what follows it for the name of a metadata table, and loads another file than Python reads.
    """
    if "#" in path:
        raise InvalidArgument(
            f"the path {shown(path)} of an Iceberg table has a '#', which Iceberg reads as another path: rename it"
        )


def check_metadata(source: str) -> None:
    """Raises InvalidArgument where a metadata file, or its folder, is a link in the table's folder: it would be the
    metadata of another table, to be read and committed to. So it does for a ``#`` in the path.
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
    """A path on a disk without links; where nothing can be opened by it, as it is. Raises InvalidArgument where a link
    on the way belongs neither to this process's user nor to root: its owner could have it lead to another table.
    """
    known = _looked.get()
    if known is None:
        return _resolved(location)
    if location not in known:
        folder, _, name = location.rpartition("/")
        # Below a folder that was looked at, one look more tells all but where a link leads.
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
        raise InvalidArgument(f"the path {shown(location)} cannot be looked at: {error.strerror}") from None


@contextmanager
def looked_once() -> Iterator[None]:
    """Each folder is looked at once in this block, on this thread: files that are judged together, before any of them
    is read, have the same ones.
    """
    if _looked.get() is not None:
        yield
        return
    token = _looked.set({})
    try:
        yield
    finally:
        _looked.reset(token)


def _another_users(location: str, what: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what}, on the way to {shown(location)}, {why}: its owner could have it lead to another table; name the "
        "folder that it leads to, or have the link belong to root"
    )


def check_form(path: str) -> None:
    """Raises InvalidArgument for a path in data that Hadoop, which removes ``..`` from the text, and Python, which
    follows links first, may take for two files; and for one that is decoded by some readers, to such a path.
    """
    odd = not _FORM.fullmatch(path)
    if odd or ("%" in path and not {".", ".."}.isdisjoint(unquote(path).split("/"))) or "%00" in path:
        raise InvalidArgument(
            f"the path of a file, {shown(path)}, is refused, since its readers differ on it: write it from the root "
            "on, or as a URL, without '.', '..' and empty names"
        )


class TableFiles:
    """The files that may belong to the table in a folder or at a URL. ``others``: where some of it lies besides."""

    def __init__(self, location: str, *others: str) -> None:
        """Raises InvalidArgument where another user's link leads to the folder; others to which one leads are none."""
        self._location = location
        local = _local(location)
        self._own = None if local is None else f"{os.path.abspath(local).rstrip('/')}/"
        listed = (one.strip() for one in os.environ.get(LOCATIONS, "").split(","))
        # What lies below the table's folder by its path must lie there once links are followed.
        besides = [*(one for one in others if not self._is_below(one)), *(one for one in listed if one)]
        self._folders = [] if local is None else [f"{resolved(local).rstrip('/')}/"]
        for found in filter(None, map(_local, besides)):
            with suppress(InvalidArgument):
                self._folders.append(f"{resolved(found).rstrip('/')}/")
        self._urls = [f"{_plain(one).rstrip('/')}/" for one in (location, *besides) if _local(one) is None]
        self._resolved: dict[str, str] = {}
        self._known: set[str] = set()

    def check(self, paths: Iterable[str], *, deletes: bool = False, below: bool = False) -> None:
        """Raises InvalidArgument for a path that metadata or a plan name, and that is no allowed URL (storage_urls), or
        may not belong to this table. ``deletes``: these are delete files, which only writers of the table make; one on
        a disk is a regular file in the table's folder, so that errors of its reader tell nothing of other files.
        ``below``: all of them lie below the table's folder, in every executor, or are what its location names.
        """
        for path in paths:
            folder, _, name = path.rpartition("/")
            odd = name in ("", ".", "..") or len(path) > LONGEST_PATH or not _ODD.isdisjoint(name)
            if odd or folder not in self._known:
                check_paths((path,))
                check_form(path)
                if folder.count("/") > _IN_AUTHORITY:  # the name is no part of a bucket's or a host's
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
                    continue  # its reader says that it is gone

    def look_anew(self) -> None:
        """Forget where folders have led: one may have become a link since the last check."""
        self._resolved.clear()

    def look(self, path: str) -> os.stat_result:
        """What a link in the table's folder leads to. Raises InvalidArgument where it leads out of the folder, or is
        another user's, and OSError.
        """
        with walked(Path(path), partial(_another_users, path), folders=False) as (place, opened):
            if not self._allows(str(place)):
                raise self._outside(path)
            return os.fstat(opened)

    def check_open(self, descriptor: int, path: str) -> None:
        """Raises InvalidArgument where what was opened by a path lies out of the table's folder."""
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        except FileNotFoundError:  # no Linux, so no executor
            found = os.path.realpath(path)
        except OSError:  # its path is longer than any that can be opened
            raise self._outside(path) from None
        if not self._allows(found):
            raise self._outside(path)

    def check_partition(self, folder: str) -> None:
        """Raises InvalidArgument where the folder of a partition lies below the table's by its path, and a link leads
        out of it.
        """
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
        """Whether a path without links is one of the table."""
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
    """Whether there is a link at a path; true also where that cannot be told."""
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _local(location: str) -> str | None:
    """The path on a disk, as Iceberg has it with or without a scheme."""
    if location.startswith("/") and "//" not in location and "/." not in location and not location.endswith("/"):
        return location  # as it would come back from below; planned files are looked at by the thousand
    path = local_path(location)
    return None if path is None else str(path)


def _place(location: str) -> str:
    """One text for a folder, however it is written. No link is followed: whoever writes the table may turn it."""
    local = _local(location)
    return local.rstrip("/") if local is not None else _plain(location).rstrip("/")


def _plain(url: str) -> str:
    """The URL with one of several schemes that mean the same."""
    scheme, _, rest = url.partition("://")
    return f"{_ALIASES.get(scheme.lower(), scheme.lower())}://{rest}"
