"""Queries the history of operations: filtered, newest first, one page at a time (C31).

However many records there are, memory holds one page of results and a bounded number of keys. Records are ordered by
the revision of their one write, which does not depend on clocks. Keys are not ordered by time, so each page lists all
keys of its range without their values, in pages pinned to one revision (R2). The records are then read newest first
until enough of them match.

A page token is the place of the last record in that order. Records never change, so the next page neither skips nor
repeats a record, whatever ends or is pruned in between.

Also lists the recorded actions on tables and executors.
"""

from __future__ import annotations

import contextlib
import heapq
from typing import TYPE_CHECKING, Any

from distop.errors import Compacted, InvalidArgument
from distop.protocol import keys as K
from distop.protocol import table_registry
from distop.protocol import user_actions as a
from distop.protocol.records import History
from distop.protocol.txn import Get
from distop.services.inspection.history_filters import page_token
from distop.services.operation_results import OperationResult
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue
    from distop.services.inspection.history_filters import Query, RecordPlace
    from distop.store.client import EtcdClient


WINDOW = 50_000
"""Keys in memory at once when matching needs the records. With more keys than that, the range is listed again."""
SPARE = 10
"""Keys read beyond the limit when matching needs the keys alone, to replace records that cannot be read."""
PAGE = 100
"""Records in one read: each has up to a megabyte, and most have a kilobyte."""


class HistoryPage(list[OperationResult]):
    """Results, newest first. ``after``: the token of the next page, with older results; None on the last page."""

    def __init__(self, results: Sequence[OperationResult] = (), after: str | None = None) -> None:
        super().__init__(results)
        self.after = after


async def ask(etcd: EtcdClient, keys: Keys, wanted: Query) -> HistoryPage:
    """One page of matching results."""
    if wanted.ref is not None and wanted.table not in (None, wanted.ref.table):
        return HistoryPage()
    found: list[OperationResult] = []
    before, size = wanted.before, wanted.limit + SPARE if wanted.by_key else WINDOW
    while True:
        places = await _newest(etcd, keys, wanted, before, size)
        for n in range(0, len(places), PAGE):
            page = places[n : n + PAGE]
            answers = await etcd.read(*(Get(key) for _, key in page))
            records = readable(etcd, History.decode, (answer.kv for answer in answers if answer.kv is not None))
            for kv, record in records:
                if wanted.fits_record(record):
                    found.append(OperationResult.of(record))
                    if len(found) == wanted.limit:
                        last = (kv.mod_revision, kv.key) == places[-1] and len(places) < size
                        ref = keys.parse(kv.key).ref
                        assert ref is not None
                        return HistoryPage(found, None if last else page_token(ref, kv.mod_revision))
            if records and all(wanted.long_past(record) for _, record in records):
                return HistoryPage(found)
        if len(places) < size:
            return HistoryPage(found)
        before = places[-1]


async def _newest(
    etcd: EtcdClient, keys: Keys, wanted: Query, before: RecordPlace | None, size: int
) -> list[RecordPlace]:
    """The places of the newest ``size`` records whose keys match, older than ``before``."""
    first, after = _range(keys, wanted)
    while True:
        heap: list[RecordPlace] = []
        try:
            async for page in etcd.pages(first, after, keys_only=True):
                for kv in page:
                    place = (kv.mod_revision, kv.key)
                    if (before is not None and place >= before) or (len(heap) == size and place <= heap[0]):
                        continue
                    refs = table_registry.refs(keys, [kv])
                    if refs and wanted.fits(refs[0]):
                        (heapq.heappush if len(heap) < size else heapq.heappushpop)(heap, place)
            return sorted(heap, reverse=True)
        except Compacted:
            continue  # during the listing: a listing at a newer revision is as good


def _range(keys: Keys, wanted: Query) -> tuple[str, str]:
    if wanted.ref is not None:
        return keys.history(wanted.ref), keys.history(wanted.ref) + "\0"
    if wanted.table is not None and wanted.type is not None:
        return table_registry.type_family(keys, K.HISTORY, wanted.table, wanted.type)
    return table_registry.table_family(keys, K.HISTORY, wanted.table)


def newest_first(found: Iterable[tuple[KeyValue, a.Actions]], keys: Keys) -> list[dict[str, Any]]:
    """The actions of these records, newest first, by the clocks of the users who acted."""
    listed: list[dict[str, Any]] = []
    for kv, actions in found:
        with contextlib.suppress(InvalidArgument):  # no key of ours
            key = keys.parse(kv.key)
            kind, name = ("executor", key.id) if key.family == K.NODE_DRAIN else ("table", key.table)
            listed += reversed(a.entries(kind, name, actions))
    return sorted(listed, key=lambda one: str(one["time"]), reverse=True)
