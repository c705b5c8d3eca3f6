"""Where an index lies, and how a state of it becomes the current one.

``<table>/_distop/index/<name>/`` holds ``generations/NNNNNN.json``, one file for each state of the index, and ``data/``
with the Parquet files that these name. A file system compares nothing, so that all rests on one thing that it does:
a file gets a name that no other has, or none. Generations are numbered; the current one is that of the highest number;
each is made whole beside, and linked to its number, which fails where another was quicker. The current generation is
never removed, not even by a drop, which adds a last one that says so. Thus whoever comes late, with a number that was
taken and swept since, publishes nothing that anybody reads.

Files under ``data/`` are never changed; those that a generation names are only removed once it is superseded.

An index belongs to its table. Where two namespaces or etcd clusters build the same one, their generations share one
sequence of numbers: of two that publish at once one is refused, and tries again from the other's. The names of files
tell their namespace, which removes no file of another one unless a superseded generation has named it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
import uuid
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from distop.errors import InvalidArgument, UnsafePath
from distop.protocol.frozen import frozen
from distop.protocol.texts import shown
from distop.storage.deletion import Place, components, delete, made_folder, names, new_file, write
from distop.storage.deletion import check_unlinked as _check_unlinked
from distop.storage.files import METADATA_BYTES, open_regular, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import pyarrow as pa

VERSION = 2
GRACE = 600.0
"""Seconds for which what a generation names is kept after another one took its place: a lookup may be reading it."""

_NUMBERED = re.compile(r"([0-9]{6}|[1-9][0-9]{6,17})\.json")
_LISTINGS = 100
"""How often a newest generation may be swept between its listing and its reading."""
_OF_OPERATION = re.compile(r"(?:catch-up-)?(\d+)-.+")
"""What an operation writes begins with its instance, after what tells its namespace."""
_OF_ANOTHER = re.compile(r"[0-9a-f]+\.(?:catch-up-|drop-)?.+")
"""What an operation of another namespace writes."""


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


MAX_FILES = 50_000_000
"""Numbers that an index gives to files, one generation after the other: each takes four bytes where it is built."""
MAX_POSTINGS = 10**13
"""In the runs of an index: a build counts to the number of runs that they make."""


@frozen
class Generation:
    """A state of an index. ``families``: of its columns, None where no file has the column; ``schema``: the columns of
    the files that it covers (name, Spark type); ``files`` names the list of these files; ``operation`` has made it, and
    ``build`` tells it from others of that name, in another etcd or namespace; ``ids``: what its columns are told by
    from others that have their names some day (``table_files.identities``).
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
        data["files"] = _named(data["files"]) if data["files"] else None
        data["runs"] = tuple(map(_named, data["runs"]))
        data["schema"] = tuple((name, _type(kind)) for name, kind in data["schema"])
        for name in ("columns", "families"):
            data[name] = tuple(data[name])
        if type(data["next_file"]) is not int or not 0 <= data["next_file"] <= MAX_FILES:
            raise ValueError(f"it has numbered {shown(data['next_file'])} files, and at most {MAX_FILES} are numbered")
        rows = [one.rows for one in data["runs"]]
        if any(type(number) is not int or number < 0 for number in rows) or sum(rows) > MAX_POSTINGS:
            raise ValueError(f"its runs have {shown(rows)} postings, and at most {MAX_POSTINGS} are merged")
        return cls(**data)


def _named(data: Any) -> Named:
    """Raises ValueError for a name that leads out of ``data``."""
    found = Named(**data)
    try:
        if len(components(found.name)) == 1:
            return found
    except UnsafePath:
        pass
    raise ValueError(f"{found.name!r} is no name of a file")


def _type(kind: Any) -> Any:
    """A Spark type out of JSON, whose arrays are tuples here."""
    if not isinstance(kind, list):
        return kind
    if kind[0] == "struct":
        return ("struct", tuple((name, _type(inner)) for name, inner in kind[1]))
    return (kind[0], *(_type(inner) if kind[0] != "unreadable" else inner for inner in kind[1:]))


class Folder:
    """The folder of one index. What reads it works without a lock, at any time. ``space``: of who writes it, as
    :attr:`JobContext.space`.
    """

    def __init__(self, location: str, name: str, space: str = "") -> None:
        self._place = Place(location, f"_distop/index/{name}")
        self._space = space
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
        """The generation of the highest number, be it a drop. Raises InvalidArgument for one that cannot be read."""
        for _ in range(_LISTINGS):
            numbers = self._numbers()
            if not numbers:
                return None
            with contextlib.suppress(FileNotFoundError):  # superseded, and swept, since it was listed
                return self._read(numbers[-1])
        raise InvalidArgument(f"the index file {self._path(numbers[-1])} cannot be read: it is listed, and not there")

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
                raise ValueError(f"it says that it is number {shown(found.number)}")
            return found
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidArgument(f"the index file {path} cannot be read: {e}") from e

    def _path(self, number: int) -> Path:
        return self._generations / f"{number:06}.json"

    def is_whole(self, generation: Generation) -> bool:
        """All that it names is there, and none of it was cut off."""
        try:
            found = (((self.data / one.name).lstat(), one.size) for one in generation.named())
            return all(stat.S_ISREG(now.st_mode) and now.st_size == size for now, size in found)
        except FileNotFoundError:
            return False

    def own(self, name: str) -> str:
        """The name of a file that an operation writes, by its namespace."""
        return f"{self._space}.{name}" if self._space else name

    def _whose(self, name: str) -> str | None:
        """What this namespace calls a file of its own; None: it is another's, or nobody's."""
        prefix = self.own("")
        return name[len(prefix) :] if name.startswith(prefix) else None

    def _instance_of(self, name: str) -> int | None:
        """The instance of the operation of this namespace that has written a file."""
        found = _OF_OPERATION.fullmatch(self._whose(name) or "")
        return int(found[1]) if found else None

    def check_unlinked(self) -> None:
        """Raises UnsafePath where a link leads to the index, or to its files."""
        for folder in ("data", "generations"):
            _check_unlinked(self._place.below(folder))

    def check_writable(self) -> None:
        """Raises InvalidArgument where no index can be put here, UnsafePath where a link leads elsewhere."""
        self.check_unlinked()
        try:
            for folder in ("data", "generations"):
                with made_folder(self._place.below(folder)):
                    pass
            probe = self.data / f".probe-{uuid.uuid4().hex}"
            write(self._place, f"data/{probe.name}", b"")
            self._delete(probe)
        except OSError as e:
            raise InvalidArgument(
                f"the folder {self.root} cannot be written ({e.strerror or e}): an index lies beside its table"
            ) from e

    def publish(self, generation: Generation) -> None:
        """Make it the current one. Raises Superseded where its number is taken, UnsafePath and OSError."""
        path = self._path(generation.number)
        # A drop's is told from those of builds, which are counted apart.
        whose = "drop" if generation.dropped else generation.operation.rpartition("/")[2]
        scratch = self.data / self.own(f"{whose}-generation.new-{uuid.uuid4().hex}")
        try:
            write(self._place, f"data/{scratch.name}", generation.to_json().encode())
            self._link(scratch, path)
        finally:
            self._delete(scratch)

    def _delete(self, path: Path) -> bool:
        """Remove something of the index; whether it was there. Raises UnsafePath and OSError."""
        return delete(self._place, path.relative_to(self.root).as_posix())

    def _link(self, scratch: Path, path: Path) -> None:
        """Give a data file another name, if that is free. Raises Superseded, UnsafePath and OSError."""
        place = self._place.below(path.parent.relative_to(self.root).as_posix())
        with made_folder(self._place.below("data")) as data, made_folder(place) as folder:
            try:
                os.link(scratch.name, path.name, src_dir_fd=data, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                raise Superseded(f"the name {path} is taken") from None
            os.fsync(folder)

    def add(self, name: str, write: Callable[[BinaryIO], None]) -> tuple[int, str]:
        """Have ``write`` make a data file, and give it its name; one that has the name already stays, and is taken
        instead. Its size and digest. Raises what ``write`` does, and leaves nothing of it then.
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
        """Remove what was superseded more than ``grace`` seconds ago, and what operations of this namespace
        before ``instance`` left unnamed. ``own``: also what this one did not publish. What cannot be removed is left
        for the next time.
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
                # Of another namespace: only what a generation has named, and none names any more.
                if (old or (folder == self.data and path.name in gone)) and path.name not in kept:
                    self._try_delete(path)
        # Last: what only they name is found by them.
        for number in superseded:
            self._try_delete(self._path(number))

    def _list(self, folder: Path) -> list[Path]:
        inner = folder.relative_to(self.root).as_posix()
        return [folder / name for name in names(self._place if inner == "." else self._place.below(inner))]

    def _try_delete(self, path: Path) -> None:
        """Left for the next time where that cannot be done."""
        with contextlib.suppress(OSError):
            self._delete(path)

    def scratch(self, instance: int) -> Place:
        """A folder for what an operation needs on the way; not made yet."""
        return self._place.below(self.own(f"catch-up-{instance}-{uuid.uuid4().hex}"))

    def last_build(self) -> int:
        """The highest instance of an operation of this namespace that has written here; 0 where there is
        none.
        """
        found = [0]
        for folder in (self.data, self.root):
            found += [n for path in self._list(folder) if (n := self._instance_of(path.name)) is not None]
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
        former = [number for number in self._numbers() if newest is not None and number < newest.number]
        named = self._named_by(former)
        for folder in (self.data, self.root):
            self._empty(folder, builds, named)
        # Last: what only they name is found by them.
        for number in former:
            self._delete(self._path(number))
        with contextlib.suppress(OSError):
            delete(self._place, "data", only_empty=True)
        return newest is not None and newest.operation == operation and newest.number > after

    def _goes_on(self, after: int, until: int) -> bool:
        """None of the generations behind ``after``, as far as this one, is a drop, or is gone as with a drop."""
        try:
            return not any(self._read(number).dropped for number in range(after + 1, until + 1))
        except FileNotFoundError:
            return False

    def _named_by(self, numbers: Iterable[int]) -> set[str]:
        found: set[str] = set()
        for number in numbers:
            with contextlib.suppress(FileNotFoundError, InvalidArgument):
                found.update(one.name for one in self._read(number).named())
        return found

    def _empty(self, folder: Path, builds: int, named: set[str]) -> None:
        """Remove what builds of this namespace up to this one, and drops, have left in a folder; of what
        others write, that which the generations before the drop have named.
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
    """A Parquet file with statistics and checksums of its pages. Raises OSError; the caller removes the file then."""
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
    """Of a regular file's bytes. Raises OSError."""
    with open_regular(str(path), follow=False) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
