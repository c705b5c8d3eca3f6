"""The watch of a Spark session, in virtual time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from distop.worker.child_side import spark_session
from distop.worker.child_side.spark_session import SparkHolder, SparkNotStarted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOST_CHECKS = 1000
NO_CORES = "no cores from Spark: the cluster manager of yarn has not granted this application any cores"


class Died(Exception):
    """The watch reported that the session is unusable, which ends the child."""


class Watched:
    """A watch that runs until it reports a death. ``at``: the virtual time; ``checks``: the number of checks.

    ``death``: the reason, and whether the session stalled. ``troubles``: the other reports. ``limits``: the time limits
    of the questions to the JVM. ``on_check`` is called before each check.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at, self.checks = 0.0, 0
        self.limits: list[float] = []
        self.death = "", False
        self.troubles: list[str] = []
        self.on_check: Callable[[], None] = lambda: None
        waiting = SimpleNamespace(Event=lambda: self, Lock=threading.Lock, local=threading.local)
        patch.setattr(spark_session, "threading", waiting)
        patch.setattr(spark_session, "answer_within", self._answer)

    def wait(self, seconds: float) -> bool:
        """The wait between two checks."""
        assert self.checks < MOST_CHECKS, "the watch reported no death"
        self.at, self.checks = self.at + seconds, self.checks + 1
        self.on_check()
        return False

    def _answer(self, limit: float, ask: Callable[[], Any]) -> Any:
        self.limits.append(limit)
        return ask()

    def watch(self, holder: SparkHolder) -> None:
        def died(why: str, *, stalled: bool = False) -> None:
            self.death = why, stalled
            raise Died

        with pytest.raises(Died):
            holder.watch(died, self.troubles.append)


class Spark:
    """A session, its contexts and its status tracker in one, with one job.

    ``running``: its running tasks. ``executors``: its Spark executors.
    """

    master = "yarn"

    def __init__(self) -> None:
        self.sparkContext = self._jsc = self
        self.running = self.executors = 0

    def sc(self) -> Spark:
        return self

    statusTracker = get = sc

    def isDefined(self) -> bool:
        return True

    def getActiveJobIds(self) -> list[int]:
        return [1]

    def getActiveStageIds(self) -> list[int]:
        return [1]

    def getStageInfo(self, _: int) -> Spark:
        return self

    def numActiveTasks(self) -> int:
        return self.running

    def numCompletedTasks(self) -> int:
        return 0

    numFailedTasks = numCompletedTasks

    def getExecutorInfos(self) -> list[str]:
        return ["the driver", *["an executor"] * self.executors]


class Holder(SparkHolder):
    """Holds this session on a cluster. ``is_alive``: its JVM runs."""

    is_alive = True

    def __init__(self, folder: Path, spark: Spark | None) -> None:
        super().__init__("yarn", "ex", folder, 10.0, {}, cast(Any, spark))

    def alive(self) -> bool:
        return self.is_alive


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_dead_jvm_is_reported_at_the_next_check(watched: Watched, tmp_path: Path) -> None:
    spark = Spark()
    spark.running, holder = 1, Holder(tmp_path, spark)
    watched.on_check = lambda: setattr(holder, "is_alive", watched.checks < 10)
    watched.watch(holder)
    assert watched.death == ("its JVM died, or its SparkContext was stopped", False)
    assert (watched.at, watched.checks) == (50.0, 10)


def test_a_jvm_has_a_minute_to_answer(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(limit: float, _: Callable[[], Any]) -> Any:
        watched.limits.append(limit)
        raise TimeoutError

    monkeypatch.setattr(spark_session, "answer_within", no_answer)
    watched.watch(Holder(tmp_path, Spark()))
    assert watched.death == ("its JVM did not answer for 60 s", False)
    assert watched.limits == [60.0]


def test_a_session_has_ten_minutes_to_start(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(tmp_path, None)

    def starts() -> Any:
        watched.watch(holder)
        raise ConnectionRefusedError("no JVM")

    monkeypatch.setattr(spark_session, "check_java", lambda _: None)
    monkeypatch.setattr(holder, "_build", starts)
    with pytest.raises(SparkNotStarted):
        holder.session("t/sample/1", "tag", "")
    assert watched.death == ("its Spark session did not start within 600 s", False)
    assert watched.at == 600.0


def test_a_session_that_completes_no_tasks_is_replaced_after_a_minute(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = Spark()
    spark.executors = 1
    monkeypatch.setattr("distop.worker.child_side.spark_stall.probe", lambda *_: "a test job did not end")
    watched.watch(Holder(tmp_path, spark))
    expected = "Spark completes no tasks: a test job did not end (no task of its jobs ended for 60 s)"
    assert watched.death == (expected, True)
    assert watched.at == 60.0


def test_a_lack_of_cores_is_reported_until_a_task_runs(watched: Watched, tmp_path: Path) -> None:
    spark = Spark()
    holder = Holder(tmp_path, spark)

    def changes() -> None:
        spark.running = int(watched.at >= 300.0)
        holder.is_alive = watched.at < 600.0

    watched.on_check = changes
    watched.watch(holder)
    assert watched.troubles == [NO_CORES, ""]
