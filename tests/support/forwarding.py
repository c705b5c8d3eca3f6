"""A server in front of etcd that passes on what is asked and what is answered, request by request."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

import grpc
import grpc.aio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType
    from typing import Any, Self

_PASSED_ON = ("hasleader", "token")
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]


class Forwarder:
    """Runs in a thread of its own. What stands between is for those who derive from it."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.endpoint = ""

    def asked(self, method: str, request: bytes) -> None:
        """A request, or the next one of a stream, has arrived, and is passed on when this returns."""

    def answers(self, method: str, answer: bytes) -> bool:
        """Whether an answer is passed on."""
        return True

    def refused(self, method: str, details: str) -> None:
        """An error has come in place of an answer, and is passed on when this returns."""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_Everything(self._pass),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def _stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    async def _pass(self, method: str, asked: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        metadata = [(name, value) for name, value in context.invocation_metadata() if name in _PASSED_ON]
        call = self._channel.stream_stream(method)(self._listened(method, asked), metadata=metadata)
        try:
            async for answer in call:
                if self.answers(method, answer):
                    yield answer
        except grpc.aio.AioRpcError as error:
            self.refused(method, error.details() or "")
            await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()

    async def _listened(self, method: str, asked: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for request in asked:
            self.asked(method, request)
            yield request


class _Everything(grpc.GenericRpcHandler):
    """Every method, as streams of bytes: what a call with one request and one answer looks like, too."""

    def __init__(self, passing: Any) -> None:
        self._passing = passing

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._passing, details.method))
