"""Starts the pending operations of one type on one table.

An operation starts when its time has come, its dependencies have ended, and no running operation excludes it. Thousands
may be pending: each is checked when it changes, a single timer covers all start times, and ready operations start
together in large transactions (``protocol.pending_operations``).
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.daemon.coordinator.due_times import Times
from distop.decide.due_operations import At, Begin, Blocked, EndJoin, EndWaiting, ended_waiting, start_decision
from distop.errors import DistopError, MalformedRequest, SessionLost, describe
from distop.protocol import pending_operations as w
from distop.protocol import table_registry
from distop.protocol.json_codec import rfc3339
from distop.protocol.operation_options import rank
from distop.protocol.plan import whole_plan
from distop.protocol.records import CLUSTER_TABLE, State
from distop.protocol.state_tables import Stage
from distop.protocol.transaction_groups import fitting_count, merged
from distop.protocol.txn import Get
from distop.runtime.backoff import Backoff
from distop.services.submission.idempotency import excluding

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distop.daemon.action_log import ActionLog
    from distop.daemon.coordinator.election import Election
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import History, OperationRef
    from distop.protocol.txn import Txn

EXCLUDED_PAUSE = (0.05, 2.0)
"""Seconds between two checks of the running operations, while they exclude the ready ones."""
TROUBLE_PAUSE = (0.5, 10.0)
WAITING = "begin or end"
"""Names the rejected write in messages: the begin or the end of a pending operation."""


class Waiters:
    """The pending operations of one type on one table, under one election.

    ``only_ending``: none starts or joins.
    """

    def __init__(self, election: Election, actions: ActionLog, only_ending: bool = False) -> None:
        self._only_ending = only_ending
        self._actions = actions
        self._ctx = election.ctx
        self._guard = election.guard
        self._view = election.view
        self._commit = election.commit
        self._reached = election.reached
        self._log = election.ctx.log
        self._ready: dict[OperationRef, float] = {}
        """Ready operations in the order in which they became ready, with that time (``time.monotonic``)."""
        self._urgent: dict[OperationRef, int] = {}
        """Ready operations with a priority."""
        self._ending: dict[OperationRef, None] = {}
        """Operations that end without a start: joins, and those that will never start."""
        self._times = Times()
        self._held: dict[str, dict[OperationRef, None]] = {}
        """Operations by their holds, in the order of arrival, in which they become ready."""
        self._timer: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._rejected: dict[OperationRef, float] = {}
        """Operations whose begin or end etcd rejects as invalid, and when each is retried."""
        self._one_by_one = False
        """A group was refused without a known cause: operations start one by one, a different one first each time."""

    def look(self, refs: Iterable[OperationRef]) -> None:
        """Check changed operations again; those that are not pending are skipped."""
        now = time.time()
        for ref in refs:
            op = self._view.operations.get(ref)
            if op is not None and op.stage is Stage.WAITING:
                self._sort(op, now)
            else:
                self._ready.pop(ref, None)
                self._ending.pop(ref, None)
                self._times.discard(ref.instance)
                self._settle(ref)
        self._changed.set()
        self._set_timer(now)
        if (self._ready or self._ending) and self._work is None and not self._closed:
            self._work = asyncio.ensure_future(self._run())

    def holds_changed(self, ids: Collection[str] | None = None) -> None:
        """Check operations again whose holds are released or denied (``ids``: the changed holds; None: all)."""
        holds = self._ctx.cluster.holds
        for id_ in dict.fromkeys(self._held if ids is None else ids):
            if id_ in self._held and (id_ not in holds or holds[id_].value.state != "held"):
                self.look(self._held.pop(id_))

    def table_changed(self) -> None:
        """Check again after operations on the table started or ended: they may no longer exclude the ready ones."""
        self._changed.set()

    def close(self) -> None:
        """Stop at once."""
        self._closed = True
        for ref in list(self._rejected):
            self._settle(ref)
        for running in (self._timer, self._work):
            if running is not None:
                running.cancel()

    def _sort(self, op: OperationView, now: float) -> None:
        """Sort an operation by its current state: a ready operation may have got dependencies since."""
        since = self._ready.pop(op.ref, None)
        self._ending.pop(op.ref, None)
        if (due := self._rejected.get(op.ref, 0.0)) > now:
            self._times.add(op.ref.object, op.ref.instance, due)
            return
        match start_decision(op, self._ctx.cluster.holds, now):
            case Begin() | EndJoin() if self._only_ending:
                pass
            case Begin():
                self._ready[op.ref] = since if since is not None else time.monotonic()
                self._urgent.pop(op.ref, None)
                if priority := op.terms.options.priority:
                    self._urgent[op.ref] = priority
            case EndJoin() | EndWaiting():
                self._ending.setdefault(op.ref)
            case At(due):
                self._times.add(op.ref.object, op.ref.instance, due)
            case Blocked(hold) if hold:
                self._held.setdefault(hold, {})[op.ref] = None

    def _set_aside(self, ref: OperationRef, error: MalformedRequest) -> None:
        """Retry later an operation whose begin or end etcd rejects as invalid, even alone.

        Meanwhile it holds up no other operation.
        """
        pause = self._ctx.rejected_writes.refused(str(ref), WAITING, error)
        self._ready.pop(ref, None)
        self._ending.pop(ref, None)
        self._rejected[ref] = time.time() + pause
        self._times.add(ref.object, ref.instance, self._rejected[ref])
        self._set_timer(time.time())

    def _settle(self, ref: OperationRef) -> None:
        if self._rejected.pop(ref, None) is not None:
            self._ctx.rejected_writes.settled(str(ref), WAITING)

    # ------------------------------------------------------------------ times

    def _set_timer(self, now: float) -> None:
        """Set the timer for the earliest start time.

        It fires at each poll at the latest, because a wall clock may be set meanwhile.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (earliest := self._times.earliest()) is not None and not self._closed:
            pause = min(max(0.0, earliest - now), self._ctx.config.poll)
            self._timer = asyncio.get_running_loop().call_later(pause, self._due)

    def _due(self) -> None:
        self._timer = None
        operations = self._view.operations
        self.look([operations.ref(*one) for one in self._times.come(time.time())])

    # ------------------------------------------------------------------- work

    def under_way(self) -> list[asyncio.Task[None]]:
        """The task under way, if any."""
        return [self._work] if self._work is not None else []

    async def _run(self) -> None:
        trouble, excluded = Backoff(*TROUBLE_PAUSE), Backoff(*EXCLUDED_PAUSE)
        # Starts and ends alternate, so that thousands of one kind do not delay the other. Refused writes delay neither.
        turns = [self._begin_some, self._end_some]
        try:
            while self._ready or self._ending:
                self._changed.clear()
                try:
                    turns.reverse()
                    done = any([await work() for work in turns])
                except SessionLost:
                    return
                except (DistopError, OSError) as error:
                    self._log.warning(
                        "Cannot start pending operations; retrying: %s", describe(error), extra={"error": error}
                    )
                    await asyncio.sleep(trouble.pause())
                    continue
                except Exception:
                    self._log.exception("Unexpected error while starting pending operations; retrying")
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
        """End some joins, and operations that will never start.

        Returns False if there are none, or if the view lags.
        """
        ends: list[tuple[OperationRef, History, Txn]] = []
        for ref in list(islice(self._ending, self._ctx.limits.ends)):
            end = self._end_of(ref)
            if end is not None:
                ends.append(end)
                continue
            self._ending.pop(ref, None)
            if (op := self._view.operations.get(ref)) is not None and op.stage is Stage.WAITING:
                # Its hold came into view after itself: they are watched apart.
                self._sort(op, now := time.time())
                self._set_timer(now)
        if not ends:
            return False
        ends = ends[: fitting_count(txn for _, _, txn in ends)]
        if len(ends) > 1 and await self._end(ends):
            return True
        # One of them holds up the others: an edge or a hold that this view does not show yet.
        return any([await self._end([one]) for one in ends])

    def _end_of(self, ref: OperationRef) -> tuple[OperationRef, History, Txn] | None:
        """The history record and the transaction that end an operation; None if it does not end."""
        op, keys = self._view.operations.get(ref), self._ctx.keys
        decided = start_decision(op, self._ctx.cluster.holds, time.time()) if op is not None else None
        if op is None or op.stage is not Stage.WAITING or op.spec is None:
            return None
        now, me = rfc3339(time.time()), self._ctx.executor_id
        if isinstance(decided, EndJoin):
            history = ended_waiting(ref, op.spec, State.SUCCESS, now, None, actions=op.actions, executor=me)
            return ref, history, w.joined(keys, ref, self._guard, op.state_mod, history, op.spec.hold)
        if isinstance(decided, EndWaiting):
            why, alarm, void = decided.why, decided.alarm, decided.void
            details: dict[str, Any] = {"void": void, "actions": op.actions, "executor": me}
            history = ended_waiting(ref, op.spec, State.CANCELLED, now, why, alarm, **details)
            return ref, history, w.end_waiting(keys, ref, op.state_mod, history, why, self._guard, hold=decided.hold)
        return None

    async def _end(self, ends: Sequence[tuple[OperationRef, History, Txn]]) -> bool:
        """End all of these operations or none."""
        if len(ends) == 1 and (ref := ends[0][0]) in self._ending:
            self._ending[ref] = self._ending.pop(ref)  # others come first after a refusal
        known = {ref: self._view.operations.get(ref) for ref, _, _ in ends}
        try:
            applied = await self._commit(merged([txn for _, _, txn in ends]))
        except MalformedRequest as error:
            if len(ends) == 1:
                self._set_aside(ends[0][0], error)
            return False  # etcd rejects the group as invalid, or this one alone
        for ref, history, _ in ends:
            if applied:
                self._actions.ended(known[ref], history)
                self._ending.pop(ref, None)
                self._settle(ref)
                self._log.info("Operation ended as %s without starting", history.state, extra={"operation": str(ref)})
                if history.alarm:
                    self._log.error(
                        "Alarm: the operation will never run: %s", history.alarm, extra={"operation": str(ref)}
                    )
        return applied

    def _group(self) -> list[w.Beginning]:
        """The operations to start in one transaction, the most urgent first.

        At most one of each object whose type runs one at a time.
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
            if not isinstance(start_decision(op, holds, now), Begin):
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
        return chosen[: w.fitting_begins(self._ctx.keys, self._guard, chosen)] if chosen else []

    def _in_turn(self) -> list[OperationRef]:
        """The ready operations by priority with aging, then in the order in which they became ready."""
        self._urgent = {ref: priority for ref, priority in self._urgent.items() if ref in self._ready}
        if not self._urgent:
            return list(self._ready)
        now = time.monotonic()

        def urgency(ref: OperationRef) -> int:
            return rank(self._urgent.get(ref, 0), now - self._ready[ref])

        return sorted(self._ready, key=urgency, reverse=True)

    async def _begin_some(self) -> bool:
        """Start some ready operations.

        Returns False if a running operation excludes them, or if a view lags.
        """
        group = self._group()
        if not group:
            return False
        if self._one_by_one:
            group = group[:1]
            self._ready[group[0].ref] = self._ready.pop(group[0].ref)  # if it is the one, others come before it
        keys, table = self._ctx.keys, self._view.table
        (found,) = await self._ctx.client.read(Get(keys.run_ops(table)))
        running = table_registry.running(found.kv)
        own, excluded_by = await excluding(self._ctx.client, keys, self._view.type, running)
        if excluded_by:
            return False
        if table_registry.excludes(own, self._view.type):
            group = group[:1]  # those of this type exclude each other
        mod = found.kv.mod_revision if found.kv is not None else 0
        try:
            result = await self._ctx.commit(w.begins(keys, self._guard, running, mod, group))
        except MalformedRequest as error:
            if len(group) == 1:
                self._set_aside(group[0].ref, error)
                return True
            self._one_by_one = True  # etcd rejects the group as invalid
            return True
        if result.succeeded:
            await self._reached(result.revision)
            for one in group:
                self._log.info("Operation started", extra={"operation": str(one.ref)})
                self._actions.see(self._view.operations.get(one.ref))
                self._ready.pop(one.ref, None)
                self._settle(one.ref)
            self._one_by_one = False
            return True
        refused = w.begin_refused(result, mod, group)
        if not refused.moved and len(group) > 1:
            # One of them holds up the others: an edge or a hold that this view does not show yet.
            self._one_by_one = True
        return refused.moved  # the next check starts from the present records
