"""Keeps a child: starts it, replaces it when it dies, stops it."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from distop.worker import child_messages
from distop.worker.daemon_side.child_launch import Child
from distop.worker.daemon_side.requests import WorkerConfig, WorkerError, no_history
from distop.worker.daemon_side.result_handlers import first
from distop.worker.guardian import boottime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from distop.protocol.behavior_declaration import Declaration
    from distop.runtime.logs import Log
    from distop.worker.daemon_side.requests import FindHistory

START_TRIES = 3
"""Children that fail to start in a row before what waits for one is told so."""
BACKOFF = (0.2, 30.0)
"""Seconds before a child is started again after one failed to start: doubling from the first to the second."""
LOG_SECONDS = 60.0
"""How often the size of the child's log is looked at."""


class Keeper:
    """One child at a time."""

    def __init__(self, config: WorkerConfig, log: Log) -> None:
        self.config = config
        self.declarations: tuple[Declaration, ...] = ()
        self.skipped: dict[str, str] = {}
        self.deaths = 0
        self.stopping = False
        self._log = log
        self._deadline = 0.0
        self._moved = asyncio.Event()
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._failed_starts = 0
        self.find_history: FindHistory = no_history
        """What the child is told where it asks for the history record of an operation."""
        self.on_trouble: Callable[[], None] = lambda: None
        """Called when something is wrong with the child's Spark session, or no longer."""
        self._watch: asyncio.Task[None] | None = None
        self._launch: asyncio.Future[None] | None = None
        """The start that goes on."""
        self._aborting = 0
        self._aborts = 0

    @property
    def child(self) -> Child | None:
        """The child that is alive now, perhaps still starting."""
        return None if self._child is None or self._child.died.done() else self._child

    @property
    def deadline(self) -> float:
        return self._deadline

    def set_deadline(self, boottime: float) -> None:
        self._deadline = boottime
        self._moved.set()
        if self._child is not None:
            self._child.set_deadline(boottime)

    @asynccontextmanager
    async def aborting(self) -> AsyncIterator[None]:
        """Kill the child; inside, it is dead and no other one is started. Who waited for a child gets a WorkerError
        after that."""
        self._aborts += 1
        self._aborting += 1
        self._moved.set()
        try:
            await self._kill("aborted")
            yield
        finally:
            self._aborting -= 1
            self._moved.set()

    async def stop(self, grace: float) -> None:
        """Let the child end, kill it after ``grace`` seconds. No other one is started."""
        self.stopping = True
        self._moved.set()
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

    async def ready(self, *, call: bool = False) -> Child:
        """The child, started if there is none. One in which something is stuck takes no more jobs, and calls only as
        long as it has jobs. Raises WorkerError when it cannot be started, or was aborted meanwhile, or after stop."""
        aborts = self._aborts
        while True:
            child = await self._alive(aborts)
            if not child.stuck or (call and child.runs):
                return child
            await first(child.died)

    async def _alive(self, aborts: int) -> Child:
        async with self._starting:
            while True:
                if self.stopping:
                    raise WorkerError("transient", "the worker is being stopped")
                self._moved.clear()
                if self._aborting:
                    await self._moved.wait()
                    continue
                if self._aborts != aborts:
                    raise WorkerError("transient", "the worker was stopped: aborted")
                if self._launch is None:
                    if (child := self.child) is not None:
                        if not child.hung_up:
                            return child
                        # What is sent to it does not begin, and must not be blamed for its end: wait for that.
                        await self._unless_moved(child.died)
                        continue
                    if self._deadline and self._deadline <= boottime():
                        # Its guardian would kill it at once: wait for a session.
                        await self._moved.wait()
                        continue
                    if await self._back_off(aborts):
                        continue
                    self._launch = asyncio.ensure_future(self._start())
                    # Who waits gets its error. Where nobody does any more it is no error that was overlooked.
                    self._launch.add_done_callback(lambda done: None if done.cancelled() else done.exception())
                try:
                    # The start is nobody's own: who gives up waiting leaves it to the next.
                    await asyncio.shield(self._launch)
                except WorkerError:
                    if not self._aborting and self._aborts == aborts:
                        raise

    async def _unless_moved(self, awaited: asyncio.Future[Any]) -> None:
        """Wait for it, or for what has to be looked at before it."""
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            await first(awaited, moved)
        finally:
            moved.cancel()

    async def _back_off(self, aborts: int) -> bool:
        """Wait as long as starts that failed demand; True if the worker was stopped or aborted meanwhile."""
        first, most = BACKOFF
        if not self._failed_starts:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(most, first * 2.0 ** min(self._failed_starts - 1, 20))):
                while not self.stopping and self._aborts == aborts:
                    await self._moved.wait()
                    self._moved.clear()
        return self.stopping or self._aborts != aborts

    async def _start(self) -> None:
        child = Child(self.config, self._log)
        child.on_trouble = self.on_trouble
        child.find_history = self.find_history
        # Known before it has started, so that deadlines, abort and stop reach it.
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
                self._log.warning("the behavior %s is not available here: %s", name, why)
        self.skipped = child.skipped
        self._watch = asyncio.ensure_future(self._see_off(child))

    async def _see_off(self, child: Child) -> None:
        """Watch over a child; log its end, and have the next one ready before it is asked for."""
        while not child.died.done():
            await asyncio.wait({child.died}, timeout=LOG_SECONDS)
            child.bound_log()
        death = child.died.result()
        if self.stopping:
            return
        self.deaths += 1
        self._log.warning("%s", death.with_log())
        self.on_trouble()
        if self._aborting or death.reason == "aborted":
            return  # the next request starts one, if there is any
        with contextlib.suppress(WorkerError):
            # Logged there; who needs a child next tries again.
            await self.ready()
