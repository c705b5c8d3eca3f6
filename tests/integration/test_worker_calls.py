"""Planning and completion in a child."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distop.core.plan import decode_chunk
from distop.worker.host import JobItem, RunRequest, Worker, WorkerConfig, WorkerError
from tests.support.behaviors import sample_env

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["sample_env"]

OP = "t/sample/1"
TABLE = {"name": "t", "format": "parquet", "location": "/nowhere"}


@pytest.fixture
async def worker(tmp_path: Path, sample_env: dict[str, str]) -> AsyncIterator[Worker]:
    config = WorkerConfig(
        tmp_path / "work", "ex", "inc-1", shared_dir=str(tmp_path / "shared"), env=sample_env, grace=0.3
    )
    one = Worker(config)
    try:
        await one.start()
        yield one
    finally:
        await one.stop(10)


async def test_a_plan_in_chunks(worker: Worker) -> None:
    names = [f"{'n' * 100}{i}" for i in range(20_000)]
    planned = await worker.plan(OP, "sample", {"names": names}, TABLE, None)
    assert (planned.count, planned.version) == (20_000, "v1")
    partitions = [p for chunk in planned.chunks for p in decode_chunk(chunk)]
    assert [p.name for p in partitions] == names
    assert [p.partition for p in partitions] == list(range(20_000))
    assert len(planned.chunks) > 1
    assert max(map(len, planned.chunks)) <= 512 * 1024


async def test_a_plan_of_some(worker: Worker) -> None:
    planned = await worker.plan(OP, "sample", {"names": ["a", "b", "c"]}, TABLE, ("c", "a"))
    assert [(p.partition, p.name) for p in decode_chunk(planned.chunks[0])] == [(0, "a"), (1, "c")]
    with pytest.raises(WorkerError, match="no partition 'z'") as caught:
        await worker.plan(OP, "sample", {"names": ["a"]}, TABLE, ("z",))
    assert caught.value.kind == "fatal"


async def test_an_empty_plan(worker: Worker) -> None:
    planned = await worker.plan(OP, "sample", {}, TABLE, None)
    assert (planned.count, planned.chunks) == (0, [])


async def test_a_long_file_list_reaches_the_job_through_the_shared_directory(worker: Worker) -> None:
    planned = await worker.plan(OP, "sample", {"names": ["a"], "files": 4_000}, TABLE, None)
    (plan,) = json.loads(planned.chunks[0])
    assert plan["files_at"].startswith("plans/t/sample/1/")
    ends: list[Any] = []
    what = RunRequest(OP, "sample", {"does": {"a": "files"}}, TABLE, (JobItem(plan, 1, 1),), batch=False)
    await worker.run(what, ends.extend)
    assert ends[0].result == {"files": 4_000}


@pytest.mark.parametrize(
    ("type_name", "arg", "kind", "sentence"),
    [
        ("sample", {"does": {"wrong": ""}}, "fatal", "^the location is wrong$"),
        ("sample", {"does": {"error": ""}}, "transient", "no listing today"),
        ("sample", {"does": {"die": ""}}, "crash", "exit code 3"),
        ("sample", {"names": 1}, "fatal", "does not fit sample: names"),
        ("nothing", {}, "fatal", "no behavior 'nothing' is installed"),
        ("sample", {"names": ["a", "a"]}, "fatal", "'a' is there twice"),
    ],
)
async def test_plans_that_fail(worker: Worker, type_name: str, arg: Any, kind: str, sentence: str) -> None:
    with pytest.raises(WorkerError, match=sentence) as caught:
        await worker.plan(OP, type_name, arg, TABLE, None)
    assert caught.value.kind == kind
    assert (await worker.plan(OP, "sample", {"names": ["a"]}, TABLE, None)).count == 1


async def test_a_call_is_not_blamed_for_its_neighbour(worker: Worker, tmp_path: Path) -> None:
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


async def test_planning_that_does_not_stop_loses_its_child(worker: Worker, tmp_path: Path) -> None:
    planning = asyncio.create_task(worker.plan(OP, "sample", {"does": {"once": ""}}, TABLE, None))
    limit = time.monotonic() + 30
    while not (tmp_path / "work/ops/t/sample/1/once").exists():
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)
    worker.cancel(OP)
    with pytest.raises(WorkerError) as caught:
        await planning
    assert caught.value.kind == "transient"


async def pages(start: int) -> tuple[list[dict[str, Any]], int | None]:
    end, result = start + 20, "x" * 60_000
    rows = [{"partition": i, "name": str(i), "success": i != 3, "result": result} for i in range(start, end)]
    return rows, end if end < 60 else None


async def test_completion_reads_outcomes_page_by_page(worker: Worker) -> None:
    done = await worker.complete(OP, "sample", {"does": {"follow": ""}}, TABLE, "failed", 60, 59, 1, pages)
    assert done.failure is None
    assert done.report["verdict"] == "failed"
    assert done.report["rows"] == [[i, str(i), i != 3] for i in range(60)]
    assert done.follow_ups == (
        {
            "type": "sample",
            "table": "t",
            "arg": {"does": {}, "diary": "", "names": ["a"], "files": 0},
            "partitions": ["a"],
        },
    )


async def test_a_verdict_of_the_completion_keeps_its_report(worker: Worker) -> None:
    done = await worker.complete(OP, "sample", {"does": {"no": ""}}, None, "success", 60, 60, 0, pages)
    assert done.failure == "the answer is no"
    assert len(done.report["rows"]) == 60


async def test_outcomes_that_cannot_be_read(worker: Worker) -> None:
    async def broken(start: int) -> tuple[list[dict[str, Any]], int | None]:
        raise ConnectionError("etcd is away")

    with pytest.raises(WorkerError, match="etcd is away") as caught:
        await worker.complete(OP, "sample", {}, TABLE, "success", 1, 1, 0, broken)
    assert caught.value.kind == "transient"


async def test_a_report_that_is_too_large(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="at most 524288 are kept") as caught:
        await worker.complete(OP, "sample", {"does": {"large": ""}}, TABLE, "success", 0, 0, 0, pages)
    assert caught.value.kind == "fatal"
