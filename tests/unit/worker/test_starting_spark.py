"""The status of a job while it starts the Spark session, and after that."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from distop.behavior import PartitionPlan
from distop.worker.child_side.job_context import ChildContext, JobScope
from distop.worker.child_side.job_status import STARTING_SPARK


class Session:
    """Replaces ``SparkHolder``: the session starts once ``may_start`` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.started = False
        self.asked, self.may_start = threading.Event(), threading.Event()
        self._error = error

    def session(self, *_: str) -> Any:
        self.asked.set()
        assert self.may_start.wait(10)
        if self._error is not None:
            raise self._error
        self.started = True
        return "the session"


def job(spark: Session, run: int = 1) -> tuple[ChildContext, list[str]]:
    sent: list[str] = []
    outbox = SimpleNamespace(send=lambda message: sent.append(message["text"]))
    env: Any = SimpleNamespace(spark=spark, outbox=outbox)
    return ChildContext(env, JobScope("t/validate/1", None, run=run, partition=PartitionPlan(0, "p"))), sent


def test_the_start_of_spark_is_reported_while_it_lasts() -> None:
    spark = Session()
    ctx, sent = job(spark)
    ctx.status("reading the footers of 9 files")
    asking = threading.Thread(target=lambda: ctx.spark)
    asking.start()
    assert spark.asked.wait(10)
    assert sent == ["reading the footers of 9 files", STARTING_SPARK]
    ctx.status("scanning 9 files")
    ctx.send_held_status()
    assert sent[-1] == STARTING_SPARK, "another thread of the job does not hide the start"
    spark.may_start.set()
    asking.join(10)
    assert sent[2:] == ["scanning 9 files"]
    assert ctx.spark == "the session"
    assert len(sent) == 3, "a session that runs is not reported"


@pytest.mark.parametrize("error", [None, RuntimeError("no Java")])
def test_the_status_before_the_start_is_reported_again_after_it(error: Exception | None) -> None:
    spark = Session(error)
    spark.may_start.set()
    for before in ("reading the footers of 9 files", ""):
        spark.started = False
        ctx, sent = job(spark)
        if before:
            ctx.status(before)
        if error is None:
            assert ctx.spark == "the session"
        else:
            with pytest.raises(RuntimeError, match="no Java"):
                _ = ctx.spark
        assert sent[-2:] == [STARTING_SPARK, before], "an empty status removes the last one"


def test_planning_does_not_report_the_start_of_spark() -> None:
    spark = Session()
    spark.may_start.set()
    ctx, sent = job(spark, run=0)
    assert (ctx.spark, sent) == ("the session", [])
