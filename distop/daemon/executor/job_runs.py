"""Runs claimed jobs in the child, and writes each job's end under its fence."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from distop.clock import random, time
from distop.daemon.local_jobs import WorkDirectoryUnusable
from distop.daemon.saved_checkpoints import Checkpoints, read_checkpoints
from distop.decide import job_claims
from distop.errors import EtcdRejected, EtcdUnavailable, InvalidArgument, OutcomeUnknown, SessionLost, describe
from distop.protocol import job_transitions
from distop.protocol.behavior_declaration import shortest
from distop.protocol.jobs import JobState, Outcome, given_up
from distop.protocol.json_codec import rfc3339
from distop.protocol.texts import plural
from distop.runtime.backoff import Backoff
from distop.worker.daemon_side.requests import JobEnded, JobItem, Listener, RunRequest, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.jobs import Claim
    from distop.protocol.records import OperationRef
    from distop.services.open_operation import Held, OpenOperation

GIVE_UP_TRIES = 3
"""Maximum attempts to give up one checkpoint: another write of the job may come first."""
GIVE_UP_PAUSE = (0.2, 5.0)
"""Back-off in seconds, first and longest, for reads that precede a cleanup."""
PATIENCE = 1.0
"""Seconds after which jobs that wait in a shared slot are left to other executors: the jobs are not as short as
expected.
"""
DISK_PAUSE = 5.0
"""Seconds without claims after a failed write to this executor's disk."""


def _where(op: OpenOperation, partition: int, held: Held | None) -> dict[str, Any]:
    """The fields of a log record about a job (-1: a batch)."""
    attempt = held.claim.attempt if held is not None else None
    return {"operation": str(op.ref), "partition": partition if partition >= 0 else None, "attempt": attempt}


class Scheduler(Protocol):
    """The scheduler of jobs, which is informed about their ends."""

    def stopping(self, op: OpenOperation) -> bool:
        """Whether no more jobs of the operation may start."""

    def settled(self, op: OpenOperation, partition: int, *, ended: bool) -> None:
        """Handle a job that is no longer held.

        Not ``ended``: it waits, or another executor holds it.
        """

    def job_failed(self, ref: OperationRef) -> None:
        """Count a job of the operation that ended in an unexpected error."""

    def succeeded(self, ref: OperationRef) -> None:
        """Count a job of the operation that ended as a success or a failure."""

    def hint_released(self) -> None:
        """Announce that claims were set to waiting."""


class Jobs:
    """The jobs of one incarnation that run, or whose end is being written."""

    def __init__(self, ctx: Context, scheduler: Scheduler) -> None:
        self._ctx = ctx
        self._scheduler = scheduler
        self._failing: set[asyncio.Task[None]] = set()
        self._ending: set[tuple[OperationRef, int]] = set()
        """Held jobs whose end is being written: no other write about them is allowed."""
        self._checkpoints = Checkpoints(ctx)
        self._disk_until = 0.0

    def disk_pause(self) -> float:
        """Seconds for which no job is claimed, after a failed write to the disk."""
        return self._disk_until - time.monotonic()

    async def run(self, op: OpenOperation, block: Sequence[int]) -> None:
        """Run a block of held jobs to its end.

        Raises SessionLost. Other errors are raised after the release of the jobs that have not ended.
        """
        ctx = self._ctx
        ending = [p for p in block if p in op.held and job_claims.only_ends(op.held[p].claim, op.spec.rules)]
        try:
            await self._end_lost(op, ending)
            block = [p for p in block if p not in ending]
            if not block:
                return
            checkpoints = await self._prepare(op, block)
            if self._scheduler.stopping(op):
                self.release(op, block)
                return
            request, listener = self._asked(op, block, checkpoints)
            try:
                await ctx.worker.run(
                    request,
                    listener.on_events,
                    on_status=listener.on_status,
                    on_progress=listener.on_progress,
                    on_tasks=listener.on_tasks,
                    on_work=listener.on_work,
                )
            finally:
                ctx.doing.remove(request)
        except SessionLost:
            raise
        except Exception as error:
            if isinstance(error, WorkDirectoryUnusable):  # nothing may start before it is written down
                self._disk_until = time.monotonic() + DISK_PAUSE
            self.release(op, block)
            raise

    async def run_in_turn(
        self, jobs: Sequence[tuple[OpenOperation, Sequence[int]]], slow: Callable[[], None]
    ) -> list[JobEnded]:
        """Run held jobs of several operations one after the other in one slot.

        Returns the ends of the jobs that ran. After ``PATIENCE``, jobs that have not started are released to other
        executors, and ``slow`` is called. Raises as :meth:`run` does.
        """
        ends: list[JobEnded] = []
        try:
            await self._run_asked(await self._ask_in_turn(jobs, ends), slow)
        except SessionLost:
            raise
        except Exception as error:
            if isinstance(error, WorkDirectoryUnusable):
                self._disk_until = time.monotonic() + DISK_PAUSE
            for op, block in jobs:
                self.release(op, block)
            raise
        return ends

    async def _ask_in_turn(
        self, jobs: Sequence[tuple[OpenOperation, Sequence[int]]], ends: list[JobEnded]
    ) -> list[tuple[OpenOperation, RunRequest, Listener]]:
        """The child's work list. Jobs that may no longer start are released or ended."""
        needing = [(op, block) for op, block in jobs if self._needs_preparing(op)]
        found = await asyncio.gather(*(self._prepare(op, block) for op, block in needing))
        checkpoints = {op.ref: saved for (op, _), saved in zip(needing, found, strict=True)}
        asked = []
        for op, block in jobs:
            if self._scheduler.stopping(op):
                self.release(op, block)
                continue
            ending = [p for p in block if p in op.held and job_claims.only_ends(op.held[p].claim, op.spec.rules)]
            await self._end_lost(op, ending)
            if left := [p for p in block if p in op.held and p not in ending]:
                asked.append((op, *self._asked(op, left, checkpoints.get(op.ref, {}), ends)))
        return asked

    async def _run_asked(
        self, asked: Sequence[tuple[OpenOperation, RunRequest, Listener]], slow: Callable[[], None]
    ) -> None:
        worker = self._ctx.worker

        def patience_ends() -> None:
            slow()
            for op, _, _ in asked:
                if op.held:
                    worker.pause(str(op.ref))

        loop = asyncio.get_running_loop()
        timer = loop.call_later(PATIENCE, patience_ends) if len(asked) > 1 else None
        try:
            await worker.run_in_turn([(request, listener) for _, request, listener in asked])
        finally:
            if timer is not None:
                timer.cancel()
            for _, request, _ in asked:
                self._ctx.doing.remove(request)

    def _needs_preparing(self, op: OpenOperation) -> bool:
        rules = op.spec.rules
        return rules.leaves_something or rules.resumable or op.ref in self._ctx.local.cleaning

    def _asked(
        self,
        op: OpenOperation,
        block: Sequence[int],
        checkpoints: Mapping[int, Any],
        ends: list[JobEnded] | None = None,
    ) -> tuple[RunRequest, Listener]:
        """The request for the child, and the listener for its events. ``ends``: a list that also gets the ends."""
        ctx = self._ctx
        held = [(p, op.held[p]) for p in block if p in op.held]
        request = RunRequest(
            op=str(op.ref),
            type=op.ref.type,
            arg=op.arg,
            table=op.table,
            items=tuple(JobItem(op.partition(p), h.claim.attempt, h.fence, checkpoints.get(p)) for p, h in held),
            batch=op.spec.rules.batch,
            opened=op.gate_mod,
            cleanup_first=any(h.claim.attempt > 1 for _, h in held),
            resumable=op.spec.rules.resumable,
            time_limit=shortest(op.spec.rules.time_limit, ctx.config.job_time_limit(op.ref.type)),
            deadline=ctx.session.deadline,
            trace=op.spec.traceparent if ctx.traces is None else str(ctx.traces.context(op.ref, op.spec)),
            traced=ctx.traces is not None,
        )

        def set_status(p: int, text: str) -> None:
            if text:
                ctx.log.info("%s", text, extra=_where(op, p, op.held.get(p)))
            ctx.doing.set_text(request, text)

        def ended(events: list[JobEnded]) -> None:
            if ends is not None:
                ends.extend(events)
            ctx.doing.remove_work(request, [event.partition for event in events])
            self._ended(op, events)

        return request, Listener(
            ended,
            set_status,
            lambda p, value: self._checkpoints.save(op, p, value),
            lambda done, total: ctx.doing.set_tasks(request, done, total),
            lambda p, done: ctx.doing.set_work(request, p, done),
        )

    async def _prepare(self, op: OpenOperation, block: Sequence[int]) -> dict[int, Any]:
        """Write the run to the disk, and read the checkpoints of its jobs.

        Both have finished when this returns or raises: a run that is written after the release of its jobs would never
        be settled.
        """
        found, written = await asyncio.gather(
            self._checkpoints.load(op, block), self._write_run(op, block), return_exceptions=True
        )
        if isinstance(written, BaseException):
            raise written
        if isinstance(found, BaseException):
            raise found
        checkpoints: dict[int, Any] = found
        return checkpoints

    async def _write_run(self, op: OpenOperation, block: Sequence[int]) -> None:
        """Write the jobs to the disk before one of them starts (I29)."""
        if op.spec.rules.leaves_something:
            held = [(p, op.held[p]) for p in block]
            items = [JobItem(op.partition(p), h.claim.attempt, h.fence) for p, h in held]
            await self._ctx.local.begin(op.ref, op.arg, op.table, items)
        if (cleaning := self._ctx.local.cleaning.get(op.ref)) is not None:
            await asyncio.shield(cleaning)

    def release(self, op: OpenOperation, partitions: Iterable[int]) -> None:
        """Set held claims to waiting: due at once, and not counted as failures.

        Claims whose end is being written are skipped.
        """
        writes = []
        for p in partitions:
            held = self._begin_end(op, p)
            if held is not None:
                waiting = job_claims.released(held.claim, self._ctx.executor_id)
                write = job_transitions.wait_again(self._ctx.keys, op.ref, p, held.fence, waiting, held.claim)
                writes.append((write, self._answer(op, p, ended=False)))
        self._ctx.reporter.submit(writes)
        self._scheduler.hint_released()

    def close(self) -> None:
        """Stop at once: the session has ended."""
        for failing in self._failing:
            failing.cancel()

    async def drain(self) -> None:
        """Wait until every end is written or the session is lost."""
        while self._failing:
            await asyncio.wait(set(self._failing))
        await self._ctx.reporter.drain()

    # ------------------------------------------------------------------ ends

    def _begin_end(self, op: OpenOperation, partition: int) -> Held | None:
        """Start the end of a job, and return its claim.

        None if the job is not held or its end is being written: of two writes under one fence in different
        transactions, either could be applied.
        """
        held = op.held.get(partition)
        if held is None or (op.ref, partition) in self._ending:
            return None
        self._ending.add((op.ref, partition))
        return held

    def _ended(self, op: OpenOperation, events: Sequence[JobEnded]) -> None:
        """Write the ends of jobs, each under its fence, through the group commit."""
        writes = []
        for event in events:
            held = self._begin_end(op, event.partition)
            if held is not None:
                try:
                    write = self._write(op, held, event)
                except Exception as error:
                    write = self._unwritable(op, held, event, error)
                if write is not None:
                    gone = event.kind == "refused" or (event.kind == "cancelled" and not event.error)
                    left = not gone or op.spec.rules.resumable
                    ended = write.label == "report"
                    writes.append((write, self._answer(op, event.partition, ended=ended, left=left, event=event)))
        self._ctx.reporter.submit(writes)

    def _write(self, op: OpenOperation, held: Held, event: JobEnded) -> job_transitions.Guarded | None:
        keys, p, claim, rules = self._ctx.keys, event.partition, held.claim, op.spec.rules
        tables = op.gate.tables(op.ref.table)
        if event.kind == "unable" and not self._ctx.capability.cannot(op.ref.type, event.error, tables):
            event = replace(event, kind="fatal")  # no other executor can run it either
        if event.kind == "unavailable" and not self._ctx.capability.cannot_now(
            op.ref.type, event.error, op.gate.where, job_claims.given_back(claim), tables
        ):
            event = replace(event, kind="error", error=f"{job_claims.NOT_RUN}{event.error}")
        step = job_claims.after_end(event.kind, claim, rules)
        if step == "release":
            self._scheduler.hint_released()
            lacks = event.error if event.kind == "unavailable" else ""
            released = job_claims.released(claim, self._ctx.executor_id, lacks)
            return job_transitions.wait_again(keys, op.ref, p, held.fence, released, claim)
        if event.kind in ("error", "crash"):
            self._scheduler.job_failed(op.ref)
        elif event.kind != "fatal":  # a fatal error is the job's fault, and counts neither for nor against the node
            self._scheduler.succeeded(op.ref)
            self._ctx.capability.succeeded(op.ref.type, event.started)
        if step == "retry":
            return self._retry(op, held, event)
        if step == "fail":
            self._fail_after_cleanup(op, [(held, event)])
            return None
        state = JobState.SUCCESS if event.kind == "success" else JobState.FAILED
        try:
            return job_transitions.report(keys, op.ref, p, held.fence, state, self._outcome(held, event), claim)
        except InvalidArgument as error:  # the outcome is too large to be stored
            broken = replace(event, kind="fatal", result=None, error=str(error))
            if not rules.can_fail:
                return self._retry(op, held, broken)
            return job_transitions.report(
                keys, op.ref, p, held.fence, JobState.FAILED, self._outcome(held, broken), claim
            )

    def _unwritable(self, op: OpenOperation, held: Held, event: JobEnded, error: Exception) -> job_transitions.Guarded:
        """The write for a job whose end cannot be encoded: a failed attempt.

        The job must neither stay held nor be retried without a limit.
        """
        where = _where(op, event.partition, held)
        self._ctx.log.error(
            "Cannot encode the end of a job; counting it as a failed attempt", extra=where, exc_info=error
        )
        broken = replace(
            event, kind="error", result=None, error=f"the end of the job could not be encoded: {describe(error)}"
        )
        if not op.spec.rules.at_limit(held.claim.failures + 1):
            return self._retry(op, held, broken)
        outcome = self._outcome(held, broken)
        failed = JobState.FAILED
        return job_transitions.report(self._ctx.keys, op.ref, event.partition, held.fence, failed, outcome, held.claim)

    def _outcome(self, held: Held, event: JobEnded) -> Outcome:
        mine = replace(held.claim, executor=self._ctx.executor_id, incarnation=self._ctx.incarnation)
        when = rfc3339(event.started), rfc3339(event.finished)
        return job_claims.outcome(mine, held.fence, held.name, event.kind, event.result, event.error, when)

    def _retry(self, op: OpenOperation, held: Held, event: JobEnded) -> job_transitions.Guarded:
        """Retry the job later: counted, with back-off and jitter."""
        claim: Claim = held.claim
        pause = op.spec.rules.retry.delay(claim.failures + 1) * random.uniform(0.5, 1.0)
        self._ctx.log.warning(
            "Job attempt failed; retrying in %.1f s: %s",
            pause,
            event.error.strip() or event.kind,
            extra=_where(op, event.partition, held),
        )
        self._ctx.meter.retried(op.ref.type)
        waiting = job_claims.retried(claim, self._ctx.executor_id, event.error, rfc3339(time.time() + pause))
        self._scheduler.hint_released()
        return job_transitions.wait_again(self._ctx.keys, op.ref, event.partition, held.fence, waiting, claim)

    async def _end_lost(self, op: OpenOperation, partitions: Sequence[int]) -> None:
        """Fail held jobs that were lost too often. Raises OSError."""
        if not partitions:
            return
        await self._write_run(op, partitions)
        now = time.time()
        ends: list[tuple[Held, JobEnded]] = []
        for p in partitions:
            held = self._begin_end(op, p)
            if held is not None:
                last = held.claim.tried[-1]
                actor = last.executor if last.text == job_claims.EXPIRED else ""
                lost = replace(held.claim, executor=last.executor, actor=actor, attempt=last.attempt)
                text = job_claims.lost_text(lost, held.claim.failures)
                ends.append((held, JobEnded(p, "fatal", None, text, now, now)))
        self._fail_after_cleanup(op, ends, lost=True)

    def _fail_after_cleanup(
        self, op: OpenOperation, ends: Sequence[tuple[Held, JobEnded]], *, lost: bool = False
    ) -> None:
        """Clean up after jobs that failed for good, then report them.

        No later attempt would clean up. ``lost``: no job ran under these claims.
        """

        async def fail() -> None:
            alone = ends[0] if len(ends) == 1 else None
            where = _where(op, alone[1].partition, alone[0]) if alone else _where(op, -1, None)
            try:
                items = await self._to_clean_for_sure(op, ends, where, goes_on=not lost)
                if items:
                    await self._ctx.worker.cleanup(str(op.ref), op.ref.type, op.arg, op.table, items)
            except SessionLost:
                return
            except Exception as error:  # whatever it is, the jobs have failed, and must not stay held for it
                known = error if not isinstance(error, WorkerError) else None
                message = "Cleanup after a failed job failed; reporting the job as failed: %s"
                self._ctx.log.warning(message, describe(error), extra=where, exc_info=known)
            writes = []
            for held, event in ends:
                p, outcome = event.partition, self._outcome(held, replace(event, result=None))
                if lost:
                    outcome = replace(outcome, tried=held.claim.tried, fence=0)
                write = job_transitions.report(
                    self._ctx.keys, op.ref, p, held.fence, JobState.FAILED, outcome, held.claim
                )
                writes.append((write, self._answer(op, p, ended=True, event=event, lost=lost)))
            self._ctx.reporter.submit(writes)

        failing = asyncio.ensure_future(fail())
        self._failing.add(failing)
        failing.add_done_callback(self._failing.discard)

    async def _to_clean_for_sure(
        self, op: OpenOperation, ends: Sequence[tuple[Held, JobEnded]], where: dict[str, Any], *, goes_on: bool
    ) -> list[JobItem]:
        """Like :meth:`_to_clean`, but retried while etcd refuses to answer.

        For example, the executor's role may be revoked for a while. The jobs stay held, and nobody cleans up after
        their reports.
        """
        backoff, logged = Backoff(*GIVE_UP_PAUSE), False
        while True:
            try:
                return await self._to_clean(op, ends, where, goes_on=goes_on)
            except (EtcdRejected, EtcdUnavailable, OutcomeUnknown) as error:
                message = "Cannot prepare the cleanup after a failed job; retrying: %s"
                self._ctx.log.log(logging.DEBUG if logged else logging.WARNING, message, describe(error), extra=where)
                logged = True
                await asyncio.sleep(backoff.pause())

    async def _to_clean(
        self, op: OpenOperation, ends: Sequence[tuple[Held, JobEnded]], where: dict[str, Any], *, goes_on: bool
    ) -> list[JobItem]:
        """The jobs to clean up after.

        ``goes_on``: another executor could continue from their checkpoints, so these are given up first. A job whose
        checkpoint cannot be given up is skipped: its checkpoint may refer to its files.
        """
        partitions = [event.partition for _, event in ends]
        saved = await read_checkpoints(self._ctx, op.ref, partitions) if op.spec.rules.resumable else {}
        stays = set[int]()
        if goes_on and saved:
            given = await asyncio.gather(*(self._give_up(op, p, saved[p]) for p in saved))
            stays = {p for p, sure in zip(saved, given, strict=True) if not sure}
        if stays:
            text = "Cannot give up the checkpoints of %s; skipping the cleanup"
            self._ctx.log.warning(text, plural(len(stays), "job"), extra=where)
        return [
            JobItem(op.partition(p), held.claim.attempt, held.fence, saved.get(p))
            for p, (held, _) in zip(partitions, ends, strict=True)
            if p not in stays
        ]

    async def _give_up(self, op: OpenOperation, partition: int, checkpoint: Any) -> bool:
        """Give up the checkpoint of a held job; returns whether that succeeded.

        The write is refused if an earlier write of the job comes first, and is then retried. If another executor holds
        the job, every attempt is refused.
        """
        for _ in range(GIVE_UP_TRIES):
            if await self._checkpoints.save(op, partition, given_up(checkpoint)):
                return True
        return False

    def _answer(
        self,
        op: OpenOperation,
        partition: int,
        *,
        ended: bool,
        left: bool = True,
        event: JobEnded | None = None,
        lost: bool = False,
    ) -> Callable[[int], None]:
        """The callback for the answer to a job's write.

        ``ended``: the job ends with this write, as ``event`` states, or (``lost``) because its holders were lost.
        ``left``: if it does not end, it leaves data on this node.
        """
        local = self._ctx.local if op.spec.rules.leaves_something else None

        def answered(applied: int) -> None:
            held = op.held.pop(partition, None)
            if applied and held is not None:
                op.given_back(held.claim, applied)
            self._ending.discard((op.ref, partition))
            self._checkpoints.forget(op.ref, partition)
            if applied and ended and lost:
                self._ctx.meter.jobs_lost(op.ref.type, 1)
            elif applied and ended and event is not None:
                outcome = JobState.SUCCESS if event.kind == "success" else JobState.FAILED
                self._ctx.meter.job_ended(op.ref.type, outcome, event.finished - event.started)
            if self._ctx.traces is not None and applied and held is not None and event is not None and not lost:
                self._trace(op, held, event, ended=ended)
            if local is not None and ((applied and ended) or not left):
                local.ended(op.ref, partition)
            elif local is not None:
                local.released(op.ref, partition)
            if not applied:
                self._ctx.log.info(
                    "Dropping the end of a job that this executor no longer holds", extra=_where(op, partition, held)
                )
            self._scheduler.settled(op, partition, ended=bool(applied and ended))

        return answered

    def _trace(self, op: OpenOperation, held: Held, event: JobEnded, *, ended: bool) -> None:
        if self._ctx.traces is not None and event.kind != "refused":  # it has not started
            outcome = event.kind if event.kind in ("success", "cancelled") else "failed" if ended else "retry"
            job = event.partition, held.name, held.claim.attempt
            error = event.error.strip() or event.kind if outcome in ("failed", "retry") else ""
            self._ctx.traces.ran(op.ref, op.spec, job, (event.started, event.finished), outcome, error)
