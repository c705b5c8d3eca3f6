"""The entries of an executor's backlog, and the backlog's instructions.

There is one entry for each open operation. The states of an entry are a table that is executed. Pure; times are seconds
of a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from distop.errors import DistopError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef


class EntryState(StrEnum):
    """The state of an operation in an executor's backlog."""

    ABSENT = "absent"
    NEW = "new"
    """It has one job and was not examined here yet: it is claimed together with others."""
    READY = "ready"
    """It may have jobs to claim."""
    CLAIMING = "claiming"
    """A claim round for it is in progress."""
    CLOSING = "closing"
    """Its gate was closed during a claim round."""
    DRY = "dry"
    """The last check found nothing to claim."""
    LEFT = "left"
    """Other executors claimed its job."""
    TAKEN = "taken"
    """All of its jobs were claimed or have ended here."""
    CLOSED = "closed"
    """Its gate is closed, and this executor still holds jobs of it."""


class EntryEvent(StrEnum):
    """The events of an entry."""

    OPEN = "open"
    OPEN_NEW = "open_new"
    BEGIN = "begin"
    """A claim round begins.

    It ends with MORE (more jobs may be claimable), NOTHING (none is), LOST (others have them) or ALL (all are claimed
    here).
    """
    MORE = "more"
    NOTHING = "nothing"
    LOST = "lost"
    ALL = "all"
    AGAIN = "again"
    """Jobs may be claimable: after a hint, a due time, a released job or a changed gate."""
    CLOSE = "close"
    GONE = "gone"
    """Its gate is closed, and no job of it is held."""


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
"""The state to which each event leads. The backlog raises InvalidEvent for all others."""


class BackOffReason(StrEnum):
    """Why an executor does not serve an operation until some time."""

    CHANGED = "changed"
    """A compared key had changed."""
    ERROR = "error"
    MISSING = "missing"
    """No records exist behind its gate."""
    UNREADABLE = "unreadable"
    REJECTED = "rejected"
    """etcd rejects its claim as invalid, also on its own; the node record shows it."""


FIRST_PAUSE = 0.5
LONGEST_PAUSES: Mapping[BackOffReason, float] = {
    BackOffReason.CHANGED: 30.0,
    BackOffReason.ERROR: 30.0,
    BackOffReason.MISSING: 600.0,
    BackOffReason.UNREADABLE: 120.0,
}
"""Maximum seconds of back-off; the first one is FIRST_PAUSE.

Unreadable records stay so until a person repairs them or a later release is installed. Missing ones appear within
moments, when a watch catches up, or never.
"""


REPORTED_PAUSE = 10.0
"""Only pauses of at least these seconds are reported: shorter ones end soon."""
SKIPPED: Mapping[BackOffReason, str] = {
    BackOffReason.CHANGED: "its claims were refused several times, because records had changed",
    BackOffReason.ERROR: "it could not serve the operation",
    BackOffReason.MISSING: "it finds no records of the operation",
    BackOffReason.UNREADABLE: "it cannot read the operation",
}
"""Why an executor skips an operation, as a sentence about it."""


@dataclass(slots=True)
class Trouble:
    """Back-off after an operation could not be served here, until it is served again or closed."""

    reason: BackOffReason
    text: str = ""
    """The error."""
    pause: float = 0.0
    until: float = 0.0
    rejected: bool = False
    """etcd rejected a claim of it, and has not accepted one since."""
    run: bool = False
    """Its jobs could be claimed, but not run."""
    reported: bool = False
    """Its pause is long, and no later round has shown that the trouble is over."""

    def __str__(self) -> str:
        """The report: it names the pause and no time, so that another failure does not change it."""
        what = "it could not run jobs of the operation" if self.run else SKIPPED[self.reason]
        return f"{what}{f': {self.text}' if self.text else ''}; it tries again within {self.pause:g} s"


@dataclass(slots=True)
class Entry:
    """The scheduling state of one open operation."""

    ref: OperationRef
    gate: Gate
    gate_mod: int
    since: float
    """Since when it waits: first seen, or last served."""
    state: EntryState = EntryState.ABSENT
    count: int = 0
    """The number of its jobs; 0: not read yet."""
    batch: bool = False
    held: set[int] = field(default_factory=set)
    """Jobs that this executor holds."""
    ended: int = 0
    """Jobs that ended here."""
    again: bool = False
    """Jobs may be claimable that the current round does not see."""
    due: float | None = None
    """The time of the next check, if nothing was claimable; None: at the next poll."""
    full: float = 0.0
    """Seconds of the last pause because no more of its jobs may run."""
    trouble: Trouble | None = None
    round: Round | None = None

    def happens(self, event: EntryEvent) -> None:
        """Apply an event. Raises InvalidEvent if the state does not allow it."""
        after = BACKLOG_TABLE[self.state].get(event)
        if after is None:
            raise InvalidEvent(f"{self.ref} is {self.state}, which does not allow the event {event}")
        self.state = after

    @property
    def crowded(self) -> bool:
        """Whether this executor holds as many of its jobs as one executor may."""
        return 0 < self.gate.options.max_jobs_per_executor <= len(self.held)

    @property
    def busy_with_batch(self) -> bool:
        """Whether a batch of it runs here: at most one at a time.

        The batch already uses all cores, and others share the rest.
        """
        return self.batch and bool(self.held)

    @property
    def all_taken(self) -> bool:
        """Whether all of its jobs are held here or have ended here."""
        return 0 < self.count <= len(self.held) + self.ended


class InvalidEvent(DistopError):
    """An event that the state of an entry does not allow: a defect of distop."""


# ---------------------------------------------------------------- instructions


@dataclass(slots=True, eq=False)
class Round:
    """Claim jobs of these operations; the backlog waits for the end of the round.

    ``fresh``: they are newly opened operations of one job. Their jobs are claimed together with the read of their
    records, and run in sequence, in one slot. Any other operation is read first.
    """

    refs: tuple[OperationRef, ...]
    slots: int
    """Slots that the round has taken so far."""
    fresh: bool = False
    rank: int = 0
    until: float = 0.0
    """Until this time less urgent operations wait for the round."""
    borrowed: bool = False
    """Some of them are assigned to other executors."""
    over: dict[OperationRef, EntryEvent] = field(default_factory=dict)
    """The event that ends the round for each operation; MORE by default."""


@dataclass(frozen=True, slots=True)
class RunJobs:
    """Run these held jobs in one slot: those of an operation together, several operations in sequence."""

    jobs: tuple[tuple[OperationRef, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ReleaseJobs:
    """Give these held jobs back: they must not start any more."""

    ref: OperationRef
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the operation's jobs that are held here: it is closed, or this executor is ``draining``."""

    ref: OperationRef
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """The operation is gone or paused, and none of its jobs is held here."""

    ref: OperationRef


@dataclass(frozen=True, slots=True)
class Accepted:
    """etcd no longer rejects claims of the operation as invalid, or the operation is gone."""

    ref: OperationRef


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can begin for this time (None: until an event)."""

    seconds: float | None


Instruction: TypeAlias = Round | RunJobs | ReleaseJobs | Stop | Forget | Accepted | Wait


@dataclass(frozen=True, slots=True)
class ClaimableJobs:
    """The result of reading an operation's jobs.

    ``room``: how many more jobs may be claimed within all limits. ``suspects``: seconds until it is this executor's
    turn for each suspect, soonest first, if nothing else may be claimed. ``due``: when something becomes due.
    """

    open_jobs: int
    room: int
    suspects: Mapping[int, float] = field(default_factory=dict)
    due: float | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """A round may claim: for these slots, or (``alone``) one job that runs alone in its executor."""

    slots: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round for one operation.

    ``refused``: a compared key had changed. ``failed``: not everything could be done. ``open_jobs``: jobs that are left
    to claim, as far as known.
    """

    won: tuple[int, ...] = ()
    refused: bool = False
    failed: bool = False
    open_jobs: int = 0
