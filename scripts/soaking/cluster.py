"""The processes of a soak: three etcd members with users, proxies, four executors, an actor, and two audits."""

from __future__ import annotations

import asyncio
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditing.follower import SecondFollower

from distop.blocking import Client, connect
from distop.daemon.local_jobs import RunFiles
from distop.decide.orphan_keys import orphans
from distop.errors import EtcdUnavailable
from distop.protocol import keys as K
from distop.protocol.behavior_declaration import Retry
from distop.protocol.keys import Keys
from distop.protocol.records import TableRecord
from distop.store.client import EtcdClient
from distop.store.connection_settings import EtcdConfig
from soaking.actor import Actor
from soaking.follower import Follower
from soaking.memory import Memory
from soaking.suspensions import Suspensions
from soaking.tables import TABLES, make_table
from soaking.workflow_checks import CALLERS
from soaking.workflows import BY_HAND, LIMITED
from tests.support.behaviors import install, python_path
from tests.support.contract import etcdctl
from tests.support.daemons import Daemon, eventually
from tests.support.etcd import CHEAP_PASSWORDS, EtcdCluster
from tests.support.proxy import ThreadedProxy
from tests.support.users import ROOT, WORKER, enable_users, grant

if TYPE_CHECKING:
    from typing import Self

PROJECT = Path(__file__).resolve().parents[2]
NAMES = ("ann", "bob", "cyd", "dot")
STEADY = "ann"
"""The executor that is never killed or stopped, so that its memory can be measured all the time."""
PROXIED = ("bob", "cyd")
"""The executors that connect through the proxies."""
SPARK = "dot"
"""The only executor with Java: the others notice that they cannot run Spark, and leave such work to this one.

It gets half as many faults as each other executor, and its connections are not cut: a JVM takes long to start, and some
of its work has to be done.
"""
STUMBLING = ("bob", "dot")
"""The executors on which planning and completion raise that raise on some nodes only."""
HEAP = 512
"""Maximum heap of the Spark driver in MB."""
TOKENS = 4
"""Seconds without use after which an authentication token expires."""
SETTLED = 120.0
"""Time limit in seconds for cleanups after the end of all operations, and for the audits to catch up."""

REJECTED = ("etcd rejects this write as invalid", "duplicate key given in txn request")
"""Texts in an executor's log about a transaction that etcd rejects as invalid."""

_PLAIN = """\
writing = tests.support.writing:Writing
rough = tests.support.failing_jobs:Rough
limited = scripts.soaking.limited:Limited
purge-path = tests.support.operation_id_behaviors:PurgePath
stepwriting = scripts.soaking.checkpoint_behaviors:StepWriting
lone = scripts.soaking.checkpoint_behaviors:Lone
following = scripts.soaking.checkpoint_behaviors:Following
tripping = tests.support.coordinator_behaviors:Tripping
"""
_SPARK = "sparkwriting = tests.support.writing:SparkWriting\n"


def leftovers(work_dir: Path) -> list[str]:
    """The runs and the private directories that remain in an executor's work directory, as problems."""
    runs = [f"{path} remains of a run" for path in sorted(work_dir.glob("runs/*"))]
    return runs + [f"{work_dir} still has a directory of {ref}" for ref in RunFiles(work_dir).operations()]


def rejected(log: Path) -> list[str]:
    """A problem if an executor's log has writes that etcd rejected as invalid."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if any(text in line for text in REJECTED)]
    return [f"{log.stem} logged {len(lines)} times that etcd rejected a write: {lines[0]}"] if lines else []


class SoakCluster:
    """All processes of a soak, as a context manager."""

    def __init__(self, folder: Path, ttl: int, *, spark: bool) -> None:
        self.folder = folder
        self.ttl = ttl
        self.spark = spark
        self.etcd = EtcdCluster(arguments=["--auth-token-ttl", str(TOKENS), *CHEAP_PASSWORDS])
        self.version = ""
        self.proxies: list[ThreadedProxy] = []
        self.daemons: dict[str, Daemon] = {}
        self.memory = Memory(HEAP)
        self.suspensions = Suspensions()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.etcd)
            asyncio.run(enable_users(self.etcd.endpoints[0], K.OP, K.OP[:-1] + chr(ord(K.OP[-1]) + 1)))
            asyncio.run(self._grant_own_keys())
            self.proxies = [self._stack.enter_context(ThreadedProxy(m.port)) for m in self.etcd.members]
            self.client = self._connect()
            self.version = asyncio.run(self._ask_version())
            for table in TABLES:
                make_table(self.folder / table)
                self.client.add_table(TableRecord(table, "parquet", str(self.folder / table)), check=False)
            self.follower = self._stack.enter_context(Follower(self.as_root(read_timeout=None)))
            self.second = self._stack.enter_context(SecondFollower(etcdctl(), self._options()))
            for name in NAMES:
                self.daemons[name] = self._spawn(name)
                self._stack.callback(self.daemons[name].close)
            self.client.register_type(BY_HAND, retry=Retry(attempts=8, initial=0.1, maximum=1.0))
            env = python_path(PROJECT) | {"DISTOP_USER": WORKER["username"], "DISTOP_PASSWORD": WORKER["password"]}
            self.actor = self._stack.enter_context(Actor(self._proxied, (LIMITED, BY_HAND), self.folder, env))
            eventually(lambda: len(self.client.nodes()) == len(NAMES), "all executors are ready", seconds=60)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------------ set-up

    def as_root(self, **options: Any) -> EtcdConfig:
        """The connection settings of root, whose role is never revoked."""
        return EtcdConfig(self.etcd.endpoints, ROOT["username"], ROOT["password"], **options)

    def etcdctl(self, *words: str) -> str | None:
        """The output of etcdctl, run as root; None: it failed."""
        limits = ["--dial-timeout", "3s", "--command-timeout", "10s"]
        command = [etcdctl(), *self._options("--endpoints" not in words), *limits, *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env={"ETCDCTL_API": "3"})
        return ran.stdout if ran.returncode == 0 else None

    def _options(self, endpoints: bool = True) -> list[str]:
        """Options of etcdctl: root's credentials, and the endpoints."""
        where = ["--endpoints", ",".join(self.etcd.endpoints)] if endpoints else []
        return ["--user", f"{ROOT['username']}:{ROOT['password']}", *where]

    def _connect(self) -> Client:
        """A client with the permissions of an executor."""
        return self._stack.enter_context(connect(list(self.etcd.endpoints), connect_timeout=5.0, **WORKER))

    @property
    def _proxied(self) -> list[str]:
        return [proxy.endpoint for proxy in self.proxies]

    def proxied_client(self) -> Client:
        """A client behind the proxies, as some executors are. The caller closes it."""
        return connect(self._proxied, **WORKER)

    async def _grant_own_keys(self) -> None:
        """Allow clients to write their own keys."""
        async with EtcdClient(self.as_root()) as root:
            await grant(root, CALLERS, f"{CALLERS[:-1]}0")

    async def _ask_version(self) -> str:
        async with EtcdClient(self.as_root()) as client:
            return (await client.status()).version

    def _spawn(self, name: str) -> Daemon:
        direct = ",".join(self.etcd.endpoints)
        endpoints = ",".join(self._proxied) if name in PROXIED else direct
        has_spark = self.spark and name == SPARK
        site = self.folder / f"site-{name}"
        install(site, "distop-soak", f"[distop.behaviors]\n{_PLAIN}{_SPARK if has_spark else ''}")
        options = ["--spark-master", "local[2]", "--spark-conf", f"spark.driver.memory={HEAP}m"]
        options += ["--spark-conf", "spark.distop.jvmAnswer=10", "--poll", "10"]
        env = python_path(site, PROJECT) | {"DISTOP_ACCEPT_ETCD_DEFECTS": "1"}
        env |= {"DISTOP_USER": WORKER["username"], "DISTOP_PASSWORD": WORKER["password"]}
        if name in STUMBLING:
            env["STUMBLES"] = "1"
        if not has_spark:
            env["JAVA_HOME"] = "/nonexistent"
        # Not forked, so that the measured memory is that of the program itself.
        return Daemon(name, endpoints, self.folder, *options, ttl=self.ttl, env=env, forked=False)

    # --------------------------------------------------------------------- end

    def measure(self) -> None:
        """Measure the memory of all processes, if the interval has passed."""
        self.memory.measure(self.daemons)

    def finish(self) -> list[str]:
        """Check, after the end of all operations, that nothing remains of them and that the audits have seen all."""
        problems = self._left() + self._left_on_disks()
        if not self.actor.running:
            problems.append(f"the actor crashed: {self.actor.log.read_text()[-2000:]}")
        self.actor.kill()
        for daemon in self.daemons.values():
            daemon.close()
            problems += rejected(daemon.log)
        last = asyncio.run(self._write_last())
        deadline = time.monotonic() + SETTLED
        follower, second = self.follower, self.second
        while follower.audit.totals.last < last and follower.failure is None and time.monotonic() < deadline:
            if follower.audit.violation is not None:
                break  # the audit ends at a violation
            time.sleep(0.1)
        while second.auditor.revision < last and second.failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return problems + follower.problems(last) + second.problems(last)

    def _left(self) -> list[str]:
        """The keys that are not cleaned up in time, as problems."""
        deadline = time.monotonic() + SETTLED
        while True:
            problems = self._remaining_keys()
            if not problems or time.monotonic() > deadline:
                return problems
            time.sleep(0.5)

    def _remaining_keys(self) -> list[str]:
        async def ask() -> dict[str, bytes]:
            async with EtcdClient(self.as_root()) as client:
                return {kv.key: kv.value for kv in (await client.list(*Keys().everything())).kvs}

        try:
            content = asyncio.run(ask())
        except EtcdUnavailable as error:
            return [f"could not read the remaining keys: {error}"]
        active = tuple(Keys().family(family)[0] for family in (K.OPEN, K.PENDING, K.CLAIM))
        problems = [f"{key} remains" for key in content if key.startswith(active)]
        counted = [key for key, value in content.items() if key.endswith(".runOps") and value != b"{}"]
        problems += [f"{key} still counts {content[key].decode()}" for key in counted]
        return problems + orphans(Keys(), content)

    def _left_on_disks(self) -> list[str]:
        """The remains of ended operations in work directories, as problems. Executors clean up at each poll."""
        deadline = time.monotonic() + SETTLED
        while (left := [text for name in NAMES for text in leftovers(self.folder / name)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.5)
        return left

    async def _write_last(self) -> int:
        """Write a last change of one of distop's keys; returns its revision."""
        record = TableRecord("soak.end", "parquet", str(self.folder / "end"))
        await asyncio.to_thread(self.client.add_table, record, check=False)
        async with EtcdClient(self.as_root()) as client:
            written = await client.get(Keys().table(record.name))
        assert written is not None
        return written.mod_revision
