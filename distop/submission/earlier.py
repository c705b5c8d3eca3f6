"""Which operation a request has started before, and which operations run: looked for among those of one type on one
table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core import catalog
from distop.core import keys as K
from distop.core.digest import request_digest
from distop.core.model import History, OperationRef, Phase, Spec
from distop.core.records import read
from distop.core.txn import Get
from distop.errors import InvalidArgument
from distop.reading import readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.core.keys import Keys
    from distop.core.txn import KeyValue
    from distop.store.client import EtcdClient
    from distop.submission.request import Request


def is_of(found: Spec | History, wanted: Request, ref: OperationRef) -> bool:
    """The operation was started by this request. Raises InvalidArgument where its id was used for another one."""
    if found.request_id != wanted.request_id:
        return False
    if found.request_digest not in ("", request_digest(wanted.arg, wanted.partitions)):  # "": of an earlier release
        raise InvalidArgument(
            f"the request id {wanted.request_id!r} has started {ref}, with another argument or other partitions: "
            "repeat that request as it was, or choose a new id"
        )
    return True


class _Search:
    """What was found of these requests so far."""

    def __init__(self, wanted: Sequence[Request]) -> None:
        self.found: list[OperationRef | InvalidArgument | None] = [None] * len(wanted)
        self._left: dict[str, list[tuple[int, Request]]] = {}
        for n, one in enumerate(wanted):
            self._left.setdefault(one.request_id, []).append((n, one))

    def over(self, record: Spec | History, ref: OperationRef) -> bool:
        """Take this operation into account; True once nothing is left to look for."""
        for n, one in self._left.pop(record.request_id, ()):
            try:
                is_of(record, one, ref)
                self.found[n] = ref
            except InvalidArgument as error:
                self.found[n] = error
        return not self._left


async def find_earlier(
    etcd: EtcdClient, keys: Keys, wanted: Sequence[Request]
) -> list[OperationRef | InvalidArgument | None]:
    """For each of these requests, of one type on one table, the operation that it has started before, if any; an
    InvalidArgument where its id was used for another request.

    It is looked for after the counters were read, and the start is guarded by them: so what starts in between makes
    the start fail. Active ones first, then the history, since an operation goes from there to here.
    """
    table, type_name = wanted[0].table, wanted[0].type
    search = _Search(wanted)
    active = catalog.refs(keys, await _active(etcd, keys, table, type_name))
    for n in range(0, len(active), 100):
        page = active[n : n + 100]
        for ref, answer in zip(page, await etcd.read(*(Get(keys.of(ref, "spec")) for ref in page)), strict=True):
            if answer.kv is not None and search.over(read(Spec.decode, answer.kv), ref):
                return search.found
    listing = await etcd.list(*catalog.type_family(keys, K.HISTORY, table, type_name), page=100)
    for kv, record in readable(etcd, History.decode, (kv for kv in listing.kvs if catalog.refs(keys, [kv]))):
        if search.over(record, catalog.refs(keys, [kv])[0]):
            break
    return search.found


async def running_refs(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> list[OperationRef]:
    """The operations of a type that run on a table (those that only wait or are being cleaned up are left out)."""
    idle = (Phase.WAITING.encode(), Phase.CLEANING.encode())
    return catalog.refs(keys, [kv for kv in await _active(etcd, keys, table, type_name) if kv.value not in idle])


async def _active(etcd: EtcdClient, keys: Keys, table: str, type_name: str) -> list[KeyValue]:
    """Gates and pending keys at one revision: an operation moves between the two, and always has one of them."""
    ranges = (catalog.type_family(keys, family, table, type_name) for family in (K.OPEN, K.PENDING))
    return [kv for found in await etcd.read(*(Get(start, end) for start, end in ranges)) for kv in found.kvs]
