"""When a Spark session that has jobs counts as stalled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from distop.core.model import Node
from distop.worker.bounded_wait import answer_within
from distop.worker.probing import trouble
from distop.worker.spark import ANSWER_SETTING, SparkHolder, settings
from distop.worker.stalling import Activity, Stall

if TYPE_CHECKING:
    from pathlib import Path

WAITING = Activity(jobs=1, stages={7: 3})


def stalled(*seen: Activity) -> float:
    """Seconds of stall after these looks, five seconds apart."""
    stall = Stall()
    for one in seen:
        stall.add(one, 5.0)
    return stall.seconds


def test_a_session_whose_tasks_neither_run_nor_end_is_stalled() -> None:
    assert stalled(Activity(jobs=1, stages={7: 0}), Activity(jobs=1, stages={7: 0})) == 10
    assert stalled(WAITING) == 0, "tasks of it have ended, perhaps just now"
    assert stalled(WAITING, WAITING, WAITING) == 10


def test_work_of_others_that_comes_meanwhile_is_no_progress() -> None:
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


def test_the_examination_waits_longer_than_its_probe(tmp_path: Path) -> None:
    """Both had the same time limit, and the outer one ended first."""

    class Slow(StuckSpark):
        @property
        def master(self) -> str:  # type: ignore[override]
            threading.Event().wait(0.3)  # the JVM takes a while for each answer
            return "yarn"

    holder = SparkHolder("yarn", "ex", tmp_path, 10.0, {ANSWER_SETTING: "0.5"})
    cause = holder._stall_cause(cast(Any, Slow()), Activity(jobs=1, executors=1))
    assert cause is not None
    assert (cause.text, cause.replace_session) == ("Spark completes no tasks: no end within 0.5 s", True)


def test_a_probe_without_an_answer_leaves_no_job_behind() -> None:
    spark = StuckSpark()
    assert trouble(cast(Any, spark), 0.5) == "no end within 0.5 s"
    assert spark.jobs == {}


def test_the_end_of_one_probe_does_not_end_another() -> None:
    spark, found = StuckSpark(), list[str]()
    probes = [threading.Thread(target=lambda: found.append(trouble(cast(Any, spark), 1.0))) for _ in range(2)]
    for probe in probes:
        probe.start()
    for probe in probes:
        probe.join()
    assert found == ["no end within 1 s"] * 2, "the second was told that its job was cancelled"


def test_an_undetermined_cause_is_reported(tmp_path: Path) -> None:
    """It once counted as nothing being wrong."""

    class Lost(StuckSpark):
        @property
        def master(self) -> str:  # type: ignore[override]
            raise RuntimeError("the connection is lost")

    cause = SparkHolder("yarn", "ex", tmp_path, 10.0, {})._stall_cause(cast(Any, Lost()), Activity(jobs=1))
    assert cause is not None
    assert not cause.replace_session
    assert cause.text.endswith("the cause cannot be determined: RuntimeError: the connection is lost"), cause


def test_an_answer_comes_within_its_time_or_not_at_all() -> None:
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
