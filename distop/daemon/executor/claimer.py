"""Claims blocks of an open operation's jobs: transactions of ``protocol.job_transitions``, sent in groups, several in
flight.

A group that etcd rejects as invalid is split until the single rejected write is found.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from distop.clock import time
from distop.decide import next_steps
from distop.errors import MalformedRequest
from distop.protocol import job_transitions
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.json_codec import rfc3339
from distop.protocol.txn import MAX_OPERATIONS, Get, GetResult, TxnResult, operations
from distop.services.open_operation import Held, OpenOperation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Seen
    from distop.protocol.txn import Txn

BLOCK_LIMIT = 20_000
"""Jobs in one block at most."""
CLAIMS_IN_FLIGHT = 8

T = TypeVar("T")


@dataclass(slots=True)
class Won:
    """What a round of claims brought."""

    partitions: list[int] = field(default_factory=list)
    """The ordinals won, in their order; their claims are in the operation's ``held``."""
    refused: bool = False
    """A whole group was refused: the gate, my node, or a holder that seemed gone is not as it was."""
    error: Exception | None = None
    """What went wrong beside; what was won before is won all the same."""
    taken_over: int = 0
    """How many of those won were held by executors that are gone."""

    def rejected(self, error: MalformedRequest | None) -> None:
        """What etcd rejects as invalid, even alone, if anything."""
        self.error = self.error or error


async def by_halves(group: Sequence[T], send: Callable[[Sequence[T]], Awaitable[None]]) -> MalformedRequest | None:
    """Send a group; one that etcd rejects as invalid in halves. What etcd says of the first that it rejects alone."""
    try:
        await send(group)
    except MalformedRequest as error:
        if len(group) == 1:
            return error
        half = len(group) // 2
        found, other = await by_halves(group[:half], send), await by_halves(group[half:], send)
        return found or other
    return None


class Claimer:
    """Claims for one incarnation."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    async def claim(self, op: OpenOperation, slots: int, *, alone: bool = False) -> Won:
        """Claim a block of an operation for this many free slots; or (``alone``) one of its suspects."""
        ctx, rules = self._ctx, op.spec.rules
        executors = len(ctx.cluster.capable(op.ref.type, op.gate.where, op.gate.tables(op.ref.table)))
        mine = op.mine + len(op.again) if op.mine else 0
        size = next_steps.block_size(op.open_jobs, mine, executors, rules.batch, slots, BLOCK_LIMIT)
        gate_mod, size = op.gate_mod, min(size, op.room)
        free, again = ([], op.take_suspect()) if alone else op.take(size)
        first, _, _ = next_steps.claim_for(None, ctx.executor_id, ctx.incarnation, False, rules)
        # Neighbours beside each other again, whatever order they were taken in: they are claimed as runs.
        wants = [job_transitions.Want(p, first) for p in sorted(self._one_batch(op, free))]
        dead: dict[int, str] = {}
        former: dict[int, Claim] = {}
        over: list[tuple[int, Seen[Claim], Claim]] = []
        for p, seen, lost in again:
            claim, mod, at_limit = next_steps.claim_for(seen, ctx.executor_id, ctx.incarnation, lost, rules)
            if at_limit and not next_steps.only_ends(claim, rules):
                over.append((p, seen, claim))
                continue
            wants.append(job_transitions.Want(p, claim, mod))
            if lost and not seen.value.actor:
                dead[p] = seen.value.incarnation
                former[p] = seen.value
        uncounted = op.permits.gone if op.permits is not None else frozenset()
        overdue = op.permits.overdue if op.permits is not None else ()
        wants = self._with_permits(op, wants, former)
        won = Won()
        if over:
            await self._fail_lost(op, over, won)
        limit = asyncio.Semaphore(CLAIMS_IN_FLIGHT)

        async def send(group: Sequence[job_transitions.Want]) -> None:
            gone = {dead[want.partition] for want in group if want.partition in dead}
            await self._claim_group(op, gate_mod, group, gone, uncounted, overdue, won)

        async def one(group: Sequence[job_transitions.Want]) -> None:
            async with limit:
                won.rejected(await by_halves(group, send))

        size = ctx.limits.claims
        if op.gate.options.max_jobs or former:
            size = min(size, job_transitions.LIMITED_CLAIMS_PER_TXN)
        groups = [wants[n : n + size] for n in range(0, len(wants), size)]
        for answer in await asyncio.gather(*map(one, groups), return_exceptions=True):
            if isinstance(answer, Exception):
                won.error = answer
            elif isinstance(answer, BaseException):
                raise answer
        won.taken_over = sum(p in dead for p in won.partitions)
        # A child finds what it kept of a batch again by the files in their order.
        won.partitions.sort()
        return won

    @staticmethod
    def _with_permits(
        op: OpenOperation, wants: list[job_transitions.Want], former: Mapping[int, Claim]
    ) -> list[job_transitions.Want]:
        """The wants with the permits that they take, keep, or give back; those for which there is none are left out:
        they are found again by the next look.
        """
        known, given = op.permits, []
        free = iter(sorted(known.free) if known is not None else ())
        for want in wants:
            old = former.get(want.partition)
            if known is None and not op.gate.options.max_jobs:
                given.append(replace(want, former=old))
            elif known is None:
                break
            elif old is not None and known.keeps(old):
                given.append(replace(want, claim=replace(want.claim, permit=old.permit)))
            elif (number := next(free, None)) is not None:
                claim = replace(want.claim, permit=number)
                given.append(replace(want, claim=claim, permit_mod=known.free.pop(number), former=old))
        return given

    async def revoke_lost(self, op: OpenOperation) -> Exception | None:
        """Set lost claims that no claim compares to waiting, and fail the jobs that were lost once too often.

        Neither needs a permit. Refused where the gate, this node or the claims are not as they were seen. Returns what
        etcd rejects as invalid, even alone.
        """
        ctx, rules, gate_mod = self._ctx, op.spec.rules, op.gate_mod
        over: list[tuple[int, Seen[Claim], Claim]] = []
        lost: list[tuple[int, int, Claim]] = []
        for p, seen in op.uncompared.items():
            claim, mod, at_limit = next_steps.claim_for(seen, ctx.executor_id, ctx.incarnation, True, rules)
            if at_limit and not next_steps.only_ends(claim, rules):
                over.append((p, seen, claim))
            else:
                lost.append((p, mod, seen.value))
        done = Won()
        if over:
            await self._fail_lost(op, over, done)

        async def send(page: Sequence[tuple[int, int, Claim]]) -> None:
            await ctx.commit(
                job_transitions.revoke_lost(
                    *(ctx.keys, op.ref, gate_mod, ctx.incarnation, page),
                    lambda claim: next_steps.revoked_lost(claim, rules),
                )
            )

        size = min(ctx.limits.reaped, ctx.limits.claims)
        for n in range(0, len(lost), size):
            done.rejected(await by_halves(lost[n : n + size], send))
        return done.error

    async def claim_unread(
        self, ref: OperationRef, gate: Seen[Gate], ordinals: Sequence[int]
    ) -> tuple[OpenOperation, Won] | None:
        """Claim jobs of an operation that has just opened, and read it, in one transaction; None where it was refused,
        or rejected as invalid: read it then, and claim as usual, which also finds what an earlier copy of this won
        (T9), and sends smaller groups.
        """
        ctx = self._ctx
        first = Claim(ctx.executor_id, ctx.incarnation, 1, 0)
        wants = [job_transitions.Want(p, first) for p in ordinals]
        if (runs := job_transitions.runs(wants)) is None:
            return None
        records = OpenOperation.records(ctx.keys, ref)
        txn = job_transitions.claim_unread(ctx.keys, ref, gate.mod, ctx.incarnation, runs, first, records)
        try:
            result = await ctx.commit(txn)
        except MalformedRequest:
            return None
        if not result.succeeded:
            return None
        answers = [answer for answer in result.responses[-len(records) :] if isinstance(answer, GetResult)]
        try:
            op = await OpenOperation.of(answers, ctx.client, ctx.keys, ref, gate.mod)
            op.gate = gate.value
            op.assume_free(ctx.executor_id, ctx.others(ref.type, op.gate.tables(ref.table), op.gate.where))
            op.take_these(ordinals)
            return op, Won([self._hold(op, want, result.revision) for want in wants])
        except Exception:
            # Nobody here could run them, and others would wait for that until the poll finds them.
            for p in ordinals:
                self.give_back(ref, p, first, result.revision)
            raise

    def give_back(self, ref: OperationRef, partition: int, claim: Claim, mod: int) -> None:
        """Set a claim of mine, under which nothing runs, to waiting."""
        waiting = next_steps.released(claim, self._ctx.executor_id)
        write = job_transitions.wait_again(self._ctx.keys, ref, partition, mod, waiting, claim)
        self._ctx.reporter.submit([(write, lambda applied: None)])

    def first_share(self, op: OpenOperation, plan: Txn, slots: int) -> list[int]:
        """The jobs of an operation that are claimed with the transaction that writes its plan: as many of this
        executor's share as fit into its slots and into the transaction; for one batch all of it, or nothing.
        """
        tables = op.gate.tables(op.ref.table)
        here = self._ctx.fits(op.gate.where) and self._ctx.admits(op.ref.type, tables)
        if op.gate.options.max_jobs or not here:
            return []
        ordered, mine = op.shares(self._ctx.executor_id, self._ctx.others(op.ref.type, tables, op.gate.where))
        share, room = ordered[:mine], min(self._ctx.limits.claims, MAX_OPERATIONS - operations(plan))
        room = min(room, op.room)
        if not op.spec.rules.batch:
            return share[: min(slots, room)]
        share.sort()
        fits = 0 < len(share) <= room and slots > 0
        return share if fits and self._fitting(op, share) == len(share) else []

    async def claim_first(
        self, op: OpenOperation, plan: Txn, state_mod: int, ordinals: Sequence[int]
    ) -> tuple[TxnResult, Won]:
        """Write a plan and claim jobs of it, in one transaction; the plan alone where etcd rejects that as invalid."""
        ctx = self._ctx
        wants = [job_transitions.Want(p, Claim(ctx.executor_id, ctx.incarnation, 1, 0)) for p in ordinals]
        both = job_transitions.with_first(ctx.keys, op.ref, plan, state_mod, ctx.incarnation, wants)
        try:
            result = await ctx.commit(both)
        except MalformedRequest:
            return await ctx.commit(plan), Won()
        won = Won()
        if result.succeeded:
            won.partitions = [self._hold(op, want, result.revision) for want in wants]
        elif result.repeated:
            won.partitions = await self._won_and_not_told(op, wants)
        if won.partitions:
            op.gate_mod = op.held[won.partitions[0]].fence
            others = ctx.others(op.ref.type, op.gate.tables(op.ref.table), op.gate.where)
            op.assume_free(ctx.executor_id, others)
            op.take_these(won.partitions)
        return result, won

    def _one_batch(self, op: OpenOperation, free: list[int]) -> list[int]:
        """Those of the free jobs that are claimed together: where they run as one batch, by their bytes. The others are
        free again.
        """
        fitting = self._fitting(op, free) if op.spec.rules.batch else len(free)
        op.free.extendleft(reversed(free[fitting:]))
        return free[:fitting]

    def _fitting(self, op: OpenOperation, ordinals: Sequence[int]) -> int:
        sizes = (int(op.partition(p).get("bytes", 0)) for p in ordinals)
        return next_steps.within_bytes(sizes, self._ctx.config.slots)

    async def _claim_group(
        self,
        op: OpenOperation,
        gate_mod: int,
        wants: Sequence[job_transitions.Want],
        dead: Iterable[str],
        uncounted: Iterable[str],
        overdue: Iterable[tuple[int, int]],
        won: Won,
    ) -> None:
        """``gate_mod``: of the gate by whose limits these were chosen. The operation may have another one by now."""
        ctx = self._ctx
        if (runs := job_transitions.runs(wants)) is not None:
            whole = job_transitions.claim_runs(ctx.keys, op.ref, gate_mod, ctx.incarnation, runs, wants[0].claim)
            result = await ctx.commit(whole)
            if result.succeeded:
                won.partitions += [self._hold(op, want, result.revision) for want in wants]
                return
        result = await ctx.commit(
            job_transitions.claim(ctx.keys, op.ref, gate_mod, ctx.incarnation, wants, dead, uncounted, overdue)
        )
        if not result.succeeded:
            won.refused = True
            won.partitions += await self._won_and_not_told(op, wants)
            return
        for want, answer in zip(wants, result.responses, strict=True):
            if not isinstance(answer, TxnResult):
                continue
            fence = result.revision if answer.succeeded else self._won_before(want, answer)
            if fence:
                won.partitions.append(self._hold(op, want, fence))

    async def _won_and_not_told(self, op: OpenOperation, wants: Sequence[job_transitions.Want]) -> list[int]:
        """Those that an earlier copy won whose answer was lost (T9): the gate has gone since, or another one stands
        there, and so the repetition was refused as a whole. They are mine all the same; without this the next poll
        would be the first to know.
        """
        found = await self._ctx.client.read(*(Get(self._ctx.keys.claim(op.ref, want.partition)) for want in wants))
        return [
            self._hold(op, want, answer.kv.mod_revision)
            for want, answer in zip(wants, found, strict=True)
            if answer.kv is not None and answer.kv.value == want.claim.encode() and want.partition not in op.held
        ]

    @staticmethod
    def _hold(op: OpenOperation, want: job_transitions.Want, fence: int) -> int:
        name = str(op.partition(want.partition).get("name", want.partition))
        op.held[want.partition] = Held(want.claim, fence, name)
        return want.partition

    @staticmethod
    def _won_before(want: job_transitions.Want, answer: TxnResult) -> int:
        """The fence, if the claim that stands there is the very one that an earlier copy of this write put (T9)."""
        found = answer.responses[0]
        if isinstance(found, GetResult) and found.kv is not None and found.kv.value == want.claim.encode():
            return found.kv.mod_revision
        return 0

    async def _fail_lost(self, op: OpenOperation, over: Sequence[tuple[int, Seen[Claim], Claim]], won: Won) -> None:
        """Jobs whose executors were lost once too often, and which have nothing to clean up: write that they failed."""
        ctx = self._ctx
        now = rfc3339(time.time())
        by_dead: dict[str, list[tuple[int, int, Outcome]]] = {}
        for p, seen, claim in over:
            old = seen.value
            text = next_steps.lost_text(old, claim.failures)
            name = str(op.partition(p).get("name", p))
            outcome = Outcome(name, old.executor, old.incarnation, old.attempt, now, now, error=text, tried=claim.tried)
            by_dead.setdefault(old.incarnation, []).append((p, seen.mod, outcome))
        former = {p: seen.value for p, seen, _ in over}

        async def send(holder: str, page: Sequence[tuple[int, int, Outcome]]) -> None:
            txn = job_transitions.fail_lost(ctx.keys, op.ref, op.gate_mod, ctx.incarnation, holder, page, former)
            written = (await ctx.commit(txn)).succeeded
            won.refused = won.refused or not written
            if written:
                ctx.meter.jobs_lost(op.ref.type, len(page))

        for holder, lost in by_dead.items():
            for n in range(0, len(lost), ctx.limits.reports):
                won.rejected(await by_halves(lost[n : n + ctx.limits.reports], partial(send, holder)))
