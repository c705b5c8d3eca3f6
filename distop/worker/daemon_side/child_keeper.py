"""Keeps one child alive: starts it, replaces it when it dies, stops it."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from distop.worker import child_messages
from distop.worker.daemon_side.child_launch import ChildProcess
from distop.worker.daemon_side.requests import WorkerConfig, WorkerError, no_history
from distop.worker.daemon_side.result_handlers import wait_first
from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from distop.protocol.behavior_declaration import Declaration
    from distop.runtime.logs import Log
    from distop.worker.daemon_side.requests import FindHistory

START_TRIES = 3
"""Consecutive failed starts of a child after which waiting requests fail."""
BACKOFF = (0.2, 30.0)
"""Seconds of back-off after a failed start, first and longest; doubled for each failure."""
LOG_SECONDS = 60.0
"""Seconds between two checks of the size of the child's log."""


class ChildKeeper:
    """Keeps one child at a time."""

    def __init__(self, config: WorkerConfig, log: Log) -> None:
        self.config = config
        self.declarations: tuple[Declaration, ...] = ()
        self.skipped: dict[str, str] = {}
        self.deaths = 0
        self.stopping = False
        self._log = log
        self._deadline = 0.0
        self._changed = asyncio.Event()
        self._child: ChildProcess | None = None
        self._starting = asyncio.Lock()
        self._failed_starts = 0
        self.find_history: FindHistory = no_history
        """Finds history records for the child."""
        self.on_trouble: Callable[[], None] = lambda: None
        """Called when a problem of the child's Spark session starts or ends."""
        self._watch: asyncio.Task[None] | None = None
        self._launch: asyncio.Future[None] | None = None
        """The current start of a child."""
        self._aborting = 0
        self._aborts = 0

    @property
    def child(self) -> ChildProcess | None:
        """The living child, which may still be starting; None if there is none."""
        return None if self._child is None or self._child.died.done() else self._child

    @property
    def deadline(self) -> float:
        return self._deadline

    def set_deadline(self, boottime: float) -> None:
        self._deadline = boottime
        self._changed.set()
        if self._child is not None:
            self._child.set_deadline(boottime)

    @asynccontextmanager
    async def aborting(self) -> AsyncIterator[None]:
        """Kill the child; during the block there is no child and none is started.

        Afterwards, all that waited for a child get a WorkerError.
        """
        self._aborts += 1
        self._aborting += 1
        self._changed.set()
        try:
            await self._kill("aborted")
            yield
        finally:
            self._aborting -= 1
            self._changed.set()

    async def stop(self, grace: float) -> None:
        """Let the child exit; kill it after ``grace`` seconds. No other child is started."""
        self.stopping = True
        self._changed.set()
        if (child := self.child) is not None and self._launch is None:
            child.send(child_messages.StopMessage(t="stop"))
            await asyncio.wait({child.died}, timeout=grace)
        await self._kill("stopped")
        if self._launch is not None:
            await asyncio.wait({self._launch})
        if self._watch is not None:
            self._watch.cancel()

    async def _kill(self, reason: str) -> None:
        if (child := self.child) is not None:
            child.kill(reason)
            await asyncio.shield(child.died)

    async def ready(self, *, call: bool = False) -> ChildProcess:
        """The child, started if there is none.

        A stuck child takes no more jobs, and takes calls only as long as it has jobs. Raises WorkerError if no child
        can be started, after an abort during the wait, and after :meth:`stop`.
        """
        aborts = self._aborts
        while True:
            child = await self._alive(aborts)
            if not child.stuck or (call and child.runs):
                return child
            await wait_first(child.died)

    async def _alive(self, aborts: int) -> ChildProcess:
        async with self._starting:
            while True:
                if self.stopping:
                    raise WorkerError("transient", "the worker is stopping")
                self._changed.clear()
                if self._aborting:
                    await self._changed.wait()
                    continue
                if self._aborts != aborts:
                    raise WorkerError("transient", "the worker was stopped: aborted")
                if self._launch is None:
                    if (child := self.child) is not None:
                        if not child.hung_up:
                            return child
                        # New work would not start in it, and would be blamed for its death: wait until it is dead.
                        await self._wait_or_change(child.died)
                        continue
                    if self._deadline and self._deadline <= boottime():
                        # The guardian would kill a child at once: wait for a new session.
                        await self._changed.wait()
                        continue
                    if await self._back_off(aborts):
                        continue
                    self._launch = asyncio.ensure_future(self._start())
                    # Waiters get the error. If there are none, asyncio must not log it as never retrieved.
                    self._launch.add_done_callback(lambda done: None if done.cancelled() else done.exception())
                try:
                    # Shielded: the start continues for others if this waiter is cancelled.
                    await asyncio.shield(self._launch)
                except WorkerError:
                    if not self._aborting and self._aborts == aborts:
                        raise

    async def _wait_or_change(self, awaited: asyncio.Future[Any]) -> None:
        """Wait for a future, or for a change of the deadline, an abort or a stop."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await wait_first(awaited, changed)
        finally:
            changed.cancel()

    async def _back_off(self, aborts: int) -> bool:
        """Wait after failed starts. Returns whether the worker was stopped or aborted meanwhile."""
        first, most = BACKOFF
        if not self._failed_starts:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(most, first * 2.0 ** min(self._failed_starts - 1, 20))):
                while not self.stopping and self._aborts == aborts:
                    await self._changed.wait()
                    self._changed.clear()
        return self.stopping or self._aborts != aborts

    async def _start(self) -> None:
        child = ChildProcess(self.config, self._log)
        child.on_trouble = self.on_trouble
        child.find_history = self.find_history
        # Set before the start, so that deadlines, abort and stop reach the child.
        self._child = child
        try:
            await child.start(self._deadline)
        except WorkerError as error:
            self._child = None
            if self.stopping or self._aborting:
                raise
            self._failed_starts += 1
            self._log.error("%s", error)
            if not self.declarations or self._failed_starts >= START_TRIES:
                raise
            return
        finally:
            self._launch = None
        self._failed_starts = 0
        self.declarations = child.declarations
        for name, why in child.skipped.items():
            if self.skipped.get(name) != why:
                self._log.warning("Behavior %s is not available on this node: %s", name, why)
        self.skipped = child.skipped
        self._watch = asyncio.ensure_future(self._watch_child(child))

    async def _watch_child(self, child: ChildProcess) -> None:
        """Bound a child's log, log its death, and start the next child before a request needs it."""
        while not child.died.done():
            await asyncio.wait({child.died}, timeout=LOG_SECONDS)
            child.truncate_log()
        death = child.died.result()
        if self.stopping:
            return
        self.deaths += 1
        self._log.warning("%s", death.with_log())
        self.on_trouble()
        if self._aborting or death.reason == "aborted":
            return  # the next request starts a child
        with contextlib.suppress(WorkerError):
            # _start has logged the error; the next request starts a child.
            await self.ready()
