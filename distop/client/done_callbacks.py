"""Callbacks for the end of an operation."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError, InvalidArgument
from distop.protocol.texts import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distop.services.operation_results import OperationResult

log = logging.getLogger("distop.client")

_running: set[asyncio.Task[None]] = set()
"""References to running tasks, because an event loop keeps only weak ones."""


def check_callback(function: Any) -> None:
    """Raises InvalidArgument for a value that is not callable."""
    if not callable(function):
        raise InvalidArgument(f"a callback must be a function of the operation's result, not {shown(function)}")


class DoneCallbacks:
    """The callbacks of one operation in one event loop. ``wait`` waits for its end, once for all callbacks."""

    def __init__(self, op: str, wait: Callable[[], Awaitable[OperationResult]]) -> None:
        self._op = op
        self._wait = wait
        self._functions: list[Callable[[OperationResult], Any]] = []
        self._waiting: asyncio.Task[None] | None = None

    def add(self, function: Callable[[OperationResult], Any]) -> None:
        """Call a function once with the result, in this loop, when the operation has ended.

        Its errors are logged; if it returns an awaitable, that is awaited. Raises InvalidArgument.
        """
        check_callback(function)
        self._functions.append(function)
        if self._waiting is None or self._waiting.done():
            self._waiting = self._start(self._run())

    def remove(self, function: Callable[[OperationResult], Any]) -> int:
        """Remove a callback; returns how many times it had been added."""
        before = len(self._functions)
        self._functions = [one for one in self._functions if one != function]
        return before - len(self._functions)

    @staticmethod
    def _start(work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        _running.add(task)
        task.add_done_callback(_running.discard)
        return task

    async def _run(self) -> None:
        try:
            result = await self._wait()
        except (DistopError, asyncio.CancelledError) as error:
            self._functions.clear()
            why = error if isinstance(error, DistopError) else "the client was closed"
            where = {"operation": self._op}
            log.warning("Cannot wait for the end of the operation; not calling its callbacks: %s", why, extra=where)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        functions, self._functions = self._functions, []
        for function in functions:
            self._start(self._call(function, result))

    async def _call(self, function: Callable[[OperationResult], Any], result: OperationResult) -> None:
        try:
            given = function(result)
            if inspect.isawaitable(given):
                await given
        except Exception as error:
            log.error("Error in a callback", extra={"operation": self._op}, exc_info=error)
