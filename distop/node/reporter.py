"""Group commit of what jobs report: outcomes, retries, releases and checkpoints, each under its own fence.

Writes that arrive together, or while a commit is in flight, go in one transaction. A refused group is sent once
more as nested transactions, each decided alone; one that loses there is no longer ours, and losing is ignored (I36).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from distop.backoff import Backoff
from distop.core import claiming
from distop.core.limits import DEFAULT, Limits
from distop.core.txn import TxnResult
from distop.errors import DistopError, describe
from distop.node.meter import NO_METER, Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.core.claiming import Guarded
    from distop.logs import ContextLogger
    from distop.store.client import EtcdClient

IN_FLIGHT = 8
"""Transactions under way at once: etcd reaches its throughput with several in flight."""

PARTS_BESIDE = 1
"""Commits under way beside which less than a whole group waits: it goes with the end of one at the latest, and has
grown by then. Each transaction costs etcd, and whoever waits for it, much the same however little is in it."""

REFUSED_PAUSE = (0.5, 10.0)
"""Seconds of back-off, first and longest, while etcd refuses reports (a role that was revoked, say)."""

Answer: TypeAlias = "Callable[[int], None]"
"""Gets the revision at which a write was applied, 0 where its fence was gone."""


class Reporter:
    """Commits guarded writes in groups. ``lost`` ends it: nothing is written under a session that is over."""

    def __init__(
        self,
        client: EtcdClient,
        lost: asyncio.Future[Any],
        log: ContextLogger,
        limits: Limits = DEFAULT,
        meter: Meter = NO_METER,
        what: str = "reports",
    ) -> None:
        self._meter = meter
        self._client = client
        self._lost = lost
        self._log = log
        self._what = what
        self._room = limits.reports * claiming.OPERATIONS_PER_REPORT
        self._queue: deque[tuple[Guarded, Answer]] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pumping = False

    def submit(self, writes: Iterable[tuple[Guarded, Answer]]) -> None:
        """Queue writes; each one's answer is called once. What is submitted in the same turn of the loop goes together:
        ends of several operations come in one message.
        """
        self._queue.extend(writes)
        if self._queue and not self._pumping:
            self._pumping = True
            self._idle.clear()
            asyncio.get_running_loop().call_soon(self._pump)

    async def write(self, write: Guarded) -> int:
        """Submit one write and wait for its answer. Raises SessionLost if the session ends first."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def answered(applied: int) -> None:
            if not done.done():
                done.set_result(applied)

        self.submit([(write, answered)])
        await asyncio.wait({done, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            self._lost.result()
        return done.result()

    async def drain(self) -> None:
        """Wait until everything submitted has been answered, or the session is lost."""
        idle = asyncio.ensure_future(self._idle.wait())
        try:
            await asyncio.wait({idle, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()

    def close(self) -> None:
        """Drop what is queued: the session is over."""
        self._queue.clear()
        for commit in self._in_flight:
            commit.cancel()

    async def _applied(self, writes: list[Guarded]) -> list[int]:
        result = await self._client.commit(claiming.group(writes), until=self._lost)
        if result.succeeded:
            return [result.revision] * len(writes)
        alone = await self._client.commit(claiming.one_by_one(writes), until=self._lost)
        applied = [
            claiming.applied_at(write, answer, alone.revision) if isinstance(answer, TxnResult) else 0
            for write, answer in zip(writes, alone.responses, strict=True)
        ]
        if not all(applied):
            came_late = "%d of %d %s came too late: their fences are gone"
            self._log.info(came_late, applied.count(0), len(writes), self._what)
        return applied

    def _pump(self) -> None:
        self._pumping = False
        while self._queue and len(self._in_flight) < IN_FLIGHT and not self._lost.done():
            group, full = self._take()
            if len(self._in_flight) >= PARTS_BESIDE and not full:
                # Part of a group waits for a commit under way, and grows meanwhile.
                self._queue.extendleft(reversed(group))
                break
            commit = asyncio.ensure_future(self._commit(group))
            self._in_flight.add(commit)
            commit.add_done_callback(self._done)
        if self._queue or self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def _take(self) -> tuple[list[tuple[Guarded, Answer]], bool]:
        group: list[tuple[Guarded, Answer]] = []
        operations = size = 0
        keys: set[str] = set()
        while self._queue:
            write = self._queue[0][0]
            operations += max(len(write.ops), 1 + len(write.also))
            size += write.size
            # T3: a key is put once per branch, so two writes under one fence go in two transactions.
            full = operations > self._room or size > claiming.REPORT_BYTES_PER_TXN or write.guard.key in keys
            if group and full:
                return group, True
            keys.add(write.guard.key)
            group.append(self._queue.popleft())
        return group, operations > self._room - 2

    def _done(self, commit: asyncio.Task[None]) -> None:
        self._in_flight.discard(commit)
        if not commit.cancelled() and (error := commit.exception()) is not None and not self._lost.done():
            self._log.error("a group of %s could not be written: %s", self._what, error)
        self._pump()

    async def _commit(self, group: list[tuple[Guarded, Answer]]) -> None:
        writes = [write for write, _ in group]
        backoff = Backoff(*REFUSED_PAUSE)
        while True:
            try:
                applied = await self._applied(writes)
                break
            except DistopError as error:
                # Nobody else can write these, so they are kept for as long as the session lives.
                if self._lost.done():
                    return
                said = "%s wait, because etcd refuses them: %s"
                self._log.error(said, self._what, describe(error), extra={"error": error})
                await asyncio.wait([self._lost], timeout=backoff.pause())
        late = applied.count(0)
        self._meter.reported(len(applied) - late, late)
        for (_, answer), ok in zip(group, applied, strict=True):
            answer(ok)
