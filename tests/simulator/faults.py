"""Injects the faults of a simulation: their targets, starts and ends."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distop.protocol import keys as K
from tests.simulator.etcd_users import DENIED
from tests.simulator.fault_kinds import DISK_KINDS, FURTHER_KINDS, KINDS, USER_KINDS, VIEW_KINDS
from tests.simulator.network import CLOSED, RequestFault
from tests.simulator.server_links import EVERYTHING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from tests.simulator.machine import Machine
    from tests.simulator.quorum import Member
    from tests.simulator.run import Simulation
    from tests.simulator.scenario import Fault
    from tests.simulator.server_links import Block, Link
    from tests.simulator.virtual_loop import Process


class Injector:
    """Starts and ends the faults of a scenario.

    ``count``: how often each kind of fault had a target; ``struck``: how often while an operation was open or pending.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.count: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self._windows: list[tuple[str, float, float]] = []
        self._strikes: dict[str, Callable[[Fault], None]] = {
            name: getattr(self, f"_{name.replace('-', '_')}")
            for name in (*KINDS, *FURTHER_KINDS, *USER_KINDS, *DISK_KINDS, *VIEW_KINDS)
        }
        sim.network.request_fault = self._request_fault

    def schedule(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._sim.loop.world_at(fault.at, self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        self._sim.note(f"fault: {fault.kind} for {fault.lasts:.2f} s")
        before = self.count.copy()
        self._strikes[fault.kind](fault)
        if self._sim.at_work:
            self.struck += self.count - before

    def _later(self, fault: Fault, do: Callable[[], None]) -> None:
        def end() -> None:
            self._sim.note(f"end of fault: {fault.kind}")
            do()

        self._sim.loop.world_at(self._sim.loop.now + fault.lasts, end)

    # ---------------------------------------------------------------- targets

    def _machine(self, fault: Fault) -> Machine:
        machines = self._sim.machines
        return machines[int(fault.aim[0] * len(machines))]

    def _member(self, fault: Fault) -> Member:
        members = list(self._sim.etcd.members.values())
        return members[int(fault.aim[1] * len(members))]

    def _process(self, fault: Fault) -> Process | None:
        if fault.aim[0] < 0.15 and self._sim.clients:
            return self._sim.clients[int(fault.aim[1] * len(self._sim.clients))]
        return self._machine(fault).process

    def _links(self, fault: Fault) -> list[Link]:
        """The links of one process, to all members or to one."""
        process = self._process(fault)
        if process is None:
            return []
        member = self._member(fault) if fault.aim[2] < 0.5 else None
        return self._sim.network.links(process, member)

    # -------------------------------------------------------------- processes

    def _crash(self, fault: Fault) -> None:
        machine = self._machine(fault)
        process = machine.process
        if process is None:
            return
        self.count["crash"] += 1

        def crash() -> None:
            if machine.process is process:
                self._sim.note(f"{machine.name} is killed")
                machine.crash()
                self._sim.loop.world_at(self._sim.loop.now + fault.lasts, machine.start)

        process.after(int(fault.aim[3] * 60), crash)

    def _freeze(self, fault: Fault) -> None:
        machine = self._machine(fault)
        process = machine.process
        if process is None:
            return
        self.count["freeze"] += 1
        loop = self._sim.loop

        def freeze() -> None:
            if machine.process is process:
                self._sim.note(f"{machine.name} is frozen")
                loop.freeze(process)
                loop.world_at(loop.now + fault.lasts, thaw)

        def thaw() -> None:
            self._sim.note(f"{machine.name} continues")
            loop.thaw(process)

        process.after(int(fault.aim[3] * 60), freeze)

    def _suspend(self, fault: Fault) -> None:
        """Suspend a whole machine, with its guardian and children, so that no deadline is enforced there.

        Work that started before is exempt if the deadline passes meanwhile (docs/internals/guarantees.md, 2).
        """
        machine, loop = self._machine(fault), self._sim.loop
        process = machine.process
        if process is None:
            return
        self.count["suspend"] += 1

        def suspend() -> None:
            if machine.process is process and not machine.suspended:
                self._sim.note(f"the machine of {machine.name} is suspended")
                machine.suspend()
                loop.world_at(loop.now + fault.lasts, resume)

        def resume() -> None:
            self._sim.note(f"the machine of {machine.name} is resumed")
            machine.resume()

        process.after(int(fault.aim[3] * 60), suspend)

    def _stop(self, fault: Fault) -> None:
        machine = self._machine(fault)
        self.count["stop"] += 1
        machine.stop()
        self._sim.loop.world_at(self._sim.loop.now + fault.lasts + 20.0, machine.start)

    def _clock(self, fault: Fault) -> None:
        self.count["clock"] += 1
        self._machine(fault).source.skew += (fault.aim[1] - 0.5) * (20.0 if fault.aim[2] < 0.7 else 7200.0)

    def _disk(self, fault: Fault) -> None:
        """Fill the disk of a machine: its executor cannot write runs."""
        disk = self._machine(fault).disk
        self.count["disk"] += 1
        disk.full += 1

        def free() -> None:
            disk.full -= 1

        self._later(fault, free)

    def _client_crash(self, fault: Fault) -> None:
        clients = [client for client in self._sim.clients if not client.dead]
        if clients:
            self.count[fault.kind] += 1
            client = clients[int(fault.aim[0] * len(clients))]
            self._sim.loop.kill(client)
            self._sim.network.died(client)
            if fault.kind == "client-again":
                self._later(fault, lambda: self._sim.run_again(client))

    _client_again = _client_crash

    def _client_freeze(self, fault: Fault) -> None:
        clients = [client for client in self._sim.clients if not client.dead]
        if clients:
            self.count["client-freeze"] += 1
            client = clients[int(fault.aim[0] * len(clients))]
            self._sim.loop.freeze(client)
            self._later(fault, lambda: self._sim.loop.thaw(client))

    # --------------------------------------------------------------- requests

    def _window(self, fault: Fault) -> None:
        window = (fault.kind, self._sim.loop.now + fault.lasts, 0.1 + 0.5 * fault.aim[1])
        self._windows.append(window)
        self._later(fault, lambda: self._windows.remove(window))

    _answers_lost = _requests_lost = _requests_late = _errors = _window

    def _request_fault(self, process: Process, path: str) -> RequestFault | None:
        if not self._windows:
            return None
        chance = self._sim.network.chance
        for kind, _, odds in self._windows:
            if chance.random() < odds:
                self.count[kind] += 1
                self.struck[kind] += self._sim.at_work
                return self._draw(kind, chance)
        return None

    @staticmethod
    def _draw(kind: str, chance: random.Random) -> RequestFault:
        error = chance.choice(
            (None, ("UNAVAILABLE", CLOSED), ("UNKNOWN", "Stream removed"), ("INTERNAL", "RST_STREAM"))
        )
        if kind == "answers-lost":
            return RequestFault(kind, silent=True, error=error, before=0.0)
        if kind == "requests-lost":
            return RequestFault(kind, before=None, error=error)
        if kind == "requests-late":
            return RequestFault(
                kind, before=chance.choice((0.05, 0.5, 3.0, 8.0)) * chance.random(), silent=True, error=error
            )
        return RequestFault(
            kind,
            refusal=chance.choice(
                (
                    ("UNAVAILABLE", "etcdserver: leader changed"),
                    ("RESOURCE_EXHAUSTED", "etcdserver: too many requests"),
                    ("UNAVAILABLE", "etcdserver: request timed out"),
                    ("UNKNOWN", "raft: stopped"),
                )
            ),
        )

    # ---------------------------------------------------------------- network

    def _cut(self, fault: Fault) -> None:
        for link in self._links(fault):
            self.count["cut"] += 1
            self._sim.network.cut(link)

    def _cut_at_step(self, fault: Fault) -> None:
        process = self._machine(fault).process
        if process is None:
            return
        self.count["cut-at-step"] += 1
        process.after(int(fault.aim[3] * 60), lambda: self._sim.network.cut_all(process))

    def _block(self, fault: Fault, requests: Iterable[str], answers: Iterable[str]) -> None:
        links = self._links(fault)
        if links:
            self.count[fault.kind] += 1
            blocks = [self._sim.network.block(link, requests, answers) for link in links]
            self._later(fault, lambda: self._sim.network.unblock(blocks))

    def _hole(self, fault: Fault) -> None:
        self._block(fault, EVERYTHING, EVERYTHING)

    def _one_way(self, fault: Fault) -> None:
        kinds: Iterable[str] = (("Lease",), ("Lease",), ("KV",), ("Watch",), ("KV", "Watch"), EVERYTHING)[
            int(fault.aim[3] * 6)
        ]
        to_server = fault.aim[1] < 0.5
        self._block(fault, kinds if to_server else (), () if to_server else kinds)

    def _late_renewal(self, fault: Fault) -> None:
        """Answer one renewal as late as possible, and nothing afterwards: this shows from when L1 counts."""
        process, network, loop = self._machine(fault).process, self._sim.network, self._sim.loop
        links = network.links(process) if process is not None else []
        if not links:
            return
        self.count["late-renewal"] += 1
        interval = self._sim.scenario.ttl / 3
        late = {"Lease": interval * (0.99 - 0.4 * fault.aim[1] ** 2)}
        slowed = [network.block(link, slow=late) for link in links]

        def block() -> None:
            blocks = [network.block(link, EVERYTHING, ("KV", "Watch")) for link in links]
            loop.world_at(loop.now + interval + fault.lasts, unblock, blocks)

        def unblock(blocks: list[Block]) -> None:
            network.unblock([*blocks, *slowed])

        loop.world_at(loop.now + interval + 0.01, block)

    def _refuse(self, fault: Fault) -> None:
        network, links = self._sim.network, self._links(fault)
        self.count["refuse"] += len(links)
        blocks = [network.block(link, refuses=True) for link in links]
        for link in links:
            network.cut(link)
        self._later(fault, lambda: network.unblock(blocks))

    # ------------------------------------------------------------------- etcd

    def _leader(self, fault: Fault) -> None:
        self.count["leader"] += 1
        quorum = self._sim.etcd.quorum
        quorum.lose_leader()
        self._later(fault, quorum.elect)

    def _member_parted(self, fault: Fault) -> None:
        member, quorum = self._member(fault), self._sim.etcd.quorum
        if len(quorum.members) < 3:
            return self._leader(fault)
        self.count["member-parted"] += 1
        quorum.isolate(member)
        return self._later(fault, lambda: quorum.rejoin(member))

    def _member_killed(self, fault: Fault) -> None:
        member, network = self._member(fault), self._sim.network
        self.count["member-killed"] += 1
        network.stop(member)
        self._later(fault, lambda: network.start(member))

    def _quorum(self, fault: Fault) -> None:
        """Kill or isolate all members but one; they return one after the other."""
        spared, network, quorum = self._member(fault), self._sim.network, self._sim.etcd.quorum
        struck = [member for member in quorum.members.values() if member is not spared]
        kills = fault.aim[2] < 0.6 or not struck
        struck = struck or [spared]
        self.count["quorum"] += 1
        for number, member in enumerate(struck, 1):
            (network.stop if kills else quorum.isolate)(member)
            back = network.start if kills else quorum.rejoin
            self._sim.loop.world_at(self._sim.loop.now + fault.lasts * number / len(struck), back, member)

    def _lag(self, fault: Fault) -> None:
        member, etcd = self._member(fault), self._sim.etcd
        self.count["lag"] += 1
        member.lag = 0.05 + 1.5 * fault.aim[2] ** 2
        etcd.watching.resends = fault.aim[3] < 0.5

        def back() -> None:
            member.lag = 0.0
            etcd.watching.resends = False
            etcd.catch_up(member)

        self._later(fault, back)

    def _slow_watches(self, fault: Fault) -> None:
        self.count["slow-watches"] += 1
        self._sim.etcd.watching.fall_behind(self._member(fault))

    def _view_late(self, fault: Fault) -> None:
        """Block the answers on a machine's watch of the cluster, which includes holds."""
        process, network = self._machine(fault).process, self._sim.network
        links = network.links(process) if process is not None else []
        self.count["view-late"] += bool(links)
        blocks = [network.block(link, answers=(self._sim.keys.family(K.HOLD)[0],)) for link in links]
        self._later(fault, lambda: network.unblock(blocks))

    def _watches_end(self, fault: Fault) -> None:
        for link in self._links(fault):
            for stream in list(link.streams):
                self.count["watches-end"] += 1
                stream.fail(None)

    def _watches_refused(self, fault: Fault) -> None:
        self.count["watches-refused"] += 1
        watching = self._sim.etcd.watching
        watching.refuses = DENIED
        self._watches_end(fault)
        self._later(fault, lambda: setattr(watching, "refuses", ""))

    def _events_lost(self, fault: Fault) -> None:
        """End all watches; the new ones skip some revisions (etcd#20573).

        A client cannot notice what it missed until it lists the range again.
        """
        watching = self._sim.etcd.watching
        watching.skips = 1 + int(fault.aim[3] * 8)
        for link in self._sim.network.links():
            for stream in list(link.streams):
                stream.fail(None)
        self.count["events-lost"] += 1
        self._later(fault, lambda: setattr(watching, "skips", 0))

    def _stale_reads(self, fault: Fault) -> None:
        """Make a member answer reads at an old revision, as after a pause (etcd#20418).

        A client that has seen a newer revision assumes a restored etcd, and ends.
        """
        member = self._member(fault)
        self.count["stale-reads"] += 1
        member.stale = self._sim.etcd.revision
        self._later(fault, lambda: setattr(member, "stale", 0))

    def _compaction(self, fault: Fault) -> None:
        etcd, loop = self._sim.etcd, self._sim.loop
        until = loop.now + fault.lasts

        def compact() -> None:
            revision = etcd.revision - int(fault.aim[0] * 10)
            if revision > etcd.compacted and etcd.quorum.leader is not None:
                self.count["compaction"] += 1
                etcd.compacted = revision
            if loop.now < until:
                loop.world_at(loop.now + 0.25, compact)

        compact()

    def _space(self, fault: Fault) -> None:
        self.count["space"] += 1
        space = self._sim.etcd.space
        space.fill(late=fault.aim[1] if fault.aim[0] < 0.5 else 0.0)
        self._later(fault, space.empty)

    def _tokens(self, fault: Fault) -> None:
        self.count["tokens"] += 1
        self._sim.etcd.users.end_tokens()

    def _role(self, fault: Fault) -> None:
        """Revoke and grant the user's role. Existing watches continue."""
        self.count["role"] += 1
        self._sim.etcd.deny(True)
        self._later(fault, lambda: self._sim.etcd.deny(False))

    def _late_revocation(self, fault: Fault) -> None:
        self.count["late-revocation"] += 1
        etcd = self._sim.etcd
        etcd.late_revocation = 3.0 * fault.aim[0]
        self._later(fault, lambda: setattr(etcd, "late_revocation", 0.0))

    def _renews_revoked(self, fault: Fault) -> None:
        self.count["renews-revoked"] += 1
        etcd = self._sim.etcd
        etcd.renews_revoked = True
        self._later(fault, lambda: setattr(etcd, "renews_revoked", False))

    def _deposed(self, fault: Fault) -> None:
        self.count["deposed"] += 1
        network = self._sim.network
        network.deposed = True
        self._later(fault, lambda: setattr(network, "deposed", False))

    def _revoke(self, fault: Fault) -> None:
        """Revoke the lease of a session, as an administrator could.

        The holder's side effects are exempt until it learns of this. Leases of history watermarks are never revoked:
        that would end their hour early.
        """
        etcd = self._sim.etcd
        young = {kv.lease for kv in etcd.store.range(*self._sim.keys.family(K.WATERMARK))}
        sessions = [lease for lease in etcd.leases if lease not in young]
        if sessions and etcd.quorum.leader is not None:
            self.count["revoke"] += 1
            lease = sessions[int(fault.aim[0] * len(sessions))]
            for key in etcd.store.leases[lease]:
                self._sim.effects.exempt(self._sim.keys.parse(key).id)
            etcd.end_lease(lease)
