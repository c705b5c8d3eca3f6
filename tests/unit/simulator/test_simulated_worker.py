"""The simulated worker has the methods of the real one, with the same parameters."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from pathlib import Path
from unittest.mock import Mock

import pytest

from distop.errors import NotFound
from distop.worker.daemon_side.host import WorkerHost
from distop.worker.daemon_side.requests import CompleteRequest, CompleteResult, PlanPages, WorkerConfig, WorkerError
from tests.simulator.sim_worker import SimWorker
from tests.simulator.virtual_loop import PROCESS, Process

METHODS = sorted(name for name in dir(WorkerHost) if not name.startswith("_") and callable(getattr(WorkerHost, name)))


@pytest.mark.parametrize("name", METHODS)
def test_a_simulated_method_has_the_parameters_of_the_real_one(name: str) -> None:
    real = inspect.signature(getattr(WorkerHost, name)).parameters
    simulated = inspect.signature(getattr(SimWorker, name)).parameters
    assert [(p.name, p.kind) for p in simulated.values()] == [(p.name, p.kind) for p in real.values()]


Page = tuple[list[str], int | None]


async def no_rows(start: int) -> Page:
    return [], None


def complete(error: Exception, what: str) -> CompleteResult:
    """Complete an operation whose outcomes or plan cannot be read."""

    async def unreadable(start: int) -> Page:
        raise error

    fetch, page = (unreadable, no_rows) if what == "outcomes" else (no_rows, unreadable)
    plan = PlanPages("v1", whole=True, chunks=1, page=page)
    request = CompleteRequest("a/check/1", "check", {}, None, "success", 1, 1, 0, fetch, plan=plan)

    def run() -> CompleteResult:
        PROCESS.set(Process("exec-0"))
        return asyncio.run(SimWorker(WorkerConfig(Path(), "exec-0", "i1"), Mock()).complete(request))

    return contextvars.copy_context().run(run)


@pytest.mark.parametrize("what", ["outcomes", "plan"])
def test_a_completion_that_cannot_read_its_input_fails_as_with_the_real_worker(what: str) -> None:
    """A coordinator that was frozen wakes up and reads the plan of an ended operation (seed 1114444)."""
    with pytest.raises(WorkerError, match=f"cannot read the {what}: .*it is missing") as caught:
        complete(NotFound("it is missing"), what)
    assert caught.value.kind == "transient"


@pytest.mark.parametrize("what", ["outcomes", "plan"])
def test_a_bug_while_reading_the_input_of_a_completion_is_not_hidden(what: str) -> None:
    with pytest.raises(KeyError):
        complete(KeyError("no such chunk"), what)
