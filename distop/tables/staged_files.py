"""The staged files of one attempt at a replacement: their folder below the table's data, record, and decision.

An attempt that has written all files writes their record, and then *offers* them: it creates the decision. Whoever
removes the files of an attempt must create the decision first. The store lets only one of them create it. So offered
files are never removed, and removed files are never committed, whatever a slow or paused process does later.

The end of the operation may remove offered files that no commit can add any more. It *withdraws* the offer first, and
then reads the table. A commit loads the table first, and then looks for the offer. So a process that has seen the offer
has loaded a state that is not newer than the one that was read: it commits before that, or is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from distop.errors import InvalidArgument, UnsafePath, describe
from distop.protocol.frozen import frozen
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.opened_stores import store_of
from distop.storage.places import STAGE, make_stage
from distop.storage.store_errors import ObjectExists, ObjectMissing, UnknownWrite
from distop.tables.commits import Replacement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distop.runtime.logs import Log

FOLDER = "distop-staged"
RECORD, DECISION, OPEN = "staged.json", "decision", "open"
_RECORD_BYTES = 64 << 20
OFFERED, WITHDRAWN = "offered", "withdrawn"
_DECISION_BYTES = 64
_TRIES = 3


@frozen
class StagedFiles:
    """The two folders of an attempt. ``place``: with record and decision. ``data``: with the new files."""

    place: Place
    data: Place

    @classmethod
    def of(cls, place: Place, shared: Place, space: str, folder: str) -> StagedFiles:
        """The stage at a place in the shared directory. ``folder``: the one of a table's data.

        Raises UnsafePath if the place is not below the folder of stages.
        """
        inner = place.path.removeprefix(f"{shared.path}/" if shared.path else "").removeprefix(f"{STAGE}/")
        if place.anchor != shared.anchor or place != shared.below(f"{STAGE}/{inner}"):
            raise UnsafePath(f"{place.location} is not a stage in {shared.location}")
        return cls(place, Place(folder, "/".join(filter(None, (FOLDER, space, inner)))))

    def begin(self) -> None:
        """Create the stage, before its first file. Raises FileExistsError if it exists, UnsafePath and OSError."""
        make_stage(self.place)
        store_of(self.place).put_new(OPEN, b"")

    def offer(self, replacement: Replacement) -> str | None:
        """Write the record, and decide that the files may be committed; returns the record's digest.

        None if another process has discarded the stage, or the operation has ended. Raises OSError.
        """
        store_of(self.place).put(RECORD, replacement.record.encode())
        if self.decide("offered") != "offered" or not self._is_open():
            return None
        return replacement.record_digest

    def decide(self, wanted: Literal["offered", "discarded"]) -> str:
        """Create the decision, unless there is one; returns the one that holds. Raises OSError."""
        store = store_of(self.place)
        for left in reversed(range(_TRIES)):
            try:
                store.put_new(DECISION, wanted.encode())
                return wanted
            except (ObjectExists, UnknownWrite):
                found = self.decision()
                if found is not None:
                    return found
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def decision(self) -> str | None:
        """The decision; None if there is none yet. Raises OSError."""
        try:
            return store_of(self.place).get(DECISION, limit=_DECISION_BYTES).data.decode()
        except ObjectMissing:
            return None

    @property
    def is_offered(self) -> bool:
        """Whether the files may be committed. Raises OSError."""
        return self.decision() == OFFERED and self._is_open()

    def offered(self, *, withdrawn: bool = False) -> Replacement | None:
        """The replacement, if its files may be committed; None if other users may have written it. Raises OSError.

        ``withdrawn``: also if its offer was withdrawn.
        """
        try:
            deletion.check_own(self.place)
        except UnsafePath:
            return None
        if self.decision() not in (OFFERED, *((WITHDRAWN,) if withdrawn else ())) or not self._is_open():
            return None
        try:
            return Replacement.from_json(json.loads(store_of(self.place).get(RECORD, limit=_RECORD_BYTES).data), self)
        except (ObjectMissing, ValueError, KeyError, TypeError):
            return None

    def discard(self, log: Log) -> bool:
        """Remove the files, unless they were offered; returns whether they are removed. Errors are logged.

        The decision stays until :meth:`forget`: without it, a slow process of the attempt could still offer its files.
        A stage that was forgotten keeps them: it may have been offered, and they may be in the table.
        """
        try:
            if self.decide("discarded") != "discarded" or not self._is_open():
                return False
            _remove(self.data)
            store_of(self.place).delete_many([RECORD])
        except (OSError, InvalidArgument) as error:
            log.warning("Cannot remove the staged files %s; retrying later: %s", self.data.location, describe(error))
            return False
        return True

    def withdraw(self) -> None:
        """Withdraw the offer: commits that load the table from now on leave the files out. Raises OSError."""
        store_of(self.place).put(DECISION, WITHDRAWN.encode())

    def remove_withdrawn(self, log: Log) -> bool:
        """Remove files that certainly are in no commit, and that none can add any more. Errors are logged.

        The offer must be withdrawn before the state of the table was read that shows this.
        """
        try:
            _remove(self.data)
            store_of(self.place).delete_many([RECORD])
        except (OSError, InvalidArgument) as error:
            log.warning("Cannot remove the staged files %s; retrying later: %s", self.data.location, describe(error))
            return False
        return True

    def _is_open(self) -> bool:
        """Whether the stage was not forgotten: its decision was not removed before this process has created one."""
        try:
            store_of(self.place).head(OPEN)
            return True
        except ObjectMissing:
            return False

    def remove(self, names: Iterable[str]) -> None:
        """Remove new files that are not needed, by their names, before the files are offered. Raises OSError."""
        store_of(self.data).delete_many(names)

    def forget(self, log: Log) -> None:
        """Remove the stage at the end of its operation. The files stay. Errors are logged."""
        try:
            store_of(self.place).delete_many([OPEN])  # before the decision: see discard
            _remove(self.place)
        except (OSError, InvalidArgument) as error:
            log.warning("Cannot remove the stage %s; retrying later: %s", self.place.location, describe(error))


def _remove(place: Place) -> None:
    """Remove a folder of an attempt, and those of its job and its operation if they are empty."""
    job = place.parent
    store_of(job.parent.parent).delete_folder(f"{job.parent.name}/{job.name}/{place.name}")


def stages_below(place: Place) -> Iterator[Place]:
    """The stages in the folder of an operation. Raises UnsafePath and OSError."""
    for name in jobs_below(place):
        yield from stages_of(place, name)


def jobs_below(place: Place) -> Sequence[str]:
    """The names of the jobs with stages in the folder of an operation. Raises UnsafePath and OSError."""
    return store_of(place).list_folder().folders


def stages_of(place: Place, name: str) -> Iterator[Place]:
    """The stages of the attempts at one job. Raises UnsafePath and OSError."""
    for attempt in store_of(place).list_folder(name).folders:
        yield place.below(f"{name}/{attempt}")
