"""Group commit: items that come while a commit is under way go together in the next one.

An item that finds none under way is sent in the same turn of the loop, and waits for no timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from distop.errors import MalformedRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

T = TypeVar("T")


async def by_halves(group: Sequence[T], send: Callable[[Sequence[T]], Awaitable[None]]) -> MalformedRequest | None:
    """Send a group, and split it in halves where etcd rejects it as invalid.

    Returns etcd's error about the first element that it rejects alone.
    """
    try:
        await send(group)
    except MalformedRequest as error:
        if len(group) == 1:
            return error
        half = len(group) // 2
        found, other = await by_halves(group[:half], send), await by_halves(group[half:], send)
        return found or other
    return None


class Group(Protocol[T]):
    """The items of the next commit, while it grows."""

    items: list[T]

    def add(self, item: T) -> bool:
        """Add one; False where it does not fit. The first one always fits."""

    @property
    def full(self) -> bool:
        """Hardly anything more fits."""


class GroupCommit(Generic[T]):
    """One line of items.

    ``send`` commits some of them, and returns those that are to be sent again: they come first. ``most``: commits under
    way at once. Beside one that is under way less than a full group waits, and grows. ``rest``: seconds that it waits
    behind one, for others to have their turn. ``failed`` is told of an error of ``send``.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Awaitable[Sequence[T]]],
        new_group: Callable[[], Group[T]],
        failed: Callable[[BaseException], None],
        *,
        most: int = 1,
        rest: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._send = send
        self._new_group = new_group
        self._failed = failed
        self._most = most
        self._rest = rest
        self._queue: deque[T] = deque()
        self._group = new_group()
        self._full = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        """The next look whether a group is to be sent."""
        self._resting = False
        self._stopped = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """A commit is under way, or waits."""
        return not self._idle.is_set()

    def add(self, items: Iterable[T]) -> None:
        """Queue items. What is queued in the same turn of the loop goes together."""
        self._queue.extend(items)
        if not self._queue or self._stopped:
            return
        self._idle.clear()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._look)
        elif self._resting and self._gather() and self._full:
            self._wait(0.0)

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True
        self._queue.clear()
        self._group, self._full = self._new_group(), False

    def close(self) -> None:
        """Drop what waits and what is under way."""
        self.stop()
        self.interrupt()

    def interrupt(self) -> None:
        """Give up what is under way: nobody waits for it any more. The others go on."""
        for commit in self._under_way:
            commit.cancel()

    async def drained(self) -> None:
        """Wait until nothing waits or is under way."""
        await self._idle.wait()

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._resting = seconds > 0
        self._timer = loop.call_later(seconds, self._look) if self._resting else loop.call_soon(self._look)

    def _look(self) -> None:
        self._timer, self._resting = None, False
        while self._gather() and len(self._under_way) < self._most and not self._stopped:
            if self._under_way and not self._full:
                break  # part of a group waits for a commit under way, and grows meanwhile
            items, self._group, self._full = self._group.items, self._new_group(), False
            commit = asyncio.ensure_future(self._commit(items))
            self._under_way.add(commit)
            commit.add_done_callback(self._over)
        if not self._under_way and not self._group.items:
            self._idle.set()

    def _gather(self) -> bool:
        """Fill the next group from the queue; False where there is nothing to send."""
        while self._queue and not self._full:
            if self._group.add(self._queue[0]):
                self._queue.popleft()
                self._full = self._group.full
            else:
                self._full = True
        return bool(self._group.items)

    async def _commit(self, items: list[T]) -> None:
        again = await self._send(items)
        if again:
            self._queue.extendleft(reversed([*again, *self._group.items]))
            self._group, self._full = self._new_group(), False

    def _over(self, commit: asyncio.Task[None]) -> None:
        self._under_way.discard(commit)
        if not commit.cancelled() and (error := commit.exception()) is not None:
            self._failed(error)
        if self._stopped:
            self._idle.set()
        elif self._gather() and not self._full and (rest := self._rest()) > 0:
            self._wait(rest)
        else:
            self._look()
