"""Deletes old history records: beyond the limit per table, and beyond the age limit if one is configured.

Records younger than an hour are kept, because their request ids show whether an unanswered start was applied. The hour
is measured with etcd's leases (``protocol.age_watermarks``): the clock of this machine, or of the one that wrote the
record, may be wrong.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import TYPE_CHECKING

from distop.clock import time
from distop.errors import Compacted, DistopError, InvalidArgument, SessionLost, describe
from distop.protocol import keys as K
from distop.protocol import operation_finish as f
from distop.protocol.age_watermarks import STEPS, newest_old, next_slot, put_watermark, watermarks
from distop.protocol.json_codec import UNREADABLE, parse_time
from distop.protocol.records import History
from distop.protocol.txn import Get
from distop.store.session import new_lease_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.age_watermarks import Watermark
    from distop.protocol.records import OperationRef

PUT_LIMIT = 5.0
"""Time-out in seconds for writing a watermark: a full etcd rejects it, and nothing waits for it."""
OLDEST = 1_000
"""Maximum number of record keys in memory during the deletion by age."""
LOOK_EVERY = 600.0
"""Seconds between two deletions by age."""

Record = tuple[int, "OperationRef"]
"""A record's mod revision and operation. A record is written once, so the revision gives the order."""


class HistoryPruner:
    """Deletes history records beyond the limit of their table, and beyond the age limit."""

    def __init__(self, ctx: Context, on_forgotten: Callable[[Sequence[OperationRef]], None] = lambda _: None) -> None:
        self._ctx = ctx
        self._on_forgotten = on_forgotten
        """Called with operations whose records were deleted, or replaced after they were read."""
        self._last: dict[str, float] = {}
        """Recently pruned tables, with the time."""

    async def prune(self, table: str) -> None:
        """Delete the oldest records of a table beyond the limit; does nothing if it was pruned recently."""
        now = time.monotonic()
        self._last = {name: at for name, at in self._last.items() if now - at < self._ctx.limits.prune_every}
        if table in self._last:
            return
        self._last[table] = now
        ctx = self._ctx
        start, end = ctx.keys.history_range(table)
        if await ctx.client.count(start, end) <= ctx.config.history_limit:
            return
        # Keys only: each record may have a megabyte.
        listing = await ctx.client.list(start, end, keys_only=True)
        records: list[Record] = []
        for kv in listing.kvs:
            key = ctx.keys.parse(kv.key)
            if key.ref is not None and not key.name:
                records.append((kv.mod_revision, key.ref))
        excess = sorted(records)[: max(0, len(records) - ctx.config.history_limit)]
        mark = await self._watermark()
        if mark is not None:
            await self._forget(excess, mark)

    async def keep_young(self, age: float) -> None:
        """Delete records older than ``age`` seconds, of all tables, repeatedly and without end. Raises SessionLost.

        One of the live daemons does it: the first by name whose clock agrees with etcd's.
        """
        while True:
            nodes = self._ctx.cluster.nodes
            right = (name for name, node in nodes.items() if not (node.clock or node.clock_unknown))
            if self._ctx.incarnation == min(right, default=""):
                try:
                    if await self._ctx.clock.agrees():
                        await self.forget_older(age)
                except SessionLost:
                    raise
                except DistopError as error:
                    self._ctx.log.warning("Cannot delete old history records; retrying later: %s", describe(error))
            await asyncio.sleep(min(LOOK_EVERY, age / 4))

    async def forget_older(self, age: float) -> None:
        """Delete records older than ``age`` seconds by this machine's clock, in bounded memory."""
        mark, seen = await self._watermark(), None
        while mark is not None:
            records = await self._oldest(seen)
            if not await self._forget(records, mark, time.time() - age) or len(records) < OLDEST:
                return
            seen = records[-1]

    async def _watermark(self) -> Watermark | None:
        """The newest watermark older than an hour: records written up to its revision may be deleted.

        Writes a new watermark if the newest one is no longer fresh.
        """
        client, keys = self._ctx.client, self._ctx.keys
        listing = await client.list(*keys.family(K.WATERMARK))
        known = watermarks(keys, listing.kvs)
        try:
            await self._put_watermark(known, listing.revision)
        except SessionLost:
            raise
        except DistopError as error:
            self._ctx.log.debug("Cannot write a history watermark; retrying later: %s", describe(error))
        return newest_old(known)

    async def _put_watermark(self, known: Sequence[Watermark], upto: int) -> None:
        client, kept = self._ctx.client, self._ctx.limits.history_kept
        if known and known[-1].lease:
            _, left = await client.time_to_live(known[-1].lease)
            if left > kept - kept / STEPS:
                return
        if (place := next_slot(known)) is None:
            return
        lease = new_lease_id()
        await client.grant(math.ceil(kept), lease, deadline=PUT_LIMIT)
        put = await self._ctx.commit(put_watermark(self._ctx.keys, place, upto, lease), deadline=PUT_LIMIT)
        if not put.succeeded and not put.repeated:
            await client.revoke(lease)  # another coordinator has written it

    async def _oldest(self, seen: Record | None) -> list[Record]:
        """The oldest records after ``seen``, oldest first, at most :data:`OLDEST`."""
        keys = self._ctx.keys
        while True:
            heap: list[tuple[int, str]] = []
            try:
                async for page in self._ctx.client.pages(*keys.family(K.HISTORY), keys_only=True):
                    for kv in page:
                        place = (-kv.mod_revision, kv.key)
                        if seen is not None and (kv.mod_revision, kv.key) <= (seen[0], keys.history(seen[1])):
                            continue
                        if (len(heap) == OLDEST and place <= heap[0]) or not self._is_record(kv.key):
                            continue
                        (heapq.heappush if len(heap) < OLDEST else heapq.heappushpop)(heap, place)
            except Compacted:
                continue
            found = [(-mod, keys.parse(key).ref) for mod, key in heap]
            return sorted((mod, ref) for mod, ref in found if ref is not None)

    def _is_record(self, key: str) -> bool:
        try:
            parsed = self._ctx.keys.parse(key)
        except InvalidArgument:
            return False  # `doctor` reports it
        return parsed.ref is not None and not parsed.name

    async def _forget(self, records: Sequence[Record], mark: Watermark, oldest: float = math.inf) -> bool:
        """Delete records, oldest first, up to the watermark's revision and the time ``oldest``.

        False if a record is younger: all later records are younger, too.
        """
        ctx = self._ctx
        past = [one for one in records if one[0] <= mark.upto]
        for n in range(0, len(past), ctx.limits.pruned):
            page = past[n : n + ctx.limits.pruned]
            found = await ctx.client.read(*(Get(ctx.keys.history(ref)) for _, ref in page))
            ends = [_end_and_request(answer.kv.value) if answer.kv is not None else None for answer in found]
            old = [(ref, mod, one[1]) for (mod, ref), one in zip(page, ends, strict=True) if one and one[0] < oldest]
            if old:
                await ctx.commit(f.forget(ctx.keys, old, mark))
                self._on_forgotten([ref for ref, _, _ in old])
            if any(one is not None and one[0] >= oldest for one in ends):
                return False  # all later records are younger
        return len(past) == len(records)


def _end_and_request(value: bytes) -> tuple[float, str] | None:
    """The end time of a record's operation and its request id; None for an unreadable record, which is kept."""
    try:
        record = History.decode(value)
        return parse_time(record.finished), record.request_id
    except UNREADABLE:
        return None
