"""Bounded waits for a JVM, and probes of Spark, in virtual time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from distop.worker.child_side import spark_probe
from distop.worker.child_side.spark_probe import BoundedWait, probe

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_WAITS = 1000


class Clock:
    """A clock that only the waits for a thread advance, each by its time limit or by ``frozen`` seconds.

    ``waits``: the time limits of these waits. ``ends``: whether the thread has ended.
    """

    def __init__(self, patch: pytest.MonkeyPatch, frozen: float = 0.0) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.ends: Callable[[], bool] = lambda: False
        self._frozen = frozen
        patch.setattr(spark_probe, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(spark_probe, "threading", SimpleNamespace(Thread=lambda **_: self.thread))

    @property
    def thread(self) -> Any:
        return SimpleNamespace(start=lambda: None, join=self._join, is_alive=lambda: not self.ends())

    def _join(self, seconds: float) -> None:
        assert len(self.waits) < MOST_WAITS, "the wait has no end"
        self.waits.append(seconds)
        self.now += self._frozen or seconds


class BusySpark:
    """A session, its context and its status tracker in one: a job of others runs, if it is ``busy``.

    ``cancels``: the times at which a probe was cancelled.
    """

    def __init__(self, clock: Clock, *, busy: bool = True) -> None:
        self.sparkContext = self
        self.cancels: list[float] = []
        self._clock, self._busy = clock, busy

    def statusTracker(self) -> BusySpark:
        return self

    def getActiveJobsIds(self) -> list[int]:
        return [7] if self._busy else []

    def getJobIdsForGroup(self, _: str) -> list[int]:
        return []

    def getJobInfo(self, job: int) -> Any:
        return SimpleNamespace(stageIds=[job])

    def getStageInfo(self, _: int) -> Any:
        return SimpleNamespace(numActiveTasks=1)

    def cancelJobGroup(self, _: str) -> None:
        self.cancels.append(self._clock.now)


def waited(clock: Clock, seconds: float) -> float:
    """The virtual seconds that a wait for an endless thread takes."""
    wait = BoundedWait(seconds)
    while wait.join(clock.thread):
        pass
    return clock.now


def test_a_wait_has_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe looks between two steps whether other tasks run."""
    clock = Clock(monkeypatch)
    assert waited(clock, 10.25) == 10.25
    assert clock.waits == [*itertools.repeat(0.5, 20), 0.25]


def test_of_the_time_for_which_the_process_was_frozen_two_seconds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, frozen=3600.0)
    waited(clock, 10.0)
    assert len(clock.waits) == 5


def test_a_probe_on_a_busy_session_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    spark = BusySpark(clock)
    clock.ends = lambda: bool(spark.cancels)
    assert probe(cast(Any, spark), 60.0) == ""
    assert spark.cancels == [2.0]


@pytest.mark.parametrize("busy", [True, False])
def test_a_probe_that_cannot_be_cancelled_ends_two_seconds_later(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    clock = Clock(monkeypatch)
    spark = BusySpark(clock, busy=busy)
    assert probe(cast(Any, spark), 10.0) == ("" if busy else "a test job did not end within 10 s")
    began = 2.0 if busy else 10.0
    assert (spark.cancels[0], clock.now) == (began, began + 2.0)
