"""Functions that are called when an operation has ended."""

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

_at_work: set[asyncio.Task[None]] = set()
"""A loop keeps no task alive by itself."""


def check_callback(function: Any) -> None:
    """Raises InvalidArgument for what cannot be called."""
    if not callable(function):
        raise InvalidArgument(f"a callback is a function of the operation's result, not {shown(function)}")


class Callbacks:
    """Those of one operation, in one loop. ``wait`` waits for its end: once for all that are added before it."""

    def __init__(self, op: str, wait: Callable[[], Awaitable[OperationResult]]) -> None:
        self._op = op
        self._wait = wait
        self._functions: list[Callable[[OperationResult], Any]] = []
        self._waiting: asyncio.Task[None] | None = None

    def add(self, function: Callable[[OperationResult], Any]) -> None:
        """Call it once with the result, in this loop, when the operation has ended: soon, if it has by now. What it
        raises is logged; where it gives something to be awaited, that is. Raises InvalidArgument.
        """
        check_callback(function)
        self._functions.append(function)
        if self._waiting is None or self._waiting.done():
            self._waiting = self._begin(self._run())

    def remove(self, function: Callable[[OperationResult], Any]) -> int:
        """Call it no more; how often it was to be called."""
        before = len(self._functions)
        self._functions = [one for one in self._functions if one != function]
        return before - len(self._functions)

    @staticmethod
    def _begin(work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        _at_work.add(task)
        task.add_done_callback(_at_work.discard)
        return task

    async def _run(self) -> None:
        try:
            result = await self._wait()
        except (DistopError, asyncio.CancelledError) as error:
            self._functions.clear()
            why = error if isinstance(error, DistopError) else "the client was closed"
            where = {"operation": self._op}
            log.warning("callbacks are not called, since the end cannot be told: %s", why, extra=where)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        functions, self._functions = self._functions, []
        for function in functions:
            self._begin(self._call(function, result))

    async def _call(self, function: Callable[[OperationResult], Any], result: OperationResult) -> None:
        try:
            given = function(result)
            if inspect.isawaitable(given):
                await given
        except Exception as error:
            log.error("a callback failed", extra={"operation": self._op}, exc_info=error)
