"""A feed of the model of etcd, instead of one that watches etcd."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.protocol.revisioned import Change
from distop.store.watch_position import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.support.modelclient import ModelClient

POLL_SECONDS = 0.02
"""Virtual seconds between two reads of new changes."""


class ModelFeed:
    """Lists at its start, every ``relist_every`` seconds and on :meth:`relist`; delivers changes.

    It does not deliver changes for which :meth:`loses` is true.
    """

    def __init__(
        self,
        client: ModelClient,
        start: str,
        end: str,
        apply: Callable[[Batch], None],
        *,
        relist_every: float = 300.0,
        name: str = "",
        gather: Callable[[], Any] | None = None,
        **_: Any,
    ) -> None:
        self.name = name
        self.revision = 0
        self._client = client
        self._range = start, end
        self._apply = apply
        self._every = relist_every
        self._gather = gather
        self._timer: asyncio.TimerHandle | None = None
        self._following: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def loses(self, change: Change) -> bool:
        return False

    def fail(self, error: Exception) -> None:
        """End the feed with an error."""
        self._failure.set_exception(error)

    async def start(self) -> None:
        self._list()
        self.begin()

    def begin(self) -> None:
        self._following = asyncio.ensure_future(self._follow())

    async def relist(self) -> None:
        self._list()

    async def reached(self, revision: int) -> None:
        self._poll()

    async def wait(self) -> None:
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        for running in (self._timer, self._following):
            if running is not None:
                running.cancel()

    async def _follow(self) -> None:
        if not self.revision:
            self._list()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self._poll()

    def _poll(self) -> None:
        first, after = self._range
        written = self._client.store.between(self.revision + 1, self._client.store.revision)
        self.revision = self._client.store.revision
        changes = [one for _, changes in written for one in changes if first <= one.kv.key < after]
        events = tuple(Change(one.kv, one.deleted) for one in changes if not self.loses(one))
        if events:
            self._apply(Batch(self.revision, events))

    def _list(self) -> None:
        store = self._client.store
        self.revision = store.revision
        listing = store.range(*self._range)
        if self._gather is None:
            batch = Batch(store.revision, tuple(Change(kv) for kv in listing), listing=True)
        else:
            gathered = self._gather()
            gathered.apply([Change(kv) for kv in listing])
            batch = Batch(store.revision, (), listing=True, gathered=gathered)
        self._apply(batch)
        if self._timer is not None:
            self._timer.cancel()
        # At least 1 s, because a feed in virtual time with a small interval would list endlessly.
        self._timer = asyncio.get_running_loop().call_later(max(self._every, 1.0), self._list)


class SilentFeed(ModelFeed):
    """Delivers no changes, only its listings."""

    def begin(self) -> None:
        if not self.revision:
            self._list()

    def loses(self, change: Change) -> bool:
        return True
