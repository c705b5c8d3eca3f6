"""Replaces files of a plain folder in several steps, which any process can finish after a crash.

A folder has no commit that replaces several files at once. So an *entry* in the hidden folder ``_distop/swap`` first
names the old files and the staged new ones. Then

1. the new files are moved to their final names, each at once and never over another file;
2. the old files are compared with the entry again, and a *decision* is created: forward, or back if a writer has
   changed or removed one of them;
3. forward deletes the old files that are unchanged; back removes the new ones, by their content;
4. a *mark* shows that the entry is finished, and the entry is removed.

Entries have numbers, and the store lets only one process create a number or a decision. A process that finds an
unfinished entry finishes it before anything else, so at most one is unfinished. The highest mark stays: it shows a slow
process that its number is over. A staged file that was moved is gone, so a slow process cannot move it again. Between
steps 1 and 3 readers of the folder find the rows of these files twice, but never no rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from distop.errors import InvalidArgument, TableUnavailable, UnsafePath
from distop.protocol.frozen import frozen
from distop.storage.deletion import Place, components
from distop.storage.deletion_scope import OWN, DeletionScope
from distop.storage.files import local_path
from distop.storage.object_store import PART, Listed
from distop.storage.opened_stores import has_store, store_of
from distop.storage.store_errors import ObjectExists, ObjectMissing, StoreError, StoreUnavailable, unavailable
from distop.tables.commits import Conflict
from distop.tables.staged_files import FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distop.storage.location import Location
    from distop.storage.object_store import ObjectStore, StoredObject

log = logging.getLogger("distop.tables")

SWAP = f"{OWN}/swap"
"""The hidden folder below a table with entries, decisions and marks."""
STAGED = f"{OWN}/{FOLDER}"
"""The hidden folder below a table with staged files."""
FORWARD, BACK = "forward", "back"
_NAME = re.compile(
    r"(?P<number>[0-9]{9})(?:\.(?P<kind>entry|decision)|\.(?P<way>forward|back)"
    r"\.(?P<operation>[0-9a-f]{24})\.(?P<group>[0-9]+)\.(?P<digest>[0-9a-f]{16})\.done)"
)
_LONGEST = 64 << 20
_ABANDONED = 86_400.0
"""Seconds after which a file that is not complete was left by a killed process."""
_PAGE = 500
"""Old files that are deleted together."""


class SwappedFile(NamedTuple):
    """A file of an entry: its name, size, stamp (``StoredObject.stamp``), and SHA-256 if it is new."""

    name: str
    size: int
    stamp: int | str
    sha256: str = ""


@frozen
class SwapEntry:
    """What an entry replaces.

    ``operation`` and ``fence``: who made it; ``identity``: a digest of the operation and its namespace. ``digest``: of
    the new files. ``folder``: of the files, below the table; ``source``: of the staged ones.
    """

    operation: str
    identity: str
    fence: str
    group: int
    digest: str
    folder: str
    source: str
    removed: tuple[SwappedFile, ...]
    added: tuple[SwappedFile, ...]

    def to_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in (*_TEXTS, "group")}
        return {**found, "removed": [list(one) for one in self.removed], "added": [list(one) for one in self.added]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], scope: DeletionScope) -> SwapEntry:
        """Raises UnsafePath for a file that is not in the folder of the table, and KeyError, TypeError, ValueError."""
        texts = {name: str(data[name]) for name in _TEXTS}
        files = [
            tuple(SwappedFile(str(one[0]), int(one[1]), one[2], str(one[3])) for one in data[name])
            for name in ("removed", "added")
        ]
        found = cls(**texts, group=int(data["group"]), removed=files[0], added=files[1])
        found.check(scope)
        return found

    def check(self, scope: DeletionScope) -> None:
        """Raises UnsafePath for a file that may not be replaced or added."""
        for one in (*self.removed, *self.added):
            if len(components(one.name)) != 1:
                raise InvalidArgument(f"an entry in {SWAP} names {one.name!r}, which is not a file in one folder")
            scope.check(self.target(one))
        if components(self.source)[: len(STAGED.split("/"))] != STAGED.split("/"):
            raise InvalidArgument(f"an entry in {SWAP} names the folder {self.source!r}, which has no staged files")

    def target(self, one: SwappedFile) -> str:
        """The key of a file below the table's folder."""
        return f"{self.folder}/{one.name}" if self.folder else one.name


_TEXTS = ("operation", "identity", "fence", "digest", "folder", "source")


class Finished(NamedTuple):
    """A finished entry, by its mark."""

    number: int
    way: str
    identity: str
    group: int
    digest: str


@frozen
class SwapState:
    """The names in the folder of entries. ``top``: the highest number; ``unfinished``: the entry to finish, or None."""

    top: int
    unfinished: int | None
    finished: tuple[Finished, ...]
    names: frozenset[str]


NO_SWAPS = SwapState(0, None, (), frozenset())


class FolderSwaps:
    """The entries of one table. ``root``: the table's folder, a path or a URL."""

    def __init__(self, root: str, check: Callable[[], None]) -> None:
        self._root = root
        self._check = check
        self._scope = DeletionScope(root)
        self.table: ObjectStore = store_of(Place(root))
        self._swaps: ObjectStore = store_of(Place(root, SWAP))

    def state(self) -> SwapState:
        """The current state. Raises OSError."""
        return _state_of(self._swaps)

    def settle(self) -> SwapState:
        """Finish the unfinished entry; returns the state without one. Raises OSError, and InvalidArgument."""
        while True:
            state = self.state()
            if state.unfinished is None:
                return state
            self._check()
            entry = self._read(state.unfinished)
            if entry is not None:
                self._finish(state.unfinished, entry)

    def swap(self, number: int, entry: SwapEntry) -> str:
        """Replace the files of an entry; returns FORWARD, or BACK if a writer has changed them meanwhile.

        ``number``: one more than the highest one, which was read before the old files were compared. Raises Conflict if
        another entry has this number, or a higher one, and OSError.
        """
        entry.check(self._scope)
        try:
            self._swaps.put_new(f"{number:09}.entry", json.dumps(entry.to_json()).encode())
        except ObjectExists:
            raise Conflict(f"another process has begun to replace files of {self._root}") from None
        # A slow process may have created a number that is over, whose entry was removed.
        if self.state().unfinished != number:
            raise Conflict(f"another process has replaced files of {self._root} meanwhile")
        way = self._finish(number, entry)
        if way is None:
            raise Conflict(f"another process has replaced files of {self._root} meanwhile")
        return way

    def forget(self, wanted: Callable[[Finished], bool]) -> None:
        """Remove marks, and what crashed processes have left of finished entries. The highest mark stays."""
        state = self.state()
        last = max((one.number for one in state.finished), default=0)
        names = {one: _name_of(one) for one in state.finished}
        gone = [names[one] for one in state.finished if one.number < last and wanted(one)]
        gone += [name for name in state.names if name not in names.values() and _number_of(name) <= last]
        self._swaps.delete_many(gone)
        self._swaps.delete_incomplete(older_than=_ABANDONED)

    def files_in(self, folder: str) -> dict[str, StoredObject]:
        """The files of a folder of the table, by name. Raises OSError."""
        return {one.key.rpartition("/")[2]: one for one in self.table.list_folder(folder).objects}

    # ---------------------------------------------------------------------- the steps

    def _read(self, number: int) -> SwapEntry | None:
        """An unfinished entry; None if it was finished meanwhile. Raises InvalidArgument if it is damaged."""
        name = f"{number:09}.entry"
        try:
            data = json.loads(self._swaps.get(name, limit=_LONGEST).data)
            return SwapEntry.from_json(data, self._scope)
        except ObjectMissing:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidArgument(
                f"the entry {self._swaps.location_of(name)} of an interrupted compaction cannot be read: {error}"
            ) from error

    def _finish(self, number: int, entry: SwapEntry) -> str | None:
        """Do the steps of an entry that are left; returns its decision, None if it was finished meanwhile."""
        placed = self._place(entry)
        wanted = FORWARD if placed and self._is_unchanged(entry) else BACK
        decision = self._decide(number, wanted)
        # Another process may have finished the entry and removed its decision: then its mark is there.
        if self._is_over(number):
            return None
        if decision == FORWARD:
            self._delete_old(entry)
        else:
            self._remove_new(entry)
        mark = Finished(number, decision, entry.identity, entry.group, entry.digest)
        with suppress(ObjectExists):
            self._swaps.put_new(_name_of(mark), json.dumps({"operation": entry.operation}).encode())
        self._swaps.delete_many([f"{number:09}.decision", f"{number:09}.entry"])
        return decision

    def _is_over(self, number: int) -> bool:
        return any(one.number >= number for one in self.state().finished)

    def _place(self, entry: SwapEntry) -> bool:
        """Move the staged files to their final names; returns whether none has failed."""
        moves = {Listed(f"{entry.source}/{one.name}", one.size, one.stamp): entry.target(one) for one in entry.added}
        try:
            moved = self.table.move_listed(moves)
        except StoreUnavailable:
            raise
        except StoreError as error:
            log.warning("Cannot move new files into %s, so its old files stay: %s", self._root, error)
            return False
        if moved.failed or moved.changed:
            why = next(iter(moved.failed.values()), "it has changed since it was written")
            log.warning("Cannot move a new file into %s, so its old files stay: %s", self._root, why)
        # A missing one was moved by another process, or removed because it went back.
        return not moved.failed and not moved.changed

    def _is_unchanged(self, entry: SwapEntry) -> bool:
        """Whether the folder has all old files as they were read, and all new files as they were written."""
        found = self.files_in(entry.folder)
        for one in entry.removed:
            mine = found.get(one.name)
            if mine is None or (mine.size, mine.stamp) != (one.size, one.stamp):
                return False
        return all(
            (mine := found.get(one.name)) is not None and self._is_equal(entry, one, mine) for one in entry.added
        )

    def _is_equal(self, entry: SwapEntry, one: SwappedFile, found: StoredObject) -> bool:
        if found.size != one.size:
            return False
        if found.stamp == one.stamp:
            return True
        try:  # some stores give a copy another version
            return sha256_of(self.table, entry.target(one)) == one.sha256
        except ObjectMissing:
            return False  # removed since it was listed

    def _decide(self, number: int, wanted: str) -> str:
        name = f"{number:09}.decision"
        try:
            self._swaps.put_new(name, wanted.encode())
            return wanted
        except ObjectExists:
            try:
                return self._swaps.get(name, limit=64).data.decode()
            except ObjectMissing:
                return wanted  # the entry is over, as the caller finds out

    def _delete_old(self, entry: SwapEntry) -> None:
        """Delete the old files that are still those of the entry. Raises TableUnavailable if some cannot be deleted."""
        listed = [Listed(entry.target(one), one.size, one.stamp) for one in entry.removed]
        for at in range(0, len(listed), _PAGE):
            removed = self.table.remove_listed(listed[at : at + _PAGE])
            if removed.failed:
                key, why = next(iter(removed.failed.items()))
                raise TableUnavailable(
                    f"cannot delete the old file {self.table.location_of(key)}, whose rows are in new files now, so "
                    f"readers find them twice: {why}. Allow it, and start compact again"
                )
            for key in removed.changed:
                log.warning(
                    "A writer has replaced %s while compact did; its former rows are in a new file",
                    self.table.location_of(key),
                )
        self._delete_checksums(entry)

    def _delete_checksums(self, entry: SwapEntry) -> None:
        """Delete the checksum files that Hadoop writes beside files on a disk, of old files that are gone."""
        if local_path(self._root) is None:
            return
        found = self.files_in(entry.folder)
        names = (f".{one.name}.crc" for one in entry.removed if one.name not in found)
        prefix = f"{entry.folder}/" if entry.folder else ""
        self.table.delete_many([f"{prefix}{name}" for name in names if name in found])

    def _remove_new(self, entry: SwapEntry) -> None:
        """Remove the new files: first the staged ones, so that no slow process can move them any more.

        A file of the same name with other content belongs to a writer, and stays. Raises TableUnavailable if a new file
        cannot be removed.
        """
        self.table.delete_many([f"{entry.source}/{one.name}" for one in entry.added])
        found = self.files_in(entry.folder)
        present = [(one, found[one.name]) for one in entry.added if one.name in found]
        mine = [Listed(entry.target(one), at.size, at.stamp) for one, at in present if self._is_equal(entry, one, at)]
        for key in {entry.target(one) for one, _ in present} - {one.key for one in mine}:
            log.warning("Keeping %s, which compact has not written", self.table.location_of(key))
        removed = self.table.remove_listed(mine)
        if removed.failed:
            key, why = next(iter(removed.failed.items()))
            raise TableUnavailable(
                f"cannot remove the new file {self.table.location_of(key)}, whose rows are in old files too, so "
                f"readers find them twice: {why}. Allow it, and start compact again"
            )


def state_at(location: Location) -> SwapState:
    """The state of the table at a location. Raises TableUnavailable."""
    if not has_store(location.root):
        return NO_SWAPS
    try:
        return _state_of(store_of(Place(location.root, SWAP)))
    except UnsafePath:
        return NO_SWAPS  # a link, below which nothing is written either
    except OSError as error:
        raise unavailable(f"the folder {SWAP} of {location.text!r} cannot be listed: {error}", error) from error


def _state_of(swaps: ObjectStore) -> SwapState:
    names = frozenset(found.key for found in swaps.list_folder().objects)
    matches = [found for name in names if (found := _NAME.fullmatch(name)) is not None]
    finished = tuple(
        Finished(int(one["number"]), one["way"], one["operation"], int(one["group"]), one["digest"])
        for one in matches
        if one["way"]
    )
    last = max((one.number for one in finished), default=0)
    entries = max((int(one["number"]) for one in matches if one["kind"] == "entry"), default=0)
    return SwapState(max(entries, last), entries if entries > last else None, finished, names)


def check_settled(state: SwapState, location: str) -> None:
    """Raises TableUnavailable if files of the folder are being replaced, so that a listing has rows twice."""
    if state.unfinished is not None:
        raise TableUnavailable(
            f"compact is replacing files of {location}, so some rows are there twice: wait for it; if it was "
            "interrupted, start it again, which finishes this"
        )


def sha256_of(store: ObjectStore, key: str) -> str:
    """The SHA-256 of a file. Raises OSError."""
    digest = hashlib.sha256()
    with store.open(key) as opened:
        while piece := opened.file.read(PART):
            digest.update(piece)
    return digest.hexdigest()


def _name_of(one: Finished) -> str:
    return f"{one.number:09}.{one.way}.{one.identity}.{one.group}.{one.digest}.done"


def _number_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found["number"]) if found is not None else 1 << 62


def names_of(files: Sequence[Sequence[Any]]) -> tuple[SwappedFile, ...]:
    """The files of a record."""
    return tuple(SwappedFile(str(one[0]), int(one[1]), one[2], str(one[3])) for one in files)
