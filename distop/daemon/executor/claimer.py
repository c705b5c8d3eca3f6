"""Claims blocks of an open operation's jobs.

The transactions are those of ``protocol.job_transitions``, sent in groups, several in flight. A group that etcd rejects
as invalid is split until the single rejected write is found.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from distop.clock import time
from distop.decide import job_claims, work_shares
from distop.protocol import batch_claims, job_transitions
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.json_codec import rfc3339
from distop.protocol.txn import Get, GetResult, TxnResult
from distop.services.open_operation import Held, OpenOperation
from distop.store.group_commit import by_halves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.errors import MalformedRequest
    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Seen

BLOCK_LIMIT = 20_000
"""Maximum jobs in one block."""
CLAIMS_IN_FLIGHT = 8


@dataclass(slots=True)
class ClaimResult:
    """The result of a round of claims."""

    partitions: list[int] = field(default_factory=list)
    """The claimed ordinals, sorted; their claims are in the operation's ``held``."""
    refused: bool = False
    """Whether a whole group was refused: the gate, this node or a holder that seemed gone has changed."""
    error: Exception | None = None
    """An error of some of the claims; the other claims still count."""
    taken_over: int = 0
    """Number of claimed jobs that executors that are gone had held."""

    def rejected(self, error: MalformedRequest | None) -> None:
        """Record etcd's error about a claim that it rejects alone, if any."""
        self.error = self.error or error


@dataclass(slots=True)
class Chosen:
    """Jobs to claim.

    ``dead`` and ``former``: the incarnations and claims of holders that are gone. ``over``: jobs that were lost too
    often, each with the claim as read and the new claim.
    """

    wants: list[job_transitions.Want]
    dead: dict[int, str] = field(default_factory=dict)
    former: dict[int, Claim] = field(default_factory=dict)
    over: list[tuple[int, Seen[Claim], Claim]] = field(default_factory=list)


class Claimer:
    """Claims jobs for one incarnation. ``returned``: called when etcd has answered that a claim is given back."""

    def __init__(self, ctx: Context, returned: Callable[[], None]) -> None:
        self._ctx = ctx
        self._returned = returned
        self._returning: set[tuple[OperationRef, int]] = set()
        """Jobs whose claims are being given back. Like held jobs they are not claimable: a claim of one would find the
        claim that is given back, and take it for its own earlier copy.
        """

    @property
    def busy(self) -> bool:
        """Whether claims are being given back."""
        return bool(self._returning)

    async def claim(self, op: OpenOperation, slots: int, *, alone: bool = False) -> ClaimResult:
        """Claim a block of an operation for this many free slots, or (``alone``) one of its suspects."""
        gate_mod, limits = op.gate_mod, self._ctx.limits
        chosen = self._choose(op, slots, alone)
        uncounted = op.permits.gone if op.permits is not None else frozenset()
        overdue = op.permits.overdue if op.permits is not None else ()
        wants = self._with_permits(op, chosen.wants, chosen.former)
        won = ClaimResult()
        if chosen.over:
            await self._fail_lost(op, chosen.over, won)
        limit = asyncio.Semaphore(CLAIMS_IN_FLIGHT)

        async def send(group: Sequence[job_transitions.Want]) -> None:
            gone = {chosen.dead[want.partition] for want in group if want.partition in chosen.dead}
            await self._claim_group(op, gate_mod, group, gone, uncounted, overdue, won)

        async def one(group: Sequence[job_transitions.Want]) -> None:
            async with limit:
                won.rejected(await by_halves(group, send))

        limited = op.gate.options.max_jobs or chosen.former
        size = min(limits.claims, job_transitions.LIMITED_CLAIMS_PER_TXN) if limited else limits.claims
        groups = [wants[n : n + size] for n in range(0, len(wants), size)]
        for answer in await asyncio.gather(*map(one, groups), return_exceptions=True):
            if isinstance(answer, Exception):
                won.error = answer
            elif isinstance(answer, BaseException):
                raise answer
        won.taken_over = sum(p in chosen.dead for p in won.partitions)
        if (traces := self._ctx.traces) is not None:
            former = chosen.former
            traces.lost(op.ref, op.spec, ((p, _name_of(op, p), former[p]) for p in won.partitions if p in former))
        # In order: the child caches data of a batch by its ordered list of files.
        won.partitions.sort()
        return won

    def _choose(self, op: OpenOperation, slots: int, alone: bool) -> Chosen:
        ctx, rules = self._ctx, op.spec.rules
        executors = len(ctx.cluster.capable(op.ref.type, op.gate.where, op.gate.tables(op.ref.table)))
        mine = op.mine + len(op.again) if op.mine else 0
        size = min(work_shares.block_size(op.open_jobs, mine, executors, rules.batch, slots, BLOCK_LIMIT), op.room)
        free, again = ([], op.take_suspect()) if alone else op.take(size)
        free = self._claimable(op.ref, free)
        first, _, _ = job_claims.claim_for(None, ctx.executor_id, ctx.incarnation, False, rules)
        # Neighbours beside each other again, whatever order they were taken in: they are claimed as runs.
        chosen = Chosen([job_transitions.Want(p, first) for p in sorted(self._one_batch(op, free))])
        for p, seen, lost in again:
            claim, mod, at_limit = job_claims.claim_for(seen, ctx.executor_id, ctx.incarnation, lost, rules)
            if at_limit and not job_claims.only_ends(claim, rules):
                chosen.over.append((p, seen, claim))
                continue
            chosen.wants.append(job_transitions.Want(p, claim, mod))
            if lost and not seen.value.actor:
                chosen.dead[p] = seen.value.incarnation
                chosen.former[p] = seen.value
        return chosen

    @staticmethod
    def _with_permits(
        op: OpenOperation, wants: list[job_transitions.Want], former: Mapping[int, Claim]
    ) -> list[job_transitions.Want]:
        """The wants with the permits that they take, keep or give back.

        Wants without a permit are left out: the next listing finds them again.
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
        """Set lost claims to waiting, and fail jobs that were lost too often.

        These are claims that no new claim compares. Neither needs a permit. It is refused if the gate, this node or the
        claims have changed. Returns etcd's error about a write that it rejects alone.
        """
        ctx, rules, gate_mod = self._ctx, op.spec.rules, op.gate_mod
        over: list[tuple[int, Seen[Claim], Claim]] = []
        lost: list[tuple[int, int, Claim]] = []
        for p, seen in op.uncompared.items():
            claim, mod, at_limit = job_claims.claim_for(seen, ctx.executor_id, ctx.incarnation, True, rules)
            if at_limit and not job_claims.only_ends(claim, rules):
                over.append((p, seen, claim))
            else:
                lost.append((p, mod, seen.value))
        done = ClaimResult()
        if over:
            await self._fail_lost(op, over, done)

        async def send(page: Sequence[tuple[int, int, Claim]]) -> None:
            revoked = await ctx.commit(
                job_transitions.revoke_lost(
                    *(ctx.keys, op.ref, gate_mod, ctx.incarnation, page),
                    lambda claim: job_claims.revoked_lost(claim, rules),
                )
            )
            if ctx.traces is not None and revoked.succeeded:
                ctx.traces.lost(op.ref, op.spec, ((p, _name_of(op, p), former) for p, _, former in page))

        size = min(ctx.limits.reaped, ctx.limits.claims)
        for n in range(0, len(lost), size):
            done.rejected(await by_halves(lost[n : n + size], send))
        return done.error

    async def claim_fresh(
        self, refs: Iterable[OperationRef]
    ) -> tuple[list[OpenOperation], dict[OperationRef, Exception]]:
        """Claim the jobs of newly opened operations of one job, and read these operations.

        One transaction does both; if it is refused, each operation is decided alone. Returns the operations with a
        claimed job, and the errors of operations that cannot be read, whose jobs are given back. Raises EtcdRejected
        if etcd rejects the transaction.
        """
        ctx, first = self._ctx, Claim(self._ctx.executor_id, self._ctx.incarnation, 1, 0)
        gates = {
            ref: gate
            for ref in refs
            if (gate := ctx.cluster.gates.get(ref)) is not None and (ref, 0) not in self._returning
        }
        asked = [
            batch_claims.Untouched(ref, gate.mod, OpenOperation.records(ctx.keys, ref)) for ref, gate in gates.items()
        ]
        won: list[OpenOperation] = []
        failures: dict[OperationRef, Exception] = {}
        if not asked:
            return won, failures
        result = await ctx.commit(batch_claims.claim_together(ctx.keys, ctx.incarnation, asked, first))
        granted: Sequence[batch_claims.Granted | None]
        if result.succeeded:
            granted = batch_claims.granted_together(result, asked)
        else:
            apart = await ctx.commit(batch_claims.claim_apart(ctx.keys, ctx.incarnation, asked, first))
            granted = batch_claims.granted_apart(apart, asked, first)
        for (ref, gate), grant in zip(gates.items(), granted, strict=True):
            if grant is None:
                continue
            try:
                won.append(await self._opened(ref, gate, grant, first))
            except Exception as error:
                # Nobody here could run it, and others would wait for that until the poll finds it.
                self.give_back(ref, 0, first, grant.fence)
                failures[ref] = error
        return won, failures

    async def _opened(
        self, ref: OperationRef, gate: Seen[Gate], grant: batch_claims.Granted, first: Claim
    ) -> OpenOperation:
        op = await OpenOperation.of(grant.records, self._ctx.client, self._ctx.keys, ref, gate.mod)
        op.gate = gate.value
        self._hold(op, job_transitions.Want(0, first), grant.fence)
        return op

    def give_back(self, ref: OperationRef, partition: int, claim: Claim, mod: int) -> None:
        """Set a claim of this executor to waiting; no job runs under it."""
        job = ref, partition

        def answered(_: int) -> None:
            self._returning.discard(job)
            self._returned()

        self._returning.add(job)
        waiting = job_claims.released(claim, self._ctx.executor_id)
        write = job_transitions.wait_again(self._ctx.keys, ref, partition, mod, waiting, claim)
        self._ctx.reporter.submit([(write, answered)])

    def _claimable(self, ref: OperationRef, jobs: Iterable[int]) -> list[int]:
        """The jobs whose claims are not being given back. The next listing finds the others again."""
        return [p for p in jobs if (ref, p) not in self._returning]

    def _one_batch(self, op: OpenOperation, free: list[int]) -> list[int]:
        """The free jobs to claim together: a batch is limited by its bytes.

        The others stay free.
        """
        fitting = self._fitting(op, free) if op.spec.rules.batch else len(free)
        op.free.extendleft(reversed(free[fitting:]))
        return free[:fitting]

    def _fitting(self, op: OpenOperation, ordinals: Sequence[int]) -> int:
        sizes = (int(op.partition(p).get("bytes", 0)) for p in ordinals)
        return work_shares.within_bytes(sizes, self._ctx.config.slots)

    async def _claim_group(
        self,
        op: OpenOperation,
        gate_mod: int,
        wants: Sequence[job_transitions.Want],
        dead: Iterable[str],
        uncounted: Iterable[str],
        overdue: Iterable[tuple[int, int]],
        won: ClaimResult,
    ) -> None:
        """Claim one group.

        ``gate_mod``: the gate whose limits were used to choose the group. The operation may have another gate by now.
        """
        ctx = self._ctx
        if (runs := job_transitions.runs(wants)) is not None:
            result = await ctx.commit(
                batch_claims.claim_runs(ctx.keys, op.ref, gate_mod, ctx.incarnation, runs, wants[0].claim)
            )
            if result.succeeded:
                won.partitions += [self._hold(op, want, result.revision) for want in wants]
                return
        result = await ctx.commit(
            job_transitions.claim(ctx.keys, op.ref, gate_mod, ctx.incarnation, wants, dead, uncounted, overdue)
        )
        if not result.succeeded:
            won.refused = True
            won.partitions += await self._claimed_by_lost_copy(op, wants)
            return
        for want, answer in zip(wants, result.responses, strict=True):
            if not isinstance(answer, TxnResult):
                continue
            fence = result.revision if answer.succeeded else self._claimed_before(want, answer)
            if fence:
                won.partitions.append(self._hold(op, want, fence))

    async def _claimed_by_lost_copy(self, op: OpenOperation, wants: Sequence[job_transitions.Want]) -> list[int]:
        """The jobs that an earlier copy of the transaction claimed (T9).

        Its answer was lost, and the repetition was refused because the gate has changed. The claims are still this
        executor's; without this read only the next poll would find them.
        """
        found = await self._ctx.client.read(*(Get(self._ctx.keys.claim(op.ref, want.partition)) for want in wants))
        return [
            self._hold(op, want, answer.kv.mod_revision)
            for want, answer in zip(wants, found, strict=True)
            if answer.kv is not None and answer.kv.value == want.claim.encode() and want.partition not in op.held
        ]

    @staticmethod
    def _hold(op: OpenOperation, want: job_transitions.Want, fence: int) -> int:
        op.held[want.partition] = Held(want.claim, fence, _name_of(op, want.partition))
        return want.partition

    @staticmethod
    def _claimed_before(want: job_transitions.Want, answer: TxnResult) -> int:
        """The fence, if an earlier copy of this write put the current claim (T9)."""
        found = answer.responses[0]
        if isinstance(found, GetResult) and found.kv is not None and found.kv.value == want.claim.encode():
            return found.kv.mod_revision
        return 0

    async def _fail_lost(
        self, op: OpenOperation, over: Sequence[tuple[int, Seen[Claim], Claim]], won: ClaimResult
    ) -> None:
        """Write that jobs failed that were lost too often and need no cleanup."""
        ctx = self._ctx
        now = rfc3339(time.time())
        by_dead: dict[str, list[tuple[int, int, Outcome]]] = {}
        for p, seen, claim in over:
            old = seen.value
            text = job_claims.lost_text(old, claim.failures)
            outcome = Outcome(
                _name_of(op, p), old.executor, old.incarnation, old.attempt, now, now, error=text, tried=claim.tried
            )
            by_dead.setdefault(old.incarnation, []).append((p, seen.mod, outcome))
        former = {p: seen.value for p, seen, _ in over}

        async def send(holder: str, page: Sequence[tuple[int, int, Outcome]]) -> None:
            txn = job_transitions.fail_lost(ctx.keys, op.ref, op.gate_mod, ctx.incarnation, holder, page, former)
            written = (await ctx.commit(txn)).succeeded
            won.refused = won.refused or not written
            if written:
                ctx.meter.jobs_lost(op.ref.type, len(page))
                if ctx.traces is not None:
                    ctx.traces.lost(op.ref, op.spec, ((p, one.name, former[p]) for p, _, one in page))

        for holder, lost in by_dead.items():
            for n in range(0, len(lost), ctx.limits.reports):
                won.rejected(await by_halves(lost[n : n + ctx.limits.reports], partial(send, holder)))


def _name_of(op: OpenOperation, partition: int) -> str:
    """The name of a partition, or its ordinal if the plan has none."""
    return str(op.partition(partition).get("name", partition))
