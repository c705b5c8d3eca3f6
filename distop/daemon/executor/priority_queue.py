"""Whose turn it is among the open operations of one executor: by priority, with aging, so that none starves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.protocol.operation_options import rank
from distop.runtime.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from distop.protocol.records import OperationRef

ROUND = 2.0
"""Seconds for which those that are less urgent wait for a round of a more urgent one: that may clean up, or be sent
again and again, and free slots must not wait for it."""
FIRST_LOOK = 0.5
"""Seconds after which an operation of which no more jobs may run is looked at again; from one look to the next twice as
many, up to the poll."""


class Turns:
    """Of one incarnation. Times are of ``time.monotonic``."""

    def __init__(self) -> None:
        self._since: dict[OperationRef, float] = {}
        """Since when an operation waits: it was seen first, or served last."""
        self._rounds: dict[OperationRef, tuple[int, float]] = {}
        """Rounds under way: their ranks, and until when others wait for them."""
        self._full: dict[OperationRef, Backoff] = {}

    def rank(self, ref: OperationRef, priority: int, now: float, *, held: bool) -> int:
        """How urgent it is to serve an operation. One that has jobs here does not wait."""
        since = self._since.setdefault(ref, now)
        return rank(priority, 0.0 if held else now - since)

    def begins(self, ref: OperationRef, rank: int, now: float) -> tuple[int, float]:
        """A round for an operation begins; its rank, and for how many seconds those below it wait."""
        self._rounds[ref] = rank, now + ROUND
        return rank, ROUND

    def under_way(self, open_here: Container[OperationRef], now: float) -> tuple[int | None, float]:
        """The highest rank of a round under way, and for how many seconds to wait for it; None: there is none."""
        found = [one for ref, one in self._rounds.items() if ref in open_here and one[1] > now]
        first, until = max(found, default=(None, now))
        return first, until - now

    def served(self, ref: OperationRef, now: float, *, won: bool) -> None:
        """A round has claimed what there is: it waits anew."""
        self._since[ref] = now
        if won:
            self._full.pop(ref, None)

    def over(self, ref: OperationRef) -> None:
        """A round is over, however."""
        self._rounds.pop(ref, None)

    def full(self, ref: OperationRef, poll: float) -> float:
        """No more of its jobs may run for now: seconds until the next look."""
        return self._full.setdefault(ref, Backoff(min(FIRST_LOOK, poll), poll)).pause()

    def keep(self, gates: Container[OperationRef], refs: Collection[OperationRef] | None = None) -> None:
        """Forget the operations that are not open any more; of ``refs`` alone, where only these have changed."""
        for known in (self._since, self._full):
            for ref in [ref for ref in (known if refs is None else refs) if ref not in gates]:
                known.pop(ref, None)
