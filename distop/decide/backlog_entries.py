"""The entries of an executor's backlog, one for each open operation: their states as a table that is executed, and the
instructions that the backlog gives. Pure; times are seconds of a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from distop.errors import DistopError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef


class EntryState(StrEnum):
    """What an executor has to do for an operation."""

    ABSENT = "absent"
    NEW = "new"
    """It has one job, and nobody here has looked at it: it is claimed together with others."""
    READY = "ready"
    """It may have jobs to claim."""
    CLAIMING = "claiming"
    """A round for it is under way."""
    CLOSING = "closing"
    """Its gate went while a round was under way."""
    DRY = "dry"
    """The last look found nothing to claim."""
    LEFT = "left"
    """Others have its job."""
    TAKEN = "taken"
    """All of its jobs are claimed here, or have ended here."""
    CLOSED = "closed"
    """Its gate is gone, and jobs of it are held here."""


class EntryEvent(StrEnum):
    """What happens to an entry."""

    OPEN = "open"
    OPEN_NEW = "open_new"
    BEGIN = "begin"
    """A round begins. MORE, NOTHING, LOST, ALL: it is over, and there may be more to claim; nothing is; others have it;
    all is claimed here."""
    MORE = "more"
    NOTHING = "nothing"
    LOST = "lost"
    ALL = "all"
    AGAIN = "again"
    """There may be something to claim: a hint, a time that has come, a job that waits again, another gate."""
    CLOSE = "close"
    GONE = "gone"
    """Its gate is gone, and nothing of it is held."""


_S, _E = EntryState, EntryEvent
BACKLOG_TABLE: Mapping[EntryState, Mapping[EntryEvent, EntryState]] = {
    _S.ABSENT: {_E.OPEN: _S.READY, _E.OPEN_NEW: _S.NEW},
    _S.NEW: {_E.BEGIN: _S.CLAIMING, _E.AGAIN: _S.READY, _E.CLOSE: _S.CLOSED},
    _S.READY: {_E.BEGIN: _S.CLAIMING, _E.AGAIN: _S.READY, _E.ALL: _S.TAKEN, _E.CLOSE: _S.CLOSED},
    _S.CLAIMING: {
        _E.MORE: _S.READY,
        _E.NOTHING: _S.DRY,
        _E.LOST: _S.LEFT,
        _E.ALL: _S.TAKEN,
        _E.AGAIN: _S.CLAIMING,
        _E.CLOSE: _S.CLOSING,
    },
    _S.CLOSING: {
        _E.OPEN: _S.CLAIMING,
        _E.AGAIN: _S.CLOSING,
        _E.MORE: _S.CLOSED,
        _E.NOTHING: _S.CLOSED,
        _E.LOST: _S.CLOSED,
        _E.ALL: _S.CLOSED,
    },
    _S.DRY: {_E.AGAIN: _S.READY, _E.ALL: _S.TAKEN, _E.CLOSE: _S.CLOSED},
    _S.LEFT: {_E.AGAIN: _S.READY, _E.CLOSE: _S.CLOSED},
    _S.TAKEN: {_E.AGAIN: _S.READY, _E.ALL: _S.TAKEN, _E.CLOSE: _S.CLOSED},
    _S.CLOSED: {_E.OPEN: _S.READY, _E.AGAIN: _S.CLOSED, _E.ALL: _S.CLOSED, _E.GONE: _S.ABSENT},
}
"""Where each event leads an entry. What is not here does not happen: the backlog raises."""


class Reason(StrEnum):
    """Why an executor does not serve an operation before a time."""

    CHANGED = "changed"
    """What was compared is not as it was seen."""
    ERROR = "error"
    MISSING = "missing"
    """There are no records behind its gate."""
    UNREADABLE = "unreadable"
    REJECTED = "rejected"
    """etcd rejects a claim of it as invalid, even alone: the node record tells it."""


FIRST_PAUSE = 0.5
LONGEST_PAUSES: Mapping[Reason, float] = {
    Reason.CHANGED: 30.0,
    Reason.ERROR: 30.0,
    Reason.MISSING: 600.0,
    Reason.UNREADABLE: 120.0,
}
"""Seconds of back-off, first and longest. Records that cannot be read stay so until a person mends them, or a later
release is installed; those that are missing come within moments, by a watch that lags, or never."""


@dataclass(slots=True)
class Trouble:
    """Back-off after an operation could not be served here. It goes when the operation is served again, or goes."""

    reason: Reason
    pause: float = 0.0
    until: float = 0.0
    rejected: bool = False
    """etcd rejected a claim of it, and has not accepted one since."""
    run: bool = False
    """Its jobs could be claimed, and not run."""


@dataclass(slots=True)
class Entry:
    """What an executor keeps of one open operation to schedule it."""

    ref: OperationRef
    gate: Gate
    gate_mod: int
    since: float
    """Since when it waits: it was seen first, or served last."""
    state: EntryState = EntryState.ABSENT
    count: int = 0
    """How many jobs it has; 0: it was not read yet."""
    batch: bool = False
    held: set[int] = field(default_factory=set)
    """Jobs that are claimed here."""
    ended: int = 0
    """Jobs that ended here."""
    lost: bool = False
    """Others had its job: it is looked at before the next claim."""
    again: bool = False
    """There may be something to claim that the round under way does not see."""
    due: float | None = None
    """When it is looked at again, where nothing was to claim; None: at the poll."""
    full: float = 0.0
    """Seconds of the last pause because no more of its jobs may run."""
    trouble: Trouble | None = None
    round: Round | None = None

    def happens(self, event: EntryEvent) -> None:
        """Go where the table leads. Raises InvalidEvent where it leads nowhere."""
        after = BACKLOG_TABLE[self.state].get(event)
        if after is None:
            raise InvalidEvent(f"{self.ref} is {self.state}: {event} leads nowhere")
        self.state = after

    @property
    def crowded(self) -> bool:
        """As many of its jobs are held here as one executor may hold."""
        return 0 < self.gate.options.max_jobs_per_executor <= len(self.held)

    @property
    def busy_with_batch(self) -> bool:
        """One batch of an operation at a time: it has all cores already, and others share the rest."""
        return self.batch and bool(self.held)

    @property
    def all_taken(self) -> bool:
        """Nothing is left to claim: its jobs are held here, or have ended here."""
        return 0 < self.count <= len(self.held) + self.ended


class InvalidEvent(DistopError):
    """An event that the state of an entry does not allow: a defect of distop."""


# ---------------------------------------------------------------- instructions


@dataclass(slots=True, eq=False)
class Round:
    """Claim jobs of these operations; the backlog waits for its end. ``jobs``: of what was not read yet, which jobs to
    claim together with the reading (none: look first). Those of several operations run in turn, in one slot.
    """

    refs: tuple[OperationRef, ...]
    jobs: Mapping[OperationRef, Sequence[int]]
    slots: int
    """Slots that it has taken so far."""
    rank: int = 0
    until: float = 0.0
    """So long those wait for it that are less urgent."""
    borrowed: bool = False
    """Some of them fall to other executors."""
    over: dict[OperationRef, EntryEvent] = field(default_factory=dict)
    """How it ends for each; MORE where nothing is said."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run these held jobs in one slot: those of an operation together, several operations in turn."""

    jobs: tuple[tuple[OperationRef, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Give these held jobs back: they shall not start any more."""

    ref: OperationRef
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the jobs of it that are held here: the operation is closed, or this executor is ``draining``."""

    ref: OperationRef
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """The operation is gone, or paused: nothing of it is held here."""

    ref: OperationRef


@dataclass(frozen=True, slots=True)
class Accepted:
    """etcd does not reject claims of the operation as invalid any more, or it is gone."""

    ref: OperationRef


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to begin for so many seconds (None: until an event)."""

    seconds: float | None


Instruction: TypeAlias = Round | Run | Release | Stop | Forget | Accepted | Wait


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at an operation showed. ``room``: how many jobs more may be claimed for all that limits them;
    ``suspects``: seconds until it is this executor's turn to fall quiet for each of its suspects, soonest first, where
    nothing else may be claimed; ``due``: when something is due.
    """

    open_jobs: int
    room: int
    suspects: Mapping[int, float] = field(default_factory=dict)
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """A round may claim: for so many slots, or (``alone``) one job that runs alone in its executor."""

    slots: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Got:
    """What a round brought of one operation. ``refused``: what was compared is not as it was seen; ``failed``: not all
    of it could be done; ``open_jobs``: what is left to claim, as far as known.
    """

    won: tuple[int, ...] = ()
    refused: bool = False
    failed: bool = False
    open_jobs: int = 0
