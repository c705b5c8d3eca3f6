"""Checks the invariants of distop on etcd's own history.

They are listed in docs/internals/architecture.md, "Invariants". :class:`Checker` replays the history revision by
revision, and judges each against the state before it; ``check`` is a fold over it. Time is linear in the number of
changes. Memory is bounded by what exists at a revision (operations that have not ended and their jobs, history records,
nodes), not by the length of the history.

Invariant 11 (everything ends) is about time and not visible in a history. Invariant 0 stands for a record that cannot
be read.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from distop.errors import InvalidArgument
from distop.invariants.cluster_invariants import ClusterTrace, Ids, RequestKeys, Requests
from distop.invariants.dependency_invariants import broken_edge, deleted_edge, left_to_wait_for
from distop.invariants.job_invariants import job_faults, unreadable
from distop.invariants.limit_invariants import freed_under_claim, limit_faults, orphaned_permit, unclaimed_permit
from distop.invariants.operation_invariants import (
    FOLLOWS,
    UnreadableChunk,
    all_succeeded,
    miscounted,
    unfit_gate,
    unfit_plan,
    unfit_record,
)
from distop.invariants.policy_invariants import FAMILIES, PolicyTrace
from distop.invariants.replay_state import (
    ACTIVE,
    STORY,
    JobDelta,
    JobTrace,
    OperationTrace,
    Violation,
    apart,
    brief,
    event_line,
)
from distop.protocol import keys as K
from distop.protocol.dependencies import Edge
from distop.protocol.identity import holder_of
from distop.protocol.json_codec import UNREADABLE, loads, parse_time
from distop.protocol.plan import Gate
from distop.protocol.records import CLUSTER_TABLE, Attempts, Cancel, Decision, History, OperationRef, Phase, State
from distop.protocol.revisioned import Change
from distop.protocol.schedule import Series, following, next_request
from distop.protocol.texts import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distop.invariants.cluster_invariants import StartedInstances
    from distop.protocol.keys import Keys, ParsedKey
    from distop.protocol.txn import KeyValue

    Writes = list[tuple[ParsedKey, Change]]

ObjectPlace: TypeAlias = tuple[str, str, str]
"""(table, type, object or id)."""
_LATE = "the key was written after its operation had ended and was cleaned up"


@dataclass(slots=True)
class _Touched:
    """What one revision touches, and is checked when all of its writes are applied."""

    started: StartedInstances = field(default_factory=dict)
    places: set[ObjectPlace] = field(default_factory=set)
    """Places of operations that run one at a time."""
    tables: set[str] = field(default_factory=set)
    ids: dict[ObjectPlace, OperationTrace | None] = field(default_factory=dict)


def _starts(writes: Writes) -> bool:
    """Whether these writes start an operation."""
    return any(key.name == "spec" and key.family == K.OP and not change.deleted for key, change in writes)


def _ends(writes: Writes) -> bool:
    """Whether these writes end an operation."""
    states = [change.kv.value for key, change in writes if key.name == "state" and key.family == K.OP]
    return any(State(value.decode()).terminal for value in states if value)


def check(
    keys: Keys, history: Iterable[tuple[int, Sequence[Change]]], listing: Iterable[KeyValue] = ()
) -> list[Violation]:
    """All violations in a history.

    ``history``: (revision, its changes) in order, from an empty store, or from the state in ``listing``, which is not
    checked itself.
    """
    checker = Checker(keys)
    checker.begin(listing)
    return [violation for revision, changes in history for violation in checker.feed(revision, changes)]


class Checker:
    """The replay, one revision at a time, for histories that are read as a stream.

    After a violation it continues from the state found. So a single wrong write may cause several violations.
    """

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.revision = 0
        """The last revision that was fed."""
        self.operations_seen = 0
        self.jobs_seen = 0
        self._violations: list[Violation] = []
        self._quiet = False
        self._operations: dict[OperationRef, OperationTrace] = {}
        self._job_roots: dict[str, OperationTrace] = {}
        self._claim_roots: dict[str, OperationTrace] = {}
        self._cluster = ClusterTrace()
        self._cluster_log: dict[str, deque[tuple[int, Change]]] = {}
        self._existing: set[str] = set()
        self._records: dict[OperationRef, int] = {}
        """History records, with the revision at which each was written."""
        self._requests = Requests()
        self._request_keys = RequestKeys()
        self._ids = Ids()
        self._policies = PolicyTrace(keys)
        self._left_ids: dict[tuple[str, str, str], OperationTrace | None] = {}
        """Ids that an operation may have held until its last keys were deleted in this revision."""

    def begin(self, listing: Iterable[KeyValue]) -> None:
        """Start from a listing instead of an empty store."""
        self._quiet = True
        self.feed(0, [Change(kv) for kv in listing])
        self._quiet = False
        for op in self._operations.values():
            if op.plan is not None:
                op.chunks = dict.fromkeys(op.chunks, b"")  # not checked; frees their bytes

    @property
    def operations(self) -> Collection[OperationRef]:
        """The operations with keys other than their history."""
        return self._operations.keys()

    def jobs_of(self, ref: OperationRef) -> int:
        """The number of an operation's jobs that were seen, while its keys exist."""
        op = self._operations.get(ref)
        return len(op.jobs) if op is not None else 0

    def feed(self, revision: int, changes: Sequence[Change]) -> list[Violation]:
        """Take one whole revision; returns its violations.

        The changes may include keys of other programs.
        """
        self.revision = revision
        self._violations = []
        for part in apart(self.keys, changes, self._is_active):
            self._step(part)
        found, self._violations = self._violations, []
        return found

    def _is_active(self, ref: OperationRef) -> bool:
        op = self._operations.get(ref)
        return op is not None and op.state is not None and not op.state.terminal

    def _step(self, changes: Sequence[Change]) -> None:
        jobs, own, cluster = self._sorted(changes)
        for ref, writes in own.items():
            if any(key.family == K.OPEN and not change.deleted for key, change in writes):
                self._trace(ref).gate = True  # one transaction may write a plan and claims
        for op, deltas in jobs.items():
            for partition, delta in deltas.items():
                self._job(op, partition, delta)
        self._permits(own)
        if not self._quiet:
            self._new_edges(own)
        touched = _Touched()
        for ref, writes in own.items():
            self._operation(ref, writes, touched.started)
        touched.places |= {(ref.table, ref.type, ref.object) for ref in own}
        touched.tables |= {ref.table for ref in own}
        touched.ids, self._left_ids = self._left_ids, {}
        known = (self._operations.get(ref) for ref in own)
        touched.ids |= {place: one for one in known if one is not None and (place := self._ids.update(one)) is not None}
        for key, change in cluster:
            self._cluster_write(key, change, touched)
        self._of_policies(cluster, own)
        for ref, writes in own.items():
            forgotten = self._forgotten(ref, [c for _, c in writes if c.kv.key == self.keys.history(ref)])
            if forgotten and (named := self._request_keys.naming(ref)):
                self._found(14, named, f"the key still names {ref}, whose history was deleted", writes=forgotten)
        self._check_touched(touched)
        for ref in own:
            self._holds_current(ref)
        for op, deltas in jobs.items():
            self._at_most(op, deltas)

    def _sorted(
        self, changes: Sequence[Change]
    ) -> tuple[dict[OperationTrace, dict[int, JobDelta]], dict[OperationRef, Writes], Writes]:
        """The changes of jobs, the writes to other keys of operations, and the writes to keys of the cluster."""
        jobs: dict[OperationTrace, dict[int, JobDelta]] = {}
        own: dict[OperationRef, Writes] = {}
        cluster: Writes = []
        for change in changes:
            if self._of_job(change, jobs):
                continue
            try:
                key = self.keys.parse(change.kv.key)
            except (InvalidArgument, ValueError):
                continue  # another program's or namespace's key
            if key.ref is None:
                cluster.append((key, change))
            elif key.partition >= 0:
                deltas = jobs.setdefault(self._trace(key.ref), {})
                setattr(deltas.setdefault(key.partition, JobDelta()), key.name or "claim", change)
            else:
                own.setdefault(key.ref, []).append((key, change))
        return jobs, own, cluster

    def _cluster_write(self, key: ParsedKey, change: Change, touched: _Touched) -> None:
        """Takes a write to a key of the cluster, and notes what is to be checked after the revision."""
        if key.family == K.HOLD and change.deleted and key.id in self._cluster.denied:
            self._denied_gone(key.id, change)
        self._cluster_log.setdefault(change.kv.key, deque(maxlen=STORY)).append((self.revision, brief(change)))
        if key.name == "current":
            touched.places.add((key.table, key.type, key.object))
        elif key.name == "runOps":
            touched.tables.add(key.table)
        elif key.family == K.UNIQUE:
            touched.ids.setdefault((key.table, key.type, key.id), None)
        elif key.family == K.REQUEST:
            self._request_key(change)
        for number, text in self._cluster.fold(key, change, touched.started, self._quiet):
            self._found(number, change.kv.key, text)
        if change.deleted and key.family in (K.NODE, K.TABLE, K.HOLD, *FAMILIES):  # bounds memory
            del self._cluster_log[change.kv.key]

    def _of_policies(self, cluster: Writes, own: Mapping[OperationRef, Writes]) -> None:
        """Checks policies and the operations that they start (20)."""
        writes = [(key, change) for key, change in cluster if key.family in FAMILIES or key.family == K.NOTICE]
        started = {}
        for ref, written in own.items():
            op = self._operations.get(ref)
            if _starts(written) and op is not None and op.spec is not None:
                started[ref] = op.spec
        if writes or started:
            for number, where, text in self._policies.fold(writes, started, self._cluster.live):
                self._found(number, where, text)

    def _check_touched(self, touched: _Touched) -> None:
        for table, type_name in touched.started:
            text = "an operation started without taking an instance number"
            self._found(6, self.keys.next_instance(table, type_name), text)
        for table in touched.tables:
            if text := self._cluster.miscounted(table):
                self._found(7, self.keys.run_ops(table), text)
        for place in touched.places:
            self._one_at_a_time(place)
        for place, one in touched.ids.items():
            self._one_of_an_id(place, one)

    # ------------------------------------------------------------------- jobs

    def _of_job(self, change: Change, jobs: dict[OperationTrace, dict[int, JobDelta]]) -> bool:
        """Takes a job's key of a known operation without parsing it: the hot path."""
        head, _, name = change.kv.key.rpartition(".")
        if name in K.JOB_NAMES:
            head, _, number = head.rpartition(".")
            op = self._job_roots.get(head)
        else:
            op, name, number = self._claim_roots.get(head), "claim", name
        if op is None or len(number) != 6 or not (number.isascii() and number.isdigit()):
            return False
        deltas = jobs.get(op)
        if deltas is None:
            deltas = jobs[op] = {}
        delta = deltas.get(int(number))
        if delta is None:
            delta = deltas[int(number)] = JobDelta()
        setattr(delta, name, change)
        return True

    def _job(self, op: OperationTrace, partition: int, delta: JobDelta) -> None:
        ref = op.ref
        self.jobs_seen += partition not in op.jobs
        job = op.job(partition)
        over = self._is_removed(op)
        writes = [c for c in (delta.claim, delta.state, delta.outcome, delta.progress) if c is not None]
        for change in writes:
            self._exist(op, change)
            if over and not change.deleted:
                self._found(9, change.kv.key, _LATE, op, job, writes)
        try:
            if not self._quiet:
                coordinated = (ref.table, ref.type) in self._cluster.elections
                for number, key, text in job_faults(op, partition, job, delta, self._cluster.live, coordinated):
                    self._found(number, key, text, op, job, writes)
            op.fold_job(self.revision, job, partition, delta)
        except UNREADABLE as error:
            self._found(0, unreadable(delta), f"the record cannot be read: {error}", op, job, writes)

    def _permits(self, own: Mapping[OperationRef, Writes]) -> None:
        """Takes writes to permits, and checks them against the claims (16)."""
        for ref, writes in own.items():
            for key, change in writes:
                if key.family != K.PERMIT:
                    continue
                op = self._trace(ref)
                had = op.permits.get(key.chunk)
                op.fold_permit(key.chunk, change)
                if had is not None and freed_under_claim(op, key.chunk, had):
                    text = f"the permit was taken from job {had}, whose claim still has it"
                    self._found(16, change.kv.key, text, op, op.jobs[had], [change])
                if unclaimed_permit(op, key.chunk):
                    named = op.permits[key.chunk]
                    text = f"the permit names job {named}, whose claim does not have it"
                    self._found(16, change.kv.key, text, op, op.jobs.get(named), [change])

    def _at_most(self, op: OperationTrace, deltas: Mapping[int, JobDelta]) -> None:
        """Checks the claims of this revision against limits (16) and selectors (17)."""
        if self._quiet:
            return
        for p, delta in deltas.items():
            if delta.claim is not None and (left := orphaned_permit(op, p)) >= 0:
                text = f"the permit still names job {p}, whose claim with it has ended"
                self._found(16, self.keys.permit(op.ref, left), text, op, op.jobs[p])
        claimed = [p for p, delta in deltas.items() if delta.claim is not None and not delta.claim.deleted]
        claimed = [p for p in claimed if (claim := op.jobs[p].claim) is not None and not claim.waiting]
        for p in claimed:
            if op.jobs[p].extended:
                continue
            for number, text in limit_faults(op, p, self._cluster.labels, self._cluster.serves):
                self._found(number, self.keys.claim(op.ref, p), text, op, op.jobs[p])

    # -------------------------------------------------------------- operations

    def _operation(self, ref: OperationRef, writes: Writes, started: StartedInstances) -> None:
        if all(key.family == K.HISTORY for key, _ in writes) and ref not in self._operations:
            for key, change in writes:
                if key.chunk < 0:
                    self._recorded(ref, change)
            return
        op = self._trace(ref)
        before, had_plan, decided = op.state, op.plan is not None, op.decision
        edges = {key.id: op.after[key.id] for key, _ in writes if key.name == "after" and key.id in op.after}
        records = [c for key, c in writes if key.family == K.HISTORY and not key.name and not c.deleted]
        history = records[0] if records else None
        for key, change in writes:
            op.log.append((self.revision, brief(change)))
            if key.family != K.HISTORY:
                self._write(op, key, change, had_plan=had_plan, created=before is None)
        if history is not None and op.given is not None and op.given.series is not None:
            with suppress(*UNREADABLE):  # reported elsewhere
                op.finished = History.decode(history.kv.value).finished
        self._cluster.tally(ref, before in ACTIVE, op.active)
        if before is None and op.state is not None:
            started.setdefault((ref.table, ref.type), []).append(ref.instance)
        if self._quiet:
            return
        if op.plan is not None and not had_plan:
            self._planned(op)
        if before is State.PENDING and op.state is State.PENDING:
            self._let_go(op, writes, edges)
        if decided is None and op.decision is not None and before is not None:
            self._verdict(op, op.decision)
        if op.state is not before:
            self._state(op, before, history)
        elif history is not None:
            self._found(5, history.kv.key, "the history record was written without the terminal state", op)
        self._gate(op, writes)

    def _write(self, op: OperationTrace, key: ParsedKey, change: Change, *, had_plan: bool, created: bool) -> None:
        """Checks a write to one of the operation's own keys, and applies it."""
        existed = self._exist(op, change)
        try:
            if change.deleted:
                self._dropped(op, key, change.kv.key, had_plan)
            else:
                self._before_write(op, key, change, existed, created)
            if key.family == K.OPEN:
                op.gate = not change.deleted
                op.opened = Gate.decode(change.kv.value) if op.gate else Gate()
            elif key.family == K.PENDING:
                op.phase = None if change.deleted else Phase(change.kv.value.decode())
            elif key.family != K.PERMIT:
                op.fold(key.name, key.chunk, key.id, change)
        except UNREADABLE as error:
            self._found(0, change.kv.key, f"the record cannot be read: {error}", op)

    def _gate(self, op: OperationTrace, writes: Writes) -> None:
        """Checks the gate (12), and its options after a write to either (16)."""
        if wrong := unfit_gate(op):
            self._found(12, self.keys.gate(op.ref), wrong, op)
        reopened = any(key.family == K.OPEN or key.name == "options" for key, _ in writes)
        if reopened and op.gate and op.opened.options != op.options:
            self._found(16, self.keys.gate(op.ref), f"the gate has {op.opened.options}, expected {op.options}", op)

    def _planned(self, op: OperationTrace) -> None:
        try:
            if wrong := unfit_plan(op):
                self._found(13, self.keys.of(op.ref, "plan"), wrong, op)
        except UnreadableChunk as error:
            self._found(0, self.keys.chunk(op.ref, error.number), f"the record cannot be read: {error}", op)

    def _dropped(self, op: OperationTrace, key: ParsedKey, where: str, had_plan: bool) -> None:
        """Checks the deletion of a key that must stay until the operation has ended.

        Chunks must stay once the plan exists.
        """
        if op.state is None or op.state.terminal:
            return
        if key.name == "plan" and (had_plan or key.chunk < 0):
            self._found(13, where, f"the plan was deleted while its operation was {op.state}", op)
        elif key.name in ("spec", "arg", "decision"):
            self._found(9, where, f"the {key.name} was deleted while its operation was {op.state}", op)

    def _before_write(self, op: OperationTrace, key: ParsedKey, change: Change, existed: bool, created: bool) -> None:
        """Checks a write to one of the operation's own keys before it is applied."""
        name, where = key.name, change.kv.key
        if self._is_removed(op):
            self._found(9, where, _LATE, op)
        if name in ("plan", "planning", "decision") and not created:
            self._elected(op, where)
        if name in ("arg", "spec") and existed:
            self._found(14, where, f"the {name}, which never changes, was written again", op)
        elif name == "plan" and op.plan is not None:
            self._found(13, where, "the plan was changed after it was written", op)
        elif name == "planning":
            tries = Attempts.decode(change.kv.value).attempts
            if op.planning is not None and tries <= op.planning.attempts:
                text = f"planning attempts changed from {op.planning.attempts} to {tries}; they must increase"
                self._found(10, where, text, op)
        elif name == "cancel" and Cancel.decode(change.kv.value).reason == "failed":
            self._elected(op, where)
        elif name == "decision" and op.decision is not None:
            self._decided_again(op, where, op.decision, Decision.decode(change.kv.value))
        elif name == "spec":
            self._request(op, where, loads(change.kv.value).get("request_id", ""))

    def _decided_again(self, op: OperationTrace, where: str, old: Decision, new: Decision) -> None:
        if any(getattr(new, name) != getattr(old, name) for name in ("total", "success", "failed", "failed_ranges")):
            self._found(5, where, "the decision's counts of jobs were changed", op)
        if new.attempts < old.attempts:
            self._found(10, where, f"completion attempts decreased from {old.attempts} to {new.attempts}", op)

    def _request(self, op: OperationTrace, where: str, request: str) -> None:
        first = self._requests.began(op.ref, request)
        former = self._operations.get(first)
        if first != op.ref and former is not None and former.spec and former.spec.hold in self._cluster.denied:
            self._requests.forget(first)  # its graph was denied: it never started
            first = self._requests.began(op.ref, request)
        if first != op.ref:
            self._found(14, where, f"the request {request} started two operations: {first} and {op.ref}", op)

    def _request_key(self, change: Change) -> None:
        """Checks a write to the key of a request id (14)."""
        where = change.kv.key
        if change.deleted:
            named = self._request_keys.deleted(where)
            if named and self._requests.known(OperationRef.parse(named)):
                text = f"the key was deleted while {named}, which it names, still has keys or a history record"
                self._found(14, where, text)
            self._cluster_log.pop(where, None)
            return
        try:
            ref = holder_of(change.kv.value)
        except ValueError as error:
            self._found(0, where, f"the record cannot be read: {error}")
            return
        self._request_keys.put(where, str(ref))
        op = self._operations.get(ref)
        if op is None or op.spec is None or self.keys.request(ref.table, ref.type, op.spec.request_id) != where:
            self._found(14, where, f"the key names {ref}, which this request did not start")

    def _recorded(self, ref: OperationRef, change: Change) -> None:
        """Takes a history record of an ended operation: deleted, or in the listing."""
        if change.deleted:
            self._requests.forget(ref)
        elif self._quiet:
            with suppress(*UNREADABLE):
                record = History.decode(change.kv.value)
                if not record.void:
                    self._requests.began(ref, record.request_id)

    def _forgotten(self, ref: OperationRef, records: Sequence[Change]) -> list[Change]:
        """Deletions of an operation's history record.

        Reports those within its hour (14), and a record that is written a second time (5).
        """
        for change in records:
            if not change.deleted:
                if ref in self._records:
                    self._found(5, change.kv.key, "the history record was written a second time", writes=[change])
                self._records[ref] = change.kv.mod_revision
            elif self._records.pop(ref, -1) > self._cluster.old_upto:
                text = "the history record was deleted, but no watermark shows that it is an hour old"
                self._found(14, change.kv.key, text, writes=[change])
        return [change for change in records if change.deleted]

    def _elected(self, op: OperationTrace, where: str) -> None:
        if (op.ref.table, op.ref.type) not in self._cluster.elections:
            self._found(8, where, "a coordinator wrote the key while none was elected", op)

    def _verdict(self, op: OperationTrace, decision: Decision) -> None:
        where = self.keys.of(op.ref, "decision")
        if wrong := miscounted(op, decision.total, decision.success, decision.failed, decision.failed_ranges):
            self._found(5, where, wrong, op)
        if decision.verdict is State.SUCCESS and not all_succeeded(op):
            self._found(5, where, "the verdict is success, but not all jobs succeeded", op)
        if op.claims:
            self._found(5, where, f"the operation was decided while {plural(op.claims, 'claim')} existed", op)

    def _state(self, op: OperationTrace, before: State | None, history: Change | None) -> None:
        where = self.keys.of(op.ref, "state")
        if op.state is None:
            self._ended(op, before, where)
            return
        if op.state not in FOLLOWS[before]:
            self._found(5, where, f"the state must not change from {before or 'absent'} to {op.state}", op)
        if before is State.PENDING:
            self._waited(op, where)
        if not op.state.terminal:
            return
        by_caller = op.cancel is not None and (op.cancel.reason == "user" or op.cancel.replaced_by)
        if before is not State.PENDING or not by_caller:
            self._elected(op, where)  # a caller ends a pending operation that it cancels or replaces
        if op.claims:
            self._found(5, where, f"the operation finished while {plural(op.claims, 'claim')} existed", op)
        if op.state is State.SUCCESS and before is not State.PENDING and not all_succeeded(op):
            self._found(5, where, "the state is success, but not all jobs succeeded", op)
        if op.state is State.SUCCESS and op.decision is not None and op.decision.verdict is not State.SUCCESS:
            self._found(5, where, f"the state is success, expected the decided verdict {op.decision.verdict}", op)
        if history is None:
            self._found(5, self.keys.history(op.ref), "the operation finished without a history record", op)
            return
        try:
            record = History.decode(history.kv.value)
        except UNREADABLE as error:
            self._found(0, history.kv.key, f"the record cannot be read: {error}", op)
            return
        if record.void:
            self._requests.forget(op.ref)
            if op.spec is None or op.spec.hold not in self._cluster.denied:
                text = "the record is void, but the hold of the operation's graph was not denied"
                self._found(14, history.kv.key, text, op)
        for number, text in unfit_record(op, record):
            self._found(number, history.kv.key, text, op)

    def _waited(self, op: OperationTrace, where: str) -> None:
        """Checks that an operation stops waiting only when nothing is left to wait for (15)."""
        for text in left_to_wait_for(op, self._cluster):
            self._found(15, where, text, op)

    def _denied_gone(self, id_: str, change: Change) -> None:
        """Checks that a denied hold stays while an operation is pending under it (15)."""
        for op in self._operations.values():
            if op.state is State.PENDING and op.spec is not None and op.spec.hold == id_:
                text = f"the denied hold was deleted while {op.ref} was still pending under it"
                self._found(15, change.kv.key, text, op, writes=[change])

    def _let_go(self, op: OperationTrace, writes: Writes, edges: Mapping[str, Edge]) -> None:
        """Checks the deleted and the broken edges of a pending operation (15)."""
        for key, change in writes:
            if key.name != "after":
                continue
            text = ""
            if change.deleted:
                if (edge := edges.get(key.id)) is not None:
                    text = deleted_edge(edge, self._state_of(edge.op))
            else:
                with suppress(*UNREADABLE, InvalidArgument):  # reported elsewhere
                    edge = Edge.decode(change.kv.value)
                    text = broken_edge(edge, self._state_of(edge.op) if edge.broken else None)
            if text:
                self._found(15, change.kv.key, text, op)

    def _state_of(self, name: str) -> State | None:
        op = self._operations.get(OperationRef.parse(name))
        return op.state if op is not None else None

    def _new_edges(self, own: Mapping[OperationRef, Writes]) -> None:
        """Checks that a new edge's predecessor has not ended, or starts with it (15).

        It must not end in the same revision.
        """
        for ref, writes in own.items():
            op = self._operations.get(ref)
            for key, change in writes:
                if key.name != "after" or change.deleted or (op is not None and key.id in op.after):
                    continue
                with suppress(*UNREADABLE, InvalidArgument):  # reported elsewhere
                    pred = OperationRef.parse(Edge.decode(change.kv.value).op)
                    if not self._is_active(pred) and not _starts(own.get(pred, [])):
                        text = f"the new edge waits for {pred}, which is {self._state_of(str(pred)) or 'absent'}"
                        self._found(15, change.kv.key, text, op, writes=[change])
                    elif _ends(own.get(pred, [])):
                        text = f"the new edge waits for {pred}, which ends in the same transaction"
                        self._found(15, change.kv.key, text, op, writes=[change])

    def _ended(self, op: OperationTrace, before: State | None, where: str) -> None:
        if before is not None and not before.terminal:
            self._found(9, where, f"the state was deleted while it was {before}, not terminal", op)
        self._elected(op, where)
        if op.keys:
            left = sorted(k for k in self._existing if self._belongs(k, op.ref))
            text = f"{plural(op.keys, 'key')} remained after the operation's end: {', '.join(left[:5])}"
            self._found(9, where, text, op)
        if before is not None and (text := self._without_next(op, before)):
            self._found(19, where, text, op)
        if (place := self._ids.gone(op)) is not None:
            self._left_ids[place] = None
        self._operations.pop(op.ref, None)
        jobs, claims = self.keys.roots(op.ref)
        del self._job_roots[jobs], self._claim_roots[claims]

    def _without_next(self, op: OperationTrace, ended: State) -> str:
        """Why the last keys of a series' operation must stay for now (19), or "".

        The next operation may have been refused for good: the table was removed, perhaps not for long, the declared
        type has changed, or the id is taken.
        """
        ref, spec, cluster = op.ref, op.given, self._cluster
        request = next_request(ref)
        if spec is None or spec.series is None or self._requests.began_by(op.ref, request):
            return ""
        series = Series.from_json(spec.series)
        finished = parse_time(op.finished)
        unknown = series.until and not finished  # the record was written before the replay began, or is unreadable
        if unknown or following(series, str(ref), ended, finished, finished, 0.0) is None:
            return ""
        same_table = ref.table == CLUSTER_TABLE or cluster.tables.get(ref.table, op.began) < op.began
        same_type = 0 < cluster.declared.get(ref.type, 0) < op.began
        same_id = not spec.id or cluster.ids.get((ref.table, ref.type, spec.id)) in (None, str(ref))
        if not (same_table and same_type and same_id):
            return ""
        return f"the last keys were deleted, but the next operation of the series (request {request}) never started"

    def _is_removed(self, op: OperationTrace) -> bool:
        """Whether it ended and was cleaned up before: its number was drawn, and it has no state."""
        return op.state is None and self._cluster.drawn(op.ref)

    def _belongs(self, key: str, ref: OperationRef) -> bool:
        parsed = self.keys.parse(key)
        return parsed.ref == ref and parsed.family != K.HISTORY

    # ---------------------------------------------------------------- helpers

    def _one_at_a_time(self, place: tuple[str, str, str]) -> None:
        instance = self._cluster.current.get(place)
        if instance is not None:
            op = self._operations.get(OperationRef(*place, instance))
            if op is None or not op.active:
                self._found(7, self.keys.current(*place), f"the key names instance {instance}, which is not running")

    def _one_of_an_id(self, place: tuple[str, str, str], op: OperationTrace | None) -> None:
        key, named = self.keys.unique(*place), self._cluster.ids.get(place)
        if text := self._ids.wrong(place, named):
            self._found(18, key, text, op)
        if named is None:  # bounds memory
            self._cluster_log.pop(key, None)

    def _holds_current(self, ref: OperationRef) -> None:
        op = self._operations.get(ref)
        if op is not None and op.active and op.spec is not None and op.spec.one_at_a_time:
            place = (ref.table, ref.type, ref.object)
            if self._cluster.current.get(place) != ref.instance:
                named = self._cluster.current.get(place, "none")
                text = f"the key names instance {named}, expected the running instance {ref.instance}"
                self._found(7, self.keys.current(*place), text, op)

    def _trace(self, ref: OperationRef) -> OperationTrace:
        op = self._operations.get(ref)
        if op is None:
            op = self._operations[ref] = OperationTrace(ref)
            self.operations_seen += 1
            jobs, claims = self.keys.roots(ref)
            self._job_roots[jobs] = self._claim_roots[claims] = op
        return op

    def _exist(self, op: OperationTrace, change: Change) -> bool:
        """Counts the operation's keys; returns whether this one existed before."""
        key = change.kv.key
        existed = key in self._existing
        if change.deleted:
            if existed:
                self._existing.discard(key)
                op.keys -= 1
        elif not existed:
            self._existing.add(key)
            op.keys += 1
        return existed

    def _found(
        self,
        invariant: int,
        key: str,
        text: str,
        op: OperationTrace | None = None,
        job: JobTrace | None = None,
        writes: Sequence[Change] = (),
    ) -> None:
        """Records a violation.

        ``writes``: the writes of this revision to ``job``, which are not in its log yet.
        """
        if self._quiet or (op is not None and op.newer):
            return
        own = [*(op.log if op is not None else ()), *self._cluster_log.get(key, ())]
        of_job = [*(job.log if job is not None else ()), *((self.revision, change) for change in writes)]
        known = sorted([*own, *of_job], key=lambda entry: entry[0])
        self._violations.append(Violation(invariant, self.revision, key, text, tuple(map(event_line, known))))
