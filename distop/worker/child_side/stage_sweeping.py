"""Removes staged output that nothing names: of attempts that have lost their claims, and of ended operations.

A stage is found by its name: the operation, the partition, and the fence and incarnation of its attempt. When all jobs
have ended, no further outcome can name a stage. So those that outcomes do not name belong to dead attempts. If users
read stages, only these are removed then, and the others together with the history record of the operation; else all are
removed after its end (``Behavior.staged_output``). A killed process may write after that. So the stages are looked for
again when the record is removed.

Files of a stage may be at their final place, below the table. They are removed only if no version of the table names
them: also a dead attempt may have committed its files before it died.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

from distop.errors import InvalidArgument, TableUnavailable, UnsafePath, describe
from distop.protocol.frozen import frozen
from distop.protocol.records import OperationRef
from distop.storage.deletion import Place
from distop.storage.files import local_path
from distop.storage.opened_stores import store_of
from distop.storage.places import (
    COMPLETION,
    IN_TABLE,
    STAGE,
    TABLE_MARKER,
    folder,
    instances,
    operation_path,
    remove_place_or_log,
    series_of,
)
from distop.storage.store_errors import ObjectMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from distop.protocol.records import TableRecord
    from distop.runtime.logs import Log
    from distop.storage.object_store import ObjectStore
    from distop.tables import Spark

_MOST_ESCAPES = 3
"""Maximum number of times that a path is percent-encoded, by the metadata of a table and by distop."""


@frozen
class Swept:
    """What was removed: the number of stages, and the bytes of their files."""

    stages: int = 0
    bytes: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(self.stages + other.stages, self.bytes + other.bytes)


@frozen
class _Stage:
    """A stage that was found. ``in_table``: it may have files in the table."""

    key: str
    bytes: int
    in_table: bool

    @property
    def of_attempt(self) -> bool:
        return not self.key.startswith(f"{COMPLETION}/")


def sweep_ended(sweeper: Callable[[str], StageSweeper], op: str, shared: Place, *, earlier: bool, log: Log) -> Swept:
    """Remove all stages of an ended operation.

    ``sweeper``: returns that of an operation. ``earlier``: also those of earlier operations of the same table, type and
    object, which have ended too: killed processes may have written them.
    """
    ref, numbers = OperationRef.parse(op), list[int]()
    if earlier:
        try:
            numbers = instances(series_of(shared, op), ref.instance - 1)
        except (OSError, InvalidArgument) as error:
            log.warning("Cannot list the stages of earlier operations; retrying later: %s", describe(error))
    swept = Swept()
    for number in (*numbers, ref.instance):
        swept += sweeper(str(replace(ref, instance=number))).remove_all()
    return swept


class StageSweeper:
    """Removes the stages of one operation. Errors are logged: what is left is found when the record is removed.

    ``shared``: the shared directory. ``table``: the operation's, None if it has none. ``check`` raises to stop.
    """

    def __init__(
        self,
        op: str,
        shared: Place,
        space: str,
        table: TableRecord | None,
        *,
        check: Callable[[], None],
        spark: Spark,
        log: Log,
    ) -> None:
        self._op = op
        self._space = space
        self._table = table
        self._check = check
        self._spark = spark
        self._log = log
        self._path = operation_path(op)
        self._root = shared.below(STAGE)
        """The folder of all stages: emptied folders below it are removed as well."""

    def remove_unnamed(self, named: Mapping[int, tuple[int, str]]) -> Swept:
        """Remove the stages of dead attempts. Call it when all jobs have ended.

        ``named``: fence and incarnation of the attempt of each outcome, by partition. Stages of completions stay.
        """
        kept = {f"{partition:06d}/{fence}-{folder(name)}" for partition, (fence, name) in named.items()}
        swept = Swept()
        for stage in self._found():
            if stage.of_attempt and stage.key not in kept:
                swept += self._removed(stage)
        return swept

    def remove_all(self, *, late: bool = False) -> Swept:
        """Remove all stages of the operation, which has ended.

        ``late``: also look for files in the table whose stage is gone, as a killed process may write them.
        """
        swept, found = Swept(), self._found()
        for stage in found:
            swept += self._removed(stage)
        if local_path(self._root.anchor) is not None and swept.stages == len(found):
            remove_place_or_log(self._root.below(self._path), self._log)  # empty folders
        if late:
            swept += self._left_in_table()
        return swept

    # ---------------------------------------------------------------- stages

    def _found(self) -> list[_Stage]:
        store, start = store_of(self._root), f"{self._path}/"
        try:
            if local_path(self._root.anchor) is not None:
                return [
                    _Stage(key, _bytes_below(store, start + key), _exists(store, f"{start}{key}/{TABLE_MARKER}"))
                    for key in _folders(store, self._path)
                ]
            sizes: dict[str, int] = {}
            marked = set[str]()
            for one in store.list(self._path):
                self._check()
                partition, _, rest = one.key.removeprefix(start).partition("/")
                key = f"{partition}/{rest.partition('/')[0]}"
                sizes[key] = sizes.get(key, 0) + one.size
                if one.key == f"{start}{key}/{TABLE_MARKER}":
                    marked.add(key)
            return [_Stage(key, size, key in marked) for key, size in sizes.items()]
        except (OSError, InvalidArgument) as error:
            self._log.warning("Cannot list the stages of %s; retrying later: %s", self._op, describe(error))
            return []

    def _removed(self, stage: _Stage) -> Swept:
        """Remove a stage, and its files in the table unless a version of the table names one of them."""
        self._check()
        size = stage.bytes
        try:
            if stage.in_table and not self._is_live(stage.key):
                size += self._removed_from_table(stage.key)
            store_of(self._root).delete_folder(f"{self._path}/{stage.key}")
        except (OSError, InvalidArgument, TableUnavailable) as error:
            self._log.warning(
                "Cannot remove the stage %s of %s; retrying later: %s", stage.key, self._op, describe(error)
            )
            return Swept()
        return Swept(1, size)

    # -------------------------------------------------------------- the table

    @cached_property
    def _data_root(self) -> Place:
        """The folder of all staged files in the table. Raises InvalidArgument, and the errors of planning."""
        from distop.tables import place_of

        if self._table is None:
            raise InvalidArgument("the operation has no table, but a stage with files in the table")
        location = place_of(self._table, self._check, self._spark).rstrip("/")
        return Place(location, f"{IN_TABLE}/{self._space}" if self._space else IN_TABLE)

    def _removed_from_table(self, key: str) -> int:
        """Remove the files of a stage in the table, and return their bytes. Raises the errors of ``_data_root``."""
        store, whole = store_of(self._data_root), f"{self._path}/{key}"
        size = _bytes_below(store, whole)
        store.delete_folder(whole)
        return size

    def _left_in_table(self) -> Swept:
        if self._table is None:
            return Swept()
        swept = Swept()
        try:
            for key in [*_folders(store_of(self._data_root), self._path)]:
                self._check()
                if not self._is_live(key):
                    swept += Swept(1, self._removed_from_table(key))
        except (OSError, InvalidArgument, TableUnavailable) as error:
            self._log.warning(
                "Cannot remove staged files of %s in table %s; leaving them: %s",
                self._op,
                self._table.name,
                describe(error),
            )
        return swept

    def _is_live(self, key: str) -> bool:
        """Whether a version of the table names a file of a stage. Raises InvalidArgument and TableUnavailable."""
        return any(one.startswith(f"{_plain(key)}/") for one in self._live)

    @cached_property
    def _live(self) -> frozenset[str]:
        """The files of this operation that a version of the table names, as paths below its folder in the table."""
        from distop.tables import reachability_of

        if self._table is None:
            return frozenset()
        start, found = f"{_plain(self._data_root.path)}/{_plain(self._path)}/", set[str]()
        for file in reachability_of(self._table, self._check, self._spark).all_files(removed=True):
            self._check()
            # Metadata may name the table's folder otherwise, by a link or another scheme, so only the end counts.
            _, inside, rest = _plain(file.path).partition(start)
            if inside:
                found.add(rest)
        return frozenset(found)


def _plain(path: str) -> str:
    """A path without escapes, so that differently encoded paths of one file are equal."""
    for _ in range(_MOST_ESCAPES):
        path = unquote(path)
    return path


def _folders(store: ObjectStore, path: str) -> Iterator[str]:
    """The stages in an operation's folder: ``<partition>/<attempt>``. Raises UnsafePath and OSError."""
    for partition in store.list_folder(path).folders:
        for attempt in store.list_folder(f"{path}/{partition}").folders:
            yield f"{partition}/{attempt}"


def _exists(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except (ObjectMissing, UnsafePath):
        return False
    return True


def _bytes_below(store: ObjectStore, key: str) -> int:
    """The bytes of the files in a folder, without those behind something that is not a regular file."""
    total = 0
    with suppress(UnsafePath):
        for one in store.list(key):
            total += one.size
    return total
