"""Runs one operation from start to history record on a model of etcd, as both executor and coordinator.

It makes no decisions of its own: ``decide.next_steps`` chooses each step, ``protocol`` builds each transaction, and the
code of an executor's child plans, runs jobs and completes (:mod:`distop.testing.in_process_child`).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.decide import job_claims, next_steps
from distop.decide.due_operations import ERRORS_KEPT, error_of, final_record
from distop.decide.view import TypeView
from distop.errors import InvalidArgument
from distop.protocol import job_transitions, table_registry
from distop.protocol import operation_finish as f
from distop.protocol import operation_transitions as t
from distop.protocol.identity import plan_digest
from distop.protocol.jobs import Claim, JobState, Outcome, given_up
from distop.protocol.json_codec import dumps, from_ranges, loads, rfc3339
from distop.protocol.keys import TABLE, Keys
from distop.protocol.plan import Plan, whole_plan
from distop.protocol.records import CLUSTER_TABLE, Decision, History, Node, OperationRef, State, TableRecord
from distop.protocol.revisioned import Seen
from distop.protocol.state_tables import Stage
from distop.protocol.txn import Put, Txn
from distop.services.inspection.outcomes import JobResult, job_results
from distop.services.submission.insertion import make_spec, object_of
from distop.services.submission.start_request import request, whoami
from distop.storage.places import shared_of
from distop.storage.result_files import resolve
from distop.testing.in_process_child import EXECUTOR, InProcessChild
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from distop.behavior import Behavior
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import Attempts
    from distop.protocol.txn import TxnResult
    from distop.services.submission.start_options import StartOptions
    from distop.testing.model_store import ModelStore

INCARNATION = "test"
POLL = 30.0
"""Seconds between polls, in simulated time."""
MOST_ATTEMPTS = 100
"""Maximum attempts of a job with ``can_fail`` False, which an executor would retry for ever."""


class LoneExecutor:
    """The executor and coordinator of one operation. It skips all waiting times."""

    def __init__(
        self,
        behavior: type[Behavior],
        table: TableRecord | None,
        tables: Iterable[TableRecord],
        spark: SparkSession | None,
        folder: Path,
        store: ModelStore,
    ) -> None:
        self._declaration = behavior.declaration()
        self._table = table
        self._name = table.name if table is not None else CLUSTER_TABLE
        self._type = self._declaration.type_name
        self._store = store
        self._keys = Keys()
        self._child = InProcessChild(behavior, folder, spark, self._job_ended, self._answer)
        self._now = time.time()
        self._view = TypeView(self._keys, self._name, self._type)
        self._view.replace([], claims=True)
        self._rows: list[Mapping[str, Any]] = []
        self._ended: set[int] = set()
        self._held: dict[int, tuple[Claim, int]] = {}
        """The claims of the current run, each with its fencing token."""
        self._to_fail: deque[tuple[int, Claim, int, Any]] = deque()
        """Jobs that fail finally, after a cleanup: partition, claim, fence, and the end of the attempt."""
        self._stop: Callable[[], None] | None = None
        self.follow_ups: tuple[Mapping[str, Any], ...] = ()
        """The operations that the completion asked to start."""
        records = [one for one in (table, *tables) if one is not None]
        node = Node(EXECUTOR, "localhost", 1, (self._type,))
        self._put(self._keys.node(INCARNATION), node.encode())
        self._put(self._keys.coordinator(self._name, self._type), INCARNATION.encode())
        for one in records:
            self._put(self._keys.table(one.name), one.encode())
        fence = store.mod(self._keys.coordinator(self._name, self._type))
        self._election = t.election_guard(self._keys, self._name, self._type, fence)

    # ------------------------------------------------------------------ store

    def _put(self, key: str, value: bytes) -> None:
        self._store.apply(Txn((), (Put(key, value),)))

    def _commit(self, txn: Txn) -> TxnResult:
        """Commit a transaction, which cannot fail: there are no other writers."""
        before = self._store.revision
        result = self._store.apply(txn)
        if not result.succeeded:
            raise AssertionError(f"a compare of the transaction {txn.label} failed: this is a bug in distop")
        ranges = self._keys.type_range(self._name, self._type), self._keys.type_claims(self._name, self._type)
        for _, changes in self._store.between(before + 1, self._store.revision):
            self._view.apply(one for one in changes if any(a <= one.kv.key < b for a, b in ranges))
        return result

    def _record(self, name: str) -> bytes:
        kv = self._store.get(self._keys.of(self._ref, name))
        assert kv is not None
        return kv.value

    @property
    def _op(self) -> OperationView:
        return self._view.operations[self._ref]

    def _counters(self) -> t.Counters:
        run_ops, following = self._keys.run_ops(self._name), self._keys.next_instance(self._name, self._type)
        running, number = self._store.get(run_ops), self._store.get(following)
        return t.Counters(
            *(loads(running.value) if running else {}, self._store.mod(run_ops)),
            *(int(number.value) if number else 1, self._store.mod(following)),
        )

    # -------------------------------------------------------------- operation

    def start(self, arg: bytes, options: StartOptions) -> None:
        """Start the operation. Raises InvalidArgument, as a start by a client does."""
        wanted = request(self._type, self._name, arg, options, whoami())
        if self._declaration.needs_table and self._table is None:
            raise InvalidArgument(f"{self._type} needs a table: pass run_operation(table=…)")
        seen, spec = self._counters(), make_spec(wanted, self._declaration, self._table)
        obj = object_of(self._declaration, wanted)
        self._ref = OperationRef(self._name, self._type, obj, seen.next_instance)
        planned = whole_plan() if self._table is None else None
        new = t.NewOperation(self._ref, spec, wanted.arg, planned, options=wanted.options)
        self._commit(t.starts(self._keys, seen, [new]))
        if planned is not None:
            self._rows = loads(planned[1][0])

    def run(self) -> History:
        """Run the operation until its history record is written, and return it."""
        key = self._keys.history(self._ref)
        while (record := self._store.get(key)) is None:
            self._step()
        if self._declaration.staged_output == "remove":
            table = self._table.to_json() if self._table is not None else None
            files = {"plans": False, "stages": True, "earlier": False}
            self._child.call({"t": "sweep", "op": str(self._ref), "table": table, **files})
        return History.decode(record.value)

    def results(self) -> tuple[JobResult, ...]:
        """The results of the jobs in the order of the plan. A cancelled job has no result."""
        jobs = job_results(self._store.range(*self._keys.jobs_range(self._ref)), str(self._ref))
        shared = shared_of(str(self._child.shared), "", self._table)
        return tuple(replace(one, result=resolve(one.result, shared, attempt)) for one, attempt in jobs)

    def _step(self) -> None:
        step = self._next_step()
        if isinstance(step, next_steps.WakeAt):
            self._now = max(self._now, step.time)
        elif isinstance(step, next_steps.MakePlan):
            self._plan()
        elif isinstance(step, next_steps.Commit):
            self._commit(step.txn)
        elif isinstance(step, next_steps.Reap):
            self._reap(step.claims)
        elif isinstance(step, next_steps.CompleteFirst | next_steps.RunCompletion):
            self._complete(step.decision)
        elif isinstance(step, next_steps.Finish):
            self._finish(step.decision)
        elif step is None and self._op.stage is Stage.OPEN:
            self._work()
        else:
            raise AssertionError(f"{self._ref} has no next step ({step}): this is a bug in distop")

    def _next_step(self) -> next_steps.NextStep:
        return next_steps.next_step(self._keys, self._op, {INCARNATION}, self._election, self._now, POLL)

    def _message(self, kind: str) -> dict[str, Any]:
        """The common part of all messages to the child."""
        op = self._op
        assert op.spec is not None
        options = op.plan.options if op.plan is not None else {}
        table = op.spec.table.extended(options).to_json() if op.spec.table is not None else None
        arg = loads(self._record("arg"))
        return {"t": kind, "op": str(self._ref), "type": self._type, "arg": arg, "table": table}

    # --------------------------------------------------------------- planning

    def _plan(self) -> None:
        op, keys = self._op, self._keys
        assert op.spec is not None
        names = list(op.spec.partitions) if op.spec.partitions is not None else None
        try:
            planned, chunks = self._child.call({**self._message("plan"), "names": names})
        except WorkerError as error:
            before = op.planning.value.attempts if op.planning is not None else 0
            attempts, last = self._failed("planning", before, error)
            if last:
                none = Decision(State.FAILED, 0, 0, 0, error=attempts.error)
                self._commit(t.give_up(keys, self._ref, self._election, op.state_mod, none))
            else:
                seen = op.planning.mod if op.planning is not None else 0
                self._commit(t.plan_attempt(keys, self._ref, self._election, seen, attempts))
            return
        self._rows = [row for chunk in chunks for row in loads(chunk)]
        found = planned["version"], plan_digest(chunks), len(chunks), planned["spilled"], planned["options"]
        plan = Plan(planned["count"], *found, tuple(planned["beside"]), planned["removes_table"])
        mods = [
            self._commit(t.write_chunk(keys, self._ref, self._election, n, 0, chunk)).revision
            for n, chunk in enumerate(chunks)
        ]
        terms = replace(op.terms, beside=plan.beside)
        removal = self._removal() if plan.removes_table else t.NO_REMOVAL
        self._commit(t.write_plan(keys, self._ref, self._election, plan, mods, terms=terms, removal=removal))

    def _removal(self) -> Txn:
        """The removal of the table's record, which goes with the plan."""
        table, run_ops = (
            self._store.get(key) for key in (self._keys.table(self._name), self._keys.run_ops(self._name))
        )
        assert table is not None
        assert run_ops is not None
        return table_registry.removal(self._keys, self._ref, table, run_ops)

    def _failed(self, what: str, before: int, error: WorkerError) -> tuple[Attempts, bool]:
        op = self._op
        assert op.spec is not None
        final = error.kind in ("fatal", "unable")
        return next_steps.failed_attempt(
            op.spec.rules, before, f"{what} failed: {error}", self._now, final=final, jitter=1
        )

    # ------------------------------------------------------------------- jobs

    def _work(self) -> None:
        """Claim and run the next job, or all claimable jobs of a behavior with batches."""
        op, keys = self._op, self._keys
        assert op.spec is not None
        assert op.plan is not None
        rules, claims = op.spec.rules, {p: Seen(one.value, one.mod) for p, one in op.claims.items()}
        by = job_claims.Claimant(EXECUTOR, {INCARNATION}, (), max(POLL, rules.retry.maximum))
        found = job_claims.claimable(op.plan.count, self._ended, claims, by, self._now, {})
        todo = sorted([*found.free, *found.waiting]) if rules.batch else [*found.free, *found.waiting][:1]
        if not todo:
            assert found.next_due is not None
            self._now = max(self._now, found.next_due)
            return
        for n in range(0, len(todo), job_transitions.CLAIMS_PER_TXN):
            page = todo[n : n + job_transitions.CLAIMS_PER_TXN]
            wanted = [(p, *job_claims.claim_for(claims.get(p), EXECUTOR, INCARNATION, False, rules)) for p in page]
            wants = [job_transitions.Want(p, claim, mod) for p, claim, mod, _ in wanted]
            gate = self._store.mod(keys.gate(self._ref))
            fence = self._commit(job_transitions.claim(keys, self._ref, gate, INCARNATION, wants)).revision
            self._held.update({p: (claim, fence) for p, claim, _, _ in wanted})
        run = self._child.run(
            {
                **self._message("run"),
                "items": [self._item(p, claim, fence) for p, (claim, fence) in self._held.items()],
                "batch": rules.batch,
                "cleanup": any(claim.attempt > 1 for claim, _ in self._held.values()),
                "incarnation": INCARNATION,
            }
        )
        self._stop = lambda: run.cancel(None)
        self._child.start(run)
        self._stop = None
        self._fail_after_cleanup()

    def _item(self, partition: int, claim: Claim, fence: int) -> tuple[Mapping[str, Any], int, int, Any]:
        return self._rows[partition], claim.attempt, fence, self._checkpoint(partition)

    def _checkpoint(self, partition: int) -> Any:
        kv = self._store.get(self._keys.job(self._ref, partition, "progress"))
        return loads(kv.value) if kv is not None else None

    def _job_ended(self, end: Sequence[Any]) -> None:
        """Write the end of a job.

        Called in the job's thread, while :meth:`run` waits for it.
        """
        partition, kind, result, error, started, finished = end
        op, keys = self._op, self._keys
        assert op.spec is not None
        rules, (claim, fence) = op.spec.rules, self._held.pop(partition)
        if kind == "unable":
            kind = "fatal"  # there is no other executor that could run it
        end = (kind, result, error, (rfc3339(started), rfc3339(finished)))
        step = job_claims.after_end(kind, claim, rules)
        if step == "fail":
            self._to_fail.append((partition, claim, fence, (kind, None, error, end[3])))
        elif step == "report":
            self._report(partition, claim, fence, end)
        else:
            waiting = job_claims.released(claim, EXECUTOR)
            if step == "retry":
                if claim.attempt >= MOST_ATTEMPTS:
                    name = self._rows[partition]["name"]
                    raise AssertionError(
                        f"the job {name} has failed {claim.attempt} times, but can_fail is False: {error}"
                    )
                due = self._now + rules.retry.delay(claim.failures + 1)
                waiting = job_claims.retried(claim, EXECUTOR, error, rfc3339(due))
            self._write(job_transitions.wait_again(keys, self._ref, partition, fence, waiting, claim))
        if self._held and self._stop is not None and isinstance(step_now := self._next_step(), next_steps.Commit):
            self._commit(step_now.txn)  # too many jobs have failed, so the others of the batch must stop
            self._stop()

    def _report(self, partition: int, claim: Claim, fence: int, end: tuple[Any, ...]) -> None:
        state = JobState.SUCCESS if end[0] == "success" else JobState.FAILED
        outcome = job_claims.outcome(claim, fence, self._rows[partition]["name"], *end)
        try:
            self._write(job_transitions.report(self._keys, self._ref, partition, fence, state, outcome, claim))
        except InvalidArgument as error:  # the result is too large for etcd
            self._report(partition, claim, fence, ("fatal", None, str(error), end[3]))
        self._ended.add(partition)

    def _write(self, write: job_transitions.Guarded) -> None:
        self._commit(job_transitions.alone(write))

    def _fail_after_cleanup(self) -> None:
        while self._to_fail:
            partition, claim, fence, end = self._to_fail.popleft()
            checkpoint = self._checkpoint(partition)
            if checkpoint is not None:
                self._save(partition, fence, given_up(checkpoint))
            self._clean_up([self._item(partition, claim, fence)])
            self._report(partition, claim, fence, end)

    def _clean_up(self, items: Sequence[Any]) -> None:
        with suppress(WorkerError):  # the child has logged it, and the operation continues, as in an executor
            self._child.call({**self._message("cleanup"), "items": items, "incarnation": INCARNATION})

    def _reap(self, claims: Sequence[tuple[int, int]]) -> None:
        op = self._op
        self._clean_up([self._item(p, op.claims[p].value, mod) for p, mod in claims])
        for n in range(0, len(claims), job_transitions.CLAIMS_PER_REAP):
            page = claims[n : n + job_transitions.CLAIMS_PER_REAP]
            self._commit(job_transitions.reap(self._keys, self._ref, self._election, op.state_mod, page))

    def _save(self, partition: int, fence: int, value: Any) -> None:
        seen = self._store.mod(self._keys.job(self._ref, partition, "progress"))
        self._write(job_transitions.checkpoint(self._keys, self._ref, partition, fence, dumps(value), seen))

    # ------------------------------------------------------------------- end

    def _complete(self, decision: Decision) -> None:
        op, keys = self._op, self._keys
        assert op.spec is not None
        plan, counts = op.plan, (decision.total, decision.success, decision.failed)
        message = {
            **self._message("complete"),
            "verdict": str(decision.verdict),
            **dict(zip(("total", "success", "failed"), counts, strict=True)),
            "plan": {
                "version": plan.version if plan is not None else "",
                "whole": op.spec.partitions is None,
                "chunks": int(plan is not None),
            },
        }
        try:
            done, _ = self._child.call(message)
        except WorkerError as error:
            attempts, last = self._failed("completion", decision.attempts, error)
            after = next_steps.after_failed_completion(decision, op.spec.rules, attempts, last=last)
            if op.decision is not None:
                self._commit(f.complete_attempt(keys, self._ref, self._election, op.decision.mod, after))
            else:
                self._commit(f.decide(keys, self._ref, self._election, op.state_mod, after))
            return
        self.follow_ups = tuple(done["follow_ups"])
        for found in done.get("registrations", ()):
            record = TableRecord.from_json(found)
            if self._store.get(keys.table(record.name)) is None:
                run_ops = self._store.get(keys.run_ops(record.name))
                self._commit(table_registry.registration(keys, self._election, record, run_ops))
        self._finish(decision, done["report"], done["failure"])

    def _finish(self, decision: Decision, report: Any = None, failure: str | None = None) -> None:
        op, keys, ref = self._op, self._keys, self._ref
        assert op.spec is not None
        failed = from_ranges(decision.failed_ranges)[:ERRORS_KEPT]
        kvs = [self._store.get(keys.job(ref, p, "outcome")) for p in failed]
        outcomes = [Outcome.decode(kv.value) if kv is not None else None for kv in kvs]
        history, value = final_record(
            *(ref, op.spec, decision, [error_of(p, one) for p, one in zip(failed, outcomes, strict=True)]),
            rfc3339(self._now),
            report=report,
            failure=failure,
            cancel=op.cancel,
            actions=op.actions,
            executor=EXECUTOR,
        )
        mod, planned = op.decision.mod if op.decision is not None else 0, op.plan is not None
        final = f.Final(ref, op.state_mod, mod, history, op.spec.one_at_a_time, value=value, planned=planned)
        seen = self._counters()
        self._commit(f.finish(keys, self._election, seen.run_ops, seen.run_ops_mod, [final]))

    # ------------------------------------------------- questions of the child

    def _answer(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = message["t"]
        if kind == "progress":
            _, fence = self._held[message["partition"]]
            self._save(message["partition"], fence, message["value"])
            return {"value": True}
        if kind == "table":
            kv = self._store.get(self._keys.table(message["name"]))
            return {"value": TableRecord.decode(kv.value).to_json() if kv is not None else None}
        if message.get("tables"):
            found = self._store.range(*self._keys.family(TABLE))
            return {"value": None, "items": [TableRecord.decode(kv.value).to_json() for kv in found], "more": False}
        if kind == "history":
            kv = self._store.get(self._keys.history(OperationRef.parse(message["op"])))
            if kv is None:
                return {"value": {"refused": f"there is no history record of {message['op']}"}}
            return {"value": {"record": History.decode(kv.value).to_json()}}
        rows = self._rows if message.get("plan") else self._outcomes()
        return {"value": None, "items": rows, "more": False}

    def _outcomes(self) -> list[Mapping[str, Any]]:
        keys, ref = self._keys, self._ref
        rows: list[Mapping[str, Any]] = []
        for p in sorted(self._ended):
            state, outcome = (self._store.get(keys.job(ref, p, name)) for name in ("state", "outcome"))
            assert state is not None
            assert outcome is not None
            success = state.value == JobState.SUCCESS.encode()
            rows.append({"partition": p, "success": success, "outcome": loads(outcome.value)})
        return rows
