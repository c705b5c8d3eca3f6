"""How far Spark is with the jobs of one tag, as its status tracker tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
