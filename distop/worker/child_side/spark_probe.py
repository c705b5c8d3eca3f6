"""Whether Spark can still run anything: asked after an error of its own, before a job is blamed for it.

A context can be there and answer, and yet be of no use: its local directories are gone or full, the master that it
belongs to has nobody left to run a task. Then every job fails, and none of them is guilty.

Bounded waits of the child for a JVM or a cluster that may never answer.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from distop.worker.child_side.error_texts import headline

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


GROUP = "distop-probe"
"""The scheduler pool of the probes. Each probe has its own job group, so that cancelling one cancels no other."""
BUSY_AFTER = 2.0
"""Seconds after which a probe that has to wait for others' tasks is given up: they show that tasks are run."""
CANCEL_SECONDS = 2.0
"""Maximum seconds until the jobs of a cancelled probe have ended."""
_CAUSES = 20
_numbers = itertools.count(1)
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
    """Why a Spark job of two tiny stages does not end within ``patience`` seconds.

    "" where it ends, or only waits for the tasks of other jobs. No job of the probe is left when this returns, which
    takes :data:`CANCEL_SECONDS` more at most. Raises what the connection to the JVM raises.
    """
    group = f"{GROUP}-{next(_numbers)}"
    answers: list[str] = []

    def ask() -> None:
        try:
            context = session.sparkContext
            context.setJobGroup(group, "can Spark still run a job", interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", GROUP)
            # What the first stage hands over to the second goes through the local directories.
            session.range(0, 8, 1, 2).repartition(2).count()
        except Exception as error:
            answers.append(headline(error))
        else:
            answers.append("")

    asking, waiting = threading.Thread(target=ask, name=group, daemon=True), BoundedWait(patience)
    asking.start()
    busy_below = patience - BUSY_AFTER
    while waiting.join(asking) and asking.is_alive():
        if waiting.left() <= busy_below and _others_run(session, group):
            _cancel(session, group, asking)
            return ""
    if answers:
        return answers[0]
    _cancel(session, group, asking)
    return f"no end within {patience:g} s"


def _cancel(session: SparkSession, group: str, asking: threading.Thread) -> None:
    """Cancel the probe's job, which Spark may only be about to start.

    A lost JVM has no jobs.
    """
    patience = BoundedWait(CANCEL_SECONDS)
    with contextlib.suppress(Exception):
        while asking.is_alive():
            session.sparkContext.cancelJobGroup(group)
            if not patience.join(asking):
                return


def _others_run(session: SparkSession, group: str) -> bool:
    """Whether tasks of other jobs than the probe's are running."""
    tracker: Any = session.sparkContext.statusTracker()
    for job in set(tracker.getActiveJobsIds()) - set(tracker.getJobIdsForGroup(group)):
        info = tracker.getJobInfo(job)
        stages = [tracker.getStageInfo(stage) for stage in info.stageIds] if info is not None else []
        if any(stage is not None and stage.numActiveTasks for stage in stages):
            return True
    return False


T = TypeVar("T")

STEP = 0.5
"""Seconds of one wait."""
LONGEST_STEP = 2.0
"""Maximum seconds counted for one step: a process that was frozen itself has not been waiting."""


class BoundedWait:
    """The seconds that a caller still waits, in steps of :data:`STEP` seconds."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def left(self) -> float:
        """Seconds left; 0 or less once the wait has ended."""
        now = time.monotonic()
        self._left -= min(now - self._looked, LONGEST_STEP)
        self._looked = now
        return self._left

    def join(self, thread: threading.Thread) -> bool:
        """Wait one step for a thread; False where it still runs and the wait has ended."""
        thread.join(max(0.0, min(STEP, self._left)))
        return not thread.is_alive() or self.left() > 0


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Call ``ask`` in a thread of its own, and return or raise what it does.

    Raises TimeoutError where it does not return in time.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    asking, patience = threading.Thread(target=run, daemon=True), BoundedWait(seconds)
    asking.start()
    while asking.is_alive() and patience.join(asking):
        pass
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
