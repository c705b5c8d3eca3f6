"""Runs claimed jobs in the child, and turns each one's end into a write under its fence."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.clock import random, time
from distop.core import claiming, decide
from distop.core.codec import rfc3339
from distop.core.jobs import JobState, Outcome, Tried, told
from distop.core.txn import Get
from distop.errors import InvalidArgument, SessionLost
from distop.worker.model import JobEnded, JobItem, RunRequest, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.context import Context
    from distop.core.jobs import Claim
    from distop.core.model import OperationRef
    from distop.openop import Held, OpenOperation

QUICK_FAILURES = 20
"""Unexpected errors in a row, without any job that ended, after which a node suspects itself and stops claiming for
a while: one broken node must not use up the attempts of everybody's jobs (F38)."""
SELF_SUSPICION = 30.0
DISK_PAUSE = 5.0
"""Seconds without claims after this executor could not write to its own disk."""
CHECKPOINTS_AT_ONCE = 32
"""Checkpoints in one read: up to 64 KiB each (T2)."""


def _story(claim: Claim, event: JobEnded, executor: str) -> tuple[Tried, ...]:
    """What went wrong in each attempt of a job that ends as failed; nothing where the first one gave the answer."""
    if event.kind == "success" or not claim.tried:
        return ()
    return told(claim.tried, Tried(claim.attempt, executor, event.error))


class Jobs:
    """The jobs of one incarnation that run, or whose end is being written.

    ``stopping(op)`` tells that jobs of an operation must not start any more; ``settled(op)`` is called when a job is
    held no longer; ``released()`` when claims were set to waiting.
    """

    def __init__(
        self,
        ctx: Context,
        stopping: Callable[[OpenOperation], bool],
        settled: Callable[[OpenOperation], None],
        released: Callable[[], None],
    ) -> None:
        self._ctx = ctx
        self._stopping = stopping
        self._settled = settled
        self._released = released
        self._failing: set[asyncio.Task[None]] = set()
        self._saved: dict[tuple[OperationRef, int], tuple[int, int]] = {}
        """Of jobs that were saved here: the fence that this was under, and the checkpoint's mod revision."""
        self._failures_in_a_row = 0
        self.suspended_until = 0.0
        """On the monotonic clock: until then this node claims nothing."""

    async def run(self, op: OpenOperation, block: Sequence[int]) -> None:
        """Run a block of held jobs to its end. Raises SessionLost."""
        ctx = self._ctx
        try:
            checkpoints, _ = await asyncio.gather(self._checkpoints(op, block), self._write_down(op, block))
            if self._stopping(op):
                self.release(op, block)
                return
            held = [(p, op.held[p]) for p in block if p in op.held]
            request = RunRequest(
                op=str(op.ref),
                type=op.ref.type,
                arg=op.arg,
                table=self._table(op),
                items=tuple(JobItem(op.partition(p), h.claim.attempt, h.fence, checkpoints.get(p)) for p, h in held),
                batch=op.spec.rules.batch,
                cleanup_first=any(h.claim.attempt > 1 for _, h in held),
                resumable=op.spec.rules.resumable,
                deadline=ctx.session.deadline,
            )
            await ctx.worker.run(
                request,
                lambda events: self._ended(op, events),
                on_status=lambda p, text: ctx.log.info(
                    "%s", text, extra={"operation": str(op.ref), "partition": p if p >= 0 else None}
                ),
                on_progress=lambda p, value: self._checkpoint(op, p, value),
            )
        except SessionLost:
            raise
        except Exception as error:
            ctx.log.error("a run broke, its jobs are released", extra={"operation": str(op.ref)}, exc_info=error)
            if isinstance(error, OSError):  # nothing may start before it is written down
                self.suspended_until = time.monotonic() + DISK_PAUSE
            self.release(op, block)

    async def _write_down(self, op: OpenOperation, block: Sequence[int]) -> None:
        """Which jobs are run here stands on the disk before one of them starts (I29)."""
        if op.spec.rules.leaves_something:
            held = [(p, op.held[p]) for p in block]
            items = [JobItem(op.partition(p), h.claim.attempt, h.fence) for p, h in held]
            await self._ctx.local.begin(op.ref, op.arg, self._table(op), items)
        if (cleaning := self._ctx.local.cleaning.get(op.ref)) is not None:
            await asyncio.shield(cleaning)

    @staticmethod
    def _table(op: OpenOperation) -> Mapping[str, Any] | None:
        return op.spec.table.to_json() if op.spec.table else None

    def release(self, op: OpenOperation, partitions: Iterable[int]) -> None:
        """Set held claims to waiting: not held against the jobs, and due at once."""
        writes = []
        for p in partitions:
            held = op.held.get(p)
            if held is not None:
                waiting = decide.released(held.claim, self._ctx.executor_id)
                write = claiming.wait_again(self._ctx.keys, op.ref, p, held.fence, waiting)
                writes.append((write, self._answer(op, p, ended=False)))
        self._ctx.reporter.submit(writes)
        self._released()

    def close(self) -> None:
        """Drop everything: the session is over."""
        for failing in self._failing:
            failing.cancel()

    async def drain(self) -> None:
        """Wait until every end is written, or the session is lost."""
        while self._failing:
            await asyncio.wait(set(self._failing))
        await self._ctx.reporter.drain()

    # ----------------------------------------------------------- checkpoints

    async def _checkpoints(self, op: OpenOperation, block: Sequence[int]) -> dict[int, Any]:
        if not op.spec.rules.resumable:
            return {}
        again = [p for p in block if op.held[p].claim.attempt > 1]
        found: dict[int, Any] = {}
        for n in range(0, len(again), CHECKPOINTS_AT_ONCE):
            page = again[n : n + CHECKPOINTS_AT_ONCE]
            answers = await self._ctx.client.read(*(Get(self._ctx.keys.job(op.ref, p, "progress")) for p in page))
            for p, answer in zip(page, answers, strict=True):
                if answer.kv is not None:
                    found[p] = self._ctx.decode(answer.kv.value)
        return found

    async def _checkpoint(self, op: OpenOperation, partition: int, value: Any) -> bool:
        held = op.held.get(partition)
        if held is None:
            return False
        keys, place = self._ctx.keys, (op.ref, partition)
        fence, seen = self._saved.get(place, (0, 0))
        if fence != held.fence:
            former = None
            if held.claim.attempt > 1:
                former = await self._ctx.client.get(keys.job(op.ref, partition, "progress"))
            seen = former.mod_revision if former is not None else 0
        write = claiming.checkpoint(keys, op.ref, partition, held.fence, self._ctx.encode(value), seen)
        applied = await self._ctx.reporter.write(write)
        self._saved[place] = (held.fence, applied or seen)
        return bool(applied)

    # ------------------------------------------------------------------ ends

    def _ended(self, op: OpenOperation, events: Sequence[JobEnded]) -> None:
        """Jobs ended: turn each into a write under its fence and hand them to the group commit."""
        writes = []
        for event in events:
            held = op.held.get(event.partition)
            if held is not None:
                write = self._write(op, held, event)
                if write is not None:
                    gone = event.kind == "refused" or (event.kind == "cancelled" and not event.error)
                    left = not gone or op.spec.rules.resumable
                    writes.append((write, self._answer(op, event.partition, ended=write.label == "report", left=left)))
        self._ctx.reporter.submit(writes)

    def _write(self, op: OpenOperation, held: Held, event: JobEnded) -> claiming.Guarded | None:
        keys, p, claim, rules = self._ctx.keys, event.partition, held.claim, op.spec.rules
        if event.kind == "unable" and not self._ctx.capability.cannot(op.ref.type, event.error):
            event = replace(event, kind="fatal")  # nobody else can do it either
        if event.kind in ("cancelled", "refused", "unable"):
            self._released()
            return claiming.wait_again(keys, op.ref, p, held.fence, decide.released(claim, self._ctx.executor_id))
        if event.kind in ("error", "crash") or (event.kind == "fatal" and not rules.can_fail):
            self._count_failure()
            if not rules.at_limit(claim.failures + 1):
                return self._again(op, held, event)
        else:
            self._failures_in_a_row = 0
        if event.kind in ("error", "crash", "fatal") and rules.cleans:
            self._fail_after_cleanup(op, held, event)
            return None
        state = JobState.SUCCESS if event.kind == "success" else JobState.FAILED
        try:
            return claiming.report(keys, op.ref, p, held.fence, state, self._outcome(held, event))
        except InvalidArgument as error:  # the outcome is too large to be stored
            broken = replace(event, kind="fatal", result=None, error=str(error))
            if not rules.can_fail:
                return self._again(op, held, broken)
            return claiming.report(keys, op.ref, p, held.fence, JobState.FAILED, self._outcome(held, broken))

    def _outcome(self, held: Held, event: JobEnded) -> Outcome:
        return Outcome(
            held.name,
            self._ctx.executor_id,
            self._ctx.incarnation,
            held.claim.attempt,
            rfc3339(event.started),
            rfc3339(event.finished),
            event.result,
            event.error,
            _story(held.claim, event, self._ctx.executor_id),
        )

    def _again(self, op: OpenOperation, held: Held, event: JobEnded) -> claiming.Guarded:
        """Try the job again later: counted, with back-off and jitter."""
        claim: Claim = held.claim
        pause = op.spec.rules.retry.delay(claim.failures + 1) * random.uniform(0.5, 1.0)
        self._ctx.log.warning(
            "the job broke (again in %.1f s): %s",
            pause,
            (event.error.strip().splitlines() or [event.kind])[0],
            extra={"operation": str(op.ref), "partition": event.partition, "attempt": claim.attempt},
        )
        waiting = decide.retried(claim, self._ctx.executor_id, event.error, rfc3339(time.time() + pause))
        self._released()
        return claiming.wait_again(self._ctx.keys, op.ref, event.partition, held.fence, waiting)

    def _fail_after_cleanup(self, op: OpenOperation, held: Held, event: JobEnded) -> None:
        """The limit is reached: nobody will come after this attempt and clean up, so that is done before the report."""

        async def fail() -> None:
            item = JobItem(op.partition(event.partition), held.claim.attempt, held.fence)
            try:
                await self._ctx.worker.cleanup(str(op.ref), op.ref.type, op.arg, self._table(op), [item])
            except WorkerError as error:
                where = {"operation": str(op.ref), "partition": event.partition}
                self._ctx.log.warning("cleanup of a job that failed for good failed too: %s", error, extra=where)
            outcome = self._outcome(held, replace(event, result=None))
            write = claiming.report(self._ctx.keys, op.ref, event.partition, held.fence, JobState.FAILED, outcome)
            self._ctx.reporter.submit([(write, self._answer(op, event.partition, ended=True))])

        failing = asyncio.ensure_future(fail())
        self._failing.add(failing)
        failing.add_done_callback(self._failing.discard)

    def _answer(self, op: OpenOperation, partition: int, *, ended: bool, left: bool = True) -> Callable[[int], None]:
        """``ended``: the job ends with this write; ``left``: if it does not, something of it is left on this node."""
        local = self._ctx.local if op.spec.rules.leaves_something else None

        def answered(applied: int) -> None:
            op.held.pop(partition, None)
            self._saved.pop((op.ref, partition), None)
            op.done += bool(applied and ended)
            if local is not None and ((applied and ended) or not left):
                local.ended(op.ref, partition)
            elif local is not None:
                local.released(op.ref, partition)
            if not applied:
                self._ctx.log.info(
                    "another holder has the job: the outcome here is dropped",
                    extra={"operation": str(op.ref), "partition": partition},
                )
            if not (applied and ended):
                op.exhausted = False  # the job waits, or another has it: look again
            self._settled(op)

        return answered

    def _count_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= QUICK_FAILURES:
            self._failures_in_a_row = 0
            self.suspended_until = time.monotonic() + SELF_SUSPICION
            self._ctx.log.error(
                "%d jobs in a row broke here: this node claims nothing for %d s", QUICK_FAILURES, int(SELF_SUSPICION)
            )
