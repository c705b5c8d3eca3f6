"""A gRPC server that forwards all requests and answers between clients and etcd, for tests that intercept them."""

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

_FORWARDED_METADATA = ("hasleader", "token")
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
]


class Forwarder:
    """A forwarding server in its own thread. Subclasses override the callbacks."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.endpoint = ""

    def on_request(self, method: str, request: bytes) -> None:
        """Called with each request, also each one of a stream, before it is forwarded."""

    def forwards_answer(self, method: str, answer: bytes) -> bool:
        """Whether an answer is forwarded."""
        return True

    def on_error(self, method: str, details: str) -> None:
        """Called with each error of etcd before it is forwarded."""

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
        self._server.add_generic_rpc_handlers((_AllMethods(self._forward),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def _stop(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    async def _forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        metadata = [(name, value) for name, value in context.invocation_metadata() if name in _FORWARDED_METADATA]
        call = self._channel.stream_stream(method)(self._observed(method, requests), metadata=metadata)
        try:
            async for answer in call:
                if self.forwards_answer(method, answer):
                    yield answer
        except grpc.aio.AioRpcError as error:
            self.on_error(method, error.details() or "")
            await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()

    async def _observed(self, method: str, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for request in requests:
            self.on_request(method, request)
            yield request


class _AllMethods(grpc.GenericRpcHandler):
    """Handles all methods as streams of bytes; unary calls are streams with one message."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, details.method))
