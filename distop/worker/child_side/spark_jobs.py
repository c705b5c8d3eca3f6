"""Assigns names of Spark's FAIR pools to running operations, and counts Spark tasks with Spark's status tracker.

Spark creates a pool for each new name and never removes one, and each scheduling decision examines all pools. So names
are reused: there are only as many as operations have run concurrently.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class PoolNames:
    """The assigned pool names, one per operation. A thread works for one operation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._assigned: dict[str, tuple[str, set[threading.Thread]]] = {}

    def acquire(self, operation: str) -> str:
        """The operation's pool name, held by the calling thread until :meth:`release` or the thread's end."""
        thread = threading.current_thread()
        with self._lock:
            self._drop(thread)
            if operation not in self._assigned:
                taken = {name for name, _ in self._assigned.values()}
                free = next(name for name in (f"distop-{n}" for n in itertools.count(1)) if name not in taken)
                self._assigned[operation] = (free, set())
            name, threads = self._assigned[operation]
            threads.add(thread)
            return name

    def release(self) -> None:
        """Release the calling thread's pool name."""
        with self._lock:
            self._drop(threading.current_thread())

    def _drop(self, leaving: threading.Thread) -> None:
        """Remove a thread, and all threads that have ended: threads of behaviors do not call release."""
        for operation, (_, threads) in list(self._assigned.items()):
            threads -= {thread for thread in threads if thread is leaving or not thread.is_alive()}
            if not threads:
                del self._assigned[operation]


def count_tasks(session: SparkSession, tag: str) -> tuple[int, int] | None:
    """The numbers of completed and of all tasks of the tag's active stages; None if no stage is active.

    Later stages are left out, because the tracker does not show which of them Spark will skip.
    Raises the errors of the connection to the JVM.
    """
    # PySpark's own tracker, and Java's, support groups but not tags.
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


def has_cancelled_tasks(session: SparkSession) -> bool:
    """Whether tasks outside the active stages run: Spark has cancelled them, but they have not stopped.

    A single call may see a task that is just ending. Raises the errors of the connection to the JVM.
    """
    tracker: Any = session.sparkContext._jsc.sc().statusTracker()
    running = sum(executor.numRunningTasks() for executor in tracker.getExecutorInfos())
    if not running:
        return False
    seen = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
    return bool(running > sum(info.get().numActiveTasks() for info in seen if info.isDefined()))
