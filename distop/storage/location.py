# ruff: noqa: PTH100, PTH111, PTH112, PTH118 -- os.scandir and os.path list a hundred thousand folders fast
"""A table's location: lists and reads its files.

Local folders are listed with ``os.scandir``, object stores through :mod:`distop.storage.object_store`, and HDFS with
pyarrow.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from distop.errors import InvalidArgument, TableRefused, TableUnavailable
from distop.protocol.frozen import frozen
from distop.storage.confinement import TableFiles
from distop.storage.deletion import Place, names
from distop.storage.files import NotRegular, TooLarge, check_regular, open_filesystem, open_regular, read_whole
from distop.storage.opened_stores import object_at, open_store
from distop.storage.storage_options import bucket_of, in_object_store
from distop.storage.store_errors import BucketMissing, ObjectMissing, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    SkippedFolder = Callable[[str, str], None]

    from distop.storage.object_store import ObjectStore, StoredObject

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MAGIC = b"PAR1"
_SUFFIXES = (".parquet", ".parq", ".pq")


class ListedFile(NamedTuple):
    """A file: its folder relative to the location ("" at the root), its path, size in bytes and stamp.

    ``stamp``: changes when the file is replaced: its mtime in ns, or the version of an object (ETag).
    """

    folder: str
    path: str
    size: int
    stamp: int | str


def stamp_of(one: StoredObject) -> int | str:
    """:attr:`StoredObject.stamp`."""
    return one.stamp


def may_be_folder(key: str) -> bool:
    """Whether an empty object of this name may be a folder: it has no suffix of a data file."""
    return "." not in key.rpartition("/")[2]


def _is_hidden(relative: str, skipped_folder: SkippedFolder) -> bool:
    """Whether a part of a file's path is hidden. Calls ``skipped_folder`` if that is a folder."""
    parts = relative.split("/")
    first = next((n for n, part in enumerate(parts) if hidden(part)), None)
    if first is not None and first < len(parts) - 1:
        skipped_folder("/".join(parts[:first]), parts[first])
    return first is not None


_BEFORE_BUCKET = 2
"""Number of slashes before a bucket's name."""
_ERRORS = (OSError, ValueError, NotImplementedError, TypeError, KeyError, IndexError)
"""The errors of pyarrow's file systems for a path or an answer."""


def _line(error: BaseException) -> str:
    """The first line of an error message."""
    text = str(error).strip()
    return text.split("\n")[0] if text else type(error).__name__


def _path_of(url: str) -> str:
    """The path of a ``file://`` URL. Raises InvalidArgument if it has none, or names another machine."""
    parts = urlsplit(url)
    if not parts.path or parts.netloc not in ("", "localhost"):
        raise InvalidArgument(f"the location {url!r} is not a path on this machine: write it as file:///folder")
    return unquote(parts.path)


def _is_remote(text: str) -> bool:
    return _URI.match(text) is not None and not text.lower().startswith("file://")


def root_of(text: str) -> str:
    """The common prefix of the files' paths at a location: its absolute path, or its URL. Raises InvalidArgument."""
    if _is_remote(text):
        return text.rstrip("/")
    return os.path.abspath(_path_of(text) if _URI.match(text) else os.path.expanduser(text))


def named_parquet(entry: ListedFile) -> bool:
    """Whether a file's name ends in .parquet, .parq or .pq."""
    return entry.path.lower().endswith(_SUFFIXES)


def hidden(name: str) -> bool:
    """Whether a name is ignored: ``_SUCCESS``, ``_distop``, ``.part-0.crc``, and a copy by Hadoop's tools in progress.

    Such a copy ends in ``._COPYING_``. ``_column=…`` is data, like in Spark.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name) or name.endswith("._COPYING_")


@frozen
class Location:
    """An opened location.

    ``store``: its object store; ``filesystem``: that of pyarrow for HDFS, with the path ``root`` in it. Both are None
    for a local path.
    """

    text: str
    root: str
    filesystem: Any = None
    store: ObjectStore | None = None

    @property
    def is_local(self) -> bool:
        return self.filesystem is None and self.store is None

    @classmethod
    def of(cls, text: str) -> Location:
        """Open a location.

        Raises InvalidArgument for an invalid location, and for one behind another user's link; TableUnavailable if it
        does not exist. An object store is not asked here: the listing finds out whether the location exists.
        """
        if not text or "\0" in text:
            raise InvalidArgument(f"the location of a table must be a path or a URL, not {text!r}")
        if in_object_store(text):
            bucket_of(text)  # without its bucket, the URL would be a path
            url = text.rstrip("/")
            return cls(url, url, store=open_store(url))
        if _is_remote(text):
            return cls._remote(text)
        root = root_of(text)
        try:
            TableFiles(root).resolved_stat(root)
        except OSError:
            raise TableUnavailable(f"the location {text!r} does not exist") from None
        return cls(root, root)

    @classmethod
    def _remote(cls, text: str) -> Location:
        from pyarrow import fs

        try:
            filesystem, root = open_filesystem(text)
            if not root:
                scheme = text.partition(":")[0]
                raise InvalidArgument(f"the location {text!r} names no bucket: write it as {scheme}://NAME/FOLDER")
            kind = filesystem.get_file_info(root).type
        except InvalidArgument:
            raise
        except Exception as e:  # pyarrow raises its own errors, OSError or ImportError, by file system
            wrong = TableUnavailable if isinstance(e, OSError | ImportError) else InvalidArgument
            raise wrong(f"the location {text!r} cannot be opened: {_line(e)}") from e
        if kind == fs.FileType.NotFound:
            raise TableUnavailable(f"the location {text!r} does not exist")
        return cls(text.rstrip("/"), root.rstrip("/"), filesystem)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.root.rpartition("/")[2]

    def parent(self) -> Location | None:
        """The folder around the location; None at the top."""
        root, slash, _ = self.root.rpartition("/")
        if not slash or not root:
            return None
        text = self.text.rpartition("/")[0]
        if self.store is not None:
            return Location.of(text) if text.count("/") >= _BEFORE_BUCKET else None
        return Location(text, root, self.filesystem)

    def walk(
        self, *, deep: bool = True, skipped_folder: SkippedFolder = lambda folder, name: None
    ) -> Iterator[ListedFile]:
        """All files at the location that are not hidden, unordered. ``deep``: also those in subfolders.

        ``skipped_folder``: called for each folder whose files are left out, with the folder around it and its name; in
        an object store for each file in a hidden folder.

        Files that are removed meanwhile may be missing. Raises TableUnavailable if a folder cannot be read or does not
        exist, InvalidArgument for a pipe, a device, or a link out of the location.
        """
        try:
            if self.store is not None:
                yield from self._walk_store(self.store, deep, skipped_folder)
            else:
                walk = self._walk_remote if self.filesystem is not None else self._walk_local
                yield from walk(deep, skipped_folder)
        except NotRegular as e:
            raise InvalidArgument(str(e)) from None
        except _ERRORS as e:
            raise unavailable(f"the location {self.text!r} cannot be listed: {_line(e)}", e) from e

    def _walk_local(self, deep: bool, skipped_folder: SkippedFolder) -> Iterator[ListedFile]:
        files = TableFiles(self.root)
        info = files.resolved_stat(self.root)
        if not stat.S_ISDIR(info.st_mode):
            check_regular(self.root, info.st_mode)
            yield ListedFile("", self.root, info.st_size, info.st_mtime_ns)
            return
        folders = [(self.root, "")]
        while folders:
            path, relative = folders.pop()
            try:
                opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                if not relative or os.path.lexists(path):
                    raise
                continue
            try:
                # The folder may have been replaced by a link since it was listed.
                files.check_open(opened, path)
                with os.scandir(opened) as found:
                    entries = list(found)
                for entry in entries:
                    if hidden(entry.name):
                        if entry.is_dir():
                            skipped_folder(relative, entry.name)
                        continue
                    inner = os.path.join(path, entry.name)
                    try:
                        info = files.resolved_stat(inner) if entry.is_symlink() else entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        if os.path.lexists(inner):  # a dangling link: its rows must not be missed
                            raise
                        continue
                    if stat.S_ISDIR(info.st_mode):
                        if deep:
                            folders.append((inner, f"{relative}/{entry.name}" if relative else entry.name))
                        else:
                            skipped_folder(relative, entry.name)
                        continue
                    check_regular(inner, info.st_mode)
                    yield ListedFile(relative, inner, info.st_size, info.st_mtime_ns)
            finally:
                os.close(opened)

    def check(self) -> None:
        """Raises TableUnavailable if the location has no visible files: its disk may not be mounted.

        The mount point may have hidden files, which distop has written there meanwhile.
        """
        if self.store is not None:
            try:
                if next(self.store.list(), None) is None:
                    raise self._missing()
            except OSError as e:
                raise unavailable(f"the location {self.text!r} cannot be listed: {_line(e)}", e) from e
        if self.is_local and os.path.isdir(self.root):
            try:
                with os.scandir(self.root) as entries:
                    if all(hidden(entry.name) for entry in entries):
                        raise self.empty_error()
            except OSError as e:
                raise TableUnavailable(f"the location {self.text!r} cannot be listed: {e}") from e

    def empty_error(self) -> TableUnavailable:
        """The error for an empty location: a missing disk looks like a table whose files were removed."""
        why = ": its files were removed, or its disk is not mounted here" if self.is_local else ""
        return TableUnavailable(f"the location {self.text!r} is empty{why}")

    def _missing(self) -> TableUnavailable:
        return TableRefused(f"the location {self.text!r} does not exist")

    def _walk_store(self, store: ObjectStore, deep: bool, skipped_folder: SkippedFolder) -> Iterator[ListedFile]:
        """The objects below the location, or the object at it."""
        empty: list[StoredObject] = []
        folders: set[str] = set()
        any_found = False
        for one in store.list() if deep else self._direct_objects(store, skipped_folder):
            any_found = True
            if _is_hidden(one.key, skipped_folder):
                continue
            folder = one.key.rpartition("/")[0]
            while folder and folder not in folders:
                folders.add(folder)
                folder = folder.rpartition("/")[0]
            if one.size == 0:
                empty.append(one)
            else:
                yield self._listed(one, one.key)
        for one in empty:
            # Tools create empty objects as folders.
            if one.key not in folders and not may_be_folder(one.key):
                yield self._listed(one, one.key)
        if not any_found:
            yield self._object_at()

    @staticmethod
    def _direct_objects(store: ObjectStore, skipped_folder: SkippedFolder) -> Sequence[StoredObject]:
        listed = store.list_folder()
        for name in listed.folders:
            skipped_folder("", name)
        return listed.objects

    def _object_at(self) -> ListedFile:
        """The object at the location, which is no folder."""
        store, key = object_at(self.text)
        if not key:
            raise self._missing()
        try:
            return self._listed(store.head(key), "")
        except ObjectMissing:
            raise self._missing() from None

    def _listed(self, one: StoredObject, relative: str) -> ListedFile:
        path = f"{self.text}/{relative}" if relative else self.text
        return ListedFile(relative.rpartition("/")[0], path, one.size, stamp_of(one))

    def _walk_remote(self, deep: bool, skipped_folder: SkippedFolder) -> Iterator[ListedFile]:
        from pyarrow import fs

        info = self.filesystem.get_file_info(self.root)
        if info.type == fs.FileType.File:
            yield ListedFile("", self.text, info.size, info.mtime_ns or 0)
            return
        for found in self.filesystem.get_file_info(fs.FileSelector(self.root, recursive=deep)):
            if found.type == fs.FileType.Directory and not deep:
                skipped_folder("", found.base_name)
            if found.type != fs.FileType.File:
                continue
            relative = found.path[len(self.root) :].lstrip("/")
            if _is_hidden(relative, skipped_folder):
                continue
            yield ListedFile(relative.rpartition("/")[0], f"{self.text}/{relative}", found.size, found.mtime_ns or 0)

    def names_in(self, folder: str) -> frozenset[str]:
        """The names in a folder of the location; empty if there is no such folder.

        Raises InvalidArgument for a link, TableUnavailable if it cannot be listed.
        """
        try:
            if self.is_local:
                return frozenset(names(Place(self.root, folder)))
            if self.store is not None:
                found_in = self.store.list_folder(folder)
                return frozenset((*found_in.folders, *(one.key.rpartition("/")[2] for one in found_in.objects)))
            from pyarrow import fs

            found = self.filesystem.get_file_info(fs.FileSelector(f"{self.root}/{folder}"))
            return frozenset(info.base_name for info in found)
        except (FileNotFoundError, NotADirectoryError) as e:
            if isinstance(e, BucketMissing):
                raise unavailable(f"the folder {folder!r} of {self.text!r} cannot be listed: {_line(e)}", e) from e
            return frozenset()
        except _ERRORS as e:
            raise unavailable(f"the folder {folder!r} of {self.text!r} cannot be listed: {_line(e)}", e) from e

    def text_in(self, name: str, limit: int) -> str:
        """The text of a small file at the location.

        Raises InvalidArgument if it has more than ``limit`` bytes, or is a link, a pipe or a device; TableUnavailable
        if it cannot be read.
        """
        try:
            if self.is_local:
                with open_regular(os.path.join(self.root, name), follow=False) as f:
                    data = read_whole(f, limit, name)
            elif self.store is not None:
                data = self.store.get(name, limit=limit).data
            else:
                with self.filesystem.open_input_stream(f"{self.root}/{name}") as stream:
                    data = read_whole(stream, limit, name)
            return data.decode(errors="replace")
        except TooLarge:
            raise InvalidArgument(
                f"the file {name!r} of {self.text!r} has more than {limit} bytes, the limit for such a file"
            ) from None
        except NotRegular as e:
            raise InvalidArgument(str(e)) from None
        except _ERRORS as e:
            raise unavailable(f"the file {name!r} of {self.text!r} cannot be read: {_line(e)}", e) from e

    def has_parquet_magic(self, entry: ListedFile) -> bool:
        """Whether a file starts with Parquet's magic number. Raises OSError if it cannot be read."""
        if self.is_local:
            with open_regular(entry.path) as f:
                return f.read(4) == _MAGIC
        if self.store is not None:
            store, key = object_at(entry.path)
            return store.get_ranges(key, [(0, len(_MAGIC))]) == [_MAGIC]
        path = self.root + entry.path[len(self.text) :]
        with self.filesystem.open_input_stream(path) as stream:
            return bytes(stream.read(4)) == _MAGIC
