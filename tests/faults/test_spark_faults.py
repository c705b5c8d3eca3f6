"""Failing JVMs: killed, hanging, out of memory, or with an unusable Spark session.

The child is replaced, and the batch runs again in parts until only the failing partition fails.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from distop.protocol.records import OperationRef, TableRecord
from distop.worker.guardian import session_members
from tests.conftest import FIGURES
from tests.faults.test_self_fencing import child_of, command
from tests.support.daemons import SPARK
from tests.support.failingjava import FailingJava
from tests.support.needs import need
from tests.support.replay import Written
from tests.support.writing import assert_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemons import Daemon, Daemons
    from tests.support.writing import Journal


CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(size: int) -> Iterator[tuple[str, ...]]:
    """A memory control group with ``size`` bytes; yields the prefix of commands that run in it.

    The group must be empty at the end.
    """
    is_unified = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if is_unified else CGROUPS / "memory") / f"distop-{uuid.uuid4().hex[:8]}"
    limits = {"memory.max": size, "memory.swap.max": 0} if is_unified else {"memory.limit_in_bytes": size}
    try:
        folder.mkdir()
        made = all((folder / name).exists() for name in list(limits)[:1])
        for name in [name for name in limits if (folder / name).exists()]:
            (folder / name).write_text(str(limits[name]))
    except OSError:
        made = False
    try:
        need(made, "the right to make control groups with a limit of memory: run it as root")
        yield ("/bin/sh", "-c", f'echo $$ > {folder / "cgroup.procs"} && exec "$@"', "sh")
    finally:
        if folder.exists():
            os.rmdir(folder)  # noqa: PTH106


pytestmark = [pytest.mark.etcd, pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.rotating]

TABLE = "t"
FAILING = 1
OPTIONS = (*SPARK, "--spark-conf", "spark.distop.jvmAnswer=4")


@pytest.fixture(autouse=True)
def java() -> None:
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")


@pytest.mark.parametrize(
    ("action", "jobs"),
    [
        ("kill-jvm", 2),
        pytest.param("kill-jvm", 5, marks=pytest.mark.slow),
        pytest.param("hang-jvm", 4, marks=pytest.mark.slow),
        pytest.param("memory", 4, marks=pytest.mark.slow),
        pytest.param("stop-context", 4, marks=pytest.mark.slow),
        pytest.param("lose-directories", 4, marks=pytest.mark.slow),
    ],
)
def test_only_the_partition_that_crashes_spark_fails(
    action: str,
    jobs: int,
    group: Daemons,
    journal: Journal,
    sample_env: dict[str, str],
    record_property: Callable[[str, object], None],
) -> None:
    (ann,) = group.start("ann", ttl=10, env=sample_env, options=OPTIONS)
    child = child_of(ann)
    arg = {"jobs": jobs, "rows": 2, "journal": str(journal.path), "does": {f"p={FAILING}": action}}
    operation = group.client.start_operation("sparkwriting", TABLE, arg, retry_attempts=1)
    result = operation.wait(280)
    assert result.state == "failed", group.tails()
    assert result.jobs == {"total": jobs, "success": jobs - 1, "failed": 1}, result.record
    assert result.record["failed"] == str(FAILING)
    assert "the worker process died (its JVM died, hung or ran out of memory" in result.errors[0]["text"]
    assert not session_members(child), "the child with the lost Spark has ended"
    group.eventually(lambda: replaced(ann, child), "the child is replaced")
    record_property(FIGURES, f"{action}: {result.errors[0]['text'].splitlines()[0]} ({result.seconds:.0f} s)")
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert_data(written, journal, jobs, 2)
    for partition, claims in written.claims.items():
        if partition != FAILING:
            assert [json.loads(claim)["failures"] for claim in claims] == [0] * len(claims), (
                "other partitions have no failures"
            )
    assert "ann" in group.live()
    assert ann.process.poll() is None


def replaced(daemon: Daemon, child: int) -> bool:
    """Whether the daemon has a child other than this one."""
    try:
        return child_of(daemon) != child
    except (AssertionError, OSError):
        return False  # there is no child yet


@pytest.mark.slow
@pytest.mark.overlaps
def test_a_jvm_killed_from_outside_fails_no_job(
    group: Daemons, journal: Journal, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """The batch runs again in a new child, and succeeds."""
    hold = tmp_path / "go"
    (ann,) = group.start("ann", ttl=10, env=sample_env, options=OPTIONS)
    arg = {"jobs": 2, "rows": 2, "journal": str(journal.path), "hold": str(hold)}
    operation = group.client.start_operation("sparkwriting", TABLE, arg)
    group.eventually(lambda: len({p for p, *_ in journal.lines()}) == 2, "Spark's workers write", seconds=90)
    (java,) = [pid for pid in session_members(child_of(ann)) if Path(command(pid).split()[0]).name == "java"]
    os.kill(java, signal.SIGKILL)
    hold.touch()
    result = operation.wait(120)
    assert result.state == "success", group.tails()
    written = Written(group.endpoint, OperationRef.parse(operation.ref))
    assert all(json.loads(claim)["failures"] == 0 for claims in written.claims.values() for claim in claims)
    assert_data(written, journal, 2, 2, overlaps=True)  # both runs belong to one attempt


def test_jobs_of_a_node_whose_spark_does_not_start_run_on_smaller_nodes(
    group: Daemons, sample_env: dict[str, str], tmp_path: Path
) -> None:
    """The failing node has most slots, so it claims most jobs at first. No job fails or counts a failure."""
    java = FailingJava(tmp_path / "java", tmp_path / "ann", times=1000)
    (ann,) = group.start("ann", ttl=10, env={**sample_env, **java.env}, options=(*OPTIONS, "--slots", "4"))
    group.start("bob", "cyd", ttl=10, env=sample_env, options=(*OPTIONS, "--slots", "1"))
    tables = [f"t{n}" for n in range(5)]
    for table in tables:
        group.client.add_table(TableRecord(table, "parquet", str(tmp_path)), check=False)
    args = [{"jobs": 3, "rows": 2, "journal": str(tmp_path / f"{table}.jsonl")} for table in tables]
    starts = zip(tables, args, strict=True)
    operations = [group.client.start_operation("sparkwriting", table, arg) for table, arg in starts]
    for operation in operations:
        result = operation.wait(200)
        assert (result.state, result.jobs) == ("success", {"total": 3, "success": 3, "failed": 0}), group.tails()
        claims = Written(group.endpoint, OperationRef.parse(operation.ref)).claims.values()
        assert not any(json.loads(claim)["failures"] for found in claims for claim in found), "no job has failures"
    assert java.killed, "no JVM was killed: the bad node had no job"
    assert ann.process.poll() is None
    (unable,) = [node.unable for node in group.client.nodes().values() if node.executor == "ann"]
    assert "its Spark session did not start" in unable["sparkwriting"], group.tails("ann")


@pytest.mark.slow
def test_an_error_names_an_oom_kill_of_the_jvm_as_the_cause(
    group: Daemons, journal: Journal, sample_env: dict[str, str]
) -> None:
    """The JVM allocates its whole heap at its start, which exceeds the limit of its control group."""
    java = "spark.driver.extraJavaOptions=-Xms1g -XX:+AlwaysPreTouch"
    options = ("--spark-master", "local[2]", "--spark-conf", "spark.driver.memory=1g", "--spark-conf", java)
    with memory_group(600 * 1024**2) as through:
        ann = group.spawn("ann", *options, ttl=10, env=sample_env, through=through)
        group.await_ready("ann")
        arg = {"jobs": 1, "rows": 2, "journal": str(journal.path)}
        result = group.client.start_operation("sparkwriting", TABLE, arg, retry_attempts=1).wait(120)
        assert result.state == "failed", group.tails()
        text = result.errors[0]["text"]
        assert "its Spark session did not start" in text
        assert "the kernel killed 1 process of this executor's control group for lack of memory" in text
        assert ann.process.poll() is None
        ann.stop()
