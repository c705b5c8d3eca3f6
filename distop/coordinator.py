"""The coordinator role for one type on one table: plan, track, complete, clean.

A thin shell: ``core.decide.next_step`` says what to do next for an operation, from one view; here it is done, one
thing at a time for each operation, and after each commit the view is awaited before deciding again (W11). Planning,
completion and cleanup code run in the child.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from distop.core import claiming, decide, states
from distop.core import transitions as t
from distop.core.codec import rfc3339
from distop.core.digest import plan_digest
from distop.core.model import Attempts, Decision, State
from distop.core.plan import Plan
from distop.core.view import Change, TypeView
from distop.ending import Ending
from distop.errors import DistopError, SessionLost, describe
from distop.store.watch import Feed
from distop.worker.model import JobItem, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distop.core.model import OperationRef
    from distop.core.plan import PartitionPlan
    from distop.core.txn import Txn
    from distop.core.view import OperationView
    from distop.incarnation import Context
    from distop.store.watch import Batch

ERRORS_KEPT = 10
"""Errors in a history record; all of them stand in the jobs' outcomes until cleanup."""
ERROR_TEXT = 2_000
OUTCOMES_PAGE = 500
"""Ordinals whose outcomes are read at once for the completion code."""
CHUNKS_IN_FLIGHT = 8
REFUSED_PAUSE = (0.02, 2.0)
MAX_HISTORY_BYTES = 1024 * 1024


class Coordinator:
    """Coordinates one type on one table under one election (``fence``: its mod revision)."""

    def __init__(self, ctx: Context, table: str, type_name: str, fence: int) -> None:
        self._ctx = ctx
        self.fence = fence
        self._keys = ctx.keys
        self._guard = t.election_guard(ctx.keys, table, type_name, fence)
        self._view = TypeView(ctx.keys, table, type_name)
        self._log = ctx.log
        self._ending = Ending(ctx, self._guard, self._commit, self._reached)
        self._driving: dict[OperationRef, asyncio.Task[None]] = {}
        self._again: set[OperationRef] = set()
        self._timers: dict[OperationRef, asyncio.TimerHandle] = {}
        self._ready = False
        relist = max(ctx.config.poll, 300.0)
        self._jobs = Feed(
            ctx.client,
            *ctx.keys.type_range(table, type_name),
            self._fold_jobs,
            relist_every=relist,
            name="jobs",
            ignore=(b".outcome", b".progress"),
        )
        self._claims = Feed(
            ctx.client, *ctx.keys.type_claims(table, type_name), self._fold_claims, relist_every=relist, name="claims"
        )

    async def start(self) -> None:
        """Watch, and drive whatever is there."""
        await asyncio.gather(self._claims.start(), self._jobs.start())
        self._ready = True
        self._kick(self._view.operations)

    def cluster_changed(self) -> None:
        """Nodes came or went: claims that are being waited for may have become free to delete."""
        cancelling = [ref for ref, op in self._view.operations.items() if op.stage is states.Stage.CANCELLING]
        self._kick(cancelling)

    def close(self) -> None:
        """Stop at once: the election or the session is over."""
        self._ready = False
        for timer in self._timers.values():
            timer.cancel()
        for drive in self._driving.values():
            drive.cancel()
        self._closing = [asyncio.ensure_future(feed.close()) for feed in (self._jobs, self._claims)]

    async def stop(self) -> None:
        """Stop, and wait until nothing of this role is under way."""
        drives = list(self._driving.values())
        self.close()
        await asyncio.gather(*drives, *self._closing, return_exceptions=True)

    # ------------------------------------------------------------------- fold

    def _fold_jobs(self, batch: Batch) -> None:
        changes = [Change(event.kv, event.deleted) for event in batch.events]
        self._kick(self._view.replace(changes, claims=False) if batch.listing else self._view.apply(changes))

    def _fold_claims(self, batch: Batch) -> None:
        changes = [Change(event.kv, event.deleted) for event in batch.events]
        self._kick(self._view.replace(changes, claims=True) if batch.listing else self._view.apply(changes))

    def _kick(self, refs: Any) -> None:
        if not self._ready:
            return
        for ref in list(refs):
            if ref in self._driving:
                self._again.add(ref)
            else:
                self._driving[ref] = asyncio.ensure_future(self._drive(ref))

    # ------------------------------------------------------------------ drive

    async def _drive(self, ref: OperationRef) -> None:
        """Do what is next for one operation until there is nothing to do but wait."""
        pause = REFUSED_PAUSE[0]
        try:
            while self._ready:
                self._again.discard(ref)
                op = self._view.operations.get(ref)
                if op is None:
                    return
                step = decide.next_step(
                    self._keys, op, self._ctx.cluster.nodes, self._guard, time.time(), self._ctx.config.poll
                )
                if step is None or isinstance(step, decide.WakeAt):
                    if step is not None:
                        self._wake_at(ref, step.time)
                    if ref in self._again:
                        continue
                    return
                if await self._perform(op, step):
                    pause = REFUSED_PAUSE[0]
                else:
                    # Refused: the view was behind. What it missed is on its way.
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(pause * 2, REFUSED_PAUSE[1])
        except (SessionLost, asyncio.CancelledError):
            pass
        except (DistopError, OSError) as error:
            self._log.warning("coordination paused: %s", describe(error), extra={"operation": str(ref)})
            self._wake_at(ref, time.time() + random.uniform(1.0, 2.0))
        except Exception:
            self._log.exception("coordination broke; it goes on shortly", extra={"operation": str(ref)})
            self._wake_at(ref, time.time() + random.uniform(2.0, 5.0))
        finally:
            self._driving.pop(ref, None)
            if ref in self._again:
                self._kick([ref])

    def _wake_at(self, ref: OperationRef, when: float) -> None:
        old = self._timers.pop(ref, None)
        if old is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        self._timers[ref] = loop.call_later(max(0.0, when - time.time()), self._due, ref)

    def _due(self, ref: OperationRef) -> None:
        self._timers.pop(ref, None)
        self._kick([ref])

    async def _perform(self, op: OperationView, step: decide.Step) -> bool:
        """Do one step; False: its transaction was refused."""
        match step:
            case decide.MakePlan():
                return await self._plan(op)
            case decide.Commit(txn):
                return await self._commit(txn)
            case decide.Complete(decision):
                return await self._ending.complete(op, decision)
            case decide.Finish(decision, decision_mod):
                return await self._ending.finish(op, decision, decision_mod)
            case decide.Reap(claims):
                return await self._reap(op, claims)
            case decide.Clean(count, follow_ups):
                return await self._ending.clean(op, count, follow_ups)
            case _:
                return True

    async def _commit(self, txn: Txn) -> bool:
        result = await self._ctx.commit(txn)
        if result.succeeded:
            await self._reached(result.revision)
        return result.succeeded

    async def _reached(self, revision: int) -> None:
        await self._jobs.reached(revision)

    # ------------------------------------------------------------------- plan

    async def _plan(self, op: OperationView) -> bool:
        assert op.spec is not None
        spec, ref = op.spec, op.ref
        try:
            if spec.table is None:
                raise WorkerError("fatal", "an operation without a table must bring its own plan")
            arg = await self._ctx.argument(ref)
            planned = await self._ctx.worker.plan(str(ref), ref.type, arg, spec.table.to_json(), spec.partitions)
        except WorkerError as error:
            return await self._plan_failed(op, error)
        plan = Plan(planned.count, planned.version, plan_digest(planned.chunks), len(planned.chunks))
        self._log.info("planned %d jobs", planned.count, extra={"operation": str(ref)})
        seen = [op.chunks.get(n, 0) for n in range(len(planned.chunks))]
        small = sum(map(len, planned.chunks)) <= t.PLAN_BYTES_PER_TXN and len(planned.chunks) <= 100
        if small:
            return await self._commit(t.write_plan(self._keys, ref, self._guard, plan, seen, planned.chunks))
        limit = asyncio.Semaphore(CHUNKS_IN_FLIGHT)

        async def write(n: int) -> int:
            async with limit:
                result = await self._ctx.commit(
                    t.write_chunk(self._keys, ref, self._guard, n, seen[n], planned.chunks[n])
                )
                return result.revision if result.succeeded else 0

        mods = await asyncio.gather(*(write(n) for n in range(len(planned.chunks))))
        if not all(mods):
            await self._jobs.relist()
            return False
        if len(mods) > t.CHUNKS_PER_PLAN:
            too_many = f"the plan has {len(mods)} chunks of 512 KiB; at most {t.CHUNKS_PER_PLAN} fit"
            return await self._plan_failed(op, WorkerError("fatal", too_many))
        return await self._commit(t.write_plan(self._keys, ref, self._guard, plan, mods))

    async def _plan_failed(self, op: OperationView, error: WorkerError) -> bool:
        assert op.spec is not None
        attempts = (op.planning.value.attempts if op.planning is not None else 0) + 1
        text = f"planning failed: {error}"
        self._log.warning("%s", text, extra={"operation": str(op.ref), "attempt": attempts})
        if op.spec.rules.at_limit(attempts) or (error.kind == "fatal" and op.spec.rules.can_fail):
            decision = Decision(State.FAILED, 0, 0, 0, error=text)
            return await self._commit(t.give_up(self._keys, op.ref, self._guard, op.state_mod, decision))
        due = rfc3339(time.time() + op.spec.rules.retry.delay(attempts) * random.uniform(0.5, 1.0))
        seen_mod = op.planning.mod if op.planning is not None else 0
        return await self._commit(
            t.plan_attempt(self._keys, op.ref, self._guard, seen_mod, Attempts(attempts, text, due))
        )

    # ------------------------------------------------------------------- reap

    async def _reap(self, op: OperationView, claims: Sequence[tuple[int, int, str]]) -> bool:
        """Clean up after jobs whose holder is gone or released them, then delete their claims."""
        assert op.spec is not None
        ref, spec = op.ref, op.spec
        started = [p for p, _, _ in claims]
        partitions = {p.partition: p for p in await self._partitions(ref, started)}
        items = [
            JobItem(partitions[p].to_json(), op.claims[p].value.attempt, op.claims[p].mod)
            for p in started
            if p in partitions and p in op.claims
        ]
        try:
            table = spec.table.to_json() if spec.table else None
            await self._ctx.worker.cleanup(str(ref), ref.type, await self._ctx.argument(ref), table, items)
        except WorkerError as error:
            # Left behind is garbage that nothing names; the operation must end all the same.
            self._log.warning("cleanup of cancelled jobs failed: %s", error, extra={"operation": str(ref)})
        refused = False
        for p, mod, holder in claims:
            result = await self._ctx.commit(claiming.reap(self._keys, ref, self._guard, op.state_mod, p, mod, holder))
            refused = refused or not result.succeeded
            if result.succeeded:
                await self._claims.reached(result.revision)
        return not refused

    async def _partitions(self, ref: OperationRef, wanted: Sequence[int]) -> list[PartitionPlan]:
        from distop.core.plan import decode_chunk

        listing = await self._ctx.client.list(*self._keys.chunks_range(ref), page=4)
        chosen = set(wanted)
        return [p for kv in listing.kvs for p in decode_chunk(kv.value) if p.partition in chosen]
