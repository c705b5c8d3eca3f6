"""Bounds the history: of each table the newest records are kept, and none younger than an hour is deleted.

The hour is what makes the request id in a record good for telling whether an unanswered start had won.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distop.core import transitions as t
from distop.core.decide import parse_time
from distop.core.model import History, OperationRef

if TYPE_CHECKING:
    from distop.incarnation import Context

KEPT_AT_LEAST = 3600.0
"""Seconds."""
PRUNE_EVERY = 60.0
PAGE = 100


class HistoryPruner:
    """Deletes a table's oldest history records beyond the limit, at most once a minute per table."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._last: dict[str, float] = {}

    async def prune(self, table: str) -> None:
        """Look at one table, and delete what is beyond the limit."""
        now = time.monotonic()
        if now - self._last.get(table, -PRUNE_EVERY) < PRUNE_EVERY:
            return
        self._last[table] = now
        ctx = self._ctx
        start, end = ctx.keys.history_range(table)
        if await ctx.client.count(start, end) <= ctx.config.history_limit:
            return
        listing = await ctx.client.list(start, end)
        records: list[tuple[int, OperationRef, float]] = []
        for kv in listing.kvs:
            key = ctx.keys.parse(kv.key)
            if key.ref is not None and key.chunk < 0:
                records.append((kv.mod_revision, key.ref, parse_time(History.decode(kv.value).finished)))
        excess = sorted(records)[: max(0, len(records) - ctx.config.history_limit)]
        oldest = time.time() - KEPT_AT_LEAST
        old = [(ref, mod) for mod, ref, finished in excess if finished < oldest]
        for n in range(0, len(old), PAGE):
            await ctx.commit(t.forget(ctx.keys, old[n : n + PAGE]))
