"""Evaluates policies: elections for tables, and a timer for the next look at each.

A table has one evaluator, as a type on a table has one coordinator (``daemon.elections``). There may be ten thousand
tables, so a table has no task of its own: a heap says which table is looked at next.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import TYPE_CHECKING

from distop.clock import time
from distop.daemon.evaluator.table_look import NextLook, TableLook
from distop.decide import work_shares
from distop.decide.policy_view import PolicyView
from distop.errors import DistopError, MalformedRequest, SessionLost, describe
from distop.protocol import policy as p
from distop.protocol.executor_nodes import refusal
from distop.protocol.txn import GetResult
from distop.store.watch import Feed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distop.daemon.incarnation_context import Context
    from distop.store.watch import Batch

LOOKS_AT_ONCE = 4
"""Maximum number of tables that are looked at concurrently."""
ELECTIONS_AT_ONCE = 8
RACE_DELAY = 0.05
"""Seconds between the attempts of two candidates."""
VERSIONS_A_SECOND = 4.0
"""Maximum number of tables a second that this node looks at again by polling, as for a new version."""
FIRST_LOOKS_A_SECOND = 20.0
"""Maximum number of tables a second that this node looks at after it was elected, if no event waits."""
LONGEST_TIMER = 30.0
"""Maximum seconds of a timer: the wall clock, by which policies are due, may be set."""
WATCH = "policies"
_WRITE = "evaluation"
"""The name in the node record of a rejected write of an evaluation."""


class Slots:
    """Takes times apart from each other, so that very many tables are not all looked at at once."""

    def __init__(self, a_second: float) -> None:
        self._apart = 1.0 / a_second
        self._last = 0.0

    def take(self, least: float) -> float:
        """Take the next free time; returns the seconds until then, at least ``least``."""
        now = time.monotonic()
        self._last = max(now + least, self._last + self._apart)
        return self._last - now


class PolledTables:
    """The tables that are looked at again after a poll, and not more of them a second than allowed.

    A table waits at most once. So looks for other reasons, and tables that left, take nothing from the others.
    """

    def __init__(self, after: float, a_second: float) -> None:
        self._after, self._apart = after, 1.0 / a_second
        self._due: dict[str, float] = {}
        """Table → when it may be looked at (``time.monotonic``), the first one first."""
        self._free = 0.0
        """When the next one may be looked at."""

    def add(self, table: str) -> None:
        """Let a table wait from now on."""
        self.discard(table)
        self._due[table] = time.monotonic() + self._after

    def discard(self, table: str) -> None:
        """Let a table not wait any more."""
        self._due.pop(table, None)

    @property
    def left(self) -> float:
        """Seconds until :meth:`take` returns a table; infinite if none waits."""
        first = next(iter(self._due.values()), math.inf)
        return max(0.0, max(first, self._free) - time.monotonic())

    def take(self) -> str:
        """Take the table that waits longest, if it may be looked at; "": none may."""
        if self.left > 0.0:
            return ""
        table = next(iter(self._due))
        del self._due[table]
        self._free = time.monotonic() + self._apart
        return table


class Evaluator:
    """The evaluations of one incarnation. It does nothing before the first policy of the namespace is made."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._view = PolicyView(ctx.keys)
        self._feed: Feed | None = None
        self._watching: asyncio.Task[None] | None = None
        self._mine: dict[str, int] = {}
        """Table → the fence of my election."""
        self._confirmed: set[str] = set()
        """Tables whose election the view has shown."""
        self._wanted: dict[str, float] = {}
        """Tables to be elected for, with the time (``time.monotonic``) when that was decided."""
        self._electing: set[asyncio.Task[None]] = set()
        self._next: dict[str, float] = {}
        """Table → the time of its next look (``time.time``)."""
        self._heap: list[tuple[float, str]] = []
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        """Tables that changed while they were looked at."""
        self._rejected: set[str] = set()
        """Tables with an evaluation that etcd rejects as invalid."""
        self._first_looks = Slots(FIRST_LOOKS_A_SECOND)
        self._polled = PolledTables(ctx.config.poll, VERSIONS_A_SECOND)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether it starts an operation, or may do so at any moment."""
        return bool(self._looking)

    @property
    def tables(self) -> int:
        """The number of tables for which it is elected."""
        return len(self._mine)

    def marked(self) -> None:
        """Watch policies from now on: there are some in this namespace."""
        if self._feed is not None or self._closed:
            return
        ctx = self._ctx
        self._feed = Feed(
            ctx.client,
            *ctx.keys.policies_watched(),
            self._fold,
            relist_every=ctx.config.poll,
            name=WATCH,
            gather=self._view.listing,
        )
        self._feed.begin()
        self._watching = asyncio.ensure_future(self._watch(self._feed))

    async def _watch(self, feed: Feed) -> None:
        """Let the incarnation end if the watch fails for good, as it does if another watch fails."""
        try:
            await feed.wait()
        except Exception as error:
            if not self._ctx.lost.done():
                self._ctx.lost.set_exception(error)

    def nodes_changed(self) -> None:
        """Examine all tables: nodes came, went, or drain."""
        if self._feed is not None:
            self._examine(self._all_tables())

    def close(self) -> None:
        """Stop at once. Another node is elected when this one's node key is gone."""
        self._closed = True
        for task in (*self._electing, *self._looking.values()):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def closed(self) -> None:
        """Wait until everything has stopped, after :meth:`close`."""
        await asyncio.gather(*self._electing, *self._looking.values(), return_exceptions=True)
        if self._feed is not None:
            await self._feed.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # ------------------------------------------------------------------- view

    def _fold(self, batch: Batch) -> None:
        if batch.listing:
            changed, tables = self._view.take(batch.gathered), self._all_tables()
        else:
            changed, elections = self._view.apply(batch.events)
            tables = changed | elections
        if self._closed:
            return
        self._examine(tables)
        for table in changed & self._mine.keys():
            self._look_soon(table)

    def _all_tables(self) -> set[str]:
        """The tables with policies or an election."""
        return {*self._view.tables(), *self._view.evaluators, *self._mine}

    def _examine(self, tables: Iterable[str]) -> None:
        """Take part in elections, and resign from those that are not needed."""
        for table in tables:
            held, fence = self._view.evaluators.get(table), self._mine.get(table)
            if fence is not None:
                if held is not None and held.mod == fence:
                    self._confirmed.add(table)
                if (held is None and table in self._confirmed) or (held is not None and held.mod > fence):
                    self._drop(table)
                    fence = None
            named = held is not None and held.value == self._ctx.incarnation
            if self._needed(table):
                changes = fence is None and (held is None or named or not self._ctx.cluster.live(held.value))
            else:
                changes = fence is not None or named  # named only: an earlier resignation failed
            if changes:
                self._wanted.setdefault(table, time.monotonic())
        while self._wanted and len(self._electing) < ELECTIONS_AT_ONCE and not self._closed:
            task = asyncio.ensure_future(self._elect_all())
            self._electing.add(task)
            task.add_done_callback(self._electing.discard)
            if len(self._electing) >= len(self._wanted):
                break

    def _here(self, table: str) -> bool:
        """Whether this node may evaluate the table."""
        return not self._ctx.draining and not refusal(self._ctx.config.serves, None, (table,))

    def _needed(self, table: str) -> bool:
        """Whether this node may evaluate the table, and the table has policies."""
        return self._here(table) and self._view.has(table)

    # -------------------------------------------------------------- elections

    async def _elect_all(self) -> None:
        """Take part in the elections that are wanted, or resign, one after the other."""
        while self._wanted and not self._closed:
            table, since = next(iter(self._wanted.items()))
            del self._wanted[table]
            try:
                if self._needed(table):
                    await self._elect(table, since)
                else:
                    await self._resign(table)
            except SessionLost:
                return
            except DistopError as error:
                message = "Election of the evaluator of table %s failed; retrying at the next poll: %s"
                self._ctx.log.warning(message, table, describe(error))
            except Exception:
                message = "Unexpected error in the election of the evaluator of table %s; retrying at the next poll"
                self._ctx.log.exception(message, table)

    async def _elect(self, table: str, since: float) -> None:
        ctx, nodes = self._ctx, self._ctx.cluster.nodes
        able = [
            inc
            for inc, node in nodes.items()
            if node.executor not in ctx.cluster.drains and not refusal(node.serves, None, (table,))
        ]
        turn = min(work_shares.turn(able, ctx.incarnation, table), 20)
        if (left := since + turn * RACE_DELAY - time.monotonic()) > 0:
            await asyncio.sleep(left)
        held = self._view.evaluators.get(table)
        if not self._needed(table) or table in self._mine:
            return
        if held is not None and held.value == ctx.incarnation:
            self._confirmed.add(table)  # a resignation may still delete it
            self._won(table, held.mod)  # an election of mine whose answer was lost
            return
        if held is not None and ctx.cluster.live(held.value):
            return
        seen, holder = (held.mod, held.value) if held is not None else (0, "")
        result = await ctx.commit(p.elect(ctx.keys, table, ctx.incarnation, seen, holder))
        fence = result.revision if result.succeeded else 0
        found = result.responses[0] if result.responses else None
        if not fence and isinstance(found, GetResult) and found.kv is not None:
            fence = found.kv.mod_revision if found.kv.value.decode(errors="replace") == ctx.incarnation else 0
        if fence:
            self._won(table, fence)

    async def _resign(self, table: str) -> None:
        fence, held = self._mine.get(table, 0), self._view.evaluators.get(table)
        if not fence and held is not None and held.value == self._ctx.incarnation:
            fence = held.mod
        self._drop(table)
        if fence:
            await self._ctx.commit(p.resign(self._ctx.keys, table, fence))

    def _won(self, table: str, fence: int) -> None:
        self._mine[table] = fence
        if self._view.waits(table):
            self._look_soon(table)
        else:
            self._look_at(table, time.time() + self._first_looks.take(0.0))

    def _drop(self, table: str) -> None:
        self._mine.pop(table, None)
        self._confirmed.discard(table)
        self._next.pop(table, None)
        self._polled.discard(table)
        if (task := self._looking.get(table)) is not None:
            task.cancel()

    # ------------------------------------------------------------------ looks

    def _look_soon(self, table: str) -> None:
        if table in self._looking:
            self._again.add(table)
        else:
            self._look_at(table, 0.0)

    def _look_at(self, table: str, when: float) -> None:
        """Plan the next look at a table (``time.time``)."""
        if math.isinf(when):
            self._next.pop(table, None)
            return
        self._next[table] = when
        heapq.heappush(self._heap, (when, table))
        if len(self._heap) > 2 * len(self._next) + 64:
            self._heap = [(at, name) for name, at in self._next.items()]
            heapq.heapify(self._heap)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._next.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # it was planned again, or is not mine any more
        if self._closed or len(self._looking) >= LOOKS_AT_ONCE:
            return
        left = min(self._polled.left, max(0.0, self._heap[0][0] - time.time()) if self._heap else math.inf)
        if math.isfinite(left):
            self._timer = asyncio.get_running_loop().call_later(min(left, LONGEST_TIMER), self._look_due)

    def _look_due(self) -> None:
        self._timer = None
        now = time.time()
        while self._heap and self._heap[0][0] <= now and len(self._looking) < LOOKS_AT_ONCE:
            when, table = heapq.heappop(self._heap)
            if self._next.get(table) == when and table not in self._looking and table in self._mine:
                self._begin(table)
        while len(self._looking) < LOOKS_AT_ONCE and (table := self._polled.take()):
            self._begin(table)
        self._set_timer()

    def _begin(self, table: str) -> None:
        """Begin a look at a table of mine that nobody looks at."""
        if not self._here(table):
            self._look_at(table, time.time() + self._ctx.config.poll)  # it resigns soon
            return
        self._next.pop(table, None)
        self._polled.discard(table)
        task = self._looking[table] = asyncio.ensure_future(self._look(table, self._mine[table]))
        task.add_done_callback(lambda _: self._looked(table))

    async def _look(self, table: str, fence: int) -> None:
        again = NextLook(polls=True)
        try:
            again = await TableLook(self._ctx, table, fence).look()
            if table in self._rejected:
                self._rejected.discard(table)
                self._ctx.rejected_writes.settled(f"policies {table}", _WRITE)
        except SessionLost:
            return
        except MalformedRequest as error:
            self._rejected.add(table)
            again = NextLook(time.time() + self._ctx.rejected_writes.refused(f"policies {table}", _WRITE, error))
        except DistopError as error:
            message = "Cannot evaluate the policies of table %s; retrying: %s"
            self._ctx.log.warning(message, table, describe(error))
        except Exception:
            self._ctx.log.exception("Unexpected error in the policies of table %s; retrying", table)
        if self._mine.get(table) == fence:
            if again.polls:
                self._polled.add(table)
            self._look_at(table, again.at)

    def _looked(self, table: str) -> None:
        self._looking.pop(table, None)
        if table in self._again:
            self._again.discard(table)
            if table in self._mine:
                self._look_at(table, 0.0)
        if not self._closed:
            self._set_timer()
            self._ctx.activity_changed()  # a drain may wait for the end of the look
