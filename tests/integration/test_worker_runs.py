"""Jobs in a child process: each kind of end, failed batches, dead children, and jobs that do not stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from distop.protocol.json_codec import MAX_ERROR_TEXT
from distop.runtime.secret_settings import CREDENTIALS
from distop.worker import child_messages
from distop.worker.daemon_side.host import JobEnded, JobItem, RunRequest, WorkerConfig, WorkerError, WorkerHost
from distop.worker.daemon_side.requests import Listener
from distop.worker.daemon_side.result_handlers import RunSink
from distop.worker.guardian import boottime, session_members
from tests.integration import lingering_guardian as lingering
from tests.integration.test_worker_guardian import second_process_of
from tests.support.behaviors import sample_env

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from distop.worker.daemon_side.requests import PlanResult

pytestmark = pytest.mark.rotating

__all__ = ["sample_env"]

OP = "t/sample/1"
T = TypeVar("T")


@pytest.fixture
async def worker(tmp_path: Path, sample_env: dict[str, str]) -> AsyncIterator[WorkerHost]:
    async with running_worker(tmp_path, sample_env) as one:
        yield one


@asynccontextmanager
async def running_worker(tmp_path: Path, env: dict[str, str], **settings: Any) -> AsyncIterator[WorkerHost]:
    settings = {"slots": 4, "grace": 0.3, "shared_dir": str(tmp_path / "shared")} | settings
    worker = WorkerHost(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=env, **settings))
    try:
        await worker.start()
        yield worker
    finally:
        await worker.stop(10)


async def until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, f"not reached: {what}"
        await asyncio.sleep(0.005)


def request(does: dict[str, str], names: str, tmp_path: Path, *, batch: bool = False, **fields: Any) -> RunRequest:
    arg = {"does": does, "diary": str(tmp_path / "diary")}
    items = tuple(JobItem({"partition": i, "name": name}, 1, 100 + i) for i, name in enumerate(names))
    return RunRequest(OP, "batches" if batch else "sample", arg, None, items, batch, **fields)


async def run(worker: WorkerHost, what: RunRequest, seconds: float = 60, **callbacks: Any) -> dict[str, JobEnded]:
    """Run the request, and return the ends by partition name. Each item has exactly one end."""
    events: list[JobEnded] = []
    await asyncio.wait_for(worker.run(what, events.extend, **callbacks), seconds)
    assert sorted(event.partition for event in events) == [item.ordinal for item in what.items]
    return {str(what.items[event.partition].partition["name"]): event for event in events}


def queued_runs(tmp_path: Path, *does: str) -> tuple[list[tuple[RunRequest, Listener]], dict[str, JobEnded]]:
    """Runs with one job each for operations 1, 2, …, and a dict that receives their ends in order."""
    ends: dict[str, JobEnded] = {}
    queued = []
    for number, action in enumerate(does, 1):
        name = chr(ord("a") + number - 1)
        what = replace(request({name: action}, name, tmp_path), op=f"t/sample/{number}")

        def ended(events: list[JobEnded], name: str = name) -> None:
            for event in events:
                assert name not in ends
                ends[name] = event

        queued.append((what, Listener(ended)))
    return queued, ends


async def test_runs_of_several_operations_take_turns_in_one_slot(worker: WorkerHost, tmp_path: Path) -> None:
    queued, ends = queued_runs(tmp_path, "", "fail", "error", "", "large")
    await asyncio.wait_for(worker.run_in_turn(queued), 60)
    assert list(ends) == ["a", "b", "c", "d", "e"]
    assert kinds(ends) == "a:success b:verdict c:error d:success e:fatal"
    assert diary(tmp_path)[:2] == ["start a", "start b"]


async def test_queued_runs_are_paused_and_cancelled_at_once(worker: WorkerHost, tmp_path: Path) -> None:
    queued, ends = queued_runs(tmp_path, "wait", "", "", "")
    task = asyncio.ensure_future(worker.run_in_turn(queued))
    await until(lambda: diary(tmp_path) == ["start a"], "the first one runs")
    worker.pause("t/sample/2")
    worker.cancel("t/sample/3")
    await until(lambda: {"b", "c"} <= ends.keys(), "both runs have ended")
    assert "a" not in ends
    assert kinds(ends) == "b:refused c:cancelled"
    worker.pause("t/sample/1")
    worker.cancel("t/sample/1")
    await asyncio.wait_for(task, 60)
    assert kinds(ends) == "a:cancelled b:refused c:cancelled d:success"
    assert "start b" not in diary(tmp_path)


async def test_only_the_queued_run_that_kills_the_child_fails(worker: WorkerHost, tmp_path: Path) -> None:
    queued, ends = queued_runs(tmp_path, "", "die", "", "")
    await asyncio.wait_for(worker.run_in_turn(queued), 120)
    assert kinds(ends) == "a:success b:crash c:success d:success"


def run_message(number: int, type_name: str, sink: RunSink, deadline: float) -> child_messages.RunMessage:
    what = sink.request
    return child_messages.RunMessage(
        t="run",
        run=number,
        op=what.op,
        type=type_name,
        arg=what.arg,
        table=None,
        items=[item.row() for item in what.items],
        batch=what.batch,
        cleanup=False,
        careful=False,
        cancelled=[],
        deadline=deadline,
        incarnation=sink.incarnation,
        more=False,
    )


def kinds(ends: dict[str, JobEnded]) -> str:
    """``a:success b:error``"""
    return " ".join(f"{name}:{ends[name].kind}" for name in sorted(ends))


async def let_go(tmp_path: Path) -> None:
    """End a job that holds. It writes its line before it makes the private folder in which it waits for this file."""
    private = tmp_path / "work/ops" / OP
    await until(private.is_dir, "the job has its private folder")
    (private / "go").touch()


def diary(tmp_path: Path) -> list[str]:
    path = tmp_path / "diary"
    return path.read_text().splitlines() if path.exists() else []


def child_pid(worker: WorkerHost) -> int:
    child = worker._keeper.child
    assert child is not None
    return child._sid


async def test_all_loadable_behaviors_are_declared(worker: WorkerHost) -> None:
    declared = {d.type_name: d for d in worker.declarations}
    assert {"sample", "batches", "noop"} <= set(declared)
    assert "absent" not in declared
    assert "ModuleNotFoundError" in worker._keeper.skipped["absent"]
    assert declared["batches"].batch
    assert not declared["sample"].batch
    assert declared["sample"].conflicts_with == ("other",)
    assert "does" in declared["sample"].arg_schema["properties"]


async def test_guardian_and_child_have_no_credentials(
    tmp_path: Path, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("DISTOP_ETCD", "etcd1:2379")
    async with running_worker(tmp_path, sample_env) as worker:
        end = (await run(worker, request({"a": "environment"}, "a", tmp_path)))["a"]
    assert {"DISTOP_PASSWORD", "DISTOP_PASSWORD_FILE", "DISTOP_USER", "DISTOP_KEY"} <= CREDENTIALS
    assert CREDENTIALS.isdisjoint(end.result["child"])
    assert CREDENTIALS.isdisjoint(end.result["guardian"])
    assert "DISTOP_ETCD" in end.result["child"]
    assert "DISTOP_ETCD" in end.result["guardian"]


ACTIONS = dict(zip("bcdefghi", ["fail", "error", "wrong", "exit", "memory", "large", "object", "nan"], strict=True))


@pytest.mark.parametrize("batch", [False, True])
async def test_each_kind_of_end_has_its_result_and_error(worker: WorkerHost, tmp_path: Path, batch: bool) -> None:
    ends = await run(worker, request(ACTIONS, "abcdefghi", tmp_path, batch=batch))
    assert kinds(ends) == "a:success b:verdict c:error d:fatal e:error f:error g:fatal h:fatal i:fatal"
    assert ends["a"].result == {"partition": "a", "attempt": 1}
    assert ends["b"].result == {"why": "told to"}
    assert ends["b"].error == "the answer is no"
    assert ends["c"].error.startswith("RuntimeError: something went wrong\n  at ")
    assert ends["d"].error == "this cannot work"
    assert "70002 bytes" in ends["g"].error
    assert all(len(end.error) <= MAX_ERROR_TEXT for end in ends.values())
    assert all(0 < end.started <= end.finished for end in ends.values())
    # A verdict is reported after the cleanup. The next attempt cleans up after an unexpected error.
    assert "clean b" in diary(tmp_path)
    assert "clean c" not in diary(tmp_path)
    assert worker.deaths == 0


async def test_an_invalid_argument_is_a_fatal_error(worker: WorkerHost, tmp_path: Path) -> None:
    what = RunRequest(OP, "noop", {"sleep": "long", "nap": 1}, None, request({}, "ab", tmp_path).items, batch=True)
    ends = await run(worker, what)
    assert kinds(ends) == "a:fatal b:fatal"
    assert ends["a"].error.startswith("the argument does not fit noop: sleep: Input should be a valid number")
    assert "nap" in ends["a"].error


async def test_a_job_of_a_type_that_is_not_installed_is_refused(worker: WorkerHost, tmp_path: Path) -> None:
    ends = await run(worker, RunRequest(OP, "nothing", {}, None, request({}, "a", tmp_path).items, batch=False))
    assert kinds(ends) == "a:refused"


async def test_a_run_that_arrives_after_its_deadline_is_refused(worker: WorkerHost, tmp_path: Path) -> None:
    ends = await run(worker, request({}, "ab", tmp_path, deadline=boottime() - 1))
    assert kinds(ends) == "a:refused b:refused"
    assert diary(tmp_path) == []


@pytest.mark.parametrize("batch", [False, True])
async def test_a_live_run_continues_under_renewed_deadlines(worker: WorkerHost, tmp_path: Path, batch: bool) -> None:
    """Otherwise the rest of a failed batch would be refused, claimed and refused again without end."""
    what = request({"a": "hold", "b": "break"}, "abcd", tmp_path, batch=batch, deadline=boottime() + 2)
    task = asyncio.create_task(run(worker, what))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.set_deadline(boottime() + 3600)
    await until(lambda: boottime() > what.deadline, "the first deadline of the run has passed")
    await let_go(tmp_path)
    # Only batches have the action "break".
    assert kinds(await task) == f"a:success b:{'error' if batch else 'success'} c:success d:success"


async def test_a_late_run_is_refused_despite_a_later_deadline(worker: WorkerHost, tmp_path: Path) -> None:
    worker.set_deadline(boottime() + 3600)
    child = worker._keeper.child
    assert child is not None
    ends: list[JobEnded] = []
    sink = RunSink(request({}, "a", tmp_path), "inc-1", ends.extend, None, None, None, logging.getLogger())
    sink.number = 77
    child.runs[77] = sink
    late = run_message(77, "sample", sink, deadline=boottime() - 1)
    child.send(child_messages.DeadlineMessage(t="deadline", boottime=boottime() - 1))
    # Its second message comes after a new deadline. The first message was too late all the same.
    child.send({**late, "items": [], "more": True})
    child.send(child_messages.DeadlineMessage(t="deadline", boottime=boottime() + 3600))
    child.send(late)
    await asyncio.wait_for(sink.done, 30)
    assert [end.kind for end in ends] == ["refused"]
    assert diary(tmp_path) == []


async def test_jobs_that_were_taken_over_are_cleaned_up_first(worker: WorkerHost, tmp_path: Path) -> None:
    await run(worker, request({}, "ab", tmp_path, cleanup_first=True))
    assert diary(tmp_path) == ["clean a", "start a", "clean b", "start b"]


async def test_only_the_failing_partitions_of_a_batch_fail(worker: WorkerHost, tmp_path: Path) -> None:
    ends = await run(worker, request({"c": "break", "f": "break", "g": "forget"}, "abcdefgh", tmp_path, batch=True))
    assert kinds(ends) == "a:success b:success c:error d:success e:success f:error g:error h:success"
    assert "c breaks the batch" in ends["c"].error
    assert ends["g"].error == "run_batch yielded no outcome for this partition"
    starts = [line for line in diary(tmp_path) if line.startswith("start")]
    assert len(starts) == len(set(starts)), "outcomes from before the failure are kept"


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("death", ["die", "kill"])
async def test_only_the_job_that_kills_the_child_fails(
    worker: WorkerHost, tmp_path: Path, batch: bool, death: str
) -> None:
    guilty, neighbours = await asyncio.gather(
        run(worker, request({"c": death}, "abcdef", tmp_path, batch=batch)),
        run(worker, request({}, "uvwxyz", tmp_path, batch=not batch)),
    )
    assert kinds(guilty) == "a:success b:success c:crash d:success e:success f:success"
    assert ("exit code 3" if death == "die" else "killed by signal 9") in guilty["c"].error
    assert {end.kind for end in neighbours.values()} == {"success"}
    assert worker.deaths >= 2


async def test_a_single_job_that_kills_the_child_fails_at_once(worker: WorkerHost, tmp_path: Path) -> None:
    ends = await run(worker, request({"a": "die"}, "a", tmp_path))
    assert kinds(ends) == "a:crash"
    assert diary(tmp_path) == ["start a"]
    assert worker.deaths == 1


@pytest.mark.parametrize("batch", [False, True])
async def test_jobs_that_check_for_cancels_are_cancelled_and_cleaned_up(
    worker: WorkerHost, tmp_path: Path, batch: bool
) -> None:
    task = asyncio.create_task(run(worker, request({"a": "wait"}, "ab", tmp_path, batch=batch)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.cancel("t/sample/2")
    worker.cancel(OP)
    ends = await task
    assert kinds(ends) == "a:cancelled b:cancelled"
    assert {"clean a", "clean b"} <= set(diary(tmp_path))
    assert "start b" not in diary(tmp_path)
    assert worker.deaths == 0


async def test_single_partitions_are_cancelled_and_others_continue(worker: WorkerHost, tmp_path: Path) -> None:
    task = asyncio.create_task(run(worker, request({"a": "wait"}, "abc", tmp_path)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.cancel(OP, [0, 2])
    assert kinds(await task) == "a:cancelled b:success c:cancelled"
    assert worker.deaths == 0


@pytest.mark.parametrize("batch", [False, True])
async def test_a_pause_refuses_jobs_that_have_not_started(worker: WorkerHost, tmp_path: Path, batch: bool) -> None:
    """Of single jobs these are the next ones; of a batch, those left when it fails."""
    task = asyncio.create_task(run(worker, request({"a": "hold", "b": "break"}, "abcd", tmp_path, batch=batch)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.pause("t/sample/2")
    worker.pause(OP)
    # The child has received all earlier messages once it answers this.
    await worker.cleanup("t/sample/3", "sample", {}, None, [])
    await let_go(tmp_path)
    ends = await task
    assert kinds(ends) == "a:success b:refused c:refused d:refused"
    assert "paused" in ends["c"].error
    assert [line for line in diary(tmp_path) if line != "start a"] == (["batch a b c d"] if batch else [])


async def test_a_pause_refuses_jobs_that_wait_for_a_slot(tmp_path: Path, sample_env: dict[str, str]) -> None:
    async with running_worker(tmp_path, sample_env, slots=1) as worker:
        first = asyncio.create_task(run(worker, request({"a": "hold"}, "a", tmp_path)))
        await until(lambda: "start a" in diary(tmp_path), "the job runs")
        second = asyncio.create_task(run(worker, request({}, "bc", tmp_path, batch=True)))
        await until(lambda: len(worker._runs) == 2, "the second run waits")
        worker.pause(OP)
        await let_go(tmp_path)
        assert kinds(await second) == "b:refused c:refused"
        assert kinds(await first) == "a:success"
        assert diary(tmp_path) == ["start a"]


async def test_a_job_that_ignores_its_cancel_ends_with_its_child(worker: WorkerHost, tmp_path: Path) -> None:
    deaf = asyncio.create_task(run(worker, request({"a": "deaf"}, "ab", tmp_path)))
    other = RunRequest("t/sample/2", "noop", {"sleep": 1.5}, None, request({}, "x", tmp_path).items, batch=False)
    neighbour = asyncio.create_task(run(worker, other))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.cancel(OP, [0])
    assert kinds(await deaf) == "a:cancelled b:success"
    # The neighbour runs again in the next child, without a failure.
    assert kinds(await neighbour) == "x:success"
    assert worker.deaths == 1
    assert diary(tmp_path) == ["start a", "clean a", "clean b", "start b"]


def lingering_until(dead: Path, tmp_path: Path) -> str:
    """A Python executable whose guardians see an unkillable process until the file ``dead`` exists."""
    python = tmp_path / "python"
    instead = f'if [ "$1" = -I ]; then g=$3; shift 3; set -- -I -S {lingering.__file__} $g {dead} "$@"; fi'
    python.write_text(f'#!/bin/bash\n{instead}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@asynccontextmanager
async def killed_child(
    tmp_path: Path, env: dict[str, str], caplog: pytest.LogCaptureFixture, after: Callable[[WorkerHost], Awaitable[T]]
) -> AsyncIterator[tuple[WorkerHost, asyncio.Task[T]]]:
    """Kill a child, call ``after`` before its whole session is dead, and yield the task once it is."""
    dead = tmp_path / "dead"
    async with running_worker(tmp_path, env, python=lingering_until(dead, tmp_path)) as worker:
        try:
            os.kill(child_pid(worker), signal.SIGKILL)
            await until(
                lambda: "killed processes that do not die" in caplog.text, "the worker waits for the session's end"
            )
            task = asyncio.ensure_future(after(worker))
            await until(worker._keeper._starting.locked, "the call waits for a child")
            assert worker.running, "the session still has a process"
        finally:
            dead.touch()
        yield worker, task


async def test_a_job_sent_after_the_end_of_a_child_succeeds(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    def job(worker: WorkerHost) -> Awaitable[dict[str, JobEnded]]:
        return run(worker, request({}, "a", tmp_path))

    async with killed_child(tmp_path, sample_env, caplog, job) as (worker, ends):
        assert kinds(await ends) == "a:success"
        assert diary(tmp_path).count("start a") == 1
        assert worker.deaths == 1


async def test_a_call_sent_after_the_end_of_a_child_succeeds(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    def planning(worker: WorkerHost) -> Awaitable[PlanResult]:
        return worker.plan("t/sample/1", "sample", {"names": ["a"]}, TABLE, None)

    async with killed_child(tmp_path, sample_env, caplog, planning) as (_, planned):
        assert (await planned).count == 1


async def test_no_job_runs_while_a_killed_process_does_not_die(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The job of that process does not end either, so that no other executor can run it."""
    here, elsewhere, dead = tmp_path / "here", tmp_path / "elsewhere", tmp_path / "dead"
    here.mkdir()
    elsewhere.mkdir()
    async with running_worker(here, sample_env, python=lingering_until(dead, tmp_path)) as worker:
        try:
            deaf = asyncio.create_task(run(worker, request({"a": "deaf"}, "a", here)))
            await until(lambda: "start a" in diary(here), "the job runs")
            worker.cancel(OP)
            waiting_line = f"until then: {lingering.UNUSED_PID} ()"
            await until(lambda: waiting_line in caplog.text, "the worker logs the process")
            next_run = replace(request({}, "b", here), op="t/sample/2")
            waiting = asyncio.create_task(run(worker, next_run))
            # This run in another worker gives the waiting job the time to start.
            async with running_worker(elsewhere, sample_env) as other:
                assert kinds(await run(other, replace(next_run, arg=request({}, "b", elsewhere).arg))) == "b:success"
            assert diary(elsewhere) == ["start b"]
            assert diary(here) == ["start a"]
            assert not deaf.done()
        finally:
            dead.touch()
        assert kinds(await deaf) == "a:cancelled"
        assert kinds(await waiting) == "b:success"
        assert {"clean a", "start b"} <= set(diary(here))


async def test_a_run_abandoned_by_its_caller_is_stopped(worker: WorkerHost, tmp_path: Path) -> None:
    task = asyncio.create_task(run(worker, request({"a": "wait"}, "a", tmp_path)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    task.cancel()
    await until(lambda: "clean a" in diary(tmp_path), "the job is cleaned up")
    await asyncio.gather(task, return_exceptions=True)


async def test_an_error_in_a_cleanup_call_is_transient(worker: WorkerHost, tmp_path: Path) -> None:
    ends = await run(worker, request({"a": "fail-unclean"}, "a", tmp_path))
    assert kinds(ends) == "a:verdict"
    arg = {"does": {"a": "unclean"}}
    with pytest.raises(WorkerError, match="it cannot be removed") as caught:
        await worker.cleanup(OP, "sample", arg, None, request({}, "a", tmp_path).items)
    assert caught.value.kind == "transient"


async def test_a_cleanup_reads_the_checkpoint_of_its_job(worker: WorkerHost, tmp_path: Path) -> None:
    what = request({"a": "checkpoint"}, "a", tmp_path)
    await worker.cleanup(OP, "sample", what.arg, None, [JobItem(what.items[0].partition, 2, 100, {"at": 41})])
    assert diary(tmp_path) == ["clean a", "checkpoint {'at': 41}"]


async def test_jobs_save_checkpoints_report_status_and_have_a_stage(worker: WorkerHost, tmp_path: Path) -> None:
    saved: list[tuple[int, Any]] = []
    statuses: list[tuple[int, str]] = []

    async def save(partition: int, value: Any) -> bool:
        saved.append((partition, value))
        return True

    what = request({"a": "progress", "b": "statuses", "c": "stage"}, "abc", tmp_path)
    items = (JobItem(what.items[0].partition, 2, 100, {"at": 41}), *what.items[1:])
    what = RunRequest(what.op, what.type, what.arg, None, items, batch=False)

    def record_status(partition: int, text: str) -> None:
        statuses.append((partition, text))
        if text == "nearly there":
            (tmp_path / "work" / "ops/t/sample/1/heard").touch()

    ends = await run(worker, what, on_progress=save, on_status=record_status)
    # The second checkpoint came too soon after the first to be saved.
    assert ends["a"].result == {"loaded": {"at": 41}, "saved": [True, False]}
    assert saved == [(0, {"at": 0})]
    assert statuses == [(1, "half way"), (1, "nearly there")], (
        "a rate-limited status is reported later, unless it has changed"
    )
    assert ends["c"].result["stage"] == str(tmp_path / "shared/stage/t/sample/1/000002/102-inc-1")
    assert Path(ends["c"].result["stage"]).is_dir()
    assert Path(ends["c"].result["work_dir"]).is_dir()
    await worker.forget(OP)
    assert not Path(ends["c"].result["work_dir"]).exists()


async def test_all_jobs_end_at_the_deadline_and_run_again_in_a_new_session(worker: WorkerHost, tmp_path: Path) -> None:
    worker.set_deadline(boottime() + 3600)
    task = asyncio.create_task(run(worker, request({"a": "wait"}, "ab", tmp_path)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.set_deadline(boottime() + 0.1)
    assert kinds(await task) == "a:cancelled b:cancelled"
    waiting = asyncio.create_task(run(worker, request({}, "a", tmp_path)))
    await until(lambda: bool(worker._runs) and not worker.running, "a run waits for a session")
    worker.set_deadline(boottime() + 3600)
    assert kinds(await waiting) == "a:success"
    assert kinds(await run(worker, request({}, "a", tmp_path, deadline=boottime() + 3600))) == "a:success"


async def test_abort_kills_a_job_that_ignores_its_cancel(worker: WorkerHost, tmp_path: Path) -> None:
    task = asyncio.create_task(run(worker, request({"a": "deaf"}, "a", tmp_path)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    await worker.abort("the session is lost")
    assert kinds(await task) == "a:cancelled"
    assert kinds(await run(worker, request({}, "b", tmp_path))) == "b:success"


async def test_abort_returns_after_all_processes_died_and_all_ends_were_reported(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    async with running_worker(tmp_path, sample_env, slots=2) as worker:
        pid_file = tmp_path / "work/ops" / OP / "company"
        ends: list[JobEnded] = []
        # One job has a process in its own group, one ignores cancels, and one waits for a slot.
        runs = [
            asyncio.create_task(worker.run(request(does, "ab", tmp_path), ends.extend))
            for does in ({"a": "company"}, {"a": "deaf"}, {})
        ]
        arg = {"does": {"plan": "deaf"}, "diary": str(tmp_path / "diary")}
        planning = asyncio.create_task(worker.plan(OP, "sample", arg, TABLE, None))
        await until(lambda: pid_file.exists() and bool(pid_file.read_text()), "the job has started its process")
        await until(
            lambda: diary(tmp_path).count("start a") == 2 and "plan" in diary(tmp_path), "all calls have started"
        )
        sid = child_pid(worker)
        assert int(pid_file.read_text()) in session_members(sid)
        await worker.abort("the daemon stops")
        assert session_members(sid) == []
        assert [end.kind for end in ends] == ["cancelled"] * 6
        await asyncio.wait_for(asyncio.gather(*runs), 30)
        with pytest.raises(WorkerError, match="the daemon stops"):
            await planning
        assert not worker.running
        logs = set((tmp_path / "work/logs").iterdir())
        await worker.stop(5)
        await worker.abort("once more")
        assert set((tmp_path / "work/logs").iterdir()) == logs, "no child was started"
        assert kinds(await run(worker, request({}, "c", tmp_path))) == "c:refused"


async def test_abort_ends_a_pending_stop(worker: WorkerHost, tmp_path: Path) -> None:
    os.kill(child_pid(worker), signal.SIGSTOP)
    sid = child_pid(worker)
    stopping = asyncio.create_task(worker.stop(3600))
    await until(lambda: worker._keeper.stopping, "the worker is stopping")
    await worker.abort("now")
    assert session_members(sid) == []
    await asyncio.wait_for(stopping, 30)


async def test_abort_and_stop_while_a_child_starts(tmp_path: Path, sample_env: dict[str, str]) -> None:
    worker = WorkerHost(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env))
    starting = asyncio.create_task(worker.start())
    waiting = asyncio.create_task(run(worker, request({}, "a", tmp_path)))
    await until(lambda: worker.running and child_pid(worker) > 0, "a child is starting")
    sid = child_pid(worker)
    await worker.abort("at once")
    assert session_members(sid) == []
    assert kinds(await asyncio.wait_for(waiting, 30)) == "a:cancelled"
    with pytest.raises(WorkerError, match="aborted"):
        await starting
    assert not worker.running
    await worker.stop(3600)


async def test_stop_ends_a_child_whose_start_was_cancelled(tmp_path: Path, sample_env: dict[str, str]) -> None:
    worker = WorkerHost(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env))
    starting = asyncio.create_task(worker.start())
    await until(lambda: worker.running and child_pid(worker) > 0, "a child is starting")
    sid = child_pid(worker)
    starting.cancel()
    await asyncio.wait({starting})
    await worker.stop(3600)
    assert session_members(sid) == []
    assert not worker.running


async def test_a_killed_child_is_replaced(worker: WorkerHost, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = child_pid(worker)
    os.kill(before, signal.SIGKILL)
    await until(lambda: worker.deaths == 1 and worker.running, "the child is replaced")
    assert "killed by signal 9" in caplog.text
    assert kinds(await run(worker, request({}, "a", tmp_path))) == "a:success"
    assert child_pid(worker) != before


@pytest.mark.parametrize("alone", [True, False])
async def test_all_processes_die_after_a_killed_guardian(worker: WorkerHost, tmp_path: Path, alone: bool) -> None:
    """If its second process is killed, too, the daemon kills the session."""
    task = asyncio.create_task(run(worker, request({"a": "company"}, "a", tmp_path)))
    pid_file = tmp_path / "work/ops/t/sample/1/company"
    await until(lambda: pid_file.exists() and bool(pid_file.read_text()), "the job has started its process")
    sid, member = child_pid(worker), int(pid_file.read_text())
    assert member in session_members(sid)
    parent = int(Path(f"/proc/{sid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    for pid in [parent] if alone else [second_process_of(parent), parent]:
        os.kill(pid, signal.SIGKILL)
    assert kinds(await task) == "a:crash"
    assert session_members(sid) == []
    assert worker.deaths == 1


def test_the_child_ends_when_the_event_loop_ends(tmp_path: Path, sample_env: dict[str, str]) -> None:
    session: list[int] = []
    stopped: list[bool] = []

    async def run_until_cancelled() -> None:
        worker = WorkerHost(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env))
        await worker.start()
        session.append(child_pid(worker))
        try:
            await run(worker, request({"a": "deaf"}, "a", tmp_path))
        finally:
            await worker.stop(30)
            stopped.append(True)

    async def main() -> None:
        task = asyncio.create_task(run_until_cancelled())
        await until(lambda: "start a" in diary(tmp_path), "the job runs")
        raise RuntimeError(f"the daemon fails, and leaves {task.get_name()}")

    with pytest.raises(RuntimeError, match="the daemon fails"):
        asyncio.run(main())
    assert stopped
    limit = time.monotonic() + 30
    while session_members(session[0]):
        assert time.monotonic() < limit


async def test_stop_ends_a_child_that_starts(tmp_path: Path, sample_env: dict[str, str]) -> None:
    worker = WorkerHost(WorkerConfig(tmp_path, "ex", "inc-1", env=sample_env))
    starting = asyncio.create_task(worker.start())
    await until(lambda: worker.running, "a child is starting")
    await worker.stop(0)
    assert not worker.running
    with pytest.raises(WorkerError):
        await starting


async def test_stop_cancels_running_jobs(tmp_path: Path, sample_env: dict[str, str]) -> None:
    async with running_worker(tmp_path, sample_env) as worker:
        task = asyncio.create_task(run(worker, request({"a": "deaf"}, "ab", tmp_path)))
        await until(lambda: "start a" in diary(tmp_path), "the job runs")
        await worker.stop(5)
        assert kinds(await task) == "a:cancelled b:cancelled"
        assert kinds(await run(worker, request({}, "c", tmp_path))) == "c:refused"


async def test_the_error_of_a_child_that_cannot_start_has_the_reason(tmp_path: Path) -> None:
    worker = WorkerHost(WorkerConfig(tmp_path, "ex", "inc-1", env={"PYTHONPATH": str(tmp_path)}))
    (tmp_path / "distop").mkdir()
    (tmp_path / "distop" / "__init__.py").write_text("raise RuntimeError('a broken installation')")
    with pytest.raises(WorkerError, match="a broken installation"):
        await worker.start()
    await worker.stop(1)


async def test_a_missing_python_is_reported(tmp_path: Path) -> None:
    worker = WorkerHost(WorkerConfig(tmp_path, "ex", "inc-1", python=str(tmp_path / "python")))
    with pytest.raises(WorkerError, match="cannot start the"):
        await worker.start()
    assert not worker.running
    await worker.stop(1)


async def test_a_child_starts_once_a_transient_error_of_the_disk_is_fixed(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    (tmp_path / "logs").write_text("not a folder")
    worker = WorkerHost(WorkerConfig(tmp_path, "ex", "inc-1", env=sample_env))
    try:
        with pytest.raises(WorkerError, match="cannot start the guardian process: .*File exists") as caught:
            await worker.start()
        assert caught.value.kind == "transient"
        assert not worker.running
        (tmp_path / "logs").unlink()
        await worker.start()
        assert worker.running
    finally:
        await worker.stop(10)


async def test_an_argument_that_cannot_be_sent_is_an_error_of_the_job_or_call(
    worker: WorkerHost, tmp_path: Path
) -> None:
    """With another kind of exception, the daemon would retry for ever without counting failures."""
    items = tuple(JobItem({"partition": n, "name": str(n)}, 1, 1) for n in range(2))
    ends: list[JobEnded] = []
    await worker.run(RunRequest("t/sample/1", "sample", {1, 2}, None, items, batch=False), ends.extend)
    assert [(end.partition, end.kind) for end in ends] == [(0, "error"), (1, "error")]
    assert "set is not JSON serializable" in ends[0].error
    with pytest.raises(WorkerError, match="set is not JSON serializable") as caught:
        await worker.plan("t/sample/1", "sample", {1, 2}, {"name": "t"}, None)
    assert caught.value.kind == "transient"
    assert worker.deaths == 0


async def test_at_most_as_many_runs_as_slots_at_once(tmp_path: Path, sample_env: dict[str, str]) -> None:
    async with running_worker(tmp_path, sample_env, slots=1) as worker:
        first = asyncio.create_task(run(worker, request({"a": "wait"}, "a", tmp_path)))
        await until(lambda: "start a" in diary(tmp_path), "the first job runs")
        other = replace(request({}, "b", tmp_path), op="t/sample/2")
        second = asyncio.create_task(run(worker, other))
        await worker.plan("t/sample/3", "sample", {"names": ["x"]}, TABLE, None)
        assert "start b" not in diary(tmp_path)
        worker.cancel(OP)
        assert kinds(await first) == "a:cancelled"
        assert kinds(await second) == "b:success"


TABLE = {"name": "t", "format": "parquet", "location": "/nowhere"}


async def test_a_cancelled_start_leaves_no_unretrieved_error(tmp_path: Path, sample_env: dict[str, str]) -> None:
    """A session may end while its child starts. asyncio would log the unretrieved error with a traceback."""
    unretrieved: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    worker = WorkerHost(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env, slots=1))
    starting = asyncio.ensure_future(worker.start())
    await until(lambda: worker.running, "a child is starting")
    starting.cancel()
    await asyncio.wait({starting})
    await worker.stop(0)
    assert starting.cancelled()
    gc.collect()
    assert unretrieved == []
