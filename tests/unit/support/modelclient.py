"""A client of the model of etcd with reads and transactions; tests choose the results of commits."""

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
    """``requests``: the labels of all requests in order ("read" for reads).

    ``fates``: functions that answer the next commits, one each, instead of the store; they take the transaction.
    ``usual``: the function that answers all other commits; by default the store applies them.
    """

    def __init__(self) -> None:
        self.config = EtcdConfig()
        self.suggests_tables = True
        self.store = ModelStore()
        self.requests: list[str] = []
        self.committed: list[Txn] = []
        self.fates: deque[Callable[[Txn], Any]] = deque()
        self.usual: Callable[[Txn], Any] = lambda txn: self.store.apply(txn)
        self._requested = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is checked after each request."""
        while not condition():
            self._requested.clear()
            await self._requested.wait()

    async def request(self, label: str) -> None:
        """Record a request; other tasks run before it is answered. Tests may replace it."""
        self.requests.append(label)
        self._requested.set()
        await asyncio.sleep(0)

    async def read(self, *gets: Get) -> tuple[GetResult, ...]:
        await self.request("read")
        return self.store.apply(Txn((), gets)).responses  # type: ignore[return-value]

    async def get(self, key: str) -> KeyValue | None:
        await self.request("read")
        return self.store.get(key)

    async def list(self, start: str, end: str, *, keys_only: bool = False, page: int = 0) -> Listing:
        await self.request("read")
        return Listing(self.store.revision, tuple(self.store.range(start, end)))

    async def count(self, start: str, end: str) -> int:
        await self.request("read")
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
        assert deadline is None or 5.0 <= deadline <= 60.0, "deadlines are between 5 and 60 s"
        self.committed.append(txn)
        fate = self.fates.popleft() if self.fates else self.usual
        await self.request(txn.label)
        answer = fate(txn)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def alarms(self) -> tuple[str, ...]:
        return ()

    def numbered(self) -> list[int]:
        """The number of operations that each applied start started."""
        return [
            started
            for _, changes in self.store.history
            if (started := sum(change.kv.key.endswith(".spec") and not change.deleted for change in changes))
        ]
