"""The child of a simulated daemon: a process of its own, which goes on while the daemon is frozen.

The guardian is part of the world: it kills the child when the deadline passes or the daemon dies, a little late, as the
real one does.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

from distop.clock import source
from tests.simulator.virtual_loop import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from distop.worker.daemon_side.requests import JobEnded, JobItem, RunRequest
    from tests.simulator.job_effects import Ends
    from tests.simulator.machine import Machine

PIPE = 0.0005
"""Seconds that a message between daemon and child takes."""
GUARDIAN_LATE = 0.2
"""Seconds by which the guardian may be late (it looks so often)."""


class Child:
    """One child process: what runs in it, and whether it has died (``died``: why)."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.process = Process(f"{machine.name}/child-{number}")
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.guilty: tuple[str, int] | None = None
        """The job that killed it."""
        self.alive = True
        self.doing: list[Any] = []
        """Effects under way."""
        self.calls: list[str] = []
        """The operations of the calls under way."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something in it."""
        context = contextvars.Context()
        context.run(source.set, self.machine.source)
        self.machine.loop.spawn(self.process, work, context)

    def alone(self) -> tuple[str, int] | None:
        """The job (or with -1 the call) that nothing else runs beside: if the child dies now, it is to blame."""
        jobs = [(effect.op, effect.partition) for effect in self.doing if effect.kind == "job"]
        found = [*jobs, *((op, -1) for op in self.calls)]
        return found[0] if len(found) == 1 else None

    def kill(self, reason: str) -> None:
        """All of its processes are dead when this returns; the daemon hears of it."""
        if not self.alive:
            return
        self.alive = False
        self.machine.loop.kill(self.process)
        for effect in list(self.doing):
            self.machine.effects.end(effect, f"killed ({reason})")
        self.doing.clear()
        # What it told before arrives before.
        self.machine.loop.world_at(self.machine.loop.now + PIPE, settle, self.died, reason)


class Run:
    """One request: which of its jobs have not ended."""

    def __init__(
        self, request: RunRequest, on_events: Callable[[list[JobEnded]], None], on_progress: Any, ends: Ends
    ) -> None:
        self.ends = ends
        self.request = request
        self.on_events = on_events
        self.on_progress = on_progress
        self.pending: dict[int, JobItem] = {item.ordinal: item for item in request.items}
        self.cancelled: set[int] = set()
        self.given_up: set[int] = set()
        """Those of them that nobody goes on with: what they left is cleaned up."""
        self.told = asyncio.Event()
        self.begun = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.saving: set[asyncio.Task[None]] = set()
        """Checkpoints that the daemon is asked to save."""

    def save(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.saving.add(task)
        task.add_done_callback(self.saving.discard)

    def end(self, events: Sequence[JobEnded]) -> None:
        fresh = []
        for event in events:
            item = self.pending.pop(event.partition, None)
            if item is not None:
                self.ends[self.request.op, event.partition, item.fence] = event.kind
                fresh.append(event)
        if fresh:
            self.on_events(fresh)
        if not self.pending and not self.done.done():
            self.done.set_result(None)


def settle(future: asyncio.Future[Any], value: Any) -> None:
    """The first to say what became of it is heard."""
    if not future.done():
        future.set_result(value)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """As :func:`settle`, where it broke."""
    if not future.done():
        future.set_exception(error)
