"""The child of a simulated daemon: there is one at a time, begun when something is asked of it."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

from distop.worker.daemon_side.requests import WorkerConfig, WorkerError
from tests.simulator.children import PIPE, Child
from tests.simulator.virtual_loop import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.protocol.behavior_declaration import Declaration
    from tests.simulator.machine import Machine


class Keeping:
    """Keeps the child of one incarnation, on the daemon's side."""

    def __init__(self, config: WorkerConfig, machine: Machine) -> None:
        self.config = config
        self._machine = machine
        self._loop = machine.loop
        self._context = contextvars.copy_context()
        self._process = PROCESS.get()
        self._child: Child | None = None
        self._deadline = 0.0
        self._stopped = ""

    async def start(self) -> tuple[Declaration, ...]:
        await asyncio.sleep(self._machine.chance.uniform(0.01, 0.1))
        return self._machine.declarations

    trouble = ""
    """Its Spark has none."""

    def on_history(self, find: Any) -> None:
        """No behavior of a simulation asks."""

    def on_trouble(self, changed: Callable[[], None]) -> None:
        """Nothing is to be told."""

    def set_deadline(self, boottime: float) -> None:
        self._deadline = boottime
        self._loop.world_at(self._loop.now + PIPE, self._machine.guard, self, boottime)

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
