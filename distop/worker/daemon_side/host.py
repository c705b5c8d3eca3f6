"""The daemon's side of the worker: :class:`WorkerHost` keeps a child alive and sends it runs and calls.

Each job gets exactly one end, whatever happens to the child. No module here imports a behavior, pydantic or PySpark, so
that the daemon stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from distop.errors import UnsafePath, describe
from distop.storage import deletion
from distop.storage.deletion import Place
from distop.storage.places import operation_path
from distop.worker import child_messages
from distop.worker.daemon_side.admission import SharedExclusiveLock, halves
from distop.worker.daemon_side.call_channel import Caller
from distop.worker.daemon_side.child_keeper import ChildKeeper
from distop.worker.daemon_side.coordinator_calls import ChildCalls
from distop.worker.daemon_side.requests import (
    CompleteResult,
    Death,
    JobEnded,
    JobItem,
    Listener,
    PlanResult,
    RunRequest,
    WorkerConfig,
    WorkerError,
)
from distop.worker.daemon_side.result_handlers import RunSink, wait_first
from distop.worker.daemon_side.table_verification import TableRecordCheck

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
    from pathlib import Path

    from distop.protocol.behavior_declaration import Declaration
    from distop.runtime.logs import Log
    from distop.worker.daemon_side.call_channel import CallStatuses
    from distop.worker.daemon_side.child_launch import ChildProcess
    from distop.worker.daemon_side.requests import FindHistory

T = TypeVar("T")

SPARK_TRIES = 2
"""Children with an unusable Spark session, after which a run's jobs are released to other nodes."""

__all__ = [
    "CompleteResult",
    "Death",
    "JobEnded",
    "JobItem",
    "PlanResult",
    "RunRequest",
    "WorkerConfig",
    "WorkerError",
    "WorkerHost",
]


def _remove(work_dir: Path, ops: Sequence[str]) -> None:
    for op in ops:
        with contextlib.suppress(OSError, UnsafePath):
            deletion.delete(Place(str(work_dir), "ops"), operation_path(op))


class WorkerHost(ChildCalls):
    """One child at a time, replaced when it dies. Call all methods in the event loop that started it."""

    def __init__(self, config: WorkerConfig, *, log: Log | None = None) -> None:
        self.config = config
        self._log = log or logging.getLogger("distop.worker")
        self._keeper = ChildKeeper(config, self._log)
        self._slots = asyncio.Semaphore(config.slots)
        self._admission = SharedExclusiveLock()
        self._numbers = itertools.count(1)
        self._runs: set[RunSink] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._forgotten: list[str] = []
        """Ended operations whose private directories must be removed."""
        self._forgetting: asyncio.Task[None] | None = None
        self._registered = TableRecordCheck(config.find_tables, config.find_removed_table)
        self._caller = Caller(self._keeper, self._numbers, self._spawn, self._log)

    # ------------------------------------------------------------------ life

    async def start(self) -> tuple[Declaration, ...]:
        """Start the child; returns the installed declarations. Raises WorkerError with the end of its log."""
        await self._keeper.ready()
        return self.declarations

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """The declarations of the installed behaviors; empty before the start."""
        return self._keeper.declarations

    @property
    def deaths(self) -> int:
        """The number of children that died or were killed."""
        return self._keeper.deaths

    @property
    def session(self) -> int:
        """The Unix session of the current child, its JVM and its workers; 0: no child."""
        child = self._keeper.child
        return child.sid if child is not None else 0

    @property
    def trouble(self) -> str:
        """The current problem of the child's Spark session, such as no cores; "" for none."""
        child = self._keeper.child
        return child.trouble if child is not None else ""

    @property
    def stuck(self) -> str:
        """The work in the child that does not stop; "" for none. Such a child takes no new jobs and is replaced."""
        child = self._keeper.child
        return child.stuck if child is not None else ""

    def on_trouble(self, changed: Callable[[], None]) -> None:
        """Set the callback for changes of :attr:`trouble`."""
        self._keeper.on_trouble = changed

    def show_calls(self, statuses: CallStatuses) -> None:
        """Show the status of plannings and completions there."""
        self._caller.statuses = statuses

    def on_history(self, find: FindHistory) -> None:
        """Set the function that finds history records for the child; call it before the start."""
        self._keeper.find_history = find

    @property
    def running(self) -> bool:
        """Whether there is a child now."""
        return self._keeper.child is not None

    def set_deadline(self, boottime: float) -> None:
        """Set the time (seconds of CLOCK_BOOTTIME) at which the guardian kills the child; 0: none."""
        self._keeper.set_deadline(boottime)

    async def abort(self, reason: str) -> None:
        """Kill the child, and end all runs and calls.

        Returns when all processes are dead and all earlier requests have ended: jobs as cancelled (without cleanup,
        after their ``on_events``), calls with a WorkerError. Only the next request starts a new child. Safe before,
        during and after :meth:`stop`.
        """
        self._log.warning("Killing the worker process: %s", reason)
        self._caller.abort(reason)
        text = f"the worker was stopped: {reason}"
        async with self._keeper.aborting():
            # Also the runs that wait for a slot or a child: without jobs they do not enter a child.
            for run in list(self._runs):
                run.end_rest("cancelled", text)
            asked = [task for task in self._background if task is not asyncio.current_task()]
        if asked:
            await asyncio.wait(asked)

    async def stop(self, grace: float) -> None:
        """Let the child stop Spark and exit; kill it after ``grace`` seconds. The worker cannot be used afterwards.

        Returns when all processes are dead and all requests have ended.
        """
        await self._keeper.stop(grace)
        if self._background:
            # They end without a cancel: their child is dead, and no other one is started.
            await asyncio.wait(list(self._background))

    async def forget(self, *ops: str) -> None:
        """Remove the private directories of operations that have ended."""
        self._forgotten += ops
        if self._forgetting is None or self._forgetting.done():
            self._forgetting = self._spawn(self._forget())
        await asyncio.shield(self._forgetting)

    async def _forget(self) -> None:
        """Remove the directories of all forgotten operations, in one thread at a time."""
        while self._forgotten:
            ops, self._forgotten = self._forgotten, []
            await asyncio.to_thread(_remove, self.config.work_dir, ops)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # ------------------------------------------------------------------ runs

    async def run(
        self,
        request: RunRequest,
        on_events: Callable[[list[JobEnded]], None],
        on_status: Callable[[int, str], None] | None = None,
        on_progress: Callable[[int, Any], Awaitable[bool]] | None = None,
        on_tasks: Callable[[int, int], None] | None = None,
        on_work: Callable[[int, Any], None] | None = None,
    ) -> None:
        """Run the jobs in one slot (waiting for a free one); returns when each has exactly one JobEnded.

        ``on_status`` is called with a job's status (ordinal, -1 for a batch; text), ``on_tasks`` with the numbers of
        completed and all Spark tasks of the running job, ``on_work`` with how much work a job has done.
        """
        await self.run_in_turn([(request, Listener(on_events, on_status, on_progress, on_tasks, on_work))])

    async def run_in_turn(self, asked: Sequence[tuple[RunRequest, Listener]]) -> None:
        """Like :meth:`run`, for several requests, which the child gets together and runs in order in one slot.

        A request that is paused or stopped before its start ends at once, not after those before it.
        """
        runs = [
            RunSink(
                *(request, self.config.incarnation, to.on_events, to.on_status, to.on_progress, to.on_tasks, self._log),
                on_work=to.on_work,
            )
            for request, to in asked
        ]
        if not runs:
            return
        self._runs.update(runs)
        task = self._spawn(self._in_slot(runs))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # The caller is gone, but the child still has the jobs: they keep the slot until they have stopped.
            for run in runs:
                run.silence()
                self._cancel(run, list(run.pending))
            raise

    async def _in_slot(self, runs: Sequence[RunSink]) -> None:
        try:
            async with self._slots:
                reasons = await self._registered.refusals([run.request for run in runs])
                for run, why in zip(runs, reasons, strict=True):
                    if why:
                        self._log.warning("Refusing jobs: %s", why, extra=run.where)
                        run.end_rest("fatal", why)
                if len(runs) == 1:
                    await self._drive(runs[0])
                elif any(run.pending for run in runs):
                    await self._drive_in_turn(runs)
        except WorkerError as error:
            for run in runs:
                run.end_rest("refused", str(error))
        except Exception as error:
            # A defect, or a problem of this process: it counts as an attempt, so that it is not repeated without end.
            self._log.exception("Unexpected error while running jobs", extra=runs[0].where)
            for run in runs:
                run.end_rest("error", f"unexpected error while running jobs: {describe(error)}")
        finally:
            self._runs.difference_update(runs)

    async def _drive_in_turn(self, runs: Sequence[RunSink]) -> None:
        async with self._admission.shared():
            death = await self._in_child_in_turn([run for run in runs if run.pending])
            if death is None:
                return
            for run in runs:
                await self._settle(run, death)
        for run in runs:
            if not run.pending:
                continue
            if death.crashed:  # the guilty run is not known: run each one alone
                async with self._admission.exclusive():
                    await self._isolate(run, alone=False)
            else:
                await self._drive(run, again=True)

    async def _drive(self, run: RunSink, *, again: bool = False) -> None:
        cleanup = run.request.cleanup_first or again
        groups: deque[Sequence[int]] = deque([list(run.pending)])
        while run.pending:
            group = [p for p in (groups.popleft() if groups else list(run.pending)) if p in run.pending]
            if not group:
                continue
            async with self._admission.shared():
                death = await self._in_child(run, group, cleanup=cleanup)
                if death is None:
                    if left := [p for p in group if p in run.pending]:
                        # A job of the batch did not stop: find it in the next child, by halving the batch.
                        groups.extendleft(reversed(halves(left)))
                        cleanup = True
                    continue
                if await self._settle(run, death):
                    return
            groups.clear()
            cleanup = True
            if death.crashed:
                alone = len(death.runs) == 1 and not death.calls
                if alone and len(run.pending) == 1:
                    run.end_rest("crash", str(death))
                    return
                async with self._admission.exclusive():
                    await self._isolate(run, alone)
                return

    async def _isolate(self, run: RunSink, alone: bool) -> None:
        """Run the pending jobs of a run whose child died, alone in the child, to find the job that kills it.

        Only that job is blamed. Jobs that run one after the other are identified by immediate reports of their ends; a
        batch is halved.
        """
        batch, left = run.request.batch, list(run.pending)
        groups: deque[Sequence[int]] = halves(left) if alone and batch else deque([left])
        while groups:
            group = [p for p in groups.popleft() if p in run.pending]
            if not group:
                continue
            death = await self._in_child(run, group, cleanup=True, careful=True)
            if death is None:
                if left := [p for p in group if p in run.pending]:
                    groups.extendleft(reversed(halves(left)))
                continue
            if await self._settle(run, death):
                return
            left = [p for p in group if p in run.pending]
            if not left:
                continue
            if not death.crashed:
                groups.appendleft(left)
            elif len(group) == 1 or not batch:
                run.end_rest("crash", str(death), left[:1])
                groups.appendleft(left[1:])
            else:
                groups.extendleft(reversed(halves(left)))

    async def _settle(self, run: RunSink, death: Death) -> bool:
        """After a death: end the jobs that must not run again. Returns whether none is left."""
        if death.final or self._keeper.stopping:
            run.end_rest("cancelled", str(death))
        elif gone := [p for p in run.pending if p in run.cancelled]:
            run.end_rest("cancelled", await self._clean_after(run, gone), gone)
        elif death.spark_unusable:
            run.sparks_lost += 1
            if run.sparks_lost >= SPARK_TRIES:
                run.end_rest("unavailable", str(death))
        return not run.pending

    async def _clean_after(self, run: RunSink, gone: Sequence[int]) -> str:
        """Clean up after cancelled jobs whose child was killed. Returns the error, "" for none."""
        await run.wait_for_checkpoints()
        gone = [p for p in gone if p in run.pending and not (run.keep and run.can_resume(p))]
        if not gone:
            return ""
        try:
            await self._cleanup(run.request, [run.item(p) for p in gone], self.config.incarnation)
        except WorkerError as error:
            jobs = "1 job" if len(gone) == 1 else f"{len(gone)} jobs"
            self._log.error("Cleanup of %s failed: %s", jobs, error, extra=run.where)
            return f"the cleanup failed: {error}"
        return ""

    async def _in_child(
        self, run: RunSink, ordinals: Sequence[int], *, cleanup: bool, careful: bool = False
    ) -> Death | None:
        """Send jobs to the child and wait for their ends. Returns the child's death if it dies before."""
        await run.wait_for_checkpoints()
        child = await self._keeper.ready()
        ordinals = [p for p in ordinals if p in run.pending]
        message = self._enter(run, child, cleanup=cleanup, careful=careful)
        try:
            rows = (child_messages.row(run.item(p).row()) for p in ordinals if p in run.pending)
            for frame in child_messages.encode_paged(message, rows):
                child.send_frame(frame)
                # Encoding many jobs takes long; yield so that the daemon renews its lease.
                await asyncio.sleep(0)
            self._enforce(run)
            await wait_first(run.done, child.died)
        finally:
            child.runs.pop(run.number, None)
            run.child = None
            child.kill_if_stuck()
        if not run.done.done():
            return child.died.result()
        if run.given_up and run.request.batch:
            return None
        run.end_rest("error", "the worker gave no outcome for this partition", set(ordinals) & run.pending.keys())
        return None

    async def _in_child_in_turn(self, runs: Sequence[RunSink]) -> Death | None:
        """Send runs to the child, which runs them in order. Returns the child's death if it dies before."""
        child = await self._keeper.ready()
        line, frames = next(self._numbers), list[bytes]()
        try:
            for run in runs:
                message = self._enter(run, child, cleanup=run.request.cleanup_first, line=line)
                frames += child_messages.encode_paged(
                    message, (child_messages.row(run.item(p).row()) for p in run.pending)
                )
            child.send_frame(b"".join(frames))
            for run in runs:
                self._enforce(run)
            for run in runs:
                if not run.done.done():
                    await wait_first(run.done, child.died)
                if not run.done.done():
                    return child.died.result()
        finally:
            for run in runs:
                child.runs.pop(run.number, None)
                run.child = None
            child.kill_if_stuck()
        for run in runs:
            run.end_rest("error", "the worker gave no outcome for this partition")
        return None

    def _enter(
        self, run: RunSink, child: ChildProcess, *, cleanup: bool, careful: bool = False, line: int = 0
    ) -> child_messages.RunMessage:
        """Register a run with the child. Returns the message that starts it, without its items."""
        request, number = run.request, next(self._numbers)
        run.child, run.number = child, number
        run.done = asyncio.get_running_loop().create_future()
        run.given_up = False
        child.runs[number] = run
        message = child_messages.RunMessage(
            t="run",
            run=number,
            op=request.op,
            type=request.type,
            arg=request.arg,
            table=request.table,
            items=[],
            batch=request.batch,
            cleanup=cleanup,
            careful=careful,
            cancelled=sorted(run.cancelled),
            keep=run.keep,
            # A run that is sent again uses the current deadline of the session.
            deadline=max(request.deadline, self._keeper.deadline) if request.deadline else 0.0,
            incarnation=run.incarnation,
            more=False,
        )
        if request.opened:
            message["opened"] = request.opened
        if request.trace:
            message["trace"] = request.trace, request.traced
        if line:
            message["line"] = line
        if request.time_limit:
            message["limit"], message["grace"] = request.time_limit, self.config.grace
        return message

    # ------------------------------------------------------------------ cancel

    def cancel(self, op: str, partitions: Collection[int] | None = None) -> None:
        """Cancel these jobs of an operation (None: all), but not its calls.

        If a job does not stop within the configured grace period, its child is killed.
        """
        for run in [r for r in self._runs if r.request.op == op]:
            self._cancel(run, [p for p in run.pending if partitions is None or p in partitions])

    def release(self, op: str) -> None:
        """Stop all jobs of an operation like :meth:`cancel`, so that they can resume later.

        No cleanup runs for a job that can resume from its checkpoint. Cancelled jobs stay cancelled.
        """
        for run in [r for r in self._runs if r.request.op == op]:
            self._cancel(run, list(run.pending), keep=True)

    def pause(self, op: str) -> None:
        """End jobs of an operation that have not started, as refused; running jobs continue.

        A running batch continues as a whole, since only the behavior knows which of its jobs have started.
        """
        for run in [r for r in self._runs if r.request.op == op]:
            if run.child is None:
                run.end_rest("refused", child_messages.NOT_STARTED)
            else:
                run.child.send(child_messages.PauseMessage(t="pause", run=run.number))

    def cancel_calls(self, op: str) -> None:
        """Cancel planning, completion and cleanup of an operation, running or waiting for a child.

        Each ends with a WorkerError (``transient``, "cancelled: …"). If a call does not stop within the configured
        grace period, its child is killed, and all other work of the child runs again.
        """
        self._caller.cancel(op)

    def _cancel(self, run: RunSink, partitions: list[int], *, keep: bool = False) -> None:
        run.keep = keep and (run.keep or not run.cancelled)
        run.cancelled.update(partitions)
        if partitions and run.child is not None:
            run.child.send(
                child_messages.CancelMessage(t="cancel", run=run.number, partitions=partitions, keep=run.keep)
            )
        self._enforce(run)

    def _enforce(self, run: RunSink) -> None:
        if run.cancelled and run.child is not None and (run.enforcer is None or run.enforcer.done()):
            run.enforcer = self._spawn(self._enforce_run(run))

    async def _enforce_run(self, run: RunSink) -> None:
        """Kill the child if a cancelled job does not stop within the grace period, or if the child does not answer."""
        grace = self.config.grace
        while run.child is not None and any(p in run.cancelled for p in run.pending):
            child, number = run.child, run.number
            await wait_first(run.done, child.died, timeout=grace)
            if run.done.done() or run.number != number or child.died.done():
                continue
            run.probed = asyncio.get_running_loop().create_future()
            child.send(child_messages.ProbeMessage(t="probe", run=number, grace=grace * 0.9))
            await wait_first(run.probed, run.done, child.died, timeout=max(grace, 1.0))
            if run.done.done() or run.number != number or child.died.done():
                continue
            if not run.probed.done() or run.probed.result():
                message = "Killing the worker process: cancelled jobs did not stop within %g s"
                self._log.warning(message, grace, extra=run.where)
                child.kill("stubborn")
                await wait_first(child.died)
