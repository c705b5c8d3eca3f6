"""Stalled Spark sessions: detection, and the cause."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from distop.protocol.records import Node
from distop.worker.child_side import spark_stall
from distop.worker.child_side.spark_probe import answer_within, probe
from distop.worker.child_side.spark_session import ANSWER_SETTING, SparkHolder, SparkNotStarted, settings
from distop.worker.child_side.spark_stall import Activity, Stall, known_to_master, longest_examination, stall_cause

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAITING = Activity(jobs=1, stages={7: 3})


def stalled(*seen: Activity) -> float:
    """Seconds of stall after these observations, five seconds apart."""
    stall = Stall()
    for one in seen:
        stall.add(one, 5.0)
    return stall.seconds


def test_a_session_whose_tasks_neither_run_nor_end_is_stalled() -> None:
    assert stalled(Activity(jobs=1, stages={7: 0}), Activity(jobs=1, stages={7: 0})) == 10
    assert stalled(WAITING) == 0, "its tasks may have ended just now"
    assert stalled(WAITING, WAITING, WAITING) == 10


def test_new_jobs_of_others_do_not_count_as_progress() -> None:
    assert stalled(*(Activity(jobs=n, stages=dict.fromkeys(range(n), 0)) for n in range(1, 6))) == 25


def test_task_progress_resets_the_stall_timer() -> None:
    for moved in (
        Activity(),
        Activity(jobs=1, running=True),
        Activity(jobs=1, stages={7: 4}),
        Activity(jobs=1, stages={8: 0}),
        Activity(jobs=2, stages={7: 3, 8: 1}),
    ):
        assert stalled(WAITING, WAITING, moved) == 0, moved
        assert stalled(WAITING, WAITING, moved, moved) == (5.0 if moved.stages else 0.0), moved


def test_a_node_record_names_the_cause_of_a_stall() -> None:
    node = Node("ann", "h", 1, ("noop",), spark="no cores from Spark: x")
    assert Node.decode(node.encode()) == node
    assert b"spark" not in Node("ann", "h", 1, ("noop",)).encode()


class StuckSpark:
    """A session, its context and its status tracker in one; its tasks never run."""

    master = "yarn"

    def __init__(self) -> None:
        self.sparkContext = self
        self.jobs: dict[str, threading.Event] = {}
        """Job group → whether its job was cancelled."""
        self._group = threading.local()

    def setJobGroup(self, group: str, _: str, interruptOnCancel: bool) -> None:
        assert interruptOnCancel
        self._group.name = group

    def setLocalProperty(self, *_: str) -> None: ...

    def range(self, *_: int) -> StuckSpark:
        return self

    def repartition(self, _: int) -> StuckSpark:
        return self

    def count(self) -> None:
        cancelled = self.jobs.setdefault(self._group.name, threading.Event())
        cancelled.wait()
        del self.jobs[self._group.name]
        raise RuntimeError("cancelled")

    def cancelJobGroup(self, group: str) -> None:
        if group in self.jobs:
            self.jobs[group].set()

    def statusTracker(self) -> StuckSpark:
        return self

    def getActiveJobsIds(self) -> list[int]:
        return []

    def getJobIdsForGroup(self, _: str) -> list[int]:
        return []


class Anything:
    """A part of the JVM that these tests do not use: each attribute and call gives it again."""

    def __getattr__(self, _: str) -> Anything:
        return self

    def __call__(self, *_: object) -> Anything:
        return self


class Awaited:
    """Spark's ``RpcTimeout``: each result is there at once."""

    def __getattr__(self, _: str) -> Callable[..., Awaited]:
        return lambda *_: self

    def awaitResult(self, found: object) -> object:
        return found


class Jvm(Anything):
    RpcTimeout = staticmethod(lambda *_: Awaited())


class Master:
    """A standalone master with these answers; status None: it does not answer."""

    def __init__(self, status: str | None, *applications: str) -> None:
        self._status, self._applications = status, applications

    def askSync(self, *_: object) -> Master:
        if self._status is None:
            raise ConnectionError("no answer")
        return self

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(toString=lambda: self._status)

    def activeApps(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(id=lambda name=name: name) for name in self._applications]


class Standalone(StuckSpark):
    """A session of the application ``mine`` on these masters; tasks run if it is ``healthy``."""

    _jvm = Jvm()

    def __init__(self, *masters: Master, healthy: bool = False) -> None:
        super().__init__()
        self.master = "spark://" + ",".join(f"h{n}:7077" for n in range(len(masters)))
        self._masters = {f"spark://Master@h{n}:7077": one for n, one in enumerate(masters)}
        self._healthy, self._jsc = healthy, self

    def sc(self) -> Standalone:
        return self

    env = rpcEnv = sc

    def applicationId(self) -> str:
        return "mine"

    def asyncSetupEndpointRefByURI(self, uri: str) -> Master:
        return self._masters[uri]

    def count(self) -> None:
        if not self._healthy:
            super().count()


KNOWN, FORGOTTEN, SILENT = Master("ALIVE", "other", "mine"), Master("ALIVE", "other"), Master(None)
STANDBY = Master("STANDBY")


@pytest.mark.parametrize(
    ("masters", "expected"),
    [
        ([KNOWN], True),
        ([FORGOTTEN], False),
        ([SILENT], None),
        ([STANDBY], None),
        ([SILENT, KNOWN], True),
        ([STANDBY, FORGOTTEN], False),
        ([FORGOTTEN, SILENT], False),
        ([STANDBY, SILENT], None),
    ],
)
def test_an_active_master_is_asked_whether_it_knows_the_application(
    masters: list[Master], expected: bool | None
) -> None:
    spark = Standalone(*masters)
    addresses = spark.master.removeprefix("spark://").split(",")
    assert known_to_master(cast(Any, spark), addresses, 1.0) is expected


@pytest.mark.parametrize(
    ("master", "executors", "text", "replace_session"),
    [
        (FORGOTTEN, 0, "no cores from Spark: the master spark://h0:7077 does not know this application", True),
        (FORGOTTEN, 2, "no cores from Spark: the master spark://h0:7077 does not know this application", True),
        (SILENT, 0, "no cores from Spark: the master spark://h0:7077 does not answer", False),
        (SILENT, 2, "Spark completes no tasks: a test job did not end within 0.2 s", True),
        (KNOWN, 0, "no cores from Spark: the master spark://h0:7077 has not granted this application any cores", False),
        (KNOWN, 2, "Spark completes no tasks: a test job did not end within 0.2 s", True),
    ],
)
def test_the_stall_cause_includes_whether_to_replace_the_session(
    master: Master, executors: int, text: str, replace_session: bool
) -> None:
    seen = Activity(jobs=1, executors=executors)
    cause = stall_cause(cast(Any, Standalone(master)), seen, 0.2)
    assert cause is not None
    assert cause.text.startswith(text)
    assert cause.replace_session is replace_session
    healthy = stall_cause(cast(Any, Standalone(master, healthy=True)), seen, 0.2)
    assert (healthy is None) is text.startswith("Spark completes no tasks"), (
        "a test job decides unless the master gives a cause"
    )


@pytest.mark.parametrize("executors", [0, 2])
def test_only_a_standalone_master_is_asked(executors: int) -> None:
    cause = stall_cause(cast(Any, StuckSpark()), Activity(jobs=1, executors=executors), 0.2)
    assert cause is not None
    expected = "Spark completes no tasks" if executors else "no cores from Spark: the cluster manager of yarn"
    assert cause.text.startswith(expected)
    assert cause.replace_session is bool(executors)


def test_the_examination_waits_longer_than_its_probe(tmp_path: Path) -> None:
    """Both had the same time limit, and the outer one ended first."""

    class Slow(StuckSpark):
        @property
        def master(self) -> str:  # type: ignore[override]
            threading.Event().wait(0.3)  # each answer of the JVM takes this long
            return "yarn"

    holder = SparkHolder("yarn", "ex", tmp_path, 10.0, {ANSWER_SETTING: "0.5"})
    cause = holder._stall_cause(cast(Any, Slow()), Activity(jobs=1, executors=1))
    assert cause is not None
    message = "Spark completes no tasks: a test job did not end within 0.5 s"
    assert (cause.text, cause.replace_session) == (message, True)


def test_all_masters_together_have_half_the_time_of_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def known(_: object, masters: list[str], limit: float) -> bool:
        limits.append(limit)
        return False

    monkeypatch.setattr(spark_stall, "known_to_master", known)
    assert stall_cause(cast(Any, Standalone(FORGOTTEN, KNOWN)), Activity(jobs=1), 60.0) is not None
    assert limits == [30.0]
    assert longest_examination(60.0) == 60.0 + 30.0 + 60.0 + 2.0, "the JVM's answer, the masters, a probe, its cancel"


def test_an_unanswered_probe_cancels_its_job() -> None:
    spark = StuckSpark()
    assert probe(cast(Any, spark), 0.5) == "a test job did not end within 0.5 s"
    assert spark.jobs == {}


def test_the_end_of_one_probe_does_not_end_another() -> None:
    spark, found = StuckSpark(), list[str]()
    probes = [threading.Thread(target=lambda: found.append(probe(cast(Any, spark), 1.0))) for _ in range(2)]
    for thread in probes:
        thread.start()
    for thread in probes:
        thread.join()
    assert found == ["a test job did not end within 1 s"] * 2, "neither reports a cancelled job"


def test_an_undetermined_cause_is_reported(tmp_path: Path) -> None:
    """It once counted as no problem."""

    class Lost(StuckSpark):
        @property
        def master(self) -> str:  # type: ignore[override]
            raise RuntimeError("the connection is lost")

    cause = SparkHolder("yarn", "ex", tmp_path, 10.0, {})._stall_cause(cast(Any, Lost()), Activity(jobs=1))
    assert cause is not None
    assert not cause.replace_session
    assert cause.text.endswith("the cause cannot be determined: RuntimeError: the connection is lost"), cause


def test_a_process_whose_session_did_not_start_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM killed at its start leaves half a SparkContext: a second try would always fail."""
    holder, tries = SparkHolder("local[1]", "ex", tmp_path, 10.0, {}), []

    def killed() -> Any:
        tries.append("")
        raise ConnectionRefusedError("the JVM is gone")

    monkeypatch.setattr(holder, "_build", killed)
    assert holder.alive(), "a first session may be started"
    for _ in range(2):
        with pytest.raises(SparkNotStarted, match="the JVM is gone"):
            holder._start()
    assert tries == [""], "only one try"
    assert not holder.alive()
    assert "the JVM is gone" in holder.lost(RuntimeError("a job's own"), expected=False)


def test_answer_within_ends_at_its_time_limit() -> None:
    assert answer_within(60.0, lambda: None) is None
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        answer_within(0.01, never.wait)
    never.set()
    with pytest.raises(ZeroDivisionError):
        answer_within(60.0, lambda: 1 // 0)


@pytest.mark.parametrize("master", ["local[2]", "spark://h:7077"])
def test_only_a_lack_of_memory_ends_a_jvm(tmp_path: Path, master: str) -> None:
    user = {"spark.driver.extraJavaOptions": "-Da=1", "spark.executor.extraJavaOptions": "-Db=1"}
    found = settings(master, "e", tmp_path, 10.0, user)
    assert found["spark.executor.killOnFatalError.depth"] == "0"
    assert found["spark.driver.extraJavaOptions"].endswith("-XX:+ExitOnOutOfMemoryError -Da=1")
    of_cluster = "-XX:+ExitOnOutOfMemoryError -Db=1"
    assert found["spark.executor.extraJavaOptions"] == ("-Db=1" if master.startswith("local") else of_cluster)
