"""One host of a simulation: a daemon that runs the production code, its guardian, its children, its clocks."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from distop.clock import source
from distop.daemon.cluster_binding import Binding, BindingFile
from distop.daemon.incarnation import DaemonSetup
from distop.daemon.local_jobs import LocalRun, RunFiles
from distop.daemon.process import serve
from distop.errors import ClusterChanged
from distop.protocol.executor_nodes import ALL, Serves, refusal
from distop.protocol.size_limits import DEFAULT
from distop.runtime import logs
from distop.settings import ExecutorConfig
from distop.store import server_clock
from distop.store.transport import channels
from tests.simulator import simulated_behaviors
from tests.simulator.children import GUARDIAN_LATE, Child
from tests.simulator.process_clock import SimSource
from tests.simulator.sim_worker import SimWorker
from tests.simulator.virtual_loop import PROCESS, Life, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distop.protocol.behavior_declaration import Declaration
    from distop.protocol.records import OperationRef
    from distop.protocol.size_limits import Limits
    from distop.store.connection_settings import Endpoint, EtcdConfig
    from distop.worker.daemon_side.requests import WorkerConfig
    from tests.simulator.job_effects import Effects
    from tests.simulator.network import Network
    from tests.simulator.sim_child_keeper import Keeping
    from tests.simulator.virtual_loop import VirtualLoop
Step: TypeAlias = "Callable[[Process, str], Callable[[], None]]"
"""Called before a process does something that is no request; what it returns, once that was done."""

RESTART = 1.0
"""Seconds until what has ended by itself is started again."""


def nothing() -> None:
    """Nobody wants to know that a step was done."""


def unobserved(process: Process, what: str) -> Callable[[], None]:
    """Nobody wants to know of the steps of a machine."""
    return nothing


def _change(step: Step, what: str, do: Callable[[], object]) -> None:
    """One change of a disk. A process that was killed changes none, whatever it still runs of its last callback."""
    process = PROCESS.get()
    if process.dead:
        return
    done = step(process, what)
    if not process.dead:
        do()
        done()


class Disk(RunFiles):
    """The work directory of a machine: it outlives its daemons. ``full``: how many faults fill it."""

    def __init__(self, step: Step = unobserved) -> None:
        super().__init__(Path("/nowhere"))
        self.full = 0
        self._runs: dict[str, bytes] = {}
        self._known: dict[str, LocalRun] = {}
        self._step = step

    def holds(self, op: OperationRef, partition: int, fence: int) -> bool:
        """A run is written down with this attempt at a job."""
        runs = (self._known.get(name) or self._decoded(name) for name in self._runs)
        items = (run.left.get(partition) for run in runs if run.op == op)
        return any(item is not None and item.fence == fence for item in items)

    def _decoded(self, name: str) -> LocalRun:
        run = self._known[name] = LocalRun.decode(name, self._runs[name])
        return run

    def names(self) -> list[str]:
        return sorted(self._runs)

    def read(self, name: str) -> bytes:
        return self._runs[name]

    def write(self, name: str, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _change(self._step, "disk: write a run", lambda: self._runs.update({name: data}))

    def remove(self, name: str) -> None:
        _change(self._step, "disk: remove a run", lambda: (self._runs.pop(name, None), self._known.pop(name, None)))

    def operations(self) -> Iterator[OperationRef]:
        """No private directory is ever made."""
        return iter(())


class Remembered(BindingFile):
    """The binding of a machine's work directory: it outlives its daemons, too."""

    def __init__(self, step: Step = unobserved) -> None:
        super().__init__(Path("/nowhere"))
        self._data: bytes | None = None
        self._step = step

    def read(self) -> bytes | None:
        return self._data

    def write(self, data: bytes) -> None:
        _change(self._step, "disk: write the binding", lambda: setattr(self, "_data", data))


class Machine:
    """A host. ``completed`` is called with what completion code is told; ``step`` before each step of it that is no
    request: a change of its disk, a part of its child's work. What that returns is called once the step was done.
    """

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        network: Network,
        effects: Effects,
        etcd: EtcdConfig,
        seed: str,
        *,
        types: Sequence[str],
        slots: int,
        ttl: float,
        poll: float,
        skew: float,
        completed: Any,
        unable: Sequence[str] = (),
        recovers: float = 0.0,
        step: Step = unobserved,
        namespace: str = "",
        history_limit: int = 1000,
        history_age: float | None = None,
        limits: Limits = DEFAULT,
        labels: Mapping[str, str] | None = None,
        serves: Serves = ALL,
    ) -> None:
        self.name = name
        self.loop = loop
        self.network = network
        self.effects = effects
        self.chance = random.Random(f"{seed}/{name}/worker")
        self.growth = random.Random(f"{seed}/{name}/growth")
        self.source = SimSource(loop, random.Random(f"{seed}/{name}"), skew)
        self.types: Mapping[str, Declaration] = simulated_behaviors.TYPES
        self.unable = frozenset(unable)
        """Types that it offers and cannot run."""
        self._recovers = recovers
        self.declarations = tuple(simulated_behaviors.TYPES[t] for t in types)
        self.process: Process | None = None
        self.worker: SimWorker | None = None
        self.incarnations: list[str] = []
        self._completed = completed
        self.step = step
        self.disk = Disk(step)
        self._remembered = Remembered(step)
        self._config = ExecutorConfig(
            etcd=etcd, work_dir=Path("/nowhere"), namespace=namespace, executor_id=name, slots=slots,
            ttl=ttl, poll=poll, history_limit=history_limit, history_age=history_age, limits=limits,
            labels=labels or {}, serves=serves,
        )  # fmt: skip
        self._context: contextvars.Context | None = None
        self._stop: asyncio.Event | None = None
        self.suspended = False
        self.left = False
        self._put_off: list[Keeping] = []
        """Those whose guardian would have killed their children, had it not stood still."""
        self._living: list[Child] = []
        self._starts = 0
        self._children = 0
        self._deadlines: dict[Keeping, float] = {}

    # ------------------------------------------------------------------ daemon

    def lacks(self, type_name: str) -> Literal["unable", "unavailable"] | None:
        """How this host cannot run a type: for good, for the moment, or None: it can."""
        if type_name not in self.unable:
            return None
        if not self._recovers:
            return "unable"
        return "unavailable" if self.loop.now < self._recovers else None

    def check_served(self, ref: OperationRef, incarnation: str, what: str) -> None:
        """What a child is asked for has to be served by this host."""
        if why := refusal(self._config.serves, ref.type, (ref.table,)):
            self.effects.unserved(ref, incarnation, what, why)

    def start(self) -> None:
        """Start the daemon, unless it runs or the host is gone."""
        if self.process is not None or self.left:
            return
        self._starts += 1
        process = self.process = Process(f"{self.name}#{self._starts}")
        context = self._context = contextvars.Context()
        context.run(source.set, self.source)
        context.run(channels.set, self.network.channel)
        context.run(server_clock.reading.set, self._read_clock)
        stop = self._stop = asyncio.Event()

        async def live() -> None:
            try:
                log, binding = logs.get("distop.executor"), Binding.load(self._remembered, self._config.namespace)
                setup = DaemonSetup(self._config, self.name, log, self._make_worker, lambda _: self.disk)
                await serve(setup, stop, binding)
            except ClusterChanged as error:
                if self.network.etcd.told_past:
                    self.loop.world_at(self.loop.now + RESTART, self.start)
                else:
                    self.loop.troubles.append(f"{self.name}: {error}")
            finally:
                if self.process is process:
                    self._gone(process)

        self.loop.spawn(process, live(), context)

    async def _read_clock(self, config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
        """The clocks of etcd's members are right."""
        return self.source.skew

    def _gone(self, process: Process) -> None:
        self.process = None
        self.loop.world_at(self.loop.now, self.network.died, process)

    def _make_worker(self, config: WorkerConfig, *, log: Any) -> Any:
        for former in self.incarnations:
            self.effects.knows(former, self.loop.now)
        self.incarnations.append(config.incarnation)
        assert self.process is not None
        self.process.label = config.incarnation
        self.worker = SimWorker(config, self)
        return self.worker

    def crash(self) -> None:
        """kill -9: the daemon is gone at once, its guardian notices a little later."""
        process = self.process
        if process is None:
            return
        self.process = None
        self.loop.kill(process)
        self.network.died(process)
        if self.worker is not None:
            late = self.chance.uniform(0.0, GUARDIAN_LATE)
            self.loop.world_at(self.loop.now + late, self.worker.killed_by_guardian, "daemon-gone")

    def leave(self) -> None:
        """The host is gone for good."""
        self.left = True
        self.go_on()
        self.crash()

    def freeze(self) -> Process | None:
        """SIGSTOP: the daemon stands still; children and guardian go on."""
        if self.process is not None and self.process.life is Life.RUNNING:
            self.loop.freeze(self.process)
            return self.process
        return None

    def suspend(self) -> None:
        """Daemon, children and guardian stand still, as on a suspended machine. (Its clocks go on.)"""
        self.suspended = True
        for process in self._processes():
            self.loop.freeze(process)

    def go_on(self) -> None:
        """The end of :meth:`suspend`: first everything that became due meanwhile, the guardian a little late."""
        if not self.suspended:
            return
        self.suspended = False
        for process in self._processes():
            self.loop.thaw(process)
        put_off, self._put_off = self._put_off, []
        for worker in put_off:
            self.effects.knows(worker.config.incarnation, self.loop.now + GUARDIAN_LATE)
            late = self.chance.uniform(0.0, GUARDIAN_LATE)
            self.loop.world_at(self.loop.now + late, worker.killed_by_guardian, "deadline")

    def _processes(self) -> list[Process]:
        self._living = [child for child in self._living if child.alive]
        daemon = [self.process] if self.process is not None else []
        return [*daemon, *(child.process for child in self._living)]

    @property
    def at_work(self) -> bool:
        """Its child does something."""
        return self.worker is not None and self.worker.at_work

    def kill_child(self) -> None:
        """kill -9 of the child alone: the daemon goes on."""
        if self.worker is not None:
            self.worker.child_killed()

    def stop(self) -> None:
        """SIGTERM."""
        if self.process is not None and self._stop is not None:
            self.loop.call_soon(self._stop.set, context=self._context)

    # --------------------------------------------------------------- guardian

    def guard(self, worker: Keeping, boottime: float) -> None:
        """The guardian learns of a deadline."""
        if boottime <= self._deadlines.get(worker, 0.0):
            return
        self._deadlines[worker] = boottime
        late = self.chance.uniform(0.0, GUARDIAN_LATE)
        self.loop.world_at(self.loop.now + boottime - self.source.boottime() + late, self._check, worker, boottime)

    def _check(self, worker: Keeping, boottime: float) -> None:
        if self._deadlines[worker] != boottime:
            return
        if self.suspended:
            self.effects.forsake(worker.config.incarnation)
            self._put_off.append(worker)
        else:
            worker.killed_by_guardian("deadline")

    def deadline_of(self, worker: Keeping) -> float:
        """The deadline that the guardian knows."""
        return self._deadlines.get(worker, 0.0)

    def new_child(self) -> Child:
        self._children += 1
        child = Child(self, self._children)
        self._living.append(child)
        return child

    def completed(self, ref: OperationRef, *told: Any) -> None:
        """Completion code runs."""
        self._completed(ref, *told)
