"""Bounds the history: of each table the newest records are kept, and none younger than an hour is deleted.

The hour is what makes the request id in a record good for telling whether an unanswered start had won.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.core import finishing as f
from distop.core.codec import UNREADABLE
from distop.core.decide import parse_time
from distop.core.model import History
from distop.core.txn import Get

if TYPE_CHECKING:
    from distop.core.model import OperationRef
    from distop.node.context import Context

KEPT_AT_LEAST = 3600.0
"""Seconds."""


class HistoryPruner:
    """Deletes a table's oldest history records beyond the limit, seldom."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
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
        records: list[tuple[int, OperationRef]] = []
        for kv in listing.kvs:
            key = ctx.keys.parse(kv.key)
            if key.ref is not None and not key.name:
                records.append((kv.mod_revision, key.ref))
        excess = sorted(records)[: max(0, len(records) - ctx.config.history_limit)]
        oldest = time.time() - KEPT_AT_LEAST
        for n in range(0, len(excess), ctx.limits.pruned):
            page = excess[n : n + ctx.limits.pruned]
            found = await ctx.client.read(*(Get(ctx.keys.history(ref)) for _, ref in page))
            finished = [_finished(answer.kv.value) if answer.kv is not None else None for answer in found]
            old = [(ref, mod) for (mod, ref), at in zip(page, finished, strict=True) if at is not None and at < oldest]
            if old:
                await ctx.commit(f.forget(ctx.keys, old))
            if any(at is not None and at >= oldest for at in finished):
                return  # what follows is younger still


def _finished(value: bytes) -> float | None:
    """When a record's operation finished; None where it cannot be read: such a one is left alone."""
    try:
        return parse_time(History.decode(value).finished)
    except UNREADABLE:
        return None
