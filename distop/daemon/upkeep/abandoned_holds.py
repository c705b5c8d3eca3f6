"""Resolves abandoned holds: of a graph whose caller died during the insertion, and of unconfirmed prepared operations.

A hold keeps operations from starting until it is released or denied.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING

from distop.clock import time
from distop.daemon.upkeep.prepared_verification import Verifying
from distop.errors import MalformedRequest, UnreadableRecord, describe
from distop.protocol import keys as K
from distop.protocol import pending_operations, prepared_operations, table_registry, user_transaction
from distop.protocol.dependencies import GRAPH, Hold, HoldState, hold_named
from distop.protocol.record_reading import read
from distop.protocol.records import Phase, Spec
from distop.protocol.txn import Delete, Get, Txn, unchanged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Mapping

    from distop.daemon.incarnation_context import Context

GRAPH_LIMIT = 60.0
"""Seconds for which a graph's hold may be unchanged, by this node's own clock."""
FEW = 64
"""Number of outdated heap entries that are not worth a cleanup."""
AGAIN = 1.0
"""Seconds between two checks whether a verification has started or ended."""
_PAGE = 100
_WRITE = "deny or delete"
"""The name in the node record of a rejected write of a hold."""
_GIVEN_UP = "the graph of this operation was not inserted completely: its caller has not been seen since"


class HoldKeeper:
    """Checks the holds at each poll, and when the next prepared operation is due.

    Any daemon may do this: each write compares the revision that was read.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._seen: dict[str, tuple[int, float]] = {}
        """Hold → its mod revision, and the time when it was first seen."""
        self._verifying = Verifying(ctx)
        self._due: list[tuple[float, str, int]] = []
        """Heap of prepared holds: time when one may be due, by this node's clock, its id and its revision."""
        self._timer: asyncio.TimerHandle | None = None
        self._rejected: dict[str, float] = {}
        """Holds whose writes etcd rejects as invalid, with the time of the next attempt, by this node's clock."""
        self._closed = False

    def changed(self, ids: Collection[str] | None = None) -> None:
        """Handle changes of these holds (None: any hold): the age of a changed hold starts now."""
        now, holds = time.monotonic(), self._ctx.cluster.holds
        for id_ in self._seen.keys() | holds.keys() if ids is None else ids:
            hold = holds.get(id_)
            self._verifying.changed(id_)
            if hold is None:
                self._seen.pop(id_, None)
                self._settle(id_)
            elif self._seen.get(id_, (0, 0.0))[0] != hold.mod:
                self._seen[id_] = hold.mod, now
                self._settle(id_)
                if (
                    hold.value.state is HoldState.HELD
                    and (terms := prepared_operations.PreparedTerms.of(hold.value)) is not None
                ):
                    heapq.heappush(
                        self._due, (now + prepared_operations.due_after(terms, 0, asking=False), id_, hold.mod)
                    )
        if len(self._due) > 2 * len(holds) + FEW:  # most holds are confirmed long before they are due
            self._due = [one for one in self._due if self._seen.get(one[1], (0, 0.0))[0] == one[2]]
            heapq.heapify(self._due)
        self._set_timer(now)

    def close(self) -> None:
        """Stop at once."""
        self._closed = True
        self._verifying.close()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, now: float, least: float = 0.0) -> None:
        """Set the timer for the next prepared hold that may be due, but at least ``least`` seconds from now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due and not self._closed:
            pause = min(max(least, self._due[0][0] - now), prepared_operations.LONGEST_PAUSE)
            self._timer = asyncio.get_running_loop().call_later(pause, self._verify_due)

    def _verify_due(self) -> None:
        """Start the verifications of due holds, if it is this executor's turn; check again until they are written."""
        now, full = time.monotonic(), False
        while self._due and self._due[0][0] <= now and not full:
            due, id_, mod = heapq.heappop(self._due)
            hold, since = self._ctx.cluster.holds.get(id_), self._seen.get(id_, (0, now))[1]
            terms = prepared_operations.PreparedTerms.of(hold.value) if hold is not None and hold.mod == mod else None
            if terms is None:
                continue
            left = self._verifying.due(terms, now - since)
            full = left <= 0 and not self._verifying.begin(id_, terms, mod)
            if not full:  # otherwise it keeps its place: thousands may be due, and only a few are verified at once
                due = now + (min(left, prepared_operations.TURN) if left > 0 else AGAIN)
            heapq.heappush(self._due, (due, id_, mod))
        self._set_timer(now, AGAIN if full else 0.0)

    async def look(self) -> None:
        """Resolve old holds, each one separately. Raises SessionLost, and EtcdRejected unless a write is invalid."""
        self.changed()
        now = time.monotonic()
        old: dict[str, int] = {}
        for id_, hold in list(self._ctx.cluster.holds.items()):
            _, since = self._seen.get(id_, (0, now))
            age, state = now - since, hold.value.state
            if self._rejected.get(id_, now) > now:
                continue
            if hold.value.kind == GRAPH and state is HoldState.HELD and age > GRAPH_LIMIT:
                await self._write_one(id_, self._deny_graph(id_, hold.mod, age))
            elif state is not HoldState.HELD and age > self._ctx.limits.denied_kept:
                if hold.value.kind == user_transaction.KIND:  # no operation uses it
                    await self._write_one(id_, self._delete(id_, hold.mod))
                else:
                    old[id_] = hold.mod
        if old:
            await self._forget(old)

    async def _write_one(self, id_: str, write: Awaitable[None]) -> None:
        """Write one hold. If etcd rejects the write as invalid, report that; other holds are not affected."""
        try:
            await write
        except MalformedRequest as error:
            if id_ not in self._ctx.cluster.holds:
                return  # the hold is gone: nothing would remove a reported rejection of it
            pause = self._ctx.rejected_writes.refused(hold_named(id_), _WRITE, error)
            self._rejected[id_] = time.monotonic() + pause
        else:
            self._settle(id_)

    def _settle(self, id_: str) -> None:
        if self._rejected.pop(id_, None) is not None:
            self._ctx.rejected_writes.settled(hold_named(id_), _WRITE)

    async def _deny_graph(self, id_: str, mod: int, age: float) -> None:
        # A short new record: the old one with an additional text might exceed etcd's limit.
        denied = Hold(GRAPH, HoldState.DENIED, _GIVEN_UP)
        if (await self._ctx.commit(pending_operations.hold(self._ctx.keys, id_, denied, mod))).succeeded:
            self._ctx.log.warning("Cancelling an incomplete graph: its caller has not been seen for %d s", age)

    async def _forget(self, old: Mapping[str, int]) -> None:
        """Delete denied holds, and receipts of such, that no operation uses; no new operation can use them.

        The others are checked again after the same time: pending operations are read once for all of them, not at each
        poll.
        """
        ctx, now = self._ctx, time.monotonic()
        for id_, mod in old.items():
            self._seen[id_] = mod, now
        try:
            used = await self._in_use()
        except UnreadableRecord as error:
            ctx.log.warning("Cannot delete old holds; retrying later: %s", describe(error))
            return
        for id_, mod in old.items():
            if prepared_operations.held_as(id_) not in used:
                await self._write_one(id_, self._delete(id_, mod))

    async def _delete(self, id_: str, mod: int) -> None:
        key = self._ctx.keys.hold(id_)
        await self._ctx.commit(Txn((unchanged(key, mod),), (Delete(key),), (), "forget_hold"))

    async def _in_use(self) -> set[str]:
        """The holds that waiting operations use."""
        ctx, used = self._ctx, set[str]()
        listing = await ctx.client.list(*ctx.keys.family(K.PENDING))
        waits = table_registry.refs(ctx.keys, [kv for kv in listing.kvs if kv.value == Phase.WAITING.encode()])
        for n in range(0, len(waits), _PAGE):
            page = waits[n : n + _PAGE]
            specs = await ctx.client.read(*(Get(ctx.keys.of(ref, "spec")) for ref in page))
            used |= {read(Spec.decode, one.kv).hold for one in specs if one.kv is not None}
        return used
