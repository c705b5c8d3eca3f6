"""A Spark standalone cluster on this machine's loopback: one master and some workers, from the installed PySpark.

All its files are in one folder: pid files, logs, the workers' directories. Each process has its own Unix session, and
the folder's path in its environment. Only processes with this path are ever killed, whatever a pid file says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop.store.ports import release, reserve
from distop.worker.guardian import environment, kill_session, session_members

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MARKER = "DISTOP_CLUSTER"
"""The environment variable with the cluster's folder, in all its processes."""
MASTER = "master"
READY_SECONDS = 90.0
STOP_SECONDS = 10.0
HOST = "127.0.0.1"
_SIGNS = {MASTER: "I have been elected leader", "worker": "Successfully registered with master"}
"""The log text by which each kind of process reports that it is ready."""


class StandaloneError(Exception):
    """A cluster cannot be started as requested."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a cluster: ``cores`` and ``memory`` (in Spark's notation) of each worker."""

    workers: int = 2
    cores: int = 1
    memory: str = "1g"


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the cluster. ``pid`` 0: it does not run."""

    name: str
    pid: int
    log: Path


def options(url: str) -> tuple[str, ...]:
    """The options of an executor on this machine for running its Spark jobs on the cluster."""
    conf = (f"spark.driver.host={HOST}", f"spark.driver.bindAddress={HOST}")
    return ("--spark-master", url, *(word for setting in conf for word in ("--spark-conf", setting)))


class Standalone:
    """The cluster of a folder. ``env``: further environment variables of its processes, and of Spark's executors."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder.resolve()
        self._env = dict(env or {})
        self._started: list[subprocess.Popen[bytes]] = []
        self._ports: list[int] = []

    # ---------------------------------------------------------------------- state

    @property
    def url(self) -> str:
        """The master's URL; "": none was started."""
        return str(self._record().get("url", ""))

    def parts(self) -> list[Part]:
        """All processes of the cluster, running or not; empty before the first start."""
        count = Size(**size).workers if (size := self._record().get("size")) else 0
        names = [MASTER, *(f"worker-{n}" for n in range(1, count + 1))] if count else []
        return [Part(name, self._pid(name), self._log(name)) for name in names]

    def _record(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / "cluster.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _written_pid(self, name: str) -> int:
        try:
            return int((self.folder / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return 0

    def _pid(self, name: str) -> int:
        """The process id, if the process runs and belongs to this cluster; else 0."""
        pid = self._written_pid(name)
        return pid if pid and pid in self._ours(pid) else 0

    def _ours(self, session: int) -> list[int]:
        """The running processes of a session that belong to this cluster."""
        return [pid for pid in session_members(session) if self._marked(pid)]

    def _marked(self, pid: int) -> bool:
        return self._mark() in environment(pid).split(b"\0")

    def _mark(self) -> bytes:
        return f"{MARKER}={self.folder}".encode()

    # ------------------------------------------------------------------ up, down

    def up(self, size: Size | None = None) -> str:
        """Start the missing processes, and wait until all are ready. Returns the master's URL.

        Raises StandaloneError, also if a cluster of another size runs in this folder.
        """
        size = size or Size()
        with self._alone():
            running = [part for part in self.parts() if part.pid]
            if running and self._record().get("size") != asdict(size):
                raise StandaloneError(f"a cluster of another size runs in {self.folder}: end it first (down)")
            if not self._pid(MASTER):
                self._end(0.0)  # workers of a dead master would keep its old address
                self._start_master(size)
            names = [f"worker-{n}" for n in range(1, size.workers + 1)]
            for name in names:
                if not self._pid(name):
                    self._start_worker(name, size)
            self._await_ready([MASTER, *names])
            return self.url

    def down(self, grace: float = STOP_SECONDS) -> int:
        """Stop all processes: SIGTERM, then SIGKILL after ``grace`` seconds. Returns how many ran."""
        if not self.folder.exists():
            return 0
        with self._alone():
            ended = self._end(grace)
            shutil.rmtree(self.folder / "work", ignore_errors=True)
            (self.folder / "cluster.json").unlink(missing_ok=True)
        return ended

    def kill(self, name: str) -> None:
        """Kill one process with all its children, as a power failure would."""
        if pid := self._written_pid(name):
            kill_session(pid, self._reap, self._mark())

    def restart_master(self) -> None:
        """Kill the master, and start a new one at its address, which knows no application and no worker."""
        self.kill(MASTER)
        port = self.url.rpartition(":")[2]
        (page,) = self._reserve(1)
        self._start_master_at(port, page)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Allow one command at a time in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _start_master(self, size: Size) -> None:
        port, page = self._reserve(2)
        url = f"spark://{HOST}:{port}"
        (self.folder / "cluster.json").write_text(json.dumps({"url": url, "size": asdict(size)}))
        self._start_master_at(port, page)

    def _start_master_at(self, port: int | str, page: int) -> None:
        words = ["--host", HOST, "--port", str(port), "--webui-port", str(page)]
        self._start(MASTER, "org.apache.spark.deploy.master.Master", *words)
        self._await_ready([MASTER])

    def _start_worker(self, name: str, size: Size) -> None:
        port, page = self._reserve(2)
        words = ["--host", HOST, "--port", str(port), "--webui-port", str(page), "--cores", str(size.cores)]
        words += ["--memory", size.memory, "--work-dir", str(self.folder / "work" / name), self.url]
        self._start(name, "org.apache.spark.deploy.worker.Worker", *words)

    def _reserve(self, count: int) -> list[int]:
        ports = reserve(count)
        self._ports += ports
        return ports

    def _start(self, name: str, main: str, *words: str) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        # Settings of the user's other Spark must not apply.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("SPARK_")}
        env = {
            **inherited,
            **self._env,
            MARKER: str(self.folder),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [str(home / "bin" / "spark-class"), main, *words]
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self._started.append(process)
        (self.folder / f"{name}.pid").write_text(str(process.pid))

    def _await_ready(self, names: list[str]) -> None:
        """Wait until these processes report that they are ready. Raises StandaloneError with the end of a log."""
        deadline = time.monotonic() + READY_SECONDS
        for name in names:
            sign = _SIGNS[name.partition("-")[0]]
            while sign not in (text := self._log(name).read_text(errors="replace")):
                if not self._pid(name):
                    raise StandaloneError(f"the {name} ended; the end of its log:\n{text[-2000:]}")
                if time.monotonic() > deadline:
                    raise StandaloneError(f"the {name} is not ready after {READY_SECONDS:g} s: see {self._log(name)}")
                time.sleep(0.05)

    def _end(self, grace: float) -> int:
        """Stop all running processes, workers first. Returns how many ran."""
        names = sorted((path.stem for path in self.folder.glob("*.pid")), reverse=True)
        pids = [self._written_pid(name) for name in names]
        running = [pid for pid in pids if self._ours(pid)]
        if grace:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while any(self._ours(pid) for pid in running) and time.monotonic() < deadline:
                self._reap()
                time.sleep(0.05)
        for pid in running:
            kill_session(pid, self._reap, self._mark())
        self._reap()
        for name in names:
            (self.folder / f"{name}.pid").unlink()
        release(self._ports)
        self._ports.clear()
        return len(running)

    def _reap(self) -> None:
        """Collect the ended processes that this process started."""
        self._started = [process for process in self._started if process.poll() is None]
