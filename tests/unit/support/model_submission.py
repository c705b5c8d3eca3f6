"""A client on the model of etcd, with an operation type and a table, for tests of submissions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop import Start
from distop.client.async_client import Client
from distop.invariants.checker import check
from distop.protocol.behavior_declaration import Declaration
from distop.protocol.keys import Keys
from distop.protocol.records import TableRecord
from distop.protocol.txn import Put, Txn
from distop.settings import ClientConfig
from tests.unit.support.modelclient import ModelClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEYS = Keys()
TABLE = "t"


class Etcd(ModelClient):
    def __init__(self) -> None:
        super().__init__()
        self.put(KEYS.behavior("noop"), Declaration("noop").encode())
        self.put(KEYS.table(TABLE), TableRecord(TABLE, "parquet", "/data").encode())
        self.renew_client()

    def renew_client(self) -> None:
        """Replace the client by a new one, which has read nothing for submissions."""
        self.client = Client(ClientConfig(), self)  # type: ignore[arg-type]

    def put(self, key: str, value: bytes) -> None:
        self.store.apply(Txn((), (Put(key, value),)))

    def value(self, key: str) -> bytes | None:
        kv = self.store.get(key)
        return kv.value if kv is not None else None

    def operations(self) -> list[str]:
        listing = self.store.range("distOp.", "distOp/")
        return [str(KEYS.parse(kv.key).ref) for kv in listing if kv.key.endswith(".spec")]

    def change_counter(self) -> None:
        """Write the counter of instances, as another client's start does."""
        counter = KEYS.next_instance(TABLE, "noop")
        self.put(counter, self.value(counter) or b"1")


def noop(**options: Any) -> Start:
    return Start("noop", TABLE, {}, options=options)


def run(work: Callable[[Etcd], Awaitable[Any]]) -> Any:
    """Run ``work`` with a new model, and check the invariants; returns its result."""

    async def main() -> Any:
        etcd = Etcd()
        answer = await work(etcd)
        assert [str(one) for one in check(KEYS, etcd.store.history)] == []
        return answer

    return asyncio.run(main())
