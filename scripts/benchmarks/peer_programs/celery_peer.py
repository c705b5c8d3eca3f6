"""No-op tasks of Celery with Redis, which keeps nothing on a disk. Prints their rate as JSON.

Run by an environment with the packages celery and redis; the program redis-server is on its PATH. The worker imports
this module: ``BENCH_CELERY_BROKER`` in its environment is the address of Redis.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import celery
import redis

BROKER = "BENCH_CELERY_BROKER"
READY_SECONDS = 60.0
app = celery.Celery("bench", broker=os.environ.get(BROKER), backend=os.environ.get(BROKER))


@app.task(name="bench.noop")
def noop() -> None:
    """The task."""


def measure(tasks: int, clients: int) -> float:
    """Tasks a second, from sending the first one to the last result, which four threads wait for."""
    noop.delay().get(timeout=READY_SECONDS)

    def client(count: int) -> None:
        for sent in [noop.delay() for _ in range(count)]:
            sent.get(timeout=READY_SECONDS)

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, [tasks // clients] * clients))
    return tasks // clients * clients / (time.perf_counter() - began)


def wait_for_redis(port: int) -> None:
    """Raises ConnectionError after READY_SECONDS."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            redis.Redis(port=port).ping()
        except redis.exceptions.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def main() -> None:
    """Start Redis and the worker, and measure."""
    options = json.loads(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    broker = f"redis://127.0.0.1:{port}/0"
    app.conf.update(broker_url=broker, result_backend=broker)
    own = {**os.environ, BROKER: broker, "PYTHONPATH": str(Path(__file__).parent)}
    with tempfile.TemporaryDirectory() as folder:
        server = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        started = [subprocess.Popen([*server, "--dir", folder], stdout=subprocess.DEVNULL)]
        try:
            wait_for_redis(port)
            words = ["-m", "celery", "-A", "celery_peer:app", "worker", "--concurrency", str(options["processes"])]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            worker = [sys.executable, *words, "--without-gossip", "--without-mingle"]
            started.append(subprocess.Popen(worker, env=own, cwd=folder, **quiet))  # type: ignore[call-overload]
            print(json.dumps({"no-op tasks": measure(options["jobs"], options["clients"])}))
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(30)


if __name__ == "__main__":
    main()
