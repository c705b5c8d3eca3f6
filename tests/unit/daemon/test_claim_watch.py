"""The watch of claims while they are wanted; events and errors of a former watch do not count."""

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
    """A watch of claims, its feeds, and the calls of its owner."""

    def __init__(self) -> None:
        self.feeds: list[FakeFeed] = []
        self.calls: list[Any] = []
        self.watch = ClaimWatch(self._make, self.calls.append, lambda: self.calls.append("forget"), self.calls.append)

    def _make(self, apply: Callable[[Batch], None]) -> Feed:
        self.feeds.append(FakeFeed(apply))
        return cast("Feed", self.feeds[-1])


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


BATCH = Batch(7, (), listing=True)


async def test_batches_are_passed_on_while_claims_are_wanted() -> None:
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
    assert one.calls == [BATCH, "forget"]
    assert feed.closed


async def test_a_former_watch_does_not_affect_the_next() -> None:
    one = Watched()
    one.watch.want(True)
    await settle()
    one.watch.want(False)
    one.watch.want(True)
    await settle()
    first, second = one.feeds
    first.apply(BATCH)
    first.end.set_exception(ValueError("late"))
    first.end.exception()  # retrieved here, or asyncio logs it during another test
    second.apply(BATCH)
    assert one.calls == ["forget", BATCH]
    await one.watch.close()
    assert second.closed


async def test_a_watch_that_is_unwanted_at_once_never_begins() -> None:
    one = Watched()
    one.watch.want(True)
    one.watch.want(False)
    await settle()
    assert not one.feeds[0].begun
    await one.watch.close()


async def test_a_failing_watch_is_reported_once_and_not_after_the_close() -> None:
    one = Watched()
    one.watch.want(True)
    await settle()
    broken = ValueError("it cannot be folded")
    one.feeds[0].end.set_exception(broken)
    await settle()
    assert one.calls == [broken]
    await one.watch.close()
    assert one.calls == [broken, "forget"]


async def test_waiting_for_a_watch_ends_with_the_watch() -> None:
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
