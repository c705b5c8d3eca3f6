"""A private etcd, executors and a service, with tables and operations: what screenshots and the benchmark show."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import etcd_servers

import distop
from distop.store.embedded import EmbeddedEtcd

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 120.0
_ADDRESS = re.compile(r"the page is at (\S+)")


class PageScene:
    """Runs them below a folder while it is open. ``url``: of the page. ``client``: connected to etcd.

    ``ttl``: of the executors' sessions, in seconds.
    """

    def __init__(self, folder: Path, service_options: tuple[str, ...] = (), ttl: int = 3) -> None:
        self.folder = folder
        self._options = service_options
        self._ttl = ttl
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self.url = ""
        self.endpoint = ""
        self.client: Any = None

    def __enter__(self) -> Self:
        etcd_servers.use()
        etcd = self._stack.enter_context(EmbeddedEtcd(self.folder / "etcd"))
        self.endpoint = etcd.endpoint
        self._stack.callback(self._stop)
        self._serve("127.0.0.1:0")
        self.client = self._stack.enter_context(distop.connect(self.endpoint))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def executors(self, *names: str, slots: int = 4, options: tuple[str, ...] = ()) -> None:
        """Start executors, and wait until they are live."""
        for name in names:
            work = self.folder / f"work-{name}"
            work.mkdir(exist_ok=True)
            given = ("--id", name, "--work-dir", str(work), "--slots", str(slots), "--ttl", str(self._ttl), *options)
            self._run(name, "executor", *given)
        self.until(lambda: {node.executor for node in self.client.nodes().values()} >= {*names}, "executors are live")

    def _serve(self, address: str) -> None:
        self._run("service", "serve", "--listen", "127.0.0.1:0", "--http", address, *self._options)
        self.until(lambda: _ADDRESS.search(self._log("service").read_text()), "the service serves")
        found = _ADDRESS.search(self._log("service").read_text())
        assert found is not None
        self.url = found[1].rstrip("/")

    def restart_service(self, *, kill: bool = False) -> None:
        """End the service, and start another one at the same address."""
        address = self.url.partition("://")[2]
        process = self._processes.pop("service")
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        process.wait()
        self._serve(address)

    def kill(self, name: str) -> None:
        """Kill an executor."""
        self._processes[name].kill()
        self._processes.pop(name).wait()

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """The process of an executor, or of the ``service``."""
        return self._processes[name]

    def table(self, name: str, rows: Any = None) -> None:
        """Register a table of Parquet files."""
        place = self.folder / "tables" / name
        place.mkdir(parents=True)
        if rows is not None:
            import pyarrow.parquet as parquet

            for n, part in enumerate(rows):
                parquet.write_table(part, place / f"part-{n}.parquet")
        record = distop.TableRecord(name, "parquet", str(place))
        self.client.add_table(record, replace=True, check=rows is not None)

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait until it holds. Raises TimeoutError with the ends of all logs."""
        until = time.monotonic() + LIMIT
        while not holds():
            if time.monotonic() > until:
                logs = "\n".join(self._log(name).read_text()[-2_000:] for name in self._processes)
                raise TimeoutError(f"not within {LIMIT:g} s: {what}\n{logs}")
            time.sleep(0.05)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _run(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "distop.cli", *arguments, "--etcd", self.endpoint]
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
