"""What the benchmarks share: rows with targets, their two forms of output, and executors as daemons of their own."""

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
"""Data that is made once; safe to delete."""
PROGRAM: Sequence[str] = (sys.executable, "-m", "distop.cli")
READY_SECONDS = 60.0
STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number. ``target``: what is to be reached (None: only told), at most or at least that much."""

    name: str
    value: float
    unit: str = ""
    target: float | None = None
    at_most: bool = True
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """The row as it stands in the JSON document."""
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
    """What one benchmark found. ``settings``: what it was run with; ``samples``: each single measurement."""

    benchmark: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def missed(self) -> bool:
        """A target was missed."""
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
    """Where the numbers come from: without it they say nothing."""
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
    """All of it as one JSON document."""
    return json.dumps({"machine": where, "results": [result.to_json() for result in results]}, indent=2)


def show(where: dict[str, Any], results: Iterable[Result]) -> None:
    """All of it as tables for people."""
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
    """Three digits that count; whole thousands with commas."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def say(text: str) -> None:
    """Progress, for whoever waits; stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not pass."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def median(values: Iterable[float]) -> float:
    """The middle one."""
    return statistics.median(values)


# ------------------------------------------------------------------ daemons


class Executor:
    """One ``distop executor`` with its default settings; its log is beside its work directory."""

    def __init__(
        self, endpoint: str, folder: Path, name: str, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._words = [*PROGRAM, "executor", "--etcd", endpoint, "--id", name, "--work-dir", str(folder / name)]
        self._words += options
        self._env = {**os.environ, **(env or {})}
        self.start()

    def start(self) -> None:
        """Start it (again)."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log, env=self._env, start_new_session=True)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def tell_to_stop(self) -> None:
        """SIGTERM, and wait for nothing."""
        self._process.send_signal(signal.SIGTERM)

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._process.pid

    def check(self) -> None:
        """Raises RuntimeError, with the end of its log, where it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"executor {self.name} ended: {self.log.read_text(errors='replace')[-2000:]}")

    def memory(self, field_name: str) -> float:
        """A number of /proc/<pid>/status in MB: ``VmRSS`` (resident now), ``VmHWM`` (the most it ever was)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field_name + ":"):
                return int(line.split()[1]) * 1024 / 1e6
        raise RuntimeError(f"/proc tells no {field_name}")

    def stop(self) -> None:
        """End it in order, or at once where it does not listen."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def peak(bench: Cluster) -> float:
    """MB that an executor's child and what it has started (its JVM, Python workers) each had resident at their peaks,
    together; of several executors the most.
    """
    from tests.support.processes import children, children_of_guardian, machine

    found = []
    for executor in bench.executors:
        guarding = children(executor.pid)
        beside = {executor.pid, *guarding}
        beside |= {pid for guard in guarding for pid in children(guard) if pid not in children_of_guardian(guard)}
        found.append(sum(_high_water(pid) for pid in machine(executor.pid) if pid not in beside))
    return max(found)


def _high_water(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


def install(folder: Path, *behaviors: type[Behavior]) -> dict[str, str]:
    """The environment of executors whose children know these operation types of ours, too."""
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
    """A private etcd, some executors, and a client."""

    endpoint: str
    folder: Path
    client: distop.Client
    executors: list[Executor]

    def await_that(self, condition: Callable[[], object], what: str, seconds: float = READY_SECONDS) -> None:
        """Wait for a state. Raises RuntimeError when it takes too long, or an executor has ended."""
        deadline = time.monotonic() + seconds
        while not condition():
            for executor in self.executors:
                executor.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {seconds:g} s: {what}; see {self.folder}")
            time.sleep(0.01)

    def quiet(self) -> None:
        """Wait until nothing is left of operations that have ended: what is measured next must not share etcd."""
        start, after = Keys().family(OPEN)[0], Keys().family(PENDING)[1]
        etcd = Look(self.endpoint)
        self.await_that(lambda: not etcd.count(start, after), "the cleanup of ended operations", 300)


class Look:
    """A few raw questions to etcd, each with a connection of its own."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def count(self, start: str, end: str) -> int:
        """The keys in a range."""
        return int(self._ask(lambda client: client.count(start, end)))

    def db_size(self) -> int:
        """The bytes of etcd's database file."""
        return int(self._ask(lambda client: client.status()).db_size)

    def version(self) -> str:
        """The server's version."""
        return str(self._ask(lambda client: client.status()).version)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        import asyncio

        from distop.store.client import EtcdClient
        from distop.store.connection_settings import EtcdConfig

        async def ask() -> Any:
            async with EtcdClient(EtcdConfig((self._endpoint,))) as client:
                return await question(client)

        return asyncio.run(ask())


@contextmanager
def cluster(executors: int = 1, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """A cluster that ends with the block; ``env`` is added to its executors' environment. Its logs are kept when the
    block broke.
    """
    folder = Path(tempfile.mkdtemp(prefix="distop-bench-"))
    started: list[Executor] = []
    whole = False
    try:
        with EmbeddedEtcd() as etcd, distop.connect(etcd.endpoint) as client:
            group = Cluster(etcd.endpoint, folder, client, started)
            try:
                for n in range(executors):
                    started.append(Executor(etcd.endpoint, folder, f"bench-{n}", *options, env=env))  # noqa: PERF401
                group.await_that(lambda: len(client.nodes()) == executors, "all executors ready")
                yield group
                whole = True
            finally:
                for executor in started:
                    executor.stop()
    finally:
        if whole:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"the executors' logs are kept in {folder}")
