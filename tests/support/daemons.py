"""Executor daemons as processes, for tests that stop, kill and freeze them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import distop
from tests.support.contract import dump
from tests.support.forked import Forked
from tests.support.localspark import FRUGAL
from tests.support.processes import signal_all, suspend
from tests.support.service import ServiceThread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SPARK = (
    *("--spark-master", "local[2]", "--spark-conf", "spark.driver.memory=512m"),
    *("--spark-conf", f"spark.driver.extraJavaOptions={FRUGAL}"),
)
"""Options of a daemon with a small Spark, which needs half the processor time to start."""

UNRETRIEVED = "was never retrieved"
"""asyncio's log message about an error of a task or future that no code has handled."""
FINAL_CHECKS: list[Callable[[str], None]] = []
"""Checks of an etcd after the daemons of a successful test have ended; they take its endpoints."""


def distop_process(group: Daemons, *words: str, seconds: float = 110) -> subprocess.CompletedProcess[str]:
    """Run the command line in its own process."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = Forked([*words, "--etcd", group.endpoint], out, os.environ, err)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


STARTED: list[Daemons] = []
"""The daemons that the current test has started, for the report of a failure."""


class Daemon:
    """One ``distop executor`` process; its log is ``<folder>/<name>.log``.

    ``through``: a command that executes the daemon's. ``forked=False``: start a new Python instead of a fork.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        folder: Path,
        *options: str,
        ttl: float = 3,
        env: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        forked: bool = True,
    ) -> None:
        self.name = name
        self._forked = forked and not through
        self._env = {**os.environ, **(env or {})}
        self._suspended: list[int] = []
        self.log = folder / f"{name}.log"
        self._through = through
        self._argv = ["executor", "--etcd", endpoint, "--id", name, "--work-dir", str(folder / name)]
        self._argv += ["--ttl", str(ttl), "--slots", "2", "--poll", "5", *options]
        self.start()

    def start(self) -> None:
        """Start the daemon, or start it again."""
        self.process: Forked | subprocess.Popen[bytes]
        if self._forked:
            self.process = Forked(self._argv, self.log, self._env)
            return
        command = [*self._through, sys.executable, "-m", "distop.cli", *self._argv]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._env, start_new_session=True)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """Kill the process (SIGKILL) and wait for its end."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def suspend(self) -> list[int]:
        """Stop (SIGSTOP) the daemon and all processes that it started, like a suspended machine; returns them."""
        self._suspended = suspend(self.pid)
        return list(self._suspended)

    def wake(self, order: Callable[[list[int]], object] = list) -> None:
        """Continue the suspended processes; ``order`` sorts the list in place first."""
        suspended, self._suspended = self._suspended, []
        order(suspended)
        signal_all(suspended, signal.SIGCONT)

    def stop(self, seconds: float = 30) -> int:
        """Stop the daemon with SIGTERM; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        """End the daemon in any state: also suspended or frozen."""
        self.wake()
        if self.process.poll() is None:
            self.thaw()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


class Daemons:
    """Daemons on one etcd, and a client."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.folder = folder
        self._service = ServiceThread(endpoint) if ServiceThread.through else None
        self.client = distop.connect(endpoint if self._service is None else self._service.url)
        self._daemons: dict[str, Daemon] = {}
        STARTED.append(self)

    def start(
        self, *names: str, options: tuple[str, ...] = (), ttl: float = 3, env: Mapping[str, str] | None = None
    ) -> list[Daemon]:
        """Start daemons and wait until they are ready."""
        started = [self.spawn(name, *options, ttl=ttl, env=env) for name in names]
        self.await_ready(*names)
        return started

    def spawn(
        self,
        name: str,
        *options: str,
        ttl: float = 3,
        env: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
    ) -> Daemon:
        """Start a daemon without waiting until it is ready."""
        daemon = Daemon(name, self.endpoint, self.folder, *options, ttl=ttl, env=env, through=through)
        self._daemons[name] = daemon
        return daemon

    def await_ready(self, *names: str) -> None:
        """Wait until these executors have a session and log that they are ready, which comes later."""
        self.eventually(lambda: all(map(self._is_ready, names)), f"executors {', '.join(names)} ready", *names)

    def _is_ready(self, name: str) -> bool:
        log = self._daemons[name].log.read_text(errors="replace").splitlines()
        ready_lines = [line for line in log if "ready: " in line]
        if not ready_lines:
            return False
        live = [incarnation for incarnation, node in self.client.nodes().items() if node.executor == name]
        return any(incarnation in line for incarnation in live for line in ready_lines)

    def live(self) -> set[str]:
        """The ids of the live executors."""
        return {node.executor for node in self.client.nodes().values()}

    def eventually(self, condition: Callable[[], object], what: str, *names: str, seconds: float = 40) -> None:
        """Wait for a state with a deadline; what failed is told with the logs' ends."""
        eventually(condition, what, seconds=seconds, tail=lambda: self.tails(*names))

    def tails(self, *names: str) -> str:
        """The ends of the daemons' logs."""
        chosen = [d for n, d in self._daemons.items() if not names or n in names]
        return "\n".join(f"--- {d.name}\n{d.log.read_text(errors='replace')[-4000:]}" for d in chosen)

    def lines(self) -> list[str]:
        """All lines of the daemons' logs."""
        logs = (daemon.log for daemon in self._daemons.values() if daemon.log.exists())
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]

    def unretrieved_errors(self) -> str:
        """Log lines about errors that no code has handled: each is a defect."""
        return "\n".join(line for line in self.lines() if UNRETRIEVED in line)

    def diagnosis(self) -> str:
        """The daemons' exit codes, the ends of their logs, and etcd's keys if it answers."""
        codes = {name: daemon.process.poll() for name, daemon in self._daemons.items()}
        ended = ", ".join(f"{name}: {'running' if code is None else f'ended ({code})'}" for name, code in codes.items())
        try:
            keys = "\n".join(f"{key} = {value[:400]}" for key, value in dump(self.endpoint).items())
        except (OSError, subprocess.SubprocessError) as error:
            keys = f"etcd does not answer: {error}"
        return f"{ended}\n{self.tails()}\n--- {self.endpoint}\n{keys}"

    def close(self) -> None:
        """End all daemons."""
        for daemon in self._daemons.values():
            daemon.close()
        self.client.close()
        if self._service is not None:
            self._service.close()


def eventually(
    condition: Callable[[], object], what: str, *, seconds: float = 40, tail: Callable[[], str] = str
) -> None:
    """Poll a condition until it holds; raises AssertionError with ``what`` after the time-out."""
    deadline = time.monotonic() + seconds
    pause = 0.01
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {seconds:g} s waiting for: {what}\n{tail()}")
        time.sleep(pause)
        pause = min(pause * 1.3, 0.1)


@contextmanager
def daemons(endpoint: str, folder: Path) -> Iterator[Daemons]:
    """Daemons for one ``with`` block."""
    group = Daemons(endpoint, folder)
    try:
        yield group
    finally:
        group.close()
    unretrieved = group.unretrieved_errors()
    assert not unretrieved, unretrieved
    for check in FINAL_CHECKS:
        check(endpoint)
