"""A TCP proxy on the loopback that can drop or hold back data and close connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Self


class Mode(Enum):
    """What happens to data."""

    PASS = "forward both directions"
    DROP_ANSWERS = "forward requests, drop answers"
    HOLD_REQUESTS = "hold requests until the mode changes, forward answers"
    BLACK_HOLE = "drop all data, close nothing"


@dataclass(eq=False)
class _Pair:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    held: list[bytes] = field(default_factory=list)
    dead: bool = False


class TcpProxy:
    """A proxy for one port. ``requested`` and ``answered``: the number of bytes that arrived.

    ``trigger``: bytes, and the mode from the first request on that contains them; ``triggered``: whether that happened.
    """

    def __init__(self, target: int, trigger: tuple[bytes, Mode] | None = None) -> None:
        self._target = target
        self._trigger = trigger
        self.triggered = False
        self._mode = Mode.PASS
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.requested = 0
        self.answered = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set(self, mode: Mode) -> None:
        """Change the mode. Closes all connections if the previous mode dropped data."""
        lossy = self._mode in (Mode.DROP_ANSWERS, Mode.BLACK_HOLE)
        self._mode = mode
        for pair in self._pairs:
            if mode is not Mode.HOLD_REQUESTS:
                for data in pair.held:
                    pair.server.write(data)
                pair.held.clear()
        self._changed.set()
        self._changed = asyncio.Event()
        if lossy:
            self.cut()

    def drop_connections_silently(self) -> None:
        """Drop all data of existing connections from now on without closing them; new connections work.

        This happens if a load balancer forgets connections or a member's address moves.
        """
        for pair in self._pairs:
            pair.dead = True

    def cut(self) -> None:
        """Close all connections."""
        for pair in list(self._pairs):
            pair.client.close()
            pair.server.close()

    def cut_clients(self) -> None:
        """Close the connections of clients only: held data can still arrive at the server."""
        for pair in list(self._pairs):
            pair.client.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._mode is Mode.BLACK_HOLE:
            await self._changed.wait()
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        pair = _Pair(writer, server)
        self._pairs.add(pair)
        for task in (
            asyncio.ensure_future(self._requests(reader, pair)),
            asyncio.ensure_future(self._answers(answers, pair)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _requests(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.requested += len(data)
                if self._trigger is not None and self._trigger[0] in data:
                    self.triggered = True
                    self._mode = self._trigger[1]
                if self._mode is Mode.HOLD_REQUESTS:
                    pair.held.append(data)
                elif self._mode is not Mode.BLACK_HOLE and not pair.dead:
                    pair.server.write(data)
        while self._mode is Mode.HOLD_REQUESTS:
            await self._changed.wait()
        self._forget(pair, pair.server)

    async def _answers(self, reader: asyncio.StreamReader, pair: _Pair) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.answered += len(data)
                if self._mode in (Mode.PASS, Mode.HOLD_REQUESTS) and not pair.dead:
                    pair.client.write(data)
        self._forget(pair, pair.client)

    def _forget(self, pair: _Pair, writer: asyncio.StreamWriter) -> None:
        writer.close()
        if pair.client.is_closing() and pair.server.is_closing():
            self._pairs.discard(pair)


class ThreadedProxy:
    """A TcpProxy in its own thread, for tests without an event loop."""

    def __init__(self, target: int, trigger: tuple[bytes, Mode] | None = None) -> None:
        self._proxy = TcpProxy(target, trigger)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.__aenter__(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.__aexit__(None, None, None), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def endpoint(self) -> str:
        return self._proxy.endpoint

    @property
    def requested(self) -> int:
        return self._proxy.requested

    @property
    def triggered(self) -> bool:
        return self._proxy.triggered

    def set(self, mode: Mode) -> None:
        """Change the mode; returns once it is in effect."""
        self._do(self._proxy.set, mode)

    def drop_connections_silently(self) -> None:
        """Drop all data of existing connections without closing them; new connections work."""
        self._do(self._proxy.drop_connections_silently)

    def cut(self) -> None:
        """Close all connections."""
        self._do(self._proxy.cut)

    def _do(self, what: Callable[..., Any], *arguments: Any) -> None:
        async def work() -> None:
            what(*arguments)

        asyncio.run_coroutine_threadsafe(work(), self._loop).result(10)
