"""An event loop in virtual time that several simulated processes share.

Nothing here waits: when no callback is ready, time jumps to the next timer. Each callback belongs to the process in
whose context it was scheduled, so a process can be killed (its callbacks are dropped), frozen (they are kept until it
goes on, its timers fire late) or told to end, between any two of them. Within a process callbacks run in asyncio's
order, on which production code may rely; between processes the seed decides.

The same seed gives the same run: there are no threads (``asyncio.to_thread`` runs inline) and no clock, and tasks and
futures hash by number, so that sets of them are walked in the same order each time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from tests.simulator.unexpected_errors import expected, told

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Iterator

T = TypeVar("T")

PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("distop-process")
"""The simulated process that the current code is of."""


class Life(Enum):
    """What may be done with a process's callbacks."""

    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


class Process:
    """One simulated process: its callbacks that are ready, and whether it may run them."""

    __slots__ = ("at", "do", "label", "life", "listed", "name", "ran", "ready", "tasks")

    def __init__(self, name: str) -> None:
        self.name = name
        self.label = name
        """What stands in stories as the sender of its requests: for a daemon its incarnation."""
        self.life = Life.RUNNING
        self.ready: deque[_Handle] = deque()
        self.listed = False
        """It is among those that the loop may run."""
        self.ran = 0
        """Callbacks that it has run."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.at = 0
        self.do: Callable[[], None] | None = None
        """What is done to it once it has run ``at`` callbacks."""

    def __repr__(self) -> str:
        return f"<{self.name}, {self.life.value}>"

    @property
    def dead(self) -> bool:
        return self.life is Life.DEAD

    def after(self, callbacks: int, do: Callable[[], None]) -> None:
        """Do something to it after so many more of its callbacks, before the next one."""
        self.at, self.do = self.ran + max(callbacks, 1), do

    def let_be(self) -> None:
        """Nothing is done to it any more."""
        self.do = None

    def strike(self) -> None:
        """Do what is to be done to it now."""
        do, self.do = self.do, None
        if do is not None:
            do()


class _Handle:
    """A callback that is due. What asyncio needs of its own handles."""

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
    """A future that hashes by its number."""

    def __init__(self, *, loop: VirtualLoop) -> None:
        super().__init__(loop=loop)
        self._number = next(loop.numbers)

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[T]):
    """A task that hashes by its number."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, name: str | None, context: contextvars.Context | None) -> None:
        self._number = next(loop.numbers)
        super().__init__(coro, loop=loop, name=name or f"t{self._number}", context=context)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks until :meth:`run` is told to stop. ``chance`` decides between processes.

    ``world`` is the process of what has no process: the network and the servers. It is never frozen.
    """

    def __init__(self, chance: random.Random) -> None:
        self.now = 0.0
        self.world = Process("world")
        self.numbers = itertools.count()
        self.troubles: list[str] = []
        """Exceptions that came out of callbacks: nobody else would hear of them."""
        self._chance = chance
        self._timers: list[tuple[float, int, _Handle]] = []
        self._order = itertools.count()
        self._runnable: list[Process] = []
        self._over = False
        self._processes: list[Process] = [self.world]

    # ------------------------------------------------------------- processes

    def spawn(self, process: Process, coro: Coroutine[Any, Any, T], context: contextvars.Context) -> asyncio.Task[T]:
        """Begin to run something as a process, in a context that is its own."""
        if process not in self._processes:
            self._processes.append(process)
        context.run(PROCESS.set, process)
        task: asyncio.Task[T] = SimTask(coro, loop=self, name=None, context=context)
        process.tasks.append(task)
        return task

    def freeze(self, process: Process) -> None:
        """It runs nothing until :meth:`thaw`; what becomes due waits."""
        if process.life is Life.RUNNING:
            process.life = Life.FROZEN
            self._unlist(process)

    def thaw(self, process: Process) -> None:
        """It goes on, first with what became due meanwhile."""
        if process.life is Life.FROZEN:
            process.life = Life.RUNNING
            if process.ready:
                self._list(process)

    def kill(self, process: Process) -> None:
        """It never runs anything again."""
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
        """As :meth:`call_at`, for the world."""
        handle = _Handle(callback, args, _WORLD, self.world)
        heapq.heappush(self._timers, (when, next(self._order), handle))

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        return self.now

    # -------------------------------------------------------------------- run

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run until ``until()`` holds (asked whenever time would jump), or the virtual time passes ``limit``; whether
        it held.
        """
        asyncio._set_running_loop(self)
        runnable, timers, chance = self._runnable, self._timers, self._chance
        try:
            while True:
                while runnable:
                    n = int(chance.random() * len(runnable)) if len(runnable) > 1 else 0
                    self._run_one(runnable[n])
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
                while timers and timers[0][0] <= when:
                    handle = heapq.heappop(timers)[2]
                    if handle.callback is not None:
                        self._schedule(handle)
        finally:
            asyncio._set_running_loop(None)

    def run_until_complete(self, future: Any) -> Any:
        """Run a coroutine or future of the caller's context to its end."""
        task = asyncio.ensure_future(future, loop=self)
        if not self.run(task.done, float("inf")):
            raise RuntimeError("nothing is left to run, and it has not ended")
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
                self.troubles.append(f"{process.name}: {told(error)}")
            process.ran += 1
            if process.do is not None and process.ran >= process.at:
                process.strike()
        if not ready:
            self._unlist(process)

    def end(self) -> None:
        """Drop everything. Coroutines that were under way are closed here, where what they do in ``finally`` reaches
        nobody, and not whenever the interpreter comes to collect them.
        """
        self._over = True
        self._timers.clear()
        self._runnable.clear()
        asyncio._set_running_loop(self)
        try:
            # Closing some may begin others, which end here as well.
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

    # ------------------------------------------------- what asyncio asks of us

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = SimTask(coro, loop=self, name=name, context=context)
        tasks = PROCESS.get(self.world).tasks
        tasks.append(task)
        # asyncio keeps tasks weakly; here all that are under way are kept, so that none ends by being collected.
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
            else:  # it was struck while its thread worked: it goes on once it is let, if ever
                self.call_soon(future.set_result, result)
        return future

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        return []

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("there are no sockets in a simulation")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._over and not (isinstance(error, BaseException) and expected(error)):
            self.troubles.append(f"{context.get('message')}: {told(error) if error is not None else ''}")

    def unnoticed(self) -> Iterator[str]:
        """Tasks that ended by an error that is not expected and that nobody has asked for: what they were for is not
        done, and no log tells. (In a process that was killed those who would have asked were killed too.)
        """
        for process in self._processes:
            for task in () if process.dead else process.tasks:
                if task.done() and not task.cancelled() and task._log_traceback:
                    error = task.exception()
                    if error is not None and not expected(error):
                        name = getattr(task.get_coro(), "__qualname__", "?")
                        yield f"{process.name}: nobody retrieved the error of the task {name}\n{told(error)}"

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._over

    def close(self) -> None:
        self.end()


def _close(coro: Any) -> None:
    for _ in range(20):  # one that awaits in `finally` has to be closed once for each of those
        try:
            coro.close()
            return
        except BaseException:
            continue


_WORLD = contextvars.Context()
