"""The members of a simulated cluster: which of them run and are connected, and which have a leader (L4, W8).

Raft is not simulated, only what clients see of it. Without a majority that has a leader, requests wait. A member that
has had no leader for one election timeout refuses new requests; its streams stay open without events for three more
timeouts, and then end. A majority without a leader elects one after an election timeout. Then the waiting requests are
applied, even those whose clients have timed out (T9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulator.virtual_loop import VirtualLoop

SILENT_TIMEOUTS = 3
"""Election timeouts for which a member without a leader keeps its streams open."""


class Member:
    """One server. ``up``: it runs. ``connected``: it reaches the other members. ``led``: it has a leader. ``lag``:
    seconds by which it applies commits late.
    """

    def __init__(self, number: int, address: str) -> None:
        self.id = 0xA0 + number
        self.name = f"etcd-{number}"
        self.address = address
        self.lag = 0.0
        self.up = True
        self.connected = True
        self.led = True
        self.lost = 0.0
        """When it lost its leader, if it has none."""
        self.applied = 1
        """The revision that it has applied."""
        self.stale = 0
        """The old revision at which it wrongly answers reads (etcd#20418); 0: it answers correctly."""
        self.waiting: list[Callable[[], None]] = []
        """Requests that it applies once it has a leader."""


class Quorum:
    """All members. ``election``: the election timeout in seconds. ``elected()`` is called at each election,
    ``led(member)`` when a member has a leader again, ``silent(member)`` when a member has to end its streams.
    """

    def __init__(
        self, loop: VirtualLoop, addresses: Sequence[str], election: float, elected: Callable[[], None]
    ) -> None:
        self.members = {address: Member(n, address) for n, address in enumerate(addresses)}
        self.leader: Member | None = next(iter(self.members.values()))
        self.term = 2
        self.silent: Callable[[Member], None] = lambda member: None
        self.led: Callable[[Member], None] = lambda member: None
        self._loop = loop
        self._election = election
        self._elected = elected
        self._former = self.leader
        self._undecided = False
        """Elections fail."""
        self._voting = False
        """An election timeout is running."""

    def reaching(self) -> list[Member]:
        """The running, connected members if they are a majority; else none."""
        found = [member for member in self.members.values() if member.up and member.connected]
        return found if 2 * len(found) > len(self.members) else []

    def knows_no_leader(self, member: Member) -> bool:
        """Whether the member has had no leader for an election timeout, and so refuses requests."""
        return not member.led and self._loop.now >= member.lost + self._election

    # ------------------------------------------------------------------ faults

    def stop(self, member: Member) -> None:
        """Stop a member; its waiting requests are lost."""
        member.up = False
        member.waiting.clear()
        self._settle()

    def start(self, member: Member) -> None:
        """Restart a member with its data."""
        member.up = True
        self._settle()

    def isolate(self, member: Member) -> None:
        """Disconnect a member from the others; clients still reach it."""
        member.connected = False
        self._settle()

    def rejoin(self, member: Member) -> None:
        """Reconnect a member with the others."""
        member.connected = True
        self._settle()

    def lose_leader(self) -> None:
        """Make the leader step down; elections fail until :meth:`elect`."""
        self._undecided = True
        self._settle()

    def elect(self) -> None:
        """Let elections succeed again, and hold one now."""
        self._undecided = False
        self._settle()
        if self.leader is None:
            self._elect()

    def heal(self) -> None:
        """Start and connect all members, and let elections succeed."""
        for member in self.members.values():
            member.up = member.connected = True
        self._undecided = False
        self._settle()

    # --------------------------------------------------------------- elections

    def _settle(self) -> None:
        """Update the leader after members have come or gone."""
        reaching = self.reaching()
        if self.leader is not None and (self.leader not in reaching or self._undecided):
            self._former, self.leader = self.leader, None
        if self.leader is None and reaching and not self._undecided:
            if not self._election:
                self._elect()
            elif not self._voting:
                self._voting = True
                self._loop.world_at(self._loop.now + self._election, self._vote)
        self._update_members(reaching)

    def _vote(self) -> None:
        self._voting = False
        if self.leader is None and not self._undecided:
            self._elect()

    def _elect(self) -> None:
        """Elect the former leader if it is reachable, since no log is ahead of its own; else the next member."""
        reaching = self.reaching()
        if not reaching:
            return
        self.leader = self._former if self._former in reaching else reaching[0]
        self.term += 1
        self._elected()
        self._update_members(reaching)

    def _update_members(self, reaching: Sequence[Member]) -> None:
        """Set which members have a leader."""
        for member in self.members.values():
            led = self.leader is not None and member in reaching
            if led and not member.led:
                member.led = True
                self.led(member)
                waiting, member.waiting = member.waiting, []
                for request in waiting:
                    request()
            elif member.led and not led:
                member.led, member.lost = False, self._loop.now
                end = member.lost + (1 + SILENT_TIMEOUTS) * self._election
                self._loop.world_at(end, self._end_streams, member, member.lost)

    def _end_streams(self, member: Member, lost: float) -> None:
        if not member.led and member.lost == lost:
            self.silent(member)
