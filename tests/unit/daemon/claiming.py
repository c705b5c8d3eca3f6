"""An executor that claims jobs and runs none, on the model of etcd."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distop.daemon.executor.executor_role import Executor
from distop.daemon.executor.job_runs import Jobs
from distop.daemon.incarnation_context import Context
from distop.daemon.rejected_writes import RejectedWrites
from distop.errors import MalformedRequest
from distop.protocol.behavior_declaration import Retry, Rules
from distop.protocol.job_transitions import alone
from distop.protocol.operation_options import Options
from distop.protocol.txn import Put, Txn
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from tests.support.world import TYPE, World
from tests.unit.support.modelclient import ModelClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from distop.daemon.executor.job_runs import Scheduler
    from distop.daemon.job_reports import Write
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import TxnOperation, TxnResult
    from distop.services.open_operation import OpenOperation
    from distop.testing import ModelStore
    from distop.worker.daemon_side.requests import JobEnded
    from tests.unit.support.clock import StandingClock


class OnlyExecutor(Context):
    """The only executor, the incarnation ``a``."""

    def __init__(self, world: World, client: ModelClient, slots: int) -> None:
        self.keys, self.client = world.keys, client  # type: ignore[assignment]
        self.cluster = world.cluster()
        self.incarnation, self.executor_id = "a", "ex-a"
        self.types = frozenset({TYPE})
        self.capability: Any = SimpleNamespace(serves=lambda *_: True, unable={})
        self.worker: Any = SimpleNamespace(stuck=(), forget=forget)
        self.log = logs.get("distop.test")
        self.reporter: Any = Submitted()
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.caught_up_at = 0
        self.lost = asyncio.get_running_loop().create_future()
        self.config = ExecutorConfig(EtcdConfig(), Path("nowhere"), slots=slots)

    async def announce_released(self) -> None:
        """Nobody else would hear it."""


async def forget(*refs: str) -> None:
    """The child has nothing to forget."""


class Submitted:
    """Collects the writes of an executor, which etcd applies when ``apply`` is called."""

    def __init__(self) -> None:
        self.writes: list[Write] = []

    def submit(self, writes: Iterable[Write]) -> None:
        self.writes += writes

    async def drain(self) -> None:
        """The writes may still be in flight."""

    def apply(self, store: ModelStore) -> None:
        while self.writes:
            write, answer = self.writes.pop(0)
            result = store.apply(alone(write))
            answer(result.revision if result.succeeded else 0)


class EndlessJobs(Jobs):
    """Jobs that start and never end."""

    def __init__(self, ctx: Context, scheduler: Scheduler) -> None:
        super().__init__(ctx, scheduler)
        self.started: list[int] = []

    async def run(self, op: OpenOperation, block: Sequence[int]) -> None:
        await self.run_in_turn([(op, block)], lambda: None)

    async def run_in_turn(
        self, jobs: Sequence[tuple[OpenOperation, Sequence[int]]], slow: Callable[[], None]
    ) -> list[JobEnded]:
        self.started += [p for _, block in jobs for p in block]
        await asyncio.Event().wait()
        return []


class Running:
    """An executor that claims jobs, none of which ends. ``poisoned``: keys whose puts etcd rejects."""

    def __init__(self, world: World, clock: StandingClock, slots: int = 400) -> None:
        self.clock = clock
        self.world, self.client = world, ModelClient()
        self.client.store, self.client.usual = world.store, self._applied
        self.poisoned: set[str] = set()
        around = OnlyExecutor(world, self.client, slots)
        self.submitted: Submitted = around.reporter
        self.executor = Executor(around, self._make_jobs)

    def _applied(self, txn: Txn) -> TxnResult:
        if not self.poisoned.isdisjoint(puts(txn.success)):
            raise MalformedRequest("etcdserver: request is too large", code="INVALID_ARGUMENT", detail="")
        return self.world.store.apply(txn)

    def _make_jobs(self, ctx: Context, scheduler: Scheduler) -> EndlessJobs:
        self._jobs = EndlessJobs(ctx, scheduler)
        return self._jobs

    @property
    def started(self) -> list[int]:
        return self._jobs.started

    @property
    def rejections(self) -> dict[str, str]:
        return dict(self.executor._ctx.rejected_writes.published)

    def sees(self) -> None:
        self.executor._ctx.cluster = self.world.cluster()
        self.executor.cluster_changed(hint=True)

    async def serve(self, ref: OperationRef) -> list[int]:
        """Run one more round, long after the last one; return the held jobs."""
        self.clock.now += 1_000.0
        self.sees()
        self.executor._assign()
        await asyncio.gather(*self.executor._rounds)
        await asyncio.sleep(0)  # the started jobs begin
        return self.held(ref)

    def wait(self, ref: OperationRef) -> float:
        return self.executor._backlog.wait(ref, self.clock.now)

    def held(self, ref: OperationRef) -> list[int]:
        claims = sorted(self.world.op(ref).claims.items())
        return [p for p, seen in claims if seen.value.incarnation == "a"]


def puts(ops: tuple[TxnOperation, ...]) -> Iterator[str]:
    for op in ops:
        if isinstance(op, Put):
            yield op.key
        elif isinstance(op, Txn):
            yield from puts(op.success)


def open_operation(jobs: int, **options: Any) -> tuple[World, OperationRef]:
    world = World(rules=Rules(retry=Retry(attempts=3), cleans=False))
    world.join("a")
    ref = world.next_ref()
    world.do(world.start(ref))
    world.do(world.elect("a"))
    world.do(world.plan(ref, jobs))
    if options:
        world.do(world.alter(ref, Options(**options)))
    return world, ref
