"""Brings those that wait to begin: the operations of one type on one table whose time has come, that wait for nobody
any more, and that nothing which runs excludes.

Thousands may wait: each is looked at when something about it changes, a single timer stands for all times, and those
that are ready begin together, in transactions of many (``core.waiting``).
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING

from distop.backoff import Backoff
from distop.clock import time
from distop.core import catalog
from distop.core import waiting as w
from distop.core.codec import rfc3339
from distop.core.declaration import Declaration
from distop.core.due import At, Begin, Blocked, EndWaiting, Join, ended_waiting, fate
from distop.core.model import CLUSTER_TABLE, State
from distop.core.options import rank
from distop.core.plan import whole_plan
from distop.core.records import read
from distop.core.states import Stage
from distop.core.txn import Get
from distop.errors import DistopError, EtcdRejected, SessionLost, describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from distop.core.model import OperationRef
    from distop.core.txn import Compare, Txn
    from distop.core.view import OperationView, TypeView
    from distop.node.context import Context

EXCLUDED_PAUSE = (0.05, 2.0)
"""Seconds between two looks at what runs on the table, while that excludes those that are ready."""
TROUBLE_PAUSE = (0.5, 10.0)


class Waiters:
    """Those of one type on one table, under one election (``guard``). ``commit`` sends a transaction, waits until the
    coordinator's view has reached it, and tells whether it applied; ``reached`` is that waiting alone (W11).
    """

    def __init__(
        self,
        ctx: Context,
        guard: Compare,
        view: TypeView,
        commit: Callable[[Txn], Awaitable[bool]],
        reached: Callable[[int], Awaitable[None]],
    ) -> None:
        self._ctx = ctx
        self._guard = guard
        self._view = view
        self._commit = commit
        self._reached = reached
        self._log = ctx.log
        self._ready: dict[OperationRef, float] = {}
        """In the order in which they became ready, with the time of that (``time.monotonic``)."""
        self._urgent: set[OperationRef] = set()
        """Those of them that are more, or less, urgent than others."""
        self._over: dict[OperationRef, None] = {}
        """Those that end without having begun: joins, and what never will begin."""
        self._times: list[tuple[float, OperationRef]] = []
        self._due_at: dict[OperationRef, float] = {}
        """What stands in it of each: those that are looked at again are not added again."""
        self._held: dict[str, dict[OperationRef, None]] = {}
        """By their holds, in the order in which they came: so they become ready."""
        self._timer: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._apart = False
        """A group was refused, and nothing told why: the next ones are tried one by one, each another one first."""

    def look(self, refs: Iterable[OperationRef]) -> None:
        """Something about these changed; those that do not wait are left out."""
        now = time.time()
        for ref in refs:
            op = self._view.operations.get(ref)
            if op is not None and op.stage is Stage.WAITING:
                self._sort(op, now)
            else:
                self._ready.pop(ref, None)
                self._over.pop(ref, None)
        self._changed.set()
        self._set_timer(now)
        if (self._ready or self._over) and self._work is None and not self._closed:
            self._work = asyncio.ensure_future(self._run())

    def holds_changed(self) -> None:
        """Look at those that are held again, where their holds are gone, or denied."""
        holds = self._ctx.cluster.holds
        for id_ in [one for one in self._held if one not in holds or holds[one].value.state != "held"]:
            self.look(self._held.pop(id_))

    def forget_times(self) -> None:
        """All that wait are looked at anew."""
        self._times.clear()

    def close(self) -> None:
        """Stop at once."""
        self._closed = True
        for running in (self._timer, self._work):
            if running is not None:
                running.cancel()

    def _sort(self, op: OperationView, now: float) -> None:
        """Where it belongs by now: what was ready once may have come to wait for another one since."""
        since = self._ready.pop(op.ref, None)
        self._over.pop(op.ref, None)
        match fate(op, self._ctx.cluster.holds, now):
            case Begin():
                self._ready[op.ref] = since if since is not None else time.monotonic()
                (self._urgent.add if op.terms.options.priority else self._urgent.discard)(op.ref)
            case Join() | EndWaiting():
                self._over.setdefault(op.ref)
            case At(due) if self._due_at.get(op.ref) != due:
                self._due_at[op.ref] = due
                heapq.heappush(self._times, (due, op.ref))
            case Blocked(hold) if hold:
                self._held.setdefault(hold, {})[op.ref] = None

    # ------------------------------------------------------------------ times

    def _set_timer(self, now: float) -> None:
        """One timer for the earliest time. It looks again with each poll: a wall clock may be set meanwhile."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._times and not self._closed:
            pause = min(max(0.0, self._times[0][0] - now), self._ctx.config.poll)
            self._timer = asyncio.get_running_loop().call_later(pause, self._due)

    def _due(self) -> None:
        self._timer = None
        now, come = time.time(), []
        while self._times and self._times[0][0] <= now:
            come.append(heapq.heappop(self._times)[1])
            self._due_at.pop(come[-1], None)
        self.look(come)

    # ------------------------------------------------------------------- work

    async def _run(self) -> None:
        trouble, excluded = Backoff(*TROUBLE_PAUSE), Backoff(*EXCLUDED_PAUSE)
        try:
            while self._ready or self._over:
                self._changed.clear()
                try:
                    done = await self._end_some() or await self._begin_some()
                except SessionLost:
                    return
                except (DistopError, OSError) as error:
                    self._log.warning("those that wait have to wait on: %s", describe(error), extra={"error": error})
                    await asyncio.sleep(trouble.pause())
                    continue
                except Exception:
                    self._log.exception("beginning what waits broke; it goes on shortly")
                    await asyncio.sleep(trouble.pause())
                    continue
                trouble.reset()
                if done:
                    excluded.reset()
                    continue
                try:
                    await asyncio.wait_for(self._changed.wait(), excluded.pause())
                except TimeoutError:
                    continue
        finally:
            self._work = None

    async def _end_some(self) -> bool:
        """End one that never will begin, or does nothing but wait; False: there is none, or the view was behind."""
        keys = self._ctx.keys
        for ref in list(self._over):
            op = self._view.operations.get(ref)
            decided = fate(op, self._ctx.cluster.holds, time.time()) if op is not None else None
            if op is None or op.stage is not Stage.WAITING or not isinstance(decided, Join | EndWaiting):
                self._over.pop(ref, None)
                continue
            assert op.spec is not None
            now = rfc3339(time.time())
            if isinstance(decided, Join):
                history = ended_waiting(ref, op.spec, State.SUCCESS, now, None)
                txn = w.joined(keys, ref, self._guard, op.state_mod, history, op.spec.hold)
            else:
                history = ended_waiting(ref, op.spec, State.CANCELLED, now, decided.why, decided.alarm)
                txn = w.end_waiting(keys, ref, op.state_mod, history, decided.why, self._guard)
            if await self._commit(txn):
                self._over.pop(ref, None)
                self._log.info("ended as %s without having begun", history.state, extra={"operation": str(ref)})
                if history.alarm:
                    self._log.error("alarm: it never runs: %s", history.alarm, extra={"operation": str(ref)})
                return True
        return False

    def _group(self) -> list[w.Beginning]:
        """Those that may begin in one transaction, the most urgent first: of each object that works one at a time, the
        first.
        """
        chosen: list[w.Beginning] = []
        objects: set[str] = set()
        whole = whole_plan() if self._view.table == CLUSTER_TABLE else None
        now, holds = time.time(), self._ctx.cluster.holds
        for ref in self._in_turn():
            op = self._view.operations.get(ref)
            if op is None or op.spec is None or op.stage is not Stage.WAITING:
                del self._ready[ref]
                continue
            if not isinstance(fate(op, holds, now), Begin):
                # Its hold came into view after itself: they are watched apart.
                del self._ready[ref]
                self._sort(op, now)
                self._set_timer(now)
                continue
            alone = op.spec.one_at_a_time
            if alone and (ref.object in self._view.current or ref.object in objects):
                continue
            objects.add(ref.object)
            chosen.append(w.Beginning(ref, op.state_mod, alone, op.spec.hold, whole, op.terms))
            if len(chosen) == self._ctx.limits.begins:
                break
        return chosen[: w.begin_together(self._ctx.keys, chosen)] if chosen else []

    def _in_turn(self) -> list[OperationRef]:
        """Those that are ready, by priority with aging, then in the order in which they became so."""
        self._urgent &= self._ready.keys()
        if not self._urgent:
            return list(self._ready)
        now, view = time.monotonic(), self._view.operations

        def urgency(ref: OperationRef) -> int:
            priority = view[ref].terms.options.priority if ref in view else 0
            return rank(priority, now - self._ready[ref])

        return sorted(self._ready, key=urgency, reverse=True)

    async def _begin_some(self) -> bool:
        """Let some of those that are ready begin; False: what runs excludes them, or a view was behind."""
        group = self._group()
        if not group:
            return False
        if self._apart:
            group = group[:1]
            self._ready[group[0].ref] = self._ready.pop(group[0].ref)  # if it is the one, others come before it
        keys, table = self._ctx.keys, self._view.table
        (found,) = await self._ctx.client.read(Get(keys.run_ops(table)))
        running = catalog.running(found.kv)
        own, excluded = await self._excluded(running)
        if excluded:
            return False
        if self._view.type in own:
            group = group[:1]  # those of this type exclude each other
        mod = found.kv.mod_revision if found.kv is not None else 0
        try:
            result = await self._ctx.commit(w.begins(keys, self._guard, running, mod, group))
        except EtcdRejected:
            if len(group) == 1:
                raise
            group = group[:1]  # etcd takes none of them together
            result = await self._ctx.commit(w.begins(keys, self._guard, running, mod, group))
        if result.succeeded:
            await self._reached(result.revision)
            for one in group:
                self._log.info("begins", extra={"operation": str(one.ref)})
                self._ready.pop(one.ref, None)
            self._apart = False
            return True
        refused = w.begin_refused(result, mod, group)
        if not refused.moved and len(group) > 1:
            # One of them holds up the others: an edge or a hold that this view does not show yet.
            self._apart = True
        return refused.moved  # the next look is made from what stands there now

    async def _excluded(self, running: dict[str, int]) -> tuple[tuple[str, ...], bool]:
        """The types that exclude this one by its own declaration; and whether one that runs on the table does."""
        own = self._view.type
        names = sorted({own, *running})
        answers = await self._ctx.client.read(*(Get(self._ctx.keys.behavior(name)) for name in names))
        declared = {
            name: read(Declaration.decode, one.kv).conflicts_with if one.kv is not None else ()
            for name, one in zip(names, answers, strict=True)
        }
        others = {name: declared[name] for name in running}
        return declared[own], bool(catalog.excluded_by(own, declared[own], others))
