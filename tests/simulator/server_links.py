"""What a process has to a server: what passes there, what does not, and the connection, which breaks and is made anew.

A connection that swallows everything is given up by gRPC's pings. From then on nothing is sent: a request waits until
the first attempt to connect has timed out, and those after it are refused at once while attempts follow each other.
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
"""Seconds after which a connection that swallows everything is given up, by gRPC's pings."""
EVERYTHING = frozenset({"KV", "Lease", "Watch"})
"""All kinds of requests."""
GROWTH = 1.6
"""By which gRPC's back-off grows from one attempt to connect to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Why a link lets something not pass. ``held``: the kinds of requests (``KV``, ``Lease``, ``Watch``) that do not
    get there; ``muted``: those whose answers do not get back, or of one watch alone: the key that it begins with.
    ``slow``: seconds more that messages of a kind's streams take on their way back. ``refuses``: no connection is
    taken.
    """

    link: Link
    held: frozenset[str] = frozenset()
    muted: frozenset[str] = frozenset()
    slow: Mapping[str, float] = field(default_factory=dict)
    refuses: bool = False


class Link:
    """What a process has to a server. ``held``, ``muted``, ``slow`` and ``refuses``: what all holds on it say."""

    def __init__(self, loop: VirtualLoop, process: Process, member: Member, address: str) -> None:
        self.process = process
        self.address = address
        self.member = member
        self.holds: list[Hold] = []
        self.held: frozenset[str] = frozenset()
        self.muted: frozenset[str] = frozenset()
        self.slow: dict[str, float] = {}
        self.refuses = False
        self.stuck: list[Callable[[], None]] = []
        """What is tried again at each change of what the link lets pass, in its order: TCP repeats what was lost."""
        self.streams: list[SimStream] = []
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.dead = False
        """Nothing passes in one direction: pings are not answered."""
        self.lost = False
        """There is no connection: the last one was given up, and no other has been made."""
        self.waiting: list[Callable[[bool], None]] = []
        """What waits for a connection, to be told whether there is one."""
        self.epoch = 0
        self._loop = loop
        self._began: float | None = None
        """When the first attempt to connect began, where there is no connection and somebody wants one."""

    def changed(self) -> bool:
        """Fold the holds; whether the link is dead as of now."""
        none: frozenset[str] = frozenset()
        self.held = none.union(*(hold.held for hold in self.holds))
        self.muted = none.union(*(hold.muted for hold in self.holds))
        self.refuses = any(hold.refuses for hold in self.holds)
        self.slow = {}
        for hold in self.holds:
            for kind, seconds in hold.slow.items():
                self.slow[kind] = max(seconds, self.slow.get(kind, 0.0))
        dead = self.held >= EVERYTHING or self.muted >= EVERYTHING
        if dead is self.dead:
            return False
        self.dead = dead
        self.epoch += 1
        if self.lost and not dead:
            self._loop.world_at(self._attempt_ends(), self._attempted, self.epoch)
        return dead

    def lose(self) -> None:
        """The connection is gone, and none can be made for the moment."""
        self.lost, self._began = True, None

    def as_new(self) -> None:
        """A connection is there; what waits for one goes on."""
        self.lost, self._began = False, None
        self._tell(True)

    def connect(self, told: Callable[[bool], None]) -> None:
        """Call ``told`` with whether there is a connection: at once, but while the first attempt is under way."""
        if self.lost and self._began is None:
            self._began = self._loop.now
            self._loop.world_at(self._began + RECONNECT.least, self._timed_out, self._began)
        if self._began is not None and self._loop.now < self._began + RECONNECT.least:
            self.waiting.append(told)
        else:
            told(not self.lost)

    def _timed_out(self, began: float) -> None:
        if self._began == began and self.dead:
            self._tell(False)

    def _attempt_ends(self) -> float:
        """When the attempt ends that is under way; now, where there is none, or it is the first: TCP repeats what it
        sent, and it succeeds. Each lasts as long as the back-off of the one before, and no less than ``least``.
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
            self.as_new()

    def _tell(self, connected: bool) -> None:
        waiting, self.waiting = self.waiting, []
        for told in waiting:
            told(connected)
