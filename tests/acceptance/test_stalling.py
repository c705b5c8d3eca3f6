"""What a stalled real Spark session is asked for, and for how long."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from distop.worker.child_side import spark_probe
from distop.worker.child_side.spark_stall import known_to_master

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a master that takes connections, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(60)
def test_masters_that_do_not_answer_are_given_up_in_time(spark: SparkSession, silent: str) -> None:
    """Spark's own time limit is two minutes for each master."""
    assert known_to_master(spark, [silent, silent], 1.0) is None


def test_a_probe_that_waits_for_the_tasks_of_others_leaves_no_job_behind(spark: SparkSession) -> None:
    others = "others"

    def wait() -> None:
        spark.sparkContext.setJobGroup(others, "all cores", interruptOnCancel=True)
        with pytest.raises(Exception, match="cancelled"):
            spark.sparkContext.parallelize(range(2), 2).foreach(_until_cancelled)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        assert spark_probe.probe(spark, 60.0) == ""
        tracker = spark.sparkContext.statusTracker()
        left = set(tracker.getActiveJobsIds()) - set(tracker.getJobIdsForGroup(others))
        assert left == set()
    finally:
        spark.sparkContext.cancelJobGroup(others)
        waiting.join()


def _until_cancelled(_: int) -> None:
    threading.Event().wait()
