"""The executor role of a daemon: claim jobs, have the child run them, report how they end.

A thin shell: which jobs, how many and in what order is decided in ``core.decide``; every write is a transaction of
``core.transitions``. A slot runs one job, or one batch of jobs of one operation.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distop.core import claiming, decide
from distop.core.codec import SCHEMA_VERSION, rfc3339
from distop.core.model import JobState, Outcome, Phase
from distop.core.txn import GetResult, TxnResult
from distop.errors import DistopError, InvalidArgument, NotFound, SessionLost
from distop.openop import Held, OpenOperation
from distop.worker.model import JobEnded, JobItem, RunRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distop.core.model import Claim, OperationRef
    from distop.core.view import Seen
    from distop.incarnation import Context

BLOCK_LIMIT = 20_000
"""Jobs in one block at most."""
BLOCK_BYTES = 256 * 1024**3
"""Data in one block at most (as the plan knows it): a block lost with its executor is done again."""
CLAIMS_IN_FLIGHT = 8
ERROR_PAUSE = (0.5, 30.0)
"""Seconds of back-off, first and longest, after an unexpected error of the executor itself."""
QUICK_FAILURES = 20
"""Unexpected errors in a row, without any job that ended, after which a node suspects itself and stops claiming for
a while: one broken node must not use up the attempts of everybody's jobs (fault 38)."""
SELF_SUSPICION = 30.0


@dataclass(slots=True)
class _Trouble:
    """Back-off after unexpected errors of our own, per operation."""

    pause: float = 0.0
    until: float = 0.0

    def again(self, clock: float) -> float:
        first, longest = ERROR_PAUSE
        self.pause = min(max(first, self.pause * 2), longest)
        self.until = clock + self.pause * random.uniform(0.5, 1.0)
        return self.pause


@dataclass(slots=True)
class Executor:
    """Serves the open operations whose type this node offers, with ``slots`` runs at once."""

    ctx: Context
    operations: dict[OperationRef, OpenOperation] = field(default_factory=dict)
    draining: bool = False
    _serving: dict[OperationRef, asyncio.Task[None]] = field(default_factory=dict)
    _runs: set[asyncio.Task[None]] = field(default_factory=set)
    _free_slots: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _trouble: dict[OperationRef, _Trouble] = field(default_factory=dict)
    _failures_in_a_row: int = 0
    _suspended_until: float = 0.0
    _hint: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._free_slots = self.ctx.config.slots

    # ------------------------------------------------------------------ wake

    def cluster_changed(self, *, hint: bool) -> None:
        """Gates or pending operations changed; with ``hint`` there may be claims to take: a node left, released
        jobs, or it is time for the poll.
        """
        cluster = self.ctx.cluster
        for ref, op in list(self.operations.items()):
            gate_mod = cluster.gates.get(ref)
            if gate_mod is None:
                self._closed(ref)
            elif gate_mod != op.gate_mod:
                op.reopened(gate_mod)
        if hint:
            for op in self.operations.values():
                op.exhausted = False
        self._wake.set()

    def _closed(self, ref: OperationRef) -> None:
        """The gate is gone (or another): no more claims. What runs goes on if the operation is only paused."""
        op = self.operations[ref]
        phase = self.ctx.cluster.pending.get(ref)
        if phase is not Phase.PAUSED and op.held:
            self.ctx.log.info("the operation is %s: stopping its jobs", phase or "gone", extra={"operation": str(ref)})
            self.ctx.worker.cancel(str(ref))
        if not op.held and ref not in self._serving:
            del self.operations[ref]
            self._trouble.pop(ref, None)

    # ------------------------------------------------------------------ loop

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._wake.clear()
            pause = self._assign()
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _assign(self) -> float | None:
        """Give free slots to operations with work, fewest held jobs first; seconds until something is due."""
        ctx = self.ctx
        clock, now = time.monotonic(), time.time()
        if self.draining:
            return None
        if clock < self._suspended_until:
            return self._suspended_until - clock
        pause: float | None = None
        open_here = [ref for ref in ctx.cluster.gates if ref.type in ctx.types and ref not in self._serving]
        for ref in sorted(open_here, key=lambda ref: len(self.operations[ref].held) if ref in self.operations else 0):
            op = self.operations.get(ref)
            if op is not None and op.held and op.spec.rules.batch:
                continue  # one batch of an operation at a time: it has all cores already, and others share the rest
            wait = 0.0
            if ref in self._trouble:
                wait = self._trouble[ref].until - clock
            if wait <= 0 and op is not None and op.exhausted:
                wait = op.next_due - now if op.next_due is not None else ctx.config.poll
                if wait <= 0:
                    op.exhausted = False
            if wait > 0:
                pause = wait if pause is None else min(pause, wait)
                continue
            if self._free_slots <= 0:
                break
            self._serving[ref] = asyncio.ensure_future(self._serve(ref))
            if op is None or op.spec.rules.batch:
                self._free_slots -= 1
        return pause

    async def _serve(self, ref: OperationRef) -> None:
        """One round for an operation: look, claim a block, start its runs."""
        ctx = self.ctx
        known = self.operations.get(ref)
        slots = 1 if known is None or known.spec.rules.batch else 0
        try:
            op = known if known is not None else await self._open(ref)
            if op is None:
                return
            if not op.open_jobs:
                await self._look(op)
            batch = op.spec.rules.batch
            free = slots if batch else slots + self._take_slots(op.open_jobs - slots)
            slots = free
            won = await self._claim(op, free)
            self._trouble.pop(ref, None)
            if won:
                blocks = [won] if batch else [[p] for p in won]
                for block in blocks:
                    slots -= 1
                    self._start(op, block)
            elif op.open_jobs:
                op.forget_candidates()
            else:
                op.exhausted = True
        except NotFound:
            self.operations.pop(ref, None)
        except (SessionLost, asyncio.CancelledError):
            raise
        except DistopError as error:
            self._back_off(ref, error)
        except Exception as error:
            self._back_off(ref, error, trace=True)
        finally:
            self._free_slots += slots
            self._serving.pop(ref, None)
            if ref in self.operations and ref not in ctx.cluster.gates:
                self._closed(ref)
            self._wake.set()

    def _back_off(self, ref: OperationRef, error: Exception, *, trace: bool = False) -> None:
        pause = self._trouble.setdefault(ref, _Trouble()).again(time.monotonic())
        self.ctx.log.warning(
            "could not serve the operation: %s (again in %.1f s)",
            error,
            pause,
            extra={"operation": str(ref)},
            exc_info=trace,
        )

    def _take_slots(self, wanted: int) -> int:
        taken = max(0, min(wanted, self._free_slots))
        self._free_slots -= taken
        return taken

    async def _open(self, ref: OperationRef) -> OpenOperation | None:
        ctx = self.ctx
        gate_mod = ctx.cluster.gates.get(ref)
        if gate_mod is None:
            return None
        op = await OpenOperation.load(ctx.client, ctx.keys, ref, gate_mod)
        if op.spec.version > SCHEMA_VERSION:
            ctx.log.warning("written by a newer distop: left alone", extra={"operation": str(ref)})
            self._trouble.setdefault(ref, _Trouble()).again(time.monotonic())
            return None
        self.operations[ref] = op
        if gate_mod > ctx.caught_up_at:
            op.assume_free(ctx.executor_id, self._others(ref.type))
        return op

    def _others(self, type_name: str) -> list[str]:
        nodes = self.ctx.cluster.nodes
        return [nodes[inc].executor for inc in self.ctx.cluster.capable(type_name) if inc != self.ctx.incarnation]

    async def _look(self, op: OpenOperation) -> None:
        ctx = self.ctx
        await op.look(
            ctx.client,
            ctx.keys,
            ctx.cluster.nodes,
            ctx.executor_id,
            self._others(op.ref.type),
            op.spec.rules.retry.maximum,
        )

    # ----------------------------------------------------------------- claim

    async def _claim(self, op: OpenOperation, free_slots: int) -> list[int]:
        """Claim a block; returns the ordinals won, which are then in ``op.held``."""
        rules = op.spec.rules
        executors = len(self.ctx.cluster.capable(op.ref.type))
        mine = op.mine + len(op.again) if op.mine else 0
        size = decide.block_size(op.open_jobs, mine, executors, rules.batch, free_slots, BLOCK_LIMIT)
        free, again = op.take(size)
        free = self._within_bytes(op, free)
        wants: list[claiming.Want] = []
        dead: dict[int, str] = {}
        over: list[tuple[int, Seen[Claim], Claim]] = []
        first, _, _ = decide.claim_for(None, self.ctx.executor_id, self.ctx.incarnation, False, rules)
        wants += [claiming.Want(p, first) for p in free]
        for p, seen, lost in again:
            claim, mod, at_limit = decide.claim_for(seen, self.ctx.executor_id, self.ctx.incarnation, lost, rules)
            if at_limit:
                over.append((p, seen, claim))
                continue
            wants.append(claiming.Want(p, claim, mod))
            if lost:
                dead[p] = seen.value.incarnation
        if over:
            await self._fail_lost(op, over)
        groups = [wants[n : n + claiming.CLAIMS_PER_TXN] for n in range(0, len(wants), claiming.CLAIMS_PER_TXN)]
        limit = asyncio.Semaphore(CLAIMS_IN_FLIGHT)

        async def one(group: Sequence[claiming.Want]) -> list[int]:
            async with limit:
                gone = {dead[want.partition] for want in group if want.partition in dead}
                return await self._claim_group(op, group, gone)

        return [p for won in await asyncio.gather(*map(one, groups)) for p in won]

    def _within_bytes(self, op: OpenOperation, free: list[int]) -> list[int]:
        total = 0
        for n, p in enumerate(free):
            total += int(op.partition(p).get("bytes", 0))
            if total > BLOCK_BYTES and n:
                op.free.extendleft(reversed(free[n:]))
                return free[:n]
        return free

    async def _claim_group(self, op: OpenOperation, wants: Sequence[claiming.Want], dead: Iterable[str]) -> list[int]:
        ctx = self.ctx
        if (runs := claiming.runs(wants)) is not None:
            whole = claiming.claim_runs(ctx.keys, op.ref, op.gate_mod, ctx.incarnation, runs, wants[0].claim)
            result = await ctx.commit(whole)
            if result.succeeded:
                return [self._hold(op, want, result.revision) for want in wants]
        result = await ctx.commit(claiming.claim(ctx.keys, op.ref, op.gate_mod, ctx.incarnation, wants, dead))
        if not result.succeeded:
            # The gate, my node key, or a "dead" node is not as it was: what changed arrives as an event.
            op.free.extend(want.partition for want in wants if not want.seen_mod)
            op.exhausted = True
            return []
        won: list[int] = []
        for want, answer in zip(wants, result.responses, strict=True):
            if not isinstance(answer, TxnResult):
                continue
            fence = result.revision if answer.succeeded else self._won_before(want, answer)
            if fence:
                won.append(self._hold(op, want, fence))
        return won

    @staticmethod
    def _hold(op: OpenOperation, want: claiming.Want, fence: int) -> int:
        name = str(op.partition(want.partition).get("name", want.partition))
        op.held[want.partition] = Held(want.claim, fence, name)
        return want.partition

    @staticmethod
    def _won_before(want: claiming.Want, answer: TxnResult) -> int:
        """The fence, if the claim that stands there is the very one that an earlier copy of this write put (T9)."""
        found = answer.responses[0]
        if isinstance(found, GetResult) and found.kv is not None and found.kv.value == want.claim.encode():
            return found.kv.mod_revision
        return 0

    async def _fail_lost(self, op: OpenOperation, over: Sequence[tuple[int, Seen[Claim], Claim]]) -> None:
        ctx = self.ctx
        now = rfc3339(time.time())
        by_dead: dict[str, list[tuple[int, int, Outcome]]] = {}
        for p, seen, claim in over:
            old = seen.value
            text = f"executor {old.executor} was lost while it ran attempt {old.attempt} ({claim.failures} failures)"
            if old.error:
                text += f"; the error before: {old.error}"
            name = str(op.partition(p).get("name", p))
            outcome = Outcome(name, old.executor, old.incarnation, old.attempt, now, now, error=text)
            by_dead.setdefault(old.incarnation, []).append((p, seen.mod, outcome))
        for holder, lost in by_dead.items():
            for n in range(0, len(lost), claiming.REPORTS_PER_TXN):
                page = lost[n : n + claiming.REPORTS_PER_TXN]
                await ctx.commit(claiming.fail_lost(ctx.keys, op.ref, op.gate_mod, ctx.incarnation, holder, page))

    # ------------------------------------------------------------------- run

    def _start(self, op: OpenOperation, block: list[int]) -> None:
        run = asyncio.ensure_future(self._run(op, block))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)

    async def _run(self, op: OpenOperation, block: list[int]) -> None:
        ctx = self.ctx
        try:
            checkpoints = await self._checkpoints(op, block)
            items = tuple(
                JobItem(op.partition(p), op.held[p].claim.attempt, op.held[p].fence, checkpoints.get(p))
                for p in block
                if p in op.held
            )
            request = RunRequest(
                op=str(op.ref),
                type=op.ref.type,
                arg=op.arg,
                table=op.spec.table.to_json() if op.spec.table else None,
                items=items,
                batch=op.spec.rules.batch,
                cleanup_first=any(item.attempt > 1 for item in items),
                deadline=ctx.session.deadline,
            )
            await ctx.worker.run(
                request,
                lambda events: self._ended(op, events),
                on_status=lambda p, text: ctx.log.info(
                    "%s", text, extra={"operation": str(op.ref), "partition": p if p >= 0 else None}
                ),
                on_progress=lambda p, value: self._checkpoint(op, p, value),
            )
        except (SessionLost, asyncio.CancelledError):
            raise
        except Exception:
            ctx.log.exception("a run broke: its jobs are released", extra={"operation": str(op.ref)})
            self._release(op, [p for p in block if p in op.held])
        finally:
            self._free_slots += 1
            self._wake.set()

    async def _checkpoints(self, op: OpenOperation, block: Sequence[int]) -> dict[int, Any]:
        if not op.spec.rules.resumable:
            return {}
        found: dict[int, Any] = {}
        for p in block:
            if op.held[p].claim.attempt > 1:
                kv = await self.ctx.client.get(self.ctx.keys.job(op.ref, p, "progress"))
                if kv is not None:
                    found[p] = kv.value
        return {p: self.ctx.decode(value) for p, value in found.items()}

    async def _checkpoint(self, op: OpenOperation, partition: int, value: Any) -> bool:
        held = op.held.get(partition)
        if held is None:
            return False
        write = claiming.checkpoint(self.ctx.keys, op.ref, partition, held.fence, self.ctx.encode(value))
        return await self.ctx.reporter.write(write)

    def _ended(self, op: OpenOperation, events: Sequence[JobEnded]) -> None:
        """Jobs ended: turn each into a write under its fence and hand them to the group commit."""
        writes = []
        for event in events:
            held = op.held.get(event.partition)
            if held is not None:
                write = self._write(op, held, event)
                writes.append((write, self._forget(op, event.partition, write.label == "report")))
        self.ctx.reporter.submit(writes)

    def _write(self, op: OpenOperation, held: Held, event: JobEnded) -> claiming.Guarded:
        keys, p, claim = self.ctx.keys, event.partition, held.claim
        if event.kind in ("cancelled", "refused"):
            self._hint_released()
            return claiming.wait_again(keys, op.ref, p, held.fence, decide.released(claim, self.ctx.executor_id))
        if event.kind in ("error", "crash"):
            self._count_failure()
            rules = op.spec.rules
            if not rules.at_limit(claim.failures + 1):
                pause = rules.retry.delay(claim.failures + 1) * random.uniform(0.5, 1.0)
                self.ctx.log.warning(
                    "the job broke (again in %.1f s): %s",
                    pause,
                    event.error.strip().splitlines()[0] if event.error.strip() else event.kind,
                    extra={"operation": str(op.ref), "partition": p, "attempt": claim.attempt},
                )
                waiting = decide.retried(claim, self.ctx.executor_id, event.error, rfc3339(time.time() + pause))
                self._hint_released()
                return claiming.wait_again(keys, op.ref, p, held.fence, waiting)
        else:
            self._failures_in_a_row = 0
        state = JobState.SUCCESS if event.kind == "success" else JobState.FAILED
        outcome = Outcome(
            held.name,
            self.ctx.executor_id,
            self.ctx.incarnation,
            claim.attempt,
            rfc3339(event.started),
            rfc3339(event.finished),
            event.result,
            event.error,
        )
        try:
            return claiming.report(keys, op.ref, p, held.fence, state, outcome)
        except InvalidArgument as error:
            plain = Outcome(
                held.name,
                self.ctx.executor_id,
                self.ctx.incarnation,
                claim.attempt,
                outcome.started,
                outcome.finished,
                error=str(error),
            )
            return claiming.report(keys, op.ref, p, held.fence, JobState.FAILED, plain)

    def _forget(self, op: OpenOperation, partition: int, ended: bool) -> Any:
        def answered(applied: bool) -> None:
            op.held.pop(partition, None)
            op.done += applied and ended
            if not applied:
                self.ctx.log.info(
                    "another holder has the job: the outcome here is dropped",
                    extra={"operation": str(op.ref), "partition": partition},
                )
            if not op.held:
                # The block is done: what failed here, or was left by others, may be claimable.
                op.exhausted = op.done >= op.plan.count
                if op.spec.rules.batch:
                    op.forget_candidates()
                if op.ref not in self.ctx.cluster.gates:
                    self._closed(op.ref)
                self._wake.set()

        return answered

    def _release(self, op: OpenOperation, partitions: Iterable[int]) -> None:
        writes = []
        for p in partitions:
            held = op.held[p]
            waiting = decide.released(held.claim, self.ctx.executor_id)
            writes.append(
                (claiming.wait_again(self.ctx.keys, op.ref, p, held.fence, waiting), self._forget(op, p, False))
            )
        self.ctx.reporter.submit(writes)
        self._hint_released()

    def _count_failure(self) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= QUICK_FAILURES:
            self._failures_in_a_row = 0
            self._suspended_until = time.monotonic() + SELF_SUSPICION
            self.ctx.log.error(
                "%d jobs in a row broke here: this node claims nothing for %d s", QUICK_FAILURES, int(SELF_SUSPICION)
            )

    def _hint_released(self) -> None:
        """Tell the others, through my node key, that claims wait; releases in a row are told once."""
        if self._hint is None or self._hint.done():
            self._hint = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        await self.ctx.reporter.drain()
        await self.ctx.announce_released()

    # ------------------------------------------------------------ adopt, stop

    def give_back(self, ref: OperationRef, partition: int, claim: Claim, mod: int) -> None:
        """The poll found a claim of mine that I neither run nor await: set it to waiting."""
        op = self.operations.get(ref)
        if op is not None and partition in op.held:
            return
        if ref in self._serving:
            return
        write = claiming.wait_again(self.ctx.keys, ref, partition, mod, decide.released(claim, self.ctx.executor_id))
        self.ctx.reporter.submit([(write, lambda applied: None)])
        self._hint_released()

    async def stop(self, grace: float) -> None:
        """Claim nothing more, stop what runs, and release it; wait at most ``grace`` seconds."""
        self.draining = True
        for op in list(self.operations.values()):
            if op.held:
                self.ctx.worker.cancel(str(op.ref))
        pending = {*self._serving.values(), *self._runs}
        if pending:
            await asyncio.wait(pending, timeout=grace)
        await self.ctx.reporter.drain()

    def close(self) -> None:
        """Drop everything at once: the session is over, and nothing more may be written."""
        for work in (*self._serving.values(), *self._runs, *([self._hint] if self._hint else [])):
            work.cancel()
