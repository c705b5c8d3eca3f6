"""Group commit: items that arrive during a commit share the next one.

Without a commit under way, items are sent in the next turn of the event loop, with no timer.
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


class CommitGroup(Protocol[T]):
    """The items of the next commit."""

    items: list[T]

    def add(self, item: T) -> bool:
        """Add an item; returns False if it does not fit. The first item always fits."""

    @property
    def full(self) -> bool:
        """Whether the group is nearly full, so that it can be sent."""


class GroupCommit(Generic[T]):
    """A queue of items that are committed in groups.

    ``send`` commits a group and returns the items to send again: they come first. ``most``: maximum number of commits
    under way at once. A group that is not full waits, and grows, until no commit is under way, and then for ``rest``
    seconds, so that others have their turn. ``abandoned``: whether nobody waits for an item any more; then it is not
    sent. ``failed`` gets each error of ``send``.
    """

    def __init__(
        self,
        send: Callable[[list[T]], Awaitable[Sequence[T]]],
        new_group: Callable[[], CommitGroup[T]],
        failed: Callable[[BaseException], None],
        *,
        most: int = 1,
        rest: Callable[[], float] = lambda: 0.0,
        abandoned: Callable[[T], bool] = lambda item: False,
    ) -> None:
        self._send = send
        self._new_group = new_group
        self._failed = failed
        self._most = most
        self._rest = rest
        self._abandoned = abandoned
        self._queue: deque[T] = deque()
        self._group = new_group()
        self._full = False
        self._under_way: dict[asyncio.Task[None], list[T]] = {}
        self._timer: asyncio.Handle | None = None
        """The next call of :meth:`_send_groups`."""
        self._resting = False
        self._stopped = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a commit is under way, or items are queued."""
        return not self._idle.is_set()

    def add(self, items: Iterable[T]) -> None:
        """Queue items. Items that are queued in the same turn of the loop are sent together."""
        self._queue.extend(items)
        if not self._queue or self._stopped:
            return
        self._idle.clear()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_soon(self._send_groups)
        elif self._resting and self._gather() and self._full:
            self._wait(0.0)

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True
        self._queue.clear()
        self._group, self._full = self._new_group(), False

    def close(self) -> None:
        """Drop queued items, and cancel the commits under way."""
        self.stop()
        for commit in self._under_way:
            commit.cancel()

    def interrupt(self) -> None:
        """Cancel each commit all of whose items are abandoned; the next group follows at once."""
        for commit, items in self._under_way.items():
            if all(map(self._abandoned, items)):
                commit.cancel()

    async def drained(self) -> None:
        """Wait until no item is queued and no commit is under way."""
        await self._idle.wait()

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._resting = seconds > 0
        send = self._send_groups
        self._timer = loop.call_later(seconds, send) if self._resting else loop.call_soon(send)

    def _send_groups(self) -> None:
        self._timer, self._resting = None, False
        while self._gather() and len(self._under_way) < self._most and not self._stopped:
            if self._under_way and not self._full:
                break  # part of a group waits for a commit under way, and grows meanwhile
            items = [one for one in self._group.items if not self._abandoned(one)]
            self._group, self._full = self._new_group(), False
            if items:
                commit = asyncio.ensure_future(self._commit(items))
                self._under_way[commit] = items
                commit.add_done_callback(self._ended)
        if not self._under_way and not self._group.items:
            self._idle.set()

    def _gather(self) -> bool:
        """Fill the next group from the queue; returns whether there is something to send."""
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

    def _ended(self, commit: asyncio.Task[None]) -> None:
        del self._under_way[commit]
        if not commit.cancelled() and (error := commit.exception()) is not None:
            self._failed(error)
        if self._stopped:
            self._idle.set()
        elif self._gather() and not self._full and (rest := self._rest()) > 0:
            self._wait(rest)
        else:
            self._send_groups()
