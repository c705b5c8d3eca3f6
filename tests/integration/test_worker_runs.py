"""Jobs in a child: every kind of end, batches that break, children that die, jobs that do not stop."""

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
from distop.worker.daemon_side.host import JobEnded, JobItem, RunRequest, Worker, WorkerConfig, WorkerError
from distop.worker.daemon_side.requests import Listener
from distop.worker.daemon_side.result_handlers import RunSink
from distop.worker.guardian import boottime, session_members
from tests.integration import lingering_guardian as lingering
from tests.integration.test_worker_guardian import second_of
from tests.support.behaviors import sample_env

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from distop.worker.daemon_side.requests import PlanResult

__all__ = ["sample_env"]

OP = "t/sample/1"
T = TypeVar("T")


@pytest.fixture
async def worker(tmp_path: Path, sample_env: dict[str, str]) -> AsyncIterator[Worker]:
    async with started(tmp_path, sample_env) as one:
        yield one


@asynccontextmanager
async def started(tmp_path: Path, env: dict[str, str], **settings: Any) -> AsyncIterator[Worker]:
    settings = {"slots": 4, "grace": 0.3, "shared_dir": str(tmp_path / "shared")} | settings
    worker = Worker(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=env, **settings))
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


async def run(worker: Worker, what: RunRequest, seconds: float = 60, **callbacks: Any) -> dict[str, JobEnded]:
    """The ends by partition name; each item has exactly one."""
    events: list[JobEnded] = []
    await asyncio.wait_for(worker.run(what, events.extend, **callbacks), seconds)
    assert sorted(event.partition for event in events) == [item.ordinal for item in what.items]
    return {str(what.items[event.partition].partition["name"]): event for event in events}


def line(tmp_path: Path, *does: str) -> tuple[list[tuple[RunRequest, Listener]], dict[str, JobEnded]]:
    """Runs of one job each, of operations 1, 2, …, that take turns; and their ends, by operation, as they come."""
    ends: dict[str, JobEnded] = {}
    asked = []
    for number, action in enumerate(does, 1):
        name = chr(ord("a") + number - 1)
        what = replace(request({name: action}, name, tmp_path), op=f"t/sample/{number}")

        def ended(events: list[JobEnded], name: str = name) -> None:
            for event in events:
                assert name not in ends
                ends[name] = event

        asked.append((what, Listener(ended)))
    return asked, ends


async def test_runs_of_several_operations_take_turns_in_one_slot(worker: Worker, tmp_path: Path) -> None:
    asked, ends = line(tmp_path, "", "fail", "error", "", "large")
    await asyncio.wait_for(worker.run_in_turn(asked), 60)
    assert list(ends) == ["a", "b", "c", "d", "e"]
    assert kinds(ends) == "a:success b:verdict c:error d:success e:fatal"
    assert diary(tmp_path)[:2] == ["start a", "start b"]


async def test_what_waits_for_its_turn_does_not_wait_for_it_to_be_paused_or_cancelled(
    worker: Worker, tmp_path: Path
) -> None:
    asked, ends = line(tmp_path, "wait", "", "", "")
    going = asyncio.ensure_future(worker.run_in_turn(asked))
    await until(lambda: diary(tmp_path) == ["start a"], "the first one runs")
    worker.pause("t/sample/2")
    worker.cancel("t/sample/3")
    await until(lambda: {"b", "c"} <= ends.keys(), "the two have their ends")
    assert "a" not in ends
    assert kinds(ends) == "b:refused c:cancelled"
    worker.pause("t/sample/1")
    worker.cancel("t/sample/1")
    await asyncio.wait_for(going, 60)
    assert kinds(ends) == "a:cancelled b:refused c:cancelled d:success"
    assert "start b" not in diary(tmp_path)


async def test_of_runs_that_take_turns_the_one_that_kills_the_child_is_blamed_alone(
    worker: Worker, tmp_path: Path
) -> None:
    asked, ends = line(tmp_path, "", "die", "", "")
    await asyncio.wait_for(worker.run_in_turn(asked), 120)
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


def child_pid(worker: Worker) -> int:
    child = worker._keeper.child
    assert child is not None
    return child._sid


async def test_declarations_of_all_that_can_be_loaded(worker: Worker) -> None:
    declared = {d.type_name: d for d in worker.declarations}
    assert {"sample", "batches", "noop"} <= set(declared)
    assert "absent" not in declared
    assert "ModuleNotFoundError" in worker._keeper.skipped["absent"]
    assert declared["batches"].batch
    assert not declared["sample"].batch
    assert declared["sample"].conflicts_with == ("other",)
    assert "does" in declared["sample"].arg_schema["properties"]


async def test_neither_guardian_nor_child_has_the_credentials(
    tmp_path: Path, sample_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("DISTOP_ETCD", "etcd1:2379")
    async with started(tmp_path, sample_env) as worker:
        end = (await run(worker, request({"a": "environment"}, "a", tmp_path)))["a"]
    assert {"DISTOP_PASSWORD", "DISTOP_PASSWORD_FILE", "DISTOP_USER", "DISTOP_KEY"} <= CREDENTIALS
    assert CREDENTIALS.isdisjoint(end.result["child"])
    assert CREDENTIALS.isdisjoint(end.result["guardian"])
    assert "DISTOP_ETCD" in end.result["child"]
    assert "DISTOP_ETCD" in end.result["guardian"]


ONE_EACH = dict(zip("bcdefghi", ["fail", "error", "wrong", "exit", "memory", "large", "object", "nan"], strict=True))


@pytest.mark.parametrize("batch", [False, True])
async def test_every_kind_of_end(worker: Worker, tmp_path: Path, batch: bool) -> None:
    ends = await run(worker, request(ONE_EACH, "abcdefghi", tmp_path, batch=batch))
    assert kinds(ends) == "a:success b:verdict c:error d:fatal e:error f:error g:fatal h:fatal i:fatal"
    assert ends["a"].result == {"partition": "a", "attempt": 1}
    assert ends["b"].result == {"why": "told to"}
    assert ends["b"].error == "the answer is no"
    assert ends["c"].error.startswith("RuntimeError: something went wrong\n  at ")
    assert ends["d"].error == "this cannot work"
    assert "70002 bytes" in ends["g"].error
    assert all(len(end.error) <= MAX_ERROR_TEXT for end in ends.values())
    assert all(0 < end.started <= end.finished for end in ends.values())
    # A verdict is reported only after the cleanup; an unexpected error is left to the next attempt.
    assert "clean b" in diary(tmp_path)
    assert "clean c" not in diary(tmp_path)
    assert worker.deaths == 0


async def test_a_wrong_argument_is_fatal_in_one_sentence(worker: Worker, tmp_path: Path) -> None:
    what = RunRequest(OP, "noop", {"sleep": "long", "nap": 1}, None, request({}, "ab", tmp_path).items, batch=True)
    ends = await run(worker, what)
    assert kinds(ends) == "a:fatal b:fatal"
    assert ends["a"].error.startswith("the argument does not fit noop: sleep: Input should be a valid number")
    assert "nap" in ends["a"].error


async def test_what_is_not_installed_is_refused(worker: Worker, tmp_path: Path) -> None:
    ends = await run(worker, RunRequest(OP, "nothing", {}, None, request({}, "a", tmp_path).items, batch=False))
    assert kinds(ends) == "a:refused"


async def test_a_start_that_arrives_late_is_refused(worker: Worker, tmp_path: Path) -> None:
    ends = await run(worker, request({}, "ab", tmp_path, deadline=boottime() - 1))
    assert kinds(ends) == "a:refused b:refused"
    assert diary(tmp_path) == []


@pytest.mark.parametrize("batch", [False, True])
async def test_a_live_run_goes_on_under_renewed_deadlines(worker: Worker, tmp_path: Path, batch: bool) -> None:
    """Else what a batch that breaks leaves would be refused, claimed and refused again, without end."""
    what = request({"a": "hold", "b": "break"}, "abcd", tmp_path, batch=batch, deadline=boottime() + 2)
    task = asyncio.create_task(run(worker, what))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.set_deadline(boottime() + 3600)
    await until(lambda: boottime() > what.deadline, "the deadline that the run came with is over")
    await let_go(tmp_path)
    # Alone, nobody breaks a batch.
    assert kinds(await task) == f"a:success b:{'error' if batch else 'success'} c:success d:success"


async def test_a_late_run_is_refused_whatever_comes_after(worker: Worker, tmp_path: Path) -> None:
    worker.set_deadline(boottime() + 3600)
    child = worker._keeper.child
    assert child is not None
    ends: list[JobEnded] = []
    sink = RunSink(request({}, "a", tmp_path), "inc-1", ends.extend, None, None, None, logging.getLogger())
    sink.number = 77
    child.runs[77] = sink
    late = run_message(77, "sample", sink, deadline=boottime() - 1)
    child.send(child_messages.DeadlineMessage(t="deadline", boottime=boottime() - 1))
    # It goes on in a second message, with a new deadline between the two: the first arrived too late all the same.
    child.send({**late, "items": [], "more": True})
    child.send(child_messages.DeadlineMessage(t="deadline", boottime=boottime() + 3600))
    child.send(late)
    await asyncio.wait_for(sink.done, 30)
    assert [end.kind for end in ends] == ["refused"]
    assert diary(tmp_path) == []


async def test_taken_over_jobs_are_cleaned_first(worker: Worker, tmp_path: Path) -> None:
    await run(worker, request({}, "ab", tmp_path, cleanup_first=True))
    assert diary(tmp_path) == ["clean a", "start a", "clean b", "start b"]


async def test_the_broken_partition_of_a_batch_stands_alone(worker: Worker, tmp_path: Path) -> None:
    ends = await run(worker, request({"c": "break", "f": "break", "g": "forget"}, "abcdefgh", tmp_path, batch=True))
    assert kinds(ends) == "a:success b:success c:error d:success e:success f:error g:error h:success"
    assert "c breaks the batch" in ends["c"].error
    assert ends["g"].error == "run_batch yielded no outcome for this partition"
    starts = [line for line in diary(tmp_path) if line.startswith("start")]
    assert len(starts) == len(set(starts)), "what a batch had given before it broke is not run again"


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("death", ["die", "kill"])
async def test_only_who_kills_the_child_is_blamed(worker: Worker, tmp_path: Path, batch: bool, death: str) -> None:
    guilty, neighbours = await asyncio.gather(
        run(worker, request({"c": death}, "abcdef", tmp_path, batch=batch)),
        run(worker, request({}, "uvwxyz", tmp_path, batch=not batch)),
    )
    assert kinds(guilty) == "a:success b:success c:crash d:success e:success f:success"
    assert ("exit code 3" if death == "die" else "killed by signal 9") in guilty["c"].error
    assert {end.kind for end in neighbours.values()} == {"success"}
    assert worker.deaths >= 2


async def test_a_single_job_alone_is_blamed_at_once(worker: Worker, tmp_path: Path) -> None:
    ends = await run(worker, request({"a": "die"}, "a", tmp_path))
    assert kinds(ends) == "a:crash"
    assert diary(tmp_path) == ["start a"]
    assert worker.deaths == 1


@pytest.mark.parametrize("batch", [False, True])
async def test_jobs_that_listen_are_cancelled_and_cleaned(worker: Worker, tmp_path: Path, batch: bool) -> None:
    task = asyncio.create_task(run(worker, request({"a": "wait"}, "ab", tmp_path, batch=batch)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.cancel("t/sample/2")
    worker.cancel(OP)
    ends = await task
    assert kinds(ends) == "a:cancelled b:cancelled"
    assert {"clean a", "clean b"} <= set(diary(tmp_path))
    assert "start b" not in diary(tmp_path)
    assert worker.deaths == 0


async def test_one_partition_is_cancelled_others_go_on(worker: Worker, tmp_path: Path) -> None:
    task = asyncio.create_task(run(worker, request({"a": "wait"}, "abc", tmp_path)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.cancel(OP, [0, 2])
    assert kinds(await task) == "a:cancelled b:success c:cancelled"
    assert worker.deaths == 0


@pytest.mark.parametrize("batch", [False, True])
async def test_a_pause_refuses_what_has_not_begun(worker: Worker, tmp_path: Path, batch: bool) -> None:
    """One after the other, what comes next; of a batch, what is left of it when it breaks."""
    task = asyncio.create_task(run(worker, request({"a": "hold", "b": "break"}, "abcd", tmp_path, batch=batch)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.pause("t/sample/2")
    worker.pause(OP)
    # Whatever was said to the child has arrived once it answers this.
    await worker.cleanup("t/sample/3", "sample", {}, None, [])
    await let_go(tmp_path)
    ends = await task
    assert kinds(ends) == "a:success b:refused c:refused d:refused"
    assert "paused" in ends["c"].error
    assert [line for line in diary(tmp_path) if line != "start a"] == (["batch a b c d"] if batch else [])


async def test_a_pause_refuses_what_waits_for_a_slot(tmp_path: Path, sample_env: dict[str, str]) -> None:
    async with started(tmp_path, sample_env, slots=1) as worker:
        first = asyncio.create_task(run(worker, request({"a": "hold"}, "a", tmp_path)))
        await until(lambda: "start a" in diary(tmp_path), "the job runs")
        second = asyncio.create_task(run(worker, request({}, "bc", tmp_path, batch=True)))
        await until(lambda: len(worker._runs) == 2, "another waits")
        worker.pause(OP)
        await let_go(tmp_path)
        assert kinds(await second) == "b:refused c:refused"
        assert kinds(await first) == "a:success"
        assert diary(tmp_path) == ["start a"]


async def test_a_job_that_does_not_listen_loses_its_child(worker: Worker, tmp_path: Path) -> None:
    deaf = asyncio.create_task(run(worker, request({"a": "deaf"}, "ab", tmp_path)))
    other = RunRequest("t/sample/2", "noop", {"sleep": 1.5}, None, request({}, "x", tmp_path).items, batch=False)
    neighbour = asyncio.create_task(run(worker, other))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    worker.cancel(OP, [0])
    assert kinds(await deaf) == "a:cancelled b:success"
    # The neighbour was run again in the next child, and not blamed.
    assert kinds(await neighbour) == "x:success"
    assert worker.deaths == 1
    assert diary(tmp_path) == ["start a", "clean a", "clean b", "start b"]


def lingering_until(dead: Path, tmp_path: Path) -> str:
    """A Python whose guardians see a process that lives until this file is there."""
    python = tmp_path / "python"
    instead = f'if [ "$1" = -I ]; then g=$3; shift 3; set -- -I -S {lingering.__file__} $g {dead} "$@"; fi'
    python.write_text(f'#!/bin/bash\n{instead}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@asynccontextmanager
async def child_killed(
    tmp_path: Path, env: dict[str, str], caplog: pytest.LogCaptureFixture, after: Callable[[Worker], Awaitable[T]]
) -> AsyncIterator[tuple[Worker, asyncio.Task[T]]]:
    """What was asked for when a child had ended, while not all of it was dead; all of it is, inside."""
    dead = tmp_path / "dead"
    async with started(tmp_path, env, python=lingering_until(dead, tmp_path)) as worker:
        try:
            os.kill(child_pid(worker), signal.SIGKILL)
            await until(lambda: "killed processes that do not die" in caplog.text, "it waits for the rest")
            task = asyncio.ensure_future(after(worker))
            await until(worker._keeper._starting.locked, "it waits for a child")
            assert worker.running, "not all of it is dead"
        finally:
            dead.touch()
        yield worker, task


async def test_a_job_that_comes_after_the_end_of_a_child_is_not_blamed_for_it(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    def job(worker: Worker) -> Awaitable[dict[str, JobEnded]]:
        return run(worker, request({}, "a", tmp_path))

    async with child_killed(tmp_path, sample_env, caplog, job) as (worker, ends):
        assert kinds(await ends) == "a:success"
        assert diary(tmp_path).count("start a") == 1
        assert worker.deaths == 1


async def test_a_call_that_comes_after_the_end_of_a_child_is_not_blamed_for_it(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    def planning(worker: Worker) -> Awaitable[PlanResult]:
        return worker.plan("t/sample/1", "sample", {"names": ["a"]}, TABLE, None)

    async with child_killed(tmp_path, sample_env, caplog, planning) as (_, planned):
        assert (await planned).count == 1


async def test_nothing_runs_until_what_does_not_die_is_dead(
    tmp_path: Path, sample_env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither does the job end whose process that is: until then it is nobody else's."""
    here, elsewhere, dead = tmp_path / "here", tmp_path / "elsewhere", tmp_path / "dead"
    here.mkdir()
    elsewhere.mkdir()
    async with started(here, sample_env, python=lingering_until(dead, tmp_path)) as worker:
        try:
            deaf = asyncio.create_task(run(worker, request({"a": "deaf"}, "a", here)))
            await until(lambda: "start a" in diary(here), "the job runs")
            worker.cancel(OP)
            said = f"until then: {lingering.NOBODY} ()"
            await until(lambda: said in caplog.text, "it says what it waits for")
            following = replace(request({}, "b", here), op="t/sample/2")
            waiting = asyncio.create_task(run(worker, following))
            async with started(elsewhere, sample_env) as other:  # so long it would take here
                assert kinds(await run(other, replace(following, arg=request({}, "b", elsewhere).arg))) == "b:success"
            assert diary(elsewhere) == ["start b"]
            assert diary(here) == ["start a"]
            assert not deaf.done()
        finally:
            dead.touch()
        assert kinds(await deaf) == "a:cancelled"
        assert kinds(await waiting) == "b:success"
        assert {"clean a", "start b"} <= set(diary(here))


async def test_a_run_that_its_caller_gives_up_is_stopped(worker: Worker, tmp_path: Path) -> None:
    task = asyncio.create_task(run(worker, request({"a": "wait"}, "a", tmp_path)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    task.cancel()
    await until(lambda: "clean a" in diary(tmp_path), "the job is cleaned up")
    await asyncio.gather(task, return_exceptions=True)


async def test_a_cleanup_that_fails_is_told(worker: Worker, tmp_path: Path) -> None:
    ends = await run(worker, request({"a": "fail-unclean"}, "a", tmp_path))
    assert kinds(ends) == "a:verdict"
    arg = {"does": {"a": "unclean"}}
    with pytest.raises(WorkerError, match="it cannot be removed") as caught:
        await worker.cleanup(OP, "sample", arg, None, request({}, "a", tmp_path).items)
    assert caught.value.kind == "transient"


async def test_a_cleanup_reads_the_checkpoint_of_its_job(worker: Worker, tmp_path: Path) -> None:
    what = request({"a": "checkpoint"}, "a", tmp_path)
    await worker.cleanup(OP, "sample", what.arg, None, [JobItem(what.items[0].partition, 2, 100, {"at": 41})])
    assert diary(tmp_path) == ["clean a", "checkpoint {'at': 41}"]


async def test_progress_status_and_stage(worker: Worker, tmp_path: Path) -> None:
    saved: list[tuple[int, Any]] = []
    told: list[tuple[int, str]] = []

    async def save(partition: int, value: Any) -> bool:
        saved.append((partition, value))
        return True

    what = request({"a": "progress", "b": "statuses", "c": "stage"}, "abc", tmp_path)
    items = (JobItem(what.items[0].partition, 2, 100, {"at": 41}), *what.items[1:])
    what = RunRequest(what.op, what.type, what.arg, None, items, batch=False)

    def tell(partition: int, text: str) -> None:
        told.append((partition, text))
        if text == "nearly there":
            (tmp_path / "work" / "ops/t/sample/1/heard").touch()

    ends = await run(worker, what, on_progress=save, on_status=tell)
    # The second checkpoint came too soon after the first.
    assert ends["a"].result == {"loaded": {"at": 41}, "saved": [True, False]}
    assert saved == [(0, {"at": 0})]
    assert told == [(1, "half way"), (1, "nearly there")], "what came too soon is told later, while it holds"
    assert ends["c"].result["stage"] == str(tmp_path / "shared/stage/t/sample/1/000002/102-inc-1")
    assert Path(ends["c"].result["stage"]).is_dir()
    assert Path(ends["c"].result["work_dir"]).is_dir()
    await worker.forget(OP)
    assert not Path(ends["c"].result["work_dir"]).exists()


async def test_at_the_deadline_all_ends_and_a_new_session_goes_on(worker: Worker, tmp_path: Path) -> None:
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


async def test_abort_kills_at_once(worker: Worker, tmp_path: Path) -> None:
    task = asyncio.create_task(run(worker, request({"a": "deaf"}, "a", tmp_path)))
    await until(lambda: "start a" in diary(tmp_path), "the job runs")
    await worker.abort("the session is lost")
    assert kinds(await task) == "a:cancelled"
    assert kinds(await run(worker, request({}, "b", tmp_path))) == "b:success"


async def test_abort_returns_when_all_is_dead_and_told(tmp_path: Path, sample_env: dict[str, str]) -> None:
    async with started(tmp_path, sample_env, slots=2) as worker:
        told = tmp_path / "work/ops" / OP / "company"
        ends: list[JobEnded] = []
        # One keeps a process in a group of its own, one does not listen, one waits for a slot.
        runs = [
            asyncio.create_task(worker.run(request(does, "ab", tmp_path), ends.extend))
            for does in ({"a": "company"}, {"a": "deaf"}, {})
        ]
        arg = {"does": {"plan": "deaf"}, "diary": str(tmp_path / "diary")}
        planning = asyncio.create_task(worker.plan(OP, "sample", arg, TABLE, None))
        await until(lambda: told.exists() and bool(told.read_text()), "the job has company")
        await until(lambda: diary(tmp_path).count("start a") == 2 and "plan" in diary(tmp_path), "all are there")
        sid = child_pid(worker)
        assert int(told.read_text()) in session_members(sid)
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
        assert set((tmp_path / "work/logs").iterdir()) == logs, "no other child was started"
        assert kinds(await run(worker, request({}, "c", tmp_path))) == "c:refused"


async def test_abort_cuts_a_stop_short(worker: Worker, tmp_path: Path) -> None:
    os.kill(child_pid(worker), signal.SIGSTOP)
    sid = child_pid(worker)
    stopping = asyncio.create_task(worker.stop(3600))
    await until(lambda: worker._keeper.stopping, "it is being stopped")
    await worker.abort("now")
    assert session_members(sid) == []
    await asyncio.wait_for(stopping, 30)


async def test_abort_and_stop_while_a_child_starts(tmp_path: Path, sample_env: dict[str, str]) -> None:
    worker = Worker(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env))
    starting = asyncio.create_task(worker.start())
    waiting = asyncio.create_task(run(worker, request({}, "a", tmp_path)))
    await until(lambda: worker.running and child_pid(worker) > 0, "a child is being started")
    sid = child_pid(worker)
    await worker.abort("at once")
    assert session_members(sid) == []
    assert kinds(await asyncio.wait_for(waiting, 30)) == "a:cancelled"
    with pytest.raises(WorkerError, match="aborted"):
        await starting
    assert not worker.running
    await worker.stop(3600)


async def test_stop_after_who_waited_for_the_start_gave_up(tmp_path: Path, sample_env: dict[str, str]) -> None:
    worker = Worker(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env))
    starting = asyncio.create_task(worker.start())
    await until(lambda: worker.running and child_pid(worker) > 0, "a child is being started")
    sid = child_pid(worker)
    starting.cancel()
    await asyncio.wait({starting})
    await worker.stop(3600)
    assert session_members(sid) == []
    assert not worker.running


async def test_a_child_killed_from_outside_is_replaced(
    worker: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = child_pid(worker)
    os.kill(before, signal.SIGKILL)
    await until(lambda: worker.deaths == 1 and worker.running, "a new child")
    assert "killed by signal 9" in caplog.text
    assert kinds(await run(worker, request({}, "a", tmp_path))) == "a:success"
    assert child_pid(worker) != before


@pytest.mark.parametrize("alone", [True, False])
async def test_a_killed_guardian_leaves_nothing_alive(worker: Worker, tmp_path: Path, alone: bool) -> None:
    """Be it killed alone or together with its second process: then the daemon kills."""
    task = asyncio.create_task(run(worker, request({"a": "company"}, "a", tmp_path)))
    told = tmp_path / "work/ops/t/sample/1/company"
    await until(lambda: told.exists() and bool(told.read_text()), "the job has company")
    sid, company = child_pid(worker), int(told.read_text())
    assert company in session_members(sid)
    parent = int(Path(f"/proc/{sid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    for pid in [parent] if alone else [second_of(parent), parent]:
        os.kill(pid, signal.SIGKILL)
    assert kinds(await task) == "a:crash"
    assert session_members(sid) == []
    assert worker.deaths == 1


def test_a_loop_that_ends_takes_the_child_with_it(tmp_path: Path, sample_env: dict[str, str]) -> None:
    session: list[int] = []
    stopped: list[bool] = []

    async def life() -> None:
        worker = Worker(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env))
        await worker.start()
        session.append(child_pid(worker))
        try:
            await run(worker, request({"a": "deaf"}, "a", tmp_path))
        finally:
            await worker.stop(30)
            stopped.append(True)

    async def main() -> None:
        living = asyncio.create_task(life())
        await until(lambda: "start a" in diary(tmp_path), "the job runs")
        raise RuntimeError(f"the daemon has a mistake, and leaves {living.get_name()}")

    with pytest.raises(RuntimeError, match="mistake"):
        asyncio.run(main())
    assert stopped
    limit = time.monotonic() + 30
    while session_members(session[0]):
        assert time.monotonic() < limit


async def test_stop_while_a_child_starts(tmp_path: Path, sample_env: dict[str, str]) -> None:
    worker = Worker(WorkerConfig(tmp_path, "ex", "inc-1", env=sample_env))
    starting = asyncio.create_task(worker.start())
    await until(lambda: worker.running, "a child is being started")
    await worker.stop(0)
    assert not worker.running
    with pytest.raises(WorkerError):
        await starting


async def test_stop_ends_what_runs_without_blame(tmp_path: Path, sample_env: dict[str, str]) -> None:
    async with started(tmp_path, sample_env) as worker:
        task = asyncio.create_task(run(worker, request({"a": "deaf"}, "ab", tmp_path)))
        await until(lambda: "start a" in diary(tmp_path), "the job runs")
        await worker.stop(5)
        assert kinds(await task) == "a:cancelled b:cancelled"
        assert kinds(await run(worker, request({}, "c", tmp_path))) == "c:refused"


async def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    worker = Worker(WorkerConfig(tmp_path, "ex", "inc-1", env={"PYTHONPATH": str(tmp_path)}))
    (tmp_path / "distop").mkdir()
    (tmp_path / "distop" / "__init__.py").write_text("raise RuntimeError('a broken installation')")
    with pytest.raises(WorkerError, match="a broken installation"):
        await worker.start()
    await worker.stop(1)


async def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    worker = Worker(WorkerConfig(tmp_path, "ex", "inc-1", python=str(tmp_path / "python")))
    with pytest.raises(WorkerError, match="cannot start the"):
        await worker.start()
    assert not worker.running
    await worker.stop(1)


async def test_a_disk_that_fails_is_told_and_a_child_starts_once_it_is_mended(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    (tmp_path / "logs").write_text("not a folder")
    worker = Worker(WorkerConfig(tmp_path, "ex", "inc-1", env=sample_env))
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


async def test_what_cannot_be_sent_is_the_jobs_end_and_the_calls_answer(worker: Worker, tmp_path: Path) -> None:
    """Never an exception of another kind: the daemon's roles would try again for ever, and count nothing."""
    items = tuple(JobItem({"partition": n, "name": str(n)}, 1, 1) for n in range(2))
    ends: list[JobEnded] = []
    await worker.run(RunRequest("t/sample/1", "sample", {1, 2}, None, items, batch=False), ends.extend)
    assert [(end.partition, end.kind) for end in ends] == [(0, "error"), (1, "error")]
    assert "set is not JSON serializable" in ends[0].error
    with pytest.raises(WorkerError, match="set is not JSON serializable") as caught:
        await worker.plan("t/sample/1", "sample", {1, 2}, {"name": "t"}, None)
    assert caught.value.kind == "transient"
    assert worker.deaths == 0


async def test_no_more_runs_at_once_than_slots(tmp_path: Path, sample_env: dict[str, str]) -> None:
    async with started(tmp_path, sample_env, slots=1) as worker:
        first = asyncio.create_task(run(worker, request({"a": "wait"}, "a", tmp_path)))
        await until(lambda: "start a" in diary(tmp_path), "the first runs")
        other = replace(request({}, "b", tmp_path), op="t/sample/2")
        second = asyncio.create_task(run(worker, other))
        await worker.plan("t/sample/3", "sample", {"names": ["x"]}, TABLE, None)
        assert "start b" not in diary(tmp_path)
        worker.cancel(OP)
        assert kinds(await first) == "a:cancelled"
        assert kinds(await second) == "b:success"


TABLE = {"name": "t", "format": "parquet", "location": "/nowhere"}


async def test_a_start_that_nobody_waits_for_any_more_ends_in_silence(
    tmp_path: Path, sample_env: dict[str, str]
) -> None:
    """As when a session ends while its child starts: who wanted the child has gone, and asyncio would tell of it with a
    traceback.
    """
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    worker = Worker(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env, slots=1))
    starting = asyncio.ensure_future(worker.start())
    await until(lambda: worker.running, "a child starts")
    starting.cancel()
    await asyncio.wait({starting})
    await worker.stop(0)
    assert starting.cancelled()
    gc.collect()
    assert told == []
