"""Faults injected at a step of a behavior in a child: the process is killed, its JVM is killed, or the step blocks.

The folder named by ``DISTOP_TEST_FAULTS`` has a file for each table with faults. Each line is one fault: a point,
``<owner>.<function>.<before|after>``, and an action. A fault triggers once, in the first process that reaches its step,
and writes the pid to ``<table>.<n>.triggered``. The actions:

- ``kill``, ``kill-jvm``: of the process, or of its JVM
- ``kill-busy-jvm``: of the JVM, as soon as it runs tasks of Spark after that step
- ``lose-jvm``: as ``kill-jvm``, and the step blocks until the loss of the JVM ends the process
- ``hold``: the step continues once ``<table>.<n>.go`` exists
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemons import Daemons

FAULTS = "DISTOP_TEST_FAULTS"


class FaultInjector:
    """Sets faults in the folder, and waits for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        return {FAULTS: str(self.folder)}

    def set_faults(self, table: str, *faults: str) -> None:
        """Replace the faults of this table."""
        for path in self.folder.glob(f"{table}.*"):
            path.unlink()
        (self.folder / table).write_text("\n".join(faults))

    def add_certificate(self, certificate: dict[str, Any]) -> str:
        """Let ``faulty-apply`` find a certificate that no daemon issued, and return the name of its operation."""
        op = str(certificate["operation"])
        record = {"op": op, "state": "success", "report": {"certificate": certificate}}
        (self.folder / f"{op.replace('/', '.')}.history").write_text(json.dumps(record))
        return op

    def triggered(self, table: str, n: int = 0) -> bool:
        return (self.folder / f"{table}.{n}.triggered").exists()

    def await_triggered(self, group: Daemons, table: str, n: int = 0, seconds: float = 90) -> int:
        """Wait until the fault triggers, and return the pid of its process."""
        path = self.folder / f"{table}.{n}.triggered"
        group.eventually(lambda: path.exists() and path.read_text(), f"fault {n} of {table} triggers", seconds=seconds)
        return int(path.read_text())

    def release(self, table: str, n: int = 0) -> None:
        """Let the step that holds there continue."""
        (self.folder / f"{table}.{n}.go").touch()


def inject(table: str, point: str) -> None:
    """Trigger the faults of this table at this point."""
    if FAULTS not in os.environ:
        return  # a process without faults, such as one that collects tests
    folder = Path(os.environ[FAULTS])
    try:
        lines = (folder / table).read_text().splitlines()
    except FileNotFoundError:
        return
    for n, line in enumerate(lines):
        where, action = line.split()
        if where != point:
            continue
        try:
            with (folder / f"{table}.{n}.triggered").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            continue
        _perform(action, folder / f"{table}.{n}.go")


def _perform(action: str, go: Path) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action in ("kill-jvm", "lose-jvm"):
        _kill_jvm()
    if action == "kill-busy-jvm":
        from pyspark import SparkContext  # here, because two threads must not import PySpark at the same time

        threading.Thread(target=_kill_busy_jvm, args=(SparkContext,), daemon=True).start()
    while action in ("hold", "lose-jvm") and not go.exists():
        time.sleep(0.01)


def _kill_jvm() -> None:
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    os.kill(gateway.proc.pid, signal.SIGKILL)


def _kill_busy_jvm(contexts: Any) -> None:
    """Wait until Spark runs a stage, and kill the JVM."""
    while (context := contexts._active_spark_context) is None or not context.statusTracker().getActiveStageIds():
        time.sleep(0.001)
    _kill_jvm()


def inject_around(owner: Any, name: str, table_of: Callable[..., str | None]) -> None:
    """Patch a function with injection points before and after it. ``table_of``: its arguments → the table's name."""
    original = getattr(owner, name)
    point = f"{owner.__name__.rpartition('.')[2]}.{name}"

    def call(*args: Any, **kwargs: Any) -> Any:
        table = table_of(*args)
        if table is None:
            return original(*args, **kwargs)
        inject(table, f"{point}.before")
        result = original(*args, **kwargs)
        inject(table, f"{point}.after")
        return result

    setattr(owner, name, call)
