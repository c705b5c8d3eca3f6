"""What is soaked: three members of etcd, proxies before them, four executors, and the audit that follows it all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distop
from distop.audit import Audit, history
from distop.core import keys as K
from distop.core.keys import Keys
from distop.core.model import OperationRef, TableRecord
from distop.store.client import EtcdClient
from distop.store.config import EtcdConfig
from distop.store.history import Revision
from tests.support.daemons import Daemon, eventually
from tests.support.etcd import EtcdCluster
from tests.support.proxy import ThreadedProxy

if TYPE_CHECKING:
    from typing import Self

    from distop.core.view import Change
    from distop.store.history import Step

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("ann", "bob", "cyd", "dot")
STEADY = "ann"
"""The executor that is never killed or stopped, so that its memory can be followed all along."""
PROXIED = ("cyd", "dot")
SPARK = "dot"
TABLES = ("soak.a", "soak.b", "soak.c")
WARM = 20.0
"""Seconds of a daemon's life that its memory is not judged by."""

_WRITING = "writing = tests.support.writing:Writing\nsample = tests.support.sample_behaviors:Sample\n"
_SPARK = "sparkwriting = tests.support.writing:SparkWriting\n"


class SoakCluster:
    """Everything that runs. As a context manager."""

    def __init__(self, folder: Path, ttl: int, *, spark: bool) -> None:
        self.folder = folder
        self.ttl = ttl
        self.spark = spark
        self.etcd = EtcdCluster()
        self.proxies: list[ThreadedProxy] = []
        self.daemons: dict[str, Daemon] = {}
        self.audit = Audit(Keys())
        self.failure: BaseException | None = None
        """What ended the audit before its time."""
        self.records: dict[OperationRef, str] = {}
        """Operation → the state that it ended in."""
        self.outcomes: dict[OperationRef, dict[int, list[str]]] = defaultdict(dict)
        """Operation → job → every outcome that was ever written for it."""
        self._stack = ExitStack()
        self._loop = asyncio.new_event_loop()
        self._memory: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        self._measured = 0.0

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.etcd)
            self.proxies = [self._stack.enter_context(ThreadedProxy(m.port)) for m in self.etcd.members]
            self.client = self._stack.enter_context(distop.connect(list(self.etcd.endpoints), connect_timeout=5.0))
            for table in TABLES:
                record = TableRecord(table, "parquet", str(self.folder / table))
                self.client.add_table(record, check=False)
            self._follower = threading.Thread(target=self._work, daemon=True)
            self._follower.start()
            self._stack.callback(self._end_following)
            for name in NAMES:
                self.daemons[name] = self._spawn(name)
                self._stack.callback(self.daemons[name].close)
            eventually(lambda: len(self.client.nodes()) == len(NAMES), "all executors are ready", seconds=60)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _spawn(self, name: str) -> Daemon:
        direct = ",".join(self.etcd.endpoints)
        endpoints = ",".join(p.endpoint for p in self.proxies) if name in PROXIED else direct
        site = self.folder / f"site-{name}"
        info = site / "distop_soak-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distop-soak\nVersion: 1\n")
        points = _WRITING + (_SPARK if self.spark and name == SPARK else "")
        (info / "entry_points.txt").write_text(f"[distop.behaviors]\n{points}")
        options = ("--spark-master", "local[2]", "--spark-conf", "spark.driver.memory=512m")
        options += ("--spark-conf", "spark.distop.jvmAnswer=10", "--poll", "10")
        env = {"PYTHONPATH": f"{site}:{ROOT}", "DISTOP_ACCEPT_ETCD_DEFECTS": "1"}
        return Daemon(name, endpoints, self.folder, *options, ttl=self.ttl, env=env)

    # ------------------------------------------------------------------ audit

    def _work(self) -> None:
        self._following = self._loop.create_task(self._follow())
        try:
            self._loop.run_until_complete(self._following)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.failure = error

    async def _follow(self) -> None:
        config = EtcdConfig(self.etcd.endpoints, read_timeout=None)
        async with EtcdClient(config) as client, aclosing(history(client, Keys(), follow=True)) as steps:
            async for step in steps:
                self._take(step)

    def _take(self, step: Step) -> None:
        self.audit.take(step)
        if isinstance(step, Revision):
            for change in step.changes:
                if not change.deleted:
                    self._note(change)

    def _note(self, change: Change) -> None:
        if change.kv.key.endswith(".outcome"):
            key = Keys().parse(change.kv.key)
            assert key.ref is not None
            self.outcomes[key.ref].setdefault(key.partition, []).append(change.kv.value.decode())
        elif change.kv.key.startswith(f"{K.HISTORY}."):
            key = Keys().parse(change.kv.key)
            if key.ref is not None and key.chunk < 0:
                import json

                self.records[key.ref] = json.loads(change.kv.value)["state"]

    def _end_following(self) -> None:
        self._loop.call_soon_threadsafe(self._following.cancel)
        self._follower.join(20)

    # ----------------------------------------------------------------- memory

    def measure(self) -> None:
        """Note the daemons' memory, now and then."""
        now = time.monotonic()
        if now - self._measured < 2.0:
            return
        self._measured = now
        for name, daemon in self.daemons.items():
            try:
                status = Path(f"/proc/{daemon.pid}/status").read_text()
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("VmRSS:"):
                    self._memory[name, daemon.pid].append((now, int(line.split()[1]) * 1024 / 1e6))

    def memory(self) -> list[str]:
        """A line for each daemon's longest life: its size, and the slope by least squares."""
        lines = []
        for name in NAMES:
            lives = [points for (owner, _), points in self._memory.items() if owner == name and len(points) > 2]
            if not lives:
                continue
            points = max(lives, key=lambda life: life[-1][0] - life[0][0])
            judged = [p for p in points if p[0] - points[0][0] >= WARM] or points
            minutes = (judged[-1][0] - judged[0][0]) / 60
            half = judged[len(judged) // 2 :]
            lines.append(
                f"{name}: {judged[0][1]:.0f} MB, then {judged[-1][1]:.0f} MB after {minutes:.1f} min of one process, "
                f"slope {slope(judged) * 60:+.2f} MB/min, in its second half {slope(half) * 60:+.2f}"
            )
        return lines

    def finish(self) -> list[str]:
        """Wait until the audit has seen everything; what is wrong."""
        if self.failure is not None:
            return [f"the audit ended: {self.failure!r}"]

        async def present() -> int:
            async with EtcdClient(EtcdConfig(self.etcd.endpoints)) as client:
                return (await client.list(*Keys().everything(), keys_only=True)).revision

        deadline = time.monotonic() + 60
        for daemon in self.daemons.values():
            daemon.close()
        last = asyncio.run(present())
        settled: tuple[float, Any] = (time.monotonic(), None)
        while self.audit.totals.last < last and time.monotonic() < deadline:
            now = self.audit.totals.last
            if now != settled[1]:
                settled = (time.monotonic(), now)
            if time.monotonic() - settled[0] > 3.0:
                break  # the last revisions touched nothing of ours
            time.sleep(0.1)
        return []


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares: the growth of the second by the first."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
