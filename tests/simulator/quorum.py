"""The members of a simulated cluster: which run and reach each other, and whether they have a leader (L4, W8).

Raft is not simulated, only what clients see of it. Nothing is agreed on without a majority that has its leader:
requests wait. A member that has missed its leader for an election timeout refuses new ones; streams stay open in
silence for three more, and then end. A majority without a leader elects one after an election timeout, and what waited
is done then, even if its client has given up (T9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulator.virtual_loop import VirtualLoop

SILENT_TIMEOUTS = 3
"""Election timeouts for which a member that knows that it has no leader leaves streams open."""


class Member:
    """One server. ``up``: it runs. ``connected``: it reaches the others. ``led``: it has a leader. ``lag``: seconds by
    which it shows commits late.
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
        """When it lost its leader, where it has none."""
        self.applied = 1
        """The revision that it shows."""
        self.stale = 0
        """The revision as of which it answers reads, which should be of the present (etcd#20418); 0: it does not."""
        self.waiting: list[Callable[[], None]] = []
        """What it goes on with once it has a leader."""


class Quorum:
    """All members. ``election``: the seconds of an election timeout. ``elected()`` is called at each election,
    ``led(member)`` when a member has a leader again, ``silent(member)`` when its streams have missed one for too long.
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
        """No vote finds a majority."""
        self._voting = False
        """An election timeout runs."""

    def reaching(self) -> list[Member]:
        """Those that run and reach each other, where they are a majority; else nobody."""
        found = [member for member in self.members.values() if member.up and member.connected]
        return found if 2 * len(found) > len(self.members) else []

    def knows_no_leader(self, member: Member) -> bool:
        """It has missed its leader for long enough to say so."""
        return not member.led and self._loop.now >= member.lost + self._election

    # ------------------------------------------------------------------ faults

    def stop(self, member: Member) -> None:
        """The member ends: what waited there is lost."""
        member.up = False
        member.waiting.clear()
        self._settle()

    def start(self, member: Member) -> None:
        """The member runs again, with its data."""
        member.up = True
        self._settle()

    def part(self, member: Member) -> None:
        """The member does not reach the others any more; clients still reach it."""
        member.connected = False
        self._settle()

    def join(self, member: Member) -> None:
        """The member reaches the others again."""
        member.connected = True
        self._settle()

    def lose_leader(self) -> None:
        """The leader steps down, and until :meth:`elect` no vote finds a majority."""
        self._undecided = True
        self._settle()

    def elect(self) -> None:
        """Votes find a majority again: where there is one, it elects now."""
        self._undecided = False
        self._settle()
        if self.leader is None:
            self._elect()

    def heal(self) -> None:
        """All run, reach each other and elect."""
        for member in self.members.values():
            member.up = member.connected = True
        self._undecided = False
        self._settle()

    # --------------------------------------------------------------- elections

    def _settle(self) -> None:
        """Members came or went."""
        reaching = self.reaching()
        if self.leader is not None and (self.leader not in reaching or self._undecided):
            self._former, self.leader = self.leader, None
        if self.leader is None and reaching and not self._undecided:
            if not self._election:
                self._elect()
            elif not self._voting:
                self._voting = True
                self._loop.world_at(self._loop.now + self._election, self._vote)
        self._tell(reaching)

    def _vote(self) -> None:
        self._voting = False
        if self.leader is None and not self._undecided:
            self._elect()

    def _elect(self) -> None:
        """The former leader where it takes part, since nobody's log is ahead of its own; else the next."""
        reaching = self.reaching()
        if not reaching:
            return
        self.leader = self._former if self._former in reaching else reaching[0]
        self.term += 1
        self._elected()
        self._tell(reaching)

    def _tell(self, reaching: Sequence[Member]) -> None:
        """Who has a leader now."""
        for member in self.members.values():
            led = self.leader is not None and member in reaching
            if led and not member.led:
                member.led = True
                self.led(member)
                waiting, member.waiting = member.waiting, []
                for go_on in waiting:
                    go_on()
            elif member.led and not led:
                member.led, member.lost = False, self._loop.now
                end = member.lost + (1 + SILENT_TIMEOUTS) * self._election
                self._loop.world_at(end, self._fall_silent, member, member.lost)

    def _fall_silent(self, member: Member, lost: float) -> None:
        if not member.led and member.lost == lost:
            self.silent(member)
