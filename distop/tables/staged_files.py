"""The staged files of one attempt at a replacement: their folder below the table's data, record, and decision.

An attempt that has written all files writes their record, and then *offers* them: it creates the decision. Whoever
removes the files of an attempt must create the decision first. The store lets only one of them create it. So offered
files are never removed, and removed files are never committed, whatever a slow or paused process does later.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Literal

from distop.errors import InvalidArgument, UnsafePath, describe
from distop.protocol.frozen import frozen
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.opened_stores import store_of
from distop.storage.places import STAGE
from distop.storage.store_errors import ObjectExists, ObjectMissing, UnknownWrite
from distop.tables.commits import Replacement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distop.runtime.logs import Log

FOLDER = "distop-staged"
RECORD, DECISION = "staged.json", "decision"
_RECORD_BYTES = 64 << 20
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

    def offer(self, replacement: Replacement) -> str | None:
        """Write the record, and decide that the files may be committed; returns the record's digest.

        None if another process has discarded the stage. Raises OSError.
        """
        text = json.dumps(replacement.to_json(), sort_keys=True).encode()
        store_of(self.place).put(RECORD, text)
        if self.decide("offered") != "offered":
            return None
        return hashlib.blake2b(text, digest_size=16).hexdigest()

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

    def offered(self) -> Replacement | None:
        """The replacement, if its files may be committed; None if other users may have written it. Raises OSError."""
        try:
            deletion.check_own(self.place)
        except UnsafePath:
            return None
        if self.decision() != "offered":
            return None
        try:
            return Replacement.from_json(json.loads(store_of(self.place).get(RECORD, limit=_RECORD_BYTES).data), self)
        except (ObjectMissing, ValueError, KeyError, TypeError):
            return None

    def discard(self, log: Log) -> bool:
        """Remove the files, unless they were offered; returns whether they are removed. Errors are logged.

        The decision stays until :meth:`forget`: without it, a slow process of the attempt could still offer its files.
        """
        try:
            if self.decide("discarded") != "discarded":
                return False
            _remove(self.data)
            store_of(self.place).delete_many([RECORD])
        except (OSError, InvalidArgument) as error:
            log.warning("Cannot remove the staged files %s; retrying later: %s", self.data.location, describe(error))
            return False
        return True

    def withdraw(self, log: Log) -> bool:
        """Remove offered files that certainly are in no commit, and that none can add any more. Errors are logged."""
        try:
            _remove(self.data)
            store_of(self.place).delete_many([RECORD])
        except (OSError, InvalidArgument) as error:
            log.warning("Cannot remove the staged files %s; retrying later: %s", self.data.location, describe(error))
            return False
        return True

    def remove(self, names: Iterable[str]) -> None:
        """Remove new files that are not needed, by their names, before the files are offered. Raises OSError."""
        store_of(self.data).delete_many(names)

    def forget(self, log: Log) -> None:
        """Remove the stage at the end of its operation. The files stay. Errors are logged."""
        try:
            _remove(self.place)
        except (OSError, InvalidArgument) as error:
            log.warning("Cannot remove the stage %s; retrying later: %s", self.place.location, describe(error))


def _remove(place: Place) -> None:
    """Remove a folder of an attempt, and those of its job and its operation if they are empty."""
    job = place.parent
    store_of(job.parent.parent).delete_folder(f"{job.parent.name}/{job.name}/{place.name}")


def stages_below(place: Place) -> Iterator[Place]:
    """The stages in the folder of an operation. Raises UnsafePath and OSError."""
    store = store_of(place)
    for name in store.list_folder().folders:
        yield from stages_of(place, name)


def stages_of(place: Place, name: str) -> Iterator[Place]:
    """The stages of the attempts at one job. Raises UnsafePath and OSError."""
    for attempt in store_of(place).list_folder(name).folders:
        yield place.below(f"{name}/{attempt}")
