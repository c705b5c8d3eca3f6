"""The jobs that an actor may claim: operations by a watch, jobs by listings."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from zlib import crc32

from distop.clock import secrets, time
from distop.decide import job_claims
from distop.decide.job_claims import Claimant
from distop.decide.view import ClusterView
from distop.errors import NotFound, UnreadableRecord
from distop.protocol import keys as K
from distop.protocol.actor_claims import Taking
from distop.protocol.jobs import Claim, Outcome
from distop.protocol.json_codec import rfc3339
from distop.services.open_operation import OpenOperation
from distop.services.readable_records import left_out
from distop.store.watch import Feed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distop.protocol.keys import Keys
    from distop.protocol.plan import Gate
    from distop.protocol.records import OperationRef
    from distop.store.client import EtcdClient
    from distop.store.watch import Batch

RELIST = 30.0
"""Seconds between listings of the watched keys: a poll backs every watch."""
LOADED_AT_ONCE = 16
LOADS = 128
"""Maximum operations that one call reads."""
LOOKS = 32
"""Maximum operations whose jobs one call lists, starting with the oldest listings."""
LOOK_PAUSE = 0.2
"""Seconds between two looks at the same operation."""
UNREADABLE_PAUSE = 60.0


class Candidates:
    """The claim candidates of one client."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys
        self._cluster = ClusterView(keys)
        self._feed: Feed | None = None
        self._starting = asyncio.Lock()
        self._operations: dict[OperationRef, OpenOperation] = {}
        self._looked: dict[OperationRef, float] = {}
        """Operation → when its jobs were last listed."""
        self._unreadable: dict[OperationRef, float] = {}
        """Operation → until when it is skipped."""
        self.version = 0
        """Grows whenever more jobs may be claimable than before."""
        self._changed = asyncio.Event()

    def announce(self) -> None:
        """Announce that more jobs may be claimable."""
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, version: int, timeout: float) -> None:
        """Wait until the version changes, or for ``timeout`` seconds."""
        if self.version == version:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._changed.wait()

    async def ready(self) -> None:
        """Start the watch and read the open operations.

        Raises the errors of the first listing.
        """
        async with self._starting:
            if self._feed is None:
                first, after = self._keys.family(K.NODE)[0], self._keys.family(K.OPEN)[1]
                feed = Feed(self._etcd, first, after, self._fold, relist_every=RELIST, name="open operations")
                await feed.start()
                self._feed = feed

    async def close(self) -> None:
        if self._feed is not None:
            await self._feed.close()

    async def relist_if_behind(self) -> bool:
        """List the open operations again if etcd has another number of them; returns whether it did."""
        count = await self._etcd.count(*self._keys.family(K.OPEN))
        if count == len(self._cluster.gates) or self._feed is None:
            return False
        await self._feed.relist()
        return True

    def _fold(self, batch: Batch) -> None:
        changes = batch.events
        before = set(self._cluster.nodes)
        if batch.listing:
            self._cluster.replace((K.NODE, K.NODE_DRAIN, K.OPEN), changes)
        else:
            self._cluster.apply(changes)
        gates = self._cluster.gates
        for ref in [ref for ref in self._operations if ref not in gates]:
            del self._operations[ref]
            self._looked.pop(ref, None)
        for ref in [ref for ref in self._unreadable if ref not in gates]:
            del self._unreadable[ref]
        for ref, op in self._operations.items():
            if gates[ref].mod != op.gate_mod:
                op.reopened(gates[ref].mod, gates[ref].value)
                self._looked.pop(ref, None)
        if before - self._cluster.nodes.keys():
            self._looked.clear()  # jobs of the lost nodes may be claimable
        self.announce()

    def look_again(self, ref: OperationRef) -> None:
        """Handle a job of the operation that was released here."""
        self._looked.pop(ref, None)
        self.announce()

    def known(self, ref: OperationRef) -> OpenOperation | None:
        return self._operations.get(ref)

    async def gather(self, actor: str, types: Mapping[str, int | None], want: int) -> list[OpenOperation]:
        """Operations of these types with jobs that are probably claimable, the oldest first.

        Their jobs are at least ``want`` in number, if that many are known.
        """
        now = time.monotonic()
        gates = self._cluster.gates
        refs = [
            ref
            for ref, _ in sorted(gates.items(), key=lambda item: item[1].mod)
            if ref.type in types and self._unreadable.get(ref, 0.0) <= now and _for_actors(gates[ref].value)
        ]
        found: list[OpenOperation] = []
        jobs, fresh = 0, []
        for ref in refs:
            op = self._operations.get(ref)
            if op is None:
                fresh.append(ref)
                jobs += max(1, gates[ref].value.count)
            elif op.open_jobs or op.suspects:
                found.append(op)
                jobs += op.open_jobs + len(op.suspects)
            if jobs >= want or len(fresh) >= LOADS:
                break
        for n in range(0, len(fresh), LOADED_AT_ONCE):
            loaded = await asyncio.gather(*(self._load(ref, actor) for ref in fresh[n : n + LOADED_AT_ONCE]))
            found += [op for op in loaded if op is not None]
        if jobs < want:
            found += await self._look(actor, [ref for ref in refs if ref in self._operations], found)
        return sorted(found, key=lambda op: op.gate_mod)

    async def _load(self, ref: OperationRef, actor: str) -> OpenOperation | None:
        gate = self._cluster.gates.get(ref)
        if gate is None:
            return None
        try:
            op = await OpenOperation.load(self._etcd, self._keys, ref, gate.mod)
        except NotFound:
            return None
        except UnreadableRecord as error:
            self._unreadable[ref] = time.monotonic() + UNREADABLE_PAUSE
            left_out(self._etcd, error)
            return None
        if ref not in self._cluster.gates:
            return None
        op.assume_free(actor, ())
        if len(op.free) > 1:  # actors that begin at different places do not meet at once
            op.free.rotate(crc32(f"{actor}/{ref}".encode()) % len(op.free))
        self._operations[ref] = op
        return op

    async def _look(self, actor: str, refs: list[OperationRef], but: list[OpenOperation]) -> list[OpenOperation]:
        """List the jobs of some operations without known free jobs."""
        now, skip = time.monotonic(), {op.ref for op in but}
        due = [ref for ref in refs if ref not in skip and now - self._looked.get(ref, -LOOK_PAUSE) >= LOOK_PAUSE]
        due = sorted(due, key=lambda ref: self._looked.get(ref, 0.0))[:LOOKS]
        found: list[OpenOperation] = []
        for n in range(0, len(due), LOADED_AT_ONCE):
            looked = await asyncio.gather(*(self._look_at(ref, actor) for ref in due[n : n + LOADED_AT_ONCE]))
            found += [op for op in looked if op is not None]
        return found

    async def _look_at(self, ref: OperationRef, actor: str) -> OpenOperation | None:
        op = self._operations.get(ref)
        if op is None:
            return None
        self._looked[ref] = time.monotonic()
        by = Claimant(actor, self._cluster.nodes, (), op.spec.rules.retry.maximum)
        try:
            await op.look(self._etcd, self._keys, by)
        except UnreadableRecord as error:
            self._unreadable[ref] = time.monotonic() + UNREADABLE_PAUSE
            left_out(self._etcd, error)
            return None
        return op if op.open_jobs or op.suspects else None


def _for_actors(gate: Gate) -> bool:
    """Whether actors may run its jobs. Actors have no permits and no labels."""
    return not gate.options.limited and not gate.where


def _lost_outcome(op: OpenOperation, partition: int, old: Claim, claim: Claim, now: str) -> Outcome:
    """The outcome of a job that was lost once too often, last under the claim ``old``."""
    name, began = str(op.partition(partition).get("name", partition)), old.since or now
    by = (name, old.executor, old.incarnation, old.attempt, began, now)
    return Outcome(*by, error=job_claims.lost_text(old, claim.failures), tried=claim.tried)


def takings(
    op: OpenOperation, actor: str, size: int, duration: float, wanted: Callable[[Claim, int], bool]
) -> list[Taking]:
    """Up to ``size`` jobs of an operation to claim, and the jobs to fail because their holders were lost too often.

    Jobs to fail that have cleanup code are left to executors. Jobs for which ``wanted(claim, partition)`` returns False
    stay candidates. Raises its errors; then no candidate is removed.
    """
    if not _for_actors(op.gate):  # it was altered while others were looked at
        return []
    now, rules, taken = rfc3339(time.time()), op.spec.rules, 0
    result: list[Taking] = []

    def mine(claim: Claim) -> Claim:
        grant = f"{secrets.randbits(64):016x}"
        return replace(claim, executor=actor, incarnation="", actor=actor, duration=duration, grant=grant, since=now)

    for p, (seen, lost) in {**op.again, **op.suspects}.items():
        if taken >= size:
            break
        claim, mod, over = job_claims.claim_for(seen, actor, "", lost, rules)
        if job_claims.only_ends(claim, rules):
            continue  # an executor ends it, after the cleanup that no actor has code for
        old = seen.value
        dead = old.incarnation if lost else ""
        outcome = _lost_outcome(op, p, old, claim, now) if over else None
        if not over and not wanted(claim, p):
            continue
        taken += not over
        result.append(Taking(op.ref, op.gate_mod, p, mine(claim), mod, dead, outcome, old))
    again = [taking.partition for taking in result]
    first, free = Claim(actor, "", 1, 0), list[int]()
    for p in op.free:
        if taken + len(free) >= size:
            break
        if wanted(first, p):
            free.append(p)
    op.take_these(free)
    for p in again:
        op.again.pop(p, None)
        op.suspects.pop(p, None)
    return result + [Taking(op.ref, op.gate_mod, p, mine(first)) for p in free]
