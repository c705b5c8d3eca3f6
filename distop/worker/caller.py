"""Calls from the daemon to the child: sent, answered, cancelled; a child that dies is an answer too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.worker import protocol
from distop.worker.model import WorkerError
from distop.worker.sinks import CallSink, first

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from distop.worker.keeper import Keeper


class Caller:
    """The calls that go on. Whether others may be in the child meanwhile is the caller's concern."""

    def __init__(self, keeper: Keeper, numbers: Iterator[int]) -> None:
        self._keeper = keeper
        self._numbers = numbers
        self._calls: set[CallSink] = set()

    def cancel(self, op: str) -> list[CallSink]:
        """Tell the operation's calls to stop; those that were told just now."""
        told = [call for call in self._calls if call.op == op and not call.cancelled]
        for call in told:
            call.cancelled = True
            call.child.send(protocol.CancelMessage(t="cancel", call=call.number))
        return told

    async def enforce(self, call: CallSink) -> None:
        """Kill the child of a call that was told to stop and does not."""
        await first(call.result, call.child.died, timeout=self._keeper.config.grace)
        if not call.result.done():
            call.child.kill("stubborn")

    async def call(
        self,
        messages: Sequence[protocol.ToChild],
        fetch: Callable[[int], Awaitable[tuple[list[dict[str, Any]], int | None]]] | None = None,
    ) -> tuple[Any, list[bytes]]:
        """A call's result and chunks. One that only shared a child that was killed for another is sent again."""
        while True:
            child = await self._keeper.ready()
            call = CallSink(messages[0]["op"], child, fetch)  # type: ignore[typeddict-item]
            call.number = next(self._numbers)
            child.calls[call.number] = call
            self._calls.add(call)
            try:
                for message in messages:
                    child.send({**message, "call": call.number})  # type: ignore[arg-type]
                await first(call.result, child.died)
                if call.result.done():
                    return call.result.result(), call.chunks
            except asyncio.CancelledError:
                child.send(protocol.CancelMessage(t="cancel", call=call.number))
                raise
            finally:
                self._calls.discard(call)
                child.calls.pop(call.number, None)
            death = child.died.result()
            if death.crashed:
                raise WorkerError("crash", str(death))
            if death.final or call.cancelled:
                raise WorkerError("transient", str(death))
