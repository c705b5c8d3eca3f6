"""A client of the model store, for code that needs no more of etcd than reads and transactions. What happens to a
commit on its way is told to it beforehand.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from distop.protocol.txn import Txn
from distop.store.client import Listing
from distop.store.connection_settings import EtcdConfig
from distop.testing import ModelStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from distop.protocol.txn import Get, GetResult, KeyValue, TxnResult


class ModelClient:
    """``requests``: what was asked for, each by its label ("read" where it only reads), in order. ``fates``: what
    happens to the commits that come, one each: it is called with the transaction and answers in the store's place.
    ``usual``: what happens to all other commits; the store applies them by default.
    """

    def __init__(self) -> None:
        self.config = EtcdConfig()
        self.store = ModelStore()
        self.requests: list[str] = []
        self.committed: list[Txn] = []
        self.fates: deque[Callable[[Txn], Any]] = deque()
        self.usual: Callable[[Txn], Any] = lambda txn: self.store.apply(txn)
        self._asked = asyncio.Event()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Until this is so, which is looked at with each request."""
        while not reached():
            self._asked.clear()
            await self._asked.wait()

    async def _ask(self, what: str) -> None:
        """A request is under way: others get their turn before it is answered."""
        self.requests.append(what)
        self._asked.set()
        await asyncio.sleep(0)

    async def read(self, *gets: Get) -> tuple[GetResult, ...]:
        await self._ask("read")
        return self.store.apply(Txn((), gets)).responses  # type: ignore[return-value]

    async def get(self, key: str) -> KeyValue | None:
        await self._ask("read")
        return self.store.get(key)

    async def list(self, start: str, end: str, *, keys_only: bool = False, page: int = 0) -> Listing:
        await self._ask("read")
        return Listing(self.store.revision, tuple(self.store.range(start, end)))

    async def count(self, start: str, end: str) -> int:
        await self._ask("read")
        return len(self.store.range(start, end))

    async def parts(
        self, start: str, end: str, *, keys_only: bool = False, page: int = 0, revision: int = 0
    ) -> AsyncIterator[Listing]:
        yield await self.list(start, end)

    async def pages(
        self, start: str, end: str, *, keys_only: bool = False, page: int = 0, revision: int = 0
    ) -> AsyncIterator[tuple[KeyValue, ...]]:
        async for part in self.parts(start, end):
            yield part.kvs

    async def commit(self, txn: Txn, *, deadline: float | None = None, until: Any = None) -> TxnResult:
        assert deadline is None or 5.0 <= deadline <= 60.0, "a caller hears within a minute, and not at once"
        self.committed.append(txn)
        fate = self.fates.popleft() if self.fates else self.usual
        await self._ask(txn.label)
        answer = fate(txn)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def alarms(self) -> tuple[str, ...]:
        return ()

    def numbered(self) -> list[int]:
        """How many operations each applied start began."""
        return [
            begun
            for _, changes in self.store.history
            if (begun := sum(change.kv.key.endswith(".spec") and not change.deleted for change in changes))
        ]
