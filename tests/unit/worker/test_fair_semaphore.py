"""The fair semaphore: places that tables share."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import pytest

from distop.worker.daemon_side.admission import FairSemaphore

if TYPE_CHECKING:
    from collections.abc import Callable


class Holders:
    """Tasks that hold places until they are released."""

    def __init__(self, places: int, per_key: int) -> None:
        self.semaphore = FairSemaphore(places, per_key)
        self.order: list[str] = []
        """Names that got a place, in order."""
        self.held: Counter[str] = Counter()
        self._go: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def _hold(self, key: str, name: str) -> None:
        async with self.semaphore.place(key):
            self.order.append(name)
            self.held[key] += 1
            try:
                await self._go[name].wait()
            finally:
                self.held[key] -= 1

    def ask(self, *names: str) -> None:
        """Each name asks for a place; its first letter is the key."""
        for name in names:
            self._go[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._hold(name[0], name))

    def release(self, name: str) -> None:
        self._go[name].set()

    def cancel(self, name: str) -> None:
        self._tasks[name].cancel()

    async def end(self, name: str) -> None:
        with suppress(asyncio.CancelledError):
            await self._tasks.pop(name)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_free_place_goes_to_the_key_with_the_fewest_places() -> None:
    holders = Holders(3, 2)
    holders.ask("a1", "a2", "a3", "b1", "b2")
    await settled()
    assert holders.order == ["a1", "a2", "b1"]
    holders.release("b1")
    await settled()
    assert holders.order[3:] == ["b2"], "b holds fewer places than a"
    holders.release("a1")
    await settled()
    assert holders.order[4:] == ["a3"]


async def test_within_a_key_the_longest_waiter_is_first() -> None:
    holders = Holders(1, 1)
    holders.ask("a1", "a2", "a3")
    for name in ("a1", "a2", "a3"):
        await settled()
        assert holders.order[-1] == name
        holders.release(name)


@pytest.mark.parametrize("seed", range(40))
async def test_no_place_is_lost_when_waiters_are_cancelled(seed: int) -> None:
    random, holders, asked = Random(seed), Holders(3, 2), list[str]()
    names = [f"{random.choice('abc')}{n}" for n in range(60)]
    ended: Callable[[str], None]
    for name in names:
        holders.ask(name)
        asked.append(name)
        for _ in range(random.randrange(3)):
            await asyncio.sleep(0)
        if random.random() < 0.7:
            ended = random.choice((holders.cancel, holders.release))
            ended(asked.pop(random.randrange(len(asked))))
            if random.random() < 0.5:
                holders.cancel(random.choice(names[: names.index(name) + 1]))
        assert holders.held.total() <= 3
        assert max(holders.held.values(), default=0) <= 2
    for name in names:
        holders.release(name)
    for name in names:
        await asyncio.wait_for(holders.end(name), 5)
    again = Holders(0, 0)
    again.semaphore = holders.semaphore
    again.ask("a1", "a2", "b1", "b2")
    await settled()
    assert again.order == ["a1", "a2", "b1"], "all places are free again"
