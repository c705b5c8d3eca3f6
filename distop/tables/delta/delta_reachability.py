"""The files that the log of a Delta table names: data files, change data, deletion vectors, and removed files.

A removed file counts while a commit or a checkpoint of the log names it: readers of an older version need it until
VACUUM deletes it. So nothing that the log names is ever an orphan.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol.texts import shown
from distop.storage.store_errors import unavailable
from distop.tables.delta import checkpoints
from distop.tables.delta.deletion_vectors import vector_of
from distop.tables.delta.delta_log import COMMIT, commit, lines, snapshot_of
from distop.tables.delta.log_files import LogFiles
from distop.tables.delta.metadata_commit import KNOWN as WRITER_FEATURES
from distop.tables.delta.metadata_commit import check_writable, configuration
from distop.tables.delta.table_paths import LOG, SIDECARS, data_path
from distop.tables.reachability import CHECKPOINT, DATA, DELETES, Reachability, ReadableVersion, TableFile, Unit
from distop.tables.reachability import LOG as LOG_KIND
from distop.tables.reading.file_facts import Gone

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from distop.tables.delta.delta_log import DeltaSnapshot

UNIT_COMMITS = 100
"""Maximum commits of a unit."""
KNOWN = WRITER_FEATURES | {"inCommitTimestamp", "inCommitTimestamp-preview"}
"""The writer features with which the log names all files of a table by the actions that are read here."""
_OTHER_FORMATS = "delta.universalFormat.enabledFormats"
_COORDINATOR = "delta.coordinatedCommits.commitCoordinator-preview"
_COMMITS = re.compile(r"commits ([0-9]{1,20})-([0-9]{1,20})")
_CHECKPOINT = "checkpoint "
_IN_LOG = re.compile(r"\.?([0-9]{20}\..+|_last_checkpoint(\.crc)?|_last_vacuum_info(\.crc)?)")
"""Names of files in a log, with the checksums of Hadoop's local file system."""


def check_deletable(snapshot: DeltaSnapshot) -> None:
    """Raises InvalidArgument for a table with files that its log does not name, or whose writers are not known."""
    check_writable(snapshot, KNOWN, "delete its files with Delta's VACUUM")
    properties = configuration(snapshot)
    for name in (_OTHER_FORMATS, _COORDINATOR):
        if properties.get(name):
            raise InvalidArgument(
                f"the Delta table {snapshot.root!r} has the property {name}, so it has files that its log does not "
                "name: delete its files with Delta's VACUUM"
            )


class DeltaReachability(Reachability):
    """The files that the log names at a version."""

    def __init__(self, snapshot: DeltaSnapshot, check: Callable[[], None] = lambda: None) -> None:
        """Raises InvalidArgument for a table with files that its log does not name."""
        check_deletable(snapshot)
        self.place = snapshot.root
        self.source = snapshot.source
        self.kept_folders = (f"{snapshot.root.rstrip('/')}/{LOG}",)
        self._check = check
        self._names = LogFiles(snapshot.root).names()
        self._last = snapshot.version
        commits = {int(found[1]) for found in map(COMMIT.fullmatch, self._names) if found}
        self._commits = sorted(number for number in commits if number <= self._last)

    @classmethod
    def of(cls, source: str, check: Callable[[], None]) -> DeltaReachability:
        """The files that the log names at the version of the commit ``source``.

        Raises InvalidArgument, and TableUnavailable, also if the log no longer has the version.
        """
        try:
            return cls(snapshot_of(source, check), check)
        except Gone as error:
            raise unavailable(str(error), error) from error

    def versions(self) -> Sequence[ReadableVersion]:
        """The versions that the log can rebuild; files of some may be vacuumed."""
        found = [number for number in self._commits if number >= self._base()]
        return [ReadableVersion(str(number)) for number in found or (self._last,)]

    def roots(self) -> Iterator[TableFile]:
        """The log, and last what the current version needs.

        Its commits come newest first, and then its checkpoint: what is left of them is an older version of the table.
        """
        log, base = LogFiles(self.place), checkpoints.newest(self._names, self._last)
        names = [name for name in self._names if _IN_LOG.fullmatch(name)]
        names += [f"{SIDECARS}/{name}" for name in (_names_in_sidecars(self.place) if SIDECARS in self._names else ())]

        def place_in_order(name: str) -> tuple[int, int]:
            found = COMMIT.fullmatch(name)
            if base is None:
                return (1, -int(found[1])) if found else (0, 0)
            if name in base.names:
                return 4, 0
            if name.startswith(f"{SIDECARS}/"):
                return 3, 0
            if found is None or int(found[1]) < base.version:
                return 0, 0
            return (2, 0) if int(found[1]) == base.version else (1, -int(found[1]))

        for name in sorted(names, key=lambda name: (place_in_order(name), name)):
            checkpoint = ".checkpoint." in name or name.startswith(f"{SIDECARS}/")
            yield TableFile(log.path(name), CHECKPOINT if checkpoint else LOG_KIND)

    def named(self, versions: Collection[str] | None = None) -> Iterator[TableFile]:
        return iter(())

    def units(self, versions: Collection[str] | None = None) -> Iterator[Unit]:
        """Checkpoints and commits; all of them, because each version is built from many."""
        for one in self._checkpoints():
            for name in one.names:
                yield Unit(f"{_CHECKPOINT}{name}", CHECKPOINT)
        for first, last in self._runs():
            for at in range(first, last + 1, UNIT_COMMITS):
                yield Unit(f"commits {at}-{min(last, at + UNIT_COMMITS - 1)}", LOG_KIND)

    def files(self, unit: Unit, *, removed: bool = False) -> Iterator[TableFile]:
        log = LogFiles(self.place)
        seen: set[str] = set()
        for action in self.actions(unit, log):
            for found in named(self.place, action, log):
                if found.path not in seen:
                    seen.add(found.path)
                    yield found

    def actions(self, unit: Unit, log: LogFiles) -> Iterator[Mapping[str, Any]]:
        """The actions of a unit, also those of removed files. Raises InvalidArgument and TableUnavailable."""
        try:
            if unit.name.startswith(_CHECKPOINT):
                name = unit.name.removeprefix(_CHECKPOINT)
                one = checkpoints.Checkpoint(0, (name,))
                yield from checkpoints.actions(one, log, lines, self._check, removes=True)
                return
            first, last = _range(unit)
            for number in range(first, last + 1):
                self._check()
                yield from commit(LogFiles(self.place), number)
        except (FileNotFoundError, Gone) as error:
            raise unavailable(f"the log of the Delta table {self.place!r} was cleaned up: {error}", error) from error

    def _base(self) -> int:
        """The first version that the log can rebuild, if no commit after it is missing."""
        first = self._runs()[-1][0] if self._commits else self._last
        if first == 0:
            return 0
        return min((one.version for one in self._found() if one.version >= first - 1), default=first)

    def _found(self) -> list[checkpoints.Checkpoint]:
        return checkpoints.complete(self._names, self._last)

    def _checkpoints(self) -> list[checkpoints.Checkpoint]:
        """The checkpoints with files that no commit names: that of the first version, and those before it.

        Later checkpoints have only files of that one, and of commits. If commits are missing, all checkpoints.
        """
        base = self._base()
        if len(self._runs()) > 1:
            return self._found()
        return [one for one in self._found() if one.version <= base] if base else []

    def _runs(self) -> list[tuple[int, int]]:
        """The commits as ranges of consecutive versions."""
        runs: list[tuple[int, int]] = []
        for number in self._commits:
            if runs and runs[-1][1] + 1 == number:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs


def _range(unit: Unit) -> tuple[int, int]:
    found = _COMMITS.fullmatch(unit.name)
    if found is None:
        raise InvalidArgument(f"{shown(unit.name)} is not a part of a Delta log: start the operation again")
    return int(found[1]), int(found[2])


def _names_in_sidecars(root: str) -> Iterable[str]:
    from distop.storage.location import Location

    return Location.of(root).names_in(f"{LOG}/{SIDECARS}")


def named(root: str, action: Mapping[str, Any], log: LogFiles) -> Iterator[TableFile]:
    """The files that an action names. Raises InvalidArgument for a file that may not belong to the table."""
    for kind in ("add", "remove", "cdc"):
        found = action.get(kind)
        if not found:
            continue
        if not isinstance(found, dict):
            raise InvalidArgument(f"the log of the Delta table {root!r} has an invalid {kind}")
        size = found.get("size")
        yield TableFile(data_path(root, found.get("path"), log.files), DATA, size if isinstance(size, int) else None)
        vector = found.get("deletionVector")
        if vector:
            if not isinstance(vector, dict):
                raise InvalidArgument(f"the log of the Delta table {root!r} has an invalid deletionVector")
            path = vector_of(root, vector, log.files).path
            if path:
                yield TableFile(path, DELETES)
