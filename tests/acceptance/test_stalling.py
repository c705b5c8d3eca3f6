"""Probes of a stalled Spark session, and their time limits."""

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
    """The address of a master that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(60)
def test_silent_masters_are_given_up_at_the_time_limit(spark: SparkSession, silent: str) -> None:
    """Spark's own time limit is two minutes for each master."""
    assert known_to_master(spark, [silent, silent], 1.0) is None


def test_a_probe_behind_other_jobs_leaves_no_job(spark: SparkSession) -> None:
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
        leftover_jobs = set(tracker.getActiveJobsIds()) - set(tracker.getJobIdsForGroup(others))
        assert leftover_jobs == set()
    finally:
        spark.sparkContext.cancelJobGroup(others)
        waiting.join()


def _until_cancelled(_: int) -> None:
    threading.Event().wait()
