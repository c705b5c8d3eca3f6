"""Spark's jobs of operations: the FAIR pools lent to them, and how far their tasks are.

Names of Spark's FAIR pools, lent to operations while they use them.

Spark makes a pool for each name that it meets and never removes one, and each of its scheduling decisions looks at all
of them. So there are as many names as operations were ever at work at once, and not one for each operation.

How far Spark is with the jobs of one tag, as its status tracker tells.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Pools:
    """Who has which name. An operation has one for all of its threads; a thread works for one operation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[str, tuple[str, set[threading.Thread]]] = {}

    def lend(self, operation: str) -> str:
        """The operation's pool, for the calling thread until it gives it back or ends."""
        thread = threading.current_thread()
        with self._lock:
            self._drop(thread)
            if operation not in self._lent:
                taken = {name for name, _ in self._lent.values()}
                free = next(name for name in (f"distop-{n}" for n in itertools.count(1)) if name not in taken)
                self._lent[operation] = (free, set())
            name, threads = self._lent[operation]
            threads.add(thread)
            return name

    def give_back(self) -> None:
        """The calling thread works for no operation any more."""
        with self._lock:
            self._drop(threading.current_thread())

    def _drop(self, leaving: threading.Thread) -> None:
        """Forget a thread, and those that have ended: a behavior's own threads give nothing back."""
        for operation, (_, threads) in list(self._lent.items()):
            threads -= {thread for thread in threads if thread is leaving or not thread.is_alive()}
            if not threads:
                del self._lent[operation]


def tasks_of(session: SparkSession, tag: str) -> tuple[int, int] | None:
    """How many tasks of the tag's active stages are done, and how many these stages have; None where none is active.

    Stages that are yet to come are left out: of those that Spark will skip it says the same as of the others.
    Raises what the connection to the JVM raises.
    """
    # PySpark's own tracker, and Java's, know groups but no tags.
    tracker: Any = session.sparkContext._jsc.sc().statusTracker()
    active = set(tracker.getActiveJobIds())
    if not active:
        return None
    stages = set(tracker.getActiveStageIds())
    done = total = 0
    for job in active.intersection(tracker.getJobIdsForTag(tag)):
        known = tracker.getJobInfo(job)
        for stage in stages.intersection(known.get().stageIds()) if known.isDefined() else ():
            seen = tracker.getStageInfo(stage)
            if seen.isDefined():
                done += seen.get().numCompletedTasks()
                total += seen.get().numTasks()
    return (done, total) if total else None


def lingering(session: SparkSession) -> bool:
    """Whether more tasks run than those of active stages: Spark was told to stop them, and they do not.

    One look may find a task that is just ending. Raises what the connection to the JVM raises.
    """
    tracker: Any = session.sparkContext._jsc.sc().statusTracker()
    running = sum(executor.numRunningTasks() for executor in tracker.getExecutorInfos())
    if not running:
        return False
    seen = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
    return bool(running > sum(info.get().numActiveTasks() for info in seen if info.isDefined()))
