"""No-op tasks of Celery with Redis, if both are installed: a well-known system to compare operations with.

The worker imports this module; ``BENCH_CELERY_BROKER`` in its environment is the address of Redis.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distop.store.ports import release, reserve

BROKER = "BENCH_CELERY_BROKER"
NOOP = "bench.noop"
READY_SECONDS = 60.0


def missing() -> str:
    """The names of missing programs and packages, or "" if all are installed."""
    absent = [name for name in ("celery", "redis") if find_spec(name) is None]
    absent += [] if shutil.which("redis-server") else ["redis-server"]
    return ", ".join(absent)


def rate(tasks: int, clients: int, processes: int) -> float:
    """Tasks per second, from sending the first task to the last result. ``processes``: those of the worker."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distop-bench-celery-"))
        broker = stack.enter_context(_redis(Path(folder)))
        stack.enter_context(_worker(broker, processes, Path(folder)))
        noop = _app(broker).tasks[NOOP]
        noop.delay().get(timeout=READY_SECONDS)

        def client(count: int) -> None:
            for sent in [noop.delay() for _ in range(count)]:
                sent.get(timeout=READY_SECONDS)

        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(client, [tasks // clients] * clients))
        return tasks // clients * clients / (time.perf_counter() - began)


def _app(broker: str) -> Any:
    celery: Any = import_module("celery")
    app = celery.Celery("bench", broker=broker, backend=broker)
    app.task(_noop, name=NOOP)
    app.finalize()
    return app


def _noop() -> None:
    """The task."""


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """Redis without persistence for one ``with`` block; yields its address."""
    ports = reserve(1)
    words = ["redis-server", "--bind", "127.0.0.1", "--port", str(ports[0]), "--save", "", "--appendonly", "no"]
    with ExitStack() as stack:
        stack.callback(release, ports)
        process = stack.enter_context(_running([*words, "--dir", str(folder)], folder / "redis.log"))
        redis: Any = import_module("redis")
        connection = redis.Redis(port=ports[0])
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                connection.ping()
                break
            except redis.exceptions.ConnectionError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{ports[0]}/0"


@contextmanager
def _worker(broker: str, processes: int, folder: Path) -> Iterator[None]:
    words = [sys.executable, "-m", "celery", "-A", f"{__name__}:app", "worker", "--concurrency", str(processes)]
    scripts = Path(__file__).resolve().parents[1]
    env = {**os.environ, BROKER: broker, "PYTHONPATH": os.pathsep.join([str(scripts), *filter(None, sys.path)])}
    with _running([*words, "--without-gossip", "--without-mingle"], folder / "worker.log", env):
        yield


@contextmanager
def _running(words: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=env)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def __getattr__(name: str) -> Any:
    """``app``, the Celery application of the worker."""
    if name == "app" and BROKER in os.environ:
        return _app(os.environ[BROKER])
    raise AttributeError(name)
