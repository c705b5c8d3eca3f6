"""Publishes status and work of running jobs, plannings and completions in the node record, for people.

The status appears after a delay, and never for short work. Every daemon watches every node record. So the minimum time
between two changes grows with the number of nodes, and etcd's load from them stays constant.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from distop.clock import time
from distop.protocol.json_codec import rfc3339
from distop.protocol.work_done import WorkDone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LEAST_PAUSE = 2.0
"""Minimum seconds from a change of status to its publication."""
PAUSE_PER_NODE = 0.2
"""Minimum seconds for each node: all nodes together publish at most five times a second."""
MOST_OPERATIONS = 8
"""Maximum number of operations whose status is published."""
LONGEST = 200
"""Maximum characters of a status text."""
MOST_JOBS = 8
"""Maximum number of jobs of an operation whose work is published by itself; that of the others is added up."""


def publication_pause(nodes: int) -> float:
    """Minimum seconds between two changes of texts in a node record, with this number of nodes."""
    return max(LEAST_PAUSE, PAUSE_PER_NODE * nodes)


class Work(Protocol):
    """A run, a planning or a completion. ``op``: its operation."""

    @property
    def op(self) -> str: ...


@dataclass(slots=True)
class _Run:
    op: str
    text: str = ""
    done: int = 0
    total: int = 0
    work: dict[int, tuple[float, WorkDone]] = field(default_factory=dict)
    """By partition: the time of the first report, and the last one."""

    def __str__(self) -> str:
        of_spark = f"{self.done:,} of {self.total:,} Spark tasks" if self.total else ""
        return ": ".join(filter(None, (self.text[:LONGEST], of_spark)))


class JobStatuses:
    """The status of running jobs, plannings and completions, each an object with the name of its operation.

    ``nodes()`` returns the number of nodes. ``changed()`` is called when ``published`` has changed.
    """

    def __init__(self, nodes: Callable[[], int], changed: Callable[[], None]) -> None:
        self.published: Mapping[str, str] = {}
        """The status of each operation, for the node record."""
        self.published_work: Mapping[str, Any] = {}
        """The work of each operation, for the node record."""
        self._nodes = nodes
        self._changed = changed
        self._runs: dict[int, _Run] = {}
        """By the ``id()`` of the work, which exists from the first status to the end of it."""
        self._timer: asyncio.TimerHandle | None = None

    def set_text(self, work: Work, text: str) -> None:
        """Set the status text, and reset the number of Spark tasks."""
        known = self._runs.setdefault(id(work), _Run(work.op))
        known.text, known.done, known.total = text, 0, 0
        self._publish_soon()

    def set_tasks(self, work: Work, done: int, total: int) -> None:
        """Set how many of the known Spark tasks are done."""
        known = self._runs.setdefault(id(work), _Run(work.op))
        known.done, known.total = done, total
        self._publish_soon()

    def set_work(self, work: Work, partition: int, done: Any) -> None:
        """Set how much of its work a job has done; -1: a batch or a call. ``done``: as JSON."""
        known = self._runs.setdefault(id(work), _Run(work.op))
        since, _ = known.work.get(partition, (time.time(), None))
        known.work[partition] = since, WorkDone.from_json(done)
        self._publish_soon()

    def remove_work(self, work: Work, partitions: Iterable[int]) -> None:
        """Remove the work of jobs that have ended."""
        known = self._runs.get(id(work))
        if known is not None and [p for p in partitions if known.work.pop(p, None) is not None]:
            self._publish_soon()

    def remove(self, work: Work) -> None:
        """Remove the status of work that has ended."""
        if self._runs.pop(id(work), None) is not None:
            self._publish_soon()

    def close(self) -> None:
        """Stop publishing."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _publish_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(publication_pause(self._nodes()), self._publish)

    def _publish(self) -> None:
        self._timer = None
        runs: dict[str, list[_Run]] = {}
        for run in self._runs.values():
            if str(run):
                runs.setdefault(run.op, []).append(run)
        found = {op: _together(some) for op, some in list(runs.items())[:MOST_OPERATIONS]}
        done = {op: _works(some) for op, some in list(_by_operation(self._runs.values()).items())[:MOST_OPERATIONS]}
        if (found, done) != (self.published, self.published_work):
            self.published, self.published_work = found, done
            self._changed()


def _by_operation(runs: Iterable[_Run]) -> dict[str, dict[int, tuple[float, WorkDone]]]:
    found: dict[str, dict[int, tuple[float, WorkDone]]] = {}
    for run in runs:
        if run.work:
            found.setdefault(run.op, {}).update(run.work)
    return found


def _works(jobs: dict[int, tuple[float, WorkDone]]) -> list[dict[str, Any]]:
    listed = list(jobs.items())
    if len(listed) > MOST_JOBS:
        rest = listed[MOST_JOBS - 1 :]
        whole = min(since for _, (since, _) in rest), sum((done for _, (_, done) in rest), WorkDone())
        listed = [*listed[: MOST_JOBS - 1], (-1, whole)]
    return [{"partition": p, "since": rfc3339(since), **done.to_json()} for p, (since, done) in listed]


def _together(runs: list[_Run]) -> str:
    more = f" (and {len(runs) - 1} more)" if len(runs) > 1 else ""
    return f"{runs[0]}{more}"
