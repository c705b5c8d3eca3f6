"""Workers claim available jobs, extend the claims of running ones, return each once, and stop lost ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from distop.client.async_worker import Worker
from distop.errors import EtcdUnavailable
from distop.services.claims.owned_jobs import Complete, OwnedJob, Release, Retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.client.async_worker import Job


class Jobs:
    """A client that offers jobs from a list. ``refuses``: how many calls of each kind fail first."""

    def __init__(self, *names: str, **refuses: int) -> None:
        self.offered = list(names)
        self.refuses = refuses
        self.changed = asyncio.Event()
        self.pauses: list[float] = []
        self.returned: list[tuple[str, Any]] = []
        self.extended = 0
        self.taken_away: set[str] = set()

    def _ask(self, what: str) -> None:
        if self.refuses.get(what, 0):
            self.refuses[what] -= 1
            raise EtcdUnavailable("etcd does not answer")

    def offer(self, name: str) -> None:
        self.offered.append(name)
        self.changed.set()

    async def jobs_version(self) -> int:
        return 1

    async def own_jobs(self, actor: str, room: dict[str, int], most: int, duration: float, **_: Any) -> list[OwnedJob]:
        self._ask("own")
        taken, self.offered = self.offered[:most], self.offered[most:]
        return [OwnedJob("t/n/1", "n", "t", "", one, 0, {}, 1, 0, {}, one, duration) for one in taken]

    async def jobs_changed(self, version: int, timeout: float) -> None:
        self.pauses.append(timeout)
        if version < 0:
            return  # after a failure: the test does not wait
        await self.changed.wait()
        self.changed.clear()

    async def extend(self, tokens: list[str], duration: float) -> list[bool]:
        self._ask("extend")
        self.extended += 1
        return [one not in self.taken_away for one in tokens]

    async def return_job(self, token: str, outcome: Any) -> None:
        self._ask("return")
        self.returned.append((token, outcome))


def worker(jobs: Any, handler: Callable[[Job], Any], **more: Any) -> Worker:
    return Worker(jobs, {"n": handler}, actor="w", **{"duration": 0.3, "poll": 60.0, **more})


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def stopped(running: asyncio.Task[None], one: Worker) -> None:
    one.stop()
    async with asyncio.timeout(10):
        await running


async def test_each_job_is_handled_and_returned_once() -> None:
    jobs = Jobs("a", "b", "c")

    async def handler(job: Job) -> str:
        return job.partition

    one = worker(jobs, handler, concurrency=2)
    running = asyncio.ensure_future(one.run())
    await until(lambda: len(jobs.returned) == 3)
    await stopped(running, one)
    assert jobs.returned == [(name, Complete(name)) for name in "abc"]
    assert one.held == []


async def test_a_job_that_comes_later_is_claimed_without_a_poll() -> None:
    jobs = Jobs()
    one = worker(jobs, lambda job: None)
    running = asyncio.ensure_future(one.run())
    await until(lambda: bool(jobs.pauses))
    jobs.offer("a")
    await until(lambda: bool(jobs.returned))
    await stopped(running, one)
    assert jobs.pauses[0] == 60.0, "it waits for its poll while nothing is heard"


async def test_a_job_is_extended_while_it_runs_and_awaited_after_a_stop() -> None:
    jobs, done = Jobs("a"), asyncio.Event()

    async def handler(job: Job) -> None:
        await done.wait()

    one = worker(jobs, handler)
    running = asyncio.ensure_future(one.run())
    await until(lambda: bool(one.held))
    one.stop()
    await until(lambda: jobs.extended >= 2)
    assert not running.done()
    done.set()
    await stopped(running, one)
    assert jobs.returned == [("a", Complete(None))]


async def test_a_lost_job_is_stopped_and_released() -> None:
    jobs, cancelled = Jobs("a", extend=1), asyncio.Event()
    jobs.taken_away.add("a")

    async def handler(job: Job) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            assert job.lost
            cancelled.set()

    one = worker(jobs, handler)
    running = asyncio.ensure_future(one.run())
    async with asyncio.timeout(10):
        await cancelled.wait()
    await stopped(running, one)
    assert jobs.returned == [("a", Release())]


async def test_a_job_with_an_unexpected_error_is_retried() -> None:
    jobs = Jobs("a")

    def handler(job: Job) -> None:
        raise ValueError("no")

    one = worker(jobs, handler)
    running = asyncio.ensure_future(one.run())
    await until(lambda: bool(jobs.returned))
    await stopped(running, one)
    assert jobs.returned == [("a", Retry("ValueError: no"))]


async def test_a_worker_retries_after_a_short_pause_while_etcd_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs, slept, sleep = Jobs("a", own=1, **{"return": 1}), list[float](), asyncio.sleep

    async def short(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0.005)

    monkeypatch.setattr(asyncio, "sleep", short)
    one = worker(jobs, lambda job: None, duration=3000.0)
    running = asyncio.ensure_future(one.run())
    async with asyncio.timeout(10):
        while not jobs.returned:
            await sleep(0.005)
    await stopped(running, one)
    (before_return,) = (seconds for seconds in slept if seconds != 1000.0)
    assert 0.5 <= jobs.pauses[0] <= 5.0
    assert 0.5 <= before_return <= 5.0
    assert jobs.returned == [("a", Complete(None))]
