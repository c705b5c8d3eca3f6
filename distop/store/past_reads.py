"""Reads of etcd at a past revision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.store import transport as wire
from distop.store._proto import rpc_pb2 as rpc
from distop.store.client import PAGE, EtcdClient, Listing
from distop.store.etcd_messages import decode_range, fill_get

if TYPE_CHECKING:
    from distop.protocol.txn import Get, GetResult
    from distop.store.transport import Method, Request, Response


class PastReads(EtcdClient):
    """A client on the connection of another one, whose reads of keys are at one revision.

    They raise Compacted if etcd no longer has it, and EtcdRejected if it does not have it yet. Each is a request of its
    own: a transaction must not read a past revision (T6).
    """

    def __init__(self, client: EtcdClient, revision: int) -> None:
        self.__dict__.update(client.__dict__)
        self._revision = revision

    async def read_at(self, *gets: Get) -> tuple[int, tuple[GetResult, ...]]:
        results = []
        for get in gets:
            request = rpc.RangeRequest()
            fill_get(request, get)
            results.append(decode_range(await self._read(wire.RANGE, request)))
        return self._revision, tuple(results)

    async def list(
        self, start: str, end: str, *, keys_only: bool = False, page: int = PAGE, revision: int = 0
    ) -> Listing:
        return await self._list(start, end, keys_only, page, revision or self._revision)

    async def _read(self, method: Method[Request, Response], request: Request) -> Response:
        if isinstance(request, rpc.RangeRequest) and not request.revision:
            request.revision = self._revision
        return await super()._read(method, request)
