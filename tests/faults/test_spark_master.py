"""Executors whose Spark gets no cores.

The standalone master was restarted and has forgotten them, or other applications have all cores. A new session helps
in the first case. The second looks the same from within, and a new session would wait as long.
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


def executor(group: Daemons, cluster: Standalone, env: dict[str, str], name: str, stalled_after: float) -> Daemon:
    """One whose Spark is the cluster's."""
    words = [*spark_options(cluster.url)]
    small = (f"driver.extraJavaOptions={FRUGAL}", f"executor.extraJavaOptions={FRUGAL}")
    for setting in (*small, "driver.memory=512m", "executor.memory=512m", f"distop.stalledAfter={stalled_after}"):
        words += ["--spark-conf", f"spark.{setting}"]
    (started,) = group.start(name, ttl=10, env=env, options=tuple(words))
    return started


def write(group: Daemons, folder: Path, name: str, hold: str = "") -> Operation:
    """Start an operation of one Spark task. ``hold``: the task runs until this file is there."""
    arg = {"jobs": 1, "rows": 2, "journal": str(folder / f"{name}.jsonl"), "hold": hold}
    return group.client.start_operation("sparkwriting", TABLE, arg)


def succeeds(group: Daemons, operation: Operation) -> None:
    """The operation succeeds, and no failed attempt is counted."""
    result = operation.wait(200)
    assert result.state == "success", group.tails()
    claims = Written(group.endpoint, OperationRef.parse(operation.ref)).claims.values()
    assert not any(json.loads(claim)["failures"] for found in claims for claim in found), "a job was blamed"


def test_an_application_that_a_restarted_master_has_forgotten_is_replaced(
    group: Daemons, cluster: Standalone, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """A task runs meanwhile, and is lost with Spark's executor."""
    ann = executor(group, cluster, sample_env, "ann", 4)
    hold = tmp_path / "go on"
    operation = write(group, tmp_path, "one", str(hold))
    group.eventually((tmp_path / "one.jsonl").exists, "the task runs", seconds=120)
    child, worker = child_of(ann), cluster.parts()[1].pid
    assert len(session_members(worker)) > 1, "Spark's executor runs"
    cluster.restart_master()
    group.eventually(lambda: session_members(worker) == [worker], "the worker has ended Spark's executor", seconds=120)
    hold.touch()
    succeeds(group, operation)
    assert child_of(ann) != child
    assert "does not know this application" in ann.log.read_text()


@pytest.mark.slow  # at each change: tests/unit/worker/test_spark_stall.py
def test_an_application_that_waits_for_cores_is_reported_and_not_replaced(
    group: Daemons, cluster: Standalone, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """Spark gives an application its cores until its end, whether it uses them or not."""
    bob = executor(group, cluster, sample_env, "bob", 60)
    succeeds(group, write(group, tmp_path, "bob"))
    ann = executor(group, cluster, sample_env, "ann", 1)
    assert distop_process(group, "drain", "bob").returncode == 0
    operation, child = write(group, tmp_path, "ann"), child_of(ann)

    def code() -> list[str]:
        return [str(reason.code) for reason in operation.why().reasons if reason.stops]

    group.eventually(lambda: "no-cores" in code(), "why says that Spark gives no cores", seconds=120)
    assert "no cores from Spark" in str(operation.status().waiting_for)
    told = distop_process(group, "doctor")
    assert "ann has no cores from Spark: the master spark://" in told.stdout + told.stderr, told
    assert bob.stop() == 0
    succeeds(group, operation)
    assert child_of(ann) == child, "a session that only had to wait was replaced"
    group.eventually(lambda: not any(node.spark for node in group.client.nodes().values()), "nothing is wrong any more")
