"""What the jobs here say that they are doing, told to people through the node record: late, seldom, and never for a job
that is over soon.

Every daemon hears of each change of a node record. So a record is changed for this at most once in a time that grows
with the number of nodes: what etcd has to deliver for it stays the same however many there are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.worker.daemon_side.requests import RunRequest

LEAST_PAUSE = 2.0
"""Seconds from a word to its telling."""
PAUSE_PER_NODE = 0.2
"""More of them, so that all nodes together tell at most so often: five times a second."""
MOST_OPERATIONS = 8
LONGEST = 200


@dataclass(slots=True)
class _Run:
    op: str
    text: str = ""
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        of_spark = f"{self.done:,} of {self.total:,} Spark tasks" if self.total else ""
        return ": ".join(filter(None, (self.text[:LONGEST], of_spark)))


class Doing:
    """What runs say. ``nodes()``: how many nodes there are; ``changed()`` is called when ``told`` is another."""

    def __init__(self, nodes: Callable[[], int], changed: Callable[[], None]) -> None:
        self.told: Mapping[str, str] = {}
        """By operation, what is to stand in the node record."""
        self._nodes = nodes
        self._changed = changed
        self._runs: dict[int, _Run] = {}
        """By the request's identity, which lasts from its first word to its end."""
        self._timer: asyncio.TimerHandle | None = None

    def says(self, run: RunRequest, text: str) -> None:
        """A job of a run said what it does. How far Spark was with what it did before is of no interest any more."""
        self._runs[id(run)] = _Run(run.op, text)
        self._tell_soon()

    def is_at(self, run: RunRequest, done: int, total: int) -> None:
        """Spark has done so many of the tasks that it knows of now."""
        known = self._runs.setdefault(id(run), _Run(run.op))
        known.done, known.total = done, total
        self._tell_soon()

    def over(self, run: RunRequest) -> None:
        """The run says nothing any more."""
        if self._runs.pop(id(run), None) is not None:
            self._tell_soon()

    def close(self) -> None:
        """Tell nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _tell_soon(self) -> None:
        if self._timer is None:
            pause = max(LEAST_PAUSE, PAUSE_PER_NODE * self._nodes())
            self._timer = asyncio.get_running_loop().call_later(pause, self._tell)

    def _tell(self) -> None:
        self._timer = None
        runs: dict[str, list[_Run]] = {}
        for run in self._runs.values():
            if str(run):
                runs.setdefault(run.op, []).append(run)
        found = {op: _together(some) for op, some in list(runs.items())[:MOST_OPERATIONS]}
        if found != self.told:
            self.told = found
            self._changed()


def _together(runs: list[_Run]) -> str:
    more = f" (and {len(runs) - 1} more)" if len(runs) > 1 else ""
    return f"{runs[0]}{more}"
