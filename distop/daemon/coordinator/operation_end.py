"""Ends operations: completion code, finish, cleanup.

The decision from the jobs is written before the completion code runs, unless that code only makes a report. The
terminal state is one transaction with the history record (C30). ``protocol.operation_transitions`` has the compares of
each write.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.daemon.coordinator.attempt_limit import Elsewhere, failed_attempt
from distop.daemon.coordinator.finish_batches import Finishes
from distop.daemon.coordinator.follow_ups import FollowUps
from distop.daemon.coordinator.orphaned_jobs import table_of
from distop.daemon.coordinator.rerun_gathering import kept_with
from distop.daemon.job_reports import Reporter
from distop.decide import next_steps
from distop.decide.due_operations import ERRORS_KEPT, error_of, final_record
from distop.errors import NotFound, UnreadableRecord
from distop.protocol import operation_finish as f
from distop.protocol import table_registry
from distop.protocol.executor_nodes import refusal
from distop.protocol.job_transitions import guarded
from distop.protocol.jobs import JobState, Outcome
from distop.protocol.json_codec import dumps, from_ranges, loads, rfc3339
from distop.protocol.keys import job_name
from distop.protocol.record_reading import read
from distop.protocol.record_signature import signature
from distop.protocol.records import TableRecord
from distop.protocol.state_tables import Stage
from distop.protocol.texts import one_line, plural
from distop.protocol.txn import Get
from distop.protocol.user_actions import NO_ACTIONS, Action, Actions
from distop.worker.daemon_side.requests import CompleteRequest, PlanPages, WorkerError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distop.daemon.action_log import ActionLog
    from distop.daemon.coordinator.election import Election
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import Decision, OperationRef
    from distop.protocol.txn import Txn
    from distop.worker.daemon_side.requests import CompleteResult, RemovedStages
    from distop.worker.daemon_side.result_handlers import Page


def _row(partition: int, success: bool, outcome: str) -> str:
    """An outcome in the form that the child expects."""
    return f'{{"partition":{partition},"success":{"true" if success else "false"},"outcome":{outcome}}}'


def _nothing_left(op: OperationView) -> bool:
    """Whether the operation needs no cleanup after its finish.

    It has one job, no operation waits for it, it does not repeat, and it has no permits, plan files, stages and removed
    table.
    """
    spec, plan = op.spec, op.plan
    if spec is None or plan is None or op.stage is not Stage.OPEN:
        return False
    files = plan.spilled or spec.rules.stages or plan.removes_table
    return plan.count == 1 and not files and not op.next and spec.series is None and op.altered is None


class Ending:
    """Completes, finishes and cleans up operations under one election.

    Each step gets the view of the operation from which it was decided. It does not change during the step; the guards
    refuse a step whose view is stale.
    """

    def __init__(self, election: Election, actions: ActionLog) -> None:
        self._ctx = ctx = election.ctx
        self._actions = actions
        self._keys = ctx.keys
        self._guard = election.guard
        self._commit = election.commit
        self._reached = election.reached
        self._call = election.call
        self._log = ctx.log
        self._follow_ups = FollowUps(ctx)
        self._finishes = Finishes(ctx, election.guard, election.reached)
        self._ends = Reporter(ctx, "ends of operations")
        """Group commit of the deletions of their keys."""

    def close(self) -> None:
        """Stop at once: the election or the session has ended."""
        self._ends.close()

    # --------------------------------------------------------------- complete

    async def complete(self, op: OperationView, decision: Decision) -> bool:
        """Run the completion code in the child, then finish.

        Returns False if a transaction was refused. If ``decision`` is not written yet, the code only makes a report,
        and the finish writes the decision as well. Raises Elsewhere.
        """
        began = time.time()
        decision_mod = op.decision.mod if op.decision is not None else 0
        if not self._ctx.serves(op.ref.type, (op.ref.table, *op.terms.beside)):
            return False
        try:
            done = await self._run_completion_code(op, decision)
            for record in done.registrations:
                if not await self._register(op.ref, TableRecord.from_json(record)):
                    return False
        except WorkerError as error:
            return await self._completion_failed(op, decision, error)
        if done.follow_ups and list(done.follow_ups) != list(decision.follow_ups):
            # Kept with the decision, so that a crash after the finish loses none of them.
            decision = replace(decision, follow_ups=tuple(done.follow_ups))
            kept = await self._ctx.commit(self._noted(op, decision))
            if not kept.succeeded:
                return False
            decision_mod = kept.revision
            await self._reached(decision_mod)
        return await self.finish(op, decision, decision_mod, done.report, done.failure, began)

    async def _run_completion_code(self, op: OperationView, decision: Decision) -> CompleteResult:
        """Raises WorkerError."""
        ref, worker = op.ref, self._ctx.worker
        argument, total = await self._ctx.argument(ref), decision.total
        counts = str(decision.verdict), total, decision.success, decision.failed
        done: CompleteResult = await self._call(
            ref,
            op.stage,
            lambda: worker.complete(
                CompleteRequest(
                    *(str(ref), ref.type, argument, table_of(op), *counts),
                    fetch=partial(self._outcomes, ref, total),
                    first=self._known(op, total),
                    plan=self._plan_of(op),
                )
            ),
        )
        self._count_removed(ref, done.removed)
        return done

    async def _register(self, ref: OperationRef, record: TableRecord) -> bool:
        """Register a table that the completion code has written; returns False if the transaction was refused.

        Raises WorkerError if another table has this name.
        """
        keys = self._keys
        seen, run_ops, before = await self._ctx.client.read(*table_registry.read_table(keys, record.name))
        if seen.kv is not None:
            if read(TableRecord.decode, seen.kv) == record:
                return True
            raise WorkerError(
                "fatal",
                f"the table {one_line(record.name)} was registered meanwhile with another record: the files of {ref} "
                "are complete; remove the other table, or register this one under another name",
            )
        fields = {"format": record.format, "location": record.location, "options": dict(record.options)}
        actions = read(Actions.decode, before.kv) if before.kv is not None else NO_ACTIONS
        done = actions.and_then(Action.change(rfc3339(time.time()), "add_table", str(ref), {}, fields))
        return await self._commit(table_registry.registration(keys, self._guard, record, run_ops.kv, done))

    def _count_removed(self, ref: OperationRef, removed: RemovedStages) -> None:
        """Log and count removed stages, if there are any."""
        if removed.stages:
            self._ctx.meter.stages_removed(ref.type, removed.stages, removed.bytes)
            count = plural(removed.stages, "stage")
            self._log.info("Removed %s with %d bytes", count, removed.bytes, extra={"operation": str(ref)})

    async def _completion_failed(self, op: OperationView, decision: Decision, error: WorkerError) -> bool:
        assert op.spec is not None
        failed = failed_attempt(self._ctx, op.ref, op.spec, "completion", decision.attempts, error)
        if failed is None:
            return False
        attempts, last = failed
        after = next_steps.after_failed_completion(decision, op.spec.rules, attempts, last=last)
        counted = await self._commit(self._noted(op, after))
        if counted and not last:
            raise Elsewhere
        return counted

    def _noted(self, op: OperationView, decision: Decision) -> Txn:
        """Write the decision with the result of the completion code, or write it for the first time."""
        if op.decision is None:
            planned = op.plan is not None
            return f.decide(self._keys, op.ref, self._guard, op.state_mod, decision, planned=planned)
        return f.complete_attempt(self._keys, op.ref, self._guard, op.decision.mod, decision)

    async def _outcomes(self, ref: OperationRef, total: int, start: int) -> Page:
        """A page of outcomes from ordinal ``start`` on for the child, and the start of the next page."""
        root, after = self._keys.root(ref), min(start + self._ctx.limits.outcomes, total)
        end = f"{root}.{after:06d}" if after < 1_000_000 else f"{root}.:"
        listing = await self._ctx.client.list(f"{root}.{start:06d}", end)
        states: dict[int, bool] = {}
        outcomes: dict[int, str] = {}
        for kv in listing.kvs:
            partition, name = job_name(kv.key)
            if name == "state":
                states[partition] = kv.value == JobState.SUCCESS.encode()
            elif name == "outcome":
                read(Outcome.decode, kv)  # raises for an unreadable outcome, so the child gets readable ones only
                outcomes[partition] = kv.value.decode()
        rows = [_row(p, success, outcomes.get(p, "null")) for p, success in sorted(states.items())]
        return rows, after if after < total else None

    def _plan_of(self, op: OperationView) -> PlanPages | None:
        """The operation's plan for its completion code."""
        ref, plan = op.ref, op.plan
        if plan is None:
            return None

        async def page(number: int) -> Page:
            chunk = await self._ctx.client.get(self._keys.chunk(ref, number))
            if chunk is None:
                raise NotFound(f"chunk {number} of the plan of {ref} is missing")
            rows = [dumps(partition).decode() for partition in read(loads, chunk)]
            return rows, number + 1 if number + 1 < plan.chunks else None

        return PlanPages(plan.version, op.spec is not None and op.spec.partitions is None, plan.chunks, page)

    @staticmethod
    def _known(op: OperationView, total: int) -> Page | None:
        """All outcomes, if the view has them: outcomes never change."""
        if len(op.outcomes) != total:
            return None
        try:
            for kv in op.outcomes.values():
                read(Outcome.decode, kv)
        except UnreadableRecord:
            return None  # the page is read from etcd, which reports the unreadable record
        return [_row(p, p not in op.failed, kv.value.decode()) for p, kv in sorted(op.outcomes.items())], None

    # ----------------------------------------------------------------- finish

    async def finish(
        self,
        op: OperationView,
        decision: Decision,
        decision_mod: int,
        report: Any = None,
        failure: str | None = None,
        began: float = 0.0,
    ) -> bool:
        """Write the terminal state and the history record.

        Returns False if it was refused for another reason than runOps. ``began``: the time at which the completion code
        began; 0: there is none.
        """
        assert op.spec is not None
        began = began or time.time()
        ref = op.ref
        history, value = final_record(
            *(ref, op.spec, decision, await self._errors(ref, decision), rfc3339(time.time())),
            report=report,
            failure=failure,
            cancel=op.cancel,
            actions=op.actions,
            executor=self._ctx.executor_id,
        )
        if (key := self._ctx.config.certificate_key) and history.report is not None:
            history = replace(history, signature=signature(key, self._keys.namespace, history))
            value = history.encode()
        kept = await kept_with(self._ctx, op, history)
        gate_mod = op.opened if not decision_mod and _nothing_left(op) else 0
        alone, planned = op.spec.one_at_a_time, op.plan is not None
        final = f.Final(ref, op.state_mod, decision_mod, history, alone, kept, value, gate_mod, planned)
        if not await self._finishes.finish(final):
            return False
        self._actions.ended(op, history)
        if self._ctx.traces is not None:
            self._ctx.traces.finished(ref, op.spec, began, history)
        if final.gone:
            await self._ctx.prune_history(ref.table)
        return True

    def keep(self, refs: Collection[OperationRef]) -> None:
        """Forget the follow-ups of all other operations, which are gone."""
        self._follow_ups.keep(refs)

    def prefetch_run_ops(self, op: OperationView) -> None:
        """Prefetch for the finish of an operation that may end soon."""
        self._finishes.prefetch_run_ops(op.ref, op.state_mod)

    async def _errors(self, ref: OperationRef, decision: Decision) -> list[dict[str, Any]]:
        failed = from_ranges(decision.failed_ranges)[:ERRORS_KEPT]
        if not failed:
            return []
        found = await self._ctx.client.read(*(Get(self._keys.job(ref, p, "outcome")) for p in failed))
        outcomes = (read(Outcome.decode, answer.kv) if answer.kv is not None else None for answer in found)
        return [error_of(p, outcome) for p, outcome in zip(failed, outcomes, strict=True)]

    async def clean(self, op: OperationView, count: int, follow_ups: Sequence[Mapping[str, Any]]) -> bool:
        """Start the follow-up operations, then delete the operation's keys in pages.

        Raises Later while a follow-up operation is refused.
        """
        ref = op.ref
        if follow_ups:
            await self._follow_ups.start_all(ref, follow_ups)
        await self._follow_ups.start_next_of_series(op)
        size = self._ctx.limits.cleaned
        last = max(0, (count - 1) // size * size)
        for first in range(0, last, size):
            result = await self._ctx.commit(f.clean(self._keys, ref, self._guard, op.state_mod, first, size))
            if not result.succeeded:
                return False
        await self._sweep(op)
        id_ = op.spec.id if op.spec is not None and op.spec.series is not None else ""
        removed = op.plan is not None and op.plan.removes_table
        if not await self.together(f.end(self._keys, ref, self._guard, op.state_mod, id_, removed_table=removed)):
            return False
        await self._ctx.prune_history(ref.table)
        return True

    async def together(self, txn: Txn) -> bool:
        """Commit a write about an ended operation, together with those of others.

        Returns False if it was refused.
        """
        applied = await self._ends.write(guarded(txn))
        if applied:
            await self._reached(applied)
        return applied > 0

    async def _sweep(self, op: OperationView) -> None:
        """Remove the files of the plan and the stages, while the operation is known.

        Stages that users read stay until the history record is removed.
        """
        if op.spec is None:
            return
        plans = op.spec.table is not None and (op.plan is None or op.plan.spilled > 0)
        stages = op.spec.rules.staged_output == "remove"
        if not plans and not stages:
            return
        ref, worker, earlier = op.ref, self._ctx.worker, op.spec.one_at_a_time
        table = op.spec.table.to_json() if op.spec.table is not None else None
        what = " and ".join(filter(None, ("plan's files" if plans else "", "stages" if stages else "")))
        if why := refusal(self._ctx.config.serves, None, (ref.table,)):
            where = {"operation": str(ref)}
            self._log.warning("Leaving its %s in the shared directory: %s", what, why, extra=where)
            return
        try:
            removed = await self._call(
                ref,
                Stage.CLEANING,
                lambda: worker.sweep(str(ref), table, plans=plans, stages=stages, earlier=earlier),
            )
        except WorkerError as error:
            # Left behind is garbage that nothing names; the operation must end all the same.
            self._log.warning(
                "Cannot remove its %s from the shared directory; leaving them: %s",
                what,
                error,
                extra={"operation": str(ref)},
            )
        else:
            self._count_removed(ref, removed)
