"""What was: pages of the history of operations, and the list of what people did.

The history, asked: filtered, newest first, a page at a time (C31). However many records there are, a page holds as
many as were asked for, and a bounded number of their keys.

The newest come first by the revision of their one write, which no clock decides. The keys have no order by time, so
each page looks at all keys of its range, without their values, in pages that are pinned to one revision (R2); the
records are then read newest first, until enough fit. A page token is the place of the last record in that order.
Records never change, so whoever goes on from it neither misses one nor sees one twice, whatever ends or is forgotten
meanwhile.

What was done to tables and executors, as a list.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import json
from typing import TYPE_CHECKING, Any

from distop.errors import Compacted, InvalidArgument
from distop.protocol import keys as K
from distop.protocol import table_registry
from distop.protocol import user_actions as a
from distop.protocol.frozen import frozen
from distop.protocol.json_codec import parse_time
from distop.protocol.operation_labels import has
from distop.protocol.operation_labels import labels as check_labels
from distop.protocol.records import History, OperationRef, State
from distop.protocol.texts import shown
from distop.protocol.txn import Get
from distop.services.inspection import filters
from distop.services.operation_results import OperationResult
from distop.services.readable_records import readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.txn import KeyValue
    from distop.store.client import EtcdClient


WINDOW = 50_000
"""Keys that are kept in memory at once, where only the records tell whether they fit: so many more, another look."""
_SPARE = 10
"""Keys beyond the limit that are kept where the keys tell it: a record that cannot be read is left out."""
_PAGE = 100
"""Records in one read: each has up to a megabyte, and most have a kilobyte."""
CLOCKS = 3600.0
"""Seconds by which the clocks of two executors may differ, for a query that ends at a time: the search for older
records ends at the first page of which all are older than ``since`` by so much.
"""

Place = tuple[int, str]
"""Of a record in the order: its mod revision, and its key, since operations that ended together have the same one."""


class HistoryPage(list[OperationResult]):
    """Results, the newest first. ``after``: the token of the next page, of older ones; None where there is none."""

    def __init__(self, results: Sequence[OperationResult] = (), after: str | None = None) -> None:
        super().__init__(results)
        self.after = after


@frozen
class Query:
    """What is asked for; None: anything. ``since`` and ``until``: when it finished, the first moment included, the last
    one not, in seconds since the epoch by the clock of the executor that finished it.
    """

    table: str | None = None
    type: str | None = None
    ref: OperationRef | None = None
    states: frozenset[State] | None = None
    since: float | None = None
    until: float | None = None
    labels: Mapping[str, str] | None = None
    request_id: str | None = None
    limit: int = 100
    before: Place | None = None
    alarms: bool = False
    """Those alone whose record has an alarm."""

    @property
    def by_key(self) -> bool:
        """The keys alone tell what fits."""
        return (
            not (self.labels or self.states or self.request_id or self.alarms)
            and self.since is None
            and self.until is None
        )

    def fits(self, ref: OperationRef) -> bool:
        return self.type in (None, ref.type) and self.ref in (None, ref)

    def fits_record(self, record: History) -> bool:
        finished = parse_time(record.finished)
        return (
            (self.states is None or record.state in self.states)
            and (self.since is None or finished >= self.since)
            and (self.until is None or finished < self.until)
            and (self.request_id is None or record.request_id == self.request_id)
            and (not self.alarms or record.alarm != "")
            and has(record.labels, self.labels or {})
        )

    def long_past(self, record: History) -> bool:
        """Nothing older needs to be looked for, but for what clocks are wrong by."""
        return self.since is not None and parse_time(record.finished) < self.since - CLOCKS


def query(
    keys: Keys,
    *,
    table: Any,
    type_name: Any,
    op: Any,
    states: Any,
    since: Any,
    until: Any,
    labels: Any,
    request_id: Any,
    limit: Any,
    after: Any,
    alarms: bool = False,
) -> Query:
    """What a caller asks for, checked. Raises InvalidArgument."""
    if op is not None and not isinstance(op, str | OperationRef):
        raise InvalidArgument(f"an operation is named by a text, not {shown(op)}")
    ref = OperationRef.parse(op) if isinstance(op, str) else op
    if ref is not None:
        keys.history(ref)  # raises for a name that no key has
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidArgument(f"the request id must be a text, not {shown(request_id)}")
    wanted = Query(
        filters.table_of(table),
        filters.type_of(type_name),
        ref,
        filters.states_of(states, [state for state in State if state.terminal], "an operation that has ended"),
        filters.moment_of(since, "since"),
        filters.moment_of(until, "until"),
        check_labels(labels),
        request_id,
        filters.limit_of(limit),
        _place(keys, after),
        alarms,
    )
    if wanted.since is not None and wanted.until is not None and wanted.since >= wanted.until:
        raise InvalidArgument("since must be before until: nothing ends at no time")
    return wanted


def _token(ref: OperationRef, mod: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([mod, str(ref)], separators=(",", ":")).encode()).decode().rstrip("=")


def _place(keys: Keys, token: Any) -> Place | None:
    if token is None:
        return None
    try:
        mod, op = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
        if type(mod) is not int or mod < 1:
            raise ValueError(mod)
        return mod, keys.history(OperationRef.parse(op))
    except (ValueError, TypeError, AttributeError, RecursionError, InvalidArgument):
        raise InvalidArgument(
            f"{shown(token, 80)} is no page token: give what a page of the history has as `after`"
        ) from None


async def ask(etcd: EtcdClient, keys: Keys, wanted: Query) -> HistoryPage:
    """One page of what is asked for."""
    if wanted.ref is not None and wanted.table not in (None, wanted.ref.table):
        return HistoryPage()
    found: list[OperationResult] = []
    before, size = wanted.before, wanted.limit + _SPARE if wanted.by_key else WINDOW
    while True:
        places = await _newest(etcd, keys, wanted, before, size)
        for n in range(0, len(places), _PAGE):
            page = places[n : n + _PAGE]
            answers = await etcd.read(*(Get(key) for _, key in page))
            records = readable(etcd, History.decode, (answer.kv for answer in answers if answer.kv is not None))
            for kv, record in records:
                if wanted.fits_record(record):
                    found.append(OperationResult.of(record))
                    if len(found) == wanted.limit:
                        last = (kv.mod_revision, kv.key) == places[-1] and len(places) < size
                        ref = keys.parse(kv.key).ref
                        assert ref is not None
                        return HistoryPage(found, None if last else _token(ref, kv.mod_revision))
            if records and all(wanted.long_past(record) for _, record in records):
                return HistoryPage(found)
        if len(places) < size:
            return HistoryPage(found)
        before = places[-1]


async def _newest(etcd: EtcdClient, keys: Keys, wanted: Query, before: Place | None, size: int) -> list[Place]:
    """The places of the newest records whose keys fit, from the one ``before`` on: so many at most."""
    first, after = _range(keys, wanted)
    while True:
        heap: list[Place] = []
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
            continue  # while it was listed: what is there now is as good


def _range(keys: Keys, wanted: Query) -> tuple[str, str]:
    if wanted.ref is not None:
        return keys.history(wanted.ref), keys.history(wanted.ref) + "\0"
    if wanted.table is not None and wanted.type is not None:
        return table_registry.type_family(keys, K.HISTORY, wanted.table, wanted.type)
    return table_registry.table_family(keys, K.HISTORY, wanted.table)


def newest_first(found: Iterable[tuple[KeyValue, a.Actions]], keys: Keys) -> list[dict[str, Any]]:
    """The actions of these records, by the times of those who acted."""
    listed: list[dict[str, Any]] = []
    for kv, actions in found:
        with contextlib.suppress(InvalidArgument):  # no key of ours
            key = keys.parse(kv.key)
            kind, name = ("executor", key.id) if key.family == K.NODE_DRAIN else ("table", key.table)
            listed += reversed(a.entries(kind, name, actions))
    return sorted(listed, key=lambda one: str(one["time"]), reverse=True)
