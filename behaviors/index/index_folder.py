"""The folder of an index, and the atomic publication of its generations.

``<table>/_distop/index/<name>/`` has ``generations/NNNNNN.json``, one file per generation of the index, and ``data/``
with the generations' Parquet files. The current generation is the one with the highest number. To publish a generation
is to create its file, which fails if the number is taken: if two writers publish at once, the slower one fails. The
current generation is never removed: a drop adds a last generation, marked as dropped. So a late writer, whose number
was taken and removed since, publishes a generation that is not the current one.

Files under ``data/`` never change. A generation's files are removed only after it is superseded.

An index belongs to its table. If two namespaces or etcd clusters build the same index, their generations share one
sequence of numbers: if both publish at once, one fails and retries on top of the other's generation. File names contain
the namespace. A namespace removes a file of another one only if it belongs to a superseded generation.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.texts import shown
from distop.storage.deletion import Place
from distop.storage.deletion import check_unlinked as _check_unlinked
from distop.storage.files import METADATA_BYTES
from distop.storage.object_store import scratch_name
from distop.storage.opened_stores import store_of
from distop.storage.store_check import publishing_store
from distop.storage.store_errors import ObjectExists, ObjectMissing, StoreUnavailable, UnknownWrite
from distop_behaviors.index.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow as pa

    from distop.storage.object_store import ObjectStore
    from distop_behaviors.index.generation import Named

GRACE = 600.0
"""Seconds for which the files of a superseded generation are kept: a lookup may be reading them."""

INCOMPLETE = 3600.0
"""Seconds after which a file that is not complete belongs to a killed process."""
_NUMBERED = re.compile(r"([0-9]{6}|[1-9][0-9]{6,17})\.json")
DATA, GENERATIONS = "data", "generations"
_AT_ONCE = 8
"""Files that are examined at the same time."""
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
        self.store = store_of(self._place)
        self._space = space

    @property
    def location(self) -> str:
        """The path or URL of the folder."""
        return self._place.location

    def key_of(self, name: str) -> str:
        """The key of a data file in :attr:`store`."""
        return f"{DATA}/{name}"

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
        names = _names(self.store, GENERATIONS)
        return sorted(int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name)))

    def _read(self, number: int) -> Generation:
        try:
            found = Generation.from_json(self.store.get(_generation_key(number), limit=METADATA_BYTES).data.decode())
            if found.number != number:
                raise ValueError(f"it has the generation {shown(found.number)}")
            return found
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidArgument(f"cannot read the index file {self._path(number)}: {e}") from e

    def _path(self, number: int) -> str:
        return self.store.location_of(_generation_key(number))

    def is_whole(self, generation: Generation) -> bool:
        """Whether all files of the generation exist and have their sizes. Raises OSError."""

        def is_there(one: Named) -> bool:
            try:
                return self.store.head(self.key_of(one.name)).size == one.size
            except (ObjectMissing, UnsafePath):
                return False

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return all(pool.map(is_there, generation.named()))

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
        for folder in (DATA, GENERATIONS):
            _check_unlinked(self._place.below(folder))

    def check_writable(self) -> None:
        """Raises InvalidArgument if the folder cannot be written, UnsafePath if it is behind a symbolic link.

        Raises StoreError if that cannot be found out now.
        """
        self.check_unlinked()
        try:
            store = publishing_store(self._place)
            for folder in (DATA, GENERATIONS):
                probe = f"{folder}/{scratch_name()}"
                store.put_new(probe, b"")
                store.delete_many([probe])
        except (StoreUnavailable, UnknownWrite):
            raise  # a later attempt may succeed
        except OSError as e:
            raise InvalidArgument(
                f"cannot write into {self.location} ({e.strerror or e}): an index is stored beside its table, so "
                "executors need write access to the table's folder"
            ) from e

    def publish(self, generation: Generation) -> None:
        """Make the generation the current one. Raises Superseded if its number is taken, UnsafePath and OSError."""
        self.check_unlinked()
        try:
            key, data = _generation_key(generation.number), generation.to_json().encode()
            publishing_store(self._place).put_new(key, data)
        except ObjectExists:
            raise Superseded(f"the name {self._path(generation.number)} is taken") from None

    def add(self, name: str, write: Callable[[BinaryIO], None]) -> tuple[int, str]:
        """Create a data file by ``write``; returns its size and digest. An existing file with the name is used instead.

        Raises the errors of ``write``, and OSError.
        """
        key = self.key_of(name)
        try:
            self.store.head(key)
        except ObjectMissing:
            file = BytesIO()
            write(file)
            with contextlib.suppress(ObjectExists):
                publishing_store(self._place).put_large(key, [file.getvalue()])
        return self.store.head(key).size, digest_of(self.store, key)

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
        old_files = []
        for folder in (DATA, ""):
            for name in self._names_in(folder):
                found = self._instance_of(name)
                old = found is not None and found < instance + own
                old = old or (self._whose(name) or "").startswith("drop-")
                # A file of another namespace: only if it belongs to superseded generations alone.
                if (old or (folder == DATA and name in gone)) and name not in kept:
                    old_files.append(_key(folder, name))
        self._try_remove(old_files)
        with contextlib.suppress(OSError):
            for folder in ("", DATA):
                self.store.delete_incomplete(folder, older_than=INCOMPLETE)
        # Generations are removed last: if this call is interrupted, they still name the files to remove.
        self._try_remove(map(_generation_key, superseded))

    def _names_in(self, folder: str) -> Sequence[str]:
        """The names of files and folders (with a slash) in a folder of the index, without its own two folders."""
        return [name for name in _names(self.store, folder) if folder or name not in (f"{DATA}/", f"{GENERATIONS}/")]

    def _remove(self, keys: Iterable[str]) -> None:
        """Remove files and folders (with a slash) of the index. Raises UnsafePath and OSError."""
        files = []
        for key in keys:
            if key.endswith("/"):
                self.store.delete_folder(key[:-1])
            else:
                files.append(key)
        self.store.delete_many(files)

    def _try_remove(self, keys: Iterable[str]) -> None:
        """Remove files if possible; the next sweep retries it."""
        with contextlib.suppress(OSError):
            self._remove(keys)

    def scratch(self, instance: int) -> Place:
        """A temporary folder for an operation. Does not create it."""
        return self._place.below(self.own(f"catch-up-{instance}-{uuid.uuid4().hex}"))

    def last_build(self) -> int:
        """The highest instance of an operation of this namespace that has files here, or 0."""
        found = [0]
        for folder in (DATA, ""):
            found += [n for name in self._names_in(folder) if (n := self._instance_of(name)) is not None]
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
                raise Superseded(f"the index at {self.location} was built again after this drop had ended")
            with contextlib.suppress(Superseded):
                self.publish(Generation(newest.number + 1, operation, dropped=True, published=time.time()))
        former = [number for number in self._numbers() if newest is not None and number < newest.number]
        named = self._named_by(former)
        for folder in (DATA, ""):
            self._empty(folder, builds, named)
            self.store.delete_incomplete(folder)
        # Generations are removed last: if this attempt is interrupted, they still name the files to remove.
        self._remove(map(_generation_key, former))
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

    def _empty(self, folder: str, builds: int, named: set[str]) -> None:
        """Remove the files of drops, and of builds of this namespace up to ``builds``, in a folder.

        Files of other namespaces are removed only if they are in ``named``: files of generations before the drop.
        """
        for name in self._names_in(folder):
            found = self._instance_of(name)
            others = self._whose(name) is None and _OF_ANOTHER.fullmatch(name)
            if (found is not None and found > builds) or (others and name not in named):
                continue
            self._remove([_key(folder, name)])


def _key(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _generation_key(number: int) -> str:
    return f"{GENERATIONS}/{number:06}.json"


def _names(store: ObjectStore, folder: str) -> Sequence[str]:
    """The names of files and folders (with a slash) in a folder. Raises UnsafePath and OSError."""
    found = store.list_folder(folder)
    return [*(f"{name}/" for name in found.folders), *(one.key.rpartition("/")[2] for one in found.objects)]


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


def digest_of(store: ObjectStore, key: str) -> str:
    """The digest of a file. Raises OSError, and UnsafePath if it is no regular file."""
    with store.open(key) as opened:
        return hashlib.file_digest(opened.file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()  # type: ignore[arg-type]
