"""One host of a simulation: a daemon that runs the production code, its guardian, children, clocks and disk."""

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
from tests.simulator.policies import TableVersions
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
    from tests.simulator.sim_child_keeper import ChildKeeper
    from tests.simulator.virtual_loop import VirtualLoop
StepObserver: TypeAlias = "Callable[[Process, str], Callable[[], None]]"
"""Called before a step of a process other than a request to etcd. The returned function is called after the step."""

RESTART = 1.0
"""Seconds until a daemon that ended by itself is started again."""


def do_nothing() -> None:
    """The end of a step that is not observed."""


def unobserved(process: Process, what: str) -> Callable[[], None]:
    """A ``StepObserver`` that observes nothing."""
    return do_nothing


def _change(step: StepObserver, what: str, do: Callable[[], object]) -> None:
    """Change the disk, unless the process was killed earlier in its current callback."""
    process = PROCESS.get()
    if process.dead:
        return
    done = step(process, what)
    if not process.dead:
        do()
        done()


class Disk(RunFiles):
    """The runs in a machine's work directory, which survives its daemons. ``full``: how many faults fill the disk."""

    def __init__(self, step: StepObserver = unobserved) -> None:
        super().__init__(Path("/nowhere"))
        self.full = 0
        self._runs: dict[str, bytes] = {}
        self._known: dict[str, LocalRun] = {}
        self._step = step

    def holds(self, op: OperationRef, partition: int, fence: int) -> bool:
        """Whether a run with this attempt at a job is on disk."""
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
        """Nothing: simulated jobs have no private directories."""
        return iter(())


class SimBindingFile(BindingFile):
    """The cluster binding in a machine's work directory, which survives its daemons."""

    def __init__(self, step: StepObserver = unobserved) -> None:
        super().__init__(Path("/nowhere"))
        self._data: bytes | None = None
        self._step = step

    def read(self) -> bytes | None:
        return self._data

    def write(self, data: bytes) -> None:
        _change(self._step, "disk: write the binding", lambda: setattr(self, "_data", data))


class Machine:
    """One host. ``completed`` is called with the arguments of completion code, ``step`` before each change of the disk
    and each step of the child; the function that ``step`` returns is called after the step.
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
        step: StepObserver = unobserved,
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
        self.versions = TableVersions()
        """The versions of the tables, which a simulation shares among its hosts."""
        self.unable = frozenset(unable)
        """Types that it offers but cannot run."""
        self._recovers = recovers
        self.declarations = tuple(simulated_behaviors.TYPES[t] for t in types)
        self.process: Process | None = None
        self.worker: SimWorker | None = None
        self.incarnations: list[str] = []
        self._completed = completed
        self.step = step
        self.disk = Disk(step)
        self._binding = SimBindingFile(step)
        self._config = ExecutorConfig(
            etcd=etcd, work_dir=Path("/nowhere"), namespace=namespace, executor_id=name, slots=slots,
            ttl=ttl, poll=poll, history_limit=history_limit, history_age=history_age, limits=limits,
            labels=labels or {}, serves=serves,
        )  # fmt: skip
        self._context: contextvars.Context | None = None
        self._stop: asyncio.Event | None = None
        self.suspended = False
        self.left = False
        self._missed: list[ChildKeeper] = []
        """Workers whose deadline passed while the guardian was suspended."""
        self._living: list[Child] = []
        self._starts = 0
        self._children = 0
        self._deadlines: dict[ChildKeeper, float] = {}

    # ------------------------------------------------------------------ daemon

    def inability(self, type_name: str) -> Literal["unable", "unavailable"] | None:
        """Why this host cannot run a type: ``unable`` for good, or ``unavailable`` for now; None: it can."""
        if type_name not in self.unable:
            return None
        if not self._recovers:
            return "unable"
        return "unavailable" if self.loop.now < self._recovers else None

    def check_served(self, ref: OperationRef, incarnation: str, what: str) -> None:
        """Check that this host serves a request to its child."""
        if why := refusal(self._config.serves, ref.type, (ref.table,)):
            self.effects.not_served(ref, incarnation, what, why)

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
                log, binding = logs.get("distop.executor"), Binding.load(self._binding, self._config.namespace)
                setup = DaemonSetup(self._config, self.name, log, self._make_worker, lambda _: self.disk)
                await serve(setup, stop, binding)
            except ClusterChanged as error:
                if self.network.etcd.stale_answers:
                    self.loop.world_at(self.loop.now + RESTART, self.start)
                else:
                    self.loop.errors.append(f"{self.name}: {error}")
            finally:
                if self.process is process:
                    self._gone(process)

        self.loop.spawn(process, live(), context)

    async def _read_clock(self, config: EtcdConfig, endpoint: Endpoint, limit: float) -> float:
        """The skew of this host: the clocks of etcd's members are right."""
        return self.source.skew

    def _gone(self, process: Process) -> None:
        self.process = None
        self.loop.world_at(self.loop.now, self.network.died, process)

    def _make_worker(self, config: WorkerConfig, *, log: Any) -> Any:
        for former in self.incarnations:
            self.effects.end_exemption(former, self.loop.now)
        self.incarnations.append(config.incarnation)
        assert self.process is not None
        self.process.label = config.incarnation
        self.worker = SimWorker(config, self)
        return self.worker

    def crash(self) -> None:
        """kill -9: the daemon ends at once; its guardian notices a little later."""
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
        """Remove the host for good."""
        self.left = True
        self.resume()
        self.crash()

    def freeze(self) -> Process | None:
        """SIGSTOP of the daemon; children and guardian continue."""
        if self.process is not None and self.process.life is Life.RUNNING:
            self.loop.freeze(self.process)
            return self.process
        return None

    def suspend(self) -> None:
        """Freeze daemon, children and guardian, as on a suspended machine; its clocks continue."""
        self.suspended = True
        for process in self._processes():
            self.loop.freeze(process)

    def resume(self) -> None:
        """End :meth:`suspend`: overdue callbacks run first; the guardian actions a little late."""
        if not self.suspended:
            return
        self.suspended = False
        for process in self._processes():
            self.loop.thaw(process)
        missed, self._missed = self._missed, []
        for worker in missed:
            self.effects.end_exemption(worker.config.incarnation, self.loop.now + GUARDIAN_LATE)
            late = self.chance.uniform(0.0, GUARDIAN_LATE)
            self.loop.world_at(self.loop.now + late, worker.killed_by_guardian, "deadline")

    def _processes(self) -> list[Process]:
        self._living = [child for child in self._living if child.alive]
        daemon = [self.process] if self.process is not None else []
        return [*daemon, *(child.process for child in self._living)]

    @property
    def at_work(self) -> bool:
        """Whether its child works."""
        return self.worker is not None and self.worker.at_work

    def kill_child(self) -> None:
        """kill -9 of the child alone."""
        if self.worker is not None:
            self.worker.child_killed()

    def stop(self) -> None:
        """SIGTERM of the daemon."""
        if self.process is not None and self._stop is not None:
            self.loop.call_soon(self._stop.set, context=self._context)

    # --------------------------------------------------------------- guardian

    def guard(self, worker: ChildKeeper, boottime: float) -> None:
        """Tell the guardian a deadline."""
        if boottime <= self._deadlines.get(worker, 0.0):
            return
        self._deadlines[worker] = boottime
        late = self.chance.uniform(0.0, GUARDIAN_LATE)
        self.loop.world_at(self.loop.now + boottime - self.source.boottime() + late, self._check, worker, boottime)

    def _check(self, worker: ChildKeeper, boottime: float) -> None:
        if self._deadlines[worker] != boottime:
            return
        if self.suspended:
            self.effects.exempt(worker.config.incarnation)
            self._missed.append(worker)
        else:
            worker.killed_by_guardian("deadline")

    def deadline_of(self, worker: ChildKeeper) -> float:
        """The worker's deadline, as the guardian knows it."""
        return self._deadlines.get(worker, 0.0)

    def new_child(self) -> Child:
        self._children += 1
        child = Child(self, self._children)
        self._living.append(child)
        return child

    def completed(self, ref: OperationRef, *args: Any) -> None:
        """Check a call of completion code."""
        self._completed(ref, *args)
