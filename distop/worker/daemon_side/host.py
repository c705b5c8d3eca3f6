"""The daemon's side of the worker: :class:`Worker` keeps a child alive, gives it runs and calls, and answers for
each job exactly once, whatever happens to the child.

Nothing here imports a behavior, pydantic or PySpark: the daemon stays small.
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
from distop.worker.daemon_side.admission import Gate, halves
from distop.worker.daemon_side.call_channel import Caller
from distop.worker.daemon_side.child_keeper import Keeper
from distop.worker.daemon_side.coordinator_calls import Asking
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
from distop.worker.daemon_side.result_handlers import RunSink, first
from distop.worker.daemon_side.table_verification import Registered

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
    from pathlib import Path

    from distop.protocol.behavior_declaration import Declaration
    from distop.runtime.logs import Log
    from distop.worker.daemon_side.child_launch import Child
    from distop.worker.daemon_side.requests import FindHistory

T = TypeVar("T")

SPARK_TRIES = 2
"""Children with an unusable Spark session before a run's jobs are left to other nodes."""

__all__ = [
    "CompleteResult",
    "Death",
    "JobEnded",
    "JobItem",
    "PlanResult",
    "RunRequest",
    "Worker",
    "WorkerConfig",
    "WorkerError",
]


def _remove(work_dir: Path, ops: Sequence[str]) -> None:
    for op in ops:
        with contextlib.suppress(OSError, UnsafePath):
            deletion.delete(Place(str(work_dir), "ops"), operation_path(op))


class Worker(Asking):
    """One child at a time, replaced when it dies. All methods are of the event loop that started it."""

    def __init__(self, config: WorkerConfig, *, log: Log | None = None) -> None:
        self.config = config
        self._log = log or logging.getLogger("distop.worker")
        self._keeper = Keeper(config, self._log)
        self._slots = asyncio.Semaphore(config.slots)
        self._gate = Gate()
        self._numbers = itertools.count(1)
        self._runs: set[RunSink] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._forgotten: list[str] = []
        """Operations that are gone, and whose private directories are to be removed."""
        self._forgetting: asyncio.Task[None] | None = None
        self._registered = Registered(config.find_tables)
        self._caller = Caller(self._keeper, self._numbers, self._spawn, self._log)

    # ------------------------------------------------------------------ life

    async def start(self) -> tuple[Declaration, ...]:
        """Start the child; what is installed. Raises WorkerError with the end of its log where it does not start."""
        await self._keeper.ready()
        return self.declarations

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """What is installed; empty before the start."""
        return self._keeper.declarations

    @property
    def deaths(self) -> int:
        """How many children died or had to be killed."""
        return self._keeper.deaths

    @property
    def session(self) -> int:
        """The Unix session of the child that is there now, with its JVM and workers; 0: none."""
        child = self._keeper.child
        return child.sid if child is not None else 0

    @property
    def trouble(self) -> str:
        """What is wrong with the child's Spark session now, such as no cores; "": nothing."""
        child = self._keeper.child
        return child.trouble if child is not None else ""

    @property
    def stuck(self) -> str:
        """What does not stop in the child, which takes no new jobs and is replaced once the others end; "": nothing."""
        child = self._keeper.child
        return child.stuck if child is not None else ""

    def on_trouble(self, changed: Callable[[], None]) -> None:
        """Set the callback for changes of :attr:`trouble`."""
        self._keeper.on_trouble = changed

    def on_history(self, find: FindHistory) -> None:
        """Set what answers a child that asks for the history record of an operation; before the start."""
        self._keeper.find_history = find

    @property
    def running(self) -> bool:
        """A child is there now."""
        return self._keeper.child is not None

    def set_deadline(self, boottime: float) -> None:
        """The time (seconds of CLOCK_BOOTTIME) at which the guardian kills the child; 0: none."""
        self._keeper.set_deadline(boottime)

    async def abort(self, reason: str) -> None:
        """Kill the child at once. Returns when all of its processes are dead and all that was asked for before has
        ended: jobs as cancelled (without cleanup, their ``on_events`` called), calls with a WorkerError.

        A new child is started by the next request alone. Safe before, during and after :meth:`stop`.
        """
        self._log.warning("the worker process is killed: %s", reason)
        self._caller.abort(reason)
        text = f"the worker was stopped: {reason}"
        async with self._keeper.aborting():
            # Also those that wait for a slot or a child; with nothing left, they get into none.
            for run in list(self._runs):
                run.end_rest("cancelled", text)
            asked = [task for task in self._background if task is not asyncio.current_task()]
        if asked:
            await asyncio.wait(asked)

    async def stop(self, grace: float) -> None:
        """Let the child stop Spark and exit, kill what is left of it after ``grace`` seconds. Final: returns when all
        processes are dead and all that was asked for has ended."""
        await self._keeper.stop(grace)
        if self._background:
            # They end by themselves: what they wait for is dead, and there will be no other child.
            await asyncio.wait(list(self._background))

    async def forget(self, *ops: str) -> None:
        """Remove the private directories of operations that are gone."""
        self._forgotten += ops
        if self._forgetting is None or self._forgetting.done():
            self._forgetting = self._spawn(self._forget())
        await asyncio.shield(self._forgetting)

    async def _forget(self) -> None:
        """Those that come together, or meanwhile, take one thread."""
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
    ) -> None:
        """Run the jobs in one slot (waiting for a free one); returns when each has got exactly one JobEnded.

        ``on_status`` gets what a job says that it does (ordinal, -1 for a batch; text), ``on_tasks`` how many Spark
        tasks of what runs are done, and how many there are.
        """
        await self.run_in_turn([(request, Listener(on_events, on_status, on_progress, on_tasks))])

    async def run_in_turn(self, asked: Sequence[tuple[RunRequest, Listener]]) -> None:
        """As :meth:`run`, for several requests that are sent to the child at once, and are run there one after the
        other in one slot. What has not begun when it is told to pause or stop does not wait for its turn.
        """
        runs = [
            RunSink(
                *(request, self.config.incarnation, to.on_events, to.on_status, to.on_progress, to.on_tasks, self._log)
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
            # Nobody listens any more, but the child still has the jobs: the slot is theirs until they stopped.
            for run in runs:
                run.silence()
                self._cancel(run, list(run.pending))
            raise

    async def _in_slot(self, runs: Sequence[RunSink]) -> None:
        try:
            async with self._slots:
                reasons = await self._registered.why_not([run.request for run in runs])
                for run, why in zip(runs, reasons, strict=True):
                    if why:
                        self._log.warning("jobs are refused: %s", why, extra=run.where)
                        run.end_rest("fatal", why)
                if len(runs) == 1:
                    await self._drive(runs[0])
                elif any(run.pending for run in runs):
                    await self._drive_in_turn(runs)
        except WorkerError as error:
            for run in runs:
                run.end_rest("refused", str(error))
        except Exception as error:
            # A defect, or trouble of this process: counted as an attempt, so that it does not go on for ever.
            self._log.exception("a run of jobs broke on its way", extra=runs[0].where)
            for run in runs:
                run.end_rest("error", f"the run broke on its way: {describe(error)}")
        finally:
            self._runs.difference_update(runs)

    async def _drive_in_turn(self, runs: Sequence[RunSink]) -> None:
        async with self._gate.shared():
            death = await self._in_child_in_turn([run for run in runs if run.pending])
            if death is None:
                return
            for run in runs:
                await self._settle(run, death)
        for run in runs:
            if not run.pending:
                continue
            if death.crashed:  # whose fault it was is not known: each alone
                async with self._gate.exclusive():
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
            async with self._gate.shared():
                death = await self._in_child(run, group, cleanup=cleanup)
                if death is None:
                    if left := [p for p in group if p in run.pending]:
                        # One of a batch did not stop: which one is found in halves, in the next child.
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
                async with self._gate.exclusive():
                    await self._isolate(run, alone)
                return

    async def _isolate(self, run: RunSink, alone: bool) -> None:
        """Run what is left of a run that was in a child when it died, with nothing else in the child, until the job
        that kills it stands alone: that one is blamed, nobody else. Jobs that run one after the other stand alone
        anyway, once each end is told at once; a batch is cut in halves."""
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
        """After a death: end what must not be run again. Whether that was all."""
        if death.final or self._keeper.stopping:
            run.end_rest("cancelled", str(death))
        elif gone := [p for p in run.pending if p in run.cancelled]:
            run.end_rest("cancelled", await self._clean_after(run, gone), gone)
        elif death.of_spark:
            run.sparks_lost += 1
            if run.sparks_lost >= SPARK_TRIES:
                run.end_rest("unavailable", str(death))
        return not run.pending

    async def _clean_after(self, run: RunSink, gone: Sequence[int]) -> str:
        """Clean up after cancelled jobs whose child had to be killed; what went wrong, or ""."""
        await run.saved()
        gone = [p for p in gone if p in run.pending and not (run.keep and run.goes_on(p))]
        if not gone:
            return ""
        try:
            await self._cleanup(run.request, [run.item(p) for p in gone], self.config.incarnation)
        except WorkerError as error:
            self._log.error("the cleanup of %d jobs failed: %s", len(gone), error, extra=run.where)
            return f"the cleanup failed: {error}"
        return ""

    async def _in_child(
        self, run: RunSink, ordinals: Sequence[int], *, cleanup: bool, careful: bool = False
    ) -> Death | None:
        """Send jobs to the child and wait for their ends; the child's death if it came first."""
        await run.saved()
        child = await self._keeper.ready()
        ordinals = [p for p in ordinals if p in run.pending]
        message = self._enter(run, child, cleanup=cleanup, careful=careful)
        try:
            rows = (child_messages.row(run.item(p).row()) for p in ordinals if p in run.pending)
            for frame in child_messages.encode_paged(message, rows):
                child.send_frame(frame)
                # Many jobs take long to encode; the daemon has a lease to keep.
                await asyncio.sleep(0)
            self._enforce(run)
            await first(run.done, child.died)
        finally:
            child.runs.pop(run.number, None)
            run.child = None
            child.end_if_stuck()
        if not run.done.done():
            return child.died.result()
        if run.given_up and run.request.batch:
            return None
        run.end_rest("error", "the worker gave no outcome for this partition", set(ordinals) & run.pending.keys())
        return None

    async def _in_child_in_turn(self, runs: Sequence[RunSink]) -> Death | None:
        """Send runs to the child, which takes them in turn; the child's death if it came before their ends."""
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
                    await first(run.done, child.died)
                if not run.done.done():
                    return child.died.result()
        finally:
            for run in runs:
                child.runs.pop(run.number, None)
                run.child = None
            child.end_if_stuck()
        for run in runs:
            run.end_rest("error", "the worker gave no outcome for this partition")
        return None

    def _enter(
        self, run: RunSink, child: Child, *, cleanup: bool, careful: bool = False, line: int = 0
    ) -> child_messages.RunMessage:
        """Have the child's frames about a run reach it; the message that begins it, without its items."""
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
            # A run that is sent again works under the session as it is now.
            deadline=max(request.deadline, self._keeper.deadline) if request.deadline else 0.0,
            incarnation=run.incarnation,
            more=False,
        )
        if request.opened:
            message["opened"] = request.opened
        if line:
            message["line"] = line
        if request.time_limit:
            message["limit"], message["grace"] = request.time_limit, self.config.grace
        return message

    # ------------------------------------------------------------------ cancel

    def cancel(self, op: str, partitions: Collection[int] | None = None) -> None:
        """Stop these jobs of an operation (None: all; its calls go on). What does not stop within the configured
        grace loses its child."""
        for run in [r for r in self._runs if r.request.op == op]:
            self._cancel(run, [p for p in run.pending if partitions is None or p in partitions])

    def release(self, op: str) -> None:
        """Stop all jobs of an operation as :meth:`cancel` does, but not for good: a job that can go on from its
        checkpoint is not cleaned up after. Jobs that were cancelled stay so."""
        for run in [r for r in self._runs if r.request.op == op]:
            self._cancel(run, list(run.pending), keep=True)

    def pause(self, op: str) -> None:
        """End as refused those jobs of an operation that have not begun; what has begun goes on. Of a batch nobody but
        the behavior knows which have, so that all of it goes on."""
        for run in [r for r in self._runs if r.request.op == op]:
            if run.child is None:
                run.end_rest("refused", "the operation was paused before the job began")
            else:
                run.child.send(child_messages.PauseMessage(t="pause", run=run.number))

    def cancel_calls(self, op: str) -> None:
        """Stop planning, completion and cleanup of an operation, also where they only wait for a child: each ends with
        a WorkerError (``transient``, "cancelled: …"). What does not stop within the configured grace loses its child,
        in which everything else is run again."""
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
        """Kill the child when what it runs has been told to stop for longer than the grace, or when it does not
        even answer."""
        grace = self.config.grace
        while run.child is not None and any(p in run.cancelled for p in run.pending):
            child, number = run.child, run.number
            await first(run.done, child.died, timeout=grace)
            if run.done.done() or run.number != number or child.died.done():
                continue
            run.probed = asyncio.get_running_loop().create_future()
            child.send(child_messages.ProbeMessage(t="probe", run=number, grace=grace * 0.9))
            await first(run.probed, run.done, child.died, timeout=max(grace, 1.0))
            if run.done.done() or run.number != number or child.died.done():
                continue
            if not run.probed.done() or run.probed.result():
                said = "jobs did not stop within %g s: their worker process is killed"
                self._log.warning(said, grace, extra=run.where)
                child.kill("stubborn")
                await first(child.died)
