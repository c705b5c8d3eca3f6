"""Calls into a simulated child other than jobs: planning, verification, completion, cleanup."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, describe
from distop.protocol.json_codec import loads
from distop.protocol.records import OperationRef
from distop.worker.daemon_side.requests import (
    CompleteRequest,
    CompleteResult,
    JobItem,
    PlanResult,
    RemovedStages,
    Verified,
    WorkerConfig,
    WorkerError,
)
from distop.worker.daemon_side.result_handlers import wait_first
from tests.simulator import simulated_behaviors
from tests.simulator.children import PIPE, Child, fail, settle
from tests.simulator.policies import SMALL_FILES
from tests.simulator.sim_child_keeper import ChildKeeper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from distop.worker.daemon_side.result_handlers import Page
    from tests.simulator.machine import Machine


async def _page(what: str, reading: Awaitable[Page]) -> Page:
    """A page for the child. An error of distop fails the call, as in the real worker; any other error is a bug."""
    try:
        return await reading
    except DistopError as error:
        raise WorkerError("transient", f"cannot read the {what}: {describe(error)}") from error


class ChildCalls(ChildKeeper):
    """The calls of one incarnation into its child."""

    def __init__(self, config: WorkerConfig, machine: Machine) -> None:
        super().__init__(config, machine)
        self._calls: list[tuple[str, asyncio.Future[str]]] = []

    def _end_calls(self, reason: str) -> None:
        for _, cancelled in self._calls:
            settle(cancelled, reason)

    def cancel_calls(self, op: str) -> None:
        for name, cancelled in self._calls:
            if name == op and not cancelled.done():
                cancelled.set_result("cancelled on request")

    async def _call(self, op: str, what: str, work: Callable[[Child], Coroutine[Any, Any, Any]]) -> Any:
        cancelled: asyncio.Future[str] = self._loop.create_future()
        self._calls.append((op, cancelled))
        try:
            while True:
                child = self._ready()
                answer: asyncio.Future[Any] = self._loop.create_future()

                async def answering(child: Child = child, answer: asyncio.Future[Any] = answer) -> None:
                    await asyncio.sleep(PIPE)
                    self._machine.check_served(OperationRef.parse(op), self.config.incarnation, what)
                    child.calls.append(op)
                    done = self._machine.step(self._process, f"child: {what}")
                    resolve: Callable[..., None] = settle
                    value: Any = None
                    try:
                        if child.alive:
                            value = await work(child)
                    except WorkerError as error:
                        resolve, value = fail, error
                    done()
                    child.calls.remove(op)
                    if child.alive:
                        self._to_daemon(resolve, answer, value)

                if not self._process.dead:  # it may have been killed in this callback
                    child.spawn(answering())
                await wait_first(answer, cancelled, child.died)
                if answer.done():
                    return answer.result()
                if cancelled.done():
                    raise WorkerError("transient", cancelled.result())
                reason = child.died.result()
                if reason == "exited" and child.guilty == (op, -1):
                    raise WorkerError("crash", "the worker process died")
                if reason in ("deadline", "daemon-gone", "stopped", "aborted"):
                    raise WorkerError("transient", reason)
        finally:
            self._calls.remove((op, cancelled))

    async def _delay_or_fail(self, child: Child, what: str, op: str, type_name: str, arg: Mapping[str, Any]) -> None:
        """Take as long as a call does; fail some calls, or kill the child."""
        chance = self._machine.chance
        await asyncio.sleep(chance.uniform(0.2, 1.8) * float(arg.get("calls", 0.2)))
        if (inability := self._machine.inability(type_name)) is not None:
            await asyncio.sleep(simulated_behaviors.hang_time(arg, inability))
            raise WorkerError(inability, simulated_behaviors.UNABLE)
        trouble = float(arg.get("trouble", 0.0)) if isinstance(arg, dict) else 0.0
        luck = chance.uniform(0.0, 1.0)
        if simulated_behaviors.draw(arg["seed"], what) < trouble * 0.04:
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
        find_table: Any = None,
        list_tables: Any = None,
    ) -> PlanResult:
        async def work(child: Child) -> PlanResult:
            await self._delay_or_fail(child, "planning", op, type, arg)
            # The table may change between two planning attempts: their chunks then differ, also in number.
            grown = self._machine.growth.choice((1, 1, 1_000_000))
            chunks, count = simulated_behaviors.plan(arg, names, grown)
            removes = self._machine.types[type].removes_table
            return PlanResult(chunks, count, f"v{grown}", removes_table=removes)

        result: PlanResult = await self._call(op, "plan", work)
        return result

    async def verify(self, op: str, external_id: str, verify: str, limit: float) -> Verified:
        """Ask a verifier. Its name is its answer: ``yes``, ``no`` or ``nothing``."""

        async def work(child: Child) -> Verified:
            chance = self._machine.chance
            await asyncio.sleep(chance.uniform(0.01, 0.4))
            if chance.uniform(0.0, 1.0) < 0.05:
                child.guilty = (op, -1)
                self._machine.loop.world_at(self._machine.loop.now, child.kill, "exited")
                await asyncio.sleep(3600)
            return Verified({"yes": True, "no": False}.get(verify), "" if verify != "nothing" else "timeout")

        result: Verified = await self._call(op, "verify", work)
        return result

    async def statistics(self, table: Mapping[str, Any], names: Sequence[str], small_bytes: int) -> Mapping[str, Any]:
        """The version of a table, and the statistics of that version (``policies.SMALL_FILES``)."""
        machine, name = self._machine, table["name"]

        async def work(child: Child) -> Mapping[str, Any]:
            chance = machine.chance
            await asyncio.sleep(chance.uniform(0.01, 0.3))
            number = machine.versions.number(name)
            version = machine.versions.version(name)
            await asyncio.sleep(chance.uniform(0.01, 0.3))
            luck = chance.uniform(0.0, 1.0)
            if luck < 0.05:
                raise WorkerError("transient", "the table cannot be read")
            return {"version": version, "statistics": {one: float(SMALL_FILES * number) for one in names}}

        result: Mapping[str, Any] = await self._call(str(OperationRef(name, "statistics", "", 1)), "statistics", work)
        return result

    async def sweep(self, op: str, table: Any, *, plans: bool, stages: bool, earlier: bool) -> RemovedStages:
        """Do nothing: simulated jobs write no files."""
        return RemovedStages()

    async def find_files(self, ops: Any, table: Any) -> list[str]:
        """Return nothing: no simulated result is written to a file."""
        return []

    async def remove_files(self, ops: Any, table: Any, staging: Any) -> RemovedStages:
        """Do nothing: simulated jobs write no files."""
        return RemovedStages()

    async def complete(self, request: CompleteRequest) -> CompleteResult:
        machine, success, arg = self._machine, request.success, request.arg
        ref = OperationRef.parse(request.op)
        rows: list[dict[str, Any]] = []
        start: int | None = 0
        while start is not None and start < request.total:
            known = request.first if start == 0 else None
            page, start = known if known is not None else await _page("outcomes", request.fetch(start))
            rows += map(loads, page)

        chunk: int | None = 0 if request.plan is not None and request.plan.chunks else None
        while chunk is not None and request.plan is not None:
            _, chunk = await _page("plan", request.plan.page(chunk))

        async def work(child: Child) -> CompleteResult:
            machine.completed(ref, request.verdict, request.total, success, request.failed, rows)
            await self._delay_or_fail(child, "completion", request.op, request.type, arg)
            if arg.get("objects"):
                return CompleteResult({"jobs": success}, "the completion code rejects the result")
            follow = ({"type": "check", "table": ref.table, "arg": {"seed": arg["seed"] + 1, "partitions": 2}},)
            return CompleteResult({"jobs": success}, None, follow if arg.get("follows") else ())

        result: CompleteResult = await self._call(request.op, "complete", work)
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
                if superseded:  # other executors have the job: their output stays
                    await asyncio.sleep(machine.chance.uniform(0.001, 0.02))
                    continue
                effect = machine.effects.begin(ref, item.ordinal, item.fence, whose, item.attempt, "cleanup")
                child.doing.append(effect)
                pause = machine.chance.uniform(0.001, 0.02)
                # One cleanup in ten takes seconds, so that a former holder may come back meanwhile.
                await asyncio.sleep(pause if pause < 0.018 else 150 * pause)
                machine.effects.end(effect, "done")
                machine.effects.cleaned(ref, item.ordinal)
                child.doing.remove(effect)

        try:
            await self._call(op, "clean up", work)
        except WorkerError:
            for item in items:
                machine.effects.drop_output(ref, item.ordinal)
            raise
