"""Runs in the daemon while a checkpoint is being saved."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from distop.protocol.work_done import WorkDone
from distop.worker.child_side import job_work
from distop.worker.child_side.job_work import JobWork
from distop.worker.daemon_side.host import WorkerHost
from distop.worker.daemon_side.requests import JobItem, RunRequest, WorkerConfig
from distop.worker.daemon_side.result_handlers import RunSink

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest


class Child:
    """Records replies."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def send(self, message: Any) -> None:
        self.replies.append(message)


def saving(answer: asyncio.Event, asked: asyncio.Event) -> Any:
    """The run of a job whose first checkpoint is being saved, until ``answer``."""
    item = JobItem({"partition": 0, "name": "p=0"}, 1, 7)
    request = RunRequest("t/noop/1", "noop", {}, None, (item,), False, False, True, 0.0)

    async def save(partition: int, value: Any) -> bool:
        asked.set()
        await answer.wait()
        return True

    run: Any = RunSink(request, "me", lambda events: None, None, save, None, logging.getLogger("distop.test"))
    run.child = Child()
    run.on_frame({"t": "progress", "run": 1, "partition": 0, "value": 3, "seq": 1})
    return run


async def test_a_job_is_not_run_again_before_its_checkpoints_are_saved() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()
    run = saving(answer, asked)
    waiting = asyncio.ensure_future(run.wait_for_checkpoints())
    await asked.wait()
    assert (waiting.done(), run.item(0).progress) == (False, None)
    answer.set()
    await waiting
    assert run.item(0).progress == 3


async def test_a_job_that_stops_to_resume_is_not_cleaned_up_while_its_checkpoint_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its child died in a drain, the next attempt resumes from that checkpoint."""
    asked, answer = asyncio.Event(), asyncio.Event()
    run = saving(answer, asked)
    run.keep = True
    worker, cleaned = WorkerHost(WorkerConfig(tmp_path, "ex", "me")), list[Any]()

    async def cleanup(request: RunRequest, items: Sequence[JobItem], incarnation: str) -> None:
        cleaned.extend(items)

    monkeypatch.setattr(worker, "_cleanup", cleanup)
    waiting = asyncio.ensure_future(worker._clean_after(run, [0]))
    await asked.wait()
    answer.set()
    assert await waiting == ""
    assert cleaned == []


async def test_the_work_of_running_jobs_is_passed_on() -> None:
    """Not that of jobs that have ended: a late report would stay in the node's record."""
    seen: list[Any] = []
    request = RunRequest("t/noop/1", "noop", {}, None, (JobItem({"partition": 4, "name": "p=4"}, 1, 7),), batch=False)
    nothing: Any = None
    run = RunSink(
        *(request, "me", nothing, nothing, nothing, nothing, logging.getLogger("distop.test")),
        on_work=lambda partition, work: seen.append((partition, work)),
    )
    for partition in (4, 5, -1):
        run.on_frame({"t": "work", "run": 1, "partition": partition, "work": {"files": 1}})
    run.silence()
    run.on_frame({"t": "work", "run": 1, "partition": 4, "work": {"files": 2}})
    assert seen == [(4, {"files": 1}), (-1, {"files": 1})]


def test_a_job_reports_its_work_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [100.0], list[WorkDone]()
    monkeypatch.setattr(job_work.time, "monotonic", lambda: now[0])
    work = JobWork(sent.append)
    for n in range(1, 4):
        work.report(WorkDone(n))
    assert sent == [WorkDone(1)]
    work.send_held()
    assert sent == [WorkDone(1)]
    now[0] += job_work.WORK_SECONDS
    work.send_held()
    work.send_held()
    assert sent == [WorkDone(1), WorkDone(3)], "the last report is sent later"
