"""A behavior that is struck at a step of its work in a child: it dies by SIGKILL, loses its JVM, or stands still.

What is to strike a table stands in the folder that ``DISTOP_STRIKES`` names, in a file of the table's name: a line for
each strike, ``<owner>.<function>.<before|after> <kill|kill-jvm|hold>``. Each strikes once, whichever process comes to
it first, and leaves the file ``<table>.<n>.struck``, with its process; who holds goes on once there is
``<table>.<n>.go``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemons import Daemons

STRIKES = "DISTOP_STRIKES"


class Strikes:
    """The folder, as a test has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        return {STRIKES: str(self.folder)}

    def aim(self, table: str, *strikes: str) -> None:
        """What strikes this table from now on."""
        for path in self.folder.glob(f"{table}.*"):
            path.unlink()
        (self.folder / table).write_text("\n".join(strikes))

    def present(self, certificate: dict[str, Any]) -> str:
        """Have ``struck-apply`` find a certificate that no daemon has issued; the operation that it then names."""
        op = str(certificate["operation"])
        record = {"op": op, "state": "success", "report": {"certificate": certificate}}
        (self.folder / f"{op.replace('/', '.')}.history").write_text(json.dumps(record))
        return op

    def struck(self, table: str, n: int = 0) -> bool:
        return (self.folder / f"{table}.{n}.struck").exists()

    def await_struck(self, group: Daemons, table: str, n: int = 0, seconds: float = 90) -> int:
        """Wait until it is; by what process."""
        path = self.folder / f"{table}.{n}.struck"
        group.eventually(lambda: path.exists() and path.read_text(), f"{table} is struck", seconds=seconds)
        return int(path.read_text())

    def release(self, table: str, n: int = 0) -> None:
        """Who holds there goes on."""
        (self.folder / f"{table}.{n}.go").touch()


def strike(table: str, point: str) -> None:
    """What is to happen to this table at this point happens."""
    if STRIKES not in os.environ:
        return  # a process that has only imported this, such as one that collects tests
    folder = Path(os.environ[STRIKES])
    try:
        lines = (folder / table).read_text().splitlines()
    except FileNotFoundError:
        return
    for n, line in enumerate(lines):
        where, does = line.split()
        if where != point:
            continue
        try:
            with (folder / f"{table}.{n}.struck").open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            continue
        _does(does, folder / f"{table}.{n}.go")


def _does(does: str, go: Path) -> None:
    if does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "kill-jvm":
        from pyspark import SparkContext

        gateway: Any = SparkContext._gateway
        os.kill(gateway.proc.pid, signal.SIGKILL)
    while does == "hold" and not go.exists():
        time.sleep(0.01)


def hang_on(owner: Any, name: str, table_of: Callable[..., str | None]) -> None:
    """Have a function strike before it begins and after it has answered. ``table_of``: whose table it is at work on, by
    what it is called with.
    """
    former = getattr(owner, name)
    point = f"{owner.__name__.rpartition('.')[2]}.{name}"

    def call(*args: Any, **kwargs: Any) -> Any:
        table = table_of(*args)
        if table is None:
            return former(*args, **kwargs)
        strike(table, f"{point}.before")
        result = former(*args, **kwargs)
        strike(table, f"{point}.after")
        return result

    setattr(owner, name, call)
