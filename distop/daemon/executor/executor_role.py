"""The executor role of a daemon: claims jobs of open operations and runs them.

A thin shell: ``decide.backlog`` decides which jobs, how many and in what order, and this module performs its
instructions. Every write is a transaction of ``protocol``. A slot runs one job, one batch of jobs of one operation, or
jobs of several operations in turn.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.clock import random, time
from distop.daemon.executor.claimer import Claimer
from distop.daemon.executor.job_runs import Jobs
from distop.daemon.job_progress import LONGEST, MOST_OPERATIONS, publication_pause
from distop.daemon.local_jobs import WorkDirectoryUnusable
from distop.decide.backlog import Backlog
from distop.decide.backlog_entries import (
    Accepted,
    BackOffReason,
    ClaimableJobs,
    Forget,
    ReleaseJobs,
    Round,
    RoundResult,
    RunJobs,
    Stop,
    Wait,
)
from distop.decide.circuit_breaker import PAUSE, BreakerScope
from distop.decide.job_claims import Claimant
from distop.errors import DistopError, EtcdRejected, MalformedRequest, NotFound, SessionLost, UnreadableRecord, describe
from distop.protocol.records import Phase
from distop.runtime import secret_settings
from distop.services.open_operation import OpenOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from distop.daemon.executor.job_runs import Scheduler
    from distop.daemon.incarnation_context import Context
    from distop.decide.backlog_entries import Instruction
    from distop.protocol.jobs import Claim
    from distop.protocol.records import OperationRef


STUCK_PAUSE = 1.0
"""Seconds between two checks whether a child with a stuck job has been replaced."""
CLAIMS = "claims"
"""Names rejected writes in the node record: claims, takeovers, and writes about lost claims."""


def _jitter() -> float:
    return random.uniform(0.5, 1.0)


class Executor:
    """Serves the open operations whose type this node offers, with ``slots`` runs at once.

    ``make_jobs``: makes the part that runs the claimed jobs.
    """

    def __init__(self, ctx: Context, make_jobs: Callable[[Context, Scheduler], Jobs] = Jobs) -> None:
        self._ctx = ctx
        self._backlog = Backlog(ctx, ctx.config.slots, ctx.config.poll)
        self._operations: dict[OperationRef, OpenOperation] = {}
        """The operations that were read."""
        self._claimer = Claimer(ctx, self._claims_returned)
        self._jobs = make_jobs(ctx, self)
        self._rounds: set[asyncio.Task[None]] = set()
        self._runs: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._gone: list[str] = []
        """Operations whose private directories are to be removed."""
        self._unreadable: dict[OperationRef, str] = {}
        """The logged errors of operations with unreadable records."""
        self._announcement: asyncio.Task[None] | None = None
        self._report_at = 0.0
        """When the report of skipped operations may change again, by the monotonic clock."""

    # ------------------------------------------------------------------ events

    def nodes_changed(self) -> None:
        """Handle changed nodes; :meth:`cluster_changed` follows."""
        self._backlog.nodes_changed(time.monotonic())

    def cluster_changed(self, *, hint: bool, refs: Collection[OperationRef] | None = None) -> None:
        """Handle changed gates or pending operations.

        ``refs``: the changed operations; None: perhaps all. ``hint``: there may be claims to take, because a node left,
        jobs were released, or a poll is due.
        """
        gates = self._ctx.cluster.gates
        for ref in list(self._operations) if refs is None else refs:
            op, gate = self._operations.get(ref), gates.get(ref)
            if op is not None and gate is not None and gate.mod != op.gate_mod:
                op.reopened(gate.mod, gate.value)
        self._perform(self._backlog.changed(gates, refs, time.monotonic()))
        if hint:
            self._backlog.hint()
        self._wake.set()

    @property
    def busy(self) -> bool:
        """Whether it holds a claim, or may be about to."""
        return bool(self._rounds or self._runs) or self._backlog.busy or self._claimer.busy

    @property
    def slots_busy(self) -> int:
        """Number of used slots."""
        return self._backlog.slots - self._backlog.free

    def stopping(self, op: OpenOperation) -> bool:
        """Whether no more jobs of the operation may start."""
        return self._backlog.stopping(op.ref)

    def settled(self, op: OpenOperation, partition: int, *, ended: bool) -> None:
        """Handle a job that is no longer held.

        Not ``ended``: it waits, or another executor holds it.
        """
        self._perform(self._backlog.settled(op.ref, partition, ended=ended))
        if not op.held and op.spec.rules.batch:
            op.forget_candidates()
        self._wake.set()

    def job_failed(self, ref: OperationRef) -> None:
        """Count a job of the operation that ended in an unexpected error."""
        held, jobs, operations = self._backlog.job_failed(ref, time.monotonic())
        if held is BreakerScope.NODE:
            message = (
                "Circuit breaker: %d jobs of %d operations failed unexpectedly on this node and none ended; "
                "claiming nothing for %d s"
            )
            self._ctx.log.error(message, jobs, operations, int(PAUSE))
        elif held is BreakerScope.OPERATION:
            message = (
                "Circuit breaker: %d jobs of the operation in a row failed unexpectedly on this node; leaving it to "
                "other nodes for %d s"
            )
            self._ctx.log.error(message, jobs, int(PAUSE), extra={"operation": str(ref)})

    def succeeded(self, ref: OperationRef) -> None:
        """Count a job of the operation that ended as a success or a failure."""
        self._backlog.breaker.job_ended(ref)

    def _failed(self, ref: OperationRef, error: Exception, *, run: bool = False) -> None:
        """Back off from an operation that could not be served, or (``run``) whose jobs could not be run.

        Lasting errors are logged once. NotFound is no error: this executor has not seen the operation's end yet.

        If the work directory is the cause (full, removed), the node record says so: other executors take the type's
        jobs, and `why` and `doctor` name it.
        """
        where, now, cause = {"operation": str(ref)}, time.monotonic(), describe(error)
        text = secret_settings.shortened(cause, LONGEST).partition("\n")[0]
        if isinstance(error, NotFound):
            self._backlog.failed(ref, BackOffReason.MISSING, now, _jitter(), run=run)
            self._ctx.log.debug("%s", error, extra=where)
        elif isinstance(error, UnreadableRecord):
            self._backlog.failed(ref, BackOffReason.UNREADABLE, now, _jitter(), run=run, text=text)
            if self._unreadable.get(ref) != str(error):
                self._unreadable[ref] = str(error)
                message = "Cannot read the operation on this executor; skipping it until its records change: %s"
                self._ctx.log.error(message, error, extra=where)
        elif isinstance(error, MalformedRequest):
            pause = self._ctx.rejected_writes.refused(str(ref), CLAIMS, error)
            if not self._backlog.failed(ref, BackOffReason.REJECTED, now, 1.0, pause=pause, run=run):
                self._ctx.rejected_writes.settled(str(ref), CLAIMS)
        else:
            pause = self._backlog.failed(ref, BackOffReason.ERROR, now, _jitter(), run=run, text=text)
            message = "Cannot serve the operation; retrying in %.1f s: %s"
            self._ctx.log.warning(message, pause, cause, extra=where, exc_info=error)
        if isinstance(error, WorkDirectoryUnusable):
            gate = self._ctx.cluster.gates.get(ref)
            labels, tables = (gate.value.where, gate.value.tables(ref.table)) if gate is not None else (None, ())
            self._ctx.capability.cannot_now(ref.type, error.strerror or str(error), labels, tables=tables)

    # ------------------------------------------------------------ instructions

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._wake.clear()
            pause = self._assign()
            self._report_skipped()
            self._ctx.activity_changed()
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _report_skipped(self) -> None:
        """Update the operations that are skipped here for a while, in the node record.

        A change soon after the last one waits for a later wake, at most until the poll.
        """
        now = time.monotonic()
        skipped = self._backlog.skipped(now, MOST_OPERATIONS) if now >= self._report_at else self._ctx.skipped
        if skipped != self._ctx.skipped:
            self._ctx.skipped = skipped
            self._report_at = now + publication_pause(len(self._ctx.cluster.nodes))

    def _assign(self) -> float | None:
        """Perform the backlog's next instructions; returns the seconds until the next is due."""
        if self._backlog.leaving or self._ctx.draining:
            return None
        if (disk := self._jobs.disk_pause()) > 0:
            return disk
        if self._ctx.worker.stuck:
            return STUCK_PAUSE  # a new claim would wait here, while other executors could run the job
        return self._perform(self._backlog.next(time.monotonic()))

    def _perform(self, instructions: Iterable[Instruction]) -> float | None:
        """Perform these instructions; returns the seconds until the next is due."""
        pause: float | None = None
        for one in instructions:
            match one:
                case Wait(seconds):
                    pause = seconds
                case Round():
                    self._begin(one)
                case RunJobs(jobs):
                    self._start([(self._operations[ref], block) for ref, block in jobs])
                case ReleaseJobs(ref, block):
                    self._jobs.release(self._operations[ref], block)
                case Stop(ref, draining) if (op := self._operations.get(ref)) is not None:
                    if draining:
                        self._ctx.worker.release(str(ref))
                    else:
                        self._closed(op)
                case Forget(ref):
                    self._forget(ref)
                case Accepted(ref):
                    self._ctx.rejected_writes.settled(str(ref), CLAIMS)
        return pause

    def _closed(self, op: OpenOperation) -> None:
        """Handle a removed gate: stop running jobs.

        If the operation is only paused, jobs that have not started are released.
        """
        phase = self._ctx.cluster.pending.get(op.ref)
        if phase is Phase.PAUSED:
            self._ctx.worker.pause(str(op.ref))
            return
        if not op.told_to_stop:
            where = {"operation": str(op.ref)}
            self._ctx.log.info("Stopping the operation's jobs, because it is %s", phase or "gone", extra=where)
        op.told_to_stop = True
        if phase is Phase.HALTED:
            self._ctx.worker.release(str(op.ref))
        else:
            self._ctx.worker.cancel(str(op.ref))

    def _forget(self, ref: OperationRef) -> None:
        """Forget an operation without held jobs.

        The child forgets it as well, together with others of the same turn of the loop, unless it is only paused.
        """
        self._unreadable.pop(ref, None)
        known = self._operations.pop(ref, None) is not None
        if known and self._ctx.cluster.pending.get(ref) not in (Phase.PAUSED, Phase.HALTED):
            self._gone.append(str(ref))
            if len(self._gone) == 1:
                asyncio.get_running_loop().call_soon(self._forget_all)

    def _forget_all(self) -> None:
        gone, self._gone = self._gone, []
        self._track(asyncio.ensure_future(self._ctx.worker.forget(*gone)))

    # ------------------------------------------------------------------ rounds

    def _begin(self, todo: Round) -> None:
        task = asyncio.ensure_future(self._round(todo))
        self._rounds.add(task)
        task.add_done_callback(self._round_ended)

    def _round_ended(self, task: asyncio.Task[None]) -> None:
        self._rounds.discard(task)
        self._wake.set()  # not earlier: until here ``busy`` counts it

    async def _round(self, todo: Round) -> None:
        """Claim jobs of some operations, and start their runs."""
        try:
            await self._serve(todo)
        except SessionLost:
            return  # the watcher of the session ends this incarnation
        except Exception as error:
            for ref in todo.refs:
                self._failed(ref, error)
        finally:
            self._perform(self._backlog.round_over(todo, time.monotonic()))

    async def _serve(self, todo: Round) -> None:
        """List known operations if necessary; claim jobs of newly opened ones with their reading."""
        if todo.fresh and await self._claim_fresh(todo):
            return
        await self._serve_known(todo, todo.refs[0])

    async def _claim_fresh(self, todo: Round) -> bool:
        """Returns False if the operation must be claimed on its own: etcd rejected the transaction as invalid."""
        began = time.time()
        try:
            opened, failures = await self._claimer.claim_fresh(todo.refs)
        except EtcdRejected as error:
            if len(todo.refs) > 1:
                self._backlog.apart(todo)  # etcd takes none of them together
            elif not isinstance(error, MalformedRequest):
                raise
            return len(todo.refs) > 1
        for op in opened:
            self._read(op)
        for one, why in failures.items():
            self._failed(one, why)
        got = {op.ref: RoundResult(tuple(op.held)) for op in opened}
        self._claimed(todo, got | dict.fromkeys(failures, RoundResult(failed=True)), began)
        return True

    async def _serve_known(self, todo: Round, ref: OperationRef) -> None:
        op = self._operations.get(ref) or await self._open(ref)
        if op is None:
            return
        rejected = await self._look(op) if op.unknown or not op.room else None
        others = self._ctx.others(ref.type, op.gate.tables(ref.table), op.gate.where)
        suspects = op.turns(self._ctx.executor_id, others) if op.only_suspects else {}
        look = ClaimableJobs(op.open_jobs, op.room, suspects, op.next_due)
        grant = self._backlog.looked(todo, look, time.monotonic(), _jitter())
        if grant is None:
            if suspects:
                op.forget_candidates()  # others may have claimed them before the next check
            if rejected is not None:
                raise rejected
            return
        began = time.time()
        won = await self._claimer.claim(op, grant.slots, alone=grant.alone)
        error = won.error or rejected
        failed = error is not None
        got = RoundResult(tuple(won.partitions), won.refused and not failed, failed, op.open_jobs)
        if failed or won.refused or (op.open_jobs and not won.partitions):
            op.forget_candidates()  # candidates that were tried and not granted are in no list any more
        self._claimed(todo, {ref: got}, began, won.taken_over)
        if error is not None:
            raise error

    def _claimed(self, todo: Round, got: dict[OperationRef, RoundResult], began: float, taken_over: int = 0) -> None:
        traces = self._ctx.traces
        for ref, one in got.items():
            if one.won:
                self._ctx.meter.claimed(ref.type, len(one.won), taken_over)
                if traces is not None and (op := self._operations.get(ref)) is not None:
                    traces.claimed(ref, op.spec, len(one.won), taken_over, began)
        self._perform(self._backlog.claimed(todo, got, time.monotonic(), _jitter()))

    async def _open(self, ref: OperationRef) -> OpenOperation | None:
        """Read an operation."""
        ctx = self._ctx
        gate = ctx.cluster.gates.get(ref)
        if gate is None:
            return None
        op = await OpenOperation.load(ctx.client, ctx.keys, ref, gate.mod)
        op.gate = gate.value
        if not self._read(op) and gate.mod > ctx.caught_up_at:
            op.assume_free(ctx.executor_id, ctx.others(ref.type, op.gate.tables(ref.table), op.gate.where))
        return op

    def _read(self, op: OpenOperation) -> bool:
        """Add an operation that was read; returns whether its gate has changed since."""
        self._operations[op.ref] = op
        self._unreadable.pop(op.ref, None)
        self._backlog.read(op.ref, op.plan.count, batch=op.spec.rules.batch)
        now = self._ctx.cluster.gates.get(op.ref)
        if changed := now is not None and now.mod != op.gate_mod:
            op.reopened(now.mod, now.value)
        return changed

    async def _look(self, op: OpenOperation) -> Exception | None:
        """Returns etcd's error about a write on lost claims that it rejects alone."""
        ctx = self._ctx
        rejected: Exception | None = None
        others = ctx.others(op.ref.type, op.gate.tables(op.ref.table), op.gate.where)
        by = Claimant(ctx.executor_id, ctx.cluster.nodes, others, op.spec.rules.retry.maximum)
        await op.look(ctx.client, ctx.keys, by, ctx.limits)
        if op.uncompared:
            rejected = await self._claimer.revoke_lost(op)
            await op.look(ctx.client, ctx.keys, by, ctx.limits)
        return rejected

    # -------------------------------------------------------------------- runs

    def _start(self, jobs: Sequence[tuple[OpenOperation, Sequence[int]]]) -> None:
        self._track(asyncio.ensure_future(self._run(jobs)))

    def _track(self, work: asyncio.Task[None]) -> None:
        self._runs.add(work)
        work.add_done_callback(self._work_ended)

    def _work_ended(self, work: asyncio.Task[None]) -> None:
        self._runs.discard(work)
        self._wake.set()  # not earlier: until here ``busy`` counts this work

    async def _run(self, jobs: Sequence[tuple[OpenOperation, Sequence[int]]]) -> None:
        type_name = jobs[0][0].ref.type
        try:
            if len(jobs) == 1 and jobs[0][0].plan.count > 1:
                await self._jobs.run(*jobs[0])
            else:  # also a single one: its duration decides how many run together
                ends = await self._jobs.run_in_turn(jobs, lambda: self._backlog.took_long(type_name))
                self._backlog.ran_together(type_name, [end.finished - end.started for end in ends])
            for op, _ in jobs:
                self._backlog.ran(op.ref)
        except SessionLost:
            return
        except Exception as error:
            for op, _ in jobs:
                self._failed(op.ref, error, run=True)
        finally:
            self._backlog.run_over()

    # ----------------------------------------------------------------- hints

    def hint_released(self) -> None:
        """Announce released claims to other executors through the node key; several releases share one write."""
        if self._announcement is None or self._announcement.done():
            self._announcement = asyncio.ensure_future(self._announce_released())

    async def _announce_released(self) -> None:
        await self._ctx.reporter.drain()
        try:
            await self._ctx.announce_released()
        except DistopError as error:
            self._ctx.log.debug(
                "Cannot announce released claims; other executors find them at their next poll: %s", describe(error)
            )

    # ------------------------------------------------------------ adopt, stop

    def give_back(self, ref: OperationRef, partition: int, claim: Claim, mod: int) -> None:
        """Set a claim of this executor to waiting: a poll found that no job runs under it."""
        op = self._operations.get(ref)
        if (op is not None and partition in op.held) or self._backlog.claiming(ref):
            return
        self._claimer.give_back(ref, partition, claim, mod)

    def _claims_returned(self) -> None:
        """Jobs that this executor gave back may be claimed, here and by others."""
        self._backlog.hint()
        self._wake.set()
        self.hint_released()

    async def stop(self, grace: float) -> None:
        """Stop claiming, stop the running jobs and release them.

        Returns when no job runs: after ``grace`` seconds, jobs that still run are killed with their child.
        """
        self._backlog.leaving = True
        if self._rounds:
            await asyncio.wait(set(self._rounds))
        for op in list(self._operations.values()):
            if op.held:
                self._ctx.worker.release(str(op.ref))
        if self._runs:
            await asyncio.wait(set(self._runs), timeout=grace)
        if self._runs:
            await self._ctx.worker.abort(f"its jobs did not stop within {grace:g} s")
            await asyncio.wait(set(self._runs))
        await self._jobs.drain()

    def close(self) -> None:
        """Stop at once: the session has ended, and no more writes are allowed."""
        self._jobs.close()
        for work in (*self._rounds, *self._runs, *([self._announcement] if self._announcement else [])):
            work.cancel()
