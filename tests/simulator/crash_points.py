"""Crash points, enumerated: every step by which a process changes something for others or for its successor, or asks
for something, is a place where it can be struck.

Between two steps a process changes nothing but its memory, so the moments that differ are: before a step, and after
it was done, before the process knows. Steps are

- each request to etcd: before it is sent, and after it was done, before it is answered;
- each change of the executor's disk: a run written down or removed, the binding;
- what the child does: a job that starts, a checkpoint (from when the output is there until the answer has come), an end
  of a job that is handed over, a call of planning, completion or cleanup code.

A discovery run lists all of them; then the run is repeated, the same up to that moment, and struck there. A new step of
a protocol sends a request, and is so covered without anybody remembering it.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distop.errors import InvalidArgument
from distop.protocol import keys as K
from distop.protocol.frozen import frozen
from distop.protocol.txn import Delete, Get, Put, Txn
from distop.store.client import EtcdClient
from tests.simulator.etcd_wire import to_text
from tests.simulator.machine import nothing
from tests.simulator.reference_runs import RESTART
from tests.simulator.run import Simulation, quietly
from tests.simulator.server_links import EVERYTHING
from tests.simulator.simulated_behaviors import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.simulator.machine import Machine
    from tests.simulator.reference_runs import Reference
    from tests.simulator.run import Report
    from tests.simulator.virtual_loop import Process

ACTIONS = ("kill", "freeze", "overtake", "cut", "stop", "kill-child", "run-again")
"""kill -9 of the process; SIGSTOP; SIGSTOP until somebody else cleans up after a job, when it wakes up and what it has
sent arrives; its connections swallow everything; SIGTERM; kill -9 of the daemon's child alone; kill -9 of a client that
is then run once more, with the same request ids.
"""
CLEANUP = "child: clean up"
MOMENTS = ("before", "done")
STRUCK = ("exec-", "client-", "actor-", "operator")
"""Processes that are struck: those that set the scene are not."""


@frozen
class Point:
    """The ``number``-th point of a run: whose it is, and what it does. ``busy``: its child is at work then."""

    number: int
    process: str
    what: str
    busy: bool

    def __str__(self) -> str:
        return f"{self.process} at point {self.number} ({self.what})"

    @property
    def role(self) -> str:
        """What kind of process it is: ``exec``, ``client``, ``actor``, ``operator``."""
        return self.process.partition("-")[0]

    @property
    def label(self) -> str:
        """That of the transaction; "" where it is none that writes."""
        return "" if self.what.startswith(("disk:", "child:")) else self.what.rpartition(": ")[0]

    def actions(self) -> tuple[str, ...]:
        """What can be done to the process there."""
        known = ["kill", "freeze", "cut"]
        if self.role in ("client", "actor"):
            known.append("run-again")
        elif self.role == "exec":
            known += ("stop", "overtake")
            if self.busy or self.what.startswith("child:"):
                known.append("kill-child")
        return tuple(known)


@dataclass(slots=True)
class Blow:
    """A strike that is to come: at the first point that it ``wants``, ``moment`` it is done."""

    wants: Callable[[Point], bool]
    action: str
    moment: str
    away: float = RESTART
    struck: Point | None = None


class Course:
    """One run of a reference, its points numbered as they come, with the opening of the reference and this blow."""

    def __init__(self, reference: Reference, blow: Blow | None = None) -> None:
        self.sim = sim = Simulation(reference.scenario)
        self.points: list[Point] = []
        self.opened = -1
        """The number of the point at which the opening struck."""
        self._lasts = 2.5 * reference.scenario.ttl
        self._opening = None
        if (first := reference.opening) is not None:
            self._opening = Blow(lambda p: p.what.startswith(first.step), first.action, first.moment, first.away)
        self._blows = [one for one in (self._opening, blow) if one is not None]
        self._asked: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._until_cleanup: list[tuple[Process, Callable[[], None]]] = []
        """Who stands still until somebody else cleans up, and what ends that."""
        sim.network.sending = self._sending
        sim.network.applied = self._applied
        sim.stepping = lambda process, what: self._meet(process, what)[1]

    @property
    def cleans_after_losses(self) -> bool:
        """Jobs of it fail with their executors: somebody else cleans up after these."""
        return any(TYPES[wish.type].lost == "fail" for wish in self.sim.scenario.wishes)

    def run(self) -> Report:
        """Run it to its end."""
        with _labelled():
            report = self.sim.run()
        if self._opening is not None and self._opening.struck is not None:
            self.opened = self._opening.struck.number
        return report

    # ----------------------------------------------------------------- points

    def _sending(self, process: Process, path: str, asked: Any) -> float:
        put_off, done = self._meet(process, what(self.sim, path, asked))
        if done is not nothing:
            self._asked[id(asked)] = (asked, done)
        return put_off

    def _applied(self, process: Process, path: str, asked: Any) -> None:
        if id(asked) in self._asked:
            self._asked.pop(id(asked))[1]()

    def _meet(self, process: Process, what: str) -> tuple[float, Callable[[], None]]:
        """A point: the seconds by which what it does is put off, and what is to be called once it was done."""
        if process.dead or not process.name.startswith(STRUCK) or self.sim.all_ended:
            return 0.0, nothing
        machine = self._machine(process)
        point = Point(len(self.points), process.name, what, machine is not None and machine.at_work)
        self.points.append(point)
        if what == CLEANUP:
            for _, wake in [one for one in self._until_cleanup if one[0] is not process]:
                wake()
        put_off = 0.0
        after: list[Blow] = []
        for blow in self._blows:
            if blow.struck is None and blow.wants(point):
                blow.struck = point
                if blow.moment == "before":
                    put_off = max(put_off, self._strike(process, blow, point))
                else:
                    after.append(blow)

        def done() -> None:
            for blow in after:
                self._strike(process, blow, point)

        return put_off, done if after else nothing

    def _machine(self, process: Process) -> Machine | None:
        return next((machine for machine in self.sim.machines if machine.process is process), None)

    # ---------------------------------------------------------------- strikes

    def _strike(self, process: Process, blow: Blow, point: Point) -> float:
        """Do it, and let the process come back later; the seconds by which a request of this moment is put off."""
        if process.dead:
            return 0.0
        self.sim.note(f"{blow.action} {point}, {blow.moment}")
        machine = self._machine(process)
        if blow.action == "freeze":
            return self._freeze(process)
        if blow.action == "overtake":
            self._overtake(process)
            return 0.0
        if blow.action == "cut":
            self._cut(process)
        elif machine is None:
            self.sim.loop.kill(process)
            self.sim.network.died(process)
            if blow.action == "run-again":
                self.sim.loop.world_at(self.sim.loop.now + RESTART, self.sim.run_again, process)
        elif blow.action == "kill-child":
            machine.kill_child()
        else:
            if blow.action == "kill":
                machine.crash()
            else:
                machine.stop()
            self._start_again(machine, blow.away)
        return 0.0

    def _start_again(self, machine: Machine, after: float) -> None:
        """Once the daemon is gone: a stop takes its time."""

        def start() -> None:
            if machine.process is not None:
                self._start_again(machine, RESTART)
            else:
                machine.start()

        self.sim.loop.world_at(self.sim.loop.now + after, start)

    def _freeze(self, process: Process) -> float:
        loop = self.sim.loop
        loop.freeze(process)
        loop.world_at(loop.now + self._lasts, loop.thaw, process)
        return self._lasts

    def _overtake(self, process: Process) -> None:
        network, loop = self.sim.network, self.sim.loop
        holds = [network.hold(link, held=EVERYTHING) for link in network.links(process)]

        def wake() -> None:
            if waiting in self._until_cleanup:
                self._until_cleanup.remove(waiting)
                loop.thaw(process)
                network.release(holds)

        waiting = (process, wake)
        self._until_cleanup.append(waiting)
        loop.freeze(process)
        loop.world_at(loop.now + self._lasts, wake)

    def _cut(self, process: Process) -> None:
        network, loop = self.sim.network, self.sim.loop
        holds = [network.hold(link, EVERYTHING, EVERYTHING) for link in network.links(process)]
        loop.world_at(loop.now + self._lasts, network.release, holds)


def discover(reference: Reference) -> Course:
    """The run that nobody disturbs but its opening: ``points`` are all its points, in order."""
    course = Course(reference)
    with quietly():
        report = course.run()
    if report.breaches:
        raise AssertionError(f"the reference run itself breaches: {report.breaches[0]}")
    return course


# ------------------------------------------------------------------ what it is

_LABEL: ContextVar[str] = ContextVar("distop-label", default="")


@contextlib.contextmanager
def _labelled() -> Iterator[None]:
    """A transaction's label is not sent: while this lasts, the one of the current commit is known."""
    commit = EtcdClient.commit

    async def named(self: EtcdClient, txn: Txn, **given: Any) -> Any:
        former = _LABEL.get()
        _LABEL.set(txn.label)
        try:
            return await commit(self, txn, **given)
        finally:
            _LABEL.set(former)

    EtcdClient.commit = named  # type: ignore[method-assign]
    try:
        yield
    finally:
        EtcdClient.commit = commit  # type: ignore[method-assign]


def what(sim: Simulation, path: str, asked: Any) -> str:
    """A request in words: the method and what it looks at, or for a transaction its label and what it would write."""
    if isinstance(asked, Txn):
        if writes := sorted(set(_writes(sim, asked))):
            return f"{_LABEL.get()}: {', '.join(writes)}"
        return f"read {', '.join(sorted({_family(sim, op) for op in asked.success if isinstance(op, Get)}))}"
    method = path.rpartition("/")[2]
    if isinstance(asked, tuple):
        return f"{method} {_family(sim, asked[0])}"
    if method == "Watch" and asked.HasField("create_request"):
        return f"{method} {_family(sim, Get(to_text(asked.create_request.key)))}"
    return method


def _writes(sim: Simulation, txn: Txn) -> Iterator[str]:
    for op in txn.success:
        if isinstance(op, Txn):
            yield from _writes(sim, op)
        elif isinstance(op, Put | Delete):
            verb = "put" if isinstance(op, Put) else "delete"
            yield f"{verb} {_family(sim, op)}"


def _family(sim: Simulation, op: Put | Delete | Get) -> str:
    """Which keys: the name after the operation, or the family; of a range where it begins."""
    try:
        parsed = sim.keys.parse(op.key)
    except InvalidArgument:
        return f"{op.key.partition('.')[0]}…"
    if parsed.partition >= 0 and parsed.family != K.CLAIM:
        return f"job {parsed.name}"
    if parsed.chunk >= 0:
        return "chunk"
    return parsed.name or parsed.family
