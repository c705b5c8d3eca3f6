"""Shared by the benchmarks: results with targets, table and JSON output, and a cluster of executor daemons."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distop
from distop.protocol.keys import OPEN, PENDING, Keys
from distop.store.embedded import EmbeddedEtcd
from tests.support.behaviors import python_path

if TYPE_CHECKING:
    from distop.behavior import Behavior

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".bench"
"""Generated test data; safe to delete."""
PROGRAM: Sequence[str] = (sys.executable, "-m", "distop.cli")
READY_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number. ``target``: an upper or lower bound (``at_most``), or None if there is no target."""

    name: str
    value: float
    unit: str = ""
    target: float | None = None
    at_most: bool = True
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """The row in the JSON document."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": self.target,
            "bound": None if self.target is None else "at most" if self.at_most else "at least",
            "reached": self.reached,
            "note": self.note,
        }


@dataclass(slots=True)
class Result:
    """The result of one benchmark. ``settings``: its options and versions; ``samples``: all measurements by name."""

    benchmark: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def missed(self) -> bool:
        """Whether a target was missed."""
        return any(row.reached is False for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The benchmark's part of the JSON document."""
        return {
            "benchmark": self.benchmark,
            "settings": self.settings,
            "rows": [row.to_json() for row in self.rows],
            "samples": {name: [round(value, 6) for value in values] for name, values in self.samples.items()},
        }


def machine() -> dict[str, Any]:
    """The machine and versions that the numbers were measured with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "cpu": _cpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "distop": distop.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def document(where: dict[str, Any], results: Iterable[Result]) -> str:
    """All results as one JSON document."""
    return json.dumps({"machine": where, "results": [result.to_json() for result in results]}, indent=2)


def show(where: dict[str, Any], results: Iterable[Result]) -> None:
    """Print all results as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for result in results:
        settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
        table = Table(title=f"{result.benchmark} ({settings})", title_justify="left")
        for name, justify in (("", "left"), ("measured", "right"), ("target", "right"), ("", "left"), ("", "left")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for row in result.rows:
            mark = {True: "[green]reached", False: "[red]missed", None: ""}[row.reached]
            bound = "" if row.target is None else f"{'≤' if row.at_most else '≥'} {number(row.target)} {row.unit}"
            table.add_row(row.name, f"{number(row.value)} {row.unit}".strip(), bound.strip(), mark, row.note)
        console.print(table)
    console.print(
        f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, load before {where['load_before']}",
        style="dim",
    )


def number(value: float) -> str:
    """Three significant digits; numbers of at least 100 as whole numbers with thousands separators."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def report_progress(text: str) -> None:
    """Print progress to stderr; stdout holds only results."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


# ------------------------------------------------------------------ daemons


class Executor:
    """One ``distop executor`` with default settings; its log is in the folder of its work directory."""

    def __init__(
        self, endpoint: str, folder: Path, name: str, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [*PROGRAM, "executor", "--etcd", endpoint, "--id", name, "--work-dir", str(folder / name)]
        self._command += options
        self._env = {**os.environ, **(env or {})}
        self.start()

    def start(self) -> None:
        """Start the daemon, or start it again."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    def kill(self) -> None:
        """Kill the daemon (SIGKILL), as in a crash."""
        self._process.kill()
        self._process.wait()

    def request_stop(self) -> None:
        """Send SIGTERM without waiting."""
        self._process.send_signal(signal.SIGTERM)

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise RuntimeError with the end of the daemon's log if the daemon has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"executor {self.name} ended: {self.log.read_text(errors='replace')[-2000:]}")

    def memory(self, field_name: str) -> float:
        """A field of /proc/<pid>/status in MB: ``VmRSS`` (resident now) or ``VmHWM`` (its peak)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field_name + ":"):
                return int(line.split()[1]) * 1024 / 1e6
        raise RuntimeError(f"/proc/{self.pid}/status has no field {field_name}")

    def stop(self) -> None:
        """Stop the daemon with SIGTERM; kill it if it has not ended after STOP_SECONDS."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def peak_memory(bench: Cluster) -> float:
    """Peak resident MB of an executor's child and its processes (JVM, Python workers): the sum of their peaks.

    With several executors: the largest sum.
    """
    return max(child_memory(executor) for executor in bench.executors)


def child_memory(executor: Executor) -> float:
    """Peak resident MB of an executor's child and its processes: the sum of their peaks."""
    return sum(_peak_resident(pid) for pid in child_processes(executor))


def child_processes(executor: Executor) -> list[int]:
    """An executor's child and its processes (JVM, Python workers)."""
    from tests.support.processes import children, children_of_guardian, machine

    guardians = children(executor.pid)
    excluded = {executor.pid, *guardians}
    excluded |= {pid for guard in guardians for pid in children(guard) if pid not in children_of_guardian(guard)}
    return [pid for pid in machine(executor.pid) if pid not in excluded]


def _peak_resident(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


def install(folder: Path, *behaviors: type[Behavior]) -> dict[str, str]:
    """Install operation types into ``folder``; returns the environment for executors that offer them."""
    for behavior in behaviors:
        name = behavior.type_name
        info = folder / f"distop_{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: distop-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[distop.behaviors]\n{name} = {behavior.__module__}:{behavior.__qualname__}\n"
        )
    return python_path(folder, ROOT / "scripts", ROOT)


@dataclass(slots=True)
class Cluster:
    """A private etcd, executors, and a client."""

    endpoint: str
    folder: Path
    client: distop.Client
    executors: list[Executor]

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = READY_SECONDS) -> None:
        """Wait for a condition. Raises RuntimeError after ``seconds``, or if an executor has ended."""
        deadline = time.monotonic() + seconds
        while not condition():
            for executor in self.executors:
                executor.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out after {seconds:g} s waiting for {what}; logs: {self.folder}")
            time.sleep(0.01)

    def wait_for_cleanup(self) -> None:
        """Wait until all ended operations are cleaned up, so that the next measurement has etcd to itself."""
        start, after = Keys().family(OPEN)[0], Keys().family(PENDING)[1]
        etcd = EtcdProbe(self.endpoint)
        self.wait_for(lambda: not etcd.count(start, after), "the cleanup of ended operations", 300)


class EtcdProbe:
    """Direct requests to etcd, each on its own connection."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def count(self, start: str, end: str) -> int:
        """The number of keys in a range."""
        return int(self._request(lambda client: client.count(start, end)))

    def db_size(self) -> int:
        """The size of etcd's database file in bytes."""
        return int(self._request(lambda client: client.status()).db_size)

    def version(self) -> str:
        """The server's version."""
        return str(self._request(lambda client: client.status()).version)

    def _request(self, request: Callable[[Any], Any]) -> Any:
        import asyncio

        from distop.store.client import EtcdClient
        from distop.store.connection_settings import EtcdConfig

        async def send() -> Any:
            async with EtcdClient(EtcdConfig((self._endpoint,))) as client:
                return await request(client)

        return asyncio.run(send())


@contextmanager
def cluster(executors: int = 1, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster for one ``with`` block; ``env`` is added to the executors' environment.

    Keeps the logs if the block raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="distop-bench-"))
    started: list[Executor] = []
    succeeded = False
    try:
        with EmbeddedEtcd() as etcd, distop.connect(etcd.endpoint) as client:
            bench = Cluster(etcd.endpoint, folder, client, started)
            try:
                for n in range(executors):
                    started.append(Executor(etcd.endpoint, folder, f"bench-{n}", *options, env=env))  # noqa: PERF401
                bench.wait_for(lambda: len(client.nodes()) == executors, "all executors")
                yield bench
                succeeded = True
            finally:
                for executor in started:
                    executor.stop()
    finally:
        if succeeded:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report_progress(f"Executor logs are kept in {folder}")
