"""Ends operations: completion code, finish, follow-up operations, cleanup.

The decision from the jobs is written before the completion code runs, unless that code only makes a report. The
terminal state is one transaction with the history record (C30). ``protocol.operation_transitions`` has the compares of
each write.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import random, time
from distop.daemon.coordinator.attempt_limit import Elsewhere, failed_attempt
from distop.daemon.coordinator.finish_batches import Finishes
from distop.daemon.coordinator.orphaned_jobs import table_of
from distop.daemon.coordinator.rerun_gathering import kept_with
from distop.daemon.job_reports import Reporter
from distop.decide import next_steps
from distop.decide.due_operations import ERRORS_KEPT, error_of, final_record
from distop.errors import (
    Incompatible,
    InvalidArgument,
    NotFound,
    OperationStartError,
    UnknownBehavior,
    UnreadableRecord,
)
from distop.protocol import operation_finish as f
from distop.protocol.dependencies import follows_elsewhere
from distop.protocol.executor_nodes import refusal
from distop.protocol.job_transitions import guarded
from distop.protocol.jobs import JobState, Outcome
from distop.protocol.json_codec import dumps, from_ranges, loads, parse_time, rfc3339
from distop.protocol.keys import job_name
from distop.protocol.record_reading import read
from distop.protocol.record_signature import signature
from distop.protocol.records import Decision, History
from distop.protocol.schedule import Series, following, next_request
from distop.protocol.state_tables import Stage
from distop.protocol.txn import Get
from distop.schemas.argument_schema import encode_argument
from distop.services.submission.start_options import StartOptions
from distop.services.submission.start_request import FOLLOW, derived, request
from distop.services.submission.submit import submit
from distop.worker.daemon_side.requests import PlanPages, WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from distop.daemon.action_log import ActionLog
    from distop.daemon.coordinator.orphaned_jobs import Call
    from distop.daemon.incarnation_context import Context
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Compare, Txn
    from distop.worker.daemon_side.requests import CompleteResult
    from distop.worker.daemon_side.result_handlers import Fetch, Page

FOLLOW_UP_TIME = 600.0
"""Seconds for which a refused follow-up is retried."""
FOLLOW_UP_PAUSE = (1.0, 60.0)
SERIES_PAUSE = (1.0, 5.0)


class Later(Exception):
    """Nothing more can be done for an operation before ``when`` (seconds since the epoch)."""

    def __init__(self, when: float) -> None:
        super().__init__(when)
        self.when = when


class _Outcomes:
    """The pages of outcomes for the completion code; ``read`` reads the page from an ordinal on."""

    def __init__(self, read: Fetch) -> None:
        self._read = read
        self._first: asyncio.Future[Page] | None = None

    def begin(self, known: Page | None = None) -> None:
        """Prefetch the first page, unless it is ``known``."""
        if known is not None:
            self._first = asyncio.get_running_loop().create_future()
            self._first.set_result(known)
            return
        self._first = asyncio.ensure_future(self._read(0))
        self._first.add_done_callback(lambda read: read.cancelled() or read.exception())

    async def page(self, start: int) -> Page:
        if start == 0 and self._first is not None:
            first, self._first = self._first, None
            return await first
        return await self._read(start)

    def ready(self) -> Page | None:
        """The first page, if it is known by now."""
        first = self._first
        if first is None or not first.done() or first.cancelled() or first.exception() is not None:
            return None
        return first.result()

    def close(self) -> None:
        if self._first is not None:
            self._first.cancel()


def _row(partition: int, success: bool, outcome: str) -> str:
    """An outcome in the form that the child expects."""
    return f'{{"partition":{partition},"success":{"true" if success else "false"},"outcome":{outcome}}}'


def _nothing_left(op: OperationView) -> bool:
    """Whether the operation needs no cleanup after its finish.

    It has one job, no operation waits for it, it does not repeat, and it has no permits and no plan files.
    """
    spec, plan = op.spec, op.plan
    if spec is None or plan is None or op.stage is not Stage.OPEN:
        return False
    return plan.count == 1 and not plan.spilled and not op.next and spec.series is None and op.altered is None


class Ending:
    """Completes, finishes and cleans up operations under one election (``guard``).

    Each step gets the operation as it was decided for, which does not change during the step: the guards enforce it.
    ``commit`` sends a transaction, waits until the coordinator's view has reached it, and returns whether it was
    applied. ``reached`` only waits (W11). ``call`` makes a call into the child, which ends when the operation leaves
    its stage.
    """

    def __init__(
        self,
        ctx: Context,
        guard: Compare,
        commit: Callable[[Txn], Awaitable[bool]],
        reached: Callable[[int], Awaitable[None]],
        call: Call,
        actions: ActionLog,
    ) -> None:
        self._ctx = ctx
        self._actions = actions
        self._keys = ctx.keys
        self._guard = guard
        self._commit = commit
        self._reached = reached
        self._call = call
        self._log = ctx.log
        self._followed: dict[OperationRef, set[int]] = {}
        """The follow-up operations that are settled, by operation, while others wait."""
        self._follow_at: dict[OperationRef, float] = {}
        """When the refused follow-ups of an operation are retried (``time.monotonic``)."""
        self._refused: dict[OperationRef, float] = {}
        """When the first follow-up of an operation was refused (``time.monotonic``)."""
        self._ahead: dict[OperationRef, _Outcomes] = {}
        self._finishes = Finishes(ctx, guard, reached)
        self._ends = Reporter(
            ctx.client, ctx.keys, ctx.lost, ctx.log, ctx.rejected_writes, ctx.limits, what="ends of operations"
        )
        """Group commit of the deletions of their keys."""

    def close(self) -> None:
        """Stop at once: the election or the session is over."""
        self._ends.close()

    # --------------------------------------------------------------- complete

    async def complete(self, op: OperationView, decision: Decision) -> bool:
        """Run the completion code in the child, then finish.

        Returns False if a transaction was refused. If ``decision`` is not written yet, the code only makes a report,
        and the finish writes the decision as well. Raises Elsewhere.
        """
        assert op.spec is not None
        ref, decision_mod = op.ref, op.decision.mod if op.decision is not None else 0
        if not self._ctx.serves(ref.type, (ref.table, *op.terms.beside)):
            return False
        decided, worker = decision, self._ctx.worker
        outcomes = self._ahead.pop(ref, None)
        if outcomes is None:
            outcomes = self._outcomes_of(op, decided.total, self._known(op, decided.total))
        try:
            argument = await self._ctx.argument(ref)
            self.foresee(op)
            done: CompleteResult = await self._call(
                ref,
                op.stage,
                lambda: worker.complete(
                    str(ref),
                    ref.type,
                    argument,
                    table_of(op),
                    str(decided.verdict),
                    decided.total,
                    decided.success,
                    decided.failed,
                    outcomes.page,
                    outcomes.ready(),
                    self._plan_of(op),
                ),
            )
        except WorkerError as error:
            return await self._completion_failed(op, decision, error)
        finally:
            outcomes.close()
        if done.follow_ups and list(done.follow_ups) != list(decision.follow_ups):
            # Kept with the decision, so that a crash after the finish loses none of them.
            decision = replace(decision, follow_ups=tuple(done.follow_ups))
            kept = await self._ctx.commit(self._noted(op, decision))
            if not kept.succeeded:
                return False
            decision_mod = kept.revision
            await self._reached(decision_mod)
        return await self.finish(op, decision, decision_mod, done.report, done.failure)

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
                read(Outcome.decode, kv)  # raises for what is none: the child is given nothing that it cannot read
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
            return None  # it is read anew, and told by whoever reads it
        return [_row(p, p not in op.failed, kv.value.decode()) for p, kv in sorted(op.outcomes.items())], None

    # ----------------------------------------------------------------- finish

    async def finish(
        self,
        op: OperationView,
        decision: Decision,
        decision_mod: int,
        report: Any = None,
        failure: str | None = None,
    ) -> bool:
        """Write the terminal state and the history record.

        Returns False if it was refused for another reason than runOps.
        """
        assert op.spec is not None
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
        if final.gone:
            await self._ctx.prune_history(ref.table)
        return True

    def foresee_completion(self, op: OperationView, total: int) -> None:
        """Prefetch a few outcomes while the decision is being written: outcomes never change."""
        if total <= self._ctx.limits.outcomes_ahead and op.ref not in self._ahead:
            self._ahead[op.ref] = self._outcomes_of(op, total)

    def keep(self, refs: Collection[OperationRef]) -> None:
        """Drop the prefetched data of all other operations, which are gone."""
        for ref in [ref for ref in self._ahead if ref not in refs]:
            self._ahead.pop(ref).close()
        self._refused = {ref: since for ref, since in self._refused.items() if ref in refs}

    def _outcomes_of(self, op: OperationView, total: int, known: Page | None = None) -> _Outcomes:
        ref = op.ref

        async def page(start: int) -> Page:
            known = self._known(op, total) if start == 0 else None
            return known if known is not None else await self._outcomes(ref, total, start)

        outcomes = _Outcomes(page)
        if known is not None or total <= self._ctx.limits.outcomes_ahead:
            outcomes.begin(known)
        return outcomes

    def foresee(self, op: OperationView) -> None:
        """Prefetch for the finish of an operation that may end soon."""
        self._finishes.foresee(op.ref, op.state_mod)

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
            await self._follow_all(ref, follow_ups)
        await self._come_again(op)
        size = self._ctx.limits.cleaned
        last = max(0, (count - 1) // size * size)
        for first in range(0, last, size):
            result = await self._ctx.commit(f.clean(self._keys, ref, self._guard, op.state_mod, first, size))
            if not result.succeeded:
                return False
        await self._sweep(op)
        id_ = op.spec.id if op.spec is not None and op.spec.series is not None else ""
        if not await self.together(f.end(self._keys, ref, self._guard, op.state_mod, id_)):
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
        """Remove the plan's files from the shared directory, while the operation is known."""
        if op.spec is None or op.spec.table is None or not (op.plan is None or op.plan.spilled):
            return
        ref, table, worker = op.ref, op.spec.table.to_json(), self._ctx.worker
        if why := refusal(self._ctx.config.serves, None, (ref.table,)):
            where = {"operation": str(ref)}
            self._log.warning("Leaving its plan's files in the shared directory: %s", why, extra=where)
            return
        try:
            await self._call(ref, Stage.CLEANING, lambda: worker.sweep(str(ref), table))
        except WorkerError as error:
            # Left behind is garbage that nothing names; the operation must end all the same.
            self._log.warning(
                "Cannot remove its plan's files from the shared directory; leaving them: %s",
                error,
                extra={"operation": str(ref)},
            )

    # ----------------------------------------------------------- what follows

    async def _come_again(self, op: OperationView) -> None:
        """Start the next operation of its series (P3).

        It starts once, by its request id, even if several coordinators try.
        """
        ref, spec = op.ref, op.spec
        if spec is None or spec.series is None or op.state is None:
            return
        history, arg = await self._ctx.client.read(Get(self._keys.history(ref)), Get(self._keys.of(ref, "arg")))
        now = time.time()
        finished = parse_time(read(History.decode, history.kv).finished) if history.kv is not None else now
        one = following(Series.from_json(spec.series), str(ref), op.state, finished, now, random.uniform(0, 1))
        if one is None or arg.kv is None:
            return
        rules = spec.rules
        try:
            as_before = StartOptions(
                partitions=spec.partitions,
                failure_policy=rules.failure_policy,
                retry_attempts=rules.retry.attempts,
                time_limit=rules.time_limit or None,
                labels=spec.labels,
            )
            wanted = request(ref.type, ref.table, arg.kv.value, as_before, spec.submitter)
            wanted = replace(wanted, by=spec.by, where=spec.where, options=op.terms.options)
            wanted = replace(wanted, not_before=one.not_before, series=one.series)
            by_id = {"id": spec.id, "on_duplicate": FOLLOW} if spec.id else {"one_off": True}
            wanted = derived(replace(wanted, **by_id), next_request(ref))
            started = await submit(self._ctx.client, self._keys, wanted)
        except Incompatible as error:
            # Its id is held by one of no series that has not begun: while that lasts, it is tried again.
            if pause := self._try_again(ref):
                self._log.info(
                    "Cannot start the next operation of its series; retrying: %s", error, extra={"operation": str(ref)}
                )
                raise Later(time.time() + pause) from None
            self._log.error(
                "Ending its series: the next operation was refused: %s", error, extra={"operation": str(ref)}
            )
        except OperationStartError as error:
            self._log.info(
                "Cannot start the next operation of its series; retrying: %s", error, extra={"operation": str(ref)}
            )
            raise Later(now + random.uniform(*SERIES_PAUSE)) from None
        except (InvalidArgument, UnknownBehavior, NotFound) as error:
            self._log.error(
                "Ending its series: the next operation was refused: %s", error, extra={"operation": str(ref)}
            )
        else:
            self._log.info("Started %s, the next operation of its series", started.ref, extra={"operation": str(ref)})

    async def _follow_all(self, ref: OperationRef, follow_ups: Sequence[Mapping[str, Any]]) -> None:
        """Start the follow-up operations that the completion code asked for.

        A refused one is retried, also by the next coordinator: the decision, which names it, stays until then. Raises
        Later.
        """
        if (left := self._follow_at.get(ref, 0.0) - time.monotonic()) > 0:
            raise Later(time.time() + left)
        settled = self._followed.setdefault(ref, set())
        refused: dict[int, OperationStartError] = {}
        for number, wanted in enumerate(follow_ups):
            if number not in settled:
                try:
                    await self._start_follow_up(ref, number, wanted)
                    settled.add(number)
                except OperationStartError as error:
                    refused[number] = error
        if refused and (pause := self._try_again(ref)):
            for why in refused.values():
                self._log.info("Cannot start a follow-up operation; retrying: %s", why, extra={"operation": str(ref)})
            self._follow_at[ref] = time.monotonic() + pause
            raise Later(time.time() + pause)
        for why in refused.values():
            self._log.error(
                "Giving up on a follow-up operation that is still refused: %s", why, extra={"operation": str(ref)}
            )
        self._followed.pop(ref, None)
        self._follow_at.pop(ref, None)

    def _try_again(self, ref: OperationRef) -> float:
        """Seconds until a refused follow-up operation is retried; 0 after the time limit.

        The pause grows with the time since the first refusal. The clock is monotonic: a wall clock that is hours ahead
        would give up at once. A new coordinator starts from zero.
        """
        now = time.monotonic()
        waited = now - self._refused.setdefault(ref, now)
        shortest, longest = FOLLOW_UP_PAUSE
        pause = min(longest, shortest + waited / 4) * random.uniform(0.8, 1.0)
        return pause if waited < FOLLOW_UP_TIME else 0.0

    async def _start_follow_up(self, ref: OperationRef, number: int, wanted: Mapping[str, Any]) -> None:
        """Start one follow-up operation of the completion code.

        It starts once, by its request id, even if several coordinators try. Raises OperationStartError if it is refused
        for now.
        """
        try:
            if why := follows_elsewhere(ref, wanted.get("table")):
                raise InvalidArgument(why)
            options = StartOptions(partitions=wanted.get("partitions"), not_before=wanted.get("not_before"))
            arg = encode_argument(wanted.get("arg") or {})
            asked = request(wanted.get("type", ""), ref.table, arg, options, str(ref))
            started = await submit(self._ctx.client, self._keys, derived(asked, f"{ref}#{number}"))
        except (InvalidArgument, UnknownBehavior, NotFound) as error:
            self._log.error("Cannot start a follow-up operation; skipping it: %s", error, extra={"operation": str(ref)})
        else:
            self._log.info("Started the follow-up operation %s", started.ref, extra={"operation": str(ref)})
