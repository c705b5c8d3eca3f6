"""An executor's view of one open operation: records, plan and claimable jobs.

Executors do not watch job keys (100,000 jobs × 1,000 watchers of one prefix would be 3·10⁸ deliveries). All jobs of a
fresh operation are assumed to be free; refused claims show the others, and an empty queue is filled by a listing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.decide import job_claims, work_shares
from distop.errors import NotFound, UnreadableRecord
from distop.protocol.frozen import frozen
from distop.protocol.jobs import Claim
from distop.protocol.json_codec import SCHEMA_VERSION, loads
from distop.protocol.keys import claim_ordinal, state_ordinal
from distop.protocol.permits import Permits, permits
from distop.protocol.plan import CHUNK_PAGE, Gate, Plan, begin_with, whole_plan
from distop.protocol.record_reading import read
from distop.protocol.records import CLUSTER_TABLE, OperationRef, Spec
from distop.protocol.revisioned import Seen
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.txn import Get

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distop.decide.job_claims import Claimant
    from distop.protocol.keys import Keys
    from distop.protocol.txn import GetResult, KeyValue
    from distop.store.client import EtcdClient, Listing

DECODED_CHUNKS = 4
"""Decoded chunks kept at once: decoded partitions take ten times the memory of their text."""

WEIGHED = 50_000
"""Maximum partitions of a plan whose sizes decide the shares: so many take a sixth of a second. In larger plans, runs
of neighbours cost about the same.
"""


@frozen
class Held:
    """A claim of this executor, with its fence (mod revision)."""

    claim: Claim
    fence: int
    name: str


class OpenOperation:
    """One open operation. ``gate_mod`` is its gate's mod revision; a new gate makes a new object."""

    def __init__(
        self,
        ref: OperationRef,
        gate_mod: int,
        spec: Spec,
        arg: Any,
        plan: Plan,
        chunks: Sequence[bytes],
        starts: Sequence[int],
    ) -> None:
        self.ref = ref
        self.gate_mod = gate_mod
        self.gate = Gate()
        """The gate of ``gate_mod``."""
        self.permits: Permits | None = None
        """The permits that were free at the last listing, if the operation's jobs are limited in all."""
        self.spec = spec
        self.arg = arg
        self.plan = plan
        self.held: dict[int, Held] = {}
        self.next_due: float | None = None
        """When the next job is due by ``time.monotonic``: the wall clock may jump until then."""
        self.free: deque[int] = deque()
        self.mine = 0
        """Number of ordinals at the head of ``free`` that are this executor's share by rendezvous hashing."""
        self.told_to_stop = False
        """Whether the child was told to stop the jobs: logged once, sent again in case a run was starting."""
        self.again: dict[int, tuple[Seen[Claim], bool]] = {}
        """Waiting and lost jobs to claim: the claim as seen, and whether its executor is gone."""
        self.suspects: dict[int, tuple[Seen[Claim], bool]] = {}
        """Candidates that must run alone in an executor."""
        self.uncompared: dict[int, Seen[Claim]] = {}
        """Lost claims that new claims do not compare: they count as live until they are set to waiting."""
        self._chunks = list(chunks)
        self._starts = list(starts)
        self._decoded: dict[int, list[Mapping[str, Any]]] = {}
        self._first_seen: dict[int, tuple[int, float]] = {}

    @property
    def table(self) -> Mapping[str, Any] | None:
        """The table's record for the jobs, with the planned options."""
        table = self.spec.table
        return table.extended(self.plan.options).to_json() if table is not None else None

    @staticmethod
    def records(keys: Keys, ref: OperationRef) -> tuple[Get, ...]:
        """The reads for :meth:`of`. The plan of an operation without a table never differs."""
        own = (Get(keys.of(ref, "spec")), Get(keys.of(ref, "arg")))
        if ref.table == CLUSTER_TABLE:
            return own
        return (*own, Get(keys.of(ref, "plan")), Get(*keys.chunks_range(ref), limit=1))

    @classmethod
    async def load(cls, client: EtcdClient, keys: Keys, ref: OperationRef, gate_mod: int) -> OpenOperation:
        """Read an operation's records and plan. Raises as :meth:`of` does."""
        return await cls.of(await client.read(*cls.records(keys, ref)), client, keys, ref, gate_mod)

    @classmethod
    async def of(
        cls, answers: Sequence[GetResult], client: EtcdClient, keys: Keys, ref: OperationRef, gate_mod: int
    ) -> OpenOperation:
        """The operation of these records, after reading the rest of its plan.

        Raises NotFound if it has ended; UnreadableRecord, also if a newer release wrote it or the plan does not match
        its digest.
        """
        spec, arg, *planned = answers
        if spec.kv is None or arg.kv is None or (planned and planned[0].kv is None):
            raise NotFound(f"operation {ref} has ended")
        written = read(Spec.decode, spec.kv)
        if written.version > SCHEMA_VERSION:
            raise UnreadableRecord(f"a newer release of distop wrote {ref}, and this release cannot run it")
        if not planned:
            whole, only = whole_plan()
            return cls(ref, gate_mod, written, read(loads, arg.kv), whole, only, [0])
        plan, chunk = planned
        assert plan.kv is not None
        decoded = read(Plan.decode, plan.kv)
        chunks = [kv.value for kv in chunk.kvs]
        if decoded.chunks > 1:
            listing = await client.list(*keys.chunks_range(ref), page=CHUNK_PAGE)
            chunks = [kv.value for kv in listing.kvs]
        chunks = chunks[: decoded.chunks]
        if len(chunks) < decoded.chunks:  # a plan is written after all of its chunks: its cleanup has begun
            raise NotFound(f"operation {ref} has ended")
        try:
            starts = begin_with(decoded, chunks)
        except ValueError as error:
            raise UnreadableRecord(f"the plan of {ref} {error}") from error
        return cls(ref, gate_mod, written, read(loads, arg.kv), decoded, chunks, starts)

    # ------------------------------------------------------------- partitions

    def partition(self, number: int) -> Mapping[str, Any]:
        """A partition of the plan as JSON. Raises KeyError for an unknown ordinal."""
        index = bisect_right(self._starts, number) - 1
        if index < 0:
            raise KeyError(number)
        rows = self._decode(index)
        offset = number - self._starts[index]
        if offset >= len(rows) or rows[offset]["partition"] != number:
            raise KeyError(number)
        return rows[offset]

    def _decode(self, index: int) -> list[Mapping[str, Any]]:
        rows = self._decoded.get(index)
        if rows is None:
            while len(self._decoded) >= DECODED_CHUNKS:
                self._decoded.pop(next(iter(self._decoded)))
            rows = self._decoded[index] = loads(self._chunks[index])
        return rows

    # ------------------------------------------------------------- candidates

    @property
    def open_jobs(self) -> int:
        """Number of jobs that may be claimed, as far as known."""
        return len(self.free) + len(self.again)

    def assume_free(self, executor: str, others: Sequence[str]) -> None:
        """Assume that all jobs of a newly opened gate are free; refused claims correct it."""
        ordered, self.mine = self.shares(executor, others)
        self.free = deque(ordered)

    def shares(self, executor: str, others: Sequence[str]) -> tuple[list[int], int]:
        """The jobs in the order in which an executor should claim them, and how many at the head are its share of a
        fresh plan.
        """
        count, costs = self.plan.count, None
        if count <= WEIGHED and (others or not self.spec.rules.batch):  # the order within one batch is Spark's
            costs = [work_shares.cost(self.partition(p)) for p in range(count)]
        return work_shares.shares(self.plan.count, executor, others, str(self.ref), costs)

    @property
    def crowded(self) -> bool:
        """Whether this executor holds as many of its jobs as one executor may."""
        return 0 < self.gate.options.max_jobs_per_executor <= len(self.held)

    @property
    def room(self) -> int:
        """Number of further jobs, except suspects, that the limits allow here, as far as known."""
        options = self.gate.options
        room = self.plan.count
        if options.max_jobs_per_executor:
            room = max(0, options.max_jobs_per_executor - len(self.held))
        if options.max_jobs and (known := self.permits) is not None:
            room = min(room, len(known.free) + sum(known.keeps(seen.value) for seen, _ in self.again.values()))
        return room

    @property
    def only_suspects(self) -> bool:
        """Whether only a suspect may be claimed: no other job is left, or all permits are taken."""
        if not self.suspects or self.crowded or (self.open_jobs and self.room):
            return False
        known = self.permits
        return known is None or bool(known.free) or any(known.keeps(seen.value) for seen, _ in self.suspects.values())

    def given_back(self, claim: Claim, revision: int) -> None:
        """Free the permit of this executor's claim that ended at this revision."""
        if self.permits is not None and self.permits.keeps(claim):
            self.permits.free[claim.permit] = revision

    @property
    def unknown(self) -> bool:
        """Whether its jobs must be listed before the next claim."""
        return not self.open_jobs or (self.gate.options.max_jobs > 0 and self.permits is None)

    def take_these(self, ordinals: Collection[int]) -> None:
        """Remove jobs that were claimed before this object was created."""
        taken = frozenset(ordinals)
        self.free = deque(p for p in self.free if p not in taken)
        self.mine = max(0, self.mine - len(taken))

    def _choose(self, free: Iterable[int], executor: str, others: Sequence[str]) -> None:
        ordered, self.mine = work_shares.rendezvous(free, executor, others, str(self.ref))
        self.free = deque(ordered)

    def forget_candidates(self) -> None:
        """Forget the known free jobs: list before the next claim."""
        self.free.clear()
        self.again.clear()
        self.suspects.clear()
        self.uncompared.clear()
        self.permits = None
        self.mine = 0

    def reopened(self, gate_mod: int, gate: Gate) -> None:
        """Use a new gate with the same plan, after a pause and resume, or an alter."""
        self.gate_mod, self.gate = gate_mod, gate
        self.told_to_stop = False
        self.forget_candidates()

    async def look(self, client: EtcdClient, keys: Keys, by: Claimant, limits: Limits = DEFAULT) -> None:
        """List the operation's job states and claims, and sort what may be claimed now."""
        gate_mod, most = self.gate_mod, self.gate.options.max_jobs
        ended, listing = await self._list_jobs(client, keys)
        now, clock = time.time(), time.monotonic()
        claims = {claim_ordinal(kv.key): Seen(read(Claim.decode, kv), kv.mod_revision) for kv in listing.kvs}
        unchanged = self._see_claims(claims, by.live, clock)
        permit_keys = (await client.list(*keys.permits_range(self.ref))).kvs if most else ()
        if self.gate_mod != gate_mod:
            # What limits it is something else by now.
            await self.look(client, keys, by, limits)
            return
        rules = self.spec.rules
        found = job_claims.claimable(self.plan.count, ended, claims, by, now, unchanged, resumable=rules.resumable)
        self.uncompared = {}
        if most:
            self._count_permits(permit_keys, claims, found.lost, by.live, limits)
        # What is held is not claimable, whatever the listing shows: its end may be applied, and the answer to it lost.
        self._choose([p for p in found.free if p not in self.held], by.name, by.others)
        self.again = {p: (claims[p], False) for p in found.waiting if p not in self.held}
        self.again |= {p: (claims[p], True) for p in found.lost if p not in self.uncompared}
        self.suspects = {p: old for p, old in self.again.items() if job_claims.suspect(old[0].value, old[1], rules)}
        for p in self.suspects:
            del self.again[p]
        self.next_due = None if found.next_due is None else clock + found.next_due - now

    async def _list_jobs(self, client: EtcdClient, keys: Keys) -> tuple[Collection[int], Listing]:
        """The ended jobs, and a listing of the claims that is not older."""
        claims_range = keys.claims_range(self.ref)
        count = await client.count(*keys.jobs_range(self.ref))
        listing = await client.list(*claims_range)
        if not self.spec.rules.resumable and count == 2 * (self.plan.count - len(listing.kvs)):
            # State and outcome of each job that ended, counted before: so whatever has no claim had ended.
            held = {claim_ordinal(kv.key) for kv in listing.kvs}
            return set(range(self.plan.count)) - held, listing
        states = await client.list(*keys.jobs_range(self.ref), keys_only=True)
        ended = {p for kv in states.kvs if (p := state_ordinal(kv.key)) is not None}
        return ended, await client.list(*claims_range)

    def _see_claims(self, claims: Mapping[int, Seen[Claim]], live: Collection[str], clock: float) -> dict[int, float]:
        """Seconds for which each claim without a live holder is known to be unchanged."""
        before, self._first_seen = self._first_seen, {}
        for p, claim in claims.items():
            if claim.value.waiting or claim.value.incarnation not in live:
                mod, since = before.get(p, (0, clock))
                self._first_seen[p] = (claim.mod, since if mod == claim.mod else clock)
        return {p: clock - since for p, (_, since) in self._first_seen.items()}

    def _count_permits(
        self,
        permit_keys: Sequence[KeyValue],
        claims: Mapping[int, Seen[Claim]],
        lost: Collection[int],
        live: Collection[str],
        limits: Limits,
    ) -> None:
        """Find the free permits, and the lost claims that count as live until they are set to waiting."""
        by_actors = [(p, claims[p].mod) for p in sorted(lost) if claims[p].value.actor]
        overdue = dict(by_actors[: limits.overdue])
        self.permits = permits(
            self.gate.options.max_jobs,
            [seen.value for p, seen in claims.items() if p not in overdue],
            {claim_ordinal(kv.key): (kv.value, kv.mod_revision) for kv in permit_keys},
            live,
            list(overdue.items()),
            limits.gone,
        )
        compared = self.permits.gone
        others = (p for p in lost if p not in overdue and claims[p].value.incarnation not in compared)
        self.uncompared = {p: claims[p] for p in others}

    def unchanged_for(self, partition: int) -> float:
        """Seconds for which the waiting or lost claim of this job was unchanged at the last listings."""
        _, since = self._first_seen.get(partition, (0, time.monotonic()))
        return time.monotonic() - since

    def turns(self, executor: str, others: Sequence[str]) -> dict[int, float]:
        """Seconds until it is this executor's turn to fall quiet for each of the suspects, which are sorted by that."""
        turns = {}
        for p, (seen, _) in self.suspects.items():
            place = work_shares.place_for_suspect(seen.value, executor, others, f"{self.ref}/{p}")
            turns[p] = work_shares.quiet_in(place, self.unchanged_for(p))
        turns = dict(sorted(turns.items(), key=lambda turn: turn[1]))
        self.suspects = {p: self.suspects[p] for p in turns}
        return turns

    def take_suspect(self) -> list[tuple[int, Seen[Claim], bool]]:
        """Take one candidate that must run alone."""
        p = next(iter(self.suspects))
        return [(p, *self.suspects.pop(p))]

    def _first_again(self) -> list[int]:
        """Candidates that were claimed before; if permits are few, permit holders first."""
        known = self.permits
        if known is None:
            return list(self.again)
        return sorted(self.again, key=lambda p: not known.keeps(self.again[p][0].value))

    def take(self, size: int) -> tuple[list[int], list[tuple[int, Seen[Claim], bool]]]:
        """Up to ``size`` candidates: free ordinals, and (ordinal, claim as seen, lost) of others."""
        again = [(p, *self.again.pop(p)) for p in self._first_again()[:size]]
        free = [self.free.popleft() for _ in range(min(size - len(again), len(self.free)))]
        self.mine = max(0, self.mine - len(free))
        return free, again
