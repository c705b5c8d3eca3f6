"""Executors whose Spark session gets no cores.

The standalone master was restarted and no longer knows their applications, or other applications have all cores. A new
session helps only in the first case.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from standalone import Size
from standalone import options as spark_options

from distop.protocol.records import OperationRef
from distop.worker.guardian import session_members
from tests.faults.test_self_fencing import child_of
from tests.support.daemons import distop_process
from tests.support.localspark import FRUGAL
from tests.support.needs import need
from tests.support.replay import Written
from tests.support.sparkcluster import spark_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from standalone import Standalone

    from distop import Operation
    from tests.support.daemons import Daemon, Daemons

pytestmark = [pytest.mark.etcd, pytest.mark.spark, pytest.mark.timeout(400), pytest.mark.rotating]

TABLE = "t"


@pytest.fixture
def cluster(tmp_path: Path, sample_env: dict[str, str]) -> Iterator[Standalone]:
    """A master, and a worker with one core."""
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    with spark_cluster(tmp_path / "spark", Size(workers=1, cores=1, memory="600m"), sample_env) as found:
        yield found


def start_executor(group: Daemons, cluster: Standalone, env: dict[str, str], name: str, stalled_after: float) -> Daemon:
    """Start an executor that uses this Spark cluster."""
    words = [*spark_options(cluster.url)]
    small = (f"driver.extraJavaOptions={FRUGAL}", f"executor.extraJavaOptions={FRUGAL}")
    for setting in (*small, "driver.memory=512m", "executor.memory=512m", f"distop.stalledAfter={stalled_after}"):
        words += ["--spark-conf", f"spark.{setting}"]
    (started,) = group.start(name, ttl=10, env=env, options=tuple(words))
    return started


def write(group: Daemons, folder: Path, name: str, hold: str = "") -> Operation:
    """Start an operation of one Spark task. ``hold``: the task runs until this file exists."""
    arg = {"jobs": 1, "rows": 2, "journal": str(folder / f"{name}.jsonl"), "hold": hold}
    return group.client.start_operation("sparkwriting", TABLE, arg)


def assert_success(group: Daemons, operation: Operation) -> None:
    """Assert that the operation succeeds without failed attempts."""
    result = operation.wait(200)
    assert result.state == "success", group.tails()
    claims = Written(group.endpoint, OperationRef.parse(operation.ref)).claims.values()
    assert not any(json.loads(claim)["failures"] for found in claims for claim in found), "no job has failures"


def test_an_application_unknown_to_a_restarted_master_is_replaced(
    group: Daemons, cluster: Standalone, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """A task runs at that time, and is lost with Spark's executor."""
    ann = start_executor(group, cluster, sample_env, "ann", 4)
    hold = tmp_path / "go on"
    operation = write(group, tmp_path, "one", str(hold))
    group.eventually((tmp_path / "one.jsonl").exists, "the task runs", seconds=120)
    child, worker = child_of(ann), cluster.parts()[1].pid
    assert len(session_members(worker)) > 1, "Spark's executor runs"
    cluster.restart_master()
    group.eventually(lambda: session_members(worker) == [worker], "the worker has ended Spark's executor", seconds=120)
    hold.touch()
    assert_success(group, operation)
    assert child_of(ann) != child
    assert "does not know this application" in ann.log.read_text()


@pytest.mark.slow  # each run has tests/unit/worker/test_spark_stall.py
def test_an_application_that_waits_for_cores_is_reported_and_not_replaced(
    group: Daemons, cluster: Standalone, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """An idle Spark application keeps its cores until its end."""
    bob = start_executor(group, cluster, sample_env, "bob", 60)
    assert_success(group, write(group, tmp_path, "bob"))
    ann = start_executor(group, cluster, sample_env, "ann", 1)
    assert distop_process(group, "drain", "bob").returncode == 0
    operation, child = write(group, tmp_path, "ann"), child_of(ann)

    def code() -> list[str]:
        return [str(reason.code) for reason in operation.why().reasons if reason.stops]

    group.eventually(lambda: "no-cores" in code(), "why reports that Spark gives no cores", seconds=120)
    assert "no cores from Spark" in str(operation.status().waiting_for)
    doctor = distop_process(group, "doctor")
    assert "ann has no cores from Spark: the master spark://" in doctor.stdout + doctor.stderr, doctor
    assert bob.stop() == 0
    assert_success(group, operation)
    assert child_of(ann) == child, "the waiting session is kept"
    group.eventually(
        lambda: not any(node.spark for node in group.client.nodes().values()), "the node reports no problem of Spark"
    )
