"""The keeper of a child: back-off after failed starts, and the size of the child's log, in virtual time."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise
from typing import Any, cast

import pytest

from distop.runtime import logs
from distop.worker.daemon_side import child_keeper
from distop.worker.daemon_side.child_keeper import ChildKeeper
from distop.worker.daemon_side.requests import WorkerError
from tests.unit.support.virtualtime import in_virtual_time, now

MOST_WAITS = 1000


class Event(asyncio.Event):
    """Fails if it is awaited without end, as in a loop that nothing stops."""

    waits = 0

    async def wait(self) -> Any:
        self.waits += 1
        assert self.waits < MOST_WAITS, "the event was not cleared"
        return await super().wait()


class Child:
    """A child whose start fails as long as ``failures`` is positive; ``starts``: the times of all starts."""

    failures = 0
    starts: list[float]

    def __init__(self, *_: Any) -> None:
        self.died: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.declarations, self.skipped = ("a type",), dict[str, str]()
        self.hung_up, self.stuck = False, ""
        self.truncated: list[float] = []

    async def start(self, deadline: float) -> None:
        type(self).starts.append(now())
        if self.failures:
            type(self).failures -= 1
            self.died.set_result(None)
            raise WorkerError("crash", "it does not start")

    def set_deadline(self, boottime: float) -> None: ...

    def truncate_log(self) -> None:
        self.truncated.append(now())
        assert len(self.truncated) < MOST_WAITS, "its log is checked without a pause"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> type[Child]:
    class One(Child):
        starts: list[float] = []  # noqa: RUF012  # each test has its own class

    monkeypatch.setattr(child_keeper, "ChildProcess", One)
    monkeypatch.setattr(asyncio, "Event", Event)
    return One


def keeper() -> ChildKeeper:
    return ChildKeeper(cast(Any, None), logs.get("distop.test"))


def gaps(times: list[float]) -> list[float]:
    """The seconds between successive times."""
    return [round(after - before, 6) for before, after in pairwise(times)]


def test_the_pauses_between_failed_starts_grow_to_half_a_minute(child: type[Child]) -> None:
    async def main() -> None:
        one = keeper()
        child.failures = 10
        while child.failures:
            with pytest.raises(WorkerError):
                await one.ready()
        assert gaps(child.starts) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]

    in_virtual_time(main)


def test_session_renewals_do_not_end_the_pause_after_a_failed_start(child: type[Child]) -> None:
    async def main() -> None:
        one = keeper()
        child.failures = 8
        while child.failures:
            with pytest.raises(WorkerError):
                await one.ready()
        waiting = asyncio.ensure_future(one.ready())
        for _ in range(5):
            await asyncio.sleep(3.0)
            one.set_deadline(1e12)
        await waiting
        assert gaps(child.starts)[-1] == 25.6

    in_virtual_time(main)


def test_the_size_of_the_log_is_checked_each_minute(child: type[Child]) -> None:
    async def main() -> None:
        one = keeper()
        started: Any = await one.ready()
        await asyncio.sleep(310.0)
        assert gaps([child.starts[0], *started.truncated]) == [60.0] * 5
        one.stopping = True
        started.died.set_result(None)
        await asyncio.sleep(1.0)

    in_virtual_time(main)


async def test_asyncio_reports_no_failed_start_that_nobody_waits_for(
    child: type[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    starts, fails = asyncio.Event(), asyncio.Event()

    async def start(self: Child, deadline: float) -> None:
        starts.set()
        await fails.wait()
        raise WorkerError("crash", "it does not start")

    monkeypatch.setattr(child, "start", start)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    one = keeper()
    waiting = asyncio.ensure_future(one.ready())
    await starts.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    fails.set()
    while one.child is not None:  # noqa: ASYNC110  # until the start has failed
        await asyncio.sleep(0)
    for _ in range(5):  # its callbacks
        await asyncio.sleep(0)
    gc.collect()
    assert reported == []


def test_one_child_is_started_for_several_requests(child: type[Child]) -> None:
    async def main() -> None:
        one = keeper()
        first, second = await asyncio.gather(one.ready(), one.ready())
        assert first is second
        assert len(child.starts) == 1

    in_virtual_time(main)
