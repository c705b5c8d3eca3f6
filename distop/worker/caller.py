"""Calls from the daemon to the child: sent, answered, cancelled; a child that dies is an answer too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.worker import protocol
from distop.worker.model import Death, WorkerError
from distop.worker.sinks import CallSink, first

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distop.worker.gate import Gate
    from distop.worker.keeper import Keeper
    from distop.worker.model import JobItem
    from distop.worker.sinks import Fetch

    CallMessage = protocol.PlanMessage | protocol.CompleteMessage | protocol.CleanupMessage


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
        message: CallMessage,
        items: Sequence[JobItem] = (),
        *,
        fetch: Fetch | None = None,
        gate: Gate | None = None,
    ) -> tuple[Any, list[bytes]]:
        """A call's result and chunks. Raises WorkerError. With a gate (which the caller has not entered), a child
        that died with others in it is no answer: the call is repeated with nobody else there."""
        if gate is None:
            got = await self._answer(message, items, fetch)
        else:
            async with gate.shared():
                got = await self._answer(message, items, fetch)
            if isinstance(got, Death) and (got.runs or len(got.calls) > 1):
                async with gate.exclusive():
                    got = await self._answer(message, items, fetch)
        if isinstance(got, Death):
            raise WorkerError("crash", str(got))
        return got

    async def _answer(
        self, message: CallMessage, items: Sequence[JobItem], fetch: Fetch | None
    ) -> tuple[Any, list[bytes]] | Death:
        """The answer, or how the child crashed. A call whose child was killed for another is sent again."""
        while True:
            child = await self._keeper.ready()
            call = CallSink(message["op"], child, fetch)
            call.number = next(self._numbers)
            child.calls[call.number] = call
            self._calls.add(call)
            try:
                message["call"] = call.number
                if message["t"] == "cleanup":
                    for frame in protocol.encode_paged(message, (item.row() for item in items)):
                        child.send_frame(frame)
                else:
                    child.send(message)
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
                return death
            if death.final or call.cancelled:
                raise WorkerError("transient", str(death))
