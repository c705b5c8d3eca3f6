"""Where an index lies, and how a state of it becomes the current one.

``<table>/_distop/index/<name>/`` holds ``generations/NNNNNN.json``, one file for each state of the index, and ``data/``
with the Parquet files that these name. A file system compares nothing, so that all rests on one thing that it does:
a file gets a name that no other has, or none. Generations are numbered; the current one is that of the highest number;
each is made whole beside, and linked to its number, which fails where another was quicker. The current generation is
never removed, not even by a drop, which adds a last one that says so. Thus whoever comes late, with a number that was
taken and swept since, publishes nothing that anybody reads.

Files under ``data/`` are never changed; those that a generation names are only removed once it is superseded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.core.frozen import frozen
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa

VERSION = 2
GRACE = 600.0
"""Seconds for which what a generation names is kept after another one took its place: a lookup may be reading it."""

_NUMBERED = re.compile(r"(\d{6,})\.json")
_OF_OPERATION = re.compile(r"(?:catch-up-)?(\d+)-.+")
"""What an operation writes begins with its instance."""


class Superseded(Exception):
    """Another generation has the number."""


@frozen
class Named:
    """A Parquet file that a generation names: its name under ``data``, bytes, digest, rows. Of a run of postings, also
    the lowest and the highest key, and the level, in which no two runs overlap.
    """

    name: str
    size: int
    digest: str
    rows: int
    low: int = 0
    high: int = 0
    level: int = 0


@frozen
class Generation:
    """A state of an index. ``families``: of its columns, None where no file has the column; ``schema``: the columns of
    the files that it covers (name, Spark type); ``files`` names the list of these files; ``operation`` has made it, and
    ``build`` tells it from others of that name, in another etcd or namespace; ``ids``: the field ids of its columns in
    an Iceberg table, and their types in Spark's catalog, where names are given anew.
    """

    number: int
    operation: str = ""
    build: str = ""
    dropped: bool = False
    kind: str = ""
    columns: tuple[str, ...] = ()
    ids: Mapping[str, int | str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    families: tuple[str | None, ...] = ()
    schema: tuple[tuple[str, Any], ...] = ()
    table_version: str = ""
    published: float = 0.0
    files: Named | None = None
    runs: tuple[Named, ...] = ()
    next_file: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)

    def named(self) -> Iterator[Named]:
        """Every file that belongs to it."""
        if self.files is not None:
            yield self.files
        yield from self.runs

    def to_json(self) -> str:
        return json.dumps({"v": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Generation:
        """Raises ValueError, KeyError and TypeError for what is none."""
        data = json.loads(text)
        version = data.pop("v")
        if version > VERSION:
            raise ValueError("it was made by a later release of distop")
        if version < VERSION:
            raise ValueError("it was made by an earlier release of distop: remove the index's folder and build it anew")
        data["files"] = Named(**data["files"]) if data["files"] else None
        data["runs"] = tuple(Named(**run) for run in data["runs"])
        data["schema"] = tuple((name, _type(kind)) for name, kind in data["schema"])
        for name in ("columns", "families"):
            data[name] = tuple(data[name])
        return cls(**data)


def _type(kind: Any) -> Any:
    """A Spark type out of JSON, whose arrays are tuples here."""
    if not isinstance(kind, list):
        return kind
    if kind[0] == "struct":
        return ("struct", tuple((name, _type(inner)) for name, inner in kind[1]))
    return (kind[0], *(_type(inner) if kind[0] != "unreadable" else inner for inner in kind[1:]))


class Folder:
    """The folder of one index. What reads it works without a lock, at any time."""

    def __init__(self, location: str, name: str) -> None:
        self.root = Path(location) / "_distop" / "index" / name
        self.data = self.root / "data"
        self._generations = self.root / "generations"

    def current(self) -> Generation | None:
        """The current generation; None where there never was one, or the index was dropped. Raises InvalidArgument for
        one that cannot be read.
        """
        newest = self.newest()
        return None if newest is None or newest.dropped else newest

    def newest(self) -> Generation | None:
        """The generation of the highest number, be it a drop."""
        while True:
            numbers = self._numbers()
            if not numbers:
                return None
            with contextlib.suppress(FileNotFoundError):  # superseded, and swept, since it was listed
                return self._read(numbers[-1])

    def _numbers(self) -> list[int]:
        try:
            names = [path.name for path in self._generations.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name)))

    def _read(self, number: int) -> Generation:
        path = self._path(number)
        try:
            return Generation.from_json(path.read_text())
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidArgument(f"the index file {path} cannot be read: {e}") from e

    def _path(self, number: int) -> Path:
        return self._generations / f"{number:06}.json"

    def is_whole(self, generation: Generation) -> bool:
        """All that it names is there, and none of it was cut off."""
        try:
            return all((self.data / one.name).stat().st_size == one.size for one in generation.named())
        except FileNotFoundError:
            return False

    def check_writable(self) -> None:
        """Raises InvalidArgument where no index can be put here."""
        try:
            for folder in (self.data, self._generations):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.data / f".probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise InvalidArgument(
                f"the folder {self.root} cannot be written ({e.strerror or e}): an index lies beside its table"
            ) from e

    def publish(self, generation: Generation) -> None:
        """Make it the current one. Raises Superseded where its number is taken, and OSError."""
        for folder in (self._generations, self.data):
            folder.mkdir(parents=True, exist_ok=True)
        path = self._path(generation.number)
        # A drop's is told from those of builds, which are counted apart.
        whose = "drop" if generation.dropped else generation.operation.rpartition("/")[2]
        scratch = self.data / f"{whose}-generation.new-{uuid.uuid4().hex}"
        try:
            with scratch.open("w") as file:
                file.write(generation.to_json())
                file.flush()
                os.fsync(file.fileno())
            self._link(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    @staticmethod
    def _link(scratch: Path, path: Path) -> None:
        try:
            os.link(scratch, path)
        except FileExistsError:
            raise Superseded(f"the name {path} is taken") from None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def add(self, name: str, write: Callable[[Path], None]) -> tuple[int, str]:
        """Have ``write`` make a data file, and give it its name; one that has the name already stays, and is taken
        instead. Its size and digest. Raises what ``write`` does, and leaves nothing of it then.
        """
        self.data.mkdir(parents=True, exist_ok=True)
        path = self.data / name
        if not path.exists():
            scratch = self.data / f"{name}.new-{uuid.uuid4().hex}"
            try:
                write(scratch)
                with scratch.open("rb+") as file:
                    os.fsync(file.fileno())
                with contextlib.suppress(Superseded):
                    self._link(scratch, path)
            finally:
                scratch.unlink(missing_ok=True)
        return path.stat().st_size, digest_of(path)

    def sweep(self, instance: int, *, grace: float = GRACE, own: bool = False) -> None:
        """Remove what was superseded more than ``grace`` seconds ago, and what operations before ``instance`` left
        unnamed. ``own``: also what this one did not publish. What cannot be removed is left for the next time.
        """
        numbers = self._numbers()
        kept: set[str] = set()
        after: float | None = None
        for number in reversed(numbers):
            try:
                generation = self._read(number)
            except (FileNotFoundError, InvalidArgument):
                continue
            if after is not None and time.time() - after > grace:
                with contextlib.suppress(OSError):
                    self._path(number).unlink()
                continue
            kept.update(named.name for named in generation.named())
            after = generation.published
        for folder in (self.data, self.root):
            with contextlib.suppress(FileNotFoundError):
                for path in folder.iterdir():
                    found = _OF_OPERATION.fullmatch(path.name)
                    old = path.name.startswith("drop-") if found is None else int(found[1]) < instance + own
                    if old and path.name not in kept:
                        _remove(path)

    def scratch(self, instance: int) -> Path:
        """A folder for what an operation needs on the way; not made yet."""
        return self.root / f"catch-up-{instance}-{uuid.uuid4().hex}"

    def last_build(self) -> int:
        """The highest instance of an operation that has written here; 0 where there is none."""
        found = [0]
        for folder in (self.data, self.root):
            with contextlib.suppress(FileNotFoundError):
                found += [int(of[1]) for path in folder.iterdir() if (of := _OF_OPERATION.fullmatch(path.name))]
        return max(found)

    def drop(self, operation: str, after: int, builds: int) -> bool:
        """Remove the index: what says where it is first, then its files. Whether there was one; doing it twice is doing
        it once. ``after``: the newest generation when the operation was planned; one that an operation of the same name
        added before is not its own. ``builds``: the last build then. What later ones write is not touched, and no
        generation is added once there was a drop since: whoever comes late, beside a build that makes the index again,
        undoes nothing of it. Raises Superseded where that has happened, and OSError.
        """
        while (newest := self.newest()) is not None and not newest.dropped:
            if not self._goes_on(after, newest.number):
                raise Superseded(f"an index was made at {self.root} after this drop had ended")
            with contextlib.suppress(Superseded):
                self.publish(Generation(newest.number + 1, operation, dropped=True, published=time.time()))
        for number in self._numbers():
            if newest is not None and number < newest.number:
                self._path(number).unlink(missing_ok=True)
        for folder in (self.data, self.root):
            self._empty(folder, builds)
        with contextlib.suppress(OSError):
            self.data.rmdir()
        return newest is not None and newest.operation == operation and newest.number > after

    def _goes_on(self, after: int, until: int) -> bool:
        """None of the generations behind ``after``, as far as this one, is a drop, or is gone as with a drop."""
        try:
            return not any(self._read(number).dropped for number in range(after + 1, until + 1))
        except FileNotFoundError:
            return False

    def _empty(self, folder: Path, builds: int) -> None:
        """Remove what builds up to this one, and drops, have left in a folder."""
        with contextlib.suppress(FileNotFoundError):
            for path in folder.iterdir():
                found = _OF_OPERATION.fullmatch(path.name)
                if path in (self.data, self._generations) or (found and int(found[1]) > builds):
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Left for the next time where that cannot be done."""
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_parquet(table: pa.Table, path: Path, row_group: int, level: int = 3, **options: Any) -> None:
    """A Parquet file with statistics and checksums of its pages; nothing is left of one that could not be finished.
    Raises OSError.
    """
    import pyarrow.parquet as pq

    try:
        pq.write_table(
            table,
            path,
            row_group_size=row_group,
            compression="zstd",
            compression_level=level,
            write_statistics=True,
            write_page_index=True,
            write_page_checksum=True,
            **options,
        )
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def digest_of(path: Path) -> str:
    """Of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
