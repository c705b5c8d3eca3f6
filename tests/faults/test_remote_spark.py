"""Spark executors on other nodes outlive their driver for a while, so that only files named by outcomes count.

A standalone master and worker on this machine simulate the other nodes. The test asserts that no output of a previous
attempt counts, and prints for how long that attempt continued to write.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from standalone import Size
from standalone import options as spark_options

from distop.protocol.records import OperationRef
from distop.worker.guardian import boottime, session_members
from tests.conftest import FIGURES
from tests.faults.test_self_fencing import child_of
from tests.support.needs import need
from tests.support.processes import machine
from tests.support.replay import Written
from tests.support.sparkcluster import spark_cluster
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemons import Daemons
    from tests.support.writing import Journal

pytestmark = [pytest.mark.etcd, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.rotating]

TABLE = "t"


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


@pytest.mark.overlaps
@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_output_of_spark_executors_without_their_driver_does_not_count(
    end: str,
    group: Daemons,
    journal: Journal,
    sample_env: dict[str, str],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """The whole node of the driver is killed, or frozen like a paused virtual machine."""
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    hold = tmp_path / "go"
    with spark_cluster(tmp_path / "spark", Size(workers=1, cores=4, memory="2g"), sample_env) as cluster:
        options = [*spark_options(cluster.url)]
        for setting in ("driver.memory=512m", "executor.memory=512m", "cores.max=2"):
            options += ["--spark-conf", f"spark.{setting}"]
        (ann,) = group.start("ann", ttl=10, env=sample_env, options=tuple(options))
        arg = {"jobs": 2, "rows": 3, "journal": str(journal.path), "hold": str(hold)}
        operation = group.client.start_operation("sparkwriting", TABLE, arg)
        group.eventually(lambda: len({p for p, *_ in journal.lines()}) == 2, "Spark's workers write", seconds=120)
        (old,) = group.client.nodes()
        group.start("bob", ttl=10, env=sample_env, options=tuple(options))
        pids, guarded = machine(ann.pid), session_members(child_of(ann))
        for pid in pids:
            os.kill(pid, signal.SIGKILL if end == "killed" else signal.SIGSTOP)
        ended = boottime()
        group.eventually(lambda: old not in group.client.nodes(), "ann's session has ended")
        lost = boottime()
        group.eventually(lambda: len(journal.attempts(0)) == 2, "another attempt writes", seconds=120)
        if end == "frozen":
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)
            group.eventually(lambda: not alive(guarded), "ann's guardian has killed its child")
        hold.touch()
        result = operation.wait(120)
        assert result.state == "success", group.tails()
    last = max(journal.attempts(p)[1][1] for p in (0, 1))
    record_property(
        FIGURES,
        f"driver {end}: Spark's executors wrote for {last - ended:.1f} s more, until {last - lost:+.1f} s from the end "
        f"of the session; {len(journal.overlaps())} of 2 jobs were written by two attempts at the same time",
    )
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert_data(written, journal, 2, 3, overlaps=True)
