"""Claims are watched while they are wanted: what a former watch brings, or how it ends, does not count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from distop.daemon.coordinator.claim_watch import ClaimWatch
from distop.store.watch_position import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from distop.store.watch import Feed


class FakeFeed:
    def __init__(self, apply: Callable[[Batch], None]) -> None:
        self.apply = apply
        self.begun = self.closed = False
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self) -> None:
        self.begun = True

    async def wait(self) -> None:
        await asyncio.wait([self.end])
        self.end.result()

    async def reached(self, revision: int) -> None:
        await self.wait()

    async def close(self) -> None:
        self.closed = True


class Watched:
    """A watch of claims, its feeds, and what its owner was told."""

    def __init__(self) -> None:
        self.feeds: list[FakeFeed] = []
        self.told: list[Any] = []
        self.watch = ClaimWatch(self._make, self.told.append, lambda: self.told.append("forget"), self.told.append)

    def _make(self, apply: Callable[[Batch], None]) -> Feed:
        self.feeds.append(FakeFeed(apply))
        return cast("Feed", self.feeds[-1])


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


BATCH = Batch(7, (), listing=True)


async def test_what_is_watched_is_handed_over_until_it_is_not_wanted() -> None:
    one = Watched()
    one.watch.want(True)
    one.watch.want(True)
    await settle()
    (feed,) = one.feeds
    assert feed.begun
    feed.apply(BATCH)
    one.watch.want(False)
    one.watch.want(False)
    feed.apply(BATCH)
    await settle()
    assert one.told == [BATCH, "forget"]
    assert feed.closed


async def test_a_former_watch_is_not_taken_for_the_next() -> None:
    one = Watched()
    one.watch.want(True)
    await settle()
    one.watch.want(False)
    one.watch.want(True)
    await settle()
    first, second = one.feeds
    first.apply(BATCH)
    first.end.set_exception(ValueError("late"))
    first.end.exception()  # nobody else asks, and a future that nobody has asked says so in another test
    second.apply(BATCH)
    assert one.told == ["forget", BATCH]
    await one.watch.close()
    assert second.closed


async def test_what_is_wanted_and_not_at_once_never_begins() -> None:
    one = Watched()
    one.watch.want(True)
    one.watch.want(False)
    await settle()
    assert not one.feeds[0].begun
    await one.watch.close()


async def test_a_watch_that_fails_is_told_once_and_not_after_the_close() -> None:
    one = Watched()
    one.watch.want(True)
    await settle()
    broken = ValueError("it cannot be folded")
    one.feeds[0].end.set_exception(broken)
    await settle()
    assert one.told == [broken]
    await one.watch.close()
    assert one.told == [broken, "forget"]


async def test_who_waits_for_a_watch_that_ends_goes_on() -> None:
    one = Watched()
    await one.watch.reached(5)
    one.watch.want(True)
    await settle()
    waiting = asyncio.ensure_future(one.watch.reached(5))
    await settle()
    assert not waiting.done()
    one.watch.want(False)
    one.feeds[0].end.set_exception(ConnectionError("the watch of claims is closed"))
    await waiting
