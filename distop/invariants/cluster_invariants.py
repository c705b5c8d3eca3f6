"""The invariants of cluster-wide keys.

They are about nodes (4), instance numbers (6), runOps (7) and elections (8). Also of requests and watermarks (14),
holds (15) and ids (18).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from distop.protocol import keys as K
from distop.protocol.age_watermarks import revision
from distop.protocol.dependencies import GRAPH, Hold, HoldState
from distop.protocol.identity import may_come_again
from distop.protocol.json_codec import UNREADABLE, loads
from distop.protocol.records import Node, State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from distop.invariants.replay_state import InvariantFault, OperationTrace
    from distop.protocol.executor_nodes import Serves
    from distop.protocol.keys import ParsedKey
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change

Key = TypeVar("Key")
V = TypeVar("V")
StartedInstances: TypeAlias = dict[tuple[str, str], list[int]]
"""(table, type) → the instances that started in this revision."""

GONE = 10_000
"""Maximum number of ended incarnations that are remembered, to notice one that returns (bounds memory)."""


def _put(known: dict[Key, V], key: Key, value: V | None) -> None:
    """Keep a value; None: it was deleted."""
    if value is None:
        known.pop(key, None)
    else:
        known[key] = value


class ClusterTrace:
    """Nodes, elections and counters after the last revision that was folded."""

    def __init__(self) -> None:
        self.labels: dict[str, Mapping[str, str]] = {}
        """Labels of the incarnations with a node key."""
        self.serves: dict[str, Serves] = {}
        """Types and tables that these incarnations serve."""
        self.elections: dict[tuple[str, str], str] = {}
        self.current: dict[tuple[str, str, str], int] = {}
        """(table, type, object) → the instance that runs one at a time."""
        self.tables: dict[str, int] = {}
        """Table → the revision at which it was registered, whatever was changed later."""
        """Registered tables."""
        self.declared: dict[str, int] = {}
        """Type → the revision at which it was declared."""
        self.holds: set[str] = set()
        self.inserting: set[str] = set()
        """Holds under which a graph is being inserted."""
        self.denied: set[str] = set()
        """Holds that are denied."""
        self.ids: dict[tuple[str, str, str], str] = {}
        """(table, type, id) → the operation that its key names."""
        self._gone: dict[str, None] = {}
        """The last incarnations that ended, in order."""
        self._watermarks: dict[int, int] = {}
        """Slot → the revision that its watermark names."""
        self._young: set[int] = set()
        """Slots whose watermarks are less than an hour old."""
        self._run_ops: dict[str, dict[str, int]] = {}
        self._counted: dict[str, dict[str, int]] = {}
        self._next: dict[tuple[str, str], int] = {}

    def fold(
        self, key: ParsedKey, change: Change, started: StartedInstances, listing: bool
    ) -> Iterator[InvariantFault]:
        """Take one write; yields its faults.

        A type whose instance number was drawn in this revision is removed from ``started``. ``listing``: the write is
        part of the state from which the replay starts.
        """
        value, deleted = change.kv.value, change.deleted
        try:
            if key.family == K.NODE:
                yield from self._node(key.id, change)
            elif key.family == K.HOLD:
                yield from self._hold(key.id, None if deleted else Hold.decode(value))
            elif key.family == K.UNIQUE:
                _put(self.ids, (key.table, key.type, key.id), None if deleted else value.decode())
            elif key.family == K.TABLE:
                _put(self.tables, key.table, None if deleted else change.kv.create_revision)
            elif key.family == K.BEHAVIOR:
                _put(self.declared, key.type, None if deleted else change.kv.mod_revision)
            elif key.family == K.WATERMARK:
                yield from self._watermark(key, change)
            elif key.family == K.COORDINATOR:
                yield from self._election((key.table, key.type), None if deleted else value.decode())
            elif key.name == "runOps":
                if deleted:
                    yield 7, "runOps was deleted"
                counts = {} if deleted else loads(value)
                self._run_ops[key.table] = {str(t): int(n) for t, n in counts.items()}
            elif key.name == "nextInstanceId":
                new = started.pop((key.table, key.type), [])
                if deleted:
                    yield 6, "the instance counter was deleted"
                elif listing:
                    self._next[key.table, key.type] = int(value)
                else:
                    yield from self._numbered((key.table, key.type), int(value), sorted(new))
            elif key.name == "current":
                _put(self.current, (key.table, key.type, key.object), None if deleted else int(value))
        except UNREADABLE as error:
            yield 0, f"the record cannot be read: {error}"

    def _watermark(self, key: ParsedKey, change: Change) -> Iterator[InvariantFault]:
        if key.name != "young":
            self._watermarks[key.chunk] = upto = revision(change.kv.value)
            if upto >= change.kv.mod_revision:
                own = change.kv.mod_revision
                yield 14, f"the watermark names revision {upto}, expected one before its own revision {own}"
        elif change.deleted:
            self._young.discard(key.chunk)
        else:
            self._young.add(key.chunk)
            if not change.kv.lease:
                yield 14, "the watermark's young key has no lease, so its hour never ends"

    @property
    def old_upto(self) -> int:
        """The revision up to which everything is an hour old, by the watermarks."""
        return max((upto for slot, upto in self._watermarks.items() if slot not in self._young), default=0)

    def tally(self, ref: OperationRef, was: bool, active: bool) -> None:
        """Count an operation that became active or stopped being active, as runOps must."""
        if was is not active:
            counts = self._counted.setdefault(ref.table, {})
            counts[ref.type] = counts.get(ref.type, 0) + (1 if active else -1)

    def drawn(self, ref: OperationRef) -> bool:
        """Whether the operation's number was drawn in an earlier revision."""
        return ref.instance < self._next.get((ref.table, ref.type), 0)

    def miscounted(self, table: str) -> str:
        """How runOps of a table differs from the active operations, or ""."""
        counts = {t: n for t, n in self._run_ops.get(table, {}).items() if n}
        is_so = {t: n for t, n in self._counted.get(table, {}).items() if n}
        return f"runOps has {counts}, expected {is_so}" if counts != is_so else ""

    def _numbered(self, place: tuple[str, str], following: int, new: list[int]) -> Iterator[InvariantFault]:
        first = self._next.get(place)
        self._next[place] = following
        if first is None:
            first = min(new, default=following)
            if first > 1:
                yield 6, f"the first instance has the number {first}, expected 1"
        if new != list(range(first, following)):
            yield 6, f"the instance counter changed from {first} to {following}, but the started instances are {new}"

    def _hold(self, id_: str, hold: Hold | None) -> Iterator[InvariantFault]:
        """Takes a write to a hold. A receipt holds nothing."""
        self.inserting.discard(id_)
        if hold is None:
            self.holds.discard(id_)
            self.denied.discard(id_)
            return
        state = hold.state
        if hold.kind == GRAPH and state is HoldState.HELD:
            self.inserting.add(id_)
        if id_ in self.denied and state is not HoldState.DENIED:
            yield 15, f"the denied hold was written as {state}"
        if state is not HoldState.CONFIRMED:
            self.holds.add(id_)
        if state is HoldState.DENIED:
            self.denied.add(id_)

    @property
    def live(self) -> Collection[str]:
        """The incarnations with a node key."""
        return self.labels.keys()

    def _node(self, incarnation: str, change: Change) -> Iterator[InvariantFault]:
        if change.deleted:
            self.labels.pop(incarnation, None)
            self.serves.pop(incarnation, None)
            self._gone[incarnation] = None
            if len(self._gone) > GONE:
                del self._gone[next(iter(self._gone))]
            return
        if incarnation in self._gone:
            yield 4, f"incarnation {incarnation} wrote its node key again after its session had ended"
        self.labels.setdefault(incarnation, {})
        with suppress(*UNREADABLE):
            node = Node.decode(change.kv.value)
            self.labels[incarnation], self.serves[incarnation] = node.labels, node.serves

    def _election(self, place: tuple[str, str], new: str | None) -> Iterator[InvariantFault]:
        if new is None:
            self.elections.pop(place, None)
            return
        holder = self.elections.get(place)
        self.elections[place] = new
        if holder is not None and holder != new and holder in self.live:
            yield 8, f"{new} took the election from {holder}, whose node key exists"
        if new not in self.live:
            yield 8, f"{new} was elected, but has no node key"


class Ids:
    """The operations of each id that have not ended (18)."""

    def __init__(self) -> None:
        self._going_on: dict[tuple[str, str, str], dict[OperationRef, bool]] = {}
        """(table, type, id) → operations that have not ended, and whether each is pending."""
        self._between: dict[str, tuple[str, str, str]] = {}
        """Ended operations of a series that may have a next one, while their keys exist → place of the id."""

    def update(self, op: OperationTrace) -> tuple[str, str, str] | None:
        """Take a possible change of an operation; returns the id to check."""
        if op.spec is None or not op.spec.id:
            return None
        place = (op.ref.table, op.ref.type, op.spec.id)
        found = self._going_on.setdefault(place, {})
        if op.state is None or op.state.terminal:
            found.pop(op.ref, None)
            if op.state is not None and may_come_again(op.spec.series is not None, op.state):
                self._between[str(op.ref)] = place
        else:
            found[op.ref] = op.state is State.PENDING
        return place

    def gone(self, op: OperationTrace) -> tuple[str, str, str] | None:
        """Take the deletion of an operation's last keys; returns the id that it may have held until then."""
        return self._between.pop(str(op.ref), None)

    def wrong(self, place: tuple[str, str, str], named: str | None) -> str:
        """What is wrong about an id whose key names this operation, or ""."""
        found = self._going_on.get(place, {})
        if not found:
            self._going_on.pop(place, None)
        waits = sorted(str(ref) for ref, waiting in found.items() if waiting)
        runs = sorted(str(ref) for ref, waiting in found.items() if not waiting)
        if len(waits) > 1 or len(runs) > 1:
            return f"several operations have this id: {' and '.join(waits if len(waits) > 1 else runs)}"
        expected = (*waits, *runs, None)[0]
        if expected is None and named is not None and self._between.get(named) == place:
            return ""  # the next operation of the series may take it
        return f"the key names {named or 'none'}, expected {expected or 'none'}" if named != expected else ""


class RequestKeys:
    """The keys of request ids, and the operations that they name (14)."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        self._of: dict[str, str] = {}
        """Operation → the key that names it."""

    def put(self, key: str, named: str) -> None:
        """Take a write: the key names this operation."""
        self.deleted(key)
        self._named[key], self._of[named] = named, key

    def deleted(self, key: str) -> str:
        """Take a deletion; returns the operation that the key named, or ""."""
        named = self._named.pop(key, "")
        self._of.pop(named, None)
        return named

    def naming(self, ref: OperationRef) -> str:
        """The key that names the operation, or ""."""
        return self._of.get(str(ref), "")


class Requests:
    """The operation that each request started.

    A request is known while keys or the history of its operation exist: distop itself does not know it longer. A
    request id is unique for a type on a table; the same text may start an operation of each.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str, str], OperationRef] = {}
        self._of: dict[OperationRef, str] = {}

    def began(self, ref: OperationRef, request: str) -> OperationRef:
        """Take a start by a request ("": by none); returns the first operation that this request started."""
        if not request:
            return ref
        self._of[ref] = request
        return self._first.setdefault((ref.table, ref.type, request), ref)

    def began_by(self, like: OperationRef, request: str) -> bool:
        """Whether this request started a known operation of the table and type of ``like``."""
        return (like.table, like.type, request) in self._first

    def known(self, ref: OperationRef) -> bool:
        """Whether keys or the history of an operation that a request started exist."""
        return ref in self._of

    def forget(self, ref: OperationRef) -> None:
        """Take the deletion of an operation's last record."""
        request = (ref.table, ref.type, self._of.pop(ref, ""))
        if self._first.get(request) == ref:
            del self._first[request]
