"""Back-off after an open operation could not be served here: by an error of our own, by records that this release
cannot read, because etcd rejects a claim as invalid, or because what was compared had changed. An entry goes when the
operation is served again, or goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distop.clock import random, time
from distop.errors import MalformedRequest, NotFound, UnreadableRecord, describe

if TYPE_CHECKING:
    from collections.abc import Container

    from distop.daemon.rejected_writes import RejectedWrites
    from distop.protocol.records import OperationRef
    from distop.runtime.logs import ContextLogger

CLAIMS = "claims"
"""In the node record, what etcd rejects: claims, takeovers, and what becomes of lost claims."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Seconds of back-off, first and longest, after an unexpected error of the executor itself."""
UNREADABLE_PAUSE = 120.0
"""The longest where records cannot be read: that lasts until a person mends them, or a later release is installed."""

MISSING_PAUSE = 600.0
"""The longest where an open gate has no records: they come within moments, by a watch that lags, or never."""


@dataclass(slots=True)
class _Trouble:
    pause: float = 0.0
    until: float = 0.0
    """On the monotonic clock."""
    said: str = ""
    """What was said of it last."""
    run: bool = False
    """Its jobs could be claimed, and not run."""
    missing: bool = False
    """There are no records behind its gate."""
    rejected: bool = False
    """Etcd rejects a claim of it as invalid, even alone: the node record tells it."""


class Troubles:
    """The operations that one incarnation could not serve."""

    def __init__(self, log: ContextLogger, rejected_writes: RejectedWrites) -> None:
        self._log = log
        self._rejected_writes = rejected_writes
        self._of: dict[OperationRef, _Trouble] = {}

    def __contains__(self, ref: OperationRef) -> bool:
        return ref in self._of

    def __len__(self) -> int:
        return len(self._of)

    def wait(self, ref: OperationRef) -> float:
        """Seconds until it may be tried again; nothing, or less, where that is now."""
        trouble = self._of.get(ref)
        return trouble.until - time.monotonic() if trouble is not None else 0.0

    def refused(self, ref: OperationRef) -> None:
        """What was compared is not as it was seen: look again a little later."""
        self._again(ref, LONGEST_PAUSE)

    def failed(self, ref: OperationRef, error: Exception, *, run: bool = False) -> None:
        """It could not be served, or (``run``) a run of its jobs not be begun. What lasts is said once; an end that
        only was not seen yet is nothing to speak of.
        """
        where = {"operation": str(ref)}
        if isinstance(error, NotFound):
            self._again(ref, MISSING_PAUSE).missing = True
            self._log.debug("%s", error, extra=where)
        elif isinstance(error, UnreadableRecord):
            trouble = self._again(ref, UNREADABLE_PAUSE)
            if trouble.said != str(error):
                trouble.said = str(error)
                self._log.error("this executor leaves the operation alone until it can read it: %s", error, extra=where)
        elif isinstance(error, MalformedRequest):
            trouble = self._of.setdefault(ref, _Trouble())
            trouble.rejected = True
            trouble.pause = self._rejected_writes.refused(str(ref), CLAIMS, error)
            trouble.until = time.monotonic() + trouble.pause
        else:
            trouble = self._again(ref, LONGEST_PAUSE)
            said = f"could not serve the operation (again in {trouble.pause:.1f} s): {describe(error)}"
            self._log.warning("%s", said, extra=where, exc_info=error)
        self._of[ref].run = run

    def _again(self, ref: OperationRef, longest: float) -> _Trouble:
        trouble = self._of.setdefault(ref, _Trouble())
        trouble.pause = min(max(FIRST_PAUSE, trouble.pause * 2), longest)
        trouble.until = time.monotonic() + trouble.pause * random.uniform(0.5, 1.0)
        return trouble

    def missing(self, ref: OperationRef) -> bool:
        """At the last look the operation had an open gate and no records. Submitters may write any number of those."""
        trouble = self._of.get(ref)
        return trouble is not None and trouble.missing

    def served(self, ref: OperationRef) -> None:
        """It was looked at and claimed from; if it was runs that went wrong, that they go well is yet to be seen."""
        if ref in self._of:
            self._settle(ref)
            if not self._of[ref].run:
                del self._of[ref]

    def ran(self, ref: OperationRef) -> None:
        """A run of its jobs came to its end, which tells nothing of other claims."""
        if ref in self._of:
            self._of[ref].run = False
            if not self._of[ref].rejected:
                del self._of[ref]

    def keep(self, gates: Container[OperationRef]) -> None:
        """Forget the operations that are not open any more."""
        for ref in [ref for ref in self._of if ref not in gates]:
            self._settle(ref)
            del self._of[ref]

    def _settle(self, ref: OperationRef) -> None:
        if self._of[ref].rejected:
            self._of[ref].rejected = False
            self._rejected_writes.settled(str(ref), CLAIMS)
