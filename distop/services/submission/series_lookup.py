"""Finds the active operation of a series, from any of its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.decide.due_operations import series_of
from distop.errors import NotAllowed, UnreadableRecord, no_operation
from distop.protocol.record_reading import of_its_kind, read
from distop.protocol.records import History, OperationRef, Spec
from distop.protocol.txn import Get
from distop.services.submission.idempotency import active_refs

if TYPE_CHECKING:
    from distop.protocol.keys import Keys
    from distop.store.client import EtcdClient

_PAGE = 100


async def first_of(etcd: EtcdClient, keys: Keys, ref: OperationRef) -> OperationRef:
    """The first operation of the series, or the one that replaced it.

    Raises NotFound, NotAllowed (not part of a series), UnreadableRecord.
    """
    seen = {ref}
    while True:
        history, spec = await etcd.read(Get(keys.history(ref)), Get(keys.of(ref, "spec")))
        if history.kv is not None:
            record = read(History.decode, history.kv)
            if record.cancel is not None and record.cancel.replaced_by:
                ref = of_its_kind(OperationRef.parse(record.cancel.replaced_by), ref.table, ref.type, history.kv.key)
                if ref in seen:
                    raise UnreadableRecord(
                        f"the record at {history.kv.key} is inconsistent: {ref} and its operation replaced each other"
                    )
                seen.add(ref)
                continue
            first = record.series
        elif spec.kv is not None:
            first = series_of(read(Spec.decode, spec.kv), ref)
        else:
            raise no_operation(str(ref))
        if not first:
            raise NotAllowed(f"{ref} is not part of a series")
        key = history.kv.key if history.kv is not None else keys.of(ref, "spec")
        return of_its_kind(OperationRef.parse(first), ref.table, ref.type, key)


async def latest_of(etcd: EtcdClient, keys: Keys, first: OperationRef) -> OperationRef | None:
    """The last operation of a series that still exists; None: the series has ended."""
    without: set[OperationRef] = set()
    while True:
        # A series always has an existing operation: the next one is started before the previous one is deleted.
        active = await active_refs(etcd, keys, first.table, first.type)
        refs = [ref for ref in reversed(active) if ref.instance >= first.instance]
        gone: set[OperationRef] = set()
        for n in range(0, len(refs), _PAGE):
            page = refs[n : n + _PAGE]
            for ref, one in zip(page, await etcd.read(*(Get(keys.of(ref, "spec")) for ref in page)), strict=True):
                if one.kv is None:
                    gone.add(ref)
                elif series_of(read(Spec.decode, one.kv), ref) == str(first):
                    return ref
        # Those that are listed again have never had a spec: somebody has written their gates.
        if gone <= without:
            return None
        without |= gone
