"""An event loop in virtual time that several simulated processes share.

When no callback is ready, time jumps to the next timer. Each callback belongs to the process in whose context it was
scheduled. Between any two callbacks a process can be killed (its callbacks are dropped) or frozen (they are kept until
it thaws, and its timers fire late). Within a process callbacks run in asyncio's order, on which production code may
rely; between processes the seed decides.

The same seed gives the same run: there are no threads (``asyncio.to_thread`` runs inline) and no real clock, and tasks
and futures hash by number, so that sets of them are iterated in the same order.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from tests.simulator.unexpected_errors import expected, with_traceback

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Iterator

T = TypeVar("T")

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("distop-process")
"""The simulated process to which the current code belongs."""
MOST_AT_ONE_MOMENT = 20_000
"""Maximum number of callbacks at one moment. Tests need some thousands; a loop without a pause has no end."""


class Life(Enum):
    """The state of a process."""

    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


class Process:
    """One simulated process, with its ready callbacks."""

    __slots__ = ("at", "do", "label", "life", "listed", "name", "ran", "ready", "tasks")

    def __init__(self, name: str) -> None:
        self.name = name
        self.label = name
        """The sender of its requests in timelines: for a daemon its incarnation."""
        self.life = Life.RUNNING
        self.ready: deque[_Handle] = deque()
        self.listed = False
        """Whether it is in the loop's list of runnable processes."""
        self.ran = 0
        """Number of callbacks that have run."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.at = 0
        self.do: Callable[[], None] | None = None
        """The strike that is due once ``at`` callbacks have run."""

    def __repr__(self) -> str:
        return f"<{self.name}, {self.life.value}>"

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD

    def after(self, callbacks: int, do: Callable[[], None]) -> None:
        """Plan a strike after this number of further callbacks."""
        self.at, self.do = self.ran + max(callbacks, 1), do

    def cancel_strike(self) -> None:
        """Cancel the planned strike."""
        self.do = None

    def strike(self) -> None:
        """Carry out the planned strike."""
        do, self.do = self.do, None
        if do is not None:
            do()


class _Handle:
    """A scheduled callback, with the interface of ``asyncio.Handle``."""

    __slots__ = ("args", "callback", "context", "process")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context, process: Process
    ) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args = args
        self.context = context
        self.process = process

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class SimFuture(asyncio.Future[T]):
    """A future that hashes by its creation number."""

    def __init__(self, *, loop: VirtualLoop) -> None:
        super().__init__(loop=loop)
        self._number = next(loop.numbers)

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[T]):
    """A task that hashes by its creation number."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, name: str | None, context: contextvars.Context | None) -> None:
        self._number = next(loop.numbers)
        super().__init__(coro, loop=loop, name=name or f"t{self._number}", context=context)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs the callbacks of all processes. ``chance`` decides which process runs next.

    ``world`` is the process of the network and the servers. It is never frozen.
    """

    def __init__(self, chance: random.Random) -> None:
        self.now = 0.0
        self.world = Process("world")
        self.numbers = itertools.count()
        self.errors: list[str] = []
        """Exceptions that callbacks raised."""
        self._chance = chance
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = itertools.count()
        self._runnable: list[Process] = []
        self._over = False
        self._processes: list[Process] = [self.world]

    # ------------------------------------------------------------- processes

    def spawn(self, process: Process, coro: Coroutine[Any, Any, T], context: contextvars.Context) -> asyncio.Task[T]:
        """Run a coroutine as part of a process, in a context of its own."""
        if process not in self._processes:
            self._processes.append(process)
        context.run(PROCESS.set, process)
        task: asyncio.Task[T] = SimTask(coro, loop=self, name=None, context=context)
        process.tasks.append(task)
        return task

    def freeze(self, process: Process) -> None:
        """Run nothing of the process until :meth:`thaw`; due callbacks are kept."""
        if process.life is Life.RUNNING:
            process.life = Life.FROZEN
            self._unlist(process)

    def thaw(self, process: Process) -> None:
        """Continue a frozen process, first with its overdue callbacks."""
        if process.life is Life.FROZEN:
            process.life = Life.RUNNING
            if process.ready:
                self._list(process)

    def kill(self, process: Process) -> None:
        """End the process: it never runs again."""
        process.life = Life.DEAD
        process.ready.clear()
        self._unlist(process)

    def _list(self, process: Process) -> None:
        process.listed = True
        self._runnable.append(process)

    def _unlist(self, process: Process) -> None:
        if process.listed:
            process.listed = False
            self._runnable.remove(process)

    # -------------------------------------------------------------- callbacks

    def _schedule(self, handle: _Handle) -> None:
        process = handle.process
        if process.life is Life.DEAD:
            return
        process.ready.append(handle)
        if not process.listed and process.life is Life.RUNNING:
            self._list(process)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle(callback, args, context, process := context.get(PROCESS) or self.world)
        if not self._over and process.life is not Life.DEAD:
            process.ready.append(handle)
            if not process.listed and process.life is Life.RUNNING:
                self._list(process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle(callback, args, context, context.get(PROCESS) or self.world)
        if not self._over:
            heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def world_at(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        """:meth:`call_at` for the ``world`` process."""
        handle = _Handle(callback, args, _WORLD, self.world)
        heapq.heappush(self._timers, (when, next(self._order), handle))

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self.now

    # -------------------------------------------------------------------- run

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run until ``until()`` is true (checked before each jump of time), or until the time ``limit``.

        Returns whether it became true. Raises RuntimeError if the callbacks of one moment do not end.
        """
        asyncio._set_running_loop(self)
        runnable, timers, chance = self._runnable, self._timers, self._chance
        moment, left = self.now, MOST_AT_ONE_MOMENT
        try:
            while True:
                while runnable:
                    n = int(chance.random() * len(runnable)) if len(runnable) > 1 else 0
                    self._run_one(runnable[n])
                    left -= 1
                    if not left:
                        raise RuntimeError(f"{MOST_AT_ONE_MOMENT:,} callbacks ran at one moment of virtual time")
                if until():
                    return True
                while timers and timers[0][2].callback is None:
                    heapq.heappop(timers)
                if not timers or timers[0][0] > limit:
                    self.now = limit
                    return until()
                when = timers[0][0]
                if when > self.now:
                    self.now = when
                if self.now > moment:
                    moment, left = self.now, MOST_AT_ONE_MOMENT
                while timers and timers[0][0] <= when:
                    handle = heapq.heappop(timers)[2]
                    if handle.callback is not None:
                        self._schedule(handle)
        finally:
            asyncio._set_running_loop(None)

    def run_until_complete(self, future: Any) -> Any:
        """Run a coroutine or future in the caller's context to its end."""
        task = asyncio.ensure_future(future, loop=self)
        if not self.run(task.done, float("inf")):
            raise RuntimeError("the future is not done, but nothing is left to run")
        return task.result()

    def _run_one(self, process: Process) -> None:
        ready = process.ready
        handle = ready.popleft()
        if handle.callback is not None:
            try:
                handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.errors.append(f"{process.name}: {with_traceback(error)}")
            process.ran += 1
            if process.do is not None and process.ran >= process.at:
                process.strike()
        if not ready:
            self._unlist(process)

    def end(self) -> None:
        """Drop all callbacks, and close the running coroutines.

        Their ``finally`` blocks run here without effect, and not whenever the garbage collector closes them.
        """
        self._over = True
        self._timers.clear()
        self._runnable.clear()
        asyncio._set_running_loop(self)
        try:
            # Closing a coroutine may start others, which are closed too.
            while left := [process for process in self._processes if process.tasks]:
                for process in left:
                    process.ready.clear()
                    tasks, process.tasks = process.tasks, []
                    for task in tasks:
                        if not task.done():
                            task._log_destroy_pending = False  # type: ignore[attr-defined]
                            _close(task.get_coro())
                        elif not task.cancelled():
                            task.exception()
        finally:
            asyncio._set_running_loop(None)

    # ---------------------------------------------- asyncio's loop interface

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = SimTask(coro, loop=self, name=name, context=context)
        tasks = PROCESS.get(self.world).tasks
        tasks.append(task)
        # asyncio holds tasks by weak references. Running tasks are kept here, so that none is garbage-collected.
        if len(tasks) > 256 and not len(tasks) % 64:
            tasks[:] = [one for one in tasks if not one.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = self.create_future()
        process = PROCESS.get(self.world)
        try:
            result = func(*args)
        except Exception as error:
            future.set_exception(error)
        else:
            if process.life is Life.RUNNING:
                future.set_result(result)
            else:  # struck while its thread worked: the result arrives after a thaw, if any
                self.call_soon(future.set_result, result)
        return future

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        return []

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("there are no sockets in a simulation")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._over and not (isinstance(error, BaseException) and expected(error)):
            self.errors.append(f"{context.get('message')}: {with_traceback(error) if error is not None else ''}")

    def lost_task_errors(self) -> Iterator[str]:
        """Unexpected errors of tasks whose result was never retrieved, so that no log reports them.

        Killed processes are left out: the code that would have retrieved the result was killed too.
        """
        for process in self._processes:
            for task in () if process.dead else process.tasks:
                if task.done() and not task.cancelled() and task._log_traceback:
                    error = task.exception()
                    if error is not None and not expected(error):
                        name = getattr(task.get_coro(), "__qualname__", "?")
                        text = f"the error of the task {name} was never retrieved"
                        yield f"{process.name}: {text}\n{with_traceback(error)}"

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._over

    def close(self) -> None:
        self.end()


def _close(coro: Any) -> None:
    for _ in range(20):  # a coroutine has to be closed once for each `await` in a `finally` block
        try:
            coro.close()
            return
        except BaseException:
            continue


_WORLD = contextvars.Context()
