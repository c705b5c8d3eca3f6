"""A feed of the model store, in place of one that watches etcd."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.store.position import Batch, Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.modelclient import ModelClient


class ModelFeed:
    """It lists at its start, every ``relist_every`` seconds and on :meth:`relist`; of changes it tells nothing, as a
    watch that lost them all.
    """

    def __init__(
        self,
        client: ModelClient,
        start: str,
        end: str,
        apply: Callable[[Batch], None],
        *,
        relist_every: float,
        **_: Any,
    ) -> None:
        self._client = client
        self._range = start, end
        self._apply = apply
        self._every = relist_every
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._list()

    async def relist(self) -> None:
        self._list()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _list(self) -> None:
        store = self._client.store
        self._apply(Batch(store.revision, tuple(Event(kv) for kv in store.range(*self._range)), listing=True))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._every, self._list)
