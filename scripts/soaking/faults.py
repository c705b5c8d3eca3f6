"""Faults at random, each of which passes by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.errors import DistopError
from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import EtcdClient
from distop.store.config import EtcdConfig
from distop.worker.guardian import session_members
from soaking.cluster import NAMES, PROXIED, STEADY
from tests.support.etcd import compacted
from tests.support.proxy import Mode

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from soaking.cluster import SoakCluster
    from tests.support.daemons import Daemon

PAUSE = (1.0, 5.0)
"""Seconds between two faults."""
KEPT = 300
"""Revisions that compaction leaves, so that the audit sees all of them."""


class Faults:
    """Draws a fault every few seconds. ``say`` tells which."""

    def __init__(self, cluster: SoakCluster, rng: random.Random, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._rng = rng
        self._say = say
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._busy: dict[str, float] = {}
        self._next = time.monotonic() + 10.0
        self.counts: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[], str | None]] = {
            "kill an executor": self._kill,
            "stop an executor": self._stop,
            "freeze an executor": self._freeze,
            "kill a child": self._kill_child,
            "kill one process of a child": self._kill_process,
            "freeze a member": self._freeze_member,
            "restart a member": self._restart_member,
            "freeze all of etcd": self._freeze_all,
            "cut connections": self._cut,
            "swallow everything": lambda: self._proxy(Mode.BLACK_HOLE, 8.0),
            "lose answers": lambda: self._proxy(Mode.DROP_ANSWERS, 2.0),
            "hold requests": lambda: self._proxy(Mode.HOLD_REQUESTS, 4.0),
            "compact": self._compact,
            "raise the space alarm": self._alarm,
        }

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def tend(self) -> None:
        """Undo what is due, and draw the next fault."""
        now = time.monotonic()
        for entry in [entry for entry in self._due if entry[0] <= now]:
            self._due.remove(entry)
            entry[1]()
        if now < self._next:
            return
        self._next = now + self._rng.uniform(*PAUSE)
        for name in self._rng.sample(list(self._kinds), 4):  # what it would strike may be struck already
            told = self._kinds[name]()
            if told is not None:
                self.counts[name] += 1
                self._say(f"{name}: {told}")
                return

    def heal(self) -> None:
        """Undo everything at once."""
        for _, undo in sorted(self._due, key=lambda entry: entry[0]):
            undo()
        self._due.clear()
        for proxy in self._cluster.proxies:
            proxy.set(Mode.PASS)

    def _later(self, seconds: float, undo: Callable[[], None], *busy: str) -> None:
        when = time.monotonic() + seconds
        self._due.append((when, undo))
        for name in busy:
            self._busy[name] = when + 1.0

    def _free(self, *names: str) -> list[str]:
        now = time.monotonic()
        return [name for name in names if self._busy.get(name, 0.0) < now]

    def _victim(self, *, mortal: bool = True) -> Daemon | None:
        names = [name for name in self._free(*NAMES) if not (mortal and name == STEADY)]
        return self._cluster.daemons[self._rng.choice(names)] if names else None

    # -------------------------------------------------------------- executors

    def _kill(self) -> str | None:
        daemon = self._victim()
        if daemon is None:
            return None
        daemon.kill()
        self._later(self._rng.uniform(0.0, 10.0), daemon.start, daemon.name)
        return daemon.name

    def _stop(self) -> str | None:
        daemon = self._victim()
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

        self._later(self._rng.uniform(1.0, 8.0), start, daemon.name)
        return daemon.name

    def _freeze(self) -> str | None:
        daemon = self._victim(mortal=False)
        if daemon is None:
            return None
        seconds = self._rng.uniform(1.0, 2.5 * self._cluster.ttl)
        daemon.freeze()
        self._later(seconds, daemon.thaw, daemon.name)
        return f"{daemon.name} for {seconds:.0f} s"

    def _child(self) -> tuple[str, list[int]] | None:
        daemon = self._victim(mortal=False)
        if daemon is None or daemon.process.poll() is not None:
            return None
        for guardian in _children(daemon.pid):
            for child in _children(guardian):
                return daemon.name, [child, *(pid for pid in session_members(child) if pid != child)]
        return None

    def _kill_child(self) -> str | None:
        found = self._child()
        if found is None:
            return None
        _kill(found[1][0])
        return found[0]

    def _kill_process(self) -> str | None:
        found = self._child()
        if found is None:
            return None
        _kill(self._rng.choice(found[1]))
        return f"{found[0]}, of {len(found[1])}"

    # ------------------------------------------------------------------- etcd

    def _member(self) -> int | None:
        if not self._free("etcd"):
            return None  # one member at a time, so that there is a quorum
        return self._rng.randrange(len(self._cluster.etcd.members))

    def _freeze_member(self) -> str | None:
        number = self._member()
        if number is None:
            return None
        member = self._cluster.etcd.members[number]
        seconds = self._rng.uniform(0.3, 8.0)
        member.pause()
        self._later(seconds, member.resume, "etcd")
        return f"{number} for {seconds:.1f} s"

    def _restart_member(self) -> str | None:
        """In order: a kill would meet etcd's own defect (#13766) in the version that is at hand."""
        number = self._member()
        if number is None:
            return None
        member = self._cluster.etcd.members[number]
        member.halt()
        self._later(self._rng.uniform(0.5, 6.0), member.restart, "etcd")
        return str(number)

    def _freeze_all(self) -> str | None:
        if self._rng.random() < 0.5 or self._member() is None:
            return None
        seconds = self._rng.uniform(0.5, 1.5 * self._cluster.ttl)
        for member in self._cluster.etcd.members:
            member.pause()

        def resume() -> None:
            for member in self._cluster.etcd.members:
                member.resume()

        self._later(seconds, resume, "etcd")
        return f"{seconds:.1f} s"

    def _cut(self) -> str | None:
        for proxy in self._cluster.proxies:
            proxy.cut()
        return ", ".join(PROXIED)

    def _proxy(self, mode: Mode, longest: float) -> str | None:
        if not self._free("proxy"):
            return None
        proxies = [p for p in self._cluster.proxies if self._rng.random() < 0.5] or self._cluster.proxies
        for proxy in proxies:
            proxy.set(mode)

        def mend() -> None:
            for proxy in proxies:
                proxy.set(Mode.PASS)

        seconds = self._rng.uniform(0.3, longest)
        self._later(seconds, mend, "proxy")
        return f"to {len(proxies)} members for {seconds:.1f} s"

    def _compact(self) -> str | None:
        revision = self._cluster.audit.totals.last - KEPT
        if revision < 1:
            return None

        async def ask(client: EtcdClient) -> None:
            await compacted(client, revision)

        return f"up to revision {revision}" if self._ask(ask) else None

    def _alarm(self) -> str | None:
        if self._rng.random() < 0.5 or self._member() is None:
            return None

        async def set_alarm(client: EtcdClient, action: Any) -> None:
            for member in await client.members():
                request = rpc.AlarmRequest(action=action, memberID=member.id, alarm=rpc.NOSPACE)
                await client.transport.unary(wire.ALARM, request, 3.0)

        def disarm() -> None:
            while not self._ask(lambda client: set_alarm(client, rpc.AlarmRequest.DEACTIVATE)):
                time.sleep(0.2)

        if not self._ask(lambda client: set_alarm(client, rpc.AlarmRequest.ACTIVATE)):
            disarm()
            return None
        seconds = self._rng.uniform(1.0, 10.0)
        self._later(seconds, disarm, "etcd")
        return f"for {seconds:.1f} s"

    def _ask(self, work: Callable[[EtcdClient], Any]) -> bool:
        """One request to etcd; False where it did not answer in time."""

        async def ask() -> None:
            config = EtcdConfig(
                self._cluster.etcd.endpoints, connect_timeout=3.0, request_timeout=2.0, read_timeout=3.0
            )
            async with EtcdClient(config) as client:
                await work(client)

        try:
            asyncio.run(ask())
        except (DistopError, wire.RequestFailed) as error:
            self._say(f"etcd did not answer: {str(error)[:80]}")
            return False
        return True


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
