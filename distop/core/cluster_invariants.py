"""The invariants of what stands beside the operations: instance numbers (6), runOps (7), elections (8), nodes (4),
requests (14).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from distop.core import keys as K
from distop.core.codec import UNREADABLE, loads
from distop.core.model import Node

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from distop.core.keys import ParsedKey
    from distop.core.model import OperationRef
    from distop.core.view import Change

Fault: TypeAlias = tuple[int, str]
"""(number of the invariant, what is wrong)."""
Started: TypeAlias = dict[tuple[str, str], list[int]]
"""(table, type) → the instances that began in this revision."""

GONE = 10_000
"""Incarnations that have ended and are still known, so that none comes back unseen (memory is bounded)."""


class ClusterTrace:
    """Nodes, elections, counters: as they are after the last revision that was folded."""

    def __init__(self) -> None:
        self.labels: dict[str, Mapping[str, str]] = {}
        """Of the incarnations with a node key."""
        self.elections: dict[tuple[str, str], str] = {}
        self.current: dict[tuple[str, str, str], int] = {}
        """(table, type, object) → the instance that runs one at a time."""
        self.holds: set[str] = set()
        self._gone: dict[str, None] = {}
        """The last incarnations that ended, in order."""
        self._run_ops: dict[str, dict[str, int]] = {}
        self._counted: dict[str, dict[str, int]] = {}
        self._next: dict[tuple[str, str], int] = {}

    def fold(self, key: ParsedKey, change: Change, started: Started, listing: bool) -> Iterator[Fault]:
        """Take one write; what it broke. A type whose number was drawn in this revision is taken out of
        ``started``. ``listing``: the write is part of the state that the replay begins with.
        """
        value = change.kv.value
        try:
            if key.family == K.NODE:
                yield from self._node(key.id, change)
            elif key.family == K.HOLD:
                (self.holds.discard if change.deleted else self.holds.add)(key.id)
            elif key.family == K.COORDINATOR:
                yield from self._election((key.table, key.type), None if change.deleted else value.decode())
            elif key.name == "runOps":
                if change.deleted:
                    yield 7, "runOps was deleted"
                counts = {} if change.deleted else loads(value)
                self._run_ops[key.table] = {str(t): int(n) for t, n in counts.items()}
            elif key.name == "nextInstanceId":
                new = started.pop((key.table, key.type), [])
                if change.deleted:
                    yield 6, "the counter of instances was deleted"
                elif listing:
                    self._next[key.table, key.type] = int(value)
                else:
                    yield from self._numbered((key.table, key.type), int(value), sorted(new))
            elif key.name == "current":
                place = (key.table, key.type, key.object)
                if change.deleted:
                    self.current.pop(place, None)
                else:
                    self.current[place] = int(value)
        except UNREADABLE as error:
            yield 0, f"the record cannot be read: {error}"

    def tally(self, ref: OperationRef, was: bool, active: bool) -> None:
        """An operation began or ceased to be one of those that runOps counts."""
        if was is not active:
            counts = self._counted.setdefault(ref.table, {})
            counts[ref.type] = counts.get(ref.type, 0) + (1 if active else -1)

    def drawn(self, ref: OperationRef) -> bool:
        """The operation's number was drawn in an earlier revision."""
        return ref.instance < self._next.get((ref.table, ref.type), 0)

    def miscounted(self, table: str) -> str:
        """What runOps tells that is not so, or ""."""
        told = {t: n for t, n in self._run_ops.get(table, {}).items() if n}
        is_so = {t: n for t, n in self._counted.get(table, {}).items() if n}
        return f"runOps tells {told} while {is_so} run" if told != is_so else ""

    def _numbered(self, place: tuple[str, str], following: int, new: list[int]) -> Iterator[Fault]:
        first = self._next.get(place)
        self._next[place] = following
        if first is None:
            first = min(new, default=following)
            if first > 1:
                yield 6, f"the first instance has the number {first}"
        if new != list(range(first, following)):
            yield 6, f"the counter went from {first} to {following} while the instances {new} began"

    @property
    def live(self) -> Collection[str]:
        """Incarnations with a node key."""
        return self.labels.keys()

    def _node(self, incarnation: str, change: Change) -> Iterator[Fault]:
        if change.deleted:
            self.labels.pop(incarnation, None)
            self._gone[incarnation] = None
            if len(self._gone) > GONE:
                del self._gone[next(iter(self._gone))]
            return
        if incarnation in self._gone:
            yield 4, f"the incarnation {incarnation} came back after its session had ended"
        self.labels.setdefault(incarnation, {})
        with suppress(*UNREADABLE):
            self.labels[incarnation] = Node.decode(change.kv.value).labels

    def _election(self, place: tuple[str, str], new: str | None) -> Iterator[Fault]:
        if new is None:
            self.elections.pop(place, None)
            return
        holder = self.elections.get(place)
        self.elections[place] = new
        if holder is not None and holder != new and holder in self.live:
            yield 8, f"the election was taken from {holder}, which was alive, by {new}"
        if new not in self.live:
            yield 8, f"{new} was elected without a node key"


class Requests:
    """Which operation a request began. A request is known as long as its operation's keys or history are: longer the
    product does not know it either.
    """

    def __init__(self) -> None:
        self._first: dict[str, OperationRef] = {}
        self._of: dict[OperationRef, str] = {}

    def began(self, ref: OperationRef, request: str) -> OperationRef:
        """An operation began by a request ("": by none); the operation that it began first."""
        if not request:
            return ref
        self._of[ref] = request
        return self._first.setdefault(request, ref)

    def forget(self, ref: OperationRef) -> None:
        """The last record of an operation is gone."""
        request = self._of.pop(ref, "")
        if self._first.get(request) == ref:
            del self._first[request]
