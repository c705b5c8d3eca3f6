"""The files that a table's metadata reach: the interface :class:`Reachability`, which each format implements.

Operations that delete files of a table use it. The table's own folder is not listed: only its metadata decide. A folder
of Parquet files has no metadata, so there the listing is the table; a Delta log is listed, because its names are
metadata.

The work is divided: :meth:`Reachability.units` lists parts of the metadata, such as manifests, and each part is read
alone (:meth:`Reachability.files`), so that jobs can share them. A unit has only texts, so that a plan can hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from distop.errors import InvalidArgument
from distop.protocol.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

DATA, DELETES = "data", "deletes"
MANIFEST, MANIFEST_LIST, METADATA, STATISTICS = "manifest", "manifest-list", "metadata", "statistics"
LOG, CHECKPOINT = "log", "checkpoint"
INDEX, CERTIFICATE = "index", "certificate"
KINDS = (DATA, DELETES, MANIFEST, MANIFEST_LIST, METADATA, STATISTICS, LOG, CHECKPOINT, INDEX, CERTIFICATE)
"""The kinds of files. ``index`` and ``certificate`` are distop's own: no format lists them."""


@frozen
class TableFile:
    """A file of a table.

    ``path``: as the metadata spell it, or below the folder of the record; ``size``: in bytes, None if unknown.
    ``optional``: nothing is wrong if the table does not have it.
    """

    path: str
    kind: str
    size: int | None = None
    optional: bool = False


@frozen
class Unit:
    """A part of the metadata that names files: a manifest, some commits of a log, a checkpoint, or a folder.

    ``name``: its path or range, unique in the table; ``kind``: of the files in it, or of the part itself; ``size``: its
    bytes, a measure of the work.
    """

    name: str
    kind: str
    size: int = 0

    def to_json(self) -> list[str | int]:
        """The unit as JSON."""
        return [self.name, self.kind, self.size]

    @classmethod
    def of_json(cls, found: Sequence[str | int]) -> Unit:
        """The unit from :meth:`to_json`."""
        name, kind, size = found
        return cls(str(name), str(kind), int(size))


@frozen
class ReadableVersion:
    """A version of the table that can still be read: an Iceberg snapshot or a Delta version.

    ``time``: when it was committed, in seconds since 1970, None if unknown; ``refs``: the branches and tags at it.
    """

    id: str
    time: float | None = None
    refs: tuple[str, ...] = ()


class Reachability(ABC):
    """The files that one state of a table's metadata reach: all its versions, branches and tags.

    A file may be found more than once: in several units, or as a unit's file and elsewhere. Methods that read files
    raise InvalidArgument for invalid metadata and for a file that may not belong to the table, and TableUnavailable if
    a file of the metadata is missing or cannot be read: then nothing may be deleted, because the answer is incomplete.
    """

    place: str
    """The table's own folder, a path or a URL."""
    source: str
    """The metadata file or commit of this state, which opens the same state again; "" if the format has none."""
    protected: str = ""
    """Why files of the table may not be deleted, whatever its metadata reach: a clause. "": they may."""
    kept_folders: tuple[str, ...] = ()
    """Folders of which all files count as reachable, because only the format's writers clean them up: a Delta log."""

    @property
    def state(self) -> str:
        """An identifier of this state, which another state of the table does not have: :attr:`source`."""
        return self.source

    def check_lists_files(self, table: str) -> None:
        """Raises InvalidArgument if no metadata list the files of the table of this name."""
        if not self.source:
            raise InvalidArgument(
                f"the table {table!r} has no metadata that list its files, so every file in its folder is part of it: "
                "only Iceberg and Delta tables have orphans"
            )

    @abstractmethod
    def versions(self) -> Sequence[ReadableVersion]:
        """The versions that can still be read, oldest first; empty if the format has none."""

    @abstractmethod
    def roots(self) -> Iterator[TableFile]:
        """The files through which readers find all others: metadata files, or the log.

        They are deleted last, in this order: those that a reader needs to open the table come at the end.
        """

    @abstractmethod
    def named(self, versions: Collection[str] | None = None) -> Iterator[TableFile]:
        """The files that roots name, except units: manifest lists and statistics. ``versions``: only those of these."""

    @abstractmethod
    def units(self, versions: Collection[str] | None = None) -> Iterator[Unit]:
        """The parts of the metadata that name data files, each once. ``versions``: only those of these versions."""

    @abstractmethod
    def files(self, unit: Unit, *, removed: bool = False) -> Iterator[TableFile]:
        """The unit's own files, and all files that it names.

        ``removed``: also files that the unit lists as removed from its version.
        """

    def history(self) -> Iterator[TableFile]:
        """Metadata files that are older than those of :meth:`roots`, as far as a chain of them still exists."""
        return iter(())

    def other_states(self, paths: Sequence[str]) -> Iterator[Reachability]:
        """States of the table that this one does not know, from further metadata files in the table's folder.

        ``paths``: the metadata files that are neither roots nor named. Their states may be current for another catalog,
        or their commits may have failed. Raises InvalidArgument if one is of another table, and TableUnavailable if one
        cannot be read.
        """
        return iter(())

    def all_files(self, *, removed: bool = False) -> Iterator[TableFile]:
        """All reachable files, each path once, read by this process: leaves first, roots last."""
        seen: set[str] = set()

        def new(files: Iterable[TableFile]) -> Iterator[TableFile]:
            for file in files:
                if file.path not in seen:
                    seen.add(file.path)
                    yield file

        for unit in self.units():
            yield from new(self.files(unit, removed=removed))
        yield from new(self.named())
        yield from new(self.roots())


def in_groups(units: Iterable[Unit], *, size: int, count: int) -> Iterator[list[Unit]]:
    """Units in groups of at most ``count`` units and, with more than one unit, ``size`` bytes: one group for a job."""
    group: list[Unit] = []
    bytes_ = 0
    for unit in units:
        if group and (bytes_ + unit.size > size or len(group) >= count):
            yield group
            group, bytes_ = [], 0
        group.append(unit)
        bytes_ += unit.size
    if group:
        yield group
