"""Group commit of job reports: outcomes, retries, releases and checkpoints.

Each report is guarded by its own fence. Writes that arrive together, or while a commit is in flight, share a
transaction if they do not conflict (``protocol.group_commit``). A refused group is sent once more as nested
transactions, each decided alone. A report that is refused then is no longer ours, and is dropped (I36). A group that
etcd rejects as invalid is split until the single rejected write is found; that write is set aside, and retried with
back-off.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

from distop.daemon.meter import NO_METER, Meter
from distop.errors import DistopError, MalformedRequest, describe
from distop.protocol import job_transitions
from distop.protocol.group_commit import Room, independent_count
from distop.protocol.size_limits import DEFAULT, Limits
from distop.protocol.txn import MAX_OPERATIONS, TxnResult
from distop.runtime.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distop.daemon.rejected_writes import RejectedWrites
    from distop.protocol.job_transitions import Guarded
    from distop.protocol.keys import Keys
    from distop.runtime.logs import ContextLogger
    from distop.store.client import EtcdClient

IN_FLIGHT = 8
"""Transactions under way at once: etcd reaches its throughput with several in flight."""

PARTS_BESIDE = 1
"""Commits under way beside which less than a whole group waits: it goes with the end of one at the latest, and has
grown by then. Each transaction costs etcd, and whoever waits for it, much the same however little is in it."""

REFUSED_PAUSE = (0.5, 10.0)
"""Seconds of back-off, first and longest, while etcd refuses reports (a role that was revoked, say)."""
_FAILED = "Cannot write pending %s to etcd; retrying with back-off: %s"

Answer: TypeAlias = "Callable[[int], None]"
"""Gets the revision at which a write was applied, 0 where its fence was gone."""


class Reporter:
    """Commits guarded writes in groups. ``lost`` ends it: nothing is written under a session that is over."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        lost: asyncio.Future[Any],
        log: ContextLogger,
        rejected_writes: RejectedWrites,
        limits: Limits = DEFAULT,
        meter: Meter = NO_METER,
        what: str = "reports",
    ) -> None:
        self._meter = meter
        self._client = client
        self._lost = lost
        self._log = log
        self._what = what
        self._limits = limits
        self._rejected_writes = rejected_writes
        self._keys = keys
        self._queue: deque[tuple[Guarded, Answer]] = deque()
        self._group: list[tuple[Guarded, Answer]] = []
        """The next group, while it grows."""
        self._room = self._new_room()
        self._full = False
        self._in_flight: set[asyncio.Task[None]] = set()
        self._aside: set[asyncio.Task[None]] = set()
        """Retries of writes that etcd rejects as invalid, each alone."""
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
        """Wait until every submitted write is answered, or the session is lost.

        It does not wait for writes that etcd rejects as invalid.
        """
        idle = asyncio.ensure_future(self._idle.wait())
        try:
            await asyncio.wait({idle, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()

    def close(self) -> None:
        """Drop what is queued: the session is over."""
        self._queue.clear()
        self._group.clear()
        for commit in (*self._in_flight, *self._aside):
            commit.cancel()

    async def _applied(self, writes: list[Guarded]) -> list[int]:
        result = await self._client.commit(job_transitions.group(writes), until=self._lost)
        if result.succeeded:
            return [result.revision] * len(writes)
        alone = await self._client.commit(job_transitions.one_by_one(writes), until=self._lost)
        applied = [
            job_transitions.applied_at(write, answer, alone.revision) if isinstance(answer, TxnResult) else 0
            for write, answer in zip(writes, alone.responses, strict=True)
        ]
        if not all(applied):
            came_late = "%d of %d %s came too late: their fences are gone"
            self._log.info(came_late, applied.count(0), len(writes), self._what)
        return applied

    def _pump(self) -> None:
        self._pumping = False
        while self._gather() and len(self._in_flight) < IN_FLIGHT and not self._lost.done():
            if len(self._in_flight) >= PARTS_BESIDE and not self._full:
                break  # part of a group waits for a commit under way, and grows meanwhile
            commit = asyncio.ensure_future(self._commit(self._next()))
            self._in_flight.add(commit)
            commit.add_done_callback(self._done)
        if self._group or self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def _gather(self) -> bool:
        """Fill the next group from the queue; False where there is nothing to send."""
        while self._queue and not self._full:
            if self._room.add(job_transitions.alone(self._queue[0][0])):
                self._group.append(self._queue.popleft())
                self._full = len(self._group) >= self._limits.reports or self._room.full
            else:
                self._full = True
        return bool(self._group)

    def _next(self) -> list[tuple[Guarded, Answer]]:
        """The next group, as far as its writes do not conflict; the rest is queued again."""
        count = independent_count(self._room.parts)
        group, rest = self._group[:count], self._group[count:]
        self._queue.extendleft(reversed(rest))
        self._group, self._full, self._room = [], False, self._new_room()
        return group

    def _new_room(self) -> Room:
        """One by one, a group has one entry more than its longest list (T1)."""
        return Room(most=MAX_OPERATIONS - 1)

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
            except MalformedRequest as error:
                if len(group) == 1:
                    self._set_aside(*group[0], error)
                    return
                half = len(group) // 2
                await self._commit(group[:half])
                await self._commit(group[half:])
                return
            except DistopError as error:
                # Nobody else can write these, so they are kept for as long as the session lives.
                if self._lost.done():
                    return
                self._log.error(_FAILED, self._what, describe(error), extra={"error": error})
                await asyncio.wait([self._lost], timeout=backoff.pause())
        self._answer(group, applied)

    def _answer(self, group: list[tuple[Guarded, Answer]], applied: list[int]) -> None:
        late = applied.count(0)
        self._meter.reported(len(applied) - late, late)
        for (_, answer), ok in zip(group, applied, strict=True):
            answer(ok)

    def _set_aside(self, write: Guarded, answer: Answer, error: MalformedRequest) -> None:
        task = asyncio.ensure_future(self._insist(write, answer, error))
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    async def _insist(self, write: Guarded, answer: Answer, error: MalformedRequest) -> None:
        """Retry a write that etcd rejects.

        A limit of etcd may be raised, or the write's fence may have gone.
        """
        op, this = self._operation(write), object()  # one of several writes of the operation, or of its job
        try:
            while not self._lost.done():
                pause = self._rejected_writes.refused(op, self._what, error, this)
                await asyncio.wait([self._lost], timeout=pause)
                try:
                    applied = await self._applied([write])
                except MalformedRequest as again:
                    error = again
                except DistopError as other:
                    if not self._lost.done():
                        self._log.error(_FAILED, self._what, describe(other), extra={"error": other})
                else:
                    self._answer([(write, answer)], applied)
                    return
        finally:
            # Also where this role ends first: then another node sends the write.
            self._rejected_writes.settled(op, self._what, this)

    def _operation(self, write: Guarded) -> str:
        """The operation that a write concerns, or its key."""
        ref = self._keys.parse(write.guard.key).ref
        return str(ref) if ref is not None else write.guard.key
