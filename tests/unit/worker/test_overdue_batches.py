"""A batch over its time limit whose cancelled Spark tasks continue, in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distop.behavior import Behavior, JobContext, PartitionPlan
from distop.worker.child_side import runner
from tests.unit.support.running import Child, NoArg

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from distop.worker.child_side.runner import Run

LIMIT, GRACE = 60.0, 30.0
MOST_CHECKS = 1000


class Cancelled(Exception):
    """What Spark raises in a job whose tasks were cancelled."""


class Spark:
    """The Spark session of a child, whose cancelled tasks end after some virtual seconds.

    ``now``: the virtual time. ``checks``: how often its tasks were read.
    """

    started = True

    def __init__(self, patch: pytest.MonkeyPatch, tasks_end_after: float) -> None:
        self.now, self.checks = 0.0, 0
        self._cancelled_at, self._tasks_end_after = 0.0, tasks_end_after
        patch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: 0.0, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def has_cancelled_tasks(self) -> bool:
        self.checks += 1
        assert self.checks <= MOST_CHECKS, "its tasks are read without a pause"
        return self.now < LIMIT + self._tasks_end_after

    def interrupt(self, tag: str) -> None: ...

    def unbind(self) -> None: ...

    def lost(self, error: BaseException, *, expected: bool) -> str:
        return ""


class Endless(Behavior):
    """Its batch runs until it is cancelled for its time limit."""

    type_name = "endless"
    Arg = NoArg

    def __init__(self, spark: Spark) -> None:
        self.run: Run
        self._spark = spark

    def start_or_resume_job(self, arg: Any, partition: PartitionPlan, ctx: JobContext) -> Any:
        raise NotImplementedError

    def run_batch(
        self, arg: Any, partitions: Sequence[PartitionPlan], ctx: JobContext
    ) -> Iterator[tuple[PartitionPlan, Any]]:
        self._spark.now += LIMIT
        self.run.enforce_limit()
        raise Cancelled


def ran(spark: Spark, folder: Path) -> Child:
    """The child after a batch of one job."""
    behavior = Endless(spark)
    child = Child(behavior, folder)
    child.env.spark = spark  # type: ignore[assignment]
    behavior.run = child.run("a", limit=LIMIT, grace=GRACE)
    behavior.run.run()
    return child


@pytest.mark.parametrize("seconds", [0.0, GRACE / 2])
def test_a_child_is_kept_if_its_cancelled_tasks_end_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    spark = Spark(monkeypatch, seconds)
    child = ran(spark, tmp_path)
    assert child.sent.ends[0].error == f"the job ran longer than its time limit of {LIMIT:g} s"
    assert not child.env.stuck


def test_a_child_whose_cancelled_tasks_do_not_end_is_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spark = Spark(monkeypatch, 10 * GRACE)
    child = ran(spark, tmp_path)
    assert child.sent.ends[0].error == f"the job ran longer than its time limit of {LIMIT:g} s"
    assert child.env.stuck
    assert [message["t"] for message in child.sent.messages] == ["stuck", "done"]
    assert LIMIT + GRACE <= spark.now < LIMIT + 2 * GRACE
