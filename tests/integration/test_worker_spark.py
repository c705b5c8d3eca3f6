"""Spark in a child process: one session for all jobs of the child, and its replacement after failures."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from distop.worker.daemon_side.host import JobEnded, JobItem, RunRequest, WorkerConfig, WorkerError, WorkerHost
from tests.support.behaviors import sample_env
from tests.support.failingjava import FailingJava
from tests.support.localspark import FRUGAL
from tests.support.needs import need

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["sample_env"]

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.rotating]

JAVA = "spark.driver.extraJavaOptions"


def request(op: str, does: dict[str, str]) -> RunRequest:
    items = tuple(JobItem({"partition": i, "name": name}, 1, 1) for i, name in enumerate(does))
    return RunRequest(op, "sample", {"does": does}, None, items, batch=False)


async def run(worker: WorkerHost, what: RunRequest, **callbacks: Any) -> list[JobEnded]:
    ends: list[JobEnded] = []
    await asyncio.wait_for(worker.run(what, ends.extend, **callbacks), 250)
    return sorted(ends, key=lambda end: end.partition)


async def test_jobs_share_a_spark_session_and_are_cancelled_and_crash_independently(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    # One thread more than the waiting tasks below.
    settings: dict[str, Any] = {"spark_master": "local[5]", "spark_conf": {JAVA: FRUGAL}, "slots": 4, "grace": 30}
    worker = WorkerHost(WorkerConfig(tmp_path, "ex", "inc-1", env=sample_env, **settings))
    await worker.start()
    try:
        # Jobs of several operations share the session. Each operation has a pool, whose name is reused later.
        reported: list[tuple[int, str]] = []
        first, second = await asyncio.gather(
            run(worker, request("t/sample/1", {"a": "spark", "b": "spark"}), on_status=lambda *at: reported.append(at)),
            run(worker, request("u/sample/1", {"a": "spark"})),
        )
        assert reported == [(0, "starting Spark"), (0, "")], "only the job that waits for the session reports that"
        pools = [end.result.pop("pool") for end in (*first, *second)]
        assert [end.result for end in (*first, *second)] == [{"zone": "UTC", "n": 10, "fair": True}] * 3
        for n in range(1, 6):
            (end,) = await run(worker, request(f"v/sample/{n}", {"a": "spark"}))
            assert end.kind == "success", end
            pools.append(end.result["pool"])
        assert {"distop-1"} <= set(pools) <= {"distop-1", "distop-2"}

        # A job reports the progress of its own Spark tasks only. Cancelling it interrupts its Spark job, and the child
        # continues.
        task_progress: dict[str, set[tuple[int, int]]] = {"t/sample/2": set(), "u/sample/2": set()}
        waiting = []
        for op, seen in task_progress.items():
            running = run(worker, request(op, {"a": "spark-wait"}), on_tasks=lambda *at, seen=seen: seen.add(at))
            waiting.append(asyncio.create_task(running))
        limit = time.monotonic() + 60
        while not all(task_progress.values()):
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)
        assert len({(tmp_path / "ops" / op / "spark-wait").read_text() for op in task_progress}) == 2, (
            "each operation has its own pool"
        )
        for op, task in zip(task_progress, waiting, strict=True):
            worker.cancel(op)
            assert [end.kind for end in await task] == ["cancelled"]
            # The Spark jobs of the other operation continue, because they have other tags.
            assert [end.kind for end in await run(worker, request("v/sample/9", {"a": "spark"}))] == ["success"]
            assert all(other.done() == (waiting.index(other) <= waiting.index(task)) for other in waiting)
        assert task_progress == {op: {(0, 2)} for op in task_progress}
        assert worker.deaths == 0

        # Cancelling a cleanup call interrupts its Spark job, too, in any attempt.
        items = [JobItem({"partition": 0, "name": "a"}, 3, 1)]
        arg = {"does": {"a": "clean-spark-wait"}}
        cleaning = asyncio.create_task(worker.cleanup("t/sample/5", "sample", arg, None, items))
        started = tmp_path / "ops/t/sample/5/spark-wait"
        limit = time.monotonic() + 60
        while not started.exists():
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)
        worker.cancel_calls("t/sample/5")
        with pytest.raises(WorkerError, match="^cancelled"):
            await cleaning
        assert worker.deaths == 0

        # When the JVM dies, its job fails and the child is replaced. The next job without Spark starts no JVM.
        ends = await run(worker, request("t/sample/3", {"a": "spark", "b": "spark-die"}))
        assert [end.kind for end in ends] == ["success", "crash"]
        assert "JVM died" in ends[1].error
        assert worker.deaths == 1
        assert [end.kind for end in await run(worker, request("t/sample/4", {"a": ""}))] == ["success"]
    finally:
        await worker.stop(30)


SMALL_HEAP = {"spark.driver.memory": "512m", JAVA: f"{FRUGAL} -Dof.the.user=kept"}


async def test_a_jvm_out_of_memory_and_an_unusable_session_are_replaced(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Either ends its child. The next job runs in a new child, with a new JVM if it needs one."""
    async with spark_worker(tmp_path, sample_env, SMALL_HEAP) as worker:
        (end,) = await run(worker, request("t/sample/1", {"a": "spark-memory"}))
        assert (end.kind, worker.deaths) == ("crash", 1), end
        (end,) = await run(worker, request("t/sample/2", {"a": "spark-user"}))
        assert (end.kind, end.result) == ("success", {"option": "kept"}), end

        # A Spark error after which the session is usable fails only its job.
        ends = await run(worker, request("t/sample/3", {"a": "spark-error", "b": "spark-shuffle"}))
        assert [end.kind for end in ends] == ["error", "success"], ends
        assert worker.deaths == 1

        (end,) = await run(worker, request("t/sample/4", {"a": "spark-unusable"}))
        assert (end.kind, worker.deaths) == ("crash", 2), end
        assert "its Spark session became unusable" in end.error
        assert "its Spark session cannot run jobs any more" in caplog.text
        assert [end.kind for end in await run(worker, request("t/sample/5", {"a": ""}))] == ["success"]


@pytest.mark.slow
@pytest.mark.parametrize("failing_action", ["spark-memory", "spark-unusable"])
async def test_only_the_job_that_made_a_jvm_fail_is_failed(
    tmp_path: Path, sample_env: dict[str, str], failing_action: str
) -> None:
    async with spark_worker(tmp_path, sample_env, SMALL_HEAP) as worker:
        ends = await run(worker, request("t/sample/1", {"a": "spark-user", "b": failing_action, "c": "spark-shuffle"}))
        assert [end.kind for end in ends] == ["success", "crash", "success"], ends
        assert ends[0].result == {"option": "kept"}
        assert worker.deaths == 2, "it failed once with other jobs, and once alone"


@asynccontextmanager
async def spark_worker(folder: Path, env: dict[str, str], conf: dict[str, str]) -> AsyncIterator[WorkerHost]:
    need(shutil.which("java"), "Java 17 or newer: install openjdk-17-jre-headless")
    settings: dict[str, Any] = {"spark_master": "local[2]", "spark_conf": {JAVA: FRUGAL, **conf}, "grace": 30}
    worker = WorkerHost(WorkerConfig(folder, "ex", "inc-1", env=env, **settings))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(30)


# In each run, tests/faults/test_spark_faults.py covers False with a node whose Spark does not start.
@pytest.mark.parametrize("connecting", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_jvm_killed_while_it_starts_is_replaced_without_a_failed_job(
    tmp_path: Path, sample_env: dict[str, str], connecting: bool
) -> None:
    """PySpark keeps its gateway to the dead JVM, so that later sessions in that process would fail."""
    work = tmp_path / "work"
    java = FailingJava(tmp_path / "java", work, times=1, connecting=connecting)
    async with spark_worker(work, {**sample_env, **java.env}, {}) as worker:
        ends = await run(worker, request("t/sample/1", {"a": "spark-use", "b": "spark-use"}))
        assert [end.kind for end in ends] == ["success", "success"], ends
        assert (java.killed, worker.deaths) == (1, 1)


@pytest.mark.slow
async def test_a_jvm_that_hangs_while_starting_is_replaced(tmp_path: Path, sample_env: dict[str, str]) -> None:
    work, limit = tmp_path / "work", {"spark.distop.startLimit": "30"}
    java = FailingJava(tmp_path / "java", work, times=1, signal="STOP")
    async with spark_worker(work, {**sample_env, **java.env}, limit) as worker:
        ends = await run(worker, request("t/sample/1", {"a": "spark-use"}))
        assert [end.kind for end in ends] == ["success"], ends
        assert worker.deaths == 1
