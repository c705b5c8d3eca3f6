"""Crash points: all steps of a run at which a process can be killed, frozen or cut off.

Between two steps a process changes only its memory, so two moments of each step differ: before the step, and after it,
before the process learns of it. Steps are

- each request to etcd: before it is sent, and after it was applied, before it is answered;
- each change of the executor's disk: a run written or removed, the binding;
- each step of the child: the start of a job, a checkpoint (from the written output until the answer), the hand-over of
  a job's end, a call of planning, completion or cleanup code.

A discovery run lists all points. The run is then repeated, identical up to one point, and struck there. A new step of a
protocol sends a request, so it is covered at once.
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
from tests.simulator.machine import do_nothing
from tests.simulator.reference_runs import RESTART
from tests.simulator.run import Simulation, without_logs
from tests.simulator.server_links import EVERYTHING
from tests.simulator.simulated_behaviors import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.simulator.machine import Machine
    from tests.simulator.reference_runs import Reference
    from tests.simulator.run import Report
    from tests.simulator.virtual_loop import Process

ACTIONS = ("kill", "freeze", "overtake", "cut", "stop", "kill-child", "run-again")
"""What can be done to a process.

``kill``: kill -9. ``freeze``: SIGSTOP for longer than a session lasts. ``overtake``: SIGSTOP until another process
cleans up after a job; then the process continues and its delayed requests arrive. ``cut``: its connections drop
everything. ``stop``: SIGTERM. ``kill-child``: kill -9 of the daemon's child alone. ``run-again``: kill -9 of a client,
which is run once more with the same request ids.
"""
CLEANUP = "child: clean up"
MOMENTS = ("before", "done")
STRUCK = ("exec-", "client-", "actor-", "operator")
"""Prefixes of the processes that are struck; set-up processes are not."""


@frozen
class Point:
    """The ``number``-th crash point of a run. ``what``: the step; ``busy``: the process's child works meanwhile."""

    number: int
    process: str
    what: str
    busy: bool

    def __str__(self) -> str:
        return f"{self.process} at point {self.number} ({self.what})"

    @property
    def role(self) -> str:
        """The kind of process: ``exec``, ``client``, ``actor``, ``operator``."""
        return self.process.partition("-")[0]

    @property
    def label(self) -> str:
        """The transaction's label; "" unless the step is a writing transaction."""
        return "" if self.what.startswith(("disk:", "child:")) else self.what.rpartition(": ")[0]

    def actions(self) -> tuple[str, ...]:
        """The actions that apply to this process at this point."""
        known = ["kill", "freeze", "cut"]
        if self.role in ("client", "actor"):
            known.append("run-again")
        elif self.role == "exec":
            known += ("stop", "overtake")
            if self.busy or self.what.startswith("child:"):
                known.append("kill-child")
        return tuple(known)


@dataclass(slots=True)
class PlannedStrike:
    """A strike at the first point that ``wants`` accepts. ``moment``: before or after the step; ``away``: seconds until
    a restart; ``struck``: the point, once struck.
    """

    wants: Callable[[Point], bool]
    action: str
    moment: str
    away: float = RESTART
    struck: Point | None = None


class ReferenceRun:
    """One run of a reference, with its opening strike and perhaps another one. Its points are numbered in order."""

    def __init__(self, reference: Reference, strike: PlannedStrike | None = None) -> None:
        self.sim = sim = Simulation(reference.scenario)
        self.points: list[Point] = []
        self.opened = -1
        """The number of the point of the opening strike; -1: none."""
        self._lasts = 2.5 * reference.scenario.ttl
        self._opening = None
        if (first := reference.opening) is not None:
            self._opening = PlannedStrike(
                lambda point: point.what.startswith(first.step), first.action, first.moment, first.away
            )
        self._strikes = [one for one in (self._opening, strike) if one is not None]
        self._asked: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._until_cleanup: list[tuple[Process, Callable[[], None]]] = []
        """Processes that are frozen until another one cleans up, each with the function that thaws it."""
        sim.network.sending = self._sending
        sim.network.applied = self._applied
        sim.stepping = lambda process, what: self._reach(process, what)[1]

    @property
    def cleans_after_losses(self) -> bool:
        """Whether jobs fail when their executor is lost: another executor then cleans up after them."""
        return any(TYPES[submission.type].lost == "fail" for submission in self.sim.scenario.submissions)

    def run(self) -> Report:
        """Run it to its end."""
        with _labelled():
            report = self.sim.run()
        if self._opening is not None and self._opening.struck is not None:
            self.opened = self._opening.struck.number
        return report

    # ----------------------------------------------------------------- points

    def _sending(self, process: Process, path: str, asked: Any) -> float:
        delay, done = self._reach(process, request_name(self.sim, path, asked))
        if done is not do_nothing:
            self._asked[id(asked)] = (asked, done)
        return delay

    def _applied(self, process: Process, path: str, asked: Any) -> None:
        if id(asked) in self._asked:
            self._asked.pop(id(asked))[1]()

    def _reach(self, process: Process, what: str) -> tuple[float, Callable[[], None]]:
        """Number a point and strike there.

        Returns the seconds by which the step is delayed, and the function to call after the step.
        """
        if process.dead or not process.name.startswith(STRUCK) or self.sim.all_ended:
            return 0.0, do_nothing
        machine = self._machine(process)
        point = Point(len(self.points), process.name, what, machine is not None and machine.at_work)
        self.points.append(point)
        if what == CLEANUP:
            for _, wake in [one for one in self._until_cleanup if one[0] is not process]:
                wake()
        delay = 0.0
        after: list[PlannedStrike] = []
        for strike in self._strikes:
            if strike.struck is None and strike.wants(point):
                strike.struck = point
                if strike.moment == "before":
                    delay = max(delay, self._strike(process, strike, point))
                else:
                    after.append(strike)

        def done() -> None:
            for strike in after:
                self._strike(process, strike, point)

        return delay, done if after else do_nothing

    def _machine(self, process: Process) -> Machine | None:
        return next((machine for machine in self.sim.machines if machine.process is process), None)

    # ---------------------------------------------------------------- strikes

    def _strike(self, process: Process, strike: PlannedStrike, point: Point) -> float:
        """Strike a process, and plan its return. Returns the seconds by which its current request is delayed."""
        if process.dead:
            return 0.0
        self.sim.note(f"{strike.action} {point}, {strike.moment}")
        machine = self._machine(process)
        if strike.action == "freeze":
            return self._freeze(process)
        if strike.action == "overtake":
            self._overtake(process)
            return 0.0
        if strike.action == "cut":
            self._cut(process)
        elif machine is None:
            self.sim.loop.kill(process)
            self.sim.network.died(process)
            if strike.action == "run-again":
                self.sim.loop.world_at(self.sim.loop.now + RESTART, self.sim.run_again, process)
        elif strike.action == "kill-child":
            machine.kill_child()
        else:
            if strike.action == "kill":
                machine.crash()
            else:
                machine.stop()
            self._start_again(machine, strike.away)
        return 0.0

    def _start_again(self, machine: Machine, after: float) -> None:
        """Start the daemon, once the stopping one has ended."""

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
        blocks = [network.block(link, requests=EVERYTHING) for link in network.links(process)]

        def wake() -> None:
            if waiting in self._until_cleanup:
                self._until_cleanup.remove(waiting)
                loop.thaw(process)
                network.unblock(blocks)

        waiting = (process, wake)
        self._until_cleanup.append(waiting)
        loop.freeze(process)
        loop.world_at(loop.now + self._lasts, wake)

    def _cut(self, process: Process) -> None:
        network, loop = self.sim.network, self.sim.loop
        blocks = [network.block(link, EVERYTHING, EVERYTHING) for link in network.links(process)]
        loop.world_at(loop.now + self._lasts, network.unblock, blocks)


def discover(reference: Reference) -> ReferenceRun:
    """Run a reference with its opening strike only, and collect all its points. Raises AssertionError on a breach."""
    run = ReferenceRun(reference)
    with without_logs():
        report = run.run()
    if report.breaches:
        raise AssertionError(f"the reference run itself has a breach: {report.breaches[0]}")
    return run


# ------------------------------------------------------------- names of steps

_LABEL: ContextVar[str] = ContextVar("distop-label", default="")


@contextlib.contextmanager
def _labelled() -> Iterator[None]:
    """Make the label of the current commit known, since labels are not sent to etcd."""
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


def request_name(sim: Simulation, path: str, asked: Any) -> str:
    """A request as text: its method and kind of key, or a transaction's label and writes."""
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
    """The kind of a key, or of a range's first key: the name after the operation, or the family."""
    try:
        parsed = sim.keys.parse(op.key)
    except InvalidArgument:
        return f"{op.key.partition('.')[0]}…"
    if parsed.partition >= 0 and parsed.family != K.CLAIM:
        return f"job {parsed.name}"
    if parsed.chunk >= 0:
        return "chunk"
    return parsed.name or parsed.family
