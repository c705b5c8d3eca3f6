"""The executor role of a daemon: give free slots to open operations, claim their jobs, have them run.

A thin shell: which jobs, how many and in what order is decided in ``decide.next_steps``; every write is a transaction
of ``protocol.job_transitions``. A slot runs one job, or one batch of jobs of one operation.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.daemon.executor.circuit_breaker import Suspicion
from distop.daemon.executor.claimer import Claimer, Won
from distop.daemon.executor.exclusive_jobs import Quiet
from distop.daemon.executor.job_runs import Jobs
from distop.daemon.executor.operation_backoff import Troubles
from distop.daemon.executor.priority_queue import Turns
from distop.daemon.executor.single_job_operations import Small
from distop.daemon.local_jobs import WorkDirectoryUnusable
from distop.decide import next_steps
from distop.errors import DistopError, EtcdRejected, SessionLost, describe
from distop.protocol.records import Phase
from distop.services.open_operation import OpenOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.jobs import Claim
    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef
    from distop.protocol.txn import Txn, TxnResult


STUCK_PAUSE = 1.0
"""Seconds between two looks whether a child in which a job does not stop has been replaced."""


class Executor:
    """Serves the open operations whose type this node offers, with ``slots`` runs at once."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._operations: dict[OperationRef, OpenOperation] = {}
        self._claimer = Claimer(ctx)
        self._suspicion = Suspicion(ctx)
        self._jobs = Jobs(ctx, self._suspicion, self._stopping, self._settled, self._hint_released)
        self._serving: dict[OperationRef, asyncio.Task[Any]] = {}
        self._runs: set[asyncio.Task[None]] = set()
        self._free_slots = ctx.config.slots
        self._wake = asyncio.Event()
        self._troubles = Troubles(ctx.log, ctx.rejected_writes)
        self._quiet = Quiet(ctx)
        self._small = Small(ctx, lambda ref: ref in self._operations or ref in self._serving or ref in self._troubles)
        self._turn_of_small = True
        self._turns = Turns()
        self._leaving = False
        self._gone: list[str] = []
        """Operations whose private directories are to be removed."""
        self._hint: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ wake

    def nodes_changed(self) -> None:
        """Nodes came, went or changed; :meth:`cluster_changed` follows."""
        self._small.divide_anew()

    def cluster_changed(self, *, hint: bool, refs: Collection[OperationRef] | None = None) -> None:
        """Gates or pending operations changed: those of ``refs``; None: perhaps all. With ``hint`` there may be claims
        to take: a node left, released jobs, or it is time for the poll.
        """
        cluster = self._ctx.cluster
        self._small.changed(cluster.gates, refs)
        for ref in list(self._operations) if refs is None else refs:
            op, gate = self._operations.get(ref), cluster.gates.get(ref)
            if op is None:
                continue
            if gate is not None and gate.mod != op.gate_mod:
                op.reopened(gate.mod, gate.value)
            elif self._shut(op):
                self._closed(op)
        if self._ctx.draining:
            self._troubles.keep(())  # it claims nothing, so etcd rejects nothing
            for op in self._operations.values():
                if op.held:
                    self._ctx.worker.release(str(op.ref))
        for kept in (self._troubles, self._suspicion, self._quiet):
            kept.keep(cluster.gates)
        self._turns.keep(cluster.gates, refs)
        if hint:
            self._small.hint()
            for op in self._operations.values():
                op.exhausted = False
        self._wake.set()

    @property
    def busy(self) -> bool:
        """It holds a claim, or may be about to."""
        return bool(self._serving or self._runs) or any(op.held for op in self._operations.values())

    def _stopping(self, op: OpenOperation) -> bool:
        """No job of it may start any more."""
        return self._leaving or self._ctx.draining or self._shut(op)

    def _shut(self, op: OpenOperation) -> bool:
        """Its gate is gone. One that this daemon has just made may not have been seen yet."""
        return op.ref not in self._ctx.cluster.gates and op.gate_mod <= self._ctx.gates_at

    def _closed(self, op: OpenOperation) -> None:
        """The gate is gone: no more claims. What runs is stopped, or where the operation is only paused, what has not
        begun is released.
        """
        phase = self._ctx.cluster.pending.get(op.ref)
        if op.held and phase is Phase.PAUSED:
            self._ctx.worker.pause(str(op.ref))
        elif op.held:
            if not op.told_to_stop:
                where = {"operation": str(op.ref)}
                self._ctx.log.info("the operation is %s: stopping its jobs", phase or "gone", extra=where)
            op.told_to_stop = True
            if phase is Phase.HALTED:
                self._ctx.worker.release(str(op.ref))
            else:
                self._ctx.worker.cancel(str(op.ref))
        if not op.held and op.ref not in self._serving:
            self._operations.pop(op.ref, None)
            self._quiet.gone(op.ref)
            if phase not in (Phase.PAUSED, Phase.HALTED):
                self._forget(op.ref)

    def _forget(self, ref: OperationRef) -> None:
        """It is gone; with those of which this is seen in the same turn of the loop."""
        self._gone.append(str(ref))
        if len(self._gone) == 1:
            asyncio.get_running_loop().call_soon(self._forget_all)

    def _forget_all(self) -> None:
        gone, self._gone = self._gone, []
        self._track(asyncio.ensure_future(self._ctx.worker.forget(*gone)))

    def _settled(self, op: OpenOperation) -> None:
        """A job is held no longer."""
        if op.gate.options.limited:
            op.exhausted = op.done >= op.plan.count
        if not op.held:
            if self._quiet.running:
                self._quiet.over(op.ref)
            # The block is done: what failed here, or was left by others, may be claimable.
            op.exhausted = op.done >= op.plan.count
            if op.exhausted:
                self._small.done(op.ref)
            else:
                self._small.one_by_one([op.ref])
            if op.spec.rules.batch:
                op.forget_candidates()
            if self._shut(op):
                self._closed(op)
        self._wake.set()

    # ------------------------------------------------------------------ loop

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._wake.clear()
            pause = self._assign()
            self._ctx.activity_changed()
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _assign(self) -> float | None:
        """Give free slots to operations with work, the most urgent first, of those that are as urgent the one with the
        fewest held jobs; seconds until something is due.
        """
        ctx = self._ctx
        if self._leaving or ctx.draining:
            return None
        if (disk := self._jobs.disk_pause()) > 0:
            return disk
        if self._ctx.worker.stuck:
            return STUCK_PAUSE  # what is claimed now would wait here, and others may run it
        if self._quiet.waits and self._alone():
            self._quiet.fall(lambda ref: ref in self._operations and self._wait(ref) <= 0)
        if self._quiet.ref is not None and not self._quiet.running and self._wait(self._quiet.ref) > 0:
            self._quiet.over(self._quiet.ref)
        if self._quiet.ref is not None:
            self._serve_quietly(self._quiet.ref)
            return None
        if self._free_slots <= 0:
            return None  # until one falls free
        # In turn: neither are to wait for all of the others; but what is more urgent than they are goes first.
        self._turn_of_small = not self._turn_of_small and not self._small.urgent
        kinds = (self._assign_small, self._assign_general)
        pauses = [assign() for assign in (kinds if self._turn_of_small else reversed(kinds))]
        return min((pause for pause in pauses if pause is not None), default=None)

    def _assign_small(self) -> float | None:
        """Give free slots to groups of operations of one job."""
        while self._free_slots > 0:
            refs, pause = self._small.choose(self._free_slots, self._wait)
            if not refs:
                return pause
            self._free_slots -= 1
            serving = asyncio.ensure_future(self._serve_small(refs))
            self._serving |= dict.fromkeys(refs, serving)
        return None

    def _assign_general(self) -> float | None:
        """Give free slots to all other operations."""
        ctx = self._ctx
        pause: float | None = None
        known, now = self._operations, time.monotonic()
        ranks: dict[OperationRef, int] = {}
        for ref in self._small.general:
            op, gate = known.get(ref), ctx.cluster.gates.get(ref)
            if gate is None:
                continue
            if op is not None and op.exhausted:  # of many that are open, most are: they must cost little at each wake
                wait = op.next_due - now if op.next_due is not None else ctx.config.poll
                if wait > 0:
                    pause = wait if pause is None else min(pause, wait)
                    continue
            if ctx.serves(ref.type, gate.value.tables(ref.table)) and ctx.fits(gate.value.where):
                ranks[ref] = self._rank(ref, gate.value, now)
        # A round that is under way has not taken its slots yet: who is less urgent waits for it, not for long.
        first, until = self._turns.under_way(ranks, now)
        open_here = [ref for ref in ranks if ref not in self._serving]
        for ref in sorted(open_here, key=lambda ref: (-ranks[ref], len(known[ref].held) if ref in known else 0)):
            op = known.get(ref)
            if op is not None and op.held and op.spec.rules.batch:
                continue  # one batch of an operation at a time: it has all cores already, and others share the rest
            if op is not None and op.crowded:
                continue  # as many as may run here, until one of them has ended
            wait = self._wait(ref)
            if wait <= 0 and op is not None:
                op.exhausted = False
            if wait <= 0 and first is not None and ranks[ref] < first:
                wait = until
            if wait > 0:
                pause = wait if pause is None else min(pause, wait)
                continue
            if self._free_slots <= 0:
                break
            first, until = self._turns.begins(ref, ranks[ref], now)
            self._serve_soon(ref, 1 if op is None or op.spec.rules.batch else 0)
        return pause

    def _rank(self, ref: OperationRef, gate: Gate, now: float) -> int:
        op = self._operations.get(ref)
        priority = 0 if self._troubles.missing(ref) else gate.options.priority
        return self._turns.rank(ref, priority, now, held=op is not None and bool(op.held))

    def _wait(self, ref: OperationRef) -> float:
        """Seconds for which an operation is not to be served here."""
        gate = self._ctx.cluster.gates.get(ref)
        tables = gate.value.tables(ref.table) if gate is not None else (ref.table,)
        if not self._ctx.serves(ref.type, tables) or (gate is not None and not self._ctx.fits(gate.value.where)):
            return self._ctx.config.poll
        return max(self._troubles.wait(ref), self._suspicion.wait(ref))

    def _serve_soon(self, ref: OperationRef, slots: int) -> None:
        self._free_slots -= slots
        self._serving[ref] = asyncio.ensure_future(self._serve(ref, slots))

    def _serve_quietly(self, ref: OperationRef) -> None:
        """Nothing but a job of this operation is to begin here, and that once nothing runs. Each hint has it looked at
        before: somebody else may have run what it was for.
        """
        op, alone = self._operations[ref], self._alone()
        if ref not in self._serving and not self._quiet.running and (alone or not op.exhausted):
            self._serve_soon(ref, int(alone))

    def _alone(self, mine: int = 0) -> bool:
        """Nothing runs here, and no end is being written, besides what takes ``mine`` slots."""
        idle = self._free_slots + mine == self._ctx.config.slots
        return idle and not any(op.held for op in self._operations.values())

    async def _serve(self, ref: OperationRef, slots: int) -> None:
        """One round for an operation: look, claim a block, start its runs. ``slots`` are taken for it already."""
        try:
            ctx, op, won = self._ctx, self._operations.get(ref), None
            rejected: Exception | None = None
            if op is None:
                few = self._few(ref, slots + self._free_slots)
                slots += self._take_slots(len(few) - slots)
                op, won = await self._open(ref, few)
                if op is None:
                    return
            returned = op.returned
            if won is None:
                if op.unknown or not op.room:
                    rejected = await self._look(op)
                if not op.room and not op.only_suspects:
                    # Others have all that may run, and nobody tells when they end.
                    op.exhausted = True
                    op.next_due = time.monotonic() + self._turns.full(ref, ctx.config.poll)
                    self._quiet.gone(ref)
                    if rejected is not None:
                        raise rejected
                    return
                if self._quiet.blocks(ref):
                    return
                alone = self._quiet.concerns(op)
                if alone and not self._quiet.claims(op, self._alone(slots)):
                    return
                if not op.spec.rules.batch:
                    slots += self._take_slots(min(op.open_jobs, op.room) - slots)
                won = await self._claimer.claim(op, slots, alone=alone)
            slots -= self._begin(op, won)
            if (error := won.error or rejected) is not None:
                op.forget_candidates()  # what was taken of them, and not won, is in no list any more
                raise error
            if won.refused:
                # Something that was compared is not as it was seen: its event may be here already, so look anew.
                op.forget_candidates()
                self._troubles.refused(ref)
                return
            self._troubles.served(ref)
            self._turns.served(ref, time.monotonic(), won=bool(won.partitions))
            if not won.partitions:
                if op.open_jobs:
                    op.forget_candidates()
                elif op.returned != returned:
                    # A job went back to wait during this round, which has read what was before.
                    op.forget_candidates()
                    op.exhausted = False
                else:
                    op.exhausted = True
        except SessionLost:
            return  # whoever waits for the session ends this incarnation
        except Exception as error:
            self._failed(ref, error)
        finally:
            self._free_slots += slots
            self._serving.pop(ref, None)
            self._turns.over(ref)
            self._served(ref)

    def _begin(self, op: OpenOperation, won: Won) -> int:
        """Start the runs of what was won; the slots that they have."""
        if won.partitions:
            self._ctx.meter.claimed(op.ref.type, len(won.partitions), won.taken_over)
        if self._stopping(op):
            self._jobs.release(op, won.partitions)
            return 0
        blocks = [won.partitions] if op.spec.rules.batch and won.partitions else [[p] for p in won.partitions]
        for block in blocks:
            self._start(op, block)
        return len(blocks)

    async def _serve_small(self, refs: Sequence[OperationRef]) -> None:
        """Claim operations of one job together, and start their run in the one slot that is taken for it."""
        slots = 1
        try:
            won = await self._small.claim(refs, self._claimer.give_back, self._failed)
            for op in won:
                self._operations[op.ref] = op
                if (gate := self._ctx.cluster.gates.get(op.ref)) is not None and gate.mod != op.gate_mod:
                    op.reopened(gate.mod, gate.value)
                if self._stopping(op):
                    self._jobs.release(op, [0])
            if ops := [op for op in won if not self._stopping(op)]:
                slots = 0
                self._track(asyncio.ensure_future(self._run_small(ops)))
        except SessionLost:
            return
        except EtcdRejected:
            self._small.one_by_one(refs)  # etcd takes none of them together
        except Exception as error:
            self._small.one_by_one(refs)
            for ref in refs:
                self._failed(ref, error)
        finally:
            self._free_slots += slots
            for ref in refs:
                self._serving.pop(ref, None)
                known = self._operations.get(ref)
                if known is not None and self._shut(known):
                    self._closed(known)
            self._wake.set()

    async def _run_small(self, ops: Sequence[OpenOperation]) -> None:
        try:
            ends = await self._jobs.run_in_turn(ops, lambda: self._small.took_long(ops[0].ref.type))
            self._small.ran(ops[0].ref.type, ends)
            for op in ops:
                self._troubles.ran(op.ref)
        except SessionLost:
            return
        except Exception as error:
            for op in ops:
                self._failed(op.ref, error, run=True)
        finally:
            self._free_slots += 1

    async def open(self, ref: OperationRef, make: Callable[[], OpenOperation], plan: Txn, state_mod: int) -> TxnResult:
        """Write an operation's plan, with claims of what this executor takes of it at once; and run that. Raises as
        ``commit`` does. ``make`` is called where it may take something.
        """
        ready = not self._leaving and not self._ctx.draining and self._jobs.disk_pause() <= 0
        ready = ready and not self._ctx.worker.stuck
        ready = ready and self._free_slots > 0 and self._quiet.ref is None and self._wait(ref) <= 0
        known = ref in self._operations or ref in self._serving or ref in self._troubles
        op = make() if ready and not known else None
        ordinals = self._claimer.first_share(op, plan, self._free_slots) if op is not None else []
        if op is None or not ordinals:
            return await self._ctx.commit(plan)
        slots = self._take_slots(1 if op.spec.rules.batch else len(ordinals))
        opening = asyncio.ensure_future(self._open_first(op, plan, state_mod, ordinals, slots))
        self._serving[ref] = opening
        try:
            # Whoever coordinates may be stopped meanwhile; what was won is run all the same.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: self._opened_for_nobody(ref, done))
            raise

    async def _open_first(
        self, op: OpenOperation, plan: Txn, state_mod: int, ordinals: Sequence[int], slots: int
    ) -> TxnResult:
        try:
            result, won = await self._claimer.claim_first(op, plan, state_mod, ordinals)
            if won.partitions:
                self._operations[op.ref] = op
                if (gate := self._ctx.cluster.gates.get(op.ref)) is not None and gate.mod != op.gate_mod:
                    op.reopened(gate.mod, gate.value)
                slots -= self._begin(op, won)
            return result
        finally:
            self._free_slots += slots
            self._serving.pop(op.ref, None)
            self._served(op.ref)

    def _opened_for_nobody(self, ref: OperationRef, opening: asyncio.Task[TxnResult]) -> None:
        """Whoever coordinated would have told what went wrong."""
        error = None if opening.cancelled() else opening.exception()
        if isinstance(error, Exception) and not isinstance(error, SessionLost):
            self._failed(ref, error)

    def _served(self, ref: OperationRef) -> None:
        """A round for an operation is over."""
        op = self._operations.get(ref)
        if (op is None or not op.held) and (self._quiet.running or self._troubles.wait(ref) > 0):
            self._quiet.over(ref)  # its suspect was not won
        if op is not None and self._shut(op):
            self._closed(op)
        self._troubles.keep(self._ctx.cluster.gates)
        self._wake.set()

    @property
    def slots_busy(self) -> int:
        """Slots that are taken."""
        return self._ctx.config.slots - self._free_slots

    def _take_slots(self, wanted: int) -> int:
        """As many free slots as are wanted, if there are so many."""
        taken = max(0, min(wanted, self._free_slots))
        self._free_slots -= taken
        return taken

    def _few(self, ref: OperationRef, slots: int) -> list[int]:
        """This executor's share of an operation that has just opened, where its gate tells that it fits into so many
        slots; else nothing. Where something went wrong with it before, it is read before its jobs are claimed: what
        cannot be read would be claimed and released again and again.
        """
        ctx = self._ctx
        gate = ctx.cluster.gates.get(ref)
        if ref in self._troubles or gate is None or not 0 < gate.value.count <= slots or gate.mod <= ctx.caught_up_at:
            return []
        if gate.value.options.limited:
            return []
        others = ctx.others(ref.type, gate.value.tables(ref.table), gate.value.where)
        ordered, mine = next_steps.shares(gate.value.count, ctx.executor_id, others, str(ref))
        return ordered[:mine]

    async def _open(self, ref: OperationRef, few: Sequence[int]) -> tuple[OpenOperation | None, Won | None]:
        """Read an operation; and claim ``few`` of its jobs, if there are any, at the same time."""
        ctx = self._ctx
        gate = ctx.cluster.gates.get(ref)
        if gate is None:
            return None, None
        if few and (claimed := await self._claimer.claim_unread(ref, gate, few)) is not None:
            self._operations[ref] = claimed[0]
            return claimed
        op = await OpenOperation.load(ctx.client, ctx.keys, ref, gate.mod)
        self._operations[ref] = op
        op.gate = gate.value
        if (now := ctx.cluster.gates.get(ref)) is not None and now.mod != gate.mod:
            op.reopened(now.mod, now.value)
        elif gate.mod > ctx.caught_up_at:
            op.assume_free(ctx.executor_id, ctx.others(ref.type, op.gate.tables(ref.table), op.gate.where))
        return op, None

    async def _look(self, op: OpenOperation) -> Exception | None:
        """Returns what etcd rejects as invalid, even alone, of what is to become of lost claims."""
        ctx = self._ctx
        rejected: Exception | None = None
        others = ctx.others(op.ref.type, op.gate.tables(op.ref.table), op.gate.where)
        patience = op.spec.rules.retry.maximum
        await op.look(ctx.client, ctx.keys, ctx.cluster.nodes, ctx.executor_id, others, patience, ctx.limits)
        if op.uncompared:
            rejected = await self._claimer.revoke_lost(op)
            await op.look(ctx.client, ctx.keys, ctx.cluster.nodes, ctx.executor_id, others, patience, ctx.limits)
        return rejected

    def _start(self, op: OpenOperation, block: list[int]) -> None:
        self._track(asyncio.ensure_future(self._run(op, block)))

    def _track(self, work: asyncio.Task[None]) -> None:
        self._runs.add(work)
        work.add_done_callback(self._over)

    def _over(self, work: asyncio.Task[None]) -> None:
        self._runs.discard(work)
        self._wake.set()  # not earlier: until here ``busy`` counts this work

    async def _run(self, op: OpenOperation, block: list[int]) -> None:
        try:
            await self._jobs.run(op, block)
            self._troubles.ran(op.ref)
        except SessionLost:
            return
        except Exception as error:
            self._failed(op.ref, error, run=True)
        finally:
            self._free_slots += 1

    def _failed(self, ref: OperationRef, error: Exception, *, run: bool = False) -> None:
        """An operation could not be served.

        Where the work directory is the cause (full, removed), the node record says so: others take the type's jobs, and
        `why` and `doctor` name it.
        """
        self._troubles.failed(ref, error, run=run)
        if self._troubles.missing(ref):
            self._turns.served(ref, time.monotonic(), won=False)  # it waits anew: others have their turn
        if isinstance(error, WorkDirectoryUnusable):
            gate = self._ctx.cluster.gates.get(ref)
            where, tables = (gate.value.where, gate.value.tables(ref.table)) if gate is not None else (None, ())
            self._ctx.capability.cannot_now(ref.type, error.strerror or str(error), where, tables=tables)

    # ----------------------------------------------------------------- hints

    def _hint_released(self) -> None:
        """Tell the others, through my node key, that claims wait; releases in a row are told once."""
        if self._hint is None or self._hint.done():
            self._hint = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        await self._ctx.reporter.drain()
        try:
            await self._ctx.announce_released()
        except DistopError as error:
            self._ctx.log.debug("could not tell that claims wait: %s", describe(error))

    # ------------------------------------------------------------ adopt, stop

    def give_back(self, ref: OperationRef, partition: int, claim: Claim, mod: int) -> None:
        """The poll found a claim of mine that I neither run nor await: set it to waiting."""
        op = self._operations.get(ref)
        if (op is not None and partition in op.held) or ref in self._serving:
            return
        self._claimer.give_back(ref, partition, claim, mod)
        self._hint_released()

    async def stop(self, grace: float) -> None:
        """Claim nothing more, stop what runs, and release it. Returns when nothing of it runs: what did not stop
        within ``grace`` seconds was killed with its child.
        """
        self._leaving = True
        if self._serving:
            await asyncio.wait(set(self._serving.values()))
        for op in list(self._operations.values()):
            if op.held:
                self._ctx.worker.release(str(op.ref))
        if self._runs:
            await asyncio.wait(set(self._runs), timeout=grace)
        if self._runs:
            await self._ctx.worker.abort(f"its jobs did not stop within {grace:g} s")
            await asyncio.wait(set(self._runs))
        await self._jobs.drain()

    def close(self) -> None:
        """Drop everything at once: the session is over, and nothing more may be written."""
        self._jobs.close()
        for work in (*self._serving.values(), *self._runs, *([self._hint] if self._hint else [])):
            work.cancel()
