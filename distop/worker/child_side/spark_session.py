"""The child's one Spark session: made on first use, shared by its threads, never restarted (the child is).

Every thread that uses it for a job gets a FAIR pool that its operation alone has, and the job's tag; both are cleared
when the job ends, because Spark keeps them per thread.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from distop.errors import UsageError
from distop.runtime import gc_tuning, java, secret_settings, spark_rules
from distop.worker import spark_settings
from distop.worker.child_side import spark_submit
from distop.worker.child_side.error_texts import headline
from distop.worker.child_side.spark_jobs import Pools, lingering, tasks_of
from distop.worker.child_side.spark_probe import answer_within, of_spark, trouble
from distop.worker.child_side.spark_stall import Activity, Stall, StallCause, activity, longest_examination, stall_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

ANSWER_SETTING = "spark.distop.jvmAnswer"
"""A setting of ours among Spark's: seconds without an answer after which a JVM counts as hung."""
ANSWER_SECONDS = 60.0
"""Its default: longer than any pause for garbage that one would live with."""
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
EXECUTOR_JAVA_OPTIONS = "spark.executor.extraJavaOptions"
FATAL_DEPTH = "spark.executor.killOnFatalError.depth"
STALLED_SETTING, STALLED_SECONDS = "spark.distop.stalledAfter", 60.0
"""Setting, and its default: seconds for which a session has jobs of which no task runs or ends. It is examined then,
and again each time after as many seconds.
"""
START_SETTING, START_SECONDS = "spark.distop.startLimit", 600.0
"""Setting, and its default: seconds for a session to start, which includes the download of packages."""
CALLING_SCHEMES = ("http", "https", "ftp", "sftp", "webhdfs", "swebhdfs", "har")
"""Those of Hadoop's file systems that any host may be named for, and one that wraps others."""
REFUSED = "distop.RefusedFileSystem"
"""The implementation of these: no class has the name, so that Hadoop opens none."""
ASK_EVERY = 5.0
"""Seconds between two checks of the JVM."""


class OnDeath(Protocol):
    """Called with the reason why a session is unusable."""

    def __call__(self, why: str, *, stalled: bool = False) -> None: ...


_IN_ONE_PROCESS = re.compile(r"local(\[[^]]*\])?")
"""Masters by which all of Spark is in the driver's JVM."""


class SparkUnavailable(UsageError):
    """Spark cannot run here: Java is missing or too old. No retry on this node mends it, but another node may do."""


class SparkDied(Exception):
    """The JVM or its SparkContext is gone: this process is of no more use."""


class SparkNotStarted(SparkDied):
    """The session could not start, and no other can in this process.

    PySpark keeps parts of it, on which the next session would fail as well.
    """


def check_java(environment: Mapping[str, str]) -> None:
    """Raises SparkUnavailable unless Spark would find a Java that it can run on."""
    judged = java.judge(environment)
    if judged.level == "error":
        raise SparkUnavailable(judged.text)


def settings(master: str, executor: str, work_dir: Path, ttl: float, user: Mapping[str, str]) -> dict[str, str]:
    """distop's settings of the session, with the user's on top. ``ttl``: of the etcd session, in seconds."""
    local = work_dir / "spark"
    # A JVM that had no memory left for one of its threads goes on without what that thread did: nobody knows in what
    # state, and every job that follows may break. Here it ends, and the child with it.
    exits = "-XX:+ExitOnOutOfMemoryError"
    java = {JAVA_OPTIONS: f"-Dderby.system.home={local / 'derby'} {exits}"}
    conf = {
        # Else Spark ends the JVM, and all jobs in it, for a task whose stack overflows, as by a pattern it may.
        FATAL_DEPTH: "0",
        # Else a text with ${env:NAME} in SQL, such as the path of a table, becomes the variable of the JVM.
        "spark.sql.variable.substitute": "false",
        # Else a file of a table that is at such an address by the time Spark reads it would choose whom the JVM calls.
        **{f"spark.hadoop.fs.{scheme}.impl": REFUSED for scheme in CALLING_SCHEMES},
        "spark.app.name": f"distop-{executor}",
        "spark.scheduler.mode": "FAIR",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(local / "warehouse"),
        "spark.local.dir": str(local / "local"),
    }
    if _IN_ONE_PROCESS.fullmatch(master):
        # Else every user of this machine may read settings and blocks of data at the driver's ports, and send it Java
        # objects. Spark makes a secret of its own.
        user = {**user, "spark.authenticate": "true"}
    if master.startswith("local"):
        cores = re.match(r"local\[(\d+)", master)
        count = int(cores[1]) if cores else 1 if master == "local" else os.cpu_count() or 1
        conf |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(max(4, 2 * count)),
        }
    else:
        java[EXECUTOR_JAVA_OPTIONS] = exits
        # A Spark executor that is cut off from its driver must stop before the claims that it works under can be
        # taken over.
        conf |= {
            "spark.executor.heartbeatInterval": f"{int(spark_rules.interval(ttl) * 1000)}ms",
            "spark.executor.heartbeat.maxFailures": str(spark_rules.FAILURES),
        }
    if pattern := user.get(secret_settings.PATTERN_SETTING):
        # Spark's own default pattern stays: a setting of the user's would take its place.
        user = {**user, secret_settings.PATTERN_SETTING: f"{secret_settings.PATTERN}|(?:{pattern})"}
    # Of two that contradict each other Java takes the last.
    return {**conf, **user, **{name: f"{own} {user.get(name, '')}".rstrip() for name, own in java.items()}}


def ignore_checksum_files(session: SparkSession) -> None:
    """Have the driver's JVM open files on a disk without the ``.NAME.crc`` that stands beside one.

    Hadoop opens it before the file, whatever it is: one that is a pipe holds up its thread for ever, and eight bytes in
    one have the JVM ask for 2 GB. Hadoop has no setting for it; its one instance of the local file system is told.
    """
    jvm: Any = session._jvm
    hadoop = session.sparkContext._jsc.hadoopConfiguration()
    jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), hadoop).setVerifyChecksum(False)


def _seconds(user: Mapping[str, str], name: str, default: float) -> float:
    """A duration among Spark's settings; the default where it is invalid."""
    try:
        value = float(user.get(name, default))
    except ValueError:
        return default
    return value if 0 < value < float("inf") else default


class SparkHolder:
    """The session of this process, or none yet. ``session``: one that somebody else has started."""

    def __init__(
        self,
        master: str,
        executor: str,
        work_dir: Path,
        ttl: float,
        user: Mapping[str, str],
        session: SparkSession | None = None,
    ) -> None:
        self._master = master
        self._settings = settings(master, executor, work_dir, ttl, user)
        self._secret_names = user.get(secret_settings.PATTERN_SETTING, "")
        self._work_dir = work_dir
        self._lock = threading.Lock()
        self._session = session
        self.not_started = ""
        """Why the session did not start; this process does not try another one."""
        self._bound = threading.local()
        self._pools = Pools()
        self._probing = threading.Lock()
        self._patience = _seconds(user, ANSWER_SETTING, ANSWER_SECONDS)
        self._stalled_after = _seconds(user, STALLED_SETTING, STALLED_SECONDS)
        self._start_limit = _seconds(user, START_SETTING, START_SECONDS)
        self._starting = False
        self._log = logging.getLogger("distop.child")
        spark_settings.remove(work_dir)

    @property
    def started(self) -> bool:
        return self._session is not None

    def session(self, operation: str, tag: str, description: str) -> SparkSession:
        """The session, with the operation's pool, tag and description set for the calling thread. Raises
        SparkUnavailable, or SparkDied where it has been lost."""
        with self._lock:
            if self._session is None:
                self._session = self._start()
        if not self.alive():
            raise SparkDied("the JVM died or its SparkContext was stopped")
        if getattr(self._bound, "tag", None) != tag:
            self.unbind()
            context = self._session.sparkContext
            context.setLocalProperty("spark.scheduler.pool", self._pools.lend(operation))
            context.setLocalProperty("spark.job.description", description)
            context.setInterruptOnCancel(True)
            context.addJobTag(tag)
            self._bound.tag = tag
        return self._session

    def unbind(self) -> None:
        """Clear what :meth:`session` set for the calling thread."""
        if getattr(self._bound, "tag", None) is None or self._session is None:
            return
        self._bound.tag = None
        self._pools.give_back()
        try:
            context = self._session.sparkContext
            context.clearJobTags()
            # None is what clears a local property; the annotation of PySpark does not know it.
            clear: Any = None
            context.setLocalProperty("spark.scheduler.pool", clear)
            context.setLocalProperty("spark.job.description", clear)
        except Exception:
            if self.alive():
                raise

    def interrupt(self, tag: str) -> None:
        """Cancel the Spark jobs that run under a tag now."""
        if self._session is not None and self.alive():
            self._session.sparkContext.cancelJobsWithTag(tag)

    def tasks(self, tag: str) -> tuple[int, int] | None:
        """How many Spark tasks of a tag are done, and how many there are, as far as Spark runs any of them just now.
        Waits for as long as the JVM takes to answer.
        """
        if self._session is None:
            return None
        try:
            return tasks_of(self._session, tag)
        except Exception:  # it is for people alone; what is wrong with the JVM is noticed elsewhere
            self._log.debug("Spark's status could not be read", exc_info=True)
            return None

    def lingers(self) -> bool:
        """Whether Spark tasks run on that were told to stop. Waits for the JVM's answer."""
        if self._session is None:
            return False
        try:
            return lingering(self._session)
        except Exception:  # what is wrong with the JVM is noticed elsewhere
            self._log.debug("Spark's status could not be read", exc_info=True)
            return False

    def alive(self) -> bool:
        """Whether the session can still run jobs, or a first one may be started."""
        if self._session is None:
            return not self.not_started
        from pyspark import SparkContext

        gateway = SparkContext._gateway
        jvm = getattr(gateway, "proc", None)
        if gateway is None or (jvm is not None and jvm.poll() is not None):
            return False
        try:
            java_context: Any = self._session.sparkContext._jsc
            return java_context is not None and not java_context.sc().isStopped()
        except Exception:
            return False

    def lost(self, error: BaseException, *, expected: bool) -> str:
        """After an error: why Spark can run nothing any more, so that it says nothing about a job; "" where Spark is
        well, or had no part in it. ``expected``: Spark's jobs were told to stop."""
        if self.not_started:
            return self.not_started
        if isinstance(error, SparkDied):
            return headline(error)
        session = self._session
        if session is None:
            return ""
        if not self.alive():
            return headline(error)
        if expected or not of_spark(error):
            return ""
        with self._probing:
            why = trouble(session, self._patience)
        return f"it cannot run a Spark job any more: {why}" if why else ""

    def watch(self, on_death: OnDeath, on_trouble: Callable[[str], None]) -> None:
        """Check for ever whether the JVM answers and Spark completes tasks.

        It runs in the calling thread. A JVM that hangs is no better than a dead one: whoever waits for it would wait
        for ever.

        ``on_death`` is called with the reason why the session is unusable (``stalled``: it completes no tasks),
        ``on_trouble`` with what is wrong for the moment ("": nothing any more).
        """
        tick, every = threading.Event(), min(ASK_EVERY, self._patience, self._stalled_after)
        stall, examine_at, reported, starting = Stall(), self._stalled_after, "", 0.0
        while not tick.wait(every):
            if (session := self._session) is None:
                starting = starting + every if self._starting else 0.0
                if starting >= self._start_limit:
                    self.not_started = f"its Spark session did not start within {self._start_limit:g} s"
                    on_death(self.not_started)
                continue
            try:
                alive, seen = answer_within(self._patience, lambda: (self.alive(), self._activity()))
            except TimeoutError:
                on_death(f"its JVM did not answer for {self._patience:g} s")
                continue
            if not alive:
                on_death("its JVM died or its SparkContext was stopped")
                continue
            stall.add(seen, every)
            if stall.seconds < self._stalled_after:
                examine_at, cause = self._stalled_after, None
            elif stall.seconds < examine_at:
                continue  # what was found out at the last examination still holds
            else:
                examine_at = stall.seconds + self._stalled_after
                cause = self._stall_cause(session, seen)
            if cause is not None and cause.replace_session:
                on_death(f"{cause.text} (no task of its jobs ended for {stall.seconds:g} s)", stalled=True)
                continue
            wrong = cause.text if cause is not None else ""
            if wrong != reported:
                reported = wrong
                on_trouble(reported)

    def _activity(self) -> Activity:
        """What Spark does now; no activity where its status cannot be read.

        ``watch`` notices a lost JVM.
        """
        try:
            return activity(self._session) if self._session is not None else Activity()
        except Exception:
            self._log.debug("Spark's status could not be read", exc_info=True)
            return Activity()

    def _stall_cause(self, session: SparkSession, seen: Activity) -> StallCause | None:
        """Why a session completes no tasks; None where nothing is wrong with it."""
        try:
            limit = longest_examination(self._patience)
            return answer_within(limit, lambda: stall_cause(session, seen, self._patience))
        except Exception as error:
            why = str(error) if isinstance(error, TimeoutError) else headline(error)
            return StallCause(f"Spark completes no tasks, and the cause cannot be determined: {why}", False)

    def stop(self) -> None:
        if self._session is not None and self.alive():
            self._session.stop()

    def _start(self) -> SparkSession:
        """Start the first and only session of this process.

        There is no second try: the gateway to a JVM that was killed meanwhile (by the kernel, say) stays in PySpark's
        SparkContext, and so may half a SparkContext.
        """
        if self.not_started:
            raise SparkNotStarted(self.not_started)
        check_java(secret_settings.environment(os.environ))
        self._starting = True
        try:
            return self._build()
        except SparkUnavailable:
            raise
        except spark_submit.OtherFile as error:
            raise SparkUnavailable(str(error)) from None
        except Exception as error:
            self.not_started = f"its Spark session did not start: {headline(error)}"
            raise SparkNotStarted(self.not_started) from error
        finally:
            self._starting = False

    def _build(self) -> SparkSession:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        if self._master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        for name in ("warehouse", "local", "derby"):
            (self._work_dir / "spark" / name).mkdir(parents=True, exist_ok=True)
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise SparkUnavailable(f"PySpark is needed and cannot be imported: {error}") from error
        conf = {"spark.master": self._master, **self._settings}
        spark_submit.launch(conf, self._work_dir)
        self._hide_settings()
        # The file has these settings for the start of the JVM. Here the session gets them as they are: Spark trims
        # what it reads from a file.
        builder = SparkSession.builder.master(self._master)
        for key, value in self._settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        ignore_checksum_files(session)
        self._quieten(session)
        gc_tuning.settle()
        return session

    def _hide_settings(self) -> None:
        """Hide the secrets of all settings that the JVM has read, spark-defaults.conf included: errors may quote them,
        those of the start of the session, too.
        """
        from pyspark import SparkConf

        read = dict(SparkConf(loadDefaults=True).getAll())
        names = self._secret_names or read.get(secret_settings.PATTERN_SETTING, "")
        secret_settings.hide_settings({**read, secret_settings.PATTERN_SETTING: names})

    @staticmethod
    def _quieten(session: SparkSession) -> None:
        """Spark warns of every pool that no file configures. That is as intended here."""
        try:
            log4j: Any = getattr(session.sparkContext._jvm, "org").apache.logging.log4j  # noqa: B009
            name = "org.apache.spark.scheduler.FairSchedulableBuilder"
            log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)
        except Exception:
            # Another logging backend: the warnings stay.
            logging.getLogger("distop.child").debug("Spark's logging could not be adjusted", exc_info=True)
