"""Why a Spark session completes no tasks, and whether a new session would help.

A session that waits for cores looks the same whatever the cause. On a busy cluster nothing is wrong: another session
would wait as long. But a standalone master that was restarted without ``spark.deploy.recoveryMode`` has forgotten the
application: its workers have ended the executors, and the driver never registers again. So the master is asked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distop.protocol.frozen import frozen
from distop.worker.child_side.error_texts import headline
from distop.worker.child_side.spark_probe import CANCEL_SECONDS, trouble

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

log = logging.getLogger("distop.child")

STANDALONE = "spark://"
NO_CORES = "no cores from Spark"
MASTERS_SHARE = 0.5
"""Time limit of all masters together, as a share of the time limit of the tiny job."""


@frozen
class Activity:
    """What Spark's status tracker shows at one moment."""

    jobs: int = 0
    """Spark jobs that have not ended."""
    running: bool = False
    """A Spark task runs."""
    executors: int = 0
    """On a cluster; 0 in local mode."""
    stages: Mapping[int, int] | None = None
    """How many tasks of each active stage have ended, whatever came of them."""


@frozen
class StallCause:
    """Why a session completes no tasks.

    ``replace_session``: this session will complete none any more, and another one may.
    """

    text: str
    replace_session: bool


class Stall:
    """How long a session has had Spark jobs without any task that ran or ended."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stages: Mapping[int, int] = {}

    def add(self, seen: Activity, seconds: float) -> None:
        """Add the seconds since the last look; start again from 0 after any progress."""
        stages = seen.stages or {}
        ended = any(stages.get(stage, count + 1) > count for stage, count in self._stages.items())
        ended = ended or any(count for stage, count in stages.items() if stage not in self._stages)
        self._stages = stages
        self.seconds = 0.0 if not seen.jobs or seen.running or ended else self.seconds + seconds


def activity(session: SparkSession) -> Activity:
    """What Spark's status tracker shows. Raises what the connection to the JVM raises."""
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
    # One of them is the driver.
    return Activity(jobs, False, len(tracker.getExecutorInfos()) - 1, stages)


def longest_examination(patience: float) -> float:
    """Seconds that :func:`stall_cause` takes at most.

    This holds where the JVM itself answers within ``patience`` seconds. Whoever waits for less loses the result.
    """
    return (1 + MASTERS_SHARE) * patience + CANCEL_SECONDS + patience


def stall_cause(session: SparkSession, seen: Activity, patience: float) -> StallCause | None:
    """What is wrong with a session that completes no tasks; None where nothing is.

    ``patience``: seconds for a tiny job. Waits for the cluster's answers, for :func:`longest_examination` at most.
    Raises what the connection to the JVM raises.
    """
    master = session.sparkContext.master or ""
    if master.startswith(STANDALONE):
        known = known_to_master(session, master.removeprefix(STANDALONE).split(","), MASTERS_SHARE * patience)
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
    if why := trouble(session, patience):
        return StallCause(f"Spark completes no tasks: {why}", True)
    return None


def known_to_master(session: SparkSession, masters: list[str], limit: float) -> bool | None:
    """Whether an active standalone master knows the session's application.

    None where no master answers. ``limit``: seconds for all of them together.

    The message is the one by which the master's own page asks for its state; it changes nothing. Of several masters
    one is active; one that recovers still collects what it has to know.
    """
    jvm: Any = session.sparkContext._jvm
    context: Any = session.sparkContext._jsc.sc()
    request = getattr(getattr(jvm, "org.apache.spark.deploy.DeployMessages$RequestMasterState$"), "MODULE$")
    kind = getattr(getattr(jvm, "scala.reflect.ClassTag$"), "MODULE$").Any()
    # A master is looked up, then asked; Spark's own limit would be two minutes for each of these steps.
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
            # It is down, or of another release; the other masters may answer.
            log.debug("Cannot read the state of the Spark master %s: %s", address, headline(error))
    return known
