"""Which operation of a series goes on: whoever wants to end a series knows one of it, which may have ended long ago."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.core.due import series_of
from distop.core.model import History, OperationRef, Spec
from distop.core.records import read
from distop.core.txn import Get
from distop.errors import NotAllowed, UnreadableRecord, no_operation
from distop.submission.earlier import active_refs

if TYPE_CHECKING:
    from distop.core.keys import Keys
    from distop.store.client import EtcdClient

_PAGE = 100


async def first_of(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> OperationRef:
    """The operation with which its series began. Where another one took its place, that one's.

    Raises NotFound, NotAllowed (it is of no series), UnreadableRecord.
    """
    while True:
        history, spec = await etcd.read(Get(keys.history(ref)), Get(keys.of(ref, "spec")))
        if history.kv is not None:
            record = read(History.decode, history.kv)
            if record.cancel is not None and record.cancel.replaced_by:
                ref = _alike(ref, record.cancel.replaced_by)
                continue
            first = record.series
        elif spec.kv is not None:
            first = series_of(read(Spec.decode, spec.kv), ref)
        else:
            raise no_operation(str(ref))
        if not first:
            raise NotAllowed(f"{ref} is of no series: it does not come again")
        return _alike(ref, first)


def _alike(ref: OperationRef, named: str) -> OperationRef:
    """The operation that a record of ``ref`` names as one of its series.

    Raises UnreadableRecord for one of another table or type: who may write the keys of one table would choose whose
    series ends.
    """
    found = OperationRef.parse(named)
    if (found.table, found.type) != (ref.table, ref.type):
        raise UnreadableRecord(f"the records of {ref} name {found}, of another table or type, as one of its series")
    return found


async def latest_of(etcd: EtcdClient, keys: Keys, first: OperationRef) -> OperationRef | None:
    """The last operation of a series that has not gone; None: the series has ended."""
    while True:
        # One of it is there as long as the series goes on: the next one is started before the last one goes.
        active = await active_refs(etcd, keys, first.table, first.type)
        refs = [ref for ref in reversed(active) if ref.instance >= first.instance]
        gone = False
        for n in range(0, len(refs), _PAGE):
            page = refs[n : n + _PAGE]
            for ref, one in zip(page, await etcd.read(*(Get(keys.of(ref, "spec")) for ref in page)), strict=True):
                gone = gone or one.kv is None
                if one.kv is not None and series_of(read(Spec.decode, one.kv), ref) == str(first):
                    return ref
        if not gone:
            return None
