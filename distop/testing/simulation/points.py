"""Crash points, enumerated: every request that a process sends in a reference run is a place where it can be struck.

Between two requests a process changes nothing but its memory, so the moments that differ for others are: before a
request is sent, and after it was done, before it is answered. A discovery run lists all of them; then the run
is repeated, the same up to that moment, with the process killed, frozen or cut off there. A new step of a protocol
sends a request, and is so covered without anybody remembering it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distop.core import keys as K
from distop.core.txn import Delete, Get, Put, Txn
from distop.errors import InvalidArgument
from distop.testing.simulation.run import Simulation, quietly
from distop.testing.simulation.scenario import Act, DrainAct, Scenario, Wish, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distop.testing.simulation.loop import Process
    from distop.testing.simulation.machine import Machine
    from distop.testing.simulation.run import Breach

ACTIONS = ("kill", "freeze", "cut")
MOMENTS = ("before", "done")
RESTART = 0.3
"""Seconds after which a daemon that was killed is started again."""


@dataclass(frozen=True, slots=True)
class Point:
    """A process's ``number``-th request, and what it asks for."""

    process: str
    number: int
    what: str

    @property
    def writes(self) -> bool:
        """It changes something."""
        return self.what.startswith(("put ", "delete ", "Lease"))


def references() -> dict[str, Scenario]:
    """Small runs without faults that together go through every protocol: start, plan, claim, report, retry, pause,
    resume, cancel, fail fast, finish, rerun, what follows, cleanup, drain, election, renewal; the strikes make
    takeovers of them.
    """
    rough = {"trouble": 1.0}
    slow = _reference("index", None, partitions=2, seed=11, name="x", pace=0.2)
    cannot = _reference("quick", None, partitions=3, seed=1)
    some_fail = _reference("check", "collect_all", partitions=2, seed=35, **rough)
    return {
        "jobs and completion fail": _reference("check", "collect_all", partitions=4, seed=1, **rough),
        "planning fails": _reference("check", "collect_all", partitions=4, seed=17, **rough),
        "planning fails for good": _reference("check", "collect_all", partitions=4, seed=16, **rough),
        "fail fast": _reference("index", "fail_fast", partitions=8, seed=8, name="x", pace=0.2, **rough),
        "fail fast in batches": _reference("purge", "fail_fast", partitions=8, seed=14, **rough),
        "pause and resume": _reference(
            "index", None, Act(0.35, "pause"), Act(0.6, "resume"), partitions=5, seed=11, name="x", pace=0.2
        ),
        "cancel": _reference("lone", None, Act(0.5, "cancel"), partitions=5, seed=11, pace=0.2),
        "without completion": _reference("quick", None, partitions=8, seed=1),
        "pause now": _reference(
            "index", None, Act(0.35, "pause-now"), Act(0.4, "resume"), partitions=3, seed=11, name="x", pace=0.2
        ),
        "drain": replace(slow, drains=(DrainAct(0.7, "exec-0", 0.0, True), DrainAct(1.1, "exec-1", 0.3, False))),
        "rerun": replace(some_fail, wishes=tuple(replace(wish, rerun="failed") for wish in some_fail.wishes)),
        "a node that cannot": replace(cannot, hosts=(replace(cannot.hosts[0], unable=("quick",)), *cannot.hosts[1:])),
        "what follows": _reference("check", None, partitions=2, seed=1, follows=True),
    }


def _reference(type_name: str, policy: str | None, *acts: Act, seed: int, **arg: Any) -> Scenario:
    given = {"seed": seed, "pace": 0.1, "trouble": 0.0, "chunk": 200, "calls": 0.05, **arg}
    wish = Wish(0, 0.3, type_name, "a", given, None, policy, acts)
    return plain(seed, 2, [wish], types=["check"], ttl=2, poll=2.0, calm=8.0)


def discover(wanted: Scenario) -> list[Point]:
    """All requests of the daemons and of the client in a run that nobody disturbs, in order."""
    sim = Simulation(wanted)
    points: list[Point] = []
    counts: Counter[str] = Counter()

    def sending(process: Process, path: str, asked: Any) -> float:
        number = counts[process.name]
        counts[process.name] += 1
        if process.name.startswith(("exec-", "client-", "operator")) and not sim.all_ended:
            points.append(Point(process.name, number, what(sim, path, asked)))
        return 0.0

    sim.network.sending = sending
    report = sim.run()
    if report.breaches:
        raise AssertionError(f"the reference run itself breaches: {report.breaches[0]}")
    return points


def strike(wanted: Scenario, point: Point, action: str, moment: str) -> list[Breach]:
    """The same run with the process struck at that point; what it breaches."""
    sim = Simulation(wanted)
    counts: Counter[str] = Counter()
    doing = _Strike(sim, action, 2.5 * wanted.ttl)

    def sending(process: Process, path: str, asked: Any) -> float:
        number = counts[process.name]
        counts[process.name] += 1
        if (process.name, number) != (point.process, point.number):
            return 0.0
        if moment == "before":
            return doing.strike(process)
        sim.network.applied = applied(asked)
        return 0.0

    def applied(wanted_one: Any) -> Callable[[Process, str, Any], None]:
        def done(process: Process, path: str, asked: Any) -> None:
            if asked is wanted_one:
                doing.strike(process)

        return done

    sim.network.sending = sending
    return sim.run().breaches


class _Strike:
    """Kills, freezes or cuts off a process, once, and lets it come back."""

    def __init__(self, sim: Simulation, action: str, lasts: float) -> None:
        self._sim = sim
        self._action = action
        self._lasts = lasts

    def strike(self, process: Process) -> float:
        """Do it; the seconds by which a request of this moment is put off."""
        sim, loop = self._sim, self._sim.loop
        if process.dead:
            return 0.0
        sim.note(f"{process.name}: {self._action}")
        if self._action == "kill":
            machine = self._machine(process)
            if machine is None:
                loop.kill(process)
                sim.network.died(process)
            else:
                machine.crash()
                loop.world_at(loop.now + RESTART, machine.start)
            return 0.0
        until = loop.now + self._lasts
        if self._action == "freeze":
            loop.freeze(process)
            loop.world_at(until, loop.thaw, process)
            return self._lasts
        links = sim.network.links(process)
        for link in links:
            sim.network.hold(link, ("KV", "Lease", "Watch"), ("KV", "Lease", "Watch"))
        loop.world_at(until, sim.network.heal_all, links)
        return 0.0

    def _machine(self, process: Process) -> Machine | None:
        return next((machine for machine in self._sim.machines if machine.process is process), None)


@dataclass(frozen=True, slots=True)
class Strike:
    """One run: which reference, where, what, and when."""

    reference: str
    point: Point
    action: str
    moment: str

    def __str__(self) -> str:
        p = self.point
        return f"{self.reference}: {self.action} {p.process}, request {p.number} ({p.what}), {self.moment}"


def strikes(*, every: bool) -> list[Strike]:
    """All strikes at all points; or those of them that differ most from each other: killed at each point, before and
    after; frozen and cut off after each write.
    """
    return [
        Strike(name, point, action, moment)
        for name, wanted in references().items()
        for point in discover(wanted)
        for action in ACTIONS
        for moment in MOMENTS
        if every or action == "kill" or (moment == "done" and point.writes)
    ]


def one_strike(struck: Strike) -> tuple[Strike, list[str]]:
    """Run it; what it breaches."""
    with quietly():
        found = strike(references()[struck.reference], struck.point, struck.action, struck.moment)
    return struck, [str(breach) for breach in found]


# ------------------------------------------------------------------ what it is


def what(sim: Simulation, path: str, asked: Any) -> str:
    """A request in words: the method, and for a transaction what it would write."""
    if not isinstance(asked, Txn):
        return path.rpartition("/")[2]
    return ", ".join(sorted(set(_writes(sim, asked)))) or "read"


def _writes(sim: Simulation, txn: Txn) -> Iterator[str]:
    for op in txn.success:
        if isinstance(op, Txn):
            yield from _writes(sim, op)
        elif isinstance(op, Put | Delete):
            verb = "put" if isinstance(op, Put) else "delete"
            yield f"{verb} {_family(sim, op.key)}"
        elif not isinstance(op, Get):
            raise TypeError(op)


def _family(sim: Simulation, key: str) -> str:
    try:
        parsed = sim.keys.parse(key)
    except InvalidArgument:
        return "a range"
    if parsed.partition >= 0 and parsed.family != K.CLAIM:
        return f"job {parsed.name}"
    return parsed.name or parsed.family
