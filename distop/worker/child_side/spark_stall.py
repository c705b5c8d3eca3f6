"""Diagnoses why a Spark session completes no tasks, and whether a new session would help.

A session that waits for cores looks the same for every cause. On a busy cluster a new session would wait as long. But a
standalone master that was restarted without ``spark.deploy.recoveryMode`` no longer has the application: its workers
have ended the executors, and the driver never registers again. So the master is asked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.worker.child_side.error_texts import headline
from distop.worker.child_side.spark_probe import CANCEL_SECONDS, probe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

log = logging.getLogger("distop.child")

STANDALONE = "spark://"
NO_CORES = "no cores from Spark"
MASTERS_SHARE = 0.5
"""Time limit for all masters together, as a share of the time limit of the probe."""


@frozen
class Activity:
    """A snapshot of Spark's status tracker."""

    jobs: int = 0
    """Spark jobs that have not ended."""
    running: bool = False
    """Whether a Spark task runs."""
    executors: int = 0
    """Spark executors on a cluster; 0 in local mode."""
    stages: Mapping[int, int] | None = None
    """The number of ended tasks of each active stage, successful or not."""


@frozen
class StallCause:
    """Why a session completes no tasks.

    ``replace_session``: this session will not complete tasks again, and a new one may.
    """

    text: str
    replace_session: bool


class Stall:
    """The time for which a session has had Spark jobs, but no running or ended task."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stages: Mapping[int, int] = {}

    def add(self, seen: Activity, seconds: float) -> None:
        """Add the seconds since the last snapshot; start again from 0 after any progress."""
        stages = seen.stages or {}
        ended = any(stages.get(stage, count + 1) > count for stage, count in self._stages.items())
        ended = ended or any(count for stage, count in stages.items() if stage not in self._stages)
        self._stages = stages
        self.seconds = 0.0 if not seen.jobs or seen.running or ended else self.seconds + seconds


def activity(session: SparkSession) -> Activity:
    """A snapshot of Spark's status tracker. Raises the errors of the connection to the JVM."""
    context: Any = session.sparkContext._jsc.sc()
    tracker = context.statusTracker()
    jobs = len(tracker.getActiveJobIds())
    if not jobs:
        return Activity()
    stages: dict[int, int] = {}
    for stage in tracker.getActiveStageIds():
        info = tracker.getStageInfo(stage)
        if info.isDefined():
            if info.get().numActiveTasks():
                return Activity(jobs, running=True)
            stages[stage] = info.get().numCompletedTasks() + info.get().numFailedTasks()
    # The driver counts as one.
    return Activity(jobs, False, len(tracker.getExecutorInfos()) - 1, stages)


def longest_examination(time_limit: float) -> float:
    """Maximum seconds of :func:`stall_cause`, if the JVM itself answers within ``time_limit`` seconds."""
    return (1 + MASTERS_SHARE) * time_limit + CANCEL_SECONDS + time_limit


def stall_cause(session: SparkSession, seen: Activity, time_limit: float) -> StallCause | None:
    """Why a session completes no tasks; None if it is fine.

    ``time_limit``: seconds for a probe. Waits for the cluster's answers, at most :func:`longest_examination` seconds.
    Raises the errors of the connection to the JVM.
    """
    master = session.sparkContext.master or ""
    if master.startswith(STANDALONE):
        known = known_to_master(session, master.removeprefix(STANDALONE).split(","), MASTERS_SHARE * time_limit)
        if known is False:
            return StallCause(
                f"{NO_CORES}: the master {master} does not know this application; it may have been restarted", True
            )
        if known is None and not seen.executors:
            return StallCause(f"{NO_CORES}: the master {master} does not answer", False)
        if not seen.executors:
            return StallCause(f"{NO_CORES}: the master {master} has not granted this application any cores", False)
    elif not master.startswith("local") and not seen.executors:
        return StallCause(
            f"{NO_CORES}: the cluster manager of {master} has not granted this application any cores", False
        )
    if why := probe(session, time_limit):
        return StallCause(f"Spark completes no tasks: {why}", True)
    return None


def known_to_master(session: SparkSession, masters: list[str], limit: float) -> bool | None:
    """Whether an active standalone master has the session's application; None if no master answers.

    ``limit``: seconds for all masters together. The request is the read-only one of the master's own web page. One of
    several masters is active; a recovering master does not have all applications yet.
    """
    jvm: Any = session.sparkContext._jvm
    context: Any = session.sparkContext._jsc.sc()
    request = getattr(getattr(jvm, "org.apache.spark.deploy.DeployMessages$RequestMasterState$"), "MODULE$")
    kind = getattr(getattr(jvm, "scala.reflect.ClassTag$"), "MODULE$").Any()
    # Two steps per master: look it up, then ask it. Spark's default time-out is two minutes for each step.
    milliseconds = max(1, int(1000 * limit / len(masters) / 2))
    duration = jvm.scala.concurrent.duration.FiniteDuration(
        milliseconds, jvm.java.util.concurrent.TimeUnit.MILLISECONDS
    )
    timeout = jvm.org.apache.spark.rpc.RpcTimeout(duration, "spark.distop.jvmAnswer")
    known: bool | None = None
    for address in masters:
        try:
            found = context.env().rpcEnv().asyncSetupEndpointRefByURI(f"{STANDALONE}Master@{address}")
            state = timeout.awaitResult(found).askSync(request, timeout, kind)
            if context.applicationId() in [app.id() for app in state.activeApps()]:
                return True
            if state.status().toString() == "ALIVE":
                known = False
        except Exception as error:
            # The master is down, or runs another release; other masters may answer.
            log.debug("Cannot read the state of the Spark master %s: %s", address, headline(error))
    return known
