"""Counts the open operations of a submitter, and their jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from distop.errors import UnreadableRecord
from distop.protocol.frozen import frozen
from distop.protocol.plan import Plan
from distop.protocol.record_reading import read
from distop.protocol.records import Spec
from distop.protocol.txn import Get
from distop.services.inspection.survey import open_operations
from distop.services.readable_records import left_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient

_AT_ONCE = 100
"""Maximum reads in one transaction (T1)."""


@frozen
class OpenWork:
    """The open operations of a submitter.

    ``jobs``: of their plans; an operation without a plan counts as its named partitions, or one job.
    """

    operations: int
    jobs: int
    request_ids: frozenset[str]


@frozen
class _Known:
    submitter: str
    request_id: str
    partitions: int


class OpenWorkReader:
    """Reads the open operations of submitters. It remembers what never changes of each."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys
        self._known: dict[OperationRef, _Known] = {}
        self._planned: dict[OperationRef, int] = {}
        self._reading = asyncio.Lock()

    async def read(self, submitter: str) -> OpenWork:
        """The open operations of a submitter: at least all whose start was answered before."""
        async with self._reading:
            listed = await open_operations(self._etcd, self._keys)
            for memory in (self._known, self._planned):
                for ref in memory.keys() - listed:
                    del memory[ref]
            for ref, kv in await self._read((ref for ref in listed if ref not in self._known), "spec"):
                try:
                    spec = read(Spec.decode, kv)
                except UnreadableRecord as error:
                    left_out(self._etcd, error)
                    continue
                self._known[ref] = _Known(spec.submitter, spec.request_id, len(spec.partitions or ()) or 1)
            own = {ref: known for ref, known in self._known.items() if known.submitter == submitter}
            for ref, kv in await self._read((ref for ref in own if ref not in self._planned), "plan"):
                self._planned[ref] = read(Plan.decode, kv).count
            jobs = sum(self._planned.get(ref, known.partitions) for ref, known in own.items())
            return OpenWork(len(own), jobs, frozenset(one.request_id for one in own.values()))

    async def _read(self, refs: Iterable[OperationRef], name: str) -> list[tuple[OperationRef, KeyValue]]:
        """The existing keys of this name."""
        wanted, found = list(refs), []
        for n in range(0, len(wanted), _AT_ONCE):
            page = wanted[n : n + _AT_ONCE]
            answers = await self._etcd.read(*(Get(self._keys.of(ref, name)) for ref in page))
            found += [(ref, one.kv) for ref, one in zip(page, answers, strict=True) if one.kv is not None]
        return found
