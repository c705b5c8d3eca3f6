"""New one-job operations: which of them are claimed next, and how many together.

Each on its own would take a round trip to claim, a message to the child, and a slot for that time. The group size is
learned for each type from the duration of its jobs: as many as end within a moment (``Limits.moment``), so none waits
long behind others while another executor is idle. Pure; times are seconds of a monotonic clock.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from distop.decide import work_shares
from distop.protocol import batch_claims
from distop.protocol.records import CLUSTER_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.protocol.records import OperationRef
    from distop.protocol.size_limits import Limits

HEAD_STARTS = (0.2, 10.0)
"""Minimum and maximum seconds for which an operation is left to its assigned executor.

Afterwards any idle executor takes it. The time doubles whenever the assigned executor had already taken them all and
its coordinator was behind with their ends.
"""
LOOKED_AT = 100
"""Maximum number of waiting operations that are examined for a group."""


class FreshOperations:
    """The new one-job operations in the backlog of one executor.

    ``others``: the other executors that serve a type on a table.
    """

    def __init__(self, executor: str, limits: Limits, others: Callable[[str, str], Sequence[str]]) -> None:
        self._executor = executor
        self._limits = limits
        self._others_of = others
        self.mine: dict[OperationRef, None] = {}
        self.others: dict[OperationRef, float] = {}
        """Operations assigned to other executors, with the time at which each was seen."""
        self._rivals: dict[tuple[str, str], tuple[str, ...]] = {}
        """(type, table) → the other executors among which operations were divided."""
        self._sizes: dict[str, int] = {}
        self._head_starts: dict[str, float] = {}

    def __contains__(self, ref: OperationRef) -> bool:
        return ref in self.mine or ref in self.others

    def __len__(self) -> int:
        return len(self.mine) + len(self.others)

    def add(self, ref: OperationRef, now: float) -> None:
        """Assign an operation to this executor or another one, by its name."""
        subject = ref.type, ref.table
        rivals = self._rivals.get(subject)
        if rivals is None:
            rivals = self._rivals[subject] = tuple(self._others_of(*subject))
        if work_shares.shares(1, self._executor, rivals, str(ref))[1]:
            self.mine[ref] = None
        else:
            self.others[ref] = now

    def remove(self, ref: OperationRef) -> None:
        """The operation was claimed, is served on its own, or is gone."""
        self.mine.pop(ref, None)
        self.others.pop(ref, None)

    def divide_anew(self, now: float) -> None:
        """Assign operations again after nodes came or went."""
        stale = {one for one, rivals in self._rivals.items() if rivals != tuple(self._others_of(*one))}
        for subject in stale:
            del self._rivals[subject]
        for ref in [ref for ref in (*self.mine, *self.others) if (ref.type, ref.table) in stale]:
            self.remove(ref)
            self.add(ref, now)

    def choose(
        self, slots: int, now: float, wait: Callable[[OperationRef], float]
    ) -> tuple[list[OperationRef], bool, float | None]:
        """The operations of one type to claim next.

        Also returned: whether some are assigned to others. Without any: the seconds until that may change. ``wait``:
        seconds for which an operation is not served here.
        """
        pauses: list[float] = []
        waits: dict[tuple[str, str], float] = {}
        # Others' operations from the end: their assigned executors take them from the front.
        for waiting in (islice(self.mine, LOOKED_AT), islice(reversed(self.others), LOOKED_AT)):
            due: dict[str, list[OperationRef]] = {}
            for ref in waiting:
                subject = ref.type, ref.table
                if (pause := waits.get(subject)) is None:
                    pause = waits[subject] = wait(ref)
                if pause > 0:
                    pauses.append(pause)
                elif now - self.others.get(ref, -inf) >= self._head_start(ref.type):
                    due.setdefault(ref.type, []).append(ref)
            if due:
                return *self._take(next(iter(due.values())), slots), None
        if self.others:
            first = next(iter(self.others))
            pauses.append(max(0.01, self.others[first] + self._head_start(first.type) - now))
        return [], False, min(pauses, default=None)

    def _take(self, refs: Sequence[OperationRef], slots: int) -> tuple[list[OperationRef], bool]:
        """Take a group of these operations of one type: a share for each free slot, at most the learned size."""
        size = min(self._size(refs[0].type), -(-len(refs) // max(slots, 1)), self._limits.together)
        chosen = list(refs[:size])
        if any(ref.table != CLUSTER_TABLE for ref in chosen):
            del chosen[batch_claims.PLANNED_PER_CLAIM :]
        borrowed = not self.others.keys().isdisjoint(chosen)
        for ref in chosen:
            self.remove(ref)
        return chosen, borrowed

    # ----------------------------------------------------------------- learned

    def _head_start(self, type_name: str) -> float:
        return self._head_starts.get(type_name, HEAD_STARTS[0])

    def borrowed(self, type_name: str, won: bool) -> None:
        """Operations assigned to others were claimed (``won``), or were not."""
        shortest, longest = HEAD_STARTS
        longer = self._head_start(type_name) * (0.5 if won else 2.0)
        self._head_starts[type_name] = max(shortest, min(longest, longer))

    def ran(self, type_name: str, seconds: Sequence[float]) -> None:
        """Learn the group size from the durations of jobs that ran together."""
        if seconds:
            most, moment = self._limits.together, self._limits.moment
            each = sum(max(0.0, one) for one in seconds) / len(seconds)
            if each * most > moment:
                most = int(moment / each)
            self._sizes[type_name] = max(1, min(2 * self._size(type_name), most))

    def took_long(self, type_name: str) -> None:
        """Jobs that ran together took longer than allowed: stop grouping this type."""
        self._sizes[type_name] = 1

    def _size(self, type_name: str) -> int:
        return self._sizes.get(type_name, self._limits.unlearned)
