"""The child's only Spark session: started on first use, shared by its threads, replaced only with the child.

Every thread that uses it for a job gets its operation's FAIR pool and the job's tag. Both are cleared when the job
ends, because Spark keeps them per thread.
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
from distop.storage import storage_access
from distop.worker import spark_settings
from distop.worker.child_side import spark_submit
from distop.worker.child_side.error_texts import headline
from distop.worker.child_side.spark_jobs import PoolNames, count_tasks, has_cancelled_tasks
from distop.worker.child_side.spark_probe import answer_within, is_spark_error, probe
from distop.worker.child_side.spark_stall import Activity, Stall, StallCause, activity, longest_examination, stall_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

ANSWER_SETTING = "spark.distop.jvmAnswer"
"""distop's setting among Spark's: seconds without an answer after which a JVM counts as hung."""
ANSWER_SECONDS = 60.0
"""Its default: longer than any acceptable pause for garbage collection."""
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
EXECUTOR_JAVA_OPTIONS = "spark.executor.extraJavaOptions"
FATAL_DEPTH = "spark.executor.killOnFatalError.depth"
STALLED_SETTING, STALLED_SECONDS = "spark.distop.stalledAfter", 60.0
"""Setting and default: seconds with jobs but without any running or completed task.

Then the session is examined, and again each time after as many seconds.
"""
START_SETTING, START_SECONDS = "spark.distop.startLimit", 600.0
"""Setting and default: seconds for a session to start, which includes the download of packages."""
CALLING_SCHEMES = ("http", "https", "ftp", "sftp", "webhdfs", "swebhdfs", "har")
"""Hadoop's file systems whose URLs can name any host, and one that wraps others."""
REFUSED = "distop.RefusedFileSystem"
"""The implementation set for these: no class has the name, so Hadoop cannot open such URLs."""
ASK_EVERY = 5.0
"""Seconds between two checks of the JVM."""


class OnDeath(Protocol):
    """Callback with the reason why a session is unusable."""

    def __call__(self, why: str, *, stalled: bool = False) -> None: ...


_IN_ONE_PROCESS = re.compile(r"local(\[[^]]*\])?")
"""Masters that run all of Spark in the driver's JVM."""
_EXIT_OPTION = "-XX:+ExitOnOutOfMemoryError"
"""A Java option: without it, a JVM continues in an undefined state after an OutOfMemoryError in one thread, and all
later jobs may fail. With it, the JVM exits, and the child with it.
"""


class SparkUnavailable(UsageError):
    """Spark cannot run on this node: Java is missing or too old, for example. Another node may run it."""


class SparkDied(Exception):
    """The JVM or its SparkContext is gone: this process must be replaced."""


class SparkNotStarted(SparkDied):
    """The session did not start, and none can start in this process.

    PySpark keeps parts of the failed session, so the next one would fail as well.
    """


def check_java(environment: Mapping[str, str]) -> None:
    """Raises SparkUnavailable if Spark would not find a suitable Java."""
    judged = java.judge(environment)
    if judged.level == "error":
        raise SparkUnavailable(judged.text)


def settings(master: str, executor: str, work_dir: Path, ttl: float, user: Mapping[str, str]) -> dict[str, str]:
    """distop's settings of the session, overridden by the user's. ``ttl``: of the etcd session, in seconds."""
    local = work_dir / "spark"
    java = {JAVA_OPTIONS: f"-Dderby.system.home={local / 'derby'} {_EXIT_OPTION}"}
    conf = {
        # Otherwise Spark ends the JVM with all its jobs if the stack of a task overflows, for example in a pattern.
        FATAL_DEPTH: "0",
        # Otherwise SQL texts such as table paths could read the JVM's environment with ${env:NAME}.
        "spark.sql.variable.substitute": "false",
        # Otherwise a table with a file at such a URL could choose the host that the JVM connects to.
        **{f"spark.hadoop.fs.{scheme}.impl": REFUSED for scheme in CALLING_SCHEMES},
        "spark.app.name": f"distop-{executor}",
        "spark.scheduler.mode": "FAIR",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(local / "warehouse"),
        "spark.local.dir": str(local / "local"),
        **storage_access.spark_settings(),
    }
    if _IN_ONE_PROCESS.fullmatch(master):
        # Otherwise every user of this machine could read settings and data blocks at the driver's ports, and send it
        # Java objects. Spark generates the secret.
        user = {**user, "spark.authenticate": "true"}
    if master.startswith("local"):
        conf |= _local_settings(master)
    else:
        java[EXECUTOR_JAVA_OPTIONS] = _EXIT_OPTION
        # A Spark executor without a connection to its driver must stop before the claims of its jobs can be taken over.
        conf |= {
            "spark.executor.heartbeatInterval": f"{int(spark_rules.interval(ttl) * 1000)}ms",
            "spark.executor.heartbeat.maxFailures": str(spark_rules.FAILURES),
        }
    if pattern := user.get(secret_settings.PATTERN_SETTING):
        # The user's setting would replace Spark's default pattern, so add that.
        user = {**user, secret_settings.PATTERN_SETTING: f"{secret_settings.PATTERN}|(?:{pattern})"}
    # If two Java options contradict each other, Java uses the last one.
    return {**conf, **user, **{name: f"{own} {user.get(name, '')}".rstrip() for name, own in java.items()}}


def _local_settings(master: str) -> dict[str, str]:
    """The settings for a master that runs all of Spark in this process."""
    cores = re.match(r"local\[(\d+)", master)
    count = int(cores[1]) if cores else 1 if master == "local" else os.cpu_count() or 1
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(max(4, 2 * count)),
    }


def ignore_checksum_files(session: SparkSession) -> None:
    """Let the driver's JVM ignore the checksum files (``.NAME.crc``) of local files.

    Hadoop opens a checksum file before its file: if it is a pipe, the thread blocks forever, and eight bytes in it can
    make the JVM allocate 2 GB. Hadoop has no setting for it, so its instance of the local file system is changed.
    """
    jvm: Any = session._jvm
    hadoop = session.sparkContext._jsc.hadoopConfiguration()
    jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), hadoop).setVerifyChecksum(False)


def _seconds(user: Mapping[str, str], name: str, default: float) -> float:
    """A duration among Spark's settings; the default if it is invalid."""
    try:
        value = float(user.get(name, default))
    except ValueError:
        return default
    return value if 0 < value < float("inf") else default


class SparkHolder:
    """Owns the Spark session of this process. ``session``: a session that was started before."""

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
        """Why the session did not start, "" otherwise; this process does not start another one."""
        self._bound = threading.local()
        self._pools = PoolNames()
        self._probing = threading.Lock()
        self._answer_limit = _seconds(user, ANSWER_SETTING, ANSWER_SECONDS)
        self._stalled_after = _seconds(user, STALLED_SETTING, STALLED_SECONDS)
        self._start_limit = _seconds(user, START_SETTING, START_SECONDS)
        self._starting = False
        self._log = logging.getLogger("distop.child")
        spark_settings.remove(work_dir)

    @property
    def started(self) -> bool:
        return self._session is not None

    def session(self, operation: str, tag: str, description: str) -> SparkSession:
        """The session, with the operation's pool, tag and description set for the calling thread.

        Raises SparkUnavailable, or SparkDied if the session is lost.
        """
        with self._lock:
            if self._session is None:
                self._session = self._start()
        if not self.alive():
            raise SparkDied("the JVM died, or its SparkContext was stopped")
        if getattr(self._bound, "tag", None) != tag:
            self.unbind()
            context = self._session.sparkContext
            context.setLocalProperty("spark.scheduler.pool", self._pools.acquire(operation))
            context.setLocalProperty("spark.job.description", description)
            context.setInterruptOnCancel(True)
            context.addJobTag(tag)
            self._bound.tag = tag
        return self._session

    def unbind(self) -> None:
        """Clear the pool, tag and description of the calling thread, which :meth:`session` has set."""
        if getattr(self._bound, "tag", None) is None or self._session is None:
            return
        self._bound.tag = None
        self._pools.release()
        try:
            context = self._session.sparkContext
            context.clearJobTags()
            # None clears a local property; PySpark's annotation does not allow it.
            clear: Any = None
            context.setLocalProperty("spark.scheduler.pool", clear)
            context.setLocalProperty("spark.job.description", clear)
        except Exception:
            if self.alive():
                raise

    def interrupt(self, tag: str) -> None:
        """Cancel the running Spark jobs of a tag."""
        if self._session is not None and self.alive():
            self._session.sparkContext.cancelJobsWithTag(tag)

    def tasks(self, tag: str) -> tuple[int, int] | None:
        """The numbers of completed and of all Spark tasks of a tag's active stages; None if there are none.

        Waits for the JVM's answer, without a time limit.
        """
        if self._session is None:
            return None
        try:
            return count_tasks(self._session, tag)
        except Exception:  # the numbers are only for people; `watch` detects a lost JVM
            self._log.debug("Cannot read Spark's status", exc_info=True)
            return None

    def has_cancelled_tasks(self) -> bool:
        """Whether cancelled Spark tasks still run. Waits for the JVM's answer, without a time limit."""
        if self._session is None:
            return False
        try:
            return has_cancelled_tasks(self._session)
        except Exception:  # `watch` detects a lost JVM
            self._log.debug("Cannot read Spark's status", exc_info=True)
            return False

    def alive(self) -> bool:
        """Whether the session can run jobs, or a first session may be started."""
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
        """After a job's error: why Spark is unusable, so that the error is not the job's fault; "" if Spark works.

        Also "" if the error is not one of Spark. ``expected``: Spark's jobs were cancelled, so errors are expected.
        """
        if self.not_started:
            return self.not_started
        if isinstance(error, SparkDied):
            return headline(error)
        session = self._session
        if session is None:
            return ""
        if not self.alive():
            return headline(error)
        if expected or not is_spark_error(error):
            return ""
        with self._probing:
            why = probe(session, self._answer_limit)
        return f"its Spark session cannot run jobs any more: {why}" if why else ""

    def watch(self, on_death: OnDeath, on_trouble: Callable[[str], None]) -> None:
        """Check without end, in the calling thread, whether the JVM answers and Spark completes tasks.

        A hanging JVM is treated like a dead one: a thread that waits for it would wait forever.

        ``on_death`` is called with the reason why the session is unusable (``stalled``: it completes no tasks),
        ``on_trouble`` with the current problem, "" if it has ended.
        """
        tick, every = threading.Event(), min(ASK_EVERY, self._answer_limit, self._stalled_after)
        stall, examine_at, reported, starting = Stall(), self._stalled_after, "", 0.0
        while not tick.wait(every):
            if (session := self._session) is None:
                starting = starting + every if self._starting else 0.0
                if starting >= self._start_limit:
                    self.not_started = f"its Spark session did not start within {self._start_limit:g} s"
                    on_death(self.not_started)
                continue
            try:
                alive, seen = answer_within(self._answer_limit, lambda: (self.alive(), self._activity()))
            except TimeoutError:
                on_death(f"its JVM did not answer for {self._answer_limit:g} s")
                continue
            if not alive:
                on_death("its JVM died, or its SparkContext was stopped")
                continue
            stall.add(seen, every)
            if stall.seconds < self._stalled_after:
                examine_at, cause = self._stalled_after, None
            elif stall.seconds < examine_at:
                continue  # the result of the last examination is still valid
            else:
                examine_at = stall.seconds + self._stalled_after
                cause = self._stall_cause(session, seen)
            if cause is not None and cause.replace_session:
                on_death(f"{cause.text} (no task of its jobs ended for {stall.seconds:g} s)", stalled=True)
                continue
            problem = cause.text if cause is not None else ""
            if problem != reported:
                reported = problem
                on_trouble(reported)

    def _activity(self) -> Activity:
        """Spark's current activity; none if its status cannot be read, since ``watch`` detects a lost JVM."""
        try:
            return activity(self._session) if self._session is not None else Activity()
        except Exception:
            self._log.debug("Cannot read Spark's status", exc_info=True)
            return Activity()

    def _stall_cause(self, session: SparkSession, seen: Activity) -> StallCause | None:
        """Why a session completes no tasks; None if the session is fine."""
        try:
            limit = longest_examination(self._answer_limit)
            return answer_within(limit, lambda: stall_cause(session, seen, self._answer_limit))
        except Exception as error:
            why = str(error) if isinstance(error, TimeoutError) else headline(error)
            return StallCause(f"Spark completes no tasks, and the cause cannot be determined: {why}", False)

    def stop(self) -> None:
        if self._session is not None and self.alive():
            self._session.stop()

    def _start(self) -> SparkSession:
        """Start the only session of this process.

        It is not retried: PySpark's SparkContext keeps the gateway to a JVM that was killed during the start, and
        possibly a partial SparkContext.
        """
        if self.not_started:
            raise SparkNotStarted(self.not_started)
        check_java(secret_settings.environment(os.environ))
        self._starting = True
        try:
            return self._build()
        except SparkUnavailable:
            raise
        except spark_submit.PropertiesFileConflict as error:
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
            raise SparkUnavailable(f"cannot import PySpark: {error}; run pip install 'distop[spark]'") from error
        conf = {"spark.master": self._master, **self._settings}
        spark_submit.launch(conf, self._work_dir)
        self._hide_settings()
        # The settings file serves the start of the JVM. Set them here, too, because Spark trims values from a file.
        builder = SparkSession.builder.master(self._master)
        for key, value in self._settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
        ignore_checksum_files(session)
        self._quieten(session)
        gc_tuning.freeze_loaded()
        return session

    def _hide_settings(self) -> None:
        """Register the secrets of all settings of the JVM, including spark-defaults.conf, for redaction in errors."""
        from pyspark import SparkConf

        read = dict(SparkConf(loadDefaults=True).getAll())
        names = self._secret_names or read.get(secret_settings.PATTERN_SETTING, "")
        secret_settings.hide_settings({**read, secret_settings.PATTERN_SETTING: names})

    @staticmethod
    def _quieten(session: SparkSession) -> None:
        """Suppress Spark's warnings about pools that no file configures."""
        try:
            log4j: Any = getattr(session.sparkContext._jvm, "org").apache.logging.log4j  # noqa: B009
            name = "org.apache.spark.scheduler.FairSchedulableBuilder"
            log4j.core.config.Configurator.setLevel(name, log4j.Level.ERROR)
        except Exception:
            # Another logging backend: the warnings stay.
            logging.getLogger("distop.child").debug("Cannot change Spark's log level", exc_info=True)
