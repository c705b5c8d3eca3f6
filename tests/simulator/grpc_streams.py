"""Streams with the interface of ``grpc.aio.StreamStreamCall``: watches and lease renewals."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc.aio

from distop.store._proto import rpc_pb2 as rpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulator.etcd_watches import Watch
    from tests.simulator.network import Network
    from tests.simulator.server_links import Link

_FINISHED = "RPC already finished."


class SimStream:
    """Both ends of one stream. Messages in one direction arrive in order."""

    def __init__(self, network: Network, link: Link, path: str, token: str = "") -> None:
        self._network = network
        self._loop = network.loop
        self._link = link
        self._path = path
        self._token = token
        self._kind = path[14 : path.rindex("/")]
        self._received: deque[Any] = deque()
        self._reader: asyncio.Future[Any] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._cancelled = False
        self._sent_at = 0.0
        self._back_at = 0.0
        self._watches: list[Watch] = []
        self._keys = {self._kind}
        """Names by which a block selects this stream's answers: its kind, and the keys of all its watches."""
        self._closed = False
        """The server has closed it."""
        self._admitted = False
        """The server has admitted it."""
        link.streams.append(self)

    # ----------------------------------------------------------------- client

    async def write(self, message: Any) -> None:
        """Send a message. Raises InvalidStateError once the stream has ended, AioRpcError if it cannot be opened."""
        from tests.simulator.network import NOT_CONNECTED, REFUSED

        if self._ended:
            raise asyncio.InvalidStateError(_FINISHED)
        link = self._link
        if link.refuses or not link.member.up:
            raise self._unopened(REFUSED)
        if link.lost and not await self._connected():
            raise self._unopened(NOT_CONNECTED)
        if self._ended:
            raise asyncio.InvalidStateError(_FINISHED)
        copy = type(message)()
        copy.CopyFrom(message)
        label = link.process.label
        delay = self._network.sending(link.process, self._path, copy)
        if link.process.dead:
            return
        self._to_server(lambda: self._arrived(copy, label), delay)

    async def _connected(self) -> bool:
        known: asyncio.Future[bool] = self._loop.create_future()
        self._link.connect(lambda there: None if known.done() else known.set_result(there))
        return await known

    def _unopened(self, detail: str) -> BaseException:
        from tests.simulator.network import failure

        error = failure("UNAVAILABLE", detail)
        self._finish(error)
        return error

    def _to_server(self, arrive: Callable[[], None], delay: float = 0.0) -> None:
        if self._kind in self._link.requests:
            self._link.stuck.append(lambda: self._to_server(arrive))
            return
        self._sent_at = max(self._sent_at, self._loop.now + self._network.delay() + delay)
        self._loop.world_at(self._sent_at, arrive)

    async def read(self) -> Any:
        """The next message; ``grpc.aio.EOF`` at a clean end. Raises AioRpcError, or CancelledError after cancel()."""
        if self._received:
            return self._received.popleft()
        if not self._ended:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
            if self._received:
                return self._received.popleft()
        if self._cancelled:
            raise asyncio.CancelledError
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF  # type: ignore[attr-defined]

    def cancel(self) -> bool:
        """End the stream on the client's side; a pending read raises CancelledError."""
        if self._ended:
            return False
        self._cancelled = True
        self._finish(None)
        self._loop.world_at(self._loop.now + self._network.delay(), self._close)
        return True

    def _finish(self, error: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._error = error
        if self in self._link.streams:
            self._link.streams.remove(self)
        if self._cancelled:
            self._received.clear()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # ---------------------------------------------------------------- network

    def broken(self, error: BaseException) -> None:
        """Break the connection: both ends learn of it, and messages in flight are lost."""
        self._finish(error)
        self._close()

    def fail(self, error: BaseException | None) -> None:
        """End the stream on the server's side, with an error or (None) cleanly, after all messages sent before.

        Does nothing without a connection: the server does not know the stream.
        """
        if self._link.lost:
            return
        self._close()
        self._to_client(lambda: self._finish(error))

    def _to_client(self, deliver: Callable[[], None]) -> None:
        if not self._keys.isdisjoint(self._link.answers):
            self._link.stuck.append(lambda: self._to_client(deliver))
            return
        late = self._link.slow.get(self._kind, 0.0) + self._network.delay()
        self._back_at = max(self._back_at, self._loop.now + late)
        self._loop.world_at(self._back_at, deliver)

    def _push(self, message: Any) -> None:
        self._to_client(lambda: self._receive(message))

    def _receive(self, message: Any) -> None:
        if self._ended:
            return
        self._received.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # ----------------------------------------------------------------- server

    def _close(self) -> None:
        self._closed = True
        for watch in self._watches:
            self._network.etcd.watching.close(watch)
        self._watches.clear()

    def _arrived(self, message: Any, sender: str) -> None:
        from tests.simulator.network import failure

        etcd, member = self._network.etcd, self._link.member
        if self._closed or not member.up:
            return
        if not self._admitted and etcd.quorum.knows_no_leader(member):
            self.fail(failure("UNAVAILABLE", "etcdserver: no leader"))
            return
        if not self._admitted and (refused := etcd.users.refusal(self._path, self._token)) is not None:
            self.fail(failure(*refused))
            return
        self._admitted = True
        if not member.led and isinstance(message, rpc.LeaseKeepAliveRequest):
            member.waiting.append(lambda: self._arrived(message, sender))
            return
        self._network.applied(self._link.process, self._path, message)
        if isinstance(message, rpc.LeaseKeepAliveRequest):
            lease = message.ID

            def answer(ttl: int) -> None:
                if not self._closed:
                    self._push(rpc.LeaseKeepAliveResponse(header=etcd.header(member), ID=lease, TTL=ttl))

            if (error := self._network.renewal_error()) is not None:
                self.fail(error)
            elif (refused := etcd.renewal_refusal(lease, self._token)) is not None:
                self.fail(failure(*refused))
            else:
                etcd.renew(lease, answer)
        elif message.HasField("create_request"):
            watch = etcd.watching.create(member, message.create_request, self._push)
            if watch is not None:
                self._watches.append(watch)
                self._keys.add(watch.key)
        elif message.HasField("progress_request"):
            etcd.watching.progress(member, self._watches, self._push)
