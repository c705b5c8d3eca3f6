"""The network between simulated processes and servers, with the interface of ``grpc.aio``.

A *link* connects one process with one server (``server_links``). It can refuse connections, block messages (in one
direction, or of some kinds of requests), or break. A message in flight is delivered even if its sender has timed out: a
late request is still applied (T9).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.simulator.grpc_streams import SimStream
from tests.simulator.server_links import PATIENCE, Block, Link
from tests.simulator.sim_etcd import NoLeader, StatusError
from tests.simulator.virtual_loop import PROCESS

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tests.simulator.quorum import Member
    from tests.simulator.sim_etcd import SimEtcd
    from tests.simulator.virtual_loop import Process, VirtualLoop

REFUSED = "failed to connect to all addresses; last error: UNKNOWN: Failed to connect to remote host: refused"
NOT_CONNECTED = (
    "failed to connect to all addresses; last error: UNKNOWN: connection attempt timed out before receiving SETTINGS "
    "frame"
)
CLOSED = "Socket closed"


def failure(code: str, detail: str) -> grpc.aio.AioRpcError:
    """The error that grpc.aio raises."""
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode[code], empty, empty, detail, "")


class RequestFault:
    """The fault of one request.

    ``before``: extra seconds until the request arrives, None: never. ``after``: extra seconds until the answer arrives.
    ``silent``: the answer is lost. ``error``: (code, detail) that the client gets at once, whatever happens to the
    request. ``refusal``: (code, detail) with which the server refuses the request.
    """

    __slots__ = ("after", "before", "error", "name", "refusal", "silent")

    def __init__(
        self,
        name: str,
        *,
        before: float | None = 0.0,
        after: float = 0.0,
        silent: bool = False,
        error: tuple[str, str] | None = None,
        refusal: tuple[str, str] | None = None,
    ) -> None:
        self.name = name
        self.before = before
        self.after = after
        self.silent = silent
        self.error = error
        self.refusal = refusal


class Network:
    """All links. ``request_fault(process, path)`` returns the fault of a request, or None."""

    def __init__(self, loop: VirtualLoop, etcd: SimEtcd, chance: random.Random) -> None:
        self.loop = loop
        self.etcd = etcd
        self.chance = chance
        self.latency = (0.0003, 0.003)
        self.request_fault: Callable[[Process, str], RequestFault | None] = lambda process, path: None
        self.requests = 0
        self.sending: Callable[[Process, str, Any], float] = lambda process, path, asked: 0.0
        """Called before a request is sent. Returns the seconds by which it is delayed."""
        self.applied: Callable[[Process, str, Any], None] = lambda process, path, asked: None
        """Called after a request was applied, before it is answered."""
        self.deposed = False
        """Renewals are answered by a former leader, with an error."""
        self.aliases: dict[str, str] = {}
        """Further addresses of members, each with its own links."""
        self._links: dict[tuple[str, str], Link] = {}
        self._numbers = 0
        etcd.quorum.silent = self.end_streams

    def channel(self, address: str, credentials: Any = None) -> Any:
        """A channel of the current process (``distop.store.transport.channels``)."""
        return SimChannel(self, self.link(PROCESS.get(), address))

    def link(self, process: Process, address: str) -> Link:
        """The link from a process to a server."""
        key = (process.name, address)
        link = self._links.get(key)
        if link is None or link.process is not process:
            member = self.etcd.members[self.aliases.get(address, address)]
            link = self._links[key] = Link(self.loop, process, member, address)
        return link

    def links(self, process: Process | None = None, member: Member | None = None) -> list[Link]:
        """The links of a process, to a member, or all."""
        return [
            link
            for link in self._links.values()
            if (process is None or link.process is process) and (member is None or link.member is member)
        ]

    def delay(self) -> float:
        """The latency of one message in seconds."""
        low, high = self.latency
        return low + (high - low) * self.chance.random()

    # ----------------------------------------------------------------- faults

    def block(
        self,
        link: Link,
        requests: Iterable[str] = (),
        answers: Iterable[str] = (),
        *,
        slow: Mapping[str, float] | None = None,
        refuses: bool = False,
    ) -> Block:
        """Add a :class:`Block` to a link, until :meth:`unblock`."""
        block = Block(link, frozenset(requests), frozenset(answers), slow or {}, refuses)
        link.blocks.append(block)
        self._changed(link)
        return block

    def unblock(self, blocks: Sequence[Block]) -> None:
        """Remove these blocks. Stuck messages that no other block stops are delivered."""
        for block in blocks:
            if block in block.link.blocks:
                block.link.blocks.remove(block)
                self._changed(block.link)

    def _changed(self, link: Link) -> None:
        if link.changed():
            self.loop.world_at(self.loop.now + PATIENCE, self._give_up, link, link.epoch)
        stuck, link.stuck = link.stuck, []
        for try_again in stuck:
            try_again()

    def _give_up(self, link: Link, epoch: int) -> None:
        if link.dead and link.epoch == epoch:
            self.cut(link, "keepalive watchdog timeout")

    def heal(self, link: Link) -> None:
        """Remove all blocks, deliver stuck messages, and restore the connection."""
        link.blocks.clear()
        self._changed(link)
        link.reconnect()

    def cut_all(self, process: Process) -> None:
        """Break all connections of a process."""
        for link in self.links(process):
            self.cut(link)

    def cut(self, link: Link, detail: str = CLOSED) -> None:
        """Break a connection. Requests in flight may still arrive, their answers do not.

        No new connection can be made while the link is dead.
        """
        if link.lost:
            return
        link.stuck.clear()
        if link.dead:
            link.lose()
        calls, link.calls = link.calls, {}
        for reply in calls.values():
            if not reply.done():
                reply.set_exception(failure("UNAVAILABLE", detail))
        for stream in list(link.streams):
            stream.broken(failure("UNAVAILABLE", detail))

    def died(self, process: Process) -> None:
        """End the connections of a process that has died."""
        for link in self.links(process):
            link.stuck.clear()
            link.calls.clear()
            link.waiting.clear()
            for stream in list(link.streams):
                stream.broken(failure("UNAVAILABLE", CLOSED))

    def renewal_error(self) -> grpc.aio.AioRpcError | None:
        """The error with which a deposed leader answers renewals (L2), or None."""
        return failure("UNKNOWN", "lease: not a primary lessor") if self.deposed else None

    def stop(self, member: Member) -> None:
        """Kill a server."""
        self.etcd.quorum.stop(member)
        for link in self.links(member=member):
            self.cut(link)

    def start(self, member: Member) -> None:
        """Restart a server."""
        self.etcd.quorum.start(member)

    def end_streams(self, member: Member) -> None:
        """End the streams of a member without leader: they require one (W8)."""
        for link in self.links(member=member):
            for stream in list(link.streams):
                stream.fail(failure("UNAVAILABLE", "etcdserver: no leader"))

    # ------------------------------------------------------------------ unary

    async def unary(
        self, link: Link, path: str, request: Any, *, timeout: float | None = None, metadata: Any = None
    ) -> Any:
        """Send one unary request, as ``grpc.aio`` does."""
        loop = self.loop
        reply: asyncio.Future[Any] = loop.create_future()
        self._send(link, path, request, reply, token_of(metadata))
        timer = loop.call_later(timeout, _expire, reply) if timeout is not None else None
        try:
            return await reply
        finally:
            if timer is not None:
                timer.cancel()

    def _send(self, link: Link, path: str, request: Any, reply: asyncio.Future[Any], token: str) -> None:
        self.requests += 1
        if link.refuses or not link.member.up:
            self.loop.world_at(self.loop.now + self.delay(), _fail, reply, "UNAVAILABLE", REFUSED)
        elif link.lost:
            link.connect(functools.partial(self._connected, link, path, request, reply, token))
        else:
            self._send_over(link, path, request, reply, token)

    def _connected(
        self, link: Link, path: str, request: Any, reply: asyncio.Future[Any], token: str, connected: bool
    ) -> None:
        if not connected:
            self.loop.world_at(self.loop.now + self.delay(), _fail, reply, "UNAVAILABLE", NOT_CONNECTED)
        elif not reply.done() and not link.process.dead:
            self._send_over(link, path, request, reply, token)

    def _send_over(self, link: Link, path: str, request: Any, reply: asyncio.Future[Any], token: str) -> None:
        now = self.loop.now
        asked = self.etcd.decode(path, request)
        delay = self.sending(link.process, path, asked)
        if link.process.dead:
            return
        fault = self.request_fault(link.process, path)
        kind = kind_of(path)
        number = self._numbers = self._numbers + 1
        link.calls[number] = reply
        arrive = functools.partial(self._arrive, link, path, asked, number, fault, link.process.label, token)
        if fault is not None and fault.error is not None:
            self.loop.world_at(now + self.delay(), _fail, reply, *fault.error)
        if fault is not None and fault.before is None:
            return
        late = fault.before or 0.0 if fault is not None else 0.0
        self._to_server(link, kind, late + delay, arrive)

    def _to_server(self, link: Link, kind: str, late: float, arrive: Callable[[], None]) -> None:
        if kind in link.requests:
            link.stuck.append(functools.partial(self._to_server, link, kind, 0.0, arrive))
        else:
            self.loop.world_at(self.loop.now + self.delay() + late, arrive)

    def _arrive(
        self, link: Link, path: str, asked: Any, number: int, fault: RequestFault | None, sender: str, token: str
    ) -> None:
        member = link.member
        if not member.up:
            return
        error: tuple[str, str] | None = fault.refusal if fault is not None else None
        error = error or self.etcd.users.refusal(path, token)
        response: Any = None
        if error is None:
            try:
                response = self.etcd.answer(member, path, asked, sender)
            except StatusError as status:
                error = (status.code, status.detail)
            except NoLeader:
                retry = functools.partial(self._arrive, link, path, asked, number, fault, sender, token)
                member.waiting.append(retry)
                return
        self.applied(link.process, path, asked)
        reply = link.calls.pop(number, None)
        if reply is None or (fault is not None and fault.silent):
            return
        late = member.lag if path.startswith("/etcdserverpb.KV/") else 0.0
        late += fault.after if fault is not None else 0.0
        self._to_client(link, kind_of(path), late, functools.partial(_answer, reply, response, error))

    def _to_client(self, link: Link, kind: str, late: float, answer: Callable[[], None]) -> None:
        if kind in link.answers:
            link.stuck.append(functools.partial(self._to_client, link, kind, 0.0, answer))
        else:
            self.loop.world_at(self.loop.now + self.delay() + late, answer)


class SimChannel:
    """A channel with the part of ``grpc.aio.Channel`` that ``distop.store.transport`` uses."""

    def __init__(self, network: Network, link: Link) -> None:
        self._network = network
        self._link = link
        self._closed = False

    def unary_unary(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        def call(request: Any, *, timeout: float | None = None, metadata: Any = None) -> Any:
            if self._closed:
                raise grpc.aio.UsageError("Channel is closed.")
            return self._network.unary(self._link, path, request, timeout=timeout, metadata=metadata)

        return call

    def stream_stream(self, path: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        def call(requests: None, *, metadata: Any = None) -> SimStream:
            if self._closed:
                raise grpc.aio.UsageError("Channel is closed.")
            return SimStream(self._network, self._link, path, token_of(metadata))

        return call

    async def close(self, grace: float | None) -> None:
        """Cancel all calls and streams."""
        self._closed = True
        link = self._link
        link.waiting.clear()
        calls, link.calls = link.calls, {}
        for reply in calls.values():
            reply.cancel()
        for stream in list(link.streams):
            stream.cancel()


def token_of(metadata: Any) -> str:
    """The auth token of a request; "": none."""
    return str(dict(metadata or ()).get("token", ""))


def kind_of(path: str) -> str:
    """The service of a method: ``KV``, ``Lease``, ``Watch``, …"""
    return path[14 : path.rindex("/")]


def _expire(reply: asyncio.Future[Any]) -> None:
    if not reply.done():
        reply.set_exception(failure("DEADLINE_EXCEEDED", "Deadline Exceeded"))


def _fail(reply: asyncio.Future[Any], code: str, detail: str) -> None:
    if not reply.done():
        reply.set_exception(failure(code, detail))


def _answer(reply: asyncio.Future[Any], response: Any, error: tuple[str, str] | None) -> None:
    if reply.done():
        return
    if error is not None:
        reply.set_exception(failure(*error))
    else:
        reply.set_result(response)
