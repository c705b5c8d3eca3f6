"""A coordinator's view of each operation of its type on a table.

An operation has a record of its own, or, if it only waits, a few numbers (``decide.resting_operations``). Collections
that are empty in nearly all of very many views share one empty value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from distop.decide.resting_operations import Resting
from distop.protocol.dependencies import Edge
from distop.protocol.jobs import Claim
from distop.protocol.operation_options import Options, Terms
from distop.protocol.records import Attempts, Cancel, Decision, OperationRef, Spec, State
from distop.protocol.revisioned import Seen
from distop.protocol.state_tables import Stage, stage_of
from distop.protocol.user_actions import NO_ACTIONS, Actions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from distop.protocol.plan import Plan
    from distop.protocol.txn import KeyValue


T = TypeVar("T")
Key = TypeVar("Key")

NOTHING: Mapping[Any, Any] = MappingProxyType({})
"""The shared empty mapping."""


def with_entry(held: Mapping[Key, T], key: Key, value: T) -> Mapping[Key, T]:
    """The mapping with one more entry; changed in place if it is not the shared one."""
    if isinstance(held, dict):
        held[key] = value
        return held
    return {key: value}


def without_entry(held: Mapping[Key, T], key: Key) -> Mapping[Key, T]:
    """The mapping without an entry, changed in place."""
    if isinstance(held, dict):
        held.pop(key, None)
    return held or NOTHING


def without_member(held: AbstractSet[int], number: int) -> AbstractSet[int]:
    """The set without a member, changed in place."""
    if isinstance(held, set):
        held.discard(number)
    return held


EDGES_AT_REST = 8
"""Maximum number of edges of a resting operation: one with thousands changes with each of them."""


class SeenClaim:
    """A claim with its mod revision, decoded once."""

    __slots__ = ("_raw", "_value", "mod")

    def __init__(self, raw: bytes, mod: int) -> None:
        self._raw = raw
        self._value: Claim | None = None
        self.mod = mod

    @property
    def value(self) -> Claim:
        """The claim. Raises what decoding raises for an unreadable record."""
        if self._value is None:
            self._value = Claim.decode(self._raw)
        return self._value


@dataclass(slots=True)
class OperationView:
    """One operation as its coordinator sees it."""

    ref: OperationRef
    state: State | None = None
    state_mod: int = 0
    spec: Spec | None = None
    plan: Plan | None = None
    plan_mod: int = 0
    chunks: Mapping[int, int] = field(default_factory=lambda: NOTHING)
    planning: Seen[Attempts] | None = None
    broken: dict[str, str] | None = None
    """The entries of ``after`` with a text; a wide join is not searched at each end."""
    cancel: Cancel | None = None
    decision: Seen[Decision] | None = None
    altered: Seen[Options] | None = None
    actions: Actions = NO_ACTIONS
    success: int = 0
    failed: AbstractSet[int] = frozenset()
    claims: Mapping[int, SeenClaim] = field(default_factory=lambda: NOTHING)
    claims_known: bool = False
    """The claims are watched and were listed: jobs without an entry have no claim."""
    after: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """Edge → "", or how the predecessor ended if the edge is broken."""
    next: Mapping[str, Edge] = field(default_factory=lambda: NOTHING)
    """Edges to its successors."""
    seen_since: Mapping[int, tuple[int, float]] = field(default_factory=lambda: NOTHING)
    """Actors' claims: their fence, and since when it is unchanged (:meth:`unchanged_for`)."""
    outcomes: Mapping[int, KeyValue] = field(default_factory=lambda: NOTHING)
    """Outcomes of small operations from watch events; large ones and those from listings are missing."""

    def as_it_is(self) -> OperationView:
        """A copy that later job failures do not change."""
        return OperationView(
            self.ref,
            self.state,
            self.state_mod,
            self.spec,
            self.plan,
            self.plan_mod,
            self.chunks,
            self.planning,
            self.broken,
            self.cancel,
            self.decision,
            self.altered,
            self.actions,
            self.success,
            frozenset(self.failed),
            self.claims,
            self.claims_known,
            self.after,
            self.next,
            self.seen_since,
            self.outcomes,
        )

    @property
    def terms(self) -> Terms:
        """The terms that its gate has to contain."""
        seen, where = self.altered, self.spec.where if self.spec is not None else {}
        beside = self.plan.beside if self.plan is not None else ()
        return Terms(seen.value, seen.mod, where, beside) if seen is not None else Terms(where=where, beside=beside)

    @property
    def opened(self) -> int:
        """The mod revision of its gate, if it is open and nothing was altered.

        The gate is written with the plan, or with a later state ``running``; every other state deletes it.
        """
        return max(self.state_mod, self.plan_mod)

    @property
    def ended(self) -> int:
        """The number of jobs with a state."""
        return self.success + len(self.failed)

    @property
    def stage(self) -> Stage:
        """The stage, from its own keys (gate and pending follow from them, invariant 12)."""
        return stage_of(self.state, decided=self.decision is not None, planned=self.plan is not None)

    def unchanged_for(self, partition: int, clock: float) -> float:
        """Seconds for which a claim is seen unchanged, by a monotonic clock; 0 at first."""
        mod = self.claims[partition].mod
        since = self.seen_since.get(partition, (0, 0.0))
        if since[0] != mod:
            since = (mod, clock)
            self.seen_since = with_entry(self.seen_since, partition, since)
        return clock - since[1]

    @property
    def empty(self) -> bool:
        """Whether nothing is left of it."""
        return self.state is None and self.spec is None and self.plan is None and not self.claims


class Operations(Mapping[OperationRef, OperationView]):
    """The operations of one type on one table, as a mapping.

    Pending operations with no further facts *rest*. A look-up creates a view of a resting operation, which must not be
    changed; :meth:`wake` returns one that may.
    """

    def __init__(self, table: str, type_name: str, resting: Resting | None = None) -> None:
        self.table = table
        self.type = type_name
        self.claims_known = False
        """As in each view."""
        self.awake: dict[OperationRef, OperationView] = {}
        """Operations that do not rest."""
        self.resting = resting if resting is not None else Resting()

    def __len__(self) -> int:
        return len(self.awake) + len(self.resting)

    def __iter__(self) -> Iterator[OperationRef]:
        yield from self.awake
        for obj, number in self.resting:
            yield self.ref(obj, number)

    def __contains__(self, ref: object) -> bool:
        return ref in self.awake or (isinstance(ref, OperationRef) and self.rests(ref))

    def __getitem__(self, ref: OperationRef) -> OperationView:
        if (op := self.awake.get(ref)) is not None:
            return op
        if not self._mine(ref) or (found := self.resting.get(ref.object, ref.instance)) is None:
            raise KeyError(ref)
        return self._made(ref, *found)

    def ref(self, obj: str, number: int) -> OperationRef:
        """The name of one."""
        return OperationRef(self.table, self.type, obj, number)

    def rests(self, ref: OperationRef) -> bool:
        """Whether the operation rests."""
        return self._mine(ref) and self.resting.has(ref.object, ref.instance)

    def priority(self, ref: OperationRef) -> int:
        """The operation's priority; 0 if unknown."""
        if (op := self.awake.get(ref)) is not None:
            return op.terms.options.priority
        rest = self.resting.rest_of(ref.object, ref.instance) if self._mine(ref) else None
        return Options.decode(rest[1]).priority if rest is not None and rest[1] else 0

    def wake(self, ref: OperationRef) -> OperationView:
        """A view of the operation that may be changed; a new one if it is unknown."""
        if (op := self.awake.get(ref)) is None:
            found = self.resting.take(ref.object, ref.instance) if self._mine(ref) else None
            op = self._made(ref, *found) if found is not None else OperationView(ref, claims_known=self.claims_known)
            self.awake[ref] = op
        return op

    def settle(self, op: OperationView) -> bool:
        """Let the operation rest, if possible."""
        if op.state is not State.PENDING or op.spec is None or len(op.after) + len(op.next) > EDGES_AT_REST:
            return False
        altered = (op.altered.value.encode(), op.altered.mod) if op.altered is not None else (b"", 0)
        edges = tuple((edge, one.op, one.on, one.broken) for edge, one in op.next.items())
        actions = op.actions.encode() if op.actions.kept else b""
        rest = (op.state_mod, *altered, tuple(op.after.items()), edges, actions)
        waits = OperationView(op.ref, op.state, op.state_mod, op.spec, claims_known=op.claims_known)
        waits.after, waits.next, waits.altered, waits.broken = op.after, op.next, op.altered, op.broken
        waits.actions = op.actions
        if op != waits or not self._mine(op.ref) or not self.resting.put(op.ref.object, op.ref.instance, op.spec, rest):
            return False
        del self.awake[op.ref]
        return True

    def _mine(self, ref: OperationRef) -> bool:
        return ref.type == self.type and ref.table == self.table

    def _made(self, ref: OperationRef, spec: Spec, rest: tuple[Any, ...]) -> OperationView:
        state_mod, options, mod, after, edges, actions = rest
        op = OperationView(ref, State.PENDING, state_mod, spec, claims_known=self.claims_known)
        if options:
            op.altered = Seen(Options.decode(options), mod)
        if actions:
            op.actions = Actions.decode(actions)
        if after:
            op.after = dict(after)
            op.broken = {edge: text for edge, text in after if text} or None
        if edges:
            op.next = {edge: Edge(*fields) for edge, *fields in edges}
        return op
