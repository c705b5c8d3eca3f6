"""Group commit of job reports: outcomes, retries, releases and checkpoints.

Each report is guarded by its own fence. Writes that arrive together, or while a commit is in flight, share a
transaction if they do not conflict (``protocol.transaction_groups``). A refused group is sent once more as nested
transactions, each decided alone. A report that is refused then is no longer ours, and is dropped (I36). A group that
etcd rejects as invalid is split until the single rejected write is found; that write is set aside, and retried with
back-off.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from distop.daemon.meter import NO_METER, Meter
from distop.errors import DistopError, MalformedRequest, describe
from distop.protocol import job_transitions
from distop.protocol.transaction_groups import Room, independent_count
from distop.protocol.txn import MAX_OPERATIONS, TxnResult
from distop.runtime.backoff import Backoff
from distop.store.group_commit import GroupCommit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distop.daemon.incarnation_context import Context
    from distop.protocol.job_transitions import Guarded

IN_FLIGHT = 8
"""Maximum concurrent transactions: etcd reaches its throughput with several in flight."""

REFUSED_PAUSE = (0.5, 10.0)
"""Seconds of back-off, first and longest, while etcd refuses reports, for example if a role was revoked."""
_FAILED = "Cannot write pending %s to etcd; retrying with back-off: %s"

Answered: TypeAlias = "Callable[[int], None]"
"""Called with the revision at which a write was applied; 0: it was refused, because its fence was gone."""
Write: TypeAlias = "tuple[Guarded, Answered]"


class _ReportGroup:
    """Writes that share a transaction, unless they conflict."""

    def __init__(self, most: int) -> None:
        self.items: list[Write] = []
        self._most = most
        self._room = Room(most=MAX_OPERATIONS - 1)
        """Committed one by one, a group needs one entry more than its longest list (T1)."""

    def add(self, item: Write) -> bool:
        if not self._room.add(job_transitions.alone(item[0])):
            return False
        self.items.append(item)
        return True

    @property
    def full(self) -> bool:
        return len(self.items) >= self._most or self._room.full


class Reporter:
    """Commits guarded writes in groups, until the session is lost. ``what``: names the writes in messages."""

    def __init__(self, ctx: Context, what: str = "reports", meter: Meter = NO_METER) -> None:
        self._meter = meter
        self._client = ctx.client
        self._lost = ctx.lost
        self._log = ctx.log
        self._what = what
        self._limits = ctx.limits
        self._rejected_writes = ctx.rejected_writes
        self._keys = ctx.keys
        self._commits: GroupCommit[Write] = GroupCommit(self._commit, self._new_group, self._failed, most=IN_FLIGHT)
        ctx.lost.add_done_callback(lambda _: self._commits.stop())
        self._aside: set[asyncio.Task[None]] = set()
        """Retries of writes that etcd rejects as invalid, each alone."""

    def submit(self, writes: Iterable[Write]) -> None:
        """Queue writes. The callback of each is called once.

        Writes that are submitted in the same turn of the loop share a transaction: ends of several operations arrive in
        one message.
        """
        self._commits.add(writes)

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
        idle = asyncio.ensure_future(self._commits.drained())
        try:
            await asyncio.wait({idle, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()

    def close(self) -> None:
        """Drop the queued writes: the session has ended."""
        self._commits.close()
        for retry in self._aside:
            retry.cancel()

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
            came_late = "Dropping %d of %d %s: etcd refused them, because their fences are gone"
            self._log.info(came_late, applied.count(0), len(writes), self._what)
        return applied

    def _new_group(self) -> _ReportGroup:
        return _ReportGroup(self._limits.reports)

    def _failed(self, error: BaseException) -> None:
        if not self._lost.done():
            self._log.error("Unexpected error; dropping a group of pending %s: %s", self._what, error)

    async def _commit(self, group: list[Write]) -> Sequence[Write]:
        """Commit those of a group that do not conflict; the others are sent next."""
        count = independent_count([job_transitions.alone(write) for write, _ in group])
        await self._write(group[:count])
        return group[count:]

    async def _write(self, group: list[Write]) -> None:
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
                await self._write(group[:half])
                await self._write(group[half:])
                return
            except DistopError as error:
                # No other process can write these, so they are retried until the session ends.
                if self._lost.done():
                    return
                self._log.error(_FAILED, self._what, describe(error), extra={"error": error})
                await asyncio.wait([self._lost], timeout=backoff.pause())
        self._answer(group, applied)

    def _answer(self, group: list[Write], applied: list[int]) -> None:
        late = applied.count(0)
        self._meter.reported(len(applied) - late, late)
        for (_, answer), ok in zip(group, applied, strict=True):
            answer(ok)

    def _set_aside(self, write: Guarded, answer: Answered, error: MalformedRequest) -> None:
        task = asyncio.ensure_future(self._insist(write, answer, error))
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    async def _insist(self, write: Guarded, answer: Answered, error: MalformedRequest) -> None:
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
            # Also if this role ends first: then another node sends the write.
            self._rejected_writes.settled(op, self._what, this)

    def _operation(self, write: Guarded) -> str:
        """The operation that a write concerns, or its key."""
        ref = self._keys.parse(write.guard.key).ref
        return str(ref) if ref is not None else write.guard.key
