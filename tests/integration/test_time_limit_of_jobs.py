"""Time limit of jobs: a job over its limit is stopped, and other jobs in the child continue."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from distop.worker.daemon_side import child_launch
from tests.integration.test_worker_runs import (
    OP,
    child_pid,
    diary,
    kinds,
    queued_runs,
    request,
    run,
    running_worker,
    sample_env,
    until,
    worker,
)
from tests.support.daemons import distop_process

if TYPE_CHECKING:
    from pathlib import Path

    from distop.worker.daemon_side.host import WorkerHost
    from tests.support.daemons import Daemons

pytestmark = pytest.mark.rotating

__all__ = ["sample_env", "worker"]

SENTENCE = "the job ran longer than its time limit of 0.5 s"


async def test_a_job_over_its_time_limit_is_stopped_with_an_error(worker: WorkerHost, tmp_path: Path) -> None:
    ends = await run(worker, request({"a": "wait"}, "ab", tmp_path, time_limit=0.5))
    assert kinds(ends) == "a:error b:success"
    assert ends["a"].error == SENTENCE
    assert worker.deaths == 0


async def test_a_job_that_ignores_its_time_limit_loses_its_slot_and_others_finish(
    worker: WorkerHost, tmp_path: Path
) -> None:
    neighbour = replace(request({"n": "hold"}, "n", tmp_path), op="t/sample/2")
    neighbour_run = asyncio.ensure_future(run(worker, neighbour))
    await until(lambda: "start n" in diary(tmp_path), "the neighbour runs")
    first = child_pid(worker)
    ends = await run(worker, request({"a": "deaf"}, "abc", tmp_path, time_limit=0.5))
    # The slot is free, and jobs that had not started are released.
    assert kinds(ends) == "a:error b:refused c:refused"
    assert ends["a"].error == SENTENCE
    assert worker.stuck
    later = asyncio.ensure_future(run(worker, replace(request({}, "z", tmp_path), op="t/sample/3")))
    await until(lambda: len(worker._runs) == 2, "a new job has the slot and waits for the next child")
    assert not neighbour_run.done()
    assert child_pid(worker) == first
    # Clean-up, like planning and completion, does not wait for the neighbour.
    await worker.cleanup(OP, "sample", neighbour.arg, None, [])
    (tmp_path / "work/ops/t/sample/2/go").touch()
    assert kinds(await neighbour_run) == "n:success"
    assert diary(tmp_path).count("start n") == 1
    assert kinds(await asyncio.wait_for(later, 60)) == "z:success"
    assert child_pid(worker) != first
    assert not worker.stuck
    assert worker.deaths == 1


async def test_an_endless_neighbour_delays_the_new_child_for_a_limited_time(
    worker: WorkerHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_launch, "REPLACED_AFTER", 1.0, raising=False)
    neighbour = replace(request({"n": "hold"}, "n", tmp_path), op="t/sample/2")
    neighbour_run = asyncio.ensure_future(run(worker, neighbour))
    await until(lambda: "start n" in diary(tmp_path), "the neighbour runs")
    assert kinds(await run(worker, request({"a": "deaf"}, "a", tmp_path, time_limit=0.5))) == "a:error"
    ends = await asyncio.wait_for(run(worker, replace(request({}, "z", tmp_path), op="t/sample/3")), 30)
    assert kinds(ends) == "z:success"
    await until(lambda: diary(tmp_path).count("start n") == 2, "the neighbour runs again")
    (tmp_path / "work/ops/t/sample/2/go").touch()
    assert kinds(await neighbour_run) == "n:success"
    assert worker.deaths == 1


async def test_only_the_stuck_job_of_a_batch_over_its_time_limit_fails(worker: WorkerHost, tmp_path: Path) -> None:
    what = request({"c": "deaf"}, "abcde", tmp_path, batch=True, time_limit=0.5)
    ends = await run(worker, what)
    assert kinds(ends) == "a:success b:success c:error d:success e:success"
    assert ends["c"].error == SENTENCE


async def test_a_batch_that_stops_in_time_is_split_in_the_same_child(worker: WorkerHost, tmp_path: Path) -> None:
    what = request({"b": "wait"}, "abcd", tmp_path, batch=True, time_limit=0.5)
    ends = await run(worker, what)
    assert kinds(ends) == "a:success b:error c:success d:success"
    assert ends["b"].error == SENTENCE
    assert worker.deaths == 0


async def test_jobs_queued_behind_a_stuck_job_are_released(worker: WorkerHost, tmp_path: Path) -> None:
    queued, ends = queued_runs(tmp_path, "deaf", "", "")
    limited = [(replace(what, time_limit=0.5), listener) for what, listener in queued]
    await asyncio.wait_for(worker.run_in_turn(limited), 60)
    assert kinds(ends) == "a:error b:refused c:refused"


async def test_a_job_that_blocks_all_threads_fails_alone(
    tmp_path: Path, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This needs no time limit, which could not interrupt the job."""
    monkeypatch.setattr(child_launch, "FROZEN_AFTER", 2.0)
    async with running_worker(tmp_path, sample_env) as worker:
        held = asyncio.create_task(run(worker, replace(request({"b": "hold"}, "b", tmp_path), op="t/sample/2")))
        await until(lambda: "start b" in diary(tmp_path), "the neighbour runs")
        frozen = asyncio.create_task(run(worker, request({"a": "regex"}, "a", tmp_path)))
        await until(lambda: worker.deaths >= 1, "the unresponsive child is killed")
        (tmp_path / "work/ops/t/sample/2").mkdir(parents=True, exist_ok=True)
        (tmp_path / "work/ops/t/sample/2/go").touch()
        ends = await frozen
        assert kinds(ends) == "a:crash"
        assert "it did not answer for 4 s" in ends["a"].error
        assert kinds(await asyncio.wait_for(held, 60)) == "b:success"


@pytest.mark.etcd
@pytest.mark.parametrize(("of_executor", "of_start"), [("noop=1h", 0.5), ("noop=0.5s", 3600), ("noop=0.5s", None)])
def test_hole_9_an_endless_job_fails_at_the_smallest_limit_and_others_continue(
    group: Daemons, tmp_path: Path, sample_env: dict[str, str], of_executor: str, of_start: float | None
) -> None:
    group.start("e1", env=sample_env, options=("--job-time-limit", of_executor))
    arg = {"does": {"n": "hold"}, "names": ["n"], "diary": str(tmp_path / "diary")}
    neighbour = group.client.start_operation("sample", "t", arg)
    group.eventually(lambda: "start n" in diary(tmp_path), "the neighbour runs", "e1")
    limited = group.client.start_operation("noop", "t", {"sleep": 3600}, time_limit=of_start, retry_attempts=2)
    ended = limited.wait(60)
    assert ended.state == "failed"
    (error,) = ended.record["errors"]
    assert [one["text"] for one in error["attempts"]] == [SENTENCE] * 2
    assert neighbour.status().jobs["running"] == 1
    (tmp_path / "e1/ops/t/sample/1/go").touch()
    assert neighbour.wait(60).state == "success"
    assert diary(tmp_path).count("start n") == 1


@pytest.mark.etcd
def test_hole_9_a_start_with_a_time_limit_fails_at_it(group: Daemons) -> None:
    (executor,) = group.start("e1", options=("--job-time-limit", "valdate=2h"))
    assert "Ignoring job-time-limit for types that are not installed on this node: valdate" in executor.log.read_text()
    start = ["start", "noop", "t", "--arg", '{"sleep": 3600}', "--time-limit", "0.5", "--retry-attempts", "1"]
    ran = distop_process(group, *start, "--wait", "--timeout", "60", "--json")
    assert ran.returncode == 1, ran.stderr
    assert [one["text"] for one in json.loads(ran.stdout)["errors"]] == [SENTENCE]
