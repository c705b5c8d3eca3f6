"""Lists the folders of a table's partitions, whose locations the catalog has.

In an object store the partitions below the table's location are listed together, with one request for 1,000 objects.
Each partition elsewhere has its own listing, and some are made at the same time. Folders on a disk and in HDFS are
listed one after another.
"""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from distop.errors import InvalidArgument, TableUnavailable
from distop.storage.confinement import TableFiles
from distop.storage.location import Location, hidden, may_be_folder, stamp_of
from distop.storage.storage_options import bucket_of, in_object_store
from distop.storage.store_errors import unavailable
from distop.tables.parquet.parquet_format import natural
from distop.tables.reading import table_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distop.storage.object_store import StoredObject
    from distop.tables.reading.file_facts import PlannedFile
    from distop.tables.reading.table_folders import FolderKind

R = TypeVar("R")

_AT_ONCE = 8
"""Listings at the same time."""
_PAGE = 1_000
"""Objects of one request; also the listed objects between two checks whether to stop."""


class PartitionFolders:
    """The folders of a table at a location. Refuses those of Delta, Iceberg and Hudi tables."""

    def __init__(self, location: str, partitions: Iterable[str], check: Callable[[], None]) -> None:
        """List the partitions that are in object stores. Their own errors are raised by :meth:`files`.

        ``check``: called regularly. Raises InvalidArgument if the location, or a folder around a partition, is the
        folder of another kind of table; TableUnavailable if the location cannot be listed.
        """
        self._location = location
        self._table = TableFiles(location)
        self._check = check
        self._kinds: dict[str, FolderKind | None] = {}
        self._listed: dict[str, list[PlannedFile] | InvalidArgument | TableUnavailable] = {}
        remote = [folder for folder in partitions if in_object_store(folder)]
        below = _paths_below(location, remote)
        if below:
            self._list_below(below)
        else:
            self._check_plain()
        self._list_each([folder for folder in remote if folder not in self._listed])

    def files(self, folder: str, *, deep: bool = False) -> list[PlannedFile]:
        """The files of a folder. ``deep``: also those of subfolders, which Spark does not read.

        Raises InvalidArgument for a folder of another kind of table, and TableUnavailable, also if it does not exist.
        """
        found = None if deep else self._listed.pop(folder, None)
        if isinstance(found, Exception):
            raise found
        return self._own_listing(folder, deep=deep) if found is None else found

    def _opened(self, folder: str) -> Location:
        self._table.check_partition(folder)
        return Location.of(folder)

    def _own_listing(self, folder: str, *, deep: bool) -> list[PlannedFile]:
        location = self._opened(folder)
        table_folders.check_above(location, self._kinds)
        walk = location.walk(deep=deep, skipped_folder=partial(table_folders.check_subfolder, location))
        return _sorted((e.path, e.size, e.stamp) for e in walk)

    def _check_plain(self) -> None:
        try:
            found = Location.of(self._location)
        except TableUnavailable:
            return  # it need not exist if its partitions are elsewhere
        table_folders.check_plain(found)
        self._kinds[found.text] = None

    # ---- partitions elsewhere

    def _list_each(self, folders: Sequence[str]) -> None:
        above: dict[str, Location] = {}
        for folder in folders:
            try:
                above |= {one.text: one for one in table_folders.folders_above(self._opened(folder))}
            except (InvalidArgument, TableUnavailable):
                continue  # its own listing raises it again
        unknown = [text for text in above if text not in self._kinds]
        # All kinds are known before the listings, which then only read them.
        kinds = list(self._at_once(lambda text: table_folders.kind_above(above[text]), unknown))
        self._kinds |= dict(zip(unknown, kinds, strict=True))

        def listed(folder: str) -> list[PlannedFile] | InvalidArgument | TableUnavailable:
            try:
                return self._own_listing(folder, deep=False)
            except (InvalidArgument, TableUnavailable) as error:
                return error

        for folder, found in zip(folders, self._at_once(listed, folders), strict=True):
            self._listed[folder] = found

    def _at_once(self, work: Callable[[str], R], some: Sequence[str]) -> Iterator[R]:
        """The results of ``work`` for each, in order, by some threads."""
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            for found in pool.map(work, some):
                self._check()
                yield found
        finally:
            pool.shutdown(cancel_futures=True)

    # ---- partitions below the table's location

    def _list_below(self, below: Mapping[str, str]) -> None:
        """List partitions together. ``below``: their paths below the location → their locations.

        Those without a file that surely is one are left out: a folder, or an empty file, would look the same.
        """
        root = Location.of(self._location)
        around = {path: _folders_around(path) for path in below}
        watched = {"", *(folder for folders in around.values() for folder in folders)}
        kinds: dict[str, FolderKind] = {}
        found: dict[str, list[PlannedFile]] = {}
        unsure: set[str] = set()
        for n, one in enumerate(_objects(root, below, watched)):
            if n % _PAGE == 0:
                self._check()
            for folder, kind in table_folders.shown_kinds(one.key):
                if folder in watched:
                    kinds.setdefault(folder, kind)
            folder, _, name = one.key.rpartition("/")
            if folder not in below:
                continue
            if one.size == 0:
                if not hidden(name) and not may_be_folder(name):
                    unsure.add(folder)
                continue
            files = found.setdefault(folder, [])
            if not hidden(name):
                files.append((f"{below[folder].rstrip('/')}/{name}", one.size, stamp_of(one)))
        if "" in kinds:
            raise table_folders.belongs_to(root.text, root.text, kinds[""])
        for path, folders in around.items():
            for folder in folders if kinds else ():
                if folder in kinds:
                    table = f"{root.text}/{folder}"
                    raise table_folders.belongs_to(below[path], below[path] if folder == path else table, kinds[folder])
        if any("" in folders for folders in around.values()):
            table_folders.check_above(root, self._kinds)
        self._kinds[root.text] = None
        for path, folder in below.items():
            if path in found and path not in unsure:
                self._listed[folder] = _sorted(found[path])


def _paths_below(location: str, folders: Iterable[str]) -> dict[str, str]:
    """The paths of folders below a location in an object store → their locations. Others are left out."""
    found: dict[str, str] = {}
    try:
        own = bucket_of(location)
    except InvalidArgument:
        return found
    start = f"{own.path}/" if own.path else ""
    for folder in folders:
        try:
            other = bucket_of(folder)
        except InvalidArgument:
            continue  # its own listing raises it
        path = other.path.removeprefix(start)
        if replace(other, path=own.path) == own and other.path.startswith(start) and path:
            found[path] = folder
    return found


def _folders_around(path: str) -> tuple[str, ...]:
    """A partition's path, and the paths of folders that it could be a partition of; "" is the table's location."""
    found = [path]
    while path and table_folders.is_inner(path.rpartition("/")[2]):
        path = path.rpartition("/")[0]
        found.append(path)
    return tuple(found)


def _objects(location: Location, below: Mapping[str, str], watched: Iterable[str]) -> Iterator[StoredObject]:
    """The objects below a location, sorted. After many in folders that do not matter, the others of these are skipped.

    Folders matter if they are partitions, or could show that a watched folder is another kind of table. Raises
    TableUnavailable.
    """
    assert location.store is not None
    watched = frozenset(watched)
    starts: list[str] = []
    after: str | None = ""
    try:
        while after is not None:
            listing, after, skipped = location.store.list(after=after), None, 0
            for one in listing:
                yield one
                skipped = 0 if _matters(one.key, below, watched) else skipped + 1
                if skipped == _PAGE:
                    starts = starts or sorted(
                        [f"{path}/" for path in below]
                        + [f"{folder}/{name}/".lstrip("/") for folder in watched for name in table_folders.SHOWING]
                    )
                    n = bisect_right(starts, one.key)
                    after = starts[n] if n < len(starts) else None
                    break
    except OSError as error:
        raise unavailable(f"the location {location.text!r} cannot be listed: {error}", error) from error


def _matters(key: str, below: Mapping[str, str], watched: frozenset[str]) -> bool:
    folder = key.rpartition("/")[0]
    while folder:
        above, _, name = folder.rpartition("/")
        if folder in below or (above in watched and name in table_folders.SHOWING):
            return True
        folder = above
    return False


def _sorted(files: Iterable[PlannedFile]) -> list[PlannedFile]:
    return sorted(files, key=lambda f: (natural(f[0]), f[0]))
