"""Sees to the holds that nobody sees to any more: of a graph whose caller died while it inserted it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distop.clock import time
from distop.core import catalog, waiting
from distop.core import keys as K
from distop.core.links import Hold, HoldState
from distop.core.model import Phase, Spec
from distop.core.records import read
from distop.core.txn import Delete, Get, Txn, unchanged
from distop.errors import UnreadableRecord, describe

if TYPE_CHECKING:
    from distop.node.context import Context

GRAPH_LIMIT = 60.0
"""Seconds for which the hold of a graph may stay as it is, by this node's own clock."""
DENIED_KEPT = 3_600.0
"""Seconds for which a denied hold stays: its absence would let begin what it held."""
_PAGE = 100
_GIVEN_UP = "the graph that it was part of was not inserted as a whole: its caller was not seen any more"


class HoldKeeper:
    """Looks at the holds with each poll. Any daemon may: each write compares what was seen."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._seen: dict[str, tuple[int, float]] = {}
        """Hold → its mod revision, and since when it is that."""

    async def look(self) -> None:
        """Raises SessionLost."""
        now, holds = time.monotonic(), dict(self._ctx.cluster.holds)
        self._seen = {id_: one for id_, one in self._seen.items() if id_ in holds}
        for id_, hold in holds.items():
            mod, since = self._seen.get(id_, (0, now))
            if mod != hold.mod:
                self._seen[id_] = hold.mod, now
            elif hold.value.kind == "graph" and hold.value.state is HoldState.HELD and now - since > GRAPH_LIMIT:
                denied = Hold("graph", HoldState.DENIED, _GIVEN_UP, hold.value.options)
                if (await self._ctx.commit(waiting.hold(self._ctx.keys, id_, denied, hold.mod))).succeeded:
                    self._ctx.log.warning("a graph is given up: nothing was seen of its caller for %d s", now - since)
            elif hold.value.state is HoldState.DENIED and now - since > DENIED_KEPT:
                await self._forget(id_, hold.mod)

    async def _forget(self, id_: str, mod: int) -> None:
        """Delete a denied hold that nothing is held by any more: no operation can come to it."""
        ctx = self._ctx
        try:
            if not await self._in_use(id_):
                key = ctx.keys.hold(id_)
                await ctx.commit(Txn((unchanged(key, mod),), (Delete(key),), (), "forget_hold"))
        except UnreadableRecord as error:
            ctx.log.warning("a denied hold is kept: %s", describe(error))

    async def _in_use(self, id_: str) -> bool:
        ctx = self._ctx
        listing = await ctx.client.list(*ctx.keys.family(K.PENDING))
        waits = catalog.refs(ctx.keys, [kv for kv in listing.kvs if kv.value == Phase.WAITING.encode()])
        for n in range(0, len(waits), _PAGE):
            page = waits[n : n + _PAGE]
            specs = await ctx.client.read(*(Get(ctx.keys.of(ref, "spec")) for ref in page))
            if any(one.kv is not None and read(Spec.decode, one.kv).hold == id_ for one in specs):
                return True
        return False
