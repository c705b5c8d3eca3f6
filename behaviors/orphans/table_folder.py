"""The folder of a table whose orphans are removed: its store, its needed files, and its quarantine."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop.protocol.records import OperationRef
from distop.protocol.texts import shown
from distop.storage.confinement import resolved
from distop.storage.deletion import Place
from distop.storage.deletion_scope import OWN, DeletionScope
from distop.storage.files import local_path
from distop.storage.opened_stores import has_store, store_of
from distop.storage.places import operation_path
from distop.tables import reachability_of
from distop_behaviors.orphans.needed_files import NeededFiles
from distop_behaviors.orphans.other_tables import normal_places, spellings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from distop.behavior import JobContext, TableRecord
    from distop.storage.object_store import ObjectStore
    from distop.tables.reachability import Reachability

QUARANTINE = "quarantine"
T = TypeVar("T")


class TablePlace:
    """A table's own folder, opened to move or remove files there. It does not read the table's metadata.

    :class:`TableFolder` also knows which files the metadata name. ``others``: the folders of other tables. Raises
    InvalidArgument for a store in which distop deletes nothing, and UnsafePath for a folder that is not the table's
    alone.
    """

    def __init__(self, place: str, ctx: JobContext, others: Sequence[str] = ()) -> None:
        self.place = str(local_path(place) or place.rstrip("/"))
        self._ctx = ctx
        if not has_store(self.place):
            raise InvalidArgument(
                f"{shown(self.place)} is in a store in which distop deletes no files: it does so in local folders, S3, "
                "GCS and Azure"
            )
        for one in reversed(spellings_of(self.place)):
            self.scope = DeletionScope(one, others)
        self.store: ObjectStore = store_of(Place(self.place))

    def key_of(self, path: str) -> str:
        """The key of a file in :attr:`store`. Raises UnsafePath if it may not be deleted."""
        return self.scope.key_of(path)

    def path_of(self, key: str) -> str:
        """The path or URL of a file."""
        return f"{self.place}/{key}"

    @property
    def quarantine(self) -> str:
        """The folder in :attr:`store` with all quarantined files of this namespace."""
        return quarantine_path(self._ctx.space)

    def quarantined_key_of(self, path: str) -> str:
        """The key of a file in :attr:`quarantine`. Raises UnsafePath for any other path."""
        start = f"{self.path_of(self.quarantine)}/"
        if not path.startswith(start):
            raise UnsafePath(f"{shown(path)} is not a file of the quarantine {start}: it is not deleted")
        self.scope.check(path[len(start) :])
        return f"{self.quarantine}/{path[len(start) :]}"

    def quarantine_of(self, operation: str) -> str:
        """The folder in :attr:`store` with the files that an operation has moved."""
        return quarantine_path(self._ctx.space, operation)


class TableFolder(TablePlace):
    """A table's own folder together with its metadata, which say which of the files there the table needs.

    Folders of plain files have no such metadata. Raises InvalidArgument for a table that cannot have orphans, or whose
    files must not be deleted, and the errors of :class:`TablePlace` and of planning.
    """

    def __init__(self, table: TableRecord, ctx: JobContext, others: Sequence[str] = ()) -> None:
        self._table = table
        self._ctx = ctx
        self._seen: set[str] = set()
        self.reachability = self._read()
        super().__init__(self.reachability.place, ctx, others)

    def needed(self, *, keep_unknown: bool, only: Collection[str] | None = None) -> NeededFiles:
        """The files that the metadata name now. See :class:`NeededFiles`. Raises the errors of planning."""
        found = NeededFiles(normal_places(self.place), resolved, keep_unknown=keep_unknown, only=only)
        self.add_new(found, self.reachability)
        return found

    def changed(self) -> Reachability | None:
        """What the metadata name now, if they have changed since the last look; None otherwise.

        Raises InvalidArgument if the table has moved, and the errors of planning.
        """
        found = self._read()
        if found.state == self.reachability.state:
            return None
        if found.place != self.reachability.place:
            raise InvalidArgument(
                f"the table {self._table.name!r} has moved from {shown(self.reachability.place)} to "
                f"{shown(found.place)}: start the operation again"
            )
        self.reachability = found
        return found

    def add_new(self, needed: NeededFiles, found: Reachability) -> None:
        """Add the files that these metadata name. Parts that were added before are not read again."""
        for one in (*found.roots(), *found.named()):
            needed.add(one.path)
        for folder in found.kept_folders:
            needed.add_folder(folder)
        for unit in found.units():
            if unit.name in self._seen:
                continue
            self._ctx.check_cancelled()
            for file in found.files(unit, removed=True):
                needed.add(file.path)
            self._seen.add(unit.name)

    def add_existing(self, needed: NeededFiles, state: Reachability) -> None:
        """Add the files that another state of the table names, as far as its metadata exist."""
        for one in (*state.roots(), *state.named()):
            needed.add(one.path)
        for version in state.versions():
            for unit in _existing(state.units({version.id})):
                if unit.name not in self._seen:
                    self._ctx.check_cancelled()
                    for file in _existing(state.files(unit, removed=True)):
                        needed.add(file.path)
                    self._seen.add(unit.name)

    def _read(self) -> Reachability:
        found = reachability_of(self._table, self._ctx.check_cancelled, lambda: self._ctx.spark)
        found.check_lists_files(self._table.name)
        if found.protected:
            raise InvalidArgument(f"nothing of the table {self._table.name!r} is deleted: {found.protected}")
        return found


def _existing(found: Iterator[T]) -> Iterator[T]:
    """What is found until a file of the metadata is missing."""
    try:
        yield from found
    except TableUnavailable as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


def quarantine_path(space: str, operation: str = "") -> str:
    """The folder below a table's own with the files that an operation of a namespace, or any, has moved."""
    return "/".join(filter(None, (OWN, QUARANTINE, space, operation_path(operation) if operation else "")))


def operation_of(text: str, table: str, type_name: str) -> str:
    """The name of an operation of this table and type. Raises InvalidArgument for any other text."""
    ref = OperationRef.parse(text)
    if (ref.table, ref.type) != (table, type_name):
        raise InvalidArgument(f"{shown(text)} is not a {type_name} of the table {table!r}")
    return str(ref)
