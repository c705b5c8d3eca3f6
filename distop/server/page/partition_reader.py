"""Reads the partitions of an operation, and follows them while somebody looks at them.

An ended operation is read at the revision before its history record: its keys are deleted, but etcd keeps them in its
own history until it is compacted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from distop.clock import time
from distop.errors import Compacted, DistopError, no_operation
from distop.protocol.jobs import Claim
from distop.protocol.json_codec import UNREADABLE, from_ranges
from distop.protocol.plan import Plan
from distop.protocol.record_reading import read
from distop.protocol.records import History, State
from distop.protocol.txn import Get
from distop.server.page.partition_details import read_details
from distop.server.page.partition_states import PartitionStage, PartitionStates
from distop.store.watch import Feed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from distop.protocol.keys import Keys
    from distop.protocol.records import OperationRef
    from distop.protocol.revisioned import Change
    from distop.server.page.partition_details import PartitionDetails
    from distop.store.client import EtcdClient
    from distop.store.watch import Batch

log = logging.getLogger("distop.service")

MOST_OPERATIONS = 32
"""Operations whose partitions are kept in memory."""
MOST_PARTITIONS = 2_000_000
"""Partitions of all of them."""
LINGER = 60.0
"""Seconds for which an open operation is followed after the last page was closed."""
PLAN_POLL = 1.0
"""Seconds between two looks whether an operation has a plan."""
AT_ONCE = 4
RELIST = 600.0


class OperationPartitions:
    """The partitions of one operation.

    ``states`` None: there is no plan yet. ``version`` grows with each change, and all changes up to ``revision`` are
    in. ``complete``: all partitions were read. ``missing``: why their details are not known, or "".
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, ref: OperationRef) -> None:
        self._etcd, self._keys, self._ref = etcd, keys, ref
        self.states: PartitionStates | None = None
        self.version = 0
        self.revision = 0
        self.complete = False
        self.ended = False
        self.missing = ""
        self.failure: DistopError | None = None
        self._at = 0
        """The revision at which an ended operation is read; 0: now."""
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._feeds: list[Feed] = []
        self.readers = 0
        self.left_at = 0.0

    # -------------------------------------------------------------- for the page

    def begin(self) -> None:
        """Read and follow, unless that is done already."""
        if self._following is None or (self._following.done() and not (self.complete and self.ended)):
            self.failure = None
            self._following = asyncio.create_task(self._run())

    async def wait(self, version: int, timeout: float) -> None:
        """Wait until there is a newer version, for ``timeout`` seconds."""
        if self.version != version:
            return
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await changed.wait()

    async def until_complete(self, timeout: float) -> None:
        """Wait until all partitions were read, for ``timeout`` seconds. Raises what the reading raised."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.complete and self.failure is None:
                    await self._changed.wait()
        if self.failure is not None:
            raise self.failure

    async def details(self, ordinals: Sequence[int]) -> list[PartitionDetails]:
        """What is stored of these partitions. Raises NotFound if etcd has compacted it."""
        if self.states is None:
            return []
        return await read_details(self._etcd, self._keys, self._ref, self.states, ordinals, self._at)

    async def close(self) -> None:
        """Stop following."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._stop_feeds()

    # ------------------------------------------------------------------ reading

    def _bump(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        try:
            await self._follow()
        except DistopError as error:
            self.failure = error
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("Unexpected error while reading the partitions of %s", self._ref)
            self.failure = DistopError()
        finally:
            await self._stop_feeds()
            self._bump()

    async def _follow(self) -> None:
        history, plan = await self._plan()
        if history is None and plan is not None:
            if self.states is None or self.states.count != plan.count:
                self.states = PartitionStates(plan.count)
            self._bump()
            history = await self._follow_open()
        if history is not None and not (self.complete and self.ended):
            await self._read_ended(history)
        self.ended = self.complete = True
        self._bump()
        await self._read_former()

    async def _plan(self) -> tuple[tuple[History, int] | None, Plan | None]:
        """The history record, or the plan once there is one. Raises NotFound."""
        while True:
            found = (Get(self._keys.history(self._ref)), Get(self._keys.of(self._ref, "state"), count_only=True))
            history, state, plan = await self._etcd.read(*found, Get(self._keys.of(self._ref, "plan")))
            if history.kv is not None:
                return (read(History.decode, history.kv), history.kv.mod_revision), None
            if not state.count:
                raise no_operation(self._ref)
            if plan.kv is not None:
                return None, read(Plan.decode, plan.kv)
            await asyncio.sleep(PLAN_POLL)

    async def _follow_open(self) -> tuple[History, int] | None:
        """Follow jobs and claims until the history record is written. It is returned if jobs may be missing."""
        assert self.states is not None
        ended: asyncio.Future[tuple[History, int]] = asyncio.get_running_loop().create_future()
        jobs = await self._start_feeds(ended)
        self.complete = True
        self._bump()
        record, revision = await self._until_ended(ended)
        self._at = revision - 1
        if not await self._have_all(jobs, record, revision):
            return record, revision
        self.states.keep_claims(set(), revision)  # nothing runs any more
        self.ended = True
        return None

    async def _start_feeds(self, ended: asyncio.Future[tuple[History, int]]) -> Feed:
        """Start the feeds of jobs, claims and the history record; returns that of jobs.

        ``ended``: gets the history record, and its revision.
        """

        def see_history(batch: Batch) -> None:
            for change in batch.events:
                if not change.deleted and not ended.done():
                    ended.set_result((read(History.decode, change.kv), change.kv.mod_revision))

        key = self._keys.history(self._ref)
        jobs = Feed(
            self._etcd, *self._keys.jobs_range(self._ref), self._see_jobs, relist_every=RELIST, name="jobs of the page",
            gather=self._gatherer, ignore=(b".progress",),
        )  # fmt: skip
        claims = Feed(
            self._etcd, *self._keys.claims_range(self._ref), self._see_claims, relist_every=RELIST,
            name="claims of the page",
        )  # fmt: skip
        histories = Feed(self._etcd, key, f"{key}\0", see_history, relist_every=RELIST, name="history of the page")
        self._feeds = [jobs, claims, histories]
        for feed in self._feeds:
            await feed.start()
        return jobs

    async def _until_ended(self, ended: asyncio.Future[tuple[History, int]]) -> tuple[History, int]:
        """Wait for the history record. Raises the error of a feed; NotFound if a feed was closed."""
        waits = [asyncio.ensure_future(feed.wait()) for feed in self._feeds]
        try:
            waited: list[asyncio.Future[Any]] = [ended, *waits]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                for one in waits:
                    if one.done():
                        one.result()
                raise no_operation(self._ref)
            return ended.result()
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _have_all(self, jobs: Feed, record: History, revision: int) -> bool:
        """Whether all jobs that had ended are known."""
        assert self.states is not None
        with contextlib.suppress(DistopError, TimeoutError):
            async with asyncio.timeout(5):
                await jobs.reached(revision - 1)
        totals = self.states.totals()
        return totals[PartitionStage.SUCCESS] == record.success and totals[PartitionStage.FAILED] == record.failed

    async def _read_ended(self, ended: tuple[History, int]) -> None:
        record, revision = ended
        self._at = revision - 1
        self.states = _from_history(record, revision)  # without durations and attempts, which follow
        self._bump()
        try:
            await self._read_jobs_at(record.total)
            claims = await self._etcd.list(*self._keys.claims_range(self._ref), revision=self._at)
            for kv in claims.kvs:
                self.states.add_claim(kv, 0.0)
            self.states.keep_claims(set(), revision)  # nothing runs any more
        except Compacted:
            self.missing = (
                "etcd has compacted the outcomes of its jobs since it ended: durations, rows, attempts and executors "
                "are not known any more"
            )
        self.revision = revision

    async def _read_jobs_at(self, count: int) -> None:
        states = self.states
        assert states is not None
        step = max(1_000, -(-count // AT_ONCE))

        async def one(first: int) -> None:
            jobs = self._keys.jobs_between(self._ref, first, min(first + step, count))
            async for part in self._etcd.parts(*jobs, revision=self._at):
                states.add_jobs(part.kvs)
                self.revision = self._at
                self._bump()

        await asyncio.gather(*(one(first) for first in range(0, count, step)))

    async def _read_former(self) -> None:
        """Read the last claims of jobs with several attempts: these list the earlier attempts."""
        states, turn = self.states, asyncio.Semaphore(AT_ONCE)
        if states is None:
            return

        async def one(ordinal: int, revision: int) -> None:
            key = self._keys.claim(self._ref, ordinal)
            async with turn:
                with contextlib.suppress(Compacted, *UNREADABLE):
                    for kv in (await self._etcd.list(key, f"{key}\0", revision=revision)).kvs:
                        states.add_former(ordinal, Claim.decode(kv.value))

        wanted = [(p, revision) for p, revision in states.retried.items() if p not in states.former]
        await asyncio.gather(*(one(*pair) for pair in wanted))
        if wanted:
            self._bump()

    # -------------------------------------------------------------------- feeds

    def _gatherer(self) -> _JobPages:
        return _JobPages(self)

    def add_page(self, changes: list[Change]) -> None:
        """Add a page of the first listing of jobs."""
        if self.states is not None:
            self.states.add_jobs(change.kv for change in changes)
            self._bump()

    def _see_jobs(self, batch: Batch) -> None:
        if self.states is not None and not batch.listing:
            self.states.add_jobs(change.kv for change in batch.events if not change.deleted)
        self._advance(batch)

    def _see_claims(self, batch: Batch) -> None:
        if self.states is None:
            return
        if batch.listing:
            present = set()
            for change in batch.events:
                self.states.add_claim(change.kv, time.time())
                present.add(int(change.kv.key[-6:]))
            self.states.keep_claims(present, batch.revision)
        else:
            for change in batch.events:
                if change.deleted:
                    self.states.remove_claim(change.kv.key, change.kv.mod_revision)
                else:
                    self.states.add_claim(change.kv, time.time())
        self._advance(batch)

    def _advance(self, batch: Batch) -> None:
        revisions = [feed.revision for feed in self._feeds[:2]]
        self.revision = max(self.revision, min(revisions))
        if batch.events or batch.listing:
            self._bump()

    async def _stop_feeds(self) -> None:
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            await feed.close()


class _JobPages:
    """Adds the pages of a listing of jobs as they come."""

    def __init__(self, partitions: OperationPartitions) -> None:
        self._partitions = partitions

    def apply(self, changes: list[Change]) -> None:
        self._partitions.add_page(changes)


def _from_history(record: History, revision: int) -> PartitionStates:
    """The states that a history record shows."""
    states = PartitionStates(record.total)
    states.changed[:] = revision
    if record.success + record.failed == record.total and not record.failed_truncated:
        states.stage[:] = PartitionStage.SUCCESS
    with contextlib.suppress(*UNREADABLE):
        failed = [p for p in from_ranges(record.failed_ranges) if p < record.total]
        states.stage[failed] = PartitionStage.FAILED
    if record.state is State.SUCCESS:
        states.stage[:] = PartitionStage.SUCCESS
    return states


class PartitionCache:
    """The partitions of the operations that pages show, shared by all pages of this process."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._known: OrderedDict[OperationRef, OperationPartitions] = OrderedDict()
        self._cleaning: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def reading(self, ref: OperationRef) -> AsyncIterator[OperationPartitions]:
        """The partitions of an operation, which are followed meanwhile."""
        found = self._known.get(ref)
        if found is None:
            found = self._known[ref] = OperationPartitions(self._etcd, self._keys, ref)
        self._known.move_to_end(ref)
        found.readers += 1
        found.begin()
        if self._cleaning is None:
            self._cleaning = asyncio.create_task(self._clean())
        try:
            yield found
        finally:
            found.readers -= 1
            found.left_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Stop following all operations, and remove them from memory."""
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)
            self._cleaning = None
        known, self._known = self._known, OrderedDict()
        for one in known.values():
            await one.close()

    async def _clean(self) -> None:
        """Forget operations that nobody looks at, until there are none."""
        while self._known:
            await asyncio.sleep(LINGER / 4)
            now = asyncio.get_running_loop().time()
            for ref in self._surplus(now):
                await self._known.pop(ref).close()
        self._cleaning = None

    def _surplus(self, now: float) -> list[OperationRef]:
        idle = {ref: one for ref, one in self._known.items() if not one.readers}
        drop = [ref for ref, one in idle.items() if not one.ended and now - one.left_at > LINGER]
        size = sum(_size(one) for one in self._known.values())
        for n, (ref, one) in enumerate(idle.items()):
            if ref not in drop and (size > MOST_PARTITIONS or len(self._known) - n > MOST_OPERATIONS):
                drop.append(ref)
                size -= _size(one)
        return drop


def _size(one: Any) -> int:
    return one.states.count if one.states is not None else 0
