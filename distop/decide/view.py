"""Views of the store, from which decisions are made.

They are folds of listings and watch events. A view changes only in ``apply``, which takes one whole response (W4).
Between two applies it is a value, and deciders only read it. There are two views: :class:`ClusterView` (every daemon:
nodes, gates, pending, elections) and :class:`TypeView` (a type's coordinator: its operations, their jobs and claims).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distop.decide.operation_view import (
    NOTHING,
    Operations,
    OperationView,
    SeenClaim,
    with_entry,
    without_entry,
    without_member,
)
from distop.decide.pending_phases import Phases
from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.dependencies import Edge, Hold
from distop.protocol.executor_nodes import Drain, refusal
from distop.protocol.jobs import JobState
from distop.protocol.json_codec import UNREADABLE
from distop.protocol.operation_options import Options, fits
from distop.protocol.plan import Gate, Plan
from distop.protocol.records import Attempts, Cancel, Decision, Node, OperationRef, Phase, Spec, State
from distop.protocol.revisioned import Change, Seen
from distop.protocol.user_actions import NO_ACTIONS, Actions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue

_OWN_NAMES = frozenset({"arg", "spec", "state", "plan", "planning", "cancel", "decision"})
"""Names of keys directly below an operation's root."""
ENDING_PHASES = (Phase.CANCELLING, Phase.COMPLETING, Phase.CLEANING)
"""Phases in which no job of an operation runs any more."""

MAX_KEPT_OUTCOME = 4 * 1024
"""Maximum bytes of an outcome that a view keeps."""
MAX_KEPT_OUTCOMES = 16 * 1024 * 1024
"""Maximum bytes of all outcomes that a view keeps; others are read on demand."""


def alike(spec: Spec, other: Spec | None) -> Spec:
    """The spec, sharing equal fields with another one: most fields of very many pending operations."""
    if other is None:
        return spec
    same = {
        name: theirs
        for name in SHARED
        if (theirs := getattr(other, name)) is not None and theirs == getattr(spec, name)
    }
    return replace(spec, **same)


SHARED = (
    *("time", "submitter", "rules", "table", "partitions", "request_digest", "not_before", "hold", "series"),
    *("labels", "where", "follows", "rerun_of", "by"),
)


class ClusterView:
    """Nodes, gates, pending operations and elections, which every daemon watches (few events per operation)."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.nodes: dict[str, Node] = {}
        self.drains: set[str] = set()
        """Executors that have to drain, alive or not."""
        self.drained_by: dict[str, Actions] = {}
        """The recorded drains and undrains of executors."""
        self.gates: dict[OperationRef, Seen[Gate]] = {}
        """Open operations."""
        self.pending = Phases()
        self._subjects: Counter[tuple[str, str]] = Counter()
        """(table, type) → how many of its operations are open or pending: thousands may wait."""
        self._phases: Counter[tuple[tuple[str, str], Phase]] = Counter()
        """((table, type), phase) → how many of its pending operations are in it."""
        self.elections: dict[tuple[str, str], Seen[str]] = {}
        """(table, type) → the incarnation that coordinates."""
        self.holds: dict[str, Seen[Hold]] = {}
        self.has_policies = False
        """Whether there are policies, or have been: only then a daemon watches them."""
        self.foreign: dict[str, str] = {}
        """Keys that this release cannot read, with the reason; they are skipped."""

    def replace(self, family_keys: Iterable[str], changes: Iterable[Change]) -> None:
        """Take a whole listing of these families; keys that are not in it are gone."""
        listed = self.listing()
        listed.apply(changes)
        self.take(family_keys, listed)

    def listing(self) -> ClusterView:
        """An empty view, for a listing in parts (:meth:`take`)."""
        return ClusterView(self.keys)

    def take(self, family_keys: Iterable[str], listed: ClusterView) -> None:
        """Replace these families by a listing."""
        families = frozenset(family_keys)
        if K.NODE_DRAIN in families:
            self.drains.clear()
            self.drains |= listed.drains
            self.drained_by = listed.drained_by
        if K.PENDING in families:
            self.pending = listed.pending
        if K.NOTICE in families:
            self.has_policies = listed.has_policies
        for family, mine, theirs in (  # in place: other objects refer to them
            (K.NODE, self.nodes, listed.nodes),
            (K.OPEN, self.gates, listed.gates),
            (K.COORDINATOR, self.elections, listed.elections),
            (K.HOLD, self.holds, listed.holds),
        ):
            if family in families:
                mine.clear()
                mine.update(theirs)  # type: ignore[arg-type]
        self._subjects, self._phases = Counter(), Counter()
        self._subjects.update((ref.table, ref.type) for ref in self.gates)
        for subject, phase, count in self.pending.counts():
            self._subjects[subject] += count
            self._phases[subject, phase] += count
        for family in families:
            _forget(self.foreign, *self.keys.family(family))
        self.foreign |= listed.foreign

    def apply(self, changes: Iterable[Change]) -> list[K.ParsedKey]:
        """Fold one response; returns the changed keys, parsed."""
        changed: list[K.ParsedKey] = []
        for change in changes:
            kv = change.kv
            self.foreign.pop(kv.key, None)
            try:
                key = self.keys.parse(kv.key)
                self._fold(key, kv, change.deleted)
            except (InvalidArgument, *UNREADABLE) as error:
                if not change.deleted:
                    self.foreign[kv.key] = str(error)
                continue
            changed.append(key)
        return changed

    def _fold(self, key: K.ParsedKey, kv: KeyValue, deleted: bool) -> None:
        if key.family == K.NODE:
            if deleted:
                self.nodes.pop(key.id, None)
            else:
                self.nodes[key.id] = Node.decode(kv.value)
        elif key.family == K.NODE_DRAIN:
            drain = Drain(False) if deleted else Drain.decode(kv.value)
            self.drained_by[key.id] = drain.actions
            if drain.drain:
                self.drains.add(key.id)
            else:
                self.drains.discard(key.id)
        elif key.family == K.HOLD:
            if deleted:
                self.holds.pop(key.id, None)
            else:
                self.holds[key.id] = Seen(Hold.decode(kv.value), kv.mod_revision)
        elif key.family == K.NOTICE:
            self.has_policies = not deleted
        elif key.family == K.COORDINATOR:
            if deleted:
                self.elections.pop((key.table, key.type), None)
            else:
                self.elections[key.table, key.type] = Seen(kv.value.decode(), kv.mod_revision)
        elif key.ref is not None and key.family == K.OPEN:
            self._set_gate(key.ref, None if deleted else Seen(Gate.decode(kv.value), kv.mod_revision))
        elif key.ref is not None and key.family == K.PENDING:
            self._set_pending(key.ref, None if deleted else Phase(kv.value.decode()))

    def _set_gate(self, ref: OperationRef, gate: Seen[Gate] | None) -> None:
        self._subjects[ref.table, ref.type] += (gate is not None) - (ref in self.gates)
        if gate is not None:
            self.gates[ref] = gate
        else:
            self.gates.pop(ref, None)

    def _set_pending(self, ref: OperationRef, phase: Phase | None) -> None:
        subject, before = (ref.table, ref.type), self.pending.get(ref)
        self._subjects[subject] += (phase is not None) - (before is not None)
        if before is not None:
            self._phases[subject, before] -= 1
        if phase is not None:
            self._phases[subject, phase] += 1
        self.pending.set(ref, phase)

    def live(self, incarnation: str) -> bool:
        """Whether the incarnation has a node key."""
        return incarnation in self.nodes

    def capable(
        self, type_name: str, where: Mapping[str, str] | None = None, tables: Collection[str] = ()
    ) -> list[str]:
        """The live, undrained incarnations that offer a type, serve these tables and have these labels; sorted."""
        return sorted(
            inc
            for inc, node in self.nodes.items()
            if type_name in node.behaviors
            and node.executor not in self.drains
            and (not where or fits(where, node.labels))
            and not refusal(node.serves, type_name, tables)
        )

    def any_in(self, subject: tuple[str, str], phases: Iterable[Phase]) -> bool:
        """Whether a pending operation of a (table, type) is in one of these phases."""
        return any(self._phases[subject, phase] for phase in phases)

    def wants(self, subject: tuple[str, str]) -> bool:
        """Whether a (table, type) has open or pending operations: it needs a coordinator."""
        return bool(self._subjects[subject])

    def wanted_types(self) -> set[tuple[str, str]]:
        """(table, type) of all open or pending operations: each needs a coordinator."""
        return {subject for subject, count in self._subjects.items() if count}


class TypeView:
    """All operations of one type on one table: what its coordinator decides from.

    ``few``: outcomes are kept for operations with at most this number of jobs.
    """

    def __init__(self, keys: Keys, table: str, type_name: str, few: int = 0) -> None:
        self.keys = keys
        self.table = table
        self.type = type_name
        self._few = few
        self.current: dict[str, int] = {}
        """Object → its running instance, for a type that runs one at a time."""
        self._kept = 0
        """Bytes of the kept outcomes."""
        self.operations = Operations(table, type_name)
        self.foreign: dict[str, str] = {}
        """Keys of the type that this release cannot read, with the reason; they are skipped."""
        self._spec: Spec | None = None
        """The spec read last; the next one shares most fields with it."""
        self._listed: TypeView | None = None
        """A listing in parts that is not complete."""
        self._job_roots: dict[str, OperationView] = {}
        """Root → operation, without pending ones: there may be very many."""
        self._claim_roots: dict[str, OperationView] = {}

    @property
    def claims_known(self) -> bool:
        """Whether claims are watched and were listed."""
        return self.operations.claims_known

    def replace(self, changes: Iterable[Change], *, claims: bool) -> set[OperationRef]:
        """Take a listing of the operations' keys, or (``claims``) of their claims; returns what may have changed."""
        if not claims:
            listed = self.listing()
            listed.apply(changes)
            return self.take(listed)
        _forget(self.foreign, *self.keys.type_claims(self.table, self.type))
        touched = set(self.operations.awake)
        self._set_claims_known(True)
        touched |= self.apply(changes)
        self._drop_empty(touched)
        return touched

    def listing(self) -> TypeView:
        """An empty view, for a listing of the operations' keys in parts (:meth:`take`).

        It invalidates an earlier listing that is not complete.
        """
        if self._listed is not None:
            self._listed.operations.resting.clear()
        listed = self._listed = TypeView(self.keys, self.table, self.type, self._few)
        listed.operations.resting = self.operations.resting.beside()
        listed.operations.claims_known = self.operations.claims_known
        listed._spec = self._spec
        return listed

    def take(self, listed: TypeView) -> set[OperationRef]:
        """Replace all operations by a listing, except claims.

        Returns what may have changed. Unchanged resting operations are left out: a listing of very many mostly shows
        nothing new.
        """
        former, now = self.operations, listed.operations
        self._listed = None
        touched = {*former.awake, *now.awake}
        touched |= {former.ref(*one) for one in former.resting.differing(now.resting)}
        touched |= {now.ref(*one) for one in now.resting.differing(former.resting)}
        now.claims_known = former.claims_known
        for op in now.awake.values():
            op.claims_known = former.claims_known
        for ref, op in former.awake.items():
            if op.claims:
                now.wake(ref).claims = op.claims
        former.resting.clear()
        now.resting.alone()
        self.operations, self.current, self._spec = now, listed.current, listed._spec
        self._kept, self._job_roots, self._claim_roots = listed._kept, listed._job_roots, {}
        _forget(self.foreign, *self.keys.type_range(self.table, self.type))
        self.foreign |= listed.foreign
        self._drop_empty(touched)
        return touched

    def forget_claims(self) -> None:
        """Stop tracking claims: they are no longer watched."""
        self._set_claims_known(False)
        _forget(self.foreign, *self.keys.type_claims(self.table, self.type))
        self._drop_empty(list(self.operations.awake))

    def _set_claims_known(self, known: bool) -> None:
        """Forget all claims."""
        self._claim_roots.clear()
        self.operations.claims_known = known
        for op in self.operations.awake.values():
            op.claims = NOTHING
            op.claims_known = known

    def apply(self, changes: Iterable[Change]) -> set[OperationRef]:
        """Fold one response; returns the operations that changed."""
        touched: set[OperationRef] = set()
        for change in changes:
            kv = change.kv
            head, _, last = kv.key.rpartition(".")
            if last == "outcome":
                self._keep_outcome(head, kv, change.deleted)
                continue
            if last == "progress":
                continue
            if last in _OWN_NAMES and (op := self._job_roots.get(head)) is not None:
                if self._fold_own(op, last, kv, change.deleted):
                    touched.add(op.ref)
                if op.state is State.PENDING:
                    self._waits(op, head)
                continue
            # The hot path: job states, and claims that are watched, of operations that are known.
            op = self._claim_roots.get(head)
            if op is not None and _is_ordinal(last):
                self._fold_claim(op, int(last), kv, change.deleted)
                touched.add(op.ref)
                continue
            if last == "state":
                head, _, number = head.rpartition(".")
                op = self._job_roots.get(head)
                if op is not None and _is_ordinal(number):
                    self._fold_job(op, int(number), kv, change.deleted)
                    touched.add(op.ref)
                    continue
            ref = self._fold_any(kv, change.deleted)
            if ref is not None:
                touched.add(ref)
        self._drop_empty(touched)
        return touched

    def _fold_own(self, op: OperationView, name: str, kv: KeyValue, deleted: bool) -> bool:
        """Fold one of an operation's own keys. False: it cannot be read."""
        self.foreign.pop(kv.key, None)
        try:
            self._fold_operation(op, name, kv, deleted)
        except UNREADABLE as error:
            if not deleted:
                self.foreign[kv.key] = str(error)
            return False
        if op.outcomes and (op.state is None or op.state.terminal):
            self._let_go(op)
        return True

    def _keep_outcome(self, job: str, kv: KeyValue, deleted: bool) -> None:
        root, _, number = job.rpartition(".")
        op = self._job_roots.get(root)
        if op is None or op.plan is None or op.plan.count > self._few or not _is_ordinal(number):
            return
        former = op.outcomes.get(int(number))
        op.outcomes = without_entry(op.outcomes, int(number))
        self._kept -= len(former.value) if former is not None else 0
        size = len(kv.value)
        if not deleted and size <= MAX_KEPT_OUTCOME and self._kept + size <= MAX_KEPT_OUTCOMES:
            op.outcomes = with_entry(op.outcomes, int(number), kv)
            self._kept += size

    def _waits(self, op: OperationView, root: str) -> None:
        """Keep as little as possible of a pending operation: there may be very many."""
        self._job_roots.pop(root, None)
        if op.spec is not None and op.spec is not self._spec:
            self._spec = op.spec = alike(op.spec, self._spec)

    def _let_go(self, op: OperationView) -> None:
        """Drop an operation's outcomes, which are not needed any more."""
        self._kept -= sum(len(kv.value) for kv in op.outcomes.values())
        op.outcomes = NOTHING

    def _fold_any(self, kv: KeyValue, deleted: bool) -> OperationRef | None:
        self.foreign.pop(kv.key, None)
        try:
            key = self.keys.parse(kv.key)
            if key.ref is None:
                self._fold_current(key, kv, deleted)
                return None
            op = self.operations.wake(key.ref)
            if key.family == K.CLAIM:
                self._claim_roots[self.keys.roots(key.ref)[1]] = op
                self._fold_claim(op, key.partition, kv, deleted)
            elif key.partition >= 0:
                self._job_roots[self.keys.root(key.ref)] = op
                self._fold_job(op, key.partition, kv, deleted)
            else:
                self._fold_operation(op, key.name, kv, deleted, key.chunk, key.id)
                root = self.keys.root(key.ref)
                if op.state is State.PENDING:
                    self._waits(op, root)
                else:
                    self._job_roots[root] = op
                if op.state is None or op.state.terminal:
                    self._let_go(op)
        except (InvalidArgument, *UNREADABLE) as error:
            if not deleted:
                self.foreign[kv.key] = str(error)
            return None
        if key.name == "after":
            self._note_broken(op, key.id)
        return key.ref

    @staticmethod
    def _note_broken(op: OperationView, edge: str) -> None:
        if text := op.after.get(edge):
            op.broken = op.broken if op.broken is not None else {}
            op.broken[edge] = text
        elif op.broken:
            op.broken.pop(edge, None)

    def _fold_current(self, key: K.ParsedKey, kv: KeyValue, deleted: bool) -> None:
        if key.name != "current":
            return
        if deleted:
            self.current.pop(key.object, None)
        else:
            self.current[key.object] = int(kv.value)

    def _drop_empty(self, touched: Iterable[OperationRef]) -> None:
        """Of the changed operations, drop those that are gone, and let pending ones rest."""
        awake = self.operations.awake
        for ref in touched:
            op = awake.get(ref)
            if op is None:
                continue
            if op.empty and not op.ended:
                del awake[ref]
            elif op.state is not State.PENDING or not self.operations.settle(op):
                continue
            if self._job_roots or self._claim_roots:
                jobs, claims = self.keys.roots(ref)
                self._job_roots.pop(jobs, None)
                self._claim_roots.pop(claims, None)

    def _fold_claim(self, op: OperationView, partition: int, kv: KeyValue, deleted: bool) -> None:
        """Fold a claim. An unreadable one is not among the claims, but prevents the operation's end in etcd."""
        self.foreign.pop(kv.key, None)
        seen = SeenClaim(kv.value, kv.mod_revision)
        try:
            readable = not deleted and seen.value is not None
        except UNREADABLE as error:
            self.foreign[kv.key], readable = str(error), False
        op.claims = with_entry(op.claims, partition, seen) if readable else without_entry(op.claims, partition)

    @staticmethod
    def _fold_job(op: OperationView, partition: int, kv: KeyValue, deleted: bool) -> None:
        if deleted:
            if partition in op.failed:
                op.failed = without_member(op.failed, partition)
            elif op.success:
                op.success -= 1
        elif kv.value == JobState.SUCCESS.encode():
            op.success += 1
        elif isinstance(op.failed, set):
            op.failed.add(partition)
        else:
            op.failed = {partition}

    @staticmethod
    def _fold_operation(
        op: OperationView, name: str, kv: KeyValue, deleted: bool, chunk: int = -1, edge_id: str = ""
    ) -> None:
        if name == "after":
            if deleted:
                op.after = without_entry(op.after, edge_id)
            else:
                edge = Edge.decode(kv.value)
                op.after = with_entry(op.after, edge_id, f"{edge.op} ended as {edge.broken}" if edge.broken else "")
        elif name == "next":
            op.next = (
                without_entry(op.next, edge_id) if deleted else with_entry(op.next, edge_id, Edge.decode(kv.value))
            )
        elif name == "state":
            op.state, op.state_mod = (None, 0) if deleted else (State(kv.value.decode()), kv.mod_revision)
        elif name == "spec":
            op.spec = None if deleted else Spec.decode(kv.value)
        elif name == "plan" and chunk >= 0:
            op.chunks = without_entry(op.chunks, chunk) if deleted else with_entry(op.chunks, chunk, kv.mod_revision)
        elif name == "plan":
            op.plan, op.plan_mod = (None, 0) if deleted else (Plan.decode(kv.value), kv.mod_revision)
        elif name == "planning":
            op.planning = None if deleted else Seen(Attempts.decode(kv.value), kv.mod_revision)
        elif name == "cancel":
            op.cancel = None if deleted else Cancel.decode(kv.value)
        elif name == "decision":
            op.decision = None if deleted else Seen(Decision.decode(kv.value), kv.mod_revision)
        elif name == "actions":
            op.actions = NO_ACTIONS if deleted else Actions.decode(kv.value)
        elif name == "options":
            op.altered = None if deleted else Seen(Options.decode(kv.value), kv.mod_revision)


def _forget(foreign: dict[str, str], first: str, after: str) -> None:
    """Forget unreadable keys of a range whose listing follows."""
    for key in [key for key in foreign if first <= key < after]:
        del foreign[key]


def _is_ordinal(text: str) -> bool:
    return len(text) == 6 and text.isascii() and text.isdigit()
