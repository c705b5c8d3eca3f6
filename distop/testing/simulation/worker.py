"""The worker of a simulated daemon, with the interface of ``distop.worker.host.Worker``: it runs scripted jobs.

Here it is known which job kills a child; the real worker finds that out by running the suspects alone. What it answers
is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distop.core.codec import loads
from distop.core.model import OperationRef
from distop.testing.simulation import behaviors
from distop.testing.simulation.children import PIPE, Child, Run, fail, settle
from distop.testing.simulation.loop import PROCESS
from distop.worker.model import CompleteResult, JobEnded, JobItem, PlanResult, RunRequest, WorkerConfig, WorkerError
from distop.worker.sinks import first

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from distop.core.declaration import Declaration
    from distop.testing.simulation.effects import Effect
    from distop.testing.simulation.machine import Machine


ANSWER = 1.5
"""Seconds for which a child waits to hear that a checkpoint was saved; then it goes on, and saves the next one. (The
real one waits for a minute, in which a simulated operation is long over.)"""


class SimWorker:
    """One incarnation's worker."""

    def __init__(self, config: WorkerConfig, machine: Machine) -> None:
        self.config = config
        self._machine = machine
        self._loop = machine.loop
        self._context = contextvars.copy_context()
        self._process = PROCESS.get()
        self._child: Child | None = None
        self._slots = asyncio.Semaphore(config.slots)
        self._runs: list[Run] = []
        self._calls: list[tuple[str, asyncio.Future[str]]] = []
        self._deadline = 0.0
        self._stopped = ""

    # ------------------------------------------------------------------ life

    async def start(self) -> tuple[Declaration, ...]:
        await asyncio.sleep(self._machine.chance.uniform(0.01, 0.1))
        return self._machine.declarations

    def set_deadline(self, boottime: float) -> None:
        self._deadline = boottime
        self._loop.world_at(self._loop.now + PIPE, self._machine.guard, self, boottime)

    async def abort(self, reason: str) -> None:
        self._end_all("aborted")
        await asyncio.sleep(PIPE)

    async def stop(self, grace: float) -> None:
        self._stopped = self._stopped or "stopped"
        self._end_all("stopped")
        await asyncio.sleep(PIPE)

    async def forget(self, op: str) -> None:
        return

    def _end_all(self, reason: str) -> None:
        if self._child is not None:
            self._child.kill(reason)
            self._child = None
        for run in list(self._runs):
            run.end([JobEnded(p, "cancelled", None, reason) for p in list(run.pending)])
        for _, told in self._calls:
            if not told.done():
                told.set_result(reason)

    def killed_by_guardian(self, reason: str) -> None:
        """The guardian has killed the child (in the world's time; the daemon hears of it when it can)."""
        child, self._child = self._child, None
        if child is not None:
            child.kill(reason)

    @property
    def at_work(self) -> bool:
        """The child does something."""
        child = self._child
        return child is not None and child.alive and bool(child.doing or child.calls)

    def child_killed(self) -> None:
        """Somebody kills the child. What ran alone in it is taken for what killed it; of several nobody is, because
        the real worker runs them again one by one.
        """
        child, self._child = self._child, None
        if child is not None:
            child.guilty = child.alone()
            child.kill("exited")

    def _ready(self) -> Child:
        if self._stopped:
            raise WorkerError("transient", f"the worker is {self._stopped}")
        if self._deadline and self._machine.source.boottime() >= self._deadline:
            raise WorkerError("transient", "the session's deadline has passed")  # its guardian would kill it at once
        if self._child is None or not self._child.alive:
            self._child = self._machine.new_child()
        return self._child

    def _tell(self, callback: Callable[..., Any], *args: Any) -> None:
        """From the child to the daemon."""
        self._loop.call_later(PIPE, callback, *args, context=self._context)

    # ------------------------------------------------------------------ runs

    async def run(
        self,
        request: RunRequest,
        on_events: Callable[[list[JobEnded]], None],
        on_status: Callable[[int, str], None] | None = None,
        on_progress: Callable[[int, Any], Awaitable[bool]] | None = None,
    ) -> None:
        run = Run(request, on_events, on_progress, self._machine.effects.ends)
        self._runs.append(run)
        try:
            async with self._slots:
                await self._drive(run)
        except WorkerError as error:
            run.end([JobEnded(p, "refused", None, str(error)) for p in list(run.pending)])
        except asyncio.CancelledError:
            run.on_events = lambda _: None
            self._cancel(run, list(run.pending), keeps=True)
            raise
        finally:
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
            await first(run.done, child.died)
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
        """In the child: the jobs one after the other, or as one batch."""
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
            self._tell(run.end, [JobEnded(p, "cancelled")])
            return
        if max(request.deadline, machine.deadline_of(self)) <= machine.source.boottime():
            self._tell(run.end, [JobEnded(p, "refused", None, "the session's deadline has passed")])
            return
        began = machine.source.time()
        started = machine.step(self._process, "child: start a job")
        if not child.alive:
            return
        effect = machine.effects.begin(ref, p, item.fence, self.config.incarnation, item.attempt)
        child.doing.append(effect)
        resumable = machine.types[request.type].resumable
        if resumable:
            machine.effects.resumed(ref, p, item.progress, effect)
        started()
        if cleanup:
            await asyncio.sleep(machine.chance.uniform(0.001, 0.05))
        if request.type in machine.unable:
            await asyncio.sleep(machine.chance.uniform(0.001, 0.05))
            self._over(child, run, effect, JobEnded(p, "unable", None, behaviors.UNABLE, began, machine.source.time()))
            return
        script = behaviors.script(request.type, request.arg, p, item.attempt)
        done = int(item.progress or 0)
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
            error = "the job broke" if kind == "error" else "the answer is no"
        if kind == "success":
            result = {"fence": item.fence, "by": self.config.incarnation}
        ended = JobEnded(p, kind, result, error, began, machine.source.time())  # type: ignore[arg-type]
        self._over(child, run, effect, ended)

    def _over(self, child: Child, run: Run, effect: Effect, ended: JobEnded) -> None:
        """A job has done all that it does; now the daemon is told."""
        told = self._machine.step(self._process, "child: hand over an end")
        if not child.alive:
            return
        self._machine.effects.end(effect, ended.kind)
        child.doing.remove(effect)
        self._tell(run.end, [ended])
        told()

    @staticmethod
    async def _work(run: Run, partition: int, seconds: float) -> None:
        """So long, unless it is told to stop."""
        if run.told.is_set():
            if partition not in run.cancelled:
                await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await run.told.wait()

    async def _checkpoint(
        self, child: Child, run: Run, ref: OperationRef, partition: int, value: int, effect: Effect
    ) -> None:
        known = self._machine.step(self._process, "child: save a checkpoint")
        if not child.alive:
            return
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

        self._tell(lambda: run.save(save()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER):
                await answered
        if answered.done() and not answered.cancelled() and answered.result():
            self._machine.effects.saved(ref, partition, value, effect)
            known()

    # ----------------------------------------------------------------- cancel

    def pause(self, op: str) -> None:
        for run in list(self._runs):
            if run.request.op == op and not run.begun:
                run.end([JobEnded(p, "refused", None, "paused before it began") for p in list(run.pending)])

    def cancel(self, op: str, partitions: Collection[int] | None = None) -> None:
        for run in list(self._runs):
            if run.request.op == op:
                self._cancel(run, [p for p in run.pending if partitions is None or p in partitions])

    def release(self, op: str) -> None:
        """As :meth:`cancel`, but that what a checkpoint speaks of stays."""
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
        self._loop.world_at(self._loop.now + PIPE, self._told, run, fresh)
        if child is not None:
            self._loop.call_later(self.config.grace, self._enforce, run, child, fresh)

    @staticmethod
    def _told(run: Run, partitions: list[int]) -> None:
        run.cancelled.update(partitions)
        run.told.set()

    def _enforce(self, run: Run, child: Child, partitions: list[int]) -> None:
        if child.alive and any(p in run.pending for p in partitions):
            child.kill("stubborn")

    # ------------------------------------------------------------------ calls

    def cancel_calls(self, op: str) -> None:
        for name, told in self._calls:
            if name == op and not told.done():
                told.set_result("cancelled: it was told to stop")

    async def _call(self, op: str, what: str, work: Callable[[Child], Coroutine[Any, Any, Any]]) -> Any:
        told: asyncio.Future[str] = self._loop.create_future()
        self._calls.append((op, told))
        try:
            while True:
                child = self._ready()
                answer: asyncio.Future[Any] = self._loop.create_future()

                async def answering(child: Child = child, answer: asyncio.Future[Any] = answer) -> None:
                    await asyncio.sleep(PIPE)
                    child.calls.append(op)
                    done = self._machine.step(self._process, f"child: {what}")
                    tell: Callable[..., None] = settle
                    value: Any = None
                    try:
                        if child.alive:
                            value = await work(child)
                    except WorkerError as error:
                        tell, value = fail, error
                    done()
                    child.calls.remove(op)
                    if child.alive:
                        self._tell(tell, answer, value)

                if not self._process.dead:  # else: killed in this callback
                    child.spawn(answering())
                await first(answer, told, child.died)
                if answer.done():
                    return answer.result()
                if told.done():
                    raise WorkerError("transient", told.result())
                reason = child.died.result()
                if reason == "exited" and child.guilty == (op, -1):
                    raise WorkerError("crash", "the worker process died")
                if reason in ("deadline", "daemon-gone", "stopped", "aborted"):
                    raise WorkerError("transient", reason)
        finally:
            self._calls.remove((op, told))

    async def _trouble(self, child: Child, what: str, op: str, type_name: str, arg: Mapping[str, Any]) -> None:
        """A call takes its time; some fail."""
        chance = self._machine.chance
        await asyncio.sleep(chance.uniform(0.2, 1.8) * float(arg.get("calls", 0.2)))
        if type_name in self._machine.unable:
            raise WorkerError("unable", behaviors.UNABLE)
        trouble = float(arg.get("trouble", 0.0)) if isinstance(arg, dict) else 0.0
        luck = chance.uniform(0.0, 1.0)
        if behaviors.draw(arg["seed"], what) < trouble * 0.04:
            raise WorkerError("transient", f"{what} always fails")
        if luck < trouble * 0.05:
            child.guilty = (op, -1)
            self._machine.loop.world_at(self._machine.loop.now, child.kill, "exited")
            await asyncio.sleep(3600)
        if luck < trouble * 0.15:
            raise WorkerError("transient", f"{what} failed")

    async def plan(
        self,
        op: str,
        type: str,  # noqa: A002
        arg: Any,
        table: Mapping[str, Any],
        names: tuple[str, ...] | None,
    ) -> PlanResult:
        async def work(child: Child) -> PlanResult:
            await self._trouble(child, "planning", op, type, arg)
            # The table changes between two attempts at planning: their chunks differ, also in number.
            grown = self._machine.growth.choice((1, 1, 1_000_000))
            chunks, count = behaviors.plan(arg, names, grown)
            return PlanResult(chunks, count, f"v{grown}")

        result: PlanResult = await self._call(op, "plan", work)
        return result

    async def sweep(self, op: str, table: Any) -> None:
        """Nothing is left anywhere but in memory."""

    async def complete(
        self, op: str, type: str, arg: Any, table: Any, verdict: str, total: int, success: int, failed: int,  # noqa: A002
        fetch: Any, first: Any = None,
    ) -> CompleteResult:  # fmt: skip
        machine = self._machine
        ref = OperationRef.parse(op)
        rows: list[dict[str, Any]] = []
        start: int | None = 0
        while start is not None and start < total:
            page, start = first if first is not None and start == 0 else await fetch(start)
            rows += map(loads, page)

        async def work(child: Child) -> CompleteResult:
            machine.completed(ref, verdict, total, success, failed, rows)
            await self._trouble(child, "completion", op, type, arg)
            if arg.get("objects"):
                return CompleteResult({"jobs": success}, "the completion says no")
            follow = ({"type": "check", "table": ref.table, "arg": {"seed": arg["seed"] + 1, "partitions": 2}},)
            return CompleteResult({"jobs": success}, None, follow if arg.get("follows") else ())

        result: CompleteResult = await self._call(op, "complete", work)
        return result

    async def cleanup(
        self,
        op: str,
        type: str,  # noqa: A002
        arg: Any,
        table: Any,
        items: Sequence[JobItem],
        *,
        incarnation: str = "",
        superseded: bool = False,
    ) -> None:
        machine, ref = self._machine, OperationRef.parse(op)
        whose = incarnation or self.config.incarnation

        async def work(child: Child) -> None:
            for item in items:
                if superseded:  # it is told that others have the job, and leaves alone what is theirs
                    await asyncio.sleep(machine.chance.uniform(0.001, 0.02))
                    continue
                effect = machine.effects.begin(ref, item.ordinal, item.fence, whose, item.attempt, "cleanup")
                child.doing.append(effect)
                await asyncio.sleep(machine.chance.uniform(0.001, 0.02))
                machine.effects.end(effect, "done")
                machine.effects.cleaned(ref, item.ordinal)
                child.doing.remove(effect)

        await self._call(op, "clean up", work)
