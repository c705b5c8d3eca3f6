"""The event loop in virtual time: order, time, and strikes on a process between two of its callbacks."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.simulator.virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(random.Random(1))
    yield loop
    loop.end()
    assert loop.errors == []


def spawn(loop: VirtualLoop, name: str, work: Coroutine[Any, Any, Any]) -> tuple[Process, asyncio.Task[Any]]:
    process = Process(name)
    return process, loop.spawn(process, work, contextvars.Context())


def never() -> bool:
    return False


async def ticks(seen: list[float], count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(1.0)
        seen.append(asyncio.get_running_loop().time())


def test_time_jumps_to_the_next_timer(loop: VirtualLoop) -> None:
    seen: list[float] = []
    _, task = spawn(loop, "a", ticks(seen, 3))
    assert loop.run(task.done, 1e9)
    assert seen == [1.0, 2.0, 3.0]


def test_a_run_ends_at_its_time_limit(loop: VirtualLoop) -> None:
    seen: list[float] = []
    _, task = spawn(loop, "a", ticks(seen, 100))
    assert not loop.run(task.done, 10.5)
    assert (len(seen), loop.now) == (10, 10.5)


@pytest.mark.parametrize("pause", [0.0, 1e-20])
def test_a_loop_without_a_pause_is_reported(loop: VirtualLoop, pause: float) -> None:
    async def busy() -> None:
        await asyncio.sleep(5.0)
        for _ in itertools.count():
            await asyncio.sleep(pause)

    spawn(loop, "a", busy())
    with pytest.raises(RuntimeError, match="20,000 callbacks ran at one moment of virtual time"):
        loop.run(never, 10.0)
    assert loop.now == 5.0


def test_within_a_process_callbacks_keep_asyncios_order(loop: VirtualLoop) -> None:
    seen: list[int] = []

    async def many() -> None:
        for n in range(50):
            asyncio.get_running_loop().call_soon(seen.append, n)
        await asyncio.sleep(0)

    _, task = spawn(loop, "a", many())
    spawn(loop, "b", ticks([], 5))
    loop.run(task.done, 10)
    assert seen == list(range(50))


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_struck_while_its_thread_works_does_not_continue(loop: VirtualLoop, killed: bool) -> None:
    seen: list[str] = []

    def threaded() -> None:
        (loop.kill if killed else loop.freeze)(process)

    async def work() -> None:
        await asyncio.to_thread(threaded)
        seen.append("continued")

    process, _ = spawn(loop, "a", work())
    loop.run(never, 1.0)
    assert seen == []
    loop.thaw(process)
    loop.run(never, 2.0)
    assert seen == ([] if killed else ["continued"])


def test_between_processes_the_seed_decides() -> None:
    def order(seed: int) -> list[str]:
        loop = VirtualLoop(random.Random(seed))
        seen: list[str] = []

        async def steps(name: str) -> None:
            for _ in range(10):
                seen.append(name)
                await asyncio.sleep(0)

        for name in "abc":
            spawn(loop, name, steps(name))
        loop.run(never, 1.0)
        loop.end()
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_a_killed_process_runs_nothing_more_not_even_finally(loop: VirtualLoop) -> None:
    seen: list[float] = []
    after: list[str] = []

    async def work() -> None:
        try:
            await ticks(seen, 100)
        finally:
            after.append("finally")

    process, _ = spawn(loop, "a", work())
    loop.world_at(3.5, loop.kill, process)
    loop.run(never, 100.0)
    assert seen == [1.0, 2.0, 3.0]
    assert after == []


def test_a_frozen_process_continues_where_it_stopped_with_late_timers(loop: VirtualLoop) -> None:
    seen: list[float] = []
    process, task = spawn(loop, "a", ticks(seen, 4))
    other: list[float] = []
    spawn(loop, "b", ticks(other, 4))
    loop.world_at(1.5, loop.freeze, process)
    loop.world_at(7.0, loop.thaw, process)
    loop.run(task.done, 100.0)
    assert seen == [1.0, 7.0, 8.0, 9.0]
    assert other == [1.0, 2.0, 3.0, 4.0]


def test_an_answer_to_a_frozen_process_arrives_later(loop: VirtualLoop) -> None:
    seen: list[float] = []
    answer: asyncio.Future[int] = loop.create_future()

    async def ask() -> None:
        await answer
        seen.append(loop.now)

    process, task = spawn(loop, "a", ask())
    loop.world_at(1.0, loop.freeze, process)
    loop.world_at(2.0, answer.set_result, 1)
    loop.world_at(5.0, loop.thaw, process)
    loop.run(task.done, 100.0)
    assert seen == [5.0]


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_a_process_is_stopped_between_any_two_callbacks(loop: VirtualLoop, steps: int) -> None:
    seen: list[int] = []

    async def work() -> None:
        for n in range(100):
            seen.append(n)
            await asyncio.sleep(0)

    process, _ = spawn(loop, "a", work())
    process.after(steps, lambda: loop.kill(process))
    loop.run(never, 1.0)
    assert seen == list(range(steps))


def test_sets_of_tasks_and_futures_are_iterated_in_creation_order(loop: VirtualLoop) -> None:
    async def sets() -> list[str]:
        tasks = {asyncio.ensure_future(asyncio.sleep(0, n)) for n in range(100)}
        names = [task.get_name() for task in tasks]
        await asyncio.wait(tasks)
        return names

    _, task = spawn(loop, "a", sets())
    loop.run(task.done, 1.0)
    numbers = [int(name[1:]) for name in task.result()]
    assert len(numbers) == 100
    again = VirtualLoop(random.Random(1))
    _, second = spawn(again, "a", sets())
    again.run(second.done, 1.0)
    assert second.result() == task.result()
    again.end()


def test_threads_run_inline(loop: VirtualLoop) -> None:
    async def work() -> int:
        return await asyncio.to_thread(lambda: 7)

    _, task = spawn(loop, "a", work())
    assert loop.run(task.done, 0.0)
    assert task.result() == 7


def test_errors_of_callbacks_are_recorded(loop: VirtualLoop) -> None:
    def broken() -> None:
        raise ValueError("in a callback")

    loop.world_at(1.0, broken)
    loop.run(never, 2.0)
    (trouble,) = loop.errors
    assert trouble.startswith("world: Traceback")
    assert trouble.endswith("ValueError: in a callback")
    loop.errors.clear()


def test_asyncios_timeouts_are_virtual(loop: VirtualLoop) -> None:
    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.sleep(1e9)
        return asyncio.get_running_loop().time()

    _, task = spawn(loop, "a", work())
    assert loop.run(task.done, 1e12)
    assert task.result() == 3600.0
