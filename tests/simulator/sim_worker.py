"""The worker of a simulated daemon: runs scripted jobs.

It has the interface of ``distop.worker.daemon_side.host.WorkerHost``, and gives the same answers. It knows which job
kills a child; the real worker finds out by running suspected jobs alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.protocol.jobs import given_up, to_go_on_from
from distop.protocol.records import OperationRef
from distop.worker.daemon_side.requests import JobEnded, JobItem, Listener, RunRequest, WorkerConfig, WorkerError
from distop.worker.daemon_side.result_handlers import wait_first
from tests.simulator import simulated_behaviors
from tests.simulator.child_calls import ChildCalls
from tests.simulator.children import PIPE, Child, Run, settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from tests.simulator.job_effects import Effect
    from tests.simulator.machine import Machine


ANSWER = 1.5
"""Seconds for which a child waits for the answer to a checkpoint before it continues.

The real child waits for a minute, which is longer than a simulated operation lasts.
"""


class SimWorker(ChildCalls):
    """The worker of one incarnation."""

    stuck = ""

    def __init__(self, config: WorkerConfig, machine: Machine) -> None:
        super().__init__(config, machine)
        self._slots = asyncio.Semaphore(config.slots)
        self._runs: list[Run] = []

    # ------------------------------------------------------------------ life

    async def abort(self, reason: str) -> None:
        self._end_all("aborted")
        await asyncio.sleep(PIPE)

    async def stop(self, grace: float) -> None:
        self._stopped = self._stopped or "stopped"
        self._end_all("stopped")
        await asyncio.sleep(PIPE)

    async def forget(self, *ops: str) -> None:
        return

    def _end_all(self, reason: str) -> None:
        if self._child is not None:
            self._child.kill(reason)
            self._child = None
        for run in list(self._runs):
            run.end([JobEnded(p, "cancelled", None, reason) for p in list(run.pending)])
        self._end_calls(reason)

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
        await self.run_in_turn([(request, Listener(on_events, on_status, on_progress, on_tasks, on_work))])

    async def run_in_turn(self, asked: Sequence[tuple[RunRequest, Listener]]) -> None:
        """Run these requests one after the other in one slot."""
        ends = self._machine.effects.ends
        runs = [Run(request, to.on_events, to.on_progress, ends) for request, to in asked]
        self._runs += runs
        try:
            async with self._slots:
                for run in runs:
                    await self._drive(run)
        except WorkerError as error:
            for run in runs:
                run.end([JobEnded(p, "refused", None, str(error)) for p in list(run.pending)])
        except asyncio.CancelledError:
            for run in runs:
                run.on_events = lambda _: None
                self._cancel(run, list(run.pending), keeps=True)
            raise
        finally:
            for run in runs:
                self._runs.remove(run)

    async def _drive(self, run: Run) -> None:
        cleanup = run.request.cleanup_first
        while run.pending:
            if run.saving:
                await asyncio.wait(set(run.saving))
            child = self._ready()
            run.begun = True
            if self._process.dead:  # killed in this callback
                return
            child.spawn(self._jobs(child, run, list(run.pending.values()), cleanup))
            await wait_first(run.done, child.died)
            if run.done.done():
                return
            reason, cleanup = child.died.result(), True
            if reason in ("deadline", "daemon-gone", "stopped", "aborted"):
                run.end([JobEnded(p, "cancelled", None, reason) for p in list(run.pending)])
                return
            if child.guilty is not None and child.guilty[0] == run.request.op and child.guilty[1] in run.pending:
                run.end([JobEnded(child.guilty[1], "crash", None, "the worker process died")])
            gone = [p for p in run.pending if p in run.cancelled]
            run.end([JobEnded(p, "cancelled", None, reason) for p in gone])

    async def _jobs(self, child: Child, run: Run, items: list[JobItem], cleanup: bool) -> None:
        """Run the jobs of a request in the child: one after the other, or as one batch."""
        await asyncio.sleep(PIPE)
        if not run.request.batch:
            for item in items:
                if child.alive:
                    await self._job(child, run, item, cleanup)
            return
        await asyncio.gather(*(self._job(child, run, item, cleanup) for item in items))

    async def _job(self, child: Child, run: Run, item: JobItem, cleanup: bool) -> None:
        machine, request, p = self._machine, run.request, item.ordinal
        ref = OperationRef.parse(request.op)
        if p in run.cancelled:
            self._to_daemon(run.end, [JobEnded(p, "cancelled")])
            return
        if max(request.deadline, machine.deadline_of(self)) <= machine.source.boottime():
            self._to_daemon(run.end, [JobEnded(p, "refused", None, "the session's deadline has passed")])
            return
        machine.check_served(ref, self.config.incarnation, "a job")
        began = machine.source.time()
        started = machine.step(self._process, "child: start a job")
        if not child.alive:
            return
        effect = machine.effects.begin(ref, p, item.fence, self.config.incarnation, item.attempt)
        child.doing.append(effect)
        if machine.types[request.type].rules().leaves_something and not machine.disk.holds(ref, p, item.fence):
            machine.effects.not_on_disk(ref, effect)
        resumable, progress = machine.types[request.type].resumable, to_go_on_from(item.progress)
        if resumable:
            machine.effects.resumed(ref, p, progress, effect)
        if not progress:
            machine.effects.starts_over(ref, p, effect, cleaned=cleanup)
        if machine.types[request.type].rules().cleans:
            machine.effects.writes_output(ref, p, effect)
        started()
        if cleanup:
            await asyncio.sleep(machine.chance.uniform(0.001, 0.05))
        if (inability := machine.inability(request.type)) is not None:
            pause = simulated_behaviors.hang_time(request.arg, inability) or machine.chance.uniform(0.001, 0.05)
            await asyncio.sleep(pause)
            ended = JobEnded(p, inability, None, simulated_behaviors.UNABLE, began, machine.source.time())
            self._end_job(child, run, effect, ended)
            return
        script = simulated_behaviors.script(request.type, request.arg, p, item.attempt)
        done = int(progress or 0)
        kind, result, error = "success", None, ""
        while done < script.steps:
            if not script.stubborn:
                await self._work(run, p, script.step)
                if p in run.cancelled:
                    await asyncio.sleep(machine.chance.uniform(0.001, 0.1))  # its cleanup
                    if p in run.given_up:
                        machine.effects.cleaned(ref, p)
                    kind = "cancelled"
                    break
            else:
                await asyncio.sleep(script.step * 20)
            done += 1
            if resumable and done < script.steps:
                await self._checkpoint(child, run, ref, p, done, effect)
        if kind == "success" and script.end == "crash":
            child.guilty = (request.op, p)
            child.kill("exited")
            return
        if kind == "success" and script.end != "success":
            kind = script.end
            error = "the job failed" if kind == "error" else "the verdict is negative"
        if kind == "success":
            result = {"fence": item.fence, "by": self.config.incarnation}
        if kind == "verdict" and machine.types[request.type].rules().cleans:
            if resumable and done > 1 and not await self._abandon_checkpoint(child, run, ref, p, done - 1):
                kind, error = "error", "could not abandon the checkpoint before the cleanup"
            else:
                machine.effects.cleaned(ref, p)
        ended = JobEnded(p, kind, result, error, began, machine.source.time())  # type: ignore[arg-type]
        self._end_job(child, run, effect, ended)

    def _end_job(self, child: Child, run: Run, effect: Effect, ended: JobEnded) -> None:
        """End a job, and report its end to the daemon."""
        reported = self._machine.step(self._process, "child: report an end")
        if not child.alive:
            return
        self._machine.effects.end(effect, ended.kind)
        child.doing.remove(effect)
        self._to_daemon(run.end, [ended])
        reported()

    @staticmethod
    async def _work(run: Run, partition: int, seconds: float) -> None:
        """Work for some seconds, or until the job is cancelled."""
        if run.cancel_event.is_set():
            if partition not in run.cancelled:
                await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await run.cancel_event.wait()

    async def _checkpoint(
        self, child: Child, run: Run, ref: OperationRef, partition: int, value: int, effect: Effect
    ) -> None:
        known = self._machine.step(self._process, "child: save a checkpoint")
        if child.alive and await self._saved(child, run, partition, value):
            self._machine.effects.saved(ref, partition, value, effect)
            known()

    async def _abandon_checkpoint(self, child: Child, run: Run, ref: OperationRef, partition: int, value: int) -> bool:
        """Abandon a checkpoint before the cleanup after a verdict. Returns whether etcd acknowledged it."""
        known = self._machine.step(self._process, "child: abandon a checkpoint")
        if not child.alive:
            return False
        self._machine.effects.abandons_checkpoint(ref, partition)
        given = await self._saved(child, run, partition, given_up(value))
        known()
        return given

    async def _saved(self, child: Child, run: Run, partition: int, value: Any) -> bool:
        answered: asyncio.Future[bool] = self._loop.create_future()
        child_context = contextvars.copy_context()

        async def save() -> None:
            saved = False
            item = run.pending.get(partition)
            if item is not None:
                try:
                    saved = await run.on_progress(partition, value)
                except Exception:
                    saved = False
                if saved and partition in run.pending:
                    run.pending[partition] = replace(item, progress=value)
            self._loop.call_later(PIPE, settle, answered, saved, context=child_context)

        self._to_daemon(lambda: run.save(save()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER):
                await answered
        return answered.done() and not answered.cancelled() and answered.result()

    # ----------------------------------------------------------------- cancel

    def pause(self, op: str) -> None:
        for run in list(self._runs):
            if run.request.op == op and not run.begun:
                run.end([JobEnded(p, "refused", None, "paused before its start") for p in list(run.pending)])

    def cancel(self, op: str, partitions: Collection[int] | None = None) -> None:
        for run in list(self._runs):
            if run.request.op == op:
                self._cancel(run, [p for p in run.pending if partitions is None or p in partitions])

    def release(self, op: str) -> None:
        """Cancel all jobs of an operation, but keep the output that their checkpoints describe."""
        for run in list(self._runs):
            if run.request.op == op:
                self._cancel(run, list(run.pending), keeps=True)

    def _cancel(self, run: Run, partitions: list[int], *, keeps: bool = False) -> None:
        fresh = [p for p in partitions if p not in run.cancelled]
        if not fresh:
            return
        if not keeps:
            run.given_up.update(fresh)
        child = self._child
        self._loop.world_at(self._loop.now + PIPE, self._deliver_cancel, run, fresh)
        if child is not None:
            self._loop.call_later(self.config.grace, self._enforce, run, child, fresh)

    @staticmethod
    def _deliver_cancel(run: Run, partitions: list[int]) -> None:
        run.cancelled.update(partitions)
        run.cancel_event.set()

    def _enforce(self, run: Run, child: Child, partitions: list[int]) -> None:
        if child.alive and any(p in run.pending for p in partitions):
            child.kill("stubborn")
