"""Starts through a service: those of one type on one table that are made during a call share the next one."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from distop.client.service_errors import error_of_start
from distop.errors import OutcomeUnknown
from distop.store.group_commit import GroupCommit
from distop.v1 import operations_pb2

if TYPE_CHECKING:
    from distop.client.service_channel import ServiceChannel

log = logging.getLogger("distop.client")

AT_ONCE = 2
"""Calls under way for one type and table: while the service answers one, it reads the other."""
MOST_STARTS = 100
"""Maximum starts of a call."""
MOST_BYTES = 4 << 20
"""Bytes of starts after which no other one is added to a call."""


class _RemoteStart:
    """A start whose caller waits for its answer."""

    def __init__(self, message: operations_pb2.StartRequest) -> None:
        self.message = message
        self.answer: asyncio.Future[operations_pb2.StartResponse] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _RemoteStartGroup:
    """The starts of the next call."""

    def __init__(self) -> None:
        self.items: list[_RemoteStart] = []
        self._bytes = 0

    def add(self, item: _RemoteStart) -> bool:
        self.items.append(item)
        self._bytes += item.message.ByteSize()
        return True

    @property
    def full(self) -> bool:
        return len(self.items) >= MOST_STARTS or self._bytes >= MOST_BYTES


class RemoteStarts:
    """The starts of one client. A start that is made alone is a call of its own."""

    def __init__(self, channel: ServiceChannel) -> None:
        self._channel = channel
        self._queues: dict[tuple[str, str], GroupCommit[_RemoteStart]] = {}
        """By type and table; only those with starts under way."""

    async def start(self, message: operations_pb2.StartRequest) -> operations_pb2.StartResponse:
        """Raises what the service raises. If the caller is cancelled before the start is sent, it is not made."""
        subject = message.type, message.table
        queue = self._queues.get(subject)
        if queue is None:
            queue = self._queues[subject] = GroupCommit(
                self._send,
                _RemoteStartGroup,
                lambda error: log.error("Unexpected error in starts through the service", exc_info=error),
                most=AT_ONCE,
                abandoned=lambda one: one.answer.done(),
            )
        one = _RemoteStart(message)
        queue.add([one])
        try:
            return await one.answer
        except asyncio.CancelledError:
            queue.interrupt()
            raise
        finally:
            if not queue.busy and self._queues.get(subject) is queue:
                del self._queues[subject]

    async def _send(self, group: list[_RemoteStart]) -> tuple[()]:
        try:
            if len(group) == 1:
                answer = await self._channel.call("Operations/Start", group[0].message, writes=True)
                if not group[0].answer.done():
                    group[0].answer.set_result(answer)
            else:
                await self._send_batch(group)
        except asyncio.CancelledError:
            for one in group:
                one.answer.cancel()
            raise
        except Exception as error:
            for one in group:
                one.fail(error)
        return ()

    async def _send_batch(self, group: list[_RemoteStart]) -> None:
        message = operations_pb2.BatchStartRequest(requests=[one.message for one in group])
        try:
            results: Any = (await self._channel.call("Operations/BatchStart", message, writes=True)).results
        except OutcomeUnknown as error:
            for one in group:
                known = one.message.options.request_id or one.message.new_request_id
                one.fail(OutcomeUnknown(f"{error} with request_id={known!r}"))
            return
        for one, result in zip(group, results, strict=True):
            if one.answer.done():
                continue
            if result.HasField("started"):
                one.answer.set_result(result.started)
            else:
                one.fail(error_of_start(result.error))
