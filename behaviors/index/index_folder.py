"""The folder of an index, and the atomic publication of its generations.

``<table>/_distop/index/<name>/`` has ``generations/NNNNNN.json``, one file per generation of the index, and ``data/``
with the generations' Parquet files. The current generation is the one with the highest number. A file system has no
compare-and-swap, but creating a hard link fails if the name is taken. So a generation is written to a temporary file
and then linked to its number; if two writers publish at once, the slower one fails. The current generation is never
removed: a drop adds a last generation, marked as dropped. So a late writer, whose number was taken and removed since,
publishes a generation that is not the current one.

Files under ``data/`` never change. A generation's files are removed only after it is superseded.

An index belongs to its table. If two namespaces or etcd clusters build the same index, their generations share one
sequence of numbers: if both publish at once, one fails and retries on top of the other's generation. File names contain
the namespace. A namespace removes a file of another one only if it belongs to a superseded generation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.deletion import Place, delete, made_folder, names, new_file
from distop.storage.deletion import check_unlinked as _check_unlinked
from distop.storage.files import METADATA_BYTES, open_regular, read
from distop.storage.object_store import scratch_name
from distop.storage.opened_stores import store_of
from distop.storage.store_errors import ObjectExists
from distop_behaviors.index.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa

GRACE = 600.0
"""Seconds for which the files of a superseded generation are kept: a lookup may be reading them."""

_NUMBERED = re.compile(r"([0-9]{6}|[1-9][0-9]{6,17})\.json")
_LISTINGS = 100
"""Maximum retries if the newest generation is removed between listing and reading it."""
_OF_OPERATION = re.compile(r"(?:catch-up-)?(\d+)-.+")
"""The names of an operation's files, which have its instance after the prefix of the namespace."""
_OF_ANOTHER = re.compile(r"[0-9a-f]+\.(?:catch-up-|drop-)?.+")
"""The names of files of other namespaces' operations."""


class Superseded(Exception):
    """Another generation has this number already."""


class Folder:
    """The folder of one index; readers need no lock. ``space``: the writer's :attr:`JobContext.space`."""

    def __init__(self, location: str, name: str, space: str = "") -> None:
        self._place = Place(location, f"_distop/index/{name}")
        self._store = store_of(self._place)
        self._space = space
        self.root = Path(location) / "_distop" / "index" / name
        self.data = self.root / "data"
        self._generations = self.root / "generations"

    def current(self) -> Generation | None:
        """The current generation; None if the index was never built or was dropped.

        Raises InvalidArgument if it cannot be read.
        """
        newest = self.newest()
        return None if newest is None or newest.dropped else newest

    def newest(self) -> Generation | None:
        """The generation with the highest number, even if it is a drop. Raises InvalidArgument if unreadable."""
        for _ in range(_LISTINGS):
            numbers = self._numbers()
            if not numbers:
                return None
            with contextlib.suppress(FileNotFoundError):  # it was superseded and removed since it was listed
                return self._read(numbers[-1])
        raise InvalidArgument(
            f"cannot read the index file {self._path(numbers[-1])}: the folder lists it, but it does not exist"
        )

    def _numbers(self) -> list[int]:
        try:
            names = [path.name for path in self._generations.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name)))

    def _read(self, number: int) -> Generation:
        path = self._path(number)
        try:
            found = Generation.from_json(read(str(path), METADATA_BYTES, follow=False).decode())
            if found.number != number:
                raise ValueError(f"it has the generation {shown(found.number)}")
            return found
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidArgument(f"cannot read the index file {path}: {e}") from e

    def _path(self, number: int) -> Path:
        return self._generations / f"{number:06}.json"

    def is_whole(self, generation: Generation) -> bool:
        """Whether all files of the generation exist and have their sizes."""
        try:
            found = (((self.data / one.name).lstat(), one.size) for one in generation.named())
            return all(stat.S_ISREG(now.st_mode) and now.st_size == size for now, size in found)
        except FileNotFoundError:
            return False

    def own(self, name: str) -> str:
        """The name of a file with the prefix of this namespace."""
        return f"{self._space}.{name}" if self._space else name

    def _whose(self, name: str) -> str | None:
        """The name of a file without the prefix of this namespace; None if it has another prefix."""
        prefix = self.own("")
        return name[len(prefix) :] if name.startswith(prefix) else None

    def _instance_of(self, name: str) -> int | None:
        """The instance of the operation of this namespace that has written a file, or None."""
        found = _OF_OPERATION.fullmatch(self._whose(name) or "")
        return int(found[1]) if found else None

    def check_unlinked(self) -> None:
        """Raises UnsafePath if the index or its folders are behind a symbolic link."""
        for folder in ("data", "generations"):
            _check_unlinked(self._place.below(folder))

    def check_writable(self) -> None:
        """Raises InvalidArgument if the folder cannot be written, UnsafePath if it is behind a symbolic link."""
        self.check_unlinked()
        try:
            for folder in ("data", "generations"):
                probe = f"{folder}/{scratch_name()}"
                self._store.put_new(probe, b"")
                self._store.delete_many([probe])
        except OSError as e:
            raise InvalidArgument(
                f"cannot write into {self.root} ({e.strerror or e}): an index is stored beside its table, so executors "
                "need write access to the table's folder"
            ) from e

    def publish(self, generation: Generation) -> None:
        """Make the generation the current one. Raises Superseded if its number is taken, UnsafePath and OSError."""
        self.check_unlinked()
        path = self._path(generation.number)
        try:
            self._store.put_new(f"generations/{path.name}", generation.to_json().encode())
        except ObjectExists:
            raise Superseded(f"the name {path} is taken") from None

    def _delete(self, path: Path) -> bool:
        """Remove a file or folder of the index; returns whether it existed. Raises UnsafePath and OSError."""
        return delete(self._place, path.relative_to(self.root).as_posix())

    def _link(self, scratch: Path, path: Path) -> None:
        """Link a data file to another name. Raises Superseded if the name is taken, UnsafePath and OSError."""
        place = self._place.below(path.parent.relative_to(self.root).as_posix())
        with made_folder(self._place.below("data")) as data, made_folder(place) as folder:
            try:
                os.link(scratch.name, path.name, src_dir_fd=data, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                raise Superseded(f"the name {path} is taken") from None
            os.fsync(folder)

    def add(self, name: str, write: Callable[[BinaryIO], None]) -> tuple[int, str]:
        """Create a data file by ``write``; returns its size and digest. An existing file with the name is used instead.

        Raises the errors of ``write``, after removing the file.
        """
        with made_folder(self._place.below("data")):
            path = self.data / name
        if not path.exists():
            scratch = self.data / f"{name}.new-{uuid.uuid4().hex}"
            try:
                with new_file(self._place, f"data/{scratch.name}") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                with contextlib.suppress(Superseded):
                    self._link(scratch, path)
            finally:
                self._delete(scratch)
        return path.stat().st_size, digest_of(path)

    def sweep(self, instance: int, *, grace: float = GRACE, own: bool = False) -> None:
        """Remove files of generations that were superseded more than ``grace`` seconds ago, and orphan files.

        Orphan files are those that operations of this namespace before ``instance`` have not published; with ``own``,
        also those of this instance. The next call retries what cannot be removed.
        """
        kept: set[str] = set()
        gone: set[str] = set()
        superseded: list[int] = []
        after: float | None = None
        for number in reversed(self._numbers()):
            try:
                generation = self._read(number)
            except (FileNotFoundError, InvalidArgument):
                continue
            named = {one.name for one in generation.named()}
            if after is not None and time.time() - after > grace:
                superseded.append(number)
                gone |= named
                continue
            kept |= named
            after = generation.published
        for folder in (self.data, self.root):
            for path in self._list(folder):
                found = self._instance_of(path.name)
                old = found is not None and found < instance + own
                old = old or (self._whose(path.name) or "").startswith("drop-")
                # A file of another namespace: only if it belongs to superseded generations alone.
                if (old or (folder == self.data and path.name in gone)) and path.name not in kept:
                    self._try_delete(path)
        # Generations are removed last: if this call is interrupted, they still name the files to remove.
        for number in superseded:
            self._try_delete(self._path(number))

    def _list(self, folder: Path) -> list[Path]:
        inner = folder.relative_to(self.root).as_posix()
        return [folder / name for name in names(self._place if inner == "." else self._place.below(inner))]

    def _try_delete(self, path: Path) -> None:
        """Remove a file if possible; the next sweep retries it."""
        with contextlib.suppress(OSError):
            self._delete(path)

    def scratch(self, instance: int) -> Place:
        """A temporary folder for an operation. Does not create it."""
        return self._place.below(self.own(f"catch-up-{instance}-{uuid.uuid4().hex}"))

    def last_build(self) -> int:
        """The highest instance of an operation of this namespace that has files here, or 0."""
        found = [0]
        for folder in (self.data, self.root):
            found += [n for path in self._list(folder) if (n := self._instance_of(path.name)) is not None]
        return max(found)

    def drop(self, operation: str, after: int, builds: int) -> bool:
        """Remove the index: publish a generation that is marked as dropped, then remove the files. Idempotent.

        Returns whether this operation has dropped it. ``after``: the newest generation at planning; an older drop is
        not its own, even if an operation of the same name made it. ``builds``: the last build at planning; files of
        later builds stay. A late attempt does not touch an index that was built again after the drop: it raises
        Superseded. Raises OSError.
        """
        while (newest := self.newest()) is not None and not newest.dropped:
            if self._was_dropped(after, newest.number):
                raise Superseded(f"the index at {self.root} was built again after this drop had ended")
            with contextlib.suppress(Superseded):
                self.publish(Generation(newest.number + 1, operation, dropped=True, published=time.time()))
        former = [number for number in self._numbers() if newest is not None and number < newest.number]
        named = self._named_by(former)
        for folder in (self.data, self.root):
            self._empty(folder, builds, named)
        # Generations are removed last: if this attempt is interrupted, they still name the files to remove.
        for number in former:
            self._delete(self._path(number))
        with contextlib.suppress(OSError):
            delete(self._place, "data", only_empty=True)
        return newest is not None and newest.operation == operation and newest.number > after

    def _was_dropped(self, after: int, until: int) -> bool:
        """Whether a generation after ``after``, up to ``until``, is a drop or was removed by one."""
        try:
            return any(self._read(number).dropped for number in range(after + 1, until + 1))
        except FileNotFoundError:
            return True

    def _named_by(self, numbers: Iterable[int]) -> set[str]:
        found: set[str] = set()
        for number in numbers:
            with contextlib.suppress(FileNotFoundError, InvalidArgument):
                found.update(one.name for one in self._read(number).named())
        return found

    def _empty(self, folder: Path, builds: int, named: set[str]) -> None:
        """Remove the files of drops, and of builds of this namespace up to ``builds``, in a folder.

        Files of other namespaces are removed only if they are in ``named``: files of generations before the drop.
        """
        for path in self._list(folder):
            if path in (self.data, self._generations):
                continue
            found = self._instance_of(path.name)
            others = self._whose(path.name) is None and _OF_ANOTHER.fullmatch(path.name)
            if (found is not None and found > builds) or (others and path.name not in named):
                continue
            self._delete(path)


def write_parquet(table: pa.Table, file: BinaryIO, row_group: int, level: int = 3, **options: Any) -> None:
    """Write a Parquet file with page statistics and checksums. Raises OSError; the caller then removes the file."""
    import pyarrow.parquet as pq

    pq.write_table(
        table,
        file,
        row_group_size=row_group,
        compression="zstd",
        compression_level=level,
        write_statistics=True,
        write_page_index=True,
        write_page_checksum=True,
        **options,
    )


def digest_of(path: Path) -> str:
    """The digest of a regular file. Raises OSError."""
    with open_regular(str(path), follow=False) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
