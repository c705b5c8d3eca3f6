"""What the daemon keeps of a run while the child has it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distop.worker.model import JobItem, RunRequest
from distop.worker.sinks import RunSink


class Child:
    """Gets replies."""

    def __init__(self) -> None:
        self.replies: list[Any] = []

    def send(self, message: Any) -> None:
        self.replies.append(message)


async def test_a_job_is_not_run_again_before_its_checkpoints_are_saved() -> None:
    item = JobItem({"partition": 0, "name": "p=0"}, 1, 7)
    request = RunRequest("t/noop/1", "noop", {}, None, (item,), False, False, True, 0.0)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def save(partition: int, value: Any) -> bool:
        asked.set()
        await answer.wait()
        return True

    run: Any = RunSink(request, "me", lambda events: None, None, save, None, logging.getLogger("distop.test"))
    await run.saved()
    run.child = Child()
    run.on_frame({"t": "progress", "run": 1, "partition": 0, "value": 3, "seq": 1})
    waiting = asyncio.ensure_future(run.saved())
    await asked.wait()
    assert (waiting.done(), run.item(0).progress) == (False, None)
    answer.set()
    await waiting
    assert run.item(0).progress == 3
