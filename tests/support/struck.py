"""``apply`` in a child that is struck at a step of its work: it dies by SIGKILL, loses its JVM, or stands still.

What is to strike a table stands in the folder that ``DISTOP_STRIKES`` names, in a file of the table's name: a line for
each strike, ``<class>.<method>.<before|after> <kill|kill-jvm|hold>``. Each strikes once, whichever process comes to it
first, and leaves the file ``<table>.<n>.struck``; who holds goes on once there is ``<table>.<n>.go``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distop_behaviors.apply import Apply
from distop_behaviors.apply.applying import Applying
from distop_behaviors.apply.catalog import CatalogTarget
from distop_behaviors.apply.hadoop import HadoopTarget
from distop_behaviors.apply.publishing import Narrowing

if TYPE_CHECKING:
    from collections.abc import Callable

STRIKES = "DISTOP_STRIKES"


class StruckApply(Apply):
    """``apply``, by another name."""

    type_name = "struck-apply"


def _strike(table: str, point: str) -> None:
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
            (folder / f"{table}.{n}.struck").open("x").close()
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


def _wrapped(owner: Any, name: str) -> Callable[..., Any]:
    former = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _strike(self._table.name, f"{owner.__name__}.{name}.before")
        result = former(self, *args, **kwargs)
        _strike(self._table.name, f"{owner.__name__}.{name}.after")
        return result

    return call


STEPS: list[tuple[Any, str]] = [
    *((Applying, name) for name in ("load", "judge", "commit", "settle")),
    (CatalogTarget, "swap"),
    (HadoopTarget, "rewrite"),
    *((Narrowing, name) for name in ("stage", "publish", "sweep")),
]
for _owner, _name in STEPS:
    setattr(_owner, _name, _wrapped(_owner, _name))
