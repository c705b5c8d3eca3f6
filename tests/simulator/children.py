"""The child of a simulated daemon: a separate process, which continues to run while the daemon is frozen.

The guardian runs in the ``world`` process. It kills the child soon after the deadline, or after the daemon's death, as
the real one does.
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
"""Maximum delay of the guardian in seconds: its poll interval."""


class Child:
    """One child process. ``died`` resolves to the reason of its death."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.process = Process(f"{machine.name}/child-{number}")
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.guilty: tuple[str, int] | None = None
        """The job (or with -1 the call) that killed it: (operation, partition)."""
        self.alive = True
        self.doing: list[Any] = []
        """Side effects in progress."""
        self.calls: list[str] = []
        """The operations of the calls in progress."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the child."""
        context = contextvars.Context()
        context.run(source.set, self.machine.source)
        self.machine.loop.spawn(self.process, work, context)

    def alone(self) -> tuple[str, int] | None:
        """The only job (or with -1 the only call) that runs: it is blamed if the child dies now."""
        jobs = [(effect.op, effect.partition) for effect in self.doing if effect.kind == "job"]
        found = [*jobs, *((op, -1) for op in self.calls)]
        return found[0] if len(found) == 1 else None

    def kill(self, reason: str) -> None:
        """Kill the child; the daemon learns of it a little later."""
        if not self.alive:
            return
        self.alive = False
        self.machine.loop.kill(self.process)
        for effect in list(self.doing):
            self.machine.effects.end(effect, f"killed ({reason})")
        self.doing.clear()
        # Messages that it sent before arrive before.
        self.machine.loop.world_at(self.machine.loop.now + PIPE, settle, self.died, reason)


class Run:
    """A run request of the daemon, with its jobs that have not ended."""

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
        """Cancelled jobs that nobody resumes: their output is cleaned up."""
        self.cancel_event = asyncio.Event()
        self.begun = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.saving: set[asyncio.Task[None]] = set()
        """Checkpoints that the daemon is saving."""

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
    """Set the result of a future, unless it has one."""
    if not future.done():
        future.set_result(value)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Set the exception of a future, unless it is done."""
    if not future.done():
        future.set_exception(error)
