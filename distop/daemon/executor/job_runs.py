"""Runs claimed jobs in the child, and turns each one's end into a write under its fence."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from distop.clock import random, time
from distop.daemon.local_jobs import WorkDirectoryUnusable
from distop.daemon.saved_checkpoints import Checkpoints, read_checkpoints
from distop.decide import next_steps
from distop.errors import EtcdRejected, EtcdUnavailable, InvalidArgument, OutcomeUnknown, SessionLost, describe
from distop.protocol import job_transitions
from distop.protocol.behavior_declaration import shortest
from distop.protocol.jobs import JobState, Outcome, given_up
from distop.protocol.json_codec import rfc3339
from distop.runtime.backoff import Backoff
from distop.worker.daemon_side.requests import JobEnded, JobItem, Listener, RunRequest, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.jobs import Claim
    from distop.protocol.records import OperationRef
    from distop.services.open_operation import Held, OpenOperation

GIVE_UP_TRIES = 3
"""Writes that give up one checkpoint, at most: another one of the job may come first."""
GIVE_UP_PAUSE = (0.2, 5.0)
"""Seconds of back-off before etcd is asked again for what precedes a cleanup, first and longest."""
PATIENCE = 1.0
"""Seconds after which jobs that wait for their turn in one slot, and were thought to be short, are left to others."""
DISK_PAUSE = 5.0
"""Seconds without claims after this executor could not write to its own disk."""


def _where(op: OpenOperation, partition: int, held: Held | None) -> dict[str, Any]:
    """What a log record says of a job (-1: of a batch)."""
    attempt = held.claim.attempt if held is not None else None
    return {"operation": str(op.ref), "partition": partition if partition >= 0 else None, "attempt": attempt}


class Scheduler(Protocol):
    """Who schedules jobs, and is told what becomes of them."""

    def stopping(self, op: OpenOperation) -> bool:
        """No job of it may start any more."""

    def settled(self, op: OpenOperation, partition: int, *, ended: bool) -> None:
        """A job is held no longer; not ``ended``: it waits, or another has it."""

    def broke(self, ref: OperationRef) -> None:
        """A job of it ended in an unexpected error."""

    def succeeded(self, ref: OperationRef) -> None:
        """A job of it came to its end, whatever that was."""

    def hint_released(self) -> None:
        """Claims were set to waiting."""


class Jobs:
    """The jobs of one incarnation that run, or whose end is being written."""

    def __init__(self, ctx: Context, scheduler: Scheduler) -> None:
        self._ctx = ctx
        self._scheduler = scheduler
        self._failing: set[asyncio.Task[None]] = set()
        self._ending: set[tuple[OperationRef, int]] = set()
        """Held jobs whose end is being written: nothing else is written for them."""
        self._checkpoints = Checkpoints(ctx)
        self._disk_until = 0.0

    def disk_pause(self) -> float:
        """Seconds for which nothing is to be claimed, because this node could not write to its own disk."""
        return self._disk_until - time.monotonic()

    async def run(self, op: OpenOperation, block: Sequence[int]) -> None:
        """Run a block of held jobs to its end. Raises SessionLost; anything else that goes wrong, once those jobs that
        have not ended are released.
        """
        ctx = self._ctx
        ending = [p for p in block if p in op.held and next_steps.only_ends(op.held[p].claim, op.spec.rules)]
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
                )
            finally:
                ctx.doing.over(request)
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
        """Run held jobs of several operations one after the other in one slot; how those that ran ended. Where they are
        not done after ``PATIENCE``, what has not begun is released, for others to take, and ``slow`` is called. Raises
        as :meth:`run` does.
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
        """What the child is asked for. What shall not start any more is released, or ends."""
        needing = [(op, block) for op, block in jobs if self._needs_preparing(op)]
        found = await asyncio.gather(*(self._prepare(op, block) for op, block in needing))
        checkpoints = {op.ref: saved for (op, _), saved in zip(needing, found, strict=True)}
        asked = []
        for op, block in jobs:
            if self._scheduler.stopping(op):
                self.release(op, block)
                continue
            ending = [p for p in block if p in op.held and next_steps.only_ends(op.held[p].claim, op.spec.rules)]
            await self._end_lost(op, ending)
            if left := [p for p in block if p in op.held and p not in ending]:
                asked.append((op, *self._asked(op, left, checkpoints.get(op.ref, {}), ends)))
        return asked

    async def _run_asked(
        self, asked: Sequence[tuple[OpenOperation, RunRequest, Listener]], slow: Callable[[], None]
    ) -> None:
        worker = self._ctx.worker

        def patience_is_over() -> None:
            slow()
            for op, _, _ in asked:
                if op.held:
                    worker.pause(str(op.ref))

        loop = asyncio.get_running_loop()
        timer = loop.call_later(PATIENCE, patience_is_over) if len(asked) > 1 else None
        try:
            await worker.run_in_turn([(request, listener) for _, request, listener in asked])
        finally:
            if timer is not None:
                timer.cancel()
            for _, request, _ in asked:
                self._ctx.doing.over(request)

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
        """What the child is asked for, and what is done about what it says. ``ends``: where ends are noted as well."""
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
        )

        def says(p: int, text: str) -> None:
            if text:
                ctx.log.info("%s", text, extra=_where(op, p, op.held.get(p)))
            ctx.doing.says(request, text)

        def ended(events: list[JobEnded]) -> None:
            if ends is not None:
                ends.extend(events)
            self._ended(op, events)

        return request, Listener(
            ended,
            says,
            lambda p, value: self._checkpoints.save(op, p, value),
            lambda done, total: ctx.doing.is_at(request, done, total),
        )

    async def _prepare(self, op: OpenOperation, block: Sequence[int]) -> dict[int, Any]:
        """Write a run down, and read the checkpoints from which its jobs go on. Both have come to their ends when this
        returns or raises: a run that is written down only after its jobs were released would never be settled.
        """
        found, written = await asyncio.gather(
            self._checkpoints.load(op, block), self._write_down(op, block), return_exceptions=True
        )
        if isinstance(written, BaseException):
            raise written
        if isinstance(found, BaseException):
            raise found
        checkpoints: dict[int, Any] = found
        return checkpoints

    async def _write_down(self, op: OpenOperation, block: Sequence[int]) -> None:
        """Which jobs are run here stands on the disk before one of them starts (I29)."""
        if op.spec.rules.leaves_something:
            held = [(p, op.held[p]) for p in block]
            items = [JobItem(op.partition(p), h.claim.attempt, h.fence) for p, h in held]
            await self._ctx.local.begin(op.ref, op.arg, op.table, items)
        if (cleaning := self._ctx.local.cleaning.get(op.ref)) is not None:
            await asyncio.shield(cleaning)

    def release(self, op: OpenOperation, partitions: Iterable[int]) -> None:
        """Set held claims to waiting: not held against the jobs, and due at once. Those whose end is being written are
        left to that.
        """
        writes = []
        for p in partitions:
            held = self._begin_end(op, p)
            if held is not None:
                waiting = next_steps.released(held.claim, self._ctx.executor_id)
                write = job_transitions.wait_again(self._ctx.keys, op.ref, p, held.fence, waiting, held.claim)
                writes.append((write, self._answer(op, p, ended=False)))
        self._ctx.reporter.submit(writes)
        self._scheduler.hint_released()

    def close(self) -> None:
        """Drop everything: the session is over."""
        for failing in self._failing:
            failing.cancel()

    async def drain(self) -> None:
        """Wait until every end is written, or the session is lost."""
        while self._failing:
            await asyncio.wait(set(self._failing))
        await self._ctx.reporter.drain()

    # ------------------------------------------------------------------ ends

    def _begin_end(self, op: OpenOperation, partition: int) -> Held | None:
        """The claim under which a job's end is to be written; None where it is not held, or an end is being written: of
        two writes under one fence that go in different transactions either could win.
        """
        held = op.held.get(partition)
        if held is None or (op.ref, partition) in self._ending:
            return None
        self._ending.add((op.ref, partition))
        return held

    def _ended(self, op: OpenOperation, events: Sequence[JobEnded]) -> None:
        """Jobs ended: turn each into a write under its fence and hand them to the group commit."""
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
            event = replace(event, kind="fatal")  # nobody else can do it either
        if event.kind == "unavailable" and not self._ctx.capability.cannot_now(
            op.ref.type, event.error, op.gate.where, next_steps.given_back(claim), tables
        ):
            event = replace(event, kind="error", error=f"{next_steps.NOT_RUN}{event.error}")
        step = next_steps.after_end(event.kind, claim, rules)
        if step == "release":
            self._scheduler.hint_released()
            lacks = event.error if event.kind == "unavailable" else ""
            released = next_steps.released(claim, self._ctx.executor_id, lacks)
            return job_transitions.wait_again(keys, op.ref, p, held.fence, released, claim)
        if event.kind in ("error", "crash"):
            self._scheduler.broke(op.ref)
        elif event.kind != "fatal":  # which is a verdict on the job, and tells nothing of the node
            self._scheduler.succeeded(op.ref)
            self._ctx.capability.succeeded(op.ref.type, event.started)
        if step == "retry":
            return self._again(op, held, event)
        if step == "fail":
            self._fail_after_cleanup(op, [(held, event)])
            return None
        state = JobState.SUCCESS if event.kind == "success" else JobState.FAILED
        try:
            return job_transitions.report(keys, op.ref, p, held.fence, state, self._outcome(held, event), claim)
        except InvalidArgument as error:  # the outcome is too large to be stored
            broken = replace(event, kind="fatal", result=None, error=str(error))
            if not rules.can_fail:
                return self._again(op, held, broken)
            return job_transitions.report(
                keys, op.ref, p, held.fence, JobState.FAILED, self._outcome(held, broken), claim
            )

    def _unwritable(self, op: OpenOperation, held: Held, event: JobEnded, error: Exception) -> job_transitions.Guarded:
        """What came of a job cannot be turned into a write: it broke. It must not stay held for that, nor be run again
        without a limit.
        """
        where = _where(op, event.partition, held)
        self._ctx.log.error("what came of a job cannot be written", extra=where, exc_info=error)
        broken = replace(event, kind="error", result=None, error=f"its end could not be written: {describe(error)}")
        if not op.spec.rules.at_limit(held.claim.failures + 1):
            return self._again(op, held, broken)
        outcome = self._outcome(held, broken)
        failed = JobState.FAILED
        return job_transitions.report(self._ctx.keys, op.ref, event.partition, held.fence, failed, outcome, held.claim)

    def _outcome(self, held: Held, event: JobEnded) -> Outcome:
        mine = replace(held.claim, executor=self._ctx.executor_id, incarnation=self._ctx.incarnation)
        when = rfc3339(event.started), rfc3339(event.finished)
        return next_steps.outcome(mine, held.fence, held.name, event.kind, event.result, event.error, *when)

    def _again(self, op: OpenOperation, held: Held, event: JobEnded) -> job_transitions.Guarded:
        """Try the job again later: counted, with back-off and jitter."""
        claim: Claim = held.claim
        pause = op.spec.rules.retry.delay(claim.failures + 1) * random.uniform(0.5, 1.0)
        self._ctx.log.warning(
            "the job broke (again in %.1f s): %s",
            pause,
            event.error.strip() or event.kind,
            extra=_where(op, event.partition, held),
        )
        self._ctx.meter.retried(op.ref.type)
        waiting = next_steps.retried(claim, self._ctx.executor_id, event.error, rfc3339(time.time() + pause))
        self._scheduler.hint_released()
        return job_transitions.wait_again(self._ctx.keys, op.ref, event.partition, held.fence, waiting, claim)

    async def _end_lost(self, op: OpenOperation, partitions: Sequence[int]) -> None:
        """Held jobs that were lost once too often: they are not run again. Raises OSError."""
        if not partitions:
            return
        await self._write_down(op, partitions)
        now = time.time()
        ends: list[tuple[Held, JobEnded]] = []
        for p in partitions:
            held = self._begin_end(op, p)
            if held is not None:
                last = held.claim.tried[-1]
                actor = last.executor if last.text == next_steps.EXPIRED else ""
                lost = replace(held.claim, executor=last.executor, actor=actor, attempt=last.attempt)
                text = next_steps.lost_text(lost, held.claim.failures)
                ends.append((held, JobEnded(p, "fatal", None, text, now, now)))
        self._fail_after_cleanup(op, ends, lost=True)

    def _fail_after_cleanup(
        self, op: OpenOperation, ends: Sequence[tuple[Held, JobEnded]], *, lost: bool = False
    ) -> None:
        """Nobody will come after these attempts and clean up, so that is done before the reports. ``lost``: nothing was
        run under these claims.
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
                said = "cleanup of a job that failed for good failed too: %s"
                self._ctx.log.warning(said, describe(error), extra=where, exc_info=known)
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
        """As :meth:`_to_clean`, which is tried again as long as etcd refuses to answer, such as to a role that was
        revoked for a while: the jobs are held, and nobody cleans up after their reports.
        """
        backoff, told = Backoff(*GIVE_UP_PAUSE), False
        while True:
            try:
                return await self._to_clean(op, ends, where, goes_on=goes_on)
            except (EtcdRejected, EtcdUnavailable, OutcomeUnknown) as error:
                said = "Cannot prepare the cleanup of a job that failed for good; retrying: %s"
                self._ctx.log.log(logging.DEBUG if told else logging.WARNING, said, describe(error), extra=where)
                told = True
                await asyncio.sleep(backoff.pause())

    async def _to_clean(
        self, op: OpenOperation, ends: Sequence[tuple[Held, JobEnded]], where: dict[str, Any], *, goes_on: bool
    ) -> list[JobItem]:
        """The jobs to clean up after. ``goes_on``: one who follows could go on from their checkpoints, which are given
        up first; where that cannot be, what a checkpoint speaks of stays.
        """
        partitions = [event.partition for _, event in ends]
        saved = await read_checkpoints(self._ctx, op.ref, partitions) if op.spec.rules.resumable else {}
        stays = set[int]()
        if goes_on and saved:
            given = await asyncio.gather(*(self._give_up(op, p, saved[p]) for p in saved))
            stays = {p for p, sure in zip(saved, given, strict=True) if not sure}
        if stays:
            text = "the checkpoints of %d jobs could not be given up: nobody cleans up after them here"
            self._ctx.log.warning(text, len(stays), extra=where)
        return [
            JobItem(op.partition(p), held.claim.attempt, held.fence, saved.get(p))
            for p, (held, _) in zip(partitions, ends, strict=True)
            if p not in stays
        ]

    async def _give_up(self, op: OpenOperation, partition: int, checkpoint: Any) -> bool:
        """Whether the checkpoint of a held job is given up. A write is refused where an earlier one of the job came
        first: that is seen, and tried again; where somebody else has the job, it is refused each time.
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
        """``ended``: the job ends with this write, as ``event`` has it, or (``lost``) because its holders were lost;
        ``left``: if it does not, something of it is left on this node.
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
            if local is not None and ((applied and ended) or not left):
                local.ended(op.ref, partition)
            elif local is not None:
                local.released(op.ref, partition)
            if not applied:
                self._ctx.log.info(
                    "the job is not held here any more: what came of it here is dropped",
                    extra=_where(op, partition, held),
                )
            self._scheduler.settled(op, partition, ended=bool(applied and ended))

        return answered
