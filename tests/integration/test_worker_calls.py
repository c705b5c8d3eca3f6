"""Planning, completion and clean-up calls in a child process."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.protocol.plan import decode_chunk
from distop.worker import child_messages
from distop.worker.daemon_side.call_channel import PLACES
from distop.worker.daemon_side.host import JobItem, RunRequest, WorkerConfig, WorkerError, WorkerHost
from distop.worker.daemon_side.requests import CompleteRequest, PlanPages
from distop.worker.guardian import boottime
from tests.support.behaviors import sample_env

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from distop.worker.daemon_side.result_handlers import Fetch

pytestmark = pytest.mark.rotating

__all__ = ["sample_env"]

OP = "t/sample/1"
TABLE = {"name": "t", "format": "parquet", "location": "/nowhere"}


@pytest.fixture
async def worker(tmp_path: Path, sample_env: dict[str, str]) -> AsyncIterator[WorkerHost]:
    config = WorkerConfig(
        tmp_path / "work", "ex", "inc-1", shared_dir=str(tmp_path / "shared"), env=sample_env, grace=0.3
    )
    started = WorkerHost(config)
    try:
        await started.start()
        yield started
    finally:
        await started.stop(10)


async def test_a_large_plan_is_split_into_chunks(worker: WorkerHost) -> None:
    names = [f"{'n' * 100}{i}" for i in range(20_000)]
    planned = await worker.plan(OP, "sample", {"names": names}, TABLE, None)
    assert (planned.count, planned.version) == (20_000, "v1")
    partitions = [p for chunk in planned.chunks for p in decode_chunk(chunk)]
    assert [p.name for p in partitions] == names
    assert [p.partition for p in partitions] == list(range(20_000))
    assert len(planned.chunks) > 1
    assert max(map(len, planned.chunks)) <= 512 * 1024


async def test_planning_reads_a_second_table_and_the_job_receives_it(worker: WorkerHost) -> None:
    async def find(name: str) -> dict[str, Any] | None:
        if name == "broken":
            raise OSError("etcd is not available")
        return {**TABLE, "name": name} if name == "other" else None

    arg = {"names": ["a"], "files": 3_000, "does": {"beside": "other", "a": "files"}}
    planned = await worker.plan(OP, "sample", arg, TABLE, None, find)
    (plan,) = json.loads(planned.chunks[0])
    assert (plan["beside"][0]["table"]["name"], plan["beside"][0]["version"]) == ("other", "v9")
    assert planned.spilled == 2, "both file lists are too long for etcd"
    ends: list[Any] = []
    await worker.run(RunRequest(OP, "sample", arg, TABLE, (JobItem(plan, 1, 1),), batch=False), ends.extend)
    assert ends[0].result == {"files": 3_000, "other": 3_000}
    for name, kind, words in (
        ("nobody", "fatal", "there is no table 'nobody'"),
        ("broken", "transient", "cannot read the record of table 'broken'"),
    ):
        with pytest.raises(WorkerError, match=words) as caught:
            await worker.plan(OP, "sample", {"names": ["a"], "does": {"beside": name}}, TABLE, None, find)
        assert caught.value.kind == kind


async def test_a_plan_of_named_partitions_has_only_these(worker: WorkerHost) -> None:
    planned = await worker.plan(OP, "sample", {"names": ["a", "b", "c"]}, TABLE, ("c", "a"))
    assert [(p.partition, p.name) for p in decode_chunk(planned.chunks[0])] == [(0, "a"), (1, "c")]
    with pytest.raises(WorkerError, match="no partition 'z'") as caught:
        await worker.plan(OP, "sample", {"names": ["a"]}, TABLE, ("z",))
    assert caught.value.kind == "fatal"


async def test_a_plan_may_be_empty(worker: WorkerHost) -> None:
    planned = await worker.plan(OP, "sample", {}, TABLE, None)
    assert (planned.count, planned.chunks) == (0, [])


async def test_a_long_file_list_reaches_the_job_through_the_shared_directory(
    worker: WorkerHost, tmp_path: Path
) -> None:
    planned = await worker.plan(OP, "sample", {"names": ["a"], "files": 4_000}, TABLE, None)
    (plan,) = json.loads(planned.chunks[0])
    assert plan["files_at"].startswith("plans/t/sample/1/")
    ends: list[Any] = []
    what = RunRequest(OP, "sample", {"does": {"a": "files"}}, TABLE, (JobItem(plan, 1, 1),), batch=False)
    await worker.run(what, ends.extend)
    assert ends[0].result == {"files": 4_000}
    file_list = tmp_path / "shared" / plan["files_at"]
    assert planned.spilled == 1
    assert file_list.exists()
    await worker.sweep(OP, TABLE)
    assert not file_list.exists()


async def test_a_failed_plan_has_its_kind_of_error_and_the_next_plan_succeeds(worker: WorkerHost) -> None:
    """The next plan is made by the same child or by its replacement."""
    for type_name, arg, kind, sentence in (
        ("sample", {"does": {"wrong": ""}}, "fatal", "^the location is wrong$"),
        ("sample", {"does": {"error": ""}}, "transient", "no listing today"),
        ("sample", {"does": {"die": ""}}, "crash", "exit code 3"),
        ("sample", {"names": 1}, "fatal", "does not fit sample: names"),
        ("nothing", {}, "fatal", "no behavior 'nothing' is installed"),
        ("sample", {"names": ["a", "a"]}, "fatal", "'a' is a duplicate"),
        ("sample", {"names": ["a"], "options": {"columns": "x" * 600_000}}, "fatal", "table options have 600014 bytes"),
        ("sample", {"names": ["a"], "options": {"catalog": "c"}}, "fatal", "sets the table option 'catalog'"),
    ):
        with pytest.raises(WorkerError, match=sentence) as caught:
            await worker.plan(OP, type_name, arg, TABLE, None)
        assert caught.value.kind == kind, sentence
        assert (await worker.plan(OP, "sample", {"names": ["a"]}, TABLE, None)).count == 1, sentence


async def test_a_call_is_repeated_after_another_job_killed_the_child(worker: WorkerHost, tmp_path: Path) -> None:
    planning = asyncio.create_task(worker.plan(OP, "sample", {"names": ["a"], "does": {"once": ""}}, TABLE, None))
    limit = time.monotonic() + 30
    while not (tmp_path / "work/ops/t/sample/1/once").exists():
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)
    ends: list[Any] = []
    item = JobItem({"partition": 0, "name": "x"}, 1, 1)
    await worker.run(
        RunRequest("t/sample/2", "sample", {"does": {"x": "die"}}, None, (item,), batch=False), ends.extend
    )
    assert [end.kind for end in ends] == ["crash"]
    assert (await planning).count == 1


@pytest.mark.parametrize("kind", ["plan", "complete"])
async def test_a_call_that_hangs_fails_at_its_time_limit(tmp_path: Path, sample_env: dict[str, str], kind: str) -> None:
    """The child is replaced. A location that never answers has this effect."""
    config = WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env, grace=0.3, call_limit=0.5)
    worker = WorkerHost(config)
    await worker.start()
    try:
        with pytest.raises(WorkerError, match=f"^the {kind[:4]}.* of {OP} did not end within 0.5 s$") as caught:
            await start_call(worker, kind, "deaf", tmp_path)
        assert (caught.value.kind, worker.deaths) == ("transient", 1)
    finally:
        await worker.stop(10)


async def test_an_abandoned_call_leaves_no_unretrieved_error(worker: WorkerHost, tmp_path: Path) -> None:
    """A drain or the end of a daemon abandons a planning call."""
    unretrieved: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unretrieved.append(context))
    planning = asyncio.create_task(worker.plan(OP, "sample", {"does": {"once": ""}}, TABLE, None))
    limit = time.monotonic() + 30
    while not (tmp_path / "work/ops/t/sample/1/once").exists():
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning
    del planning
    await worker.stop(10)
    gc.collect()
    await asyncio.sleep(0)
    assert not unretrieved


async def test_planning_that_ignores_its_cancel_ends_with_its_child(worker: WorkerHost, tmp_path: Path) -> None:
    planning = asyncio.create_task(worker.plan(OP, "sample", {"does": {"once": ""}}, TABLE, None))
    limit = time.monotonic() + 30
    while not (tmp_path / "work/ops/t/sample/1/once").exists():
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)
    worker.cancel_calls(OP)
    with pytest.raises(WorkerError, match="^cancelled: the planning of t/sample/1 was stopped$") as caught:
        await planning
    assert caught.value.kind == "transient"
    assert worker.deaths == 1


CALLS = ("plan", "complete", "cleanup")


def start_call(
    worker: WorkerHost, kind: str, action: str, tmp_path: Path, fetch: Fetch | None = None
) -> asyncio.Task[Any]:
    """Start a call of this kind in which the behavior performs ``action``."""
    does = {"plan": action, "complete": action, "a": f"clean-{action}"}
    arg = {"does": does, "diary": str(tmp_path / "diary"), "names": ["a"]}
    called: Coroutine[Any, Any, Any]
    if kind == "plan":
        called = worker.plan(OP, "sample", arg, TABLE, None)
    elif kind == "complete":
        called = worker.complete(CompleteRequest(OP, "sample", arg, TABLE, "success", 60, 60, 0, fetch or pages))
    else:
        # "b" is attempt 1 and ends at once; "a" is attempt 2 and performs the action.
        items = [JobItem({"partition": i, "name": name}, i + 1, 1) for i, name in enumerate("ba")]
        called = worker.cleanup(OP, "sample", arg, None, items)
    return asyncio.create_task(called)


def call_started(kind: str, tmp_path: Path) -> Callable[[], bool]:
    word = "clean a" if kind == "cleanup" else kind
    return lambda: (tmp_path / "diary").exists() and word in (tmp_path / "diary").read_text().splitlines()


async def until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, f"not reached: {what}"
        await asyncio.sleep(0.005)


async def transient_error(call: asyncio.Task[Any]) -> str:
    with pytest.raises(WorkerError) as caught:
        await asyncio.wait_for(call, 60)
    assert caught.value.kind == "transient"
    return str(caught.value)


@pytest.mark.parametrize("kind", CALLS)
async def test_cancelling_runs_does_not_cancel_calls(worker: WorkerHost, tmp_path: Path, kind: str) -> None:
    call = start_call(worker, kind, "hold", tmp_path)
    await until(call_started(kind, tmp_path), "the call has started")
    worker.cancel(OP)
    worker.cancel_calls("t/sample/2")
    # The child has received all earlier messages once it answers this.
    assert (await worker.plan("t/sample/3", "sample", {}, TABLE, None)).count == 0
    (tmp_path / "work/ops" / OP).mkdir(parents=True, exist_ok=True)
    (tmp_path / "work/ops" / OP / "go").touch()
    await call
    assert worker.deaths == 0


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_that_checks_for_cancels_is_cancelled(worker: WorkerHost, tmp_path: Path, kind: str) -> None:
    call = start_call(worker, kind, "wait", tmp_path)
    await until(call_started(kind, tmp_path), "the call has started")
    worker.cancel_calls(OP)
    assert (await transient_error(call)).startswith("cancelled: the ")
    assert worker.deaths == 0


async def test_planning_calls_of_one_table_leave_room_for_other_tables(worker: WorkerHost, tmp_path: Path) -> None:
    """Planning calls take no slots, and the executor does not choose their number."""
    ops = [f"t/sample/{n}" for n in range(1, 20)]
    does = {"does": {"plan": "wait"}, "diary": str(tmp_path / "diary"), "names": ["a"]}
    many = [asyncio.create_task(worker.plan(op, "sample", does, TABLE, None)) for op in ops]
    diary = tmp_path / "diary"

    def started_count() -> int:
        return len(diary.read_text().splitlines()) if diary.exists() else 0

    await until(lambda: started_count() == PLACES // 2, "half of the places run planning calls of the table")
    assert (await worker.plan("u/sample/1", "sample", {"names": ["a"]}, {**TABLE, "name": "u"}, None)).count == 1
    assert started_count() == PLACES // 2
    for op in ops[1:]:
        worker.cancel_calls(op)
    for call in many[1:]:
        assert (await transient_error(call)).startswith("cancelled: the planning")
    assert started_count() == PLACES // 2, "calls without a place never started"
    worker.cancel_calls(ops[0])
    await transient_error(many[0])
    assert worker.deaths == 0


async def test_the_time_limit_of_a_call_starts_when_it_has_a_place(tmp_path: Path, sample_env: dict[str, str]) -> None:
    config = WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env, grace=0.3, call_limit=1.0)
    worker = WorkerHost(config)
    await worker.start()
    try:
        does = {"does": {"plan": "wait"}, "diary": str(tmp_path / "diary"), "names": ["a"]}
        ops = [f"t/sample/{n}" for n in range(1, PLACES // 2 + 1)]
        before = [asyncio.create_task(worker.plan(op, "sample", does, TABLE, None)) for op in ops]
        await until((tmp_path / "diary").exists, "the earlier calls have started")
        assert (await worker.plan("t/sample/99", "sample", {"names": ["a"]}, TABLE, None)).count == 1
        for call in before:
            with pytest.raises(WorkerError, match="did not end within 1 s"):
                await call
    finally:
        await worker.stop(10)


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_that_ignores_its_cancel_ends_with_its_child(
    worker: WorkerHost, tmp_path: Path, kind: str
) -> None:
    ends: list[Any] = []
    item = JobItem({"partition": 0, "name": "x"}, 1, 1)
    neighbour = RunRequest("t/sample/2", "sample", {"does": {"x": "hold"}}, None, (item,), batch=False)
    running = asyncio.create_task(worker.run(neighbour, ends.extend))
    call = start_call(worker, kind, "deaf", tmp_path)
    await until(call_started(kind, tmp_path), "the call has started")
    worker.cancel_calls(OP)
    assert (await transient_error(call)).startswith("cancelled: the ")
    assert worker.deaths == 1
    private_folder = tmp_path / "work/ops/t/sample/2"
    private_folder.mkdir(parents=True, exist_ok=True)
    (private_folder / "go").touch()
    await asyncio.wait_for(running, 60)
    assert [end.kind for end in ends] == ["success"]


async def test_a_call_that_waits_for_a_child_can_be_cancelled(worker: WorkerHost, tmp_path: Path) -> None:
    worker.set_deadline(boottime() - 1)
    await until(lambda: not worker.running, "the child has ended at the deadline")
    calls = [start_call(worker, kind, "deaf", tmp_path) for kind in CALLS]
    await asyncio.sleep(0)
    worker.cancel_calls(OP)
    assert [(await transient_error(call)).partition(":")[0] for call in calls] == ["cancelled"] * 3
    worker.set_deadline(boottime() + 3600)
    assert (await worker.plan(OP, "sample", {"names": ["a"]}, TABLE, None)).count == 1
    assert not (tmp_path / "diary").exists()


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_that_arrives_after_its_deadline_is_sent_again(
    worker: WorkerHost, tmp_path: Path, kind: str
) -> None:
    """After a freeze of the machine, the child may read a late call before its guardian kills it, and must not run it.

    If only the child was frozen, the session continues, and the late call does not count as a failure.
    """
    child = await worker._keeper.ready(call=True)
    send, late = child.send_frame, [True, True]
    numbers: list[int] = []

    def send_late(frame: bytes) -> None:
        message = json.loads(frame[4:])
        if message["t"] == kind:
            numbers.append(message["call"])
            if late:
                late.pop()
                assert not (tmp_path / "diary").exists()
                frame = child_messages.encode({**message, "deadline": boottime() - 1})
        send(frame)

    child.send_frame = send_late  # type: ignore[method-assign]
    await asyncio.wait_for(start_call(worker, kind, "", tmp_path), 60)
    assert len(set(numbers)) == 3
    assert call_started(kind, tmp_path)()
    assert worker.deaths == 0


async def test_a_completion_that_waits_for_outcomes_can_be_cancelled(worker: WorkerHost, tmp_path: Path) -> None:
    reading = asyncio.Event()

    async def never(start: int) -> tuple[list[dict[str, Any]], int | None]:
        reading.set()
        return await asyncio.get_running_loop().create_future()

    call = start_call(worker, "complete", "", tmp_path, never)
    await asyncio.wait_for(reading.wait(), 30)
    worker.cancel_calls(OP)
    await transient_error(call)
    assert worker.deaths == 0


async def test_a_call_abandoned_by_its_caller_is_stopped_in_the_child(worker: WorkerHost, tmp_path: Path) -> None:
    call = start_call(worker, "plan", "deaf", tmp_path)
    await until(call_started("plan", tmp_path), "the call has started")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: worker.deaths == 1, "the child is replaced")


@pytest.mark.parametrize(("action", "deaths"), [("wait", 0), ("deaf", 1)])
async def test_a_cleanup_fails_at_its_time_limit(
    tmp_path: Path, sample_env: dict[str, str], action: str, deaths: int
) -> None:
    worker = WorkerHost(WorkerConfig(tmp_path / "work", "ex", "inc-1", env=sample_env, grace=0.3, cleanup_timeout=0.3))
    try:
        await worker.start()
        text = await transient_error(start_call(worker, "cleanup", action, tmp_path))
        assert text == "the cleanup of t/sample/1 did not end within 0.3 s"
        assert worker.deaths == deaths
        assert (await worker.plan(OP, "sample", {"names": ["a"]}, TABLE, None)).count == 1
    finally:
        await worker.stop(10)


async def pages(start: int) -> tuple[list[str], int | None]:
    end, result = start + 20, "x" * 60_000
    rows = [
        json.dumps({"partition": i, "success": i != 3, "outcome": {"name": str(i), "result": result}})
        for i in range(start, end)
    ]
    return rows, end if end < 60 else None


async def test_completion_reads_outcomes_in_pages(worker: WorkerHost) -> None:
    done = await worker.complete(
        CompleteRequest(OP, "sample", {"does": {"follow": ""}}, TABLE, "failed", 60, 59, 1, pages)
    )
    assert done.failure is None
    assert done.report["verdict"] == "failed"
    assert done.report["rows"] == [[i, str(i), i != 3] for i in range(60)]
    assert done.follow_ups == (
        {
            "type": "sample",
            "table": "t",
            "arg": {"does": {}, "diary": "", "names": ["a"], "files": 0, "options": {}, "sought": {}},
            "partitions": ["a"],
        },
    )


async def test_a_known_first_page_is_not_fetched_again(worker: WorkerHost) -> None:
    fetched = []

    async def fetch(start: int) -> tuple[list[str], int | None]:
        fetched.append(start)
        return await pages(start)

    whole = await worker.complete(CompleteRequest(OP, "sample", {}, TABLE, "success", 60, 60, 0, fetch))
    assert fetched == [0, 20, 40]
    done = await worker.complete(CompleteRequest(OP, "sample", {}, TABLE, "success", 60, 60, 0, fetch, await pages(0)))
    assert fetched[3:] == [20, 40]
    assert done == whole
    few = ([json.dumps({"partition": 0, "success": True, "outcome": None})] * 3, None)
    done = await worker.complete(CompleteRequest(OP, "sample", {}, TABLE, "success", 3, 3, 0, fetch, few))
    assert done.report["rows"] == [[0, "0", True]] * 3
    assert len(fetched) == 5


async def test_completion_can_read_the_plan(worker: WorkerHost) -> None:
    arg = {"names": ["a", "b"], "files": 4_000, "does": {"plan": ""}}
    planned = await worker.plan(OP, "sample", arg, TABLE, None)
    partitions = [p for chunk in planned.chunks for p in decode_chunk(chunk)]
    assert all(p.files_at for p in partitions)

    async def page(number: int) -> tuple[list[str], int | None]:
        return [json.dumps(partitions[number].to_json())], number + 1 if number == 0 else None

    plan = PlanPages(planned.version, whole=False, chunks=2, page=page)
    done = await worker.complete(CompleteRequest(OP, "sample", arg, TABLE, "success", 2, 2, 0, pages, plan=plan))
    assert done.report == {"version": "v1", "whole": False, "planned": [[0, "a", 4_000], [1, "b", 4_000]]}
    done = await worker.complete(CompleteRequest(OP, "sample", arg, TABLE, "success", 0, 0, 0, pages))
    assert done.report == {"version": "", "whole": False, "planned": []}

    async def fail(number: int) -> tuple[list[str], int | None]:
        raise ConnectionError("etcd is not available")

    with pytest.raises(WorkerError, match="cannot read the plan: .*etcd is not available"):
        plan = PlanPages("v1", whole=True, chunks=1, page=fail)
        await worker.complete(CompleteRequest(OP, "sample", arg, TABLE, "success", 0, 0, 0, pages, plan=plan))


async def test_a_failure_raised_by_completion_keeps_its_report(worker: WorkerHost) -> None:
    done = await worker.complete(CompleteRequest(OP, "sample", {"does": {"no": ""}}, None, "success", 60, 60, 0, pages))
    assert done.failure == "the answer is no"
    assert len(done.report["rows"]) == 60


async def test_a_completion_without_readable_outcomes_is_a_transient_error(worker: WorkerHost) -> None:
    async def fail(start: int) -> tuple[list[str], int | None]:
        raise ConnectionError("etcd is not available")

    with pytest.raises(WorkerError, match="etcd is not available") as caught:
        await worker.complete(CompleteRequest(OP, "sample", {}, TABLE, "success", 1, 1, 0, fail))
    assert caught.value.kind == "transient"


async def test_a_report_that_is_too_large_is_a_fatal_error(worker: WorkerHost) -> None:
    with pytest.raises(WorkerError, match="at most 524288 are allowed") as caught:
        await worker.complete(CompleteRequest(OP, "sample", {"does": {"large": ""}}, TABLE, "success", 0, 0, 0, pages))
    assert caught.value.kind == "fatal"


async def test_follow_up_operations_on_another_table_are_refused(worker: WorkerHost) -> None:
    for op, table in (("u/sample/1", {**TABLE, "name": "u"}), ("@cluster/sample/1", None)):
        with pytest.raises(WorkerError, match="is followed by operations on its own table alone, not on 't'") as caught:
            await worker.complete(
                CompleteRequest(op, "sample", {"does": {"follow": ""}}, table, "success", 0, 0, 0, pages)
            )
        assert caught.value.kind == "fatal"
