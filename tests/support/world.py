"""A model of a cluster for tests of the protocol: the model of etcd, and one method per event of the state tables.

The methods build the event's transaction from the current keys, as a daemon or client would.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distop.decide import job_claims
from distop.decide.due_operations import ended_waiting
from distop.decide.operation_view import Operations, OperationView
from distop.decide.view import ClusterView, TypeView
from distop.protocol import actor_claims, job_transitions, state_tables
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol import pending_operations as w
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.identity import Takes, plan_digest
from distop.protocol.jobs import Claim, JobState, Outcome
from distop.protocol.json_codec import loads, to_ranges
from distop.protocol.keys import Keys
from distop.protocol.operation_options import Options
from distop.protocol.permits import Permits, permits
from distop.protocol.plan import Gate, PartitionPlan, Plan, chunked, first_ordinals
from distop.protocol.records import Attempts, Cancel, Decision, History, Node, OperationRef, Spec, State
from distop.protocol.revisioned import Change
from distop.protocol.transaction_groups import fitting_count
from distop.protocol.txn import Delete, Put, Txn
from distop.protocol.user_actions import NO_ACTIONS, Actions
from distop.services.open_operation import OpenOperation
from distop.testing import ModelStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.protocol.txn import TxnResult

TABLE, TYPE = "sales.orders", "noop"
TIME = "2013-01-01T00:00:00.000Z"


@dataclass
class World:
    """A cluster with one table and one type, and any number of operations and executors."""

    keys: Keys = field(default_factory=Keys)
    store: ModelStore = field(default_factory=ModelStore)
    rules: Rules = field(default_factory=lambda: Rules(retry=Retry(attempts=3)))
    one_at_a_time: bool = False
    leases: dict[str, int] = field(default_factory=dict)
    kept: tuple[Put, ...] = ()
    """Further keys that a finish writes with the history record."""
    _read: tuple[int, Operations] | None = field(default=None, init=False, repr=False, compare=False)
    """A revision, and the operations as they were then."""

    # ------------------------------------------------------------- executors

    def join(self, incarnation: str) -> str:
        """Add an executor: its node key on a new lease."""
        lease = self.leases[incarnation] = self.store.grant(1000 + self.store.revision)
        node = Node(f"ex-{incarnation}", "host", 2, (TYPE,))
        self.store.apply(Txn((), (Put(self.keys.node(incarnation), node.encode(), lease),)))
        return incarnation

    def die(self, incarnation: str) -> None:
        """Expire an executor's session."""
        self.store.expire(self.leases.pop(incarnation))

    def elect(self, incarnation: str) -> Txn:
        seen = self.store.get(self.keys.coordinator(TABLE, TYPE))
        mod, holder = (seen.mod_revision, seen.value.decode()) if seen else (0, "")
        return t.elect(self.keys, TABLE, TYPE, incarnation, mod, holder)

    @property
    def election(self):
        return t.election_guard(self.keys, TABLE, TYPE, self.store.mod(self.keys.coordinator(TABLE, TYPE)))

    def finish_together(self, finals: Sequence[f.Final]) -> int:
        """The number of these finishes that fit in one transaction."""
        return fitting_count([f.part(self.keys, one) for one in finals], f.common(self.keys, TABLE, self.election))

    def resign(self) -> Txn:
        return t.resign(self.keys, TABLE, TYPE, self.store.mod(self.keys.coordinator(TABLE, TYPE)))

    # ----------------------------------------------------------------- views

    def view(self) -> TypeView:
        view = TypeView(self.keys, TABLE, TYPE)
        view.replace([Change(kv) for kv in self.store.range(*self.keys.type_range(TABLE, TYPE))], claims=False)
        view.replace([Change(kv) for kv in self.store.range(*self.keys.type_claims(TABLE, TYPE))], claims=True)
        return view

    def cluster(self) -> ClusterView:
        view = ClusterView(self.keys)
        view.apply(Change(kv) for kv in self.store.listing() if not kv.key.startswith(("distOp.", "distOpClaim.")))
        return view

    def operations(self) -> Operations:
        """All operations, for reading only: they are read again when the revision has changed."""
        if self._read is None or self._read[0] != self.store.revision:
            self._read = self.store.revision, self.view().operations
        return self._read[1]

    def read(self, ref: OperationRef) -> OperationView:
        """An operation, for reading only; :meth:`op` returns one that the caller may change."""
        return self.operations().get(ref) or OperationView(ref)

    def op(self, ref: OperationRef) -> OperationView:
        return self.view().operations.get(ref) or OperationView(ref)

    def stage(self, ref: OperationRef) -> state_tables.Stage:
        return self.read(ref).stage

    def job_stage(self, ref: OperationRef, partition: int) -> state_tables.JobStage:
        state = self.store.get(self.keys.job(ref, partition, "state"))
        if state is not None:
            return state_tables.JobStage(state.value.decode())
        claim = self.claim_of(ref, partition)
        if claim is None:
            return state_tables.JobStage.FREE
        return state_tables.JobStage.WAITING if claim.waiting else state_tables.JobStage.CLAIMED

    def claim_of(self, ref: OperationRef, partition: int) -> Claim | None:
        kv = self.store.get(self.keys.claim(ref, partition))
        return Claim.decode(kv.value) if kv else None

    def fence(self, ref: OperationRef, partition: int) -> int:
        return self.store.mod(self.keys.claim(ref, partition))

    def mod(self, ref: OperationRef, name: str) -> int:
        return self.store.mod(self.keys.of(ref, name))

    # ---------------------------------------------------------------- events

    def counters(self) -> t.Counters:
        run_ops = self.store.get(self.keys.run_ops(TABLE))
        following = self.store.get(self.keys.next_instance(TABLE, TYPE))
        return t.Counters(
            loads(run_ops.value) if run_ops else {},
            run_ops.mod_revision if run_ops else 0,
            int(following.value) if following else 1,
            following.mod_revision if following else 0,
        )

    def next_ref(self, obj: str = "") -> OperationRef:
        return OperationRef(TABLE, TYPE, obj, self.counters().next_instance)

    def spec(self, ref: OperationRef) -> Spec:
        return Spec(f"request-{ref}", TIME, "tester", self.rules, one_at_a_time=self.one_at_a_time)

    def own_spec(self, ref: OperationRef) -> Spec:
        """The stored spec, or the one that a start would write."""
        return self.read(ref).spec or self.spec(ref)

    def start(self, ref: OperationRef) -> Txn:
        return t.starts(self.keys, self.counters(), [t.NewOperation(ref, self.spec(ref), b"{}", named=True)])

    def starts(self, count: int, objects: Sequence[str] = ()) -> Txn:
        """Start operations in one transaction: one per object, or ``count`` without objects."""
        seen = self.counters()
        refs = [OperationRef(TABLE, TYPE, obj, seen.next_instance + n) for n, obj in enumerate(objects or [""] * count)]
        new = [t.NewOperation(ref, self.spec(ref), b"{}", named=True) for ref in refs]
        return t.starts(self.keys, seen, new)

    def submit(self, ref: OperationRef, *after: OperationRef, on: str = "success", hold: str = "") -> Txn:
        """Insert a pending operation that waits for the operations ``after``, which exist."""
        preds = tuple(t.Predecessor(one, on, self.mod(one, "state")) for one in after)
        spec = replace(self.spec(ref), hold=hold)
        return t.starts(self.keys, self.counters(), [t.NewOperation(ref, spec, b"{}", waits=True, after=preds)])

    def start_of(self, id_: str, *, waits: bool) -> Txn:
        """Start an operation with this id: it replaces a pending one, or waits for a running one."""
        one = self.new_operation_with_id(id_)
        return t.starts(self.keys, self.counters(), [replace(one, waits=waits or bool(one.after))])

    def new_operation_with_id(self, id_: str, skipped: int = 0) -> t.NewOperation:
        """The new operation of :meth:`start_of`; ``skipped``: how many instance numbers it leaves out."""
        ref, kv = self.next_ref(), self.store.get(self.keys.unique(TABLE, TYPE, id_))
        ref = replace(ref, instance=ref.instance + skipped)
        takes, after, follows = Takes(id_), "", ""
        if kv is not None:
            holder = OperationRef.parse(kv.value.decode())
            state, mod = self.read(holder).state, self.mod(holder, "state")
            after = str(holder)
            if state is State.PENDING:
                why = Cancel("aborted", f"replaced by {ref}", str(ref))
                takes = Takes(id_, holder, mod, (self._ended(holder, State.CANCELLED, why), why))
                after = self.own_spec(holder).follows
            else:
                takes = Takes(id_, holder, mod)
        preds: tuple[t.Predecessor, ...] = ()
        active = (State.RUNNING, State.PAUSED, State.CANCELLING)
        if after and self.read(predecessor := OperationRef.parse(after)).state in active:
            preds, follows = (t.Predecessor(predecessor, "end", self.mod(predecessor, "state")),), after
        spec = replace(self.spec(ref), id=id_, follows=follows)
        return t.NewOperation(ref, spec, b"{}", waits=True, after=preds, takes=takes)

    def _state(self, ref: OperationRef) -> w.SeenState:
        return w.SeenState(ref, self.read(ref).state or State.PENDING, self.mod(ref, "state"))

    def add_dependencies(self, ref: OperationRef, *after: OperationRef) -> Txn:
        run = self._state(ref)
        return w.add_dependencies(self.keys, [(self._state(one), run, "success") for one in after or (ref,)], [])

    def begin(self, ref: OperationRef, jobs: int = 0) -> Txn:
        seen = self.counters()
        spec = self.read(ref).spec
        one = w.Beginning(
            ref,
            self.mod(ref, "state"),
            self.one_at_a_time,
            spec.hold if spec else "",
            planned(jobs) if jobs else None,
            self.read(ref).terms,
        )
        return w.begins(self.keys, self.election, seen.run_ops, seen.run_ops_mod, [one])

    def begin_planned(self, ref: OperationRef, jobs: int = 2) -> Txn:
        return self.begin(ref, jobs)

    def _ended(self, ref: OperationRef, state: State, why: Cancel | None = None) -> History:
        return ended_waiting(ref, self.own_spec(ref), state, TIME, why)

    def joined(self, ref: OperationRef) -> Txn:
        mod, spec = self.mod(ref, "state"), self.read(ref).spec
        return w.joined(
            self.keys, ref, self.election, mod, self._ended(ref, State.SUCCESS), spec.hold if spec is not None else ""
        )

    def end_waiting(self, ref: OperationRef) -> Txn:
        why, spec = Cancel("user", "not wanted"), self.read(ref).spec
        hold = spec.hold if spec is not None else ""
        return w.end_waiting(self.keys, ref, self.mod(ref, "state"), self._ended(ref, State.CANCELLED), why, hold=hold)

    def signal(self, ref: OperationRef) -> Txn:
        op = self.read(ref)
        return w.signal(self.keys, ref, self.election, op.state_mod, op.state or State.SUCCESS, op.next)

    def start_planned(self, ref: OperationRef, jobs: int = 2) -> Txn:
        return t.starts(self.keys, self.counters(), [t.NewOperation(ref, self.spec(ref), b"{}", planned(jobs))])

    def plan(self, ref: OperationRef, jobs: int = 2) -> Txn:
        plan, chunks = planned(jobs)
        mods = [self.store.mod(self.keys.chunk(ref, n)) for n in range(len(chunks))]
        return t.write_plan(self.keys, ref, self.election, plan, mods, chunks, self.read(ref).terms)

    def chunk(self, ref: OperationRef, number: int, value: bytes) -> Txn:
        seen = self.store.mod(self.keys.chunk(ref, number))
        return t.write_chunk(self.keys, ref, self.election, number, seen, value)

    def plan_attempt(self, ref: OperationRef) -> Txn:
        kv = self.store.get(self.keys.of(ref, "planning"))
        tries = Attempts.decode(kv.value).attempts if kv else 0
        return t.plan_attempt(self.keys, ref, self.election, self.mod(ref, "planning"), Attempts(tries + 1, "no"))

    def give_up(self, ref: OperationRef) -> Txn:
        decision = Decision(State.FAILED, 0, 0, 0, error="no plan")
        return t.give_up(self.keys, ref, self.election, self.mod(ref, "state"), decision)

    def alter(self, ref: OperationRef, new: Options | None = None, actions: Actions = NO_ACTIONS) -> Txn:
        op, kv = self.read(ref), self.store.get(self.keys.gate(ref))
        state = op.state if op.state in state_tables.states_before(state_tables.Event.ALTER) else State.RUNNING
        new = new if new is not None else replace(op.terms.options, priority=op.terms.options.priority + 1)
        opened = (Gate.decode(kv.value), kv.mod_revision) if kv else None
        return t.alter(self.keys, ref, state, op.state_mod, new, opened, actions)

    def gate(self, ref: OperationRef) -> Gate:
        kv = self.store.get(self.keys.gate(ref))
        return Gate.decode(kv.value) if kv else Gate()

    def permits(self, ref: OperationRef) -> Permits | None:
        """The current permits of an operation; None without a limit of jobs."""
        most = self.gate(ref).options.max_jobs
        if not most:
            return None
        claims = [Claim.decode(kv.value) for kv in self.store.range(*self.keys.claims_range(ref))]
        keyed = self.store.range(*self.keys.permits_range(ref))
        return permits(most, claims, {int(kv.key[-6:]): (kv.value, kv.mod_revision) for kv in keyed}, self.leases)

    def pause(self, ref: OperationRef) -> Txn:
        return t.pause(self.keys, ref, self.mod(ref, "state"))

    def pause_now(self, ref: OperationRef) -> Txn:
        paused = self.read(ref).state is State.PAUSED
        seen = State.PAUSED if paused else State.RUNNING
        return t.pause(self.keys, ref, self.mod(ref, "state"), now=True, seen=seen)

    def resume(self, ref: OperationRef) -> Txn:
        return t.resume(self.keys, ref, self.mod(ref, "state"), self.mod(ref, "plan") > 0, self.read(ref).terms)

    def cancel(self, ref: OperationRef) -> Txn:
        return t.cancel(self.keys, ref, self.mod(ref, "state"), Cancel("user", "not needed"))

    def fail_fast(self, ref: OperationRef) -> Txn:
        return t.cancel(self.keys, ref, self.mod(ref, "state"), Cancel("failed", "one failed"), self.election)

    def reap(self, ref: OperationRef, *partitions: int) -> Txn:
        """Reap the current claims of these jobs (by default job 0)."""
        claims = [(p, self.fence(ref, p) or 1) for p in partitions or (0,)]
        return job_transitions.reap(self.keys, ref, self.election, self.mod(ref, "state"), claims)

    def revoke(self, ref: OperationRef, *partitions: int) -> Txn:
        """Revoke the current claims of these jobs (by default job 0)."""
        nobody = Claim("ex-a", "", 1, 0)
        claims = [(p, self.fence(ref, p) or 1, self.claim_of(ref, p) or nobody) for p in partitions or (0,)]
        return job_transitions.revoke(self.keys, ref, self.election, self.mod(ref, "state"), claims, job_claims.revoked)

    def revoke_lost(self, ref: OperationRef, incarnation: str, *partitions: int) -> Txn:
        """Set the current claims of these jobs (by default job 0) to waiting, guarded by the gate."""
        nobody = Claim("ex-a", "a", 1, 0)
        claims = [(p, self.fence(ref, p) or 1, self.claim_of(ref, p) or nobody) for p in partitions or (0,)]
        gate = self.store.mod(self.keys.gate(ref)) or 1
        return job_transitions.revoke_lost(
            *(self.keys, ref, gate, incarnation, claims), lambda claim: job_claims.revoked_lost(claim, self.rules)
        )

    def verdict(self, ref: OperationRef) -> Decision:
        op = self.read(ref)
        count = op.plan.count if op.plan else 0
        if op.state is State.CANCELLING:
            why = op.cancel.reason if op.cancel else ""
            verdict = State.FAILED if why == "failed" else State.CANCELLED
        else:
            verdict = State.SUCCESS if op.plan and op.success == count else State.FAILED
        return Decision(verdict, count, op.success, len(op.failed), to_ranges(op.failed))

    def decide(self, ref: OperationRef) -> Txn:
        return f.decide(self.keys, ref, self.election, self.mod(ref, "state"), self.verdict(ref))

    def complete_attempt(self, ref: OperationRef) -> Txn:
        op = self.read(ref)
        old = op.decision.value if op.decision else self.verdict(ref)
        new = Decision(old.verdict, old.total, old.success, old.failed, old.failed_ranges, old.attempts + 1, "no")
        return f.complete_attempt(self.keys, ref, self.election, self.mod(ref, "decision") or 1, new)

    def history(self, ref: OperationRef) -> History:
        op = self.read(ref)
        d = op.decision.value if op.decision else self.verdict(ref)
        spec = self.own_spec(ref)
        return History(
            str(ref), d.verdict, TIME, TIME, d.total, d.success, d.failed, None, (), d.failed_ranges, f"request-{ref}",
            id=spec.id, follows=spec.follows,
        )  # fmt: skip

    def _finish(self, *finals: f.Final) -> Txn:
        seen = self.counters()
        return f.finish(self.keys, self.election, seen.run_ops, seen.run_ops_mod, finals)

    def _final(self, ref: OperationRef, decision_mod: int) -> f.Final:
        history, state_mod = self.history(ref), self.mod(ref, "state")
        return f.Final(ref, state_mod, decision_mod, history, self.one_at_a_time, self.kept)

    def finish(self, ref: OperationRef) -> Txn:
        return self._finish(self._final(ref, self.mod(ref, "decision") or 1))

    def finish_all(self, refs: Sequence[OperationRef]) -> Txn:
        """Finish these operations; those without a decision at once."""
        return self._finish(*self.finals(refs))

    def finals(self, refs: Sequence[OperationRef]) -> list[f.Final]:
        return [self._final(ref, self.mod(ref, "decision")) for ref in refs]

    def finish_at_once(self, ref: OperationRef) -> Txn:
        return self._finish(self._final(ref, 0))

    def final_and_end(self, ref: OperationRef) -> f.Final:
        # Without the operation the guard is revision 1, which no gate has, so that the transaction is rejected.
        return replace(self._final(ref, 0), gate_mod=self.read(ref).opened or 1)

    def finish_and_end(self, ref: OperationRef) -> Txn:
        return self._finish(self.final_and_end(ref))

    def clean(self, ref: OperationRef, first: int = 0) -> Txn:
        return f.clean(self.keys, ref, self.election, self.mod(ref, "state"), first)

    def end(self, ref: OperationRef) -> Txn:
        return f.end(self.keys, ref, self.election, self.mod(ref, "state"))

    # ------------------------------------------------------------------ jobs

    def claim(self, ref: OperationRef, incarnation: str, partitions: Sequence[int]) -> Txn:
        """Claim jobs that are free, waiting, or held by a dead incarnation; with a limit only as many as permits."""
        wants, dead, known = [], set(), self.permits(ref)
        former: dict[int, Claim] = {}
        for p in partitions:
            old = self.claim_of(ref, p)
            if old is None:
                wants.append(job_transitions.Want(p, Claim(f"ex-{incarnation}", incarnation, 1, 0)))
                continue
            lost = 0 if old.waiting else 1
            if lost and not old.actor:
                dead.add(old.incarnation)
                former[p] = old
            claim = Claim(f"ex-{incarnation}", incarnation, old.attempt + 1, old.failures + lost)
            wants.append(job_transitions.Want(p, claim, self.fence(ref, p)))
        given = []
        for want in wants:
            old = former.get(want.partition)
            if known is None:
                given.append(replace(want, former=old))
            elif old is not None and known.keeps(old):
                given.append(replace(want, claim=replace(want.claim, permit=old.permit)))
            elif known.free:
                number, mod = known.free.popitem()
                given.append(replace(want, claim=replace(want.claim, permit=number), permit_mod=mod, former=old))
        gone = known.gone if known is not None else ()
        return job_transitions.claim(
            self.keys, ref, self.store.mod(self.keys.gate(ref)) or 1, incarnation, given, dead, gone
        )

    def own(self, ref: OperationRef, actor: str, partition: int) -> Txn:
        """Claim a job by an actor, whatever its state is; a job that has failed too often fails instead."""
        old, grant = self.claim_of(ref, partition), f"{self.store.revision:016x}"
        attempt, failures, seen, dead, over = 1, 0, 0, "", None
        if old is not None:
            lost, seen = not old.waiting, self.fence(ref, partition)
            attempt, failures, dead = old.attempt + 1, old.failures + lost, old.incarnation
            if lost and self.rules.at_limit(failures):
                over = Outcome(f"p={partition}", old.executor, old.incarnation, old.attempt, TIME, TIME, error="lost")
        claim = Claim(actor, "", attempt, failures, actor=actor, duration=5.0, grant=grant)
        gate = self.store.mod(self.keys.gate(ref)) or 1
        return actor_claims.own(self.keys, [actor_claims.Taking(ref, gate, partition, claim, seen, dead, over, old)])

    def extend(self, ref: OperationRef, partition: int, duration: float = 5.0) -> Txn:
        claim = self.claim_of(ref, partition) or Claim("w", "", 1, 0, actor="w", grant=f"{0:016x}")
        fence = self.fence(ref, partition) or 1
        token = actor_claims.Token(ref, partition, fence, claim.grant)
        return actor_claims.extend(self.keys, [actor_claims.Extending(token, replace(claim, duration=duration), fence)])

    def give(self, ref: OperationRef, partition: int, state: JobState | None) -> Txn:
        """End an actor's claim with this state of the job; None: put it back for a retry."""
        claim = self.claim_of(ref, partition) or Claim("w", "", 1, 0, actor="w", grant=f"{0:016x}")
        fence = self.fence(ref, partition) or 1
        token = actor_claims.Token(ref, partition, fence, claim.grant)
        if state is None:
            waiting = Claim(claim.executor, "", claim.attempt, claim.failures + 1, TIME)
            return actor_claims.put_back(self.keys, token, fence, waiting)
        return actor_claims.finish(self.keys, token, fence, state, outcome(partition, claim))

    def report(self, ref: OperationRef, partition: int, state: JobState, fence: int = 0) -> Txn:
        claim = self.claim_of(ref, partition) or Claim("ex-a", "a", 1, 0)
        guard = fence or self.fence(ref, partition) or 1
        return job_transitions.group(
            [job_transitions.report(self.keys, ref, partition, guard, state, outcome(partition, claim), claim)]
        )

    def wait_again(self, ref: OperationRef, partition: int, failed: bool) -> Txn:
        claim = self.claim_of(ref, partition) or Claim("ex-a", "a", 1, 0)
        waiting = Claim(claim.executor, "", claim.attempt, claim.failures + failed, TIME if failed else "")
        return job_transitions.group(
            [job_transitions.wait_again(self.keys, ref, partition, self.fence(ref, partition) or 1, waiting, claim)]
        )

    def checkpoint(self, ref: OperationRef, partition: int, value: bytes) -> Txn:
        fence, seen = self.fence(ref, partition) or 1, self.store.mod(self.keys.job(ref, partition, "progress"))
        return job_transitions.group([job_transitions.checkpoint(self.keys, ref, partition, fence, value, seen)])

    def fail_lost(self, ref: OperationRef, incarnation: str, partition: int) -> Txn:
        claim = self.claim_of(ref, partition) or Claim("ex-a", "a", 1, 0)
        lost_outcome = Outcome(
            f"p={partition}", f"ex-{incarnation}", incarnation, claim.attempt, TIME, TIME, error="lost"
        )
        gate = self.store.mod(self.keys.gate(ref)) or 1
        lost = [(partition, self.fence(ref, partition) or 1, lost_outcome)]
        dead = claim.incarnation or ("" if claim.actor else "nobody")
        return job_transitions.fail_lost(self.keys, ref, gate, incarnation, dead, lost, {partition: claim})

    # --------------------------------------------------------------- shortcuts

    def do(self, txn: Txn) -> TxnResult:
        """Apply a transaction that must be accepted."""
        before = self.store.revision
        result = self.store.apply(txn)
        assert result.succeeded, (txn, result)
        assert self.store.revision == before + 1, txn
        return result

    def run_operation(self, jobs: int = 2, failing: Sequence[int] = ()) -> OperationRef:
        """Run a whole operation on the executors ``a`` and ``b``: start, plan, claim, report, decide, finish, end."""
        for incarnation in ("a", "b"):
            if incarnation not in self.leases:
                self.join(incarnation)
        ref = self.next_ref()
        self.do(self.start(ref))
        if not self.store.get(self.keys.coordinator(TABLE, TYPE)):
            self.do(self.elect("a"))
        self.do(self.plan(ref, jobs))
        for p in range(jobs):
            self.do(self.claim(ref, "a" if p % 2 else "b", [p]))
        for p in range(jobs):
            self.do(self.report(ref, p, JobState.FAILED if p in failing else JobState.SUCCESS))
        self.do(self.decide(ref))
        self.do(self.finish(ref))
        self.do(self.end(ref))
        return ref

    def tamper(self, *ops: Put | Delete) -> int:
        """Write without guards, which distop never does; returns the revision."""
        return self.store.apply(Txn((), ops)).revision


def planned(jobs: int) -> tuple[Plan, list[bytes]]:
    """A plan with ``jobs`` partitions, and its chunks."""
    chunks = chunked([PartitionPlan(n, f"p={n}", 10) for n in range(jobs)])
    return Plan(jobs, "v1", plan_digest(chunks), len(chunks)), chunks


def outcome(partition: int, claim: Claim) -> Outcome:
    fields = (f"p={partition}", claim.executor, claim.incarnation, claim.attempt, TIME, TIME, {"rows": 1})
    return Outcome(*fields, grant=claim.grant)


def open_operation(
    ref: OperationRef, spec: Spec, plan: Plan, chunks: Sequence[bytes], gate: Gate | None = None
) -> OpenOperation:
    """An executor's view of an open operation that it has read."""
    op = OpenOperation(ref, 0, spec, {}, plan, chunks, first_ordinals(plan, chunks))
    op.gate = gate or Gate()
    return op
