"""The coordinator of one type on one table, on the model store, for tests in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distop.daemon.coordinator import coordinator_role
from distop.daemon.coordinator.coordinator_role import Coordinator
from distop.daemon.coordinator.election import Callbacks
from distop.daemon.incarnation_context import Context
from distop.daemon.rejected_writes import RejectedWrites
from distop.protocol.jobs import JobState
from distop.protocol.records import History, OperationRef
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.store.connection_settings import EtcdConfig
from tests.support.world import TABLE, TYPE, World
from tests.unit.support.modelclient import ModelClient
from tests.unit.support.modelfeed import ModelFeed

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from distop.protocol.behavior_declaration import Rules

MAX_AT_ONE_MOMENT = 200
"""Maximum number of requests to etcd at one moment of virtual time."""


class BusyClient(ModelClient):
    """A client that sets ``busy`` if etcd gets requests without a pause."""

    busy = False
    _now = _count = 0.0

    async def request(self, what: str) -> None:
        now = asyncio.get_running_loop().time()
        self._count = self._count + 1 if now == self._now else 0
        self._now = now
        if self._count > MAX_AT_ONE_MOMENT:
            self.busy = True
            await asyncio.sleep(1.0)
        await super().request(what)


class UnitContext(Context):
    """The context of a coordinator on the incarnation ``a``."""

    def __init__(self, world: World, client: ModelClient) -> None:
        self.config = ExecutorConfig(EtcdConfig(), Path("nowhere"))
        self.client = client  # type: ignore[assignment]
        self.keys = world.keys
        self.log = logs.get("distop.test")
        self.incarnation, self.executor_id = "a", "ex-a"
        self.cluster = world.cluster()
        self.rejected_writes = RejectedWrites(self.log, lambda: None)
        self.types, self.reports_only = frozenset({TYPE}), frozenset()
        self.arguments = {}
        self.lost = asyncio.get_running_loop().create_future()
        self.capability = SimpleNamespace(serves=lambda *_: True)  # type: ignore[assignment]

    async def prune_history(self, table: str) -> None:
        pass


class Coordinating:
    """An elected coordinator, and the failures that it reports.

    ``elsewhere``: how often it asked to give up its election in favour of another node; ``handed_over``: how often
    after a failed call of the child.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rules: Rules, feed: type[ModelFeed] = ModelFeed) -> None:
        self.feeds: dict[str, ModelFeed] = {}

        def made(*args: Any, **options: Any) -> ModelFeed:
            one = self.feeds[options["name"]] = feed(*args, **options)
            return one

        monkeypatch.setattr(coordinator_role, "Feed", made)
        self.client = BusyClient()
        self.world = World(store=self.client.store, rules=rules)
        self.world.join("a")
        self.world.do(self.world.elect("a"))
        self.ctx = UnitContext(self.world, self.client)
        self.failures: list[BaseException] = []
        self.elsewhere = self.handed_over = 0
        fence = self.world.store.mod(self.world.keys.coordinator(TABLE, TYPE))
        callbacks = Callbacks(self.failures.append, self._hand_over, self._elsewhere)
        self.role = Coordinator(self.ctx, TABLE, TYPE, fence, callbacks)

    def _hand_over(self) -> None:
        self.handed_over += 1

    def _elsewhere(self) -> bool:
        self.elsewhere += 1
        return True

    def started(self) -> OperationRef:
        ref = self.world.next_ref()
        self.world.do(self.world.start(ref))
        return ref

    def open(self, jobs: int) -> OperationRef:
        """An operation with this many jobs, which another coordinator planned."""
        ref = self.started()
        self.world.do(self.world.plan(ref, jobs))
        return ref

    async def until(self, reached: Callable[[], bool], within: float = 60.0) -> None:
        async with asyncio.timeout(within):
            while not reached():  # noqa: ASYNC110  # it is virtual time
                await asyncio.sleep(0.1)

    async def ended(self, ref: OperationRef) -> History:
        """Its record, once it has ended."""
        key = self.world.keys.history(ref)
        await self.until(lambda: self.client.store.get(key) is not None)
        kv = self.client.store.get(key)
        assert kv is not None
        return History.decode(kv.value)

    def all_succeed(self, ref: OperationRef, jobs: int) -> None:
        self.world.do(self.world.claim(ref, "a", range(jobs)))
        for p in range(jobs):
            self.world.do(self.world.report(ref, p, JobState.SUCCESS))

    def nodes_changed(self) -> None:
        self.ctx.cluster = self.world.cluster()
        self.role.cluster_changed()
