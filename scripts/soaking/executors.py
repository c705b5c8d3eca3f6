"""Faults of executors, of their child processes, of the actor, and of connections."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

from distop.worker.guardian import session_members
from soaking.cluster import NAMES, PROXIED, SPARK, STEADY
from tests.support.processes import children, children_of_guardian, signal_all
from tests.support.proxy import Mode

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from soaking.cluster import SoakCluster
    from soaking.faults import Strike
    from soaking.repairs import Repairs
    from tests.support.daemons import Daemon


class ExecutorFaults:
    """The faults of executors. ``strikes``: kind → a function that injects the fault, given its random generator and
    whether it has to be gentle. It returns a description, or None if there is no free target.
    """

    def __init__(self, cluster: SoakCluster, repairs: Repairs, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._repairs = repairs
        self._say = say
        self.strikes: dict[str, Strike] = {
            "kill an executor": self._kill,
            "stop an executor": self._stop,
            "freeze an executor": self._freeze,
            "suspend a machine": self._suspend,
            "kill a child": self._kill_child,
            "kill one process of a child": self._kill_process,
            "kill the actor": self._kill_actor,
            "cut connections": self._cut,
            "swallow everything": lambda chance, gentle: self._proxy(chance, Mode.BLACK_HOLE, 8.0),
            "lose answers": lambda chance, gentle: self._proxy(chance, Mode.DROP_ANSWERS, 2.0),
            "hold requests": lambda chance, gentle: self._proxy(chance, Mode.HOLD_REQUESTS, 4.0),
        }

    def _victim(self, chance: random.Random, gentle: bool, *, spare: bool = False) -> Daemon | None:
        """Draw a target; None if it already has a fault. The draw does not depend on current faults.

        ``spare``: never the steady executor. Gentle faults spare that one and the one with Spark, so that one daemon of
        each kind lives long enough for its memory to be judged.
        """
        spared = {STEADY, SPARK} if gentle else {STEADY} if spare else set[str]()
        some = [name for name in NAMES for _ in range(1 if name == SPARK else 2) if name not in spared]
        name = chance.choice(some)
        return self._cluster.daemons[name] if self._repairs.free(name) else None

    # -------------------------------------------------------------- processes

    def _kill(self, chance: random.Random, gentle: bool) -> str | None:
        daemon, seconds = self._victim(chance, gentle, spare=True), chance.uniform(0.0, 10.0)
        if daemon is None:
            return None
        daemon.kill()
        self._repairs.later(seconds, daemon.start, daemon.name)
        return f"{daemon.name}, started again after {seconds:.1f} s"

    def _stop(self, chance: random.Random, gentle: bool) -> str | None:
        daemon, seconds = self._victim(chance, gentle, spare=True), chance.uniform(1.0, 8.0)
        if daemon is None:
            return None
        daemon.process.send_signal(signal.SIGTERM)

        def start() -> None:
            try:
                daemon.process.wait(30)
            except subprocess.TimeoutExpired:
                self._say(f"{daemon.name} took longer than 30 s to stop")
                daemon.kill()
            daemon.start()

        self._repairs.later(seconds, start, daemon.name)
        return f"{daemon.name}, started again after {seconds:.1f} s"

    def _freeze(self, chance: random.Random, gentle: bool) -> str | None:
        daemon, seconds = self._victim(chance, gentle), chance.uniform(1.0, 2.5 * self._cluster.ttl)
        if daemon is None:
            return None
        daemon.freeze()
        self._repairs.later(seconds, daemon.thaw, daemon.name)
        return f"{daemon.name} for {seconds:.1f} s"

    def _suspend(self, chance: random.Random, gentle: bool) -> str | None:
        """Suspend all its processes, often for longer than the TTL; they resume in random order."""
        daemon, seconds = self._victim(chance, gentle), chance.uniform(1.0, 2.5 * self._cluster.ttl)
        suspensions = self._cluster.suspensions
        # A second suspension in a row could let processes survive that the first one superseded.
        if daemon is None or daemon.process.poll() is not None or suspensions.just_woke(daemon.name):
            return None
        suspensions.begin(daemon.name)
        suspended = daemon.suspend()

        def wake() -> None:
            suspensions.end(daemon.name)
            daemon.wake(chance.shuffle)

        self._repairs.later(seconds, wake, daemon.name)
        return f"{daemon.name} for {seconds:.1f} s, {len(suspended)} processes"

    def _child(self, chance: random.Random, gentle: bool) -> tuple[str, list[int]] | None:
        daemon = self._victim(chance, gentle)
        if daemon is None or daemon.process.poll() is not None:
            return None
        for guardian in children(daemon.pid):
            for child in children_of_guardian(guardian):
                return daemon.name, [child, *(pid for pid in session_members(child) if pid != child)]
        return None

    def _kill_child(self, chance: random.Random, gentle: bool) -> str | None:
        found = self._child(chance, gentle)
        if found is None:
            return None
        signal_all(found[1][:1], signal.SIGKILL)
        return found[0]

    def _kill_process(self, chance: random.Random, gentle: bool) -> str | None:
        found = self._child(chance, gentle)
        if found is None:
            return None
        signal_all([chance.choice(found[1])], signal.SIGKILL)
        return f"{found[0]}, of {len(found[1])}"

    def _kill_actor(self, chance: random.Random, gentle: bool) -> str | None:
        actor, seconds = self._cluster.actor, chance.uniform(0.0, 6.0)
        if not self._repairs.free(actor.name):
            return None
        actor.kill()
        self._repairs.later(seconds, actor.start, actor.name)
        return f"started again after {seconds:.1f} s"

    # ------------------------------------------------------------ connections

    def _cut(self, chance: random.Random, gentle: bool) -> str | None:
        for proxy in self._cluster.proxies:
            proxy.cut()
        return "those of " + ", ".join(PROXIED)

    def _proxy(self, chance: random.Random, mode: Mode, longest: float) -> str | None:
        if not self._repairs.free("proxy"):
            return None
        proxies = [p for p in self._cluster.proxies if chance.random() < 0.5] or self._cluster.proxies
        for proxy in proxies:
            proxy.set(mode)

        def restore_connections() -> None:
            for proxy in proxies:
                proxy.set(Mode.PASS)

        seconds = chance.uniform(0.3, longest)
        self._repairs.later(seconds, restore_connections, "proxy")
        return f"between {', '.join(PROXIED)} and {len(proxies)} members for {seconds:.1f} s"
