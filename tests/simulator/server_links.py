"""Links between processes and servers: which messages pass, and the connection, which breaks and is restored.

gRPC's pings close a connection that delivers nothing. Then a request waits until the first attempt to connect has timed
out; later requests are refused at once while gRPC repeats its attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.store.transport import PING_EVERY, PING_LIMIT, RECONNECT

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from tests.simulator.grpc_streams import SimStream
    from tests.simulator.quorum import Member
    from tests.simulator.virtual_loop import Process, VirtualLoop

PATIENCE = PING_EVERY + PING_LIMIT
"""Seconds after which gRPC's pings close a connection that delivers nothing."""
EVERYTHING = frozenset({"KV", "Lease", "Watch"})
"""All kinds of requests."""
GROWTH = 1.6
"""Factor of gRPC's back-off between two attempts to connect."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A fault of a link.

    ``requests``: the kinds of requests (``KV``, ``Lease``, ``Watch``) that do not arrive. ``answers``: the kinds whose
    answers do not arrive, or the first key of a watch, for this watch alone. ``slow``: kind → extra seconds for
    messages from the server on its streams. ``refuses``: the server accepts no connection.
    """

    link: Link
    requests: frozenset[str] = frozenset()
    answers: frozenset[str] = frozenset()
    slow: Mapping[str, float] = field(default_factory=dict)
    refuses: bool = False


class Link:
    """The link from a process to a server. ``requests``, ``answers``, ``slow``, ``refuses``: as in :class:`Block`,
    combined over all its blocks.
    """

    def __init__(self, loop: VirtualLoop, process: Process, member: Member, address: str) -> None:
        self.process = process
        self.address = address
        self.member = member
        self.blocks: list[Block] = []
        self.requests: frozenset[str] = frozenset()
        self.answers: frozenset[str] = frozenset()
        self.slow: dict[str, float] = {}
        self.refuses = False
        self.stuck: list[Callable[[], None]] = []
        """Blocked messages. They are tried again in order at each change of the blocks, since TCP retransmits."""
        self.streams: list[SimStream] = []
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.dead = False
        """Nothing passes in one direction, so pings are not answered."""
        self.lost = False
        """There is no connection: the last one was closed, and none has been made since."""
        self.waiting: list[Callable[[bool], None]] = []
        """Callbacks that wait for a connection attempt, and get whether it succeeded."""
        self.epoch = 0
        self._loop = loop
        self._began: float | None = None
        """When the first attempt to connect started, while there is no connection; None: no request needs one."""

    def changed(self) -> bool:
        """Combine the blocks; whether the link has become dead."""
        none: frozenset[str] = frozenset()
        self.requests = none.union(*(block.requests for block in self.blocks))
        self.answers = none.union(*(block.answers for block in self.blocks))
        self.refuses = any(block.refuses for block in self.blocks)
        self.slow = {}
        for block in self.blocks:
            for kind, seconds in block.slow.items():
                self.slow[kind] = max(seconds, self.slow.get(kind, 0.0))
        dead = self.requests >= EVERYTHING or self.answers >= EVERYTHING
        if dead is self.dead:
            return False
        self.dead = dead
        self.epoch += 1
        if self.lost and not dead:
            self._loop.world_at(self._attempt_ends(), self._attempted, self.epoch)
        return dead

    def lose(self) -> None:
        """Close the connection; none can be made for now."""
        self.lost, self._began = True, None

    def reconnect(self) -> None:
        """Restore the connection, and call what waits for it."""
        self.lost, self._began = False, None
        self._call_waiting(True)

    def connect(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback`` with whether there is a connection: at once, or after a first attempt that is running."""
        if self.lost and self._began is None:
            self._began = self._loop.now
            self._loop.world_at(self._began + RECONNECT.least, self._timed_out, self._began)
        if self._began is not None and self._loop.now < self._began + RECONNECT.least:
            self.waiting.append(callback)
        else:
            callback(not self.lost)

    def _timed_out(self, began: float) -> None:
        if self._began == began and self.dead:
            self._call_waiting(False)

    def _attempt_ends(self) -> float:
        """When the current connection attempt ends.

        Now if there is none, or if it is the first: TCP retransmits, and it succeeds. Each attempt lasts as long as the
        back-off after the one before, at least ``least``.
        """
        now = self._loop.now
        if self._began is None or now < self._began + RECONNECT.least:
            return now
        ends, pause = self._began + RECONNECT.least, RECONNECT.first
        while ends <= now:
            pause = min(RECONNECT.longest, pause * GROWTH)
            ends += max(RECONNECT.least, pause)
        return ends

    def _attempted(self, epoch: int) -> None:
        if self.epoch == epoch and self.lost:
            self.reconnect()

    def _call_waiting(self, connected: bool) -> None:
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback(connected)
