"""Keeps the child of a simulated daemon: at most one at a time, started on demand."""

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


class ChildKeeper:
    """The child of one incarnation, on the daemon's side."""

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
    """The problem of Spark; never any here."""

    def on_history(self, find: Any) -> None:
        """Ignored: no simulated behavior reads history."""

    def on_trouble(self, changed: Callable[[], None]) -> None:
        """Ignored: there is never a problem."""

    def show_calls(self, statuses: Any) -> None:
        """Ignored: no simulated planning or completion has a status."""

    def set_deadline(self, boottime: float) -> None:
        self._deadline = boottime
        self._loop.world_at(self._loop.now + PIPE, self._machine.guard, self, boottime)

    def killed_by_guardian(self, reason: str) -> None:
        """Kill the child at once, as its guardian does; the daemon learns of it later."""
        child, self._child = self._child, None
        if child is not None:
            child.kill(reason)

    @property
    def at_work(self) -> bool:
        """Whether the child works."""
        child = self._child
        return child is not None and child.alive and bool(child.doing or child.calls)

    def child_killed(self) -> None:
        """Kill the child.

        A job that ran alone is blamed. Of several jobs none is, because the real worker runs them again one by one.
        """
        child, self._child = self._child, None
        if child is not None:
            child.guilty = child.alone()
            child.kill("exited")

    def _ready(self) -> Child:
        if self._stopped:
            raise WorkerError("transient", f"the worker is {self._stopped}")
        if self._deadline and self._machine.source.boottime() >= self._deadline:
            raise WorkerError("transient", "the session's deadline has passed")  # the guardian would kill the child
        if self._child is None or not self._child.alive:
            self._child = self._machine.new_child()
        return self._child

    def _to_daemon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Send a message from the child to the daemon."""
        self._loop.call_later(PIPE, callback, *args, context=self._context)
