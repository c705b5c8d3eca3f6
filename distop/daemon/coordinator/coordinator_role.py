"""The coordinator role for one type on one table: plan, track, complete, clean.

A thin shell: ``decide.next_steps.next_step`` decides the next step of an operation from one view, and this module
performs it. Each operation has one step at a time. After each commit the view must catch up before the next decision
(W11). Planning, completion and cleanup code run in the child; ``operation_planning``, ``operation_end`` and
``orphaned_jobs`` have the steps.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from distop.clock import random, time
from distop.daemon.action_log import ActionLog
from distop.daemon.coordinator.attempt_limit import Elsewhere
from distop.daemon.coordinator.claim_watch import ClaimWatch
from distop.daemon.coordinator.election import Election
from distop.daemon.coordinator.follow_ups import Later
from distop.daemon.coordinator.label_routing import Placing
from distop.daemon.coordinator.operation_end import Ending
from distop.daemon.coordinator.operation_planning import Planning
from distop.daemon.coordinator.orphaned_jobs import Reaper
from distop.daemon.coordinator.pending_starts import Waiters
from distop.decide import coordinator_ranking, next_steps
from distop.decide.view import TypeView
from distop.errors import DistopError, MalformedRequest, SessionLost, describe
from distop.protocol import operation_transitions as t
from distop.protocol.json_codec import SCHEMA_VERSION
from distop.protocol.keys import state_ordinal
from distop.protocol.state_tables import Stage
from distop.protocol.txn import Get
from distop.runtime.backoff import Backoff
from distop.store.watch import Feed
from distop.worker.daemon_side.requests import WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from distop.daemon.coordinator.election import Callbacks
    from distop.daemon.incarnation_context import Context
    from distop.decide.operation_view import OperationView
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change
    from distop.protocol.txn import Txn
    from distop.store.watch import Batch

LONG_STEP = 5.0
"""Minimum age in seconds of a step that keeps the election, despite the failure of another operation's call."""
REFUSED_PAUSE = (0.02, 2.0)
RELIST = 300.0
"""Minimum seconds between two listings behind a watch."""
TOLD_AFTER = 8
"""Refused decisions in a row after which the cause is logged: a view that lags has caught up by then."""

COORDINATION = "coordination"
"""Names a rejected write of the operation's coordinator in messages."""

T = TypeVar("T")


class Overtaken(Exception):
    """The operation left the stage of a call into the child: decide again."""


class Coordinator:
    """Coordinates one type on one table under one election.

    ``fence``: the election's mod revision. ``only_ending``: no live node has code of the type, so only cancelled
    operations, and operations that will never start, are ended.
    """

    def __init__(
        self, ctx: Context, table: str, type_name: str, fence: int, callbacks: Callbacks, only_ending: bool = False
    ) -> None:
        self._ctx = ctx
        self.fence = fence
        self._keys = ctx.keys
        self._guard = t.election_guard(ctx.keys, table, type_name, fence)
        self._view = TypeView(ctx.keys, table, type_name, ctx.limits.outcomes_ahead)
        self._log = ctx.log
        self._only_ending = only_ending
        self._callbacks = callbacks
        self._step_started: dict[OperationRef, float] = {}
        """Operations with a step under way, and the time of its start."""
        self._driving: dict[OperationRef, asyncio.Task[None]] = {}
        self._changed_again: set[OperationRef] = set()
        self._timers: dict[OperationRef, asyncio.TimerHandle] = {}
        self._calls: dict[OperationRef, Stage] = {}
        """Operations with a call into the child, and the stage that it belongs to."""
        self._overtaken: set[OperationRef] = set()
        """Operations with a call that have left the stage of that call."""
        self._placing = Placing(ctx, callbacks.elsewhere, self._kick, only_ending)
        self._left_alone: set[OperationRef] = set()
        self._logged_claims: set[OperationRef] = set()
        """Operations whose stale claim was logged."""
        self._completing_early: set[OperationRef] = set()
        """Operations whose completion code runs before the decision."""
        self._malformed: set[OperationRef] = set()
        """Operations whose next write etcd rejects as invalid."""
        self._cancelling: set[OperationRef] = set()
        """Operations that are being cancelled and wait for the deletion of their claims."""
        self._watching: asyncio.Task[None] | None = None
        self._ready = self._closed = False
        self._jobs = self._watch_of_jobs(table, type_name)
        self._claims = self._watch_of_claims(table, type_name)
        self._actions = ActionLog(ctx.log)
        election = Election(ctx, self._guard, self._view, self._commit, self._reached, self._call)
        self._planning = Planning(election, self._jobs.relist, self._placing.need)
        self._ending = Ending(election, self._actions)
        self._waiters = Waiters(election, self._actions, only_ending)
        self._reaper = Reaper(election, self._claims.reached)

    def _watch_of_jobs(self, table: str, type_name: str) -> Feed:
        return Feed(
            self._ctx.client,
            *self._keys.type_range(table, type_name),
            self._fold_jobs,
            relist_every=max(self._ctx.config.poll, RELIST),
            name="jobs",
            ignore=(b".progress",),
            gather=self._view.listing,
            ignore_deletions=(b".arg", b".outcome"),  # they go with the state
        )

    def _watch_of_claims(self, table: str, type_name: str) -> ClaimWatch:
        claims, every = self._keys.type_claims(table, type_name), max(self._ctx.config.poll, RELIST)
        return ClaimWatch(
            lambda apply: Feed(self._ctx.client, *claims, apply, relist_every=every, name="claims"),
            self._fold_claims,
            self._view.forget_claims,
            self._callbacks.failed,
        )

    async def start(self) -> None:
        """Start the watches and work on all operations.

        Raises the errors of the first listings; then no task is left.
        """
        try:
            await self._jobs.start()
        except BaseException:
            await self._close_feeds()
            raise
        if self._closed:
            await self._close_feeds()  # close() came before there was anything to close
            return
        self._ready = True
        self._watching = asyncio.ensure_future(self._watch())
        self._kick(self._view.operations)

    async def _watch(self) -> None:
        """Report a failed watch of the jobs: without it no decision would be made."""
        try:
            await self._jobs.wait()
        except Exception as error:
            self._callbacks.failed(error)

    async def _close_feeds(self) -> None:
        await asyncio.gather(self._jobs.close(), self._claims.close())

    @property
    def ends_something(self) -> bool:
        """Whether an operation is being completed before its decision is in etcd."""
        return bool(self._completing_early)

    def cluster_changed(self) -> None:
        """Check again after nodes joined or left: claims may be deletable now."""
        if self._ready:
            self._waiters.holds_changed()
            self._waiters.table_changed()
        self._placing.changed()
        if self._cancelling:
            self._kick(self._cancelling)

    def holds_changed(self, ids: Collection[str]) -> None:
        """Check the operations under these holds again."""
        if self._ready:
            self._waiters.holds_changed(ids)

    def table_changed(self) -> None:
        """Check again after operations on the table started or ended."""
        self._waiters.table_changed()

    def close(self) -> None:
        """Stop at once: the election or the session has ended."""
        self._ready, self._closed = False, True
        if self._watching is not None:
            self._watching.cancel()
        self._waiters.close()
        self._ending.close()
        self._settle_refusals(self._malformed)
        self._placing.close()
        for timer in self._timers.values():
            timer.cancel()
        for drive in self._driving.values():
            drive.cancel()
        self._closing = asyncio.ensure_future(self._close_feeds())

    async def stop(self) -> None:
        """Stop, and wait for the end of all tasks of this role."""
        drives = [*self._driving.values(), *self._waiters.under_way()]
        self.close()
        await asyncio.gather(*drives, self._closing, return_exceptions=True)

    # ------------------------------------------------------------------- fold

    def _fold_jobs(self, batch: Batch) -> None:
        if batch.listing:
            changed = self._view.take(batch.gathered)
        else:
            changes = batch.events
            self._keep_arguments(changes)
            changed = self._view.apply(changes)
        for logged in (self._left_alone, self._logged_claims):
            logged.difference_update([ref for ref in logged if ref not in self._view.operations])
        self._settle_refusals([ref for ref in self._malformed if ref not in self._view.operations])
        self._ending.keep(self._view.operations)
        self._actions.keep(self._view.operations)
        for ref in changed:
            op = self._view.operations.awake.get(ref)
            if op is not None and (op.cancel is not None or op.actions.kept):
                self._actions.see(op)
            if op is not None and op.stage is Stage.CANCELLING and op.spec is not None and not next_steps.newer(op):
                self._cancelling.add(ref)
            else:
                self._cancelling.discard(ref)
        self._claims.want(bool(self._cancelling) and not self._closed)
        self._kick(changed)

    def _settle_refusals(self, refs: Iterable[OperationRef]) -> None:
        """Forget the rejected writes of operations that this coordinator no longer writes."""
        for ref in list(refs):
            self._malformed.discard(ref)
            self._ctx.rejected_writes.settled(str(ref), COORDINATION)

    def _keep_arguments(self, changes: Sequence[Change]) -> None:
        """Keep the arguments of starting operations, which planning needs at once."""
        for change in changes:
            if change.kv.key.endswith(".arg") and not change.deleted:
                with suppress(DistopError, ValueError):  # the reader that needs the argument reports its error
                    key = self._keys.parse(change.kv.key)
                    if key.ref is not None:
                        self._ctx.keep_argument(key.ref, change.kv.value)

    def _fold_claims(self, batch: Batch) -> None:
        changes = batch.events
        self._kick(self._view.replace(changes, claims=True) if batch.listing else self._view.apply(changes))

    def _kick(self, refs: Any) -> None:
        if not self._ready:
            return
        refs = sorted(refs, key=self._turn)
        self._waiters.look(refs)
        for ref in refs:
            if self._stage(ref) is Stage.WAITING:
                continue
            if ref in self._driving:
                self._changed_again.add(ref)
                self._check_call(ref)
            elif not self._rests(ref):
                self._driving[ref] = asyncio.ensure_future(self._drive(ref))

    def _rests(self, ref: OperationRef) -> bool:
        """Whether the operation has no next step before the next event."""
        op = self._view.operations.get(ref)
        if op is None:
            return True
        if self._next_step(op) is not None:
            return False
        self._nothing_to_do(op)
        return True

    def _next_step(self, op: OperationView) -> next_steps.NextStep:
        ends = coordinator_ranking.ends_without_code(op.state, op.cancel) or op.stage is Stage.CLEANING
        if self._only_ending and not ends:
            return None
        nodes, poll = self._ctx.cluster.nodes, self._ctx.config.poll
        actors = next_steps.actors_of(op, time.monotonic()) if op.ref in self._cancelling else {}
        return next_steps.next_step(self._keys, op, nodes, self._guard, time.time(), poll, actors)

    def _nothing_to_do(self, op: OperationView) -> None:
        if next_steps.newer(op):
            self._log_newer(op)
        elif next_steps.may_end_soon(op):
            self._ending.prefetch_run_ops(op)

    def _turn(self, ref: OperationRef) -> tuple[int, OperationRef]:
        """Sort by priority, then by order."""
        return -self._view.operations.priority(ref), ref

    # ------------------------------------------------------------------ drive

    async def _drive(self, ref: OperationRef) -> None:
        """Perform the steps of one operation until it has to wait."""
        try:
            await self._perform_steps(ref)
        except (SessionLost, asyncio.CancelledError):
            pass
        except Later as later:
            self._wake_at(ref, later.when)
        except MalformedRequest as error:
            self._malformed.add(ref)
            self._wake_at(ref, time.time() + self._ctx.rejected_writes.refused(str(ref), COORDINATION, error))
        except (DistopError, OSError) as error:
            self._log.warning(
                "Cannot coordinate the operation; retrying: %s",
                describe(error),
                extra={"operation": str(ref), "error": error},
            )
            self._wake_at(ref, time.time() + random.uniform(1.0, 2.0))
        except Exception:
            self._log.exception(
                "Unexpected error while coordinating the operation; retrying", extra={"operation": str(ref)}
            )
            self._wake_at(ref, time.time() + random.uniform(2.0, 5.0))
        finally:
            self._driving.pop(ref, None)
            self._step_started.pop(ref, None)
            if ref in self._changed_again:
                self._kick([ref])

    async def _perform_steps(self, ref: OperationRef) -> None:
        refused, refusals = Backoff(*REFUSED_PAUSE), 0
        while self._ready:
            self._changed_again.discard(ref)
            op = self._view.operations.get(ref)
            if op is None:
                return
            step = self._next_step(op)
            if step is None or isinstance(step, next_steps.WakeAt):
                if step is not None:
                    self._wake_at(ref, step.time)
                else:
                    self._nothing_to_do(op)
                if ref in self._changed_again:
                    continue
                return
            if (step := self._placing.here(op, step)) is None:
                return
            if await self._attempt(op, step, refused=refusals > 0):
                refused.reset()
                refusals = 0
                if ref in self._malformed:
                    self._settle_refusals([ref])
                continue
            # Refused: the view was behind. The missing events will arrive.
            refusals += 1
            if refusals == TOLD_AFTER:
                await self._jobs.relist()  # a watch may have lost events (etcd#20573)
            if refusals >= TOLD_AFTER:
                await self._log_stale_claim(op)
            await asyncio.sleep(refused.pause())

    async def _attempt(self, op: OperationView, step: next_steps.NextStep, *, refused: bool) -> bool:
        """Perform one step; returns False if its transaction was refused, True also if a call into the child ended."""
        self._step_started[op.ref] = time.monotonic()
        try:
            return await self._perform(op, step, refused=refused)
        except Overtaken:
            return True
        except Elsewhere:
            self._call_failed(op.ref)
            return True
        finally:
            self._placing.done(op.ref)

    def _call_failed(self, ref: OperationRef) -> None:
        """Give up the election after a failed attempt, unless long steps are under way.

        Another node may make the next attempt.
        """
        now = time.monotonic()
        if all(other == ref or now - begun < LONG_STEP for other, begun in self._step_started.items()):
            self._callbacks.trouble()

    async def _log_stale_claim(self, op: OperationView) -> None:
        """Log once which claim of an ended job prevents the end of its operation.

        No release of distop writes such a claim.
        """
        if op.plan is None or op.ended < op.plan.count or op.ref in self._logged_claims:
            return
        (left,) = await self._ctx.client.read(Get(*self._keys.claims_range(op.ref), limit=1, keys_only=True))
        if left.kv is not None:
            self._logged_claims.add(op.ref)
            key = left.kv.key
            self._log.warning(
                "Cannot end the operation: all its jobs have ended, but the claim %s is left, which no release of "
                "distop writes for an ended job. Delete that key: `etcdctl del %s`",
                key,
                key,
                extra={"operation": str(op.ref)},
            )

    def _log_newer(self, op: OperationView) -> None:
        if op.spec is not None and op.ref not in self._left_alone:
            self._left_alone.add(op.ref)
            self._log.warning(
                "Not coordinating the operation: a newer release of distop wrote it (version %d, known here: %d)",
                op.spec.version,
                SCHEMA_VERSION,
                extra={"operation": str(op.ref)},
            )

    def _wake_at(self, ref: OperationRef, when: float) -> None:
        old = self._timers.pop(ref, None)
        if old is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        self._timers[ref] = loop.call_later(max(0.0, when - time.time()), self._due, ref)

    def _due(self, ref: OperationRef) -> None:
        self._timers.pop(ref, None)
        self._kick([ref])

    async def _perform(self, op: OperationView, step: next_steps.NextStep, *, refused: bool = False) -> bool:
        """Perform one step; returns False if its transaction was refused.

        ``refused``: whether the transaction of the previous step was refused. The view may change during a step. So the
        step uses a snapshot of the operation from the time of its decision (except claims, which are read from etcd).
        With a later state, the guards would not refuse a finish after a concurrent change, such as a cancel.
        """
        op = op.as_it_is()
        ends = op.stage is Stage.CANCELLING and isinstance(step, next_steps.Commit | next_steps.Finish)
        if ends and not await self._counted(op):
            return False
        match step:
            case next_steps.MakePlan():
                planned = await self._planning.plan(op)
                if planned:
                    self._actions.see(op)
                return planned
            case next_steps.Commit(txn) if txn.label == "signal":
                return await self._ending.together(txn)
            case next_steps.Commit(txn):
                return await self._commit(txn)
            case next_steps.RunCompletion(decision):
                return await self._ending.complete(op, decision)
            case next_steps.CompleteFirst(decision, otherwise):
                if refused or op.ref.type not in self._ctx.reports_only:
                    return await self._perform(op, otherwise)
                self._completing_early.add(op.ref)
                try:
                    return await self._ending.complete(op, decision)
                finally:
                    self._completing_early.discard(op.ref)
            case next_steps.Finish(decision, decision_mod):
                return await self._ending.finish(op, decision, decision_mod)
            case next_steps.Reap(claims):
                return await self._reaper.reap(op, claims)
            case next_steps.Clean(count, follow_ups):
                return await self._ending.clean(op, count, follow_ups)
            case _:
                return True

    async def _counted(self, op: OperationView) -> bool:
        """Whether the view has the ends of all jobs of a cancelled operation.

        Claims and job states come from different watches, so the claims may disappear before the job states arrive, and
        no count of all jobs shows this for a cancelled operation.
        """
        ref, keys, client = op.ref, self._keys, self._ctx.client
        ended = op.ended  # read first: the view may change during the reads
        first, after = keys.jobs_range(ref)
        claims, jobs = await client.read(
            Get(*keys.claims_range(ref), count_only=True), Get(first, after, count_only=True)
        )
        if claims.count:
            return False
        if jobs.count == 2 * ended:  # state and outcome of each, and no checkpoint
            return True
        listing = await client.list(first, after, keys_only=True)
        if sum(state_ordinal(kv.key) is not None for kv in listing.kvs) == ended:
            return True
        await self._reached(listing.revision)
        return False

    async def _commit(self, txn: Txn) -> bool:
        result = await self._ctx.commit(txn)
        if result.succeeded:
            await self._reached(result.revision)
        return result.succeeded

    async def _reached(self, revision: int) -> None:
        await self._jobs.reached(revision)

    # ------------------------------------------------------------------ calls

    async def _call(self, ref: OperationRef, stage: Stage, call: Callable[[], Awaitable[T]]) -> T:
        """Call the child for an operation in this stage.

        Raises WorkerError; Overtaken if the operation left the stage and the call was stopped, which says nothing about
        the behavior.
        """
        if self._stage(ref) is not stage:
            raise Overtaken
        self._calls[ref] = stage
        try:
            return await call()
        except WorkerError:
            if ref in self._overtaken:
                raise Overtaken from None
            raise
        finally:
            del self._calls[ref]
            self._overtaken.discard(ref)

    def _stage(self, ref: OperationRef) -> Stage:
        operations = self._view.operations
        if operations.rests(ref):
            return Stage.WAITING
        return op.stage if (op := operations.awake.get(ref)) is not None else Stage.ABSENT

    def _check_call(self, ref: OperationRef) -> None:
        stage = self._calls.get(ref)
        if stage is not None and ref not in self._overtaken and self._stage(ref) is not stage:
            self._overtaken.add(ref)
            self._ctx.worker.cancel_calls(str(ref))
