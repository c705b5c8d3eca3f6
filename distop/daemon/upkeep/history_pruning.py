"""Bounds the history: of each table the newest records are kept, and of all tables those of a certain age at most where
one is configured; none younger than an hour is deleted.

The hour is what makes the request id in a record good for telling whether an unanswered start had won. It is measured
by etcd's leases (``protocol.age_watermarks``): the clock of this machine, or of the one that wrote the record, may be
wrong.
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
"""Seconds for putting a watermark: a full etcd rejects it, and nothing waits for it."""
OLDEST = 1_000
"""Records whose keys are kept in memory at once while those beyond an age are looked for."""
LOOK_EVERY = 600.0
"""Seconds between two looks for them."""

Record = tuple[int, "OperationRef"]
"""Its mod revision, by which records have their order: that of the one write."""


class HistoryPruner:
    """Deletes history records beyond the limit of their table, and those beyond the age, seldom."""

    def __init__(self, ctx: Context, on_forgotten: Callable[[Sequence[OperationRef]], None] = lambda _: None) -> None:
        self._ctx = ctx
        self._on_forgotten = on_forgotten
        """Told of operations whose records were deleted, or replaced since they were read."""
        self._last: dict[str, float] = {}
        """Tables that were looked at lately, and when."""

    async def prune(self, table: str) -> None:
        """Look at one table, and delete what is beyond the limit."""
        now = time.monotonic()
        self._last = {name: at for name, at in self._last.items() if now - at < self._ctx.limits.prune_every}
        if table in self._last:
            return
        self._last[table] = now
        ctx = self._ctx
        start, end = ctx.keys.history_range(table)
        if await ctx.client.count(start, end) <= ctx.config.history_limit:
            return
        # Oldest first, by the revision of their one write; the records themselves may be a megabyte each.
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
        """For ever: delete what is older than ``age`` seconds, of all tables, also those on which nothing ends any
        more. Of all live daemons one does it, the first by name whose clock agrees with etcd's. Raises SessionLost.
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
                    self._ctx.log.warning("old history records could not be deleted: %s", describe(error))
            await asyncio.sleep(min(LOOK_EVERY, age / 4))

    async def forget_older(self, age: float) -> None:
        """Delete records older than ``age`` seconds by this machine's clock.

        A bounded number of keys is in memory at once.
        """
        mark, seen = await self._watermark(), None
        while mark is not None:
            records = await self._oldest(seen)
            if not await self._forget(records, mark, time.time() - age) or len(records) < OLDEST:
                return
            seen = records[-1]

    async def _watermark(self) -> Watermark | None:
        """The newest old watermark: records written up to its revision may be deleted.

        Puts a new watermark where the newest one is no longer fresh.
        """
        client, keys = self._ctx.client, self._ctx.keys
        listing = await client.list(*keys.family(K.WATERMARK))
        known = watermarks(keys, listing.kvs)
        try:
            await self._put_watermark(known, listing.revision)
        except SessionLost:
            raise
        except DistopError as error:
            self._ctx.log.debug("Cannot put a history watermark; retrying at the next look: %s", describe(error))
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
            await client.revoke(lease)  # another coordinator put it first

    async def _oldest(self, seen: Record | None) -> list[Record]:
        """The oldest records, those behind ``seen``, oldest first."""
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
            return False  # `doctor` tells of it
        return parsed.ref is not None and not parsed.name

    async def _forget(self, records: Sequence[Record], mark: Watermark, oldest: float = math.inf) -> bool:
        """Delete records, oldest first, up to the watermark's revision and the time ``oldest``.

        False where a record is younger: the records after it are, too.
        """
        ctx = self._ctx
        past = [one for one in records if one[0] <= mark.upto]
        for n in range(0, len(past), ctx.limits.pruned):
            page = past[n : n + ctx.limits.pruned]
            found = await ctx.client.read(*(Get(ctx.keys.history(ref)) for _, ref in page))
            told = [_told(answer.kv.value) if answer.kv is not None else None for answer in found]
            old = [(ref, mod, one[1]) for (mod, ref), one in zip(page, told, strict=True) if one and one[0] < oldest]
            if old:
                await ctx.commit(f.forget(ctx.keys, old, mark))
                self._on_forgotten([ref for ref, _, _ in old])
            if any(one is not None and one[0] >= oldest for one in told):
                return False  # what follows is younger still
        return len(past) == len(records)


def _told(value: bytes) -> tuple[float, str] | None:
    """When a record's operation finished, and its request id; None where it cannot be read: such a one is left alone.
    """
    try:
        record = History.decode(value)
        return parse_time(record.finished), record.request_id
    except UNREADABLE:
        return None
