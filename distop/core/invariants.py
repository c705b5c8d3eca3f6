"""The invariants of distop, checked on etcd's own history (docs/architecture.md, "Invariants").

``check`` replays the history revision by revision and judges each against what was before it. It is linear in the
number of changes. Invariant 11 (everything ends) is about time and is not visible in a history. Invariant 0 stands
for a record that cannot be read at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distop.core import keys as K
from distop.core.cluster_invariants import ClusterTrace
from distop.core.codec import loads
from distop.core.job_invariants import job_faults
from distop.core.model import Attempts, Cancel, Decision, History, OperationRef, Phase, State
from distop.core.operation_invariants import FOLLOWS, all_succeeded, miscounted, unfit_plan
from distop.core.states import Stage
from distop.core.trace import ACTIVE, JobDelta, OperationTrace, tell
from distop.core.view import Change
from distop.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.core.keys import Keys, ParsedKey
    from distop.core.txn import KeyValue


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold: its number, the revision that broke it, the key, what is wrong, and
    (``story``) the last events of the operation, and of the job where it is about one.
    """

    invariant: int
    revision: int
    key: str
    text: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"invariant {self.invariant} at revision {self.revision}: {self.key}: {self.text}"


def check(
    keys: Keys, history: Iterable[tuple[int, Sequence[Change]]], listing: Iterable[KeyValue] = ()
) -> list[Violation]:
    """Everything that the history breaks. ``history``: (revision, the changes of that revision) in order, from an
    empty store, or from the state that ``listing`` holds (which itself is taken as it is).
    """
    checker = Checker(keys)
    checker.begin(listing)
    for revision, changes in history:
        checker.step(revision, changes)
    return checker.violations


class Checker:
    """The replay, one revision at a time, for histories that are read as a stream."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.violations: list[Violation] = []
        self.revision = 0
        self._quiet = False
        self._operations: dict[OperationRef, OperationTrace] = {}
        self._job_roots: dict[str, OperationTrace] = {}
        self._claim_roots: dict[str, OperationTrace] = {}
        self._over: set[OperationRef] = set()
        self._cluster = ClusterTrace()
        self._existing: set[str] = set()
        self._requests: dict[str, OperationRef] = {}

    def begin(self, listing: Iterable[KeyValue]) -> None:
        """Start from what a listing holds instead of from an empty store."""
        self._quiet = True
        self.step(0, [Change(kv) for kv in listing])
        self._quiet = False

    def step(self, revision: int, changes: Sequence[Change]) -> None:
        """One revision, whole."""
        self.revision = revision
        jobs: dict[OperationTrace, dict[int, JobDelta]] = {}
        own: dict[OperationRef, list[tuple[ParsedKey, Change]]] = {}
        cluster: list[tuple[ParsedKey, Change]] = []
        for change in changes:
            if self._of_job(change, jobs):
                continue
            try:
                key = self.keys.parse(change.kv.key)
            except (InvalidArgument, ValueError):
                continue  # not ours, or another namespace's
            if key.ref is None:
                cluster.append((key, change))
            elif key.partition >= 0:
                deltas = jobs.setdefault(self._trace(key.ref), {})
                setattr(deltas.setdefault(key.partition, JobDelta()), key.name or "claim", change)
            else:
                own.setdefault(key.ref, []).append((key, change))
        for op, deltas in jobs.items():
            for partition, delta in deltas.items():
                self._job(op, partition, delta)
        started: dict[tuple[str, str], list[int]] = {}
        for ref, writes in own.items():
            self._operation(ref, writes, started)
        places = {(ref.table, ref.type, ref.object) for ref in own}
        tables = {ref.table for ref in own}
        for key, change in cluster:
            if key.name == "current":
                places.add((key.table, key.type, key.object))
            elif key.name == "runOps":
                tables.add(key.table)
            for number, text in self._cluster.fold(key, change, started, self._quiet):
                self._found(number, change.kv.key, text)
        for table, type_name in started:
            self._found(6, self.keys.next_instance(table, type_name), "an operation began and took no number")
        for table in tables:
            if text := self._cluster.miscounted(table):
                self._found(7, self.keys.run_ops(table), text)
        for place in places:
            self._one_at_a_time(place)
        for ref in own:
            self._holds_current(ref)

    # ------------------------------------------------------------------- jobs

    def _of_job(self, change: Change, jobs: dict[OperationTrace, dict[int, JobDelta]]) -> bool:
        """The hot path: a job's key of an operation that is known needs no parsing."""
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
        job = op.job(partition)
        for change in (delta.claim, delta.state, delta.outcome, delta.progress):
            if change is not None:
                self._exist(op, change)
                if ref in self._over and not change.deleted:
                    self._found(9, change.kv.key, "written after its operation was finished and cleaned up", op)
        story = None
        try:
            if not self._quiet:
                coordinated = (ref.table, ref.type) in self._cluster.elections
                faults = list(job_faults(op, partition, job, delta, self._cluster.live, coordinated))
                if faults:
                    story = [*job.log, *((self.revision, c) for c in (delta.claim, delta.state, delta.outcome) if c)]
                    for number, key, text in faults:
                        self._found(number, key, text, op, story)
            op.fold_job(self.revision, job, partition, delta)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._found(0, self.keys.claim(ref, partition), f"a record of the job cannot be read: {error}", op, story)

    # -------------------------------------------------------------- operations

    def _operation(
        self,
        ref: OperationRef,
        writes: list[tuple[ParsedKey, Change]],
        started: dict[tuple[str, str], list[int]],
    ) -> None:
        if all(key.family == K.HISTORY for key, _ in writes) and ref not in self._operations:
            return  # a history record is trimmed, or stands in the listing
        op = self._trace(ref)
        before, had_plan, decided = op.state, op.plan is not None, op.decision
        created = before is None
        history: Change | None = None
        new_plan = False
        for key, change in writes:
            op.log.append((self.revision, change))
            if key.family == K.HISTORY:
                if not key.name and not change.deleted:
                    history = change
                continue
            existed = self._exist(op, change)
            try:
                if not self._quiet:
                    if change.deleted:
                        self._dropped(op, key, change.kv.key, had_plan)
                    else:
                        self._before_write(op, key, change, existed, created)
                if key.family == K.OPEN:
                    op.gate = not change.deleted
                elif key.family == K.PENDING:
                    op.phase = None if change.deleted else Phase(change.kv.value.decode())
                else:
                    op.fold(key.name, key.chunk, change)
                    new_plan = new_plan or (key.name == "plan" and key.chunk < 0 and not change.deleted)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._found(0, change.kv.key, f"the record cannot be read: {error}", op)
        self._cluster.tally(ref, before in ACTIVE, op.active)
        if created and op.state is not None:
            started.setdefault((ref.table, ref.type), []).append(ref.instance)
        if self._quiet:
            return
        if new_plan and not had_plan and (wrong := unfit_plan(op)):
            self._found(13, self.keys.of(ref, "plan"), wrong, op)
        if decided is None and op.decision is not None and before is not None:
            self._verdict(op, op.decision)
        if op.state is not before:
            self._state(op, before, history)
        elif history is not None:
            self._found(5, history.kv.key, "the history was written apart from the terminal state", op)
        if op.state is not None:
            self._gate(op)

    def _dropped(self, op: OperationTrace, key: ParsedKey, where: str, had_plan: bool) -> None:
        """What must stay while the operation is not over; chunks only once the plan counts on them."""
        if op.state is None or op.state.terminal:
            return
        if key.name == "plan" and (had_plan or key.chunk < 0):
            self._found(13, where, "deleted while its operation was not over", op)
        elif key.name in ("spec", "arg", "decision"):
            self._found(9, where, "deleted while its operation was not over", op)

    def _before_write(self, op: OperationTrace, key: ParsedKey, change: Change, existed: bool, created: bool) -> None:
        """What a write to one of the operation's own keys must not do, judged before it is taken in."""
        name, where = key.name, change.kv.key
        if op.ref in self._over:
            self._found(9, where, "written after its operation was finished and cleaned up", op)
        if name in ("plan", "planning", "decision") and not created:
            self._elected(op, where)
        if name in ("arg", "spec") and existed:
            self._found(14, where, "what never changes was written again", op)
        elif name == "plan" and op.plan is not None:
            self._found(13, where, "the plan was changed after it was frozen", op)
        elif name == "planning":
            tries = Attempts.decode(change.kv.value).attempts
            if op.planning is not None and tries <= op.planning.attempts:
                self._found(10, where, f"planning attempts went from {op.planning.attempts} to {tries}", op)
        elif name == "cancel" and Cancel.decode(change.kv.value).reason == "failed":
            self._elected(op, where)
        elif name == "decision" and op.decision is not None:
            self._decided_again(op, where, op.decision, Decision.decode(change.kv.value))
        elif name == "spec":
            self._request(op, where, loads(change.kv.value).get("request_id", ""))

    def _decided_again(self, op: OperationTrace, where: str, old: Decision, new: Decision) -> None:
        if any(getattr(new, name) != getattr(old, name) for name in ("total", "success", "failed", "failed_ranges")):
            self._found(5, where, "the decision was recounted", op)
        if new.attempts < old.attempts:
            self._found(10, where, f"completion attempts went from {old.attempts} to {new.attempts}", op)

    def _request(self, op: OperationTrace, where: str, request: str) -> None:
        first = self._requests.setdefault(request, op.ref) if request else op.ref
        if first != op.ref:
            self._found(14, where, f"the request {request} began {first} and also {op.ref}", op)

    def _elected(self, op: OperationTrace, where: str) -> None:
        if (op.ref.table, op.ref.type) not in self._cluster.elections:
            self._found(8, where, "a coordinator's write while nobody was elected", op)

    def _verdict(self, op: OperationTrace, decision: Decision) -> None:
        where = self.keys.of(op.ref, "decision")
        if wrong := miscounted(op, decision.total, decision.success, decision.failed, decision.failed_ranges):
            self._found(5, where, wrong, op)
        if decision.verdict is State.SUCCESS and not all_succeeded(op):
            self._found(5, where, "decided as success while not all jobs succeeded", op)
        if op.claims:
            self._found(5, where, f"decided while {op.claims} claims were left", op)

    def _state(self, op: OperationTrace, before: State | None, history: Change | None) -> None:
        where = self.keys.of(op.ref, "state")
        if op.state is None:
            self._ended(op, before, where)
            return
        if op.state not in FOLLOWS[before]:
            self._found(5, where, f"the state went from {before} to {op.state}", op)
        if not op.state.terminal:
            return
        self._elected(op, where)
        if op.claims:
            self._found(5, where, f"finished while {op.claims} claims were left", op)
        if op.state is State.SUCCESS and not all_succeeded(op):
            self._found(5, where, "finished as success while not all jobs succeeded", op)
        if op.state is State.SUCCESS and op.decision is not None and op.decision.verdict is not State.SUCCESS:
            self._found(5, where, f"finished as success where {op.decision.verdict} was decided", op)
        if history is None:
            self._found(5, self.keys.history(op.ref), "finished without a history record", op)
            return
        record = History.decode(history.kv.value)
        if (record.op, record.state) != (str(op.ref), op.state):
            self._found(5, history.kv.key, f"tells of {record.op}: {record.state}; the state is {op.state}", op)
        if op.spec is not None and record.request_id != op.spec.request_id:
            self._found(14, history.kv.key, f"tells of the request {record.request_id!r}, not of its own", op)
        if wrong := miscounted(op, record.total, record.success, record.failed, record.failed_ranges):
            self._found(5, history.kv.key, wrong, op)

    def _ended(self, op: OperationTrace, before: State | None, where: str) -> None:
        if before is not None and not before.terminal:
            self._found(9, where, f"the state was deleted while it was {before}", op)
        self._elected(op, where)
        if op.keys:
            left = sorted(k for k in self._existing if self._belongs(k, op.ref))
            self._found(9, where, f"{op.keys} keys remained after the operation's end: {', '.join(left[:5])}", op)
        self._operations.pop(op.ref, None)
        jobs, claims = self.keys.roots(op.ref)
        del self._job_roots[jobs], self._claim_roots[claims]
        self._over.add(op.ref)

    def _belongs(self, key: str, ref: OperationRef) -> bool:
        parsed = self.keys.parse(key)
        return parsed.ref == ref and parsed.family != K.HISTORY

    def _gate(self, op: OperationTrace) -> None:
        where = self.keys.gate(op.ref)
        stage, phase = op.stage, op.phase
        if op.gate and phase is not None:
            self._found(12, where, f"both the gate and pending ({phase}) exist", op)
        elif not op.gate and phase is None:
            self._found(12, where, "neither the gate nor pending exists", op)
        elif (stage is Stage.OPEN) is not op.gate or (phase is not None and not phase.of(stage)):
            told = "the gate exists" if op.gate else f"pending is {phase}"
            self._found(12, where, f"the operation is {stage}, but {told}", op)

    # ---------------------------------------------------------------- helpers

    def _one_at_a_time(self, place: tuple[str, str, str]) -> None:
        instance = self._cluster.current.get(place)
        if instance is not None:
            op = self._operations.get(OperationRef(*place, instance))
            if op is None or not op.active:
                self._found(7, self.keys.current(*place), f"names the instance {instance}, which does not run")

    def _holds_current(self, ref: OperationRef) -> None:
        op = self._operations.get(ref)
        if op is not None and op.active and op.spec is not None and op.spec.one_at_a_time:
            place = (ref.table, ref.type, ref.object)
            if self._cluster.current.get(place) != ref.instance:
                self._found(7, self.keys.current(*place), f"does not name {ref}, which runs one at a time", op)

    def _trace(self, ref: OperationRef) -> OperationTrace:
        op = self._operations.get(ref)
        if op is None:
            op = self._operations[ref] = OperationTrace(ref)
            jobs, claims = self.keys.roots(ref)
            self._job_roots[jobs] = self._claim_roots[claims] = op
        return op

    def _exist(self, op: OperationTrace, change: Change) -> bool:
        """Keep count of the operation's keys; whether this one existed before."""
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
        events: Sequence[tuple[int, Change]] | None = None,
    ) -> None:
        if self._quiet or (op is not None and op.newer):
            return
        known = sorted([*(op.log if op is not None else ()), *(events or ())], key=lambda entry: entry[0])
        self.violations.append(Violation(invariant, self.revision, key, text, tuple(map(tell, known))))
