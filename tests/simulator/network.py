"""The network between simulated processes and the servers, with the face of ``grpc.aio``.

A *link* is what one process has to one server (``links``): it can refuse, swallow everything (in one direction, or for
some kinds of requests alone), or break. What is on its way is delivered in its own time, whatever the client thinks of
it by then: a request whose sender has given up is applied all the same (T9).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.simulator.grpc_streams import SimStream
from tests.simulator.server_links import PATIENCE, Hold, Link
from tests.simulator.sim_etcd import StatusError, Waits
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


class Fate:
    """What happens to one request. ``before``: seconds more until it arrives, None: never; ``after``: until its answer
    is there. ``silent``: the answer is lost. ``error``: what the client is told instead (code, detail), whatever
    happens to the request; None: nothing. ``refusal``: the server does not do it, and says so.
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
    """All links. ``fate(process, path)`` decides what happens to a request (None: nothing special)."""

    def __init__(self, loop: VirtualLoop, etcd: SimEtcd, chance: random.Random) -> None:
        self.loop = loop
        self.etcd = etcd
        self.chance = chance
        self.latency = (0.0003, 0.003)
        self.fate: Callable[[Process, str], Fate | None] = lambda process, path: None
        self.requests = 0
        self.sending: Callable[[Process, str, Any], float] = lambda process, path, asked: 0.0
        """Called when a request is about to be sent; the seconds by which that is put off."""
        self.applied: Callable[[Process, str, Any], None] = lambda process, path, asked: None
        """Called when a request was done, before it is answered."""
        self.deposed = False
        """The member that renews leases is no leader any more, and says so."""
        self.aliases: dict[str, str] = {}
        """Other addresses of members, which have links of their own."""
        self._links: dict[tuple[str, str], Link] = {}
        self._numbers = 0
        etcd.quorum.silent = self.leaderless

    def channel(self, address: str, credentials: Any = None) -> Any:
        """A channel of the current process (``distop.store.transport.channels``)."""
        return SimChannel(self, self.link(PROCESS.get(), address))

    def link(self, process: Process, address: str) -> Link:
        """What the process has to this server."""
        key = (process.name, address)
        link = self._links.get(key)
        if link is None or link.process is not process:
            member = self.etcd.members[self.aliases.get(address, address)]
            link = self._links[key] = Link(self.loop, process, member, address)
        return link

    def links(self, process: Process | None = None, member: Member | None = None) -> list[Link]:
        """Those of a process, to a member, or all."""
        return [
            link
            for link in self._links.values()
            if (process is None or link.process is process) and (member is None or link.member is member)
        ]

    def delay(self) -> float:
        """The time that one message takes."""
        low, high = self.latency
        return low + (high - low) * self.chance.random()

    # ----------------------------------------------------------------- faults

    def hold(
        self,
        link: Link,
        held: Iterable[str] = (),
        muted: Iterable[str] = (),
        *,
        slow: Mapping[str, float] | None = None,
        refuses: bool = False,
    ) -> Hold:
        """From now on requests of these kinds do not get there, answers of those do not get back, or the like, as
        :class:`Hold` says.
        """
        hold = Hold(link, frozenset(held), frozenset(muted), slow or {}, refuses)
        link.holds.append(hold)
        self._changed(link)
        return hold

    def release(self, holds: Sequence[Hold]) -> None:
        """These are over: what no other hold stops goes on."""
        for hold in holds:
            if hold in hold.link.holds:
                hold.link.holds.remove(hold)
                self._changed(hold.link)

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
        """Everything passes again; what was stuck goes on, over a connection that stands."""
        link.holds.clear()
        self._changed(link)
        link.as_new()

    def cut_all(self, process: Process) -> None:
        """Every connection of the process breaks."""
        for link in self.links(process):
            self.cut(link)

    def cut(self, link: Link, detail: str = CLOSED) -> None:
        """Its connection breaks. Requests that are on their way may arrive all the same; their answers do not. No other
        can be made while the link is dead.
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
        """The process is gone, and its connections with it."""
        for link in self.links(process):
            link.stuck.clear()
            link.calls.clear()
            link.waiting.clear()
            for stream in list(link.streams):
                stream.broken(failure("UNAVAILABLE", CLOSED))

    def renewal_error(self) -> grpc.aio.AioRpcError | None:
        """The error that a renewal is silent with, if it is: a deposed leader answers so (L2)."""
        return failure("UNKNOWN", "lease: not a primary lessor") if self.deposed else None

    def stop(self, member: Member) -> None:
        """The server is killed."""
        self.etcd.quorum.stop(member)
        for link in self.links(member=member):
            self.cut(link)

    def start(self, member: Member) -> None:
        """The server runs again."""
        self.etcd.quorum.start(member)

    def leaderless(self, member: Member) -> None:
        """Its streams end, since they want a leader (W8)."""
        for link in self.links(member=member):
            for stream in list(link.streams):
                stream.fail(failure("UNAVAILABLE", "etcdserver: no leader"))

    # ------------------------------------------------------------------ unary

    async def unary(
        self, link: Link, path: str, request: Any, *, timeout: float | None = None, metadata: Any = None
    ) -> Any:
        """One request, as ``grpc.aio`` makes it."""
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
        put_off = self.sending(link.process, path, asked)
        if link.process.dead:
            return
        fate = self.fate(link.process, path)
        kind = kind_of(path)
        number = self._numbers = self._numbers + 1
        link.calls[number] = reply
        arrive = functools.partial(self._arrive, link, path, asked, number, fate, link.process.label, token)
        if fate is not None and fate.error is not None:
            self.loop.world_at(now + self.delay(), _fail, reply, *fate.error)
        if fate is not None and fate.before is None:
            return
        late = fate.before or 0.0 if fate is not None else 0.0
        self._forth(link, kind, late + put_off, arrive)

    def _forth(self, link: Link, kind: str, late: float, arrive: Callable[[], None]) -> None:
        if kind in link.held:
            link.stuck.append(functools.partial(self._forth, link, kind, 0.0, arrive))
        else:
            self.loop.world_at(self.loop.now + self.delay() + late, arrive)

    def _arrive(
        self, link: Link, path: str, asked: Any, number: int, fate: Fate | None, sender: str, token: str
    ) -> None:
        member = link.member
        if not member.up:
            return
        error: tuple[str, str] | None = fate.refusal if fate is not None else None
        error = error or self.etcd.users.refusal(path, token)
        response: Any = None
        if error is None:
            try:
                response = self.etcd.answer(member, path, asked, sender)
            except StatusError as status:
                error = (status.code, status.detail)
            except Waits:
                go_on = functools.partial(self._arrive, link, path, asked, number, fate, sender, token)
                member.waiting.append(go_on)
                return
        self.applied(link.process, path, asked)
        reply = link.calls.pop(number, None)
        if reply is None or (fate is not None and fate.silent):
            return
        late = member.lag if path.startswith("/etcdserverpb.KV/") else 0.0
        late += fate.after if fate is not None else 0.0
        self._back(link, kind_of(path), late, functools.partial(_answer, reply, response, error))

    def _back(self, link: Link, kind: str, late: float, answer: Callable[[], None]) -> None:
        if kind in link.muted:
            link.stuck.append(functools.partial(self._back, link, kind, 0.0, answer))
        else:
            self.loop.world_at(self.loop.now + self.delay() + late, answer)


class SimChannel:
    """What ``grpc.aio.Channel`` is to ``distop.store.transport``."""

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
        """What is under way is cancelled."""
        self._closed = True
        link = self._link
        link.waiting.clear()
        calls, link.calls = link.calls, {}
        for reply in calls.values():
            reply.cancel()
        for stream in list(link.streams):
            stream.cancel()


def token_of(metadata: Any) -> str:
    """The token that a request brings along; "": none."""
    return str(dict(metadata or ()).get("token", ""))


def kind_of(path: str) -> str:
    """``KV``, ``Lease``, ``Watch``, …"""
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
