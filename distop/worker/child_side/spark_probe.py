"""Probes with a tiny job whether Spark can still run jobs, before a job is blamed for an error of Spark.

A SparkContext may answer although it is unusable: its local directories are gone or full, or its master has no workers.
Then every job fails, and no job is to blame.

Bounded waits for a JVM or a cluster that may never answer.
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
"""The scheduler pool of the probes. Each probe has its own job group, so that a cancel affects one probe only."""
BUSY_AFTER = 2.0
"""Seconds after which a probe ends early if tasks of other jobs run, since these show that Spark works."""
CANCEL_SECONDS = 2.0
"""Maximum seconds until the jobs of a cancelled probe have ended."""
_CAUSES = 20
_numbers = itertools.count(1)
_SPARKS = frozenset({"py4j", "pyspark"})


def is_spark_error(error: BaseException) -> bool:
    """Whether Spark raised the error or one of its causes."""
    one: BaseException | None = error
    for _ in range(_CAUSES):
        if one is None:
            return False
        if any(kind.__module__.partition(".")[0] in _SPARKS for kind in type(one).__mro__):
            return True
        one = one.__cause__ or one.__context__
    return False


def probe(session: SparkSession, time_limit: float) -> str:
    """Run a Spark job of two tiny stages. Returns why it does not end within ``time_limit`` seconds, "" if it does.

    "" also if it only waits for the tasks of other jobs. When this returns, the probe's jobs have ended, which takes at
    most :data:`CANCEL_SECONDS` longer. Raises the errors of the connection to the JVM.
    """
    group = f"{GROUP}-{next(_numbers)}"
    answers: list[str] = []

    def run() -> None:
        try:
            context = session.sparkContext
            context.setJobGroup(group, "can Spark still run a job", interruptOnCancel=True)
            context.setLocalProperty("spark.scheduler.pool", GROUP)
            # The shuffle between the two stages uses the local directories.
            session.range(0, 8, 1, 2).repartition(2).count()
        except Exception as error:
            answers.append(headline(error))
        else:
            answers.append("")

    thread, wait = threading.Thread(target=run, name=group, daemon=True), BoundedWait(time_limit)
    thread.start()
    busy_below = time_limit - BUSY_AFTER
    while wait.join(thread) and thread.is_alive():
        if wait.left() <= busy_below and _other_tasks_run(session, group):
            _cancel(session, group, thread)
            return ""
    if answers:
        return answers[0]
    _cancel(session, group, thread)
    return f"a test job did not end within {time_limit:g} s"


def _cancel(session: SparkSession, group: str, thread: threading.Thread) -> None:
    """Cancel the probe's job repeatedly, since Spark may only be about to start it.

    Errors are ignored: a lost JVM has no jobs.
    """
    wait = BoundedWait(CANCEL_SECONDS)
    with contextlib.suppress(Exception):
        while thread.is_alive():
            session.sparkContext.cancelJobGroup(group)
            if not wait.join(thread):
                return


def _other_tasks_run(session: SparkSession, group: str) -> bool:
    """Whether tasks of jobs outside the probe's group are running."""
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
"""Maximum seconds counted for one step, so that the time for which this process was frozen does not count."""


class BoundedWait:
    """The remaining seconds of a wait in steps of :data:`STEP` seconds."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._counted_until = time.monotonic()

    def left(self) -> float:
        """Remaining seconds; 0 or less after the end of the wait."""
        now = time.monotonic()
        self._left -= min(now - self._counted_until, LONGEST_STEP)
        self._counted_until = now
        return self._left

    def join(self, thread: threading.Thread) -> bool:
        """Wait one step for a thread. False: the thread still runs and the wait has ended."""
        thread.join(max(0.0, min(STEP, self._left)))
        return not thread.is_alive() or self.left() > 0


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Call ``ask`` in a new thread, and return its result or raise its error.

    Raises TimeoutError if it does not return in time.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread, wait = threading.Thread(target=run, daemon=True), BoundedWait(seconds)
    thread.start()
    while thread.is_alive() and wait.join(thread):
        pass
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
