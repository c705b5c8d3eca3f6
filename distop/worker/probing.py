"""Whether Spark can still run anything: asked after an error of its own, before a job is blamed for it.

A context can be there and answer, and yet be of no use: its local directories are gone or full, the master that it
belongs to has nobody left to run a task. Then every job fails, and none of them is guilty.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from distop.worker.explain import headline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GROUP = "distop-probe"
WAIT = 0.5
"""Seconds of one wait for the probe."""
BUSY_AFTER = 2.0
"""Seconds after which a probe that has to wait for others' tasks is given up: they show that tasks are run."""
_CAUSES = 20
_SPARKS = frozenset({"py4j", "pyspark"})


def of_spark(error: BaseException) -> bool:
    """Spark raised the error, or one that led to it."""
    one: BaseException | None = error
    for _ in range(_CAUSES):
        if one is None:
            return False
        if any(kind.__module__.partition(".")[0] in _SPARKS for kind in type(one).__mro__):
            return True
        one = one.__cause__ or one.__context__
    return False


def trouble(session: SparkSession, patience: float) -> str:
    """Why a Spark job of two tiny stages does not come to its end within ``patience`` seconds; "" where it does, and
    where it only waits for the tasks of others."""
    answers: list[str] = []

    def ask() -> None:
        try:
            context = session.sparkContext
            context.setJobGroup(GROUP, "can Spark still run a job", interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", GROUP)
            # What the first stage hands over to the second goes through the local directories.
            session.range(0, 8, 1, 2).repartition(2).count()
        except Exception as error:
            answers.append(headline(error))
        else:
            answers.append("")

    asking = threading.Thread(target=ask, name=GROUP, daemon=True)
    asking.start()
    # In short waits: a process that was frozen itself has not been waiting.
    waited = 0.0
    while not answers and asking.is_alive() and waited < patience:
        asking.join(WAIT)
        waited += WAIT
        if not answers and waited >= BUSY_AFTER and _others_run(session):
            session.sparkContext.cancelJobGroup(GROUP)
            return ""
    return answers[0] if answers else f"no end within {patience:g} s"


def _others_run(session: SparkSession) -> bool:
    """Tasks of other jobs than the probe's are being run."""
    tracker: Any = session.sparkContext.statusTracker()
    for job in set(tracker.getActiveJobsIds()) - set(tracker.getJobIdsForGroup(GROUP)):
        info = tracker.getJobInfo(job)
        stages = [tracker.getStageInfo(stage) for stage in info.stageIds] if info is not None else []
        if any(stage is not None and stage.numActiveTasks for stage in stages):
            return True
    return False
